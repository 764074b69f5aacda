"""What a job does besides its plan: data, tokenizer, optimizer settings. Presets and job folders share them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lcplan._record import Record

Device = Literal["gpu", "cpu"]
Init = Literal["pretrained", "random"]
DataFormat = Literal["auto", "text", "input_ids", "labelled", "messages", "prompt-completion"]
"""``text`` and ``input_ids`` are joined end to end; of the others every example is a row."""


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
    format: DataFormat = "auto"
    """``auto`` looks at the first record's columns, in TRL's order."""


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
    lora_alpha: int | None = Field(default=None, gt=0)
    """Scale of the adapters is lora_alpha / lora_r; None is 2 x lora_r."""
    completion_only_loss: bool | None = None
    """Whether a prompt has no label; None is TRL's default: yes where examples have prompt and completion."""
    assistant_only_loss: bool = False
    """Whether of a chat the assistant's turns alone have labels; needs a chat template that marks them."""
    eval_rows: int | None = Field(default=None, gt=0)
    """Rows held out for evaluation, where the plan has one; None is one batch of every rank."""
    eval_steps: int = Field(default=500, gt=0)
    save_strategy: Literal["no", "steps", "epoch"] = "no"
    """When to write a checkpoint to resume from."""
    save_steps: int = Field(default=500, gt=0)
    save_total_limit: int | None = Field(default=2, gt=1)
    """Newest checkpoints that stay; at least two, so that one is whole while another is written. None keeps all."""
    hang_timeout_s: float | None = Field(default=None, gt=0)
    """A step that takes longer ends the job; None: ten times the slowest so far, at least ten minutes."""
    save_model: bool = True
    """Write the trained model at the end."""
