"""``lcplan recommend``: what would make it fit."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lcplan.cli.plan_options import (
    ConfigOption,
    JsonOption,
    ModelArgument,
    PresetOption,
    TrustOption,
    UnitsOption,
    read_base,
    read_spec,
    with_plan_flags,
)
from lcplan.errors import InputError

SEARCHED = ("loss", "activation_checkpointing", "offload_activations", "cp_size", "dp_shard_size", "backend")
"""Plan fields of a preset that the search chooses anew."""


@with_plan_flags
def command(
    given: dict[str, Any],
    model: ModelArgument = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    longest: Annotated[bool, typer.Option("--longest", help="Find the largest max_length that fits.")] = False,
    json: JsonOption = False,
    units: UnitsOption = "GiB",
    trust_remote_code: TrustOption = False,
) -> None:
    """The least invasive plan that fits, with a reason for each lever. Exit 0 if one does, 1 if none.

    Example: lcplan recommend Qwen/Qwen3-8B --max-length 1048576 --gpu h100-80gb --num-gpus 8
    """
    from lcplan.cli.output import check_units, print_json
    from lcplan.hardware import load_gpu
    from lcplan.recommendation import Goal, recommend
    from lcplan.reports.terminal import print_recommendation

    size_units = check_units(units)
    base = read_base(model, preset, config)
    spec = read_spec(model, base, trust_remote_code=trust_remote_code)
    decided = {k: v for k, v in (base.plan if base else {}).items() if k not in SEARCHED}
    fixed = decided | given
    length = fixed.pop("max_length", None)
    if longest and "max_length" in given:
        raise InputError("two-lengths", "--longest looks for a length, --max-length gives one. Use one of them.")
    if not longest and length is None:
        raise InputError("no-length", "No length is given. Use --max-length N, or --longest to find the largest.")
    if "gpu" not in fixed:
        raise InputError("missing-value", "--gpu is not given. Add --gpu h100-80gb (`lcplan list gpus`).")
    if base is not None and fixed["gpu"] == base.device == "cpu":
        raise InputError("cpu-preset", f"{base.name} is a CPU job; name the GPU to plan it for with --gpu.")
    gpu = load_gpu(fixed.pop("gpu"))
    num_gpus = fixed.pop("num_gpus", 1)
    if num_gpus < 1:
        raise InputError("bad-value", f"--num-gpus {num_gpus} is not a positive whole number.")
    goal = Goal(max_length=None if longest else length, gpu=gpu.id, num_gpus=num_gpus, fixed=fixed)
    answer = recommend(spec, goal, gpu, units=size_units)
    if json:
        print_json(answer)
    else:
        print_recommendation(answer, units=size_units)
    raise typer.Exit(0 if answer.plans else 1)
