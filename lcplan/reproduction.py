"""The command line of a plan: flags that resolve to exactly that plan."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from lcplan.errors import PlanError
from lcplan.hardware import GpuSpec
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan, resolve
from lcplan.units import exact_bytes

ALWAYS = ("max_length", "gpu", "num_gpus")
"""Flags that are written even where a preset says the same."""


def plan_flags(spec: ModelSpec, plan: TrainPlan, gpu: GpuSpec, base: Mapping[str, Any] | None = None) -> list[str]:
    """As few flags as give ``plan`` when they are laid over ``base``, a preset's values.

    A flag is left out where the others resolve to the same plan without it.
    """
    kept = {name: value for name, value in plan.model_dump().items() if value is not None}
    under = dict(base or {})
    for name in [name for name in kept if name not in ALWAYS]:
        without = {other: value for other, value in kept.items() if other != name}
        try:
            same = resolve(spec, under | without, usual_gpus_per_node=gpu.gpus_per_node)[0] == plan
        except PlanError:
            same = False
        if same:
            kept = without
    named = [*ALWAYS, *(name for name in kept if name not in ALWAYS)]
    return [word for name in named for word in plan_flag(name, kept[name])]


def plan_flag(name: str, value: object) -> list[str]:
    """The words that set one plan field."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if name == "host_memory_bytes" and isinstance(value, int):
        return ["--host-memory", exact_bytes(value)]
    return [f"--{flag}", str(value)]


def command_line(command: str, words: list[str]) -> str:
    """``lcplan COMMAND ...`` as a POSIX shell reads it."""
    return shlex.join(["lcplan", command, *words])
