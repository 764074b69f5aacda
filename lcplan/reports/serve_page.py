"""The files of the page of ``lcplan serve``: one document, one style sheet, one script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lcplan import catalog
from lcplan._record import Record
from lcplan.model_spec import ModelSpec
from lcplan.pictures import STACK
from lcplan.reports.html import environment
from lcplan.reports.plots import STYLE
from lcplan.reports.wording import group_words
from lcplan.train_plan import TrainPlan

GPUS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of GPUs on the slider: parts of a node of eight, and whole ones."""
LENGTHS = tuple(sorted(size << k for size in (2, 3) for k in range(9, 24) if (size << k) <= 1 << 24))
"""Lengths on the slider: powers of two from 1,024 on, and what lies half way between two of them."""


class Choice(Record):
    """A control with a closed set of values; the empty one is left to the stack."""

    name: str
    label: str
    values: tuple[str, ...]


class Number(Record):
    """A control with a whole number."""

    name: str
    label: str
    least: int = 1


class Switch(Record):
    """A control that is on or off."""

    name: str
    label: str


CHOICES = (
    Choice(name="activation_checkpointing", label="activation checkpointing", values=("full", "selective", "none")),
    Choice(name="loss", label="loss", values=("chunked", "chunked-256", "full")),
    Choice(
        name="optim",
        label="optimizer",
        values=("adamw_torch_fused", "adamw_torch", "adamw_torch_8bit", "adamw_bnb_8bit", "adafactor", "sgd"),
    ),
    Choice(name="backend", label="backend", values=("", "single", "ddp", "fsdp2", "deepspeed")),
    Choice(name="zero_stage", label="ZeRO stage (deepspeed)", values=("", "1", "2", "3")),
    Choice(name="cp_comm_strategy", label="ring exchange", values=("", "allgather", "alltoall")),
    Choice(name="cp_merge_dtype", label="ring sums in", values=("float32", "bfloat16")),
    Choice(name="kernels", label="kernels", values=("none", "liger")),
    Choice(name="quantize", label="quantize (with LoRA)", values=("none", "nf4")),
)
NUMBERS = (
    Number(name="per_device_train_batch_size", label="sequences a rank"),
    Number(name="gradient_accumulation_steps", label="accumulation steps"),
    Number(name="checkpoint_every_n_layers", label="checkpoint every n layers"),
    Number(name="cp_head_chunks", label="ring attention in parts of the heads"),
    Number(name="mlp_tile_size", label="tokens of an MLP tile (empty: whole)"),
    Number(name="lora_r", label="LoRA rank (empty: full training)"),
)
SWITCHES = (
    Switch(name="offload_activations", label="offload activations"),
    Switch(name="offload_prefetch", label="offload a layer ahead"),
    Switch(name="activation_offloading", label="TRL's activation offloading"),
    Switch(name="offload_params", label="offload parameters"),
    Switch(name="offload_optimizer", label="offload optimizer (deepspeed)"),
)
SLIDERS = ("max_length", "num_gpus", "cp_size", "sp_size")
ELSEWHERE = ("dp_shard_size", "dp_replicate_size", "gpus_per_node", "gpu")
"""Fields that follow from the sliders, or have a control of their own."""


def page_files(
    models: Sequence[str], spec: ModelSpec, plan: TrainPlan, asked: Mapping[str, Any]
) -> dict[str, tuple[str, bytes]]:
    """Path -> content type and content.

    Args:
        models: ids on offer
        spec: the model shown first
        plan: the plan shown first
        asked: what was set of it; fields without a control stay as they were asked for
    """
    jinja = environment()
    controls = {control.name for control in (*CHOICES, *NUMBERS, *SWITCHES)} | {*SLIDERS, *ELSEWHERE}
    kept = {name: _text(value) for name, value in asked.items() if name not in controls and value is not None}
    if "host_memory_bytes" in kept:
        kept["host_memory"] = f"{kept.pop('host_memory_bytes')}B"
    groups = {group: {"title": group_words(group), "colour": STYLE.get(group, ("#ffffff", ""))[0]} for group in STACK}
    settings = {"lengths": LENGTHS, "gpus": sorted({*GPUS, plan.num_gpus}), "groups": groups}
    document = jinja.get_template("serve.html.j2").render(
        models=models,
        gpus=catalog.gpu_ids(),
        spec=spec,
        plan=plan,
        asked=asked,
        kept=kept,
        choices=CHOICES,
        numbers=NUMBERS,
        switches=SWITCHES,
        lengths=LENGTHS,
    )
    script = f"const SETTINGS = {json.dumps(settings)};\n" + _source("serve.js")
    return {
        "/": ("text/html; charset=utf-8", document.encode()),
        "/page.css": ("text/css; charset=utf-8", (_source("style.css") + _source("serve.css")).encode()),
        "/page.js": ("text/javascript; charset=utf-8", script.encode()),
    }


def _source(name: str) -> str:
    from importlib.resources import files

    return (files("lcplan.reports") / "templates" / name).read_text("utf-8")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
