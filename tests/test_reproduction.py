"""A plan's command line gives that plan again."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from lcplan.cli.plan_options import read_job
from lcplan.hardware import load_gpu
from lcplan.model_loading import load_model
from lcplan.reproduction import command_line, plan_flags
from lcplan.train_plan import TrainPlan

JOBS: list[tuple[list[str], list[str]]] = [
    (["Qwen/Qwen3-8B", "--max-length", "1Mi", "--gpu", "h100-80gb", "--num-gpus", "8", "--cp-size", "8"], []),
    (["--preset", "qwen3-8b-1m"], ["--no-offload-activations", "--cp-size", "4", "--dp-shard-size", "2"]),
    (["--preset", "qwen3-4b-128k"], ["--activation-checkpointing", "none", "--host-memory", "1TB"]),
    (["--preset", "qwen3-4b-1m-4gpu"], ["--num-gpus", "2", "--gpus-per-node", "2", "--cp-size", "2"]),
    (
        ["Qwen/Qwen3-4B", "--max-length", "32Ki", "--gpu", "h200", "--num-gpus", "4"],
        ["--backend", "deepspeed", "--zero-stage", "2", "--offload-optimizer"],
    ),
    (
        ["Qwen/Qwen3-4B", "--max-length", "32Ki", "--gpu", "h200"],
        ["--lora-r", "16", "--lora-dropout", "0.1", "--quantize", "nf4", "--scored-fraction", "0.25"],
    ),
    (
        ["Qwen/Qwen3-4B", "--max-length", "32Ki", "--gpu", "h200", "--num-gpus", "2"],
        ["--no-reshard-after-forward", "--optim", "adamw_torch", "--rope", "yarn:4"],
    ),
]


@pytest.mark.parametrize(("job", "flags"), JOBS)
def test_the_flags_give_the_plan_again(lcplan, job: list[str], flags: list[str]) -> None:
    origin = job[:2] if job[0].startswith("--") else job[:1]
    preset = job[1] if job[0] == "--preset" else None
    given: dict[str, Any] = json.loads(lcplan("estimate", *job, *flags, "--json").out)
    found = read_job(None if preset else job[0], preset, None, {}, trust_remote_code=False) if preset else None
    plan = TrainPlan(**given["plan"])
    spec = load_model(given["model"]["id"])
    base = dict(found.preset.plan) if found and found.preset else {}
    words = plan_flags(spec, plan, load_gpu(plan.gpu), base)
    again = shlex.split(command_line("estimate", [*origin, *words]))
    assert json.loads(lcplan(*again[1:], "--json").out)["plan"] == given["plan"]
    # as few as give it: none of them can be left out, so none is a default
    assert "--dtype" not in words
    assert "--loss" not in words


def test_words_of_a_user_are_no_shell() -> None:
    assert shlex.split(command_line("estimate", ["my model; rm -rf $HOME"])) == [
        "lcplan", "estimate", "my model; rm -rf $HOME",
    ]  # fmt: skip
