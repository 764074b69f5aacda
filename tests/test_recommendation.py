from __future__ import annotations

from typing import Any

import pytest

from lcplan.errors import PlanError
from lcplan.hardware import GpuSpec, load_gpu
from lcplan.model_loading import load_model
from lcplan.model_spec import ModelSpec
from lcplan.recommendation import Goal, Recommendation, recommend
from tests.conftest import tiny_spec


def small_gpu(usable: int) -> GpuSpec:
    return load_gpu("h100-80gb").model_copy(update={"usable_bytes": usable})


def ask(spec: ModelSpec, gpu: GpuSpec, **goal: Any) -> Recommendation:
    return recommend(spec, Goal(gpu=gpu.id, **goal), gpu)


def test_the_guides_plan() -> None:
    answer = ask(load_model("Qwen/Qwen3-8B"), load_gpu("h100-80gb"), max_length=2**20, num_gpus=8)
    best = answer.plans[0]
    assert best.levers == (
        "chunked-loss", "yarn", "activation-checkpointing", "offload-activations", "context-parallel",
    )  # fmt: skip
    assert best.plan.cp_size == 8
    assert best.plan.offload_activations
    assert best.report.rope is not None
    assert best.report.rope.factor == 32
    assert best.report.fits
    assert len(best.why) == len(best.levers)
    for lever, reason in zip(best.levers, best.why, strict=True):
        assert reason.startswith(f"{lever}: ")
    peaks = [step.device_peak_bytes for step in best.steps]
    assert peaks == sorted(peaks, reverse=True), "no lever of the table raises the peak"
    assert peaks[-1] == best.report.device_peak_bytes
    assert not best.steps[-2].fits
    assert best.steps[-1].fits


def test_nothing_is_pulled_that_is_not_needed() -> None:
    answer = ask(load_model("Qwen/Qwen3-0.6B"), load_gpu("h200"), max_length=1024)
    assert answer.plans[0].levers == ("chunked-loss",)
    assert answer.plans[0].plan.activation_checkpointing == "none"


def test_what_the_user_fixed_stays() -> None:
    goal = Goal(max_length=1024, gpu="h200", fixed={"activation_checkpointing": "full", "optim": "adamw_torch"})
    plan = recommend(load_model("Qwen/Qwen3-0.6B"), goal, load_gpu("h200")).plans[0].plan
    assert (plan.activation_checkpointing, plan.optim) == ("full", "adamw_torch")


def test_the_longest_length_fits_and_one_more_multiple_does_not() -> None:
    spec, gpu = load_model("Qwen/Qwen3-4B"), load_gpu("h100-80gb")
    plan = ask(spec, gpu, num_gpus=2).plans[0].plan
    multiple = plan.length_multiple
    assert plan.max_length % multiple == 0
    fixed = {"cp_size": plan.cp_size, "offload_activations": True}
    beyond = Goal(max_length=plan.max_length + multiple, gpu=gpu.id, num_gpus=2, fixed=fixed)
    assert recommend(spec, beyond, gpu).plans == ()


def test_a_scaling_model_goes_no_further_than_it_reaches() -> None:
    answer = ask(load_model("meta-llama/Llama-3.2-1B"), load_gpu("h200"))
    assert answer.plans[0].plan.max_length == 131072


def test_nothing_fits() -> None:
    answer = ask(load_model("Qwen/Qwen3-32B"), load_gpu("h100-80gb"), max_length=2**20, num_gpus=8)
    assert answer.plans == ()
    assert answer.nearest is not None
    assert not answer.nearest.report.fits
    assert answer.nearest.report.dominant.key in answer.binding


def test_host_memory_is_a_limit() -> None:
    goal = Goal(max_length=2**20, gpu="h100-80gb", num_gpus=8, fixed={"host_memory_bytes": 200 * 2**30})
    answer = recommend(load_model("Qwen/Qwen3-8B"), goal, load_gpu("h100-80gb"))
    assert answer.plans == ()


def test_a_goal_without_a_legal_plan_says_why() -> None:
    goal = Goal(max_length=2**20 + 1, gpu="h200", num_gpus=4, fixed={"cp_size": 4})
    with pytest.raises(PlanError, match="multiple of 8"):
        recommend(load_model("Qwen/Qwen3-8B"), goal, load_gpu("h200"))
    with pytest.raises(PlanError, match="qwen3_moe with --cp-size 2"):
        ask(load_model("Qwen/Qwen3-30B-A3B"), load_gpu("h200"), max_length=1024, num_gpus=2)


def test_longest_where_nothing_fits() -> None:
    with pytest.raises(PlanError, match="No combination"):
        ask(tiny_spec(), small_gpu(1000))
