"""Liger's kernels: formulas against a trace of functions that allocate and save as Liger's do, and the job's switch.

The kernels need Triton and a GPU. What matters for memory is in the autograd functions around them (liger-kernel 0.8.5,
ops/rms_norm.py, ops/rope.py, ops/swiglu.py), of which this file has stand-ins without arithmetic.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from jobs import fsdp2_job, small_job

from lcplan import load_gpu, load_model
from lcplan.backends.job import TEMPLATES, packages, render_job
from lcplan.doctor import extras_of
from lcplan.errors import PlanError
from lcplan.estimators import formula
from lcplan.estimators.step_time import StepTimer
from lcplan.probing import with_layers
from tests.conftest import plan_of, tiny_spec

ring = {"num_gpus": 4, "cp_size": 4}
sharded = {"num_gpus": 4, "dp_shard_size": 4}
kept = {"activation_checkpointing": "selective", "offload_activations": True}
MULTIPROCESSORS = 132
CASES: tuple[dict[str, Any], ...] = (
    {"max_length": 65_536},
    {"max_length": 2048},
    {"max_length": 65_536, "activation_checkpointing": "none"},
    {"max_length": 65_536, "gradient_accumulation_steps": 2},
    {"max_length": 65_536, "mlp_tile_size": 5000},
    {"max_length": 65_536, "offload_activations": True, **sharded},
    {"max_length": 262_144, **ring},
    {"max_length": 262_144, "offload_activations": True, "mlp_tile_size": 40_000, **ring},
    {"max_length": 65_536, "activation_checkpointing": "selective"},
    {"max_length": 65_536, "activation_checkpointing": "selective", "mlp_tile_size": 5000, **sharded},
    {"max_length": 262_144, "activation_checkpointing": "selective", **ring},
    {"max_length": 65_536, **kept},
    {"max_length": 2048, **kept},
    {"max_length": 65_536, "gradient_accumulation_steps": 2, "mlp_tile_size": 5000, **kept},
    {"max_length": 262_144, **kept, **ring},
    {"max_length": 262_144, "mlp_tile_size": 40_000, **kept, **ring},
    {"max_length": 262_144, "cp_head_chunks": 8, "mlp_tile_size": 5000, **kept, **ring},
)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace Qwen3's and Llama's operations; the trace itself refuses the lever, which is lifted."""
    import torch
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3 import modeling_qwen3

    from lcplan.tracing import trace

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Any, weight: Any) -> Any:
            rows = given.contiguous().view(-1, given.shape[-1])
            ctx.save_for_backward(rows, weight, rows.new_empty(len(rows), dtype=torch.float32))
            return torch.empty_like(rows).view(given.shape)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            weight = ctx.saved_tensors[1]
            parts = weight.new_empty((MULTIPROCESSORS, len(weight)), dtype=torch.float32)
            return grad.contiguous().view(grad.shape), parts.sum(0).to(weight.dtype)

    class Rotary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, cos: Any, sin: Any) -> Any:
            ctx.save_for_backward(cos, sin)
            return tuple(each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return *(grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads), None, None

    class SwiGLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Any, up: Any) -> Any:
            ctx.save_for_backward(gate, up)
            return torch.empty_like(gate)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return ctx.saved_tensors

    def fused_mlp(mlp: Any, given: Any) -> Any:
        return mlp.down_proj(SwiGLU.apply(mlp.gate_proj(given), mlp.up_proj(given)))

    def replace(*, swiglu: bool) -> None:
        for module, name in ((modeling_qwen3, "Qwen3"), (modeling_llama, "Llama")):
            norm, mlp = getattr(module, f"{name}RMSNorm"), getattr(module, f"{name}MLP")
            monkeypatch.setattr(norm, "forward", lambda self, given: Norm.apply(given, self.weight))
            monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: Rotary.apply(q, k, cos, sin))
            if swiglu:
                monkeypatch.setattr(mlp, "forward", fused_mlp)

    refused = trace.not_traced
    monkeypatch.setattr(trace, "not_traced", lambda plan: [f for f in refused(plan) if not f.startswith("--kernels")])
    return replace


@pytest.mark.train
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B"])
@pytest.mark.parametrize("given", CASES, ids=str)
def test_formulas_agree_with_a_trace_of_stand_ins(stand_ins: Any, model: str, given: dict[str, Any]) -> None:
    from lcplan.tracing.trace import trace

    stand_ins(swiglu="mlp_tile_size" not in given)
    spec = with_layers(load_model(model), 2)
    plan = plan_of(spec, kernels="liger", **given)
    rank = 1 if plan.cp_size > 1 else 0
    by_formula = max(formula.instants(spec, plan, rank=rank).totals().values())
    assert by_formula == pytest.approx(trace(spec, plan, rank=rank, torch_version="2.11.0").peak, rel=1e-4)


