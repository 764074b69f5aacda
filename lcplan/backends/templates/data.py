"""Texts joined end to end and cut into rows of exactly ``max_length`` tokens: no padding, no truncated text.

Every text is followed by one end-of-text token; a row may hold the end of one text and the start of the
next. What is left at the end of the data and does not fill a row is dropped.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
END_OF_TEXT = "<|endoftext|>"
READ_CHARACTERS = 1 << 20
"""A text file is read and tokenized in pieces of about this size, cut at a line end."""
TEXTS_PER_BATCH = 16
BPE_SAMPLE_CHARACTERS = 4_000_000
"""The small tokenizer is trained on this much text at most."""


class DataError(Exception):
    """The dataset is missing, unreadable or too short; the message says which and what to do."""


def find_files(paths: Iterable[str]) -> list[Path]:
    """The files that ``paths`` name; a folder stands for every text file below it, in order of name."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in TEXT_SUFFIXES and p.is_file())
            if not inside:
                raise DataError(f"{path} holds no {', '.join(TEXT_SUFFIXES)} file. Point --data at one that does.")
            found += inside
        elif not path.is_file():
            raise DataError(f"{path} does not exist. Give a file, a folder or the name of a Hub dataset.")
        elif path.suffix.lower() not in TEXT_SUFFIXES:
            raise DataError(f"{path} is not a {', '.join(TEXT_SUFFIXES)} file. Convert it, or name one that is.")
        else:
            found.append(path)
    return found


def read_pieces(source: dict[str, Any]) -> Iterator[str | None]:
    """The source's texts in pieces of bounded size; ``None`` marks the end of a text."""
    if source["kind"] == "python-docs":
        yield from _whole_texts(_python_docs())
    elif source["kind"] == "hub":
        yield from _whole_texts(_hub_texts(source))
    else:
        for path in find_files(source["paths"]):
            yield from _file_pieces(path, source["text_column"])


def _file_pieces(path: Path, column: str) -> Iterator[str | None]:
    try:
        if path.suffix.lower() == ".txt":
            yield from _text_file_pieces(path)
            yield None
        elif path.suffix.lower() == ".jsonl":
            yield from _whole_texts(_jsonl_texts(path, column))
        else:
            yield from _whole_texts(_parquet_texts(path, column))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}). Convert it first.") from None


def _python_docs() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def _whole_texts(texts: Iterable[str]) -> Iterator[str | None]:
    for text in texts:
        if text:
            yield text
            yield None


def _text_file_pieces(path: Path) -> Iterator[str]:
    rest = ""
    with path.open(encoding="utf-8") as file:
        while block := file.read(READ_CHARACTERS):
            head, line_end, rest = (rest + block).rpartition("\n")
            if line_end:
                yield head + line_end
            elif len(rest) >= READ_CHARACTERS:
                yield rest
                rest = ""
    if rest:
        yield rest


def _column(record: Any, column: str, where: str) -> str:
    text = record.get(column) if isinstance(record, dict) else None
    if isinstance(text, str):
        return text
    keys = ", ".join(map(str, record)) if isinstance(record, dict) else "none"
    raise DataError(f"{where} has no text in column {column!r} (columns: {keys}). Name the column with --text-column.")


