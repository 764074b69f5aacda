"""What a user names for a job: data, tokenizer, weights. Checked here, before anything is written."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lcplan.backends.job import ModelSource
from lcplan.backends.templates import data as job_data
from lcplan.errors import DataError, ModelError
from lcplan.job_options import DataFormat, DataSource, Init, TokenizerSource
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan

PYTHON_DOCS = "python-docs"
TRAINED_VOCAB_SIZE = 8192
"""Tokens of the small tokenizer that is trained where there is none, unless the model has fewer."""
WEIGHT_FILES = ("*.safetensors", "*.bin")
_HUB_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")


def parse_data(
    text: str,
    *,
    text_column: str = "text",
    format: DataFormat = "auto",
    split: str = "train",
    config: str | None = None,
) -> DataSource:
    """What ``--data`` names: ``python-docs``, a file or folder that exists, or else a Hub dataset."""
    if text == PYTHON_DOCS:
        return DataSource(kind="python-docs")
    path = Path(os.path.expanduser(text))  # noqa: PTH111  (pathlib raises for an unknown user, and
    if text.strip() and os.path.exists(path):  # noqa: PTH110  for a name that is too long)
        return DataSource(kind="files", paths=(str(path.resolve()),), text_column=text_column, format=format)
    if not _HUB_NAME.fullmatch(text) or path.suffix.lower() in job_data.TEXT_SUFFIXES:
        raise DataError(
            "data-not-found",
            f"--data {text!r:.200} does not exist. Give a .txt, .jsonl or .parquet file, a folder of them, or "
            "the name of a Hub dataset such as emozilla/pg19.",
        )
    return DataSource(kind="hub", name=text, config=config, split=split, text_column=text_column, format=format)


def check_data(source: DataSource, plan: TrainPlan) -> None:
    """Refuse files that are missing, examples that would be padded, and text too short however it is tokenized.

    A token is at least one byte and every text adds one token, so the size of text files bounds their tokens.
    The job counts exactly, before it loads the model.
    """
    if source.kind != "files":
        return
    try:
        found = job_data.find_files(source.paths)
        if any(path.suffix.lower() == ".parquet" for path in found):
            return  # compressed: its size says nothing, and reading it needs the train extra
        kind = job_data.data_format(source.model_dump(mode="json"))
        job_data.check_batches(kind, batch_size=plan.per_device_train_batch_size, padded=plan.padding)
    except job_data.DataError as error:
        raise DataError("data-not-usable", str(error)) from None
    if kind != "text":
        return
    most_tokens = sum(path.stat().st_size + 1 for path in found)
    rows_at_once = plan.per_device_train_batch_size * plan.dp_replicate_size * plan.dp_shard_size
    min_rows = rows_at_once * plan.gradient_accumulation_steps
    if most_tokens < min_rows * plan.max_length:
        message = job_data.too_short(most_tokens, max_length=plan.max_length, min_rows=min_rows, bound="at most ")
        raise DataError("data-too-short", message)


def _existing(name: str) -> Path | None:
    """The file or folder that a name is, if there is one; Hub ids and what no file system takes are none."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None


def model_source(model: ModelSpec, *, init: Init, revision: str | None = None) -> ModelSource:
    """Where the weights come from; the folder of a model named by its path must hold some."""
    name = model.id
    path = _existing(name)
    folder = path.parent if path is not None and path.is_file() else path
    if init == "pretrained" and folder is not None and (folder / "config.json").is_file():
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
        path = _existing(asked)
        name = str(path.resolve()) if path is not None and path.is_dir() else asked
        return TokenizerSource(kind="pretrained", id=name)
    if model.init == "pretrained":
        return TokenizerSource(kind="pretrained", id=model.id, revision=model.revision)
    return TokenizerSource(kind="train-bpe", vocab_size=min(trained_size or TRAINED_VOCAB_SIZE, vocab_size))