def test_what_fused_kernels_save() -> None:
    """Qwen3-8B, a long sequence on one GPU: bytes a token at the MLP's backward."""
    spec, tokens = load_model("Qwen/Qwen3-8B"), 1 << 18
    plans = [plan_of(spec, max_length=tokens, kernels=kernels) for kernels in ("none", "liger")]
    plain, fused = (formula.instants(spec, plan).phases["backward[0].mlp"] for plan in plans)
    assert fused["mlp.fused_saved"] == plain["mlp.saved"] * 6 // 8
    assert fused["activations.fused_norms"] == 2 * (2 * 4096 + 4) * tokens
    assert fused["attention.fused_qk_norm"] == (2 * 40 * 128 + 4 * 40) * tokens
    assert fused["activations.residual"] == 2 * plain["activations.residual"], "the second norm's input"
    gone = {"mlp.saved", "mlp.backward", "activations.norms", "attention.qk_norm"}
    assert gone <= plain.keys()
    assert not gone & fused.keys()


def test_fused_kernels_take_less_time() -> None:
    spec, gpu = load_model("Qwen/Qwen3-8B"), load_gpu("h200")
    assert gpu.kernel_rates is not None
    timer = StepTimer(spec, gpu, gpu.kernel_rates)

    def elementwise(**given: Any) -> float:
        return timer.parts(plan_of(spec, max_length=1 << 17, **given)).elementwise

    fused, tiled = elementwise(kernels="liger"), elementwise(kernels="liger", mlp_tile_size=16_384)
    assert fused < tiled < elementwise(mlp_tile_size=16_384)
    assert fused < 0.3 * elementwise()
    assert elementwise(kernels="liger", mlp_tile_size=1 << 17) == fused, "one tile has all tokens"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"lora_r": 8}, "--lora-r 8"),
        ({"dtype": "float32"}, "--dtype float32"),
        ({"activation_offloading": True}, "--activation-offloading"),
        ({"padding": True}, "a materialised attention mask"),
        ({"per_device_eval_batch_size": 1}, "--per-device-eval-batch-size 1"),
        ({"num_gpus": 2, "backend": "ddp"}, "--backend ddp"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(given: dict[str, Any], what: str) -> None:
    with pytest.raises(PlanError, match=f"--kernels liger with {what}"):
        formula.instants(tiny_spec(), plan_of(tiny_spec(), max_length=256, kernels="liger", **given))


def test_other_families_and_the_trace_refuse_it() -> None:
    from lcplan.tracing.trace import trace

    with pytest.raises(PlanError, match="--kernels liger with olmo2"):
        formula.instants(tiny_spec(model_type="olmo2"), plan_of(tiny_spec(), max_length=256, kernels="liger"))
    with pytest.raises(PlanError, match="--kernels liger: the trace method does not run it"):
        trace(tiny_spec(), plan_of(tiny_spec(), max_length=256, kernels="liger"))


# --- the generated job


def test_a_job_that_could_not_run_them_is_refused(tmp_path: Any) -> None:
    for job in (small_job(plan={"kernels": "liger"}), fsdp2_job(kernels="liger", backend="deepspeed", zero_stage=3)):
        with pytest.raises(PlanError, match="--kernels liger: its kernels run on CUDA alone"):
            render_job(job, tmp_path / "job")
    assert packages(fsdp2_job(kernels="liger").plan) == ("liger-kernel",)
    assert extras_of(["liger-kernel"]) == "liger"


@pytest.mark.train
@pytest.mark.parametrize(("tile", "swiglu"), [(None, True), (63, False), (64, True)])
def test_the_job_asks_for_layer_kernels_and_no_loss(
    monkeypatch: pytest.MonkeyPatch, tile: int | None, swiglu: bool
) -> None:
    import transformers.integrations.liger as switch

    monkeypatch.syspath_prepend(str(TEMPLATES))
    model = importlib.import_module("model")
    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, patches.__name__, patches)
    asked: list[Any] = []
    monkeypatch.setattr(switch, "apply_liger_kernel", lambda *arguments: asked.append(arguments))
    known = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))
    sizes = {"max_length": 64, "per_device_train_batch_size": 2, "cp_size": 2, "sp_size": 1, "mlp_tile_size": tile}
    model.fuse_kernels(known, {"kernels": "none", **sizes})
    assert asked == []
    model.fuse_kernels(known, {"kernels": "liger", **sizes})
    no_loss = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert asked == [(known, {"rope": True, "rms_norm": True, "swiglu": swiglu, "geglu": swiglu, **no_loss})]
    with pytest.raises(model.JobError, match="Liger has none for other"):
        model.fuse_kernels(SimpleNamespace(config=SimpleNamespace(model_type="other")), {"kernels": "liger", **sizes})


@pytest.mark.train
def test_an_mlp_that_was_replaced_is_not_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's SwiGLU sits on the instance, before any class: tiles would be lost without a word."""
    import torch

    monkeypatch.syspath_prepend(str(TEMPLATES))
    tiling = importlib.import_module("tiling")
    mlp = torch.nn.Module()
    mlp.down_proj = torch.nn.Linear(2, 2)
    mlp.__dict__["forward"] = lambda given: given
    decoder = SimpleNamespace(layers=[SimpleNamespace(mlp=mlp)])
    with pytest.raises(ValueError, match="the MLP of decoder layer 0 was replaced already"):
        tiling.tile_mlps(SimpleNamespace(get_decoder=lambda: decoder), 16)
