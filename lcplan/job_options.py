"""What a job does besides its plan: data, tokenizer, optimizer settings. Presets and job folders share them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lcplan._record import Record

Device = Literal["gpu", "cpu"]
Init = Literal["pretrained", "random"]


class DataSource(Record):
    """Where the job takes its texts from."""

    kind: Literal["files", "hub", "python-docs"]
    """``python-docs``: the help topics that every Python ships, for trying things out without a network."""
    paths: tuple[str, ...] = ()
    name: str | None = None
    """Hub dataset; streamed."""
    config: str | None = None
    split: str = "train"
    text_column: str = "text"


class TokenizerSource(Record):
    """The model's own tokenizer, or a small one trained on the data."""

    kind: Literal["pretrained", "train-bpe"]
    id: str | None = None
    """Hub id or folder of a pretrained tokenizer."""
    revision: str | None = None
    vocab_size: int | None = Field(default=None, gt=0)


class TrainingOptions(Record):
    """What the optimizer does; names are those of transformers' TrainingArguments."""

    learning_rate: float = Field(default=1e-5, gt=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_steps: int | None = Field(default=None, gt=0)
    """None trains for num_train_epochs."""
    num_train_epochs: float = Field(default=1.0, gt=0)
    seed: int = Field(default=42, ge=0)
    save_strategy: Literal["no", "steps", "epoch"] = "no"
    """When to write a checkpoint to resume from."""
    save_steps: int = Field(default=500, gt=0)
    save_total_limit: int | None = Field(default=2, gt=1)
    """Newest checkpoints that stay; at least two, so that one is whole while another is written. None keeps all."""
    hang_timeout_s: float | None = Field(default=None, gt=0)
    """A step that takes longer ends the job; None: ten times the slowest so far, at least ten minutes."""
    save_model: bool = True
    """Write the trained model at the end."""