def _jsonl_texts(path: Path, column: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{path}, line {number}, is not JSON: {error.msg}.") from None
                yield _column(record, column, f"{path}, line {number},")


def _parquet_texts(path: Path, column: str) -> Iterator[str]:
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from None
    if column not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise DataError(f"{path} has no column {column!r} (columns: {names}). Name the column with --text-column.")
    for batch in file.iter_batches(batch_size=TEXTS_PER_BATCH, columns=[column]):
        for text in batch.column(0).to_pylist():
            yield _column({column: text}, column, f"a row of {path}")


def _hub_texts(source: dict[str, Any]) -> Iterator[str]:
    from datasets import load_dataset

    name, split = source["name"], source["split"]
    try:
        stream = load_dataset(name, source.get("config"), split=split, streaming=True)
    except Exception as error:
        raise DataError(f"the dataset {name!r} (split {split!r}) cannot be opened: {error}") from error
    for number, record in enumerate(stream, start=1):
        yield _column(record, source["text_column"], f"record {number} of {name}")


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
    for piece in read_pieces(source):
        if piece is not None:
            yield piece
            characters += len(piece)
        if characters >= BPE_SAMPLE_CHARACTERS:
            return


def read_tokens(source: dict[str, Any], tokenizer: Any) -> Iterator[list[int]]:
    """The token ids of the source, in order, with the end-of-text token after each text."""
    pieces = read_pieces(source)
    while batch := list(islice(pieces, TEXTS_PER_BATCH)):
        texts = [piece for piece in batch if piece is not None]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        tokens = iter(encoded)
        for piece in batch:
            yield next(tokens) if piece is not None else [tokenizer.eos_token_id]


def write_rows(
    source: dict[str, Any],
    tokenizer: Any,
    path: Path,
    *,
    max_length: int,
    min_rows: int,
    max_rows: int | None,
) -> dict[str, int]:
    """Write the rows to an Arrow file that datasets can map; one training step needs ``min_rows`` of them.

    Reading stops at ``max_rows``, so a large dataset is not tokenized beyond what the run will use.
    """
    import pyarrow as pa

    pending = array("i")
    num_rows = num_tokens = 0
    end, length, lengths = tokenizer.eos_token_id, 0, array("q")
    unfinished = path.with_name(path.name + ".unfinished")
    schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
    with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for ids in read_tokens(source, tokenizer):
            pending.extend(ids)
            num_tokens += len(ids)
            length += len(ids)
            if ids == [end]:  # the end of a text, which comes alone
                lengths.append(length)
                length = 0
            full_rows = len(pending) // max_length
            if max_rows is not None:
                full_rows = min(full_rows, max_rows - num_rows)
            if full_rows:
                writer.write_batch(pa.record_batch([_row_array(pending, full_rows, max_length)], schema=schema))
                pending = pending[full_rows * max_length :]
                num_rows += full_rows
            if num_rows == max_rows:
                break
    if num_rows < min_rows:
        unfinished.unlink()
        raise DataError(too_short(num_tokens, max_length=max_length, min_rows=min_rows))
    unfinished.replace(path)
    return {"num_rows": num_rows, "num_tokens": num_tokens, **length_summary(lengths, max_length=max_length)}


def length_summary(lengths: Sequence[int], *, max_length: int) -> dict[str, int]:
    """How long the texts are that were read whole, in tokens: number, 99th percentile, longest, longer than a row."""
    ordered = sorted(lengths)
    count = len(ordered)
    return {
        "num_texts": count,
        "text_p99": ordered[-(-99 * count // 100) - 1] if count else 0,
        "text_max": ordered[-1] if count else 0,
        "num_longer_texts": sum(length > max_length for length in ordered),
    }


def describe(made: dict[str, int], *, max_length: int, rows_per_step: int) -> str:
    """Rows, steps of one epoch, and how the texts compare with a row."""
    steps = made["num_rows"] // rows_per_step
    text = (
        f"Data: {made['num_rows']:,} rows of {max_length:,} tokens; {steps:,} steps an epoch of {rows_per_step:,} rows "
        f"({rows_per_step * max_length:,} tokens). {made['num_texts']:,} texts read whole"
    )
    if not made["num_texts"]:
        return text + "."
    text += f", 99% of at most {made['text_p99']:,} tokens, the longest {made['text_max']:,}"
    if made["num_longer_texts"]:
        return text + f"; {made['num_longer_texts']:,} are longer than a row and are cut."
    return text + "; every row joins several: no text is as long as max_length."


def _row_array(ids: array[int], num_rows: int, max_length: int) -> Any:
    import pyarrow as pa

    values = pa.Array.from_buffers(pa.int32(), num_rows * max_length, [None, pa.py_buffer(ids)])
    starts = pa.array(range(0, num_rows * max_length + 1, max_length), type=pa.int32())
    return pa.ListArray.from_arrays(starts, values)


def too_short(num_tokens: int, *, max_length: int, min_rows: int, bound: str = "") -> str:
    """What to say when the texts do not fill one step's rows; an upper bound says ``bound="at most "``."""
    rows = "row" if min_rows == 1 else "rows"
    return (
        f"the data holds {bound}{num_tokens:,} tokens, and one step needs {min_rows * max_length:,} "
        f"({min_rows:,} {rows} of {max_length:,}). Add text, or lower --max-length."
    )
