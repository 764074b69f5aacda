"""The tokenizer that plan.json names, or a small one trained on the data; and how it writes examples.

Examples follow TRL: a chat goes through the tokenizer's chat template, a prompt has no label where a completion follows
it, and no text gets tokens that TRL would not give it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checks import JobError
from data import DataError, data_format, read_pieces, read_records, token_ids
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
END_OF_TEXT = "<|endoftext|>"
BPE_SAMPLE_CHARACTERS = 4_000_000
"""The small tokenizer is trained on this much text at most."""
IGNORED = -100
"""A label that is not scored."""


def load_tokenizer(job: dict[str, Any]) -> Any:
    """The tokenizer that plan.json names, or the one trained for this job."""
    source = job["tokenizer"]
    if source["kind"] == "train-bpe":
        return AutoTokenizer.from_pretrained(str(HERE / "tokenizer"))
    return AutoTokenizer.from_pretrained(source["id"], revision=source["revision"] or "main")


def make_tokenizer(job: dict[str, Any], vocab_size: int) -> Any:
    """Train the tokenizer where the plan says so, and refuse one that the model cannot embed."""
    source = job["tokenizer"]
    if source["kind"] == "train-bpe":
        trained = train_tokenizer(job["data"], min(source["vocab_size"] or vocab_size, vocab_size))
        trained.save_pretrained(str(HERE / "tokenizer"))
    tokenizer = load_tokenizer(job)
    if len(tokenizer) > vocab_size:
        raise JobError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model's vocab_size is {vocab_size:,}: "
            "some ids have no embedding. Name the model's own tokenizer with --tokenizer."
        )
    if tokenizer.eos_token_id is None:
        raise JobError("the tokenizer has no end-of-text token, which parts the texts. Name another with --tokenizer.")
    return tokenizer


def train_tokenizer(source: dict[str, Any], vocab_size: int) -> Any:
    """A small byte-level BPE trained on the start of the source: any text can be written with it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise DataError(
            f"a byte-level tokenizer needs more than {len(alphabet)} tokens, and the model has room for "
            f"{vocab_size}. Name a tokenizer with --tokenizer."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_sample(source), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def _sample(source: dict[str, Any]) -> Iterator[str]:
    characters = 0
    for text in _texts(source):
        yield text
        characters += len(text)
        if characters >= BPE_SAMPLE_CHARACTERS:
            return


def _texts(source: dict[str, Any]) -> Iterator[str]:
    """Whatever text the data has."""
    kind = data_format(source)
    if kind == "text":
        yield from (piece for piece in read_pieces(source) if isinstance(piece, str))
    elif kind == "prompt-completion":
        for record in read_records(source):
            yield from (value for value in (record.get("prompt"), record.get("completion")) if isinstance(value, str))
    else:
        raise DataError(
            f"a tokenizer cannot be trained on data of format {kind}. Name the one that goes with it with --tokenizer."
        )


def encode_example(
    record: Any, kind: str, tokenizer: Any, training: dict[str, Any], where: str
) -> tuple[list[int], list[int]]:
    """Token ids and labels of an example, as TRL's SFTTrainer prepares them.

    Raises:
        DataError: for a record that lacks a column, or a chat template that cannot mark the assistant's turns.
    """
    if kind == "labelled":
        return _labelled(record, training, where)
    if kind == "messages":
        ids, assistant = _chat(tokenizer, record, _messages(record, where), training)
        return ids, _labels(ids, assistant)
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        end = "" if completion.endswith(tokenizer.eos_token) else tokenizer.eos_token
        start, ids = tokenizer([prompt, prompt + completion + end])["input_ids"]
        assistant = None
    elif isinstance(prompt, list) and isinstance(completion, list):
        start, _ = _chat(tokenizer, record, _renamed(prompt), {**training, "assistant_only_loss": False}, prompt=True)
        ids, assistant = _chat(tokenizer, record, [*_renamed(prompt), *_renamed(completion)], training)
    else:
        raise DataError(f"{where} has no prompt and completion that are both texts or both lists of messages.")
    if training["completion_only_loss"] is False:
        return ids, _labels(ids, assistant)
    shared = _common_prefix(start, ids)
    return ids, _labels(ids, assistant, [0] * shared + [1] * (len(ids) - shared))


def _labelled(record: Any, training: dict[str, Any], where: str) -> tuple[list[int], list[int]]:
    ids = token_ids(record, where)
    if "labels" in record:
        labels = token_ids(record, where, "labels")
    else:
        masks = [record["assistant_masks"]] if "assistant_masks" in record else []
        if training["completion_only_loss"] and "completion_mask" in record:
            masks.append(record["completion_mask"])
        labels = _labels(ids, *masks)
    if len(labels) != len(ids):
        raise DataError(f"{where} has {len(ids)} input_ids and {len(labels)} labels.")
    return ids, labels


def _labels(ids: list[int], *masks: list[int] | None) -> list[int]:
    given = [mask for mask in masks if mask is not None]
    return [token if all(bits) else IGNORED for token, *bits in zip(ids, *given, strict=True)]


def _common_prefix(first: list[int], second: list[int]) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


def _messages(record: Any, where: str) -> list[dict[str, Any]]:
    messages = record.get("messages", record.get("conversations")) if isinstance(record, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages) or not messages:
        raise DataError(f"{where} has no list of messages in column 'messages' or 'conversations'.")
    return _renamed(messages)


def _renamed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """ShareGPT's keys under the names of chat templates."""
    names = {"from": "role", "value": "content"}
    return [{names.get(key, key): value for key, value in message.items()} for message in messages]


def _chat(
    tokenizer: Any,
    record: dict[str, Any],
    messages: list[dict[str, Any]],
    training: dict[str, Any],
    *,
    prompt: bool = False,
) -> tuple[list[int], list[int] | None]:
    """A chat's tokens, and which are the assistant's where only they have labels."""
    if tokenizer.chat_template is None:
        raise DataError(
            "the data are chats and the tokenizer has no chat template. Name the tokenizer of an instruct model with "
            "--tokenizer."
        )
    tools = record.get("tools")
    marked = training["assistant_only_loss"]
    encoded = tokenizer.apply_chat_template(
        messages,
        tools=json.loads(tools) if isinstance(tools, str) else tools,
        chat_template=training_template(tokenizer) if marked else None,
        add_generation_prompt=prompt,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=marked,
        **record.get("chat_template_kwargs") or {},
    )
    if not marked:
        return encoded["input_ids"], None
    if 1 not in encoded["assistant_masks"]:
        raise DataError(
            "the chat template marks no token as the assistant's, which --assistant-only-loss needs. Use a template "
            "with {% generation %}, or leave it out."
        )
    return encoded["input_ids"], encoded["assistant_masks"]


def training_template(tokenizer: Any) -> str | None:
    """TRL's version of a known chat template, which marks the assistant's turns; None where the own one does."""
    from trl.chat_template_utils import get_training_chat_template

    if "{% generation %}" in tokenizer.chat_template:
        return None
    try:
        return get_training_chat_template(tokenizer)
    except ValueError as error:
        raise DataError(f"--assistant-only-loss: {error} Leave it out, or name another tokenizer.") from None
