"""What a user names for a job: data, tokenizer, weights. Checked here, before anything is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from lcplan.backends.job import DataSource, ModelSource, TokenizerSource
from lcplan.backends.templates import data as job_data
from lcplan.errors import DataError, ModelError
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan

PYTHON_DOCS = "python-docs"
TRAINED_VOCAB_SIZE = 8192
"""Tokens of the small tokenizer that is trained where there is none, unless the model has fewer."""
WEIGHT_FILES = ("*.safetensors", "*.bin")
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def parse_data(
    text: str, *, text_column: str = "text", split: str = "train", config: str | None = None
) -> DataSource:
    """What ``--data`` names: ``python-docs``, a file or folder that exists, or else a Hub dataset."""
    if text == PYTHON_DOCS:
        return DataSource(kind="python-docs")
    path = Path(text).expanduser()
    if path.exists():
        return DataSource(kind="files", paths=(str(path.resolve()),), text_column=text_column)
    if not _HUB_NAME.fullmatch(text) or path.suffix.lower() in job_data.TEXT_SUFFIXES:
        raise DataError(
            "data-not-found",
            f"--data {text!r} does not exist. Give a .txt, .jsonl or .parquet file, a folder of them, or "
            "the name of a Hub dataset such as emozilla/pg19.",
        )
    return DataSource(kind="hub", name=text, config=config, split=split, text_column=text_column)


def check_data(source: DataSource, plan: TrainPlan) -> None:
    """Refuse files that are missing, and text that is too short however it is tokenized.

    A token is at least one byte and every text adds one token, so the size of text files bounds their tokens.
    The job counts exactly, before it loads the model.
    """
    if source.kind != "files":
        return
    try:
        found = job_data.find_files(source.paths)
    except job_data.DataError as error:
        raise DataError("data-not-found", str(error)) from None
    if any(path.suffix.lower() == ".parquet" for path in found):
        return  # compressed: its size says nothing
    most_tokens = sum(path.stat().st_size + 1 for path in found)
    min_rows = plan.per_device_train_batch_size * plan.dp_replicate_size * plan.dp_shard_size
    if most_tokens < min_rows * plan.max_length:
        message = job_data.too_short(
            most_tokens, max_length=plan.max_length, min_rows=min_rows, bound="at most "
        )
        raise DataError("data-too-short", message)


def model_source(
    model: ModelSpec, *, init: Literal["pretrained", "random"], weights: str | None, revision: str | None
) -> ModelSource:
    """Where the weights come from; a folder must hold some."""
    name = weights or model.id
    folder = Path(name).expanduser()
    if init == "pretrained" and folder.is_dir():
        if not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
            raise ModelError(
                "weights-missing",
                f"{folder} holds no {' or '.join(WEIGHT_FILES)} file. Name a saved model or a Hub id, "
                "or train from the config alone with --init random.",
            )
        name = str(folder.resolve())
    return ModelSource(id=name, init=init, revision=revision, config=model.config)


def tokenizer_source(
    model: ModelSource, *, asked: str | None, vocab_size: int, trained_size: int | None = None
) -> TokenizerSource:
    """The one asked for; the pretrained model's own; for random weights a small one trained on the data."""
    if asked is not None:
        folder = Path(asked).expanduser()
        return TokenizerSource(kind="pretrained", id=str(folder.resolve()) if folder.is_dir() else asked)
    if model.init == "pretrained":
        return TokenizerSource(kind="pretrained", id=model.id, revision=model.revision)
    return TokenizerSource(kind="train-bpe", vocab_size=min(trained_size or TRAINED_VOCAB_SIZE, vocab_size))
