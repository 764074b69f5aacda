"""Evaluation and saving: phases that exist where the plan asks for them, and always."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from lcplan.errors import PlanError
from lcplan.estimation import estimate
from lcplan.estimators import evaluation, formula
from lcplan.hardware import load_gpu
from lcplan.model_loading import load_model
from lcplan.model_spec import ModelSpec
from tests.conftest import plan_of, tiny_spec

T, H, INNER = 7, 40, 112


def test_items_by_hand() -> None:
    assert evaluation.mlp(tokens=T, hidden_size=H, intermediate_size=INNER) == (672 + 320) * 7
    assert evaluation.norm(tokens=T, hidden_size=H) == (560 + 8) * 7
    heads: dict[str, Any] = {"tokens": T, "hidden_size": H, "heads": 6, "kv_heads": 3, "head_dim": 16}
    assert evaluation.attention(**heads, qk_norm=False) == (768 + 192 + 240) * 7
    assert evaluation.attention(**heads, qk_norm=True) == (960 + 48 + 240) * 7
    assert evaluation.scores(tokens=T, hidden_size=H) == (160 + 60) * 7
    assert evaluation.gathered_parameter(largest_parameter=11) == 44


def test_no_evaluation_unless_asked_for() -> None:
    phases = formula.instants(tiny_spec(), plan_of(tiny_spec(), max_length=64)).phases
    assert [phase for phase in phases if phase.startswith("evaluation")] == []
    assert phases["save"] == {
        key: size for key, size in phases["optimizer_step"].items() if not key.startswith("gradients")
    }


def test_evaluation_of_many_sequences_decides_what_fits() -> None:
    """transformers evaluates eight sequences at once by default, of which training holds one."""
    spec = load_model("Qwen/Qwen3-8B")
    given: dict[str, Any] = {"max_length": 2**18, "num_gpus": 8, "cp_size": 8, "offload_activations": True}
    training = estimate(spec, plan_of(spec, **given), load_gpu("h100-80gb"))
    both = estimate(spec, plan_of(spec, **given, per_device_eval_batch_size=8), load_gpu("h100-80gb"))
    assert training.fits
    assert not both.fits
    assert both.peak_phase == "evaluation.mlp"
    one = estimate(spec, plan_of(spec, **given, per_device_eval_batch_size=1), load_gpu("h100-80gb"))
    by_phase = {phase.phase: phase.allocated_bytes for phase in one.phases}
    assert one.peak_allocated_bytes == max(by_phase.values())
    # a rank evaluates the whole sequence, which context parallelism does not split
    mlp = next(item for item in one.items if item.key == "evaluation.mlp")
    assert mlp.num_bytes == (6 * 12_288 + 8 * 4096) * 2**18


def test_fsdp2_gathers_one_parameter_at_a_time_to_save() -> None:
    spec = tiny_spec(tie_word_embeddings=True)
    given: dict[str, Any] = {"max_length": 64, "num_gpus": 2, "per_device_eval_batch_size": 2}
    phases = formula.instants(spec, plan_of(spec, **given)).phases
    assert phases["save"]["save.gathered_parameter"] == 4 * 560 * 40
    assert phases["evaluation.mlp"]["weights.gathered_head"] == phases["evaluation.loss"]["weights.gathered_head"]
    assert "weights.gathered_layers" in phases["evaluation.mlp"]
    untied = tiny_spec(tie_word_embeddings=False)
    phases = formula.instants(untied, plan_of(untied, **given)).phases
    assert "weights.gathered_head" in phases["evaluation.loss"]
    assert "weights.gathered_head" not in phases["evaluation.mlp"]


REFUSED: dict[str, dict[str, Any]] = {
    "--lora-r 8": {"lora_r": 8},
    "--dtype float32": {"dtype": "float32"},
    "--loss full": {"loss": "full"},
    "--offload-params": {"num_gpus": 2, "offload_params": True},
    "a materialised attention mask": {"attn_implementation": "eager"},
    "--no-reshard-after-forward": {"num_gpus": 2, "reshard_after_forward": False},
}


@pytest.mark.parametrize("what", REFUSED)
def test_evaluation_that_nobody_traced_is_refused_by_name(what: str) -> None:
    plan = plan_of(tiny_spec(), max_length=64, per_device_eval_batch_size=2, **REFUSED[what])
    with pytest.raises(PlanError, match=f"per-device-eval-batch-size 2 with {what}"):
        formula.instants(tiny_spec(), plan)


def test_evaluation_of_other_families_is_refused_by_name() -> None:
    spec = load_model("Qwen/Qwen3-30B-A3B")
    with pytest.raises(PlanError, match="per-device-eval-batch-size 2 with qwen3_moe"):
        formula.instants(spec, plan_of(spec, max_length=64, per_device_eval_batch_size=2))


@pytest.mark.train
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"intermediate_size": 64, "hidden_size": 128, "num_attention_heads": 16},
        {"intermediate_size": 64, "hidden_size": 1024, "num_attention_heads": 2},
    ],
)
def test_formula_and_trace_agree_on_evaluation(model_type: str, shape: dict[str, int]) -> None:
    """The same pieces as the trace method, on a model in evaluation mode without gradients."""
    from tests.families import COMMON, FAMILIES

    config = {**COMMON, **FAMILIES[model_type], **shape, "model_type": model_type, "tie_word_embeddings": True}
    spec = ModelSpec.from_config(config, model_type)
    for length, rows in itertools.product((1024, 8192), (1, 4)):
        plan = plan_of(spec, max_length=length, per_device_eval_batch_size=rows)
        phases = formula.instants(spec, plan).phases
        # weights and the evaluated batch alone
        beside = sum(phases["save"].values()) - phases["save"]["weights.parameters"]
        totals = {phase: sum(alive.values()) - beside for phase, alive in phases.items()}
        layers, loss = traced_evaluation(spec, length, rows)
        own = max(totals[f"evaluation.{part}"] for part in ("attention", "norm", "mlp"))
        assert own == pytest.approx(layers, rel=0.005), (length, rows)
        assert totals["evaluation.loss"] == pytest.approx(loss, rel=0.005), (length, rows)


def traced_evaluation(spec: ModelSpec, length: int, rows: int) -> tuple[int, int]:
    """Weights, batch and forward pass: the peak inside the layers, and that of scoring."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lcplan.tracing.kernels import picked_rows
    from lcplan.tracing.model import build, materialise
    from lcplan.tracing.seams import gpu_behaviour
    from lcplan.tracing.step import batches
    from lcplan.tracing.storages import StorageTracker

    plan = plan_of(spec, max_length=length, per_device_train_batch_size=rows)
    tracker = StorageTracker(
        scratch_of=lambda *_: 0,
        category_of=lambda *_: (),
        module_of=lambda: "",
        stand_in_for=partial(picked_rows, 1.0),
    )
    with gpu_behaviour():
        model = build(spec, plan, spec.num_hidden_layers)
        model.eval()
        with FakeTensorMode():
            materialise(model)
            for tensor in (*model.parameters(), *model.buffers()):
                tracker.add(tensor, "parameter")
            model.model.norm.register_forward_pre_hook(lambda *_: setattr(tracker, "phase", "norm"))
            model.model.register_forward_hook(lambda *_: setattr(tracker, "phase", "loss"))
            with tracker, torch.no_grad():
                (batch,) = batches(tracker, plan)
                tracker.phase = "layers"
                model(**batch, use_cache=False, fused_lm_head=True)
    return tracker.peaks["layers"].total, tracker.peaks["loss"].total
