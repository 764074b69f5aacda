"""The trace method: against measurements, and its own rules; test_trace_grid holds it against the formulas."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from lcplan.checking import MeasuredRow, check_rows, load_rows, row_plan, row_spec
from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.estimation import estimate_by_trace
from lcplan.estimators import formula
from lcplan.hardware import load_gpu
from lcplan.model_spec import ModelSpec
from lcplan.reports.terminal import print_report
from lcplan.row_groups import lever_names
from tests.conftest import Outcome, plan_of, tiny_spec
from tests.families import family_spec

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore")]


def traced(spec: ModelSpec, **given: Any) -> int:
    from lcplan.tracing.trace import trace

    return trace(spec, plan_of(spec, **given)).peak


GEMMA_3 = {
    "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 2560, "intermediate_size": 10_240,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "sliding_window": 1024, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA_2 = {
    "model_type": "gemma2", "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "sliding_window": 4096, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "given", "on_h200"),
    [
        (GEMMA_3, {"max_length": 16_384}, 14_965_023_260),
        (GPT_OSS, {"max_length": 4096}, 30_212_785_676),
        (GEMMA_2, {"max_length": 4096}, 8_648_988_684),
    ],
)  # fmt: skip
def test_sliding_layers_sinks_and_soft_caps_against_an_h200(
    config: dict[str, Any], given: dict[str, Any], on_h200: int
) -> None:
    """Peaks replayed from the allocator's history on an H200 (torch 2.11, transformers 5.24, trl 1.16)."""
    spec = ModelSpec.from_config(config, str(config["model_type"]))
    by_formula = formula.instants(spec, plan_of(spec, **given)).totals()
    assert max(by_formula.values()) == pytest.approx(on_h200, rel=1e-3)
    assert traced(spec, **given) == pytest.approx(on_h200, rel=1e-4)


def test_eager_attention_against_an_h200() -> None:
    spec = ModelSpec.from_config(
        {
            "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728,
            "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 40_960, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000, "attention_bias": False,
        },
        "qwen3",
    )  # fmt: skip
    given: dict[str, Any] = {"max_length": 4096, "attn_implementation": "eager"}
    assert traced(spec, **given) == pytest.approx(13_740_937_740, rel=1e-4)
    by_formula = formula.instants(spec, plan_of(spec, **given)).totals()
    assert max(by_formula.values()) == pytest.approx(13_740_937_740, rel=1e-4)


def test_a_traced_report_is_a_report() -> None:
    spec = family_spec("qwen3", tied=True)
    report = estimate_by_trace(spec, plan_of(spec, max_length=1024), load_gpu("h200"))
    assert report.method == "trace"
    phases = [phase.phase for phase in report.phases]
    assert phases == ["forward", "loss", "backward", "backward.embedding", "optimizer_step"]
    for phase in report.phases:
        assert phase.allocated_bytes == sum(item.num_bytes for item in report.items_in(phase.phase))
    by_key = {(item.key, phase): item for item in report.items for phase in item.phases}
    assert by_key["trace.parameters", "backward"].num_bytes == pytest.approx(2 * spec.num_parameters, rel=0.01)
    assert by_key["trace.gradients", "optimizer_step"].num_bytes == pytest.approx(2 * spec.num_parameters, rel=0.01)
    assert by_key["trace.optimizer_states", "backward"].category == "optimizer_state"
    assert by_key["trace.inputs", "forward"].num_bytes == 3 * 8 * 1024


def test_a_traced_report_tells_layer_by_layer_and_tensor_by_tensor() -> None:
    spec = family_spec("qwen3", num_hidden_layers=6)
    plan = plan_of(spec, max_length=65_536, num_gpus=4, cp_size=4)
    report = estimate_by_trace(spec, plan, load_gpu("h200"))
    parts = [part.phase for part in report.timeline]
    forward, backward = [f"forward[{i}]" for i in range(6)], [f"backward[{i}]" for i in reversed(range(6))]
    loss = ["loss[forward]", "loss[backward]"]
    assert parts == ["forward", *forward, *loss, *backward, "backward.embedding", "optimizer_step"]
    assert max(part.allocated_bytes for part in report.timeline) == report.peak_allocated_bytes
    found = report.tensors_at_peak
    assert sum(group.num_bytes for group in found) == report.peak_allocated_bytes
    assert [group.num_bytes for group in found] == sorted((group.num_bytes for group in found), reverse=True)
    assert {group.category for group in found} >= {"parameter", "optimizer_state", "gradient", "activation"}
    assert {item.category for item in report.items} >= {"all_gather", "reduce_scatter", "input", "temporary"}
    assert any(group.module == "model.layers.*.self_attn.q_norm" for group in found)
    assert any("extended from traces of 3 and 4" in text for text in report.assumptions)
    printed = io.StringIO()
    print_report(report, units="GiB", console=Console(width=120, file=printed))
    text = printed.getvalue()
    assert "backward[3] to backward[2]" in text
    assert "alive at the peak" in text
    assert "model.layers.*.mlp" in text


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"num_gpus": 2, "backend": "deepspeed"}, "--backend deepspeed"),
        ({"num_gpus": 2, "backend": "ddp"}, "--backend ddp"),
        ({"quantize": "nf4", "lora_r": 8}, "--quantize nf4"),
        ({"loss": "chunked-256"}, "--loss chunked-256"),
        ({"optim": "adamw_torch_8bit"}, "--optim adamw_torch_8bit"),
        ({"packing": True}, "--packing"),
        ({"attn_implementation": "flash_attention_2"}, "--attn-implementation flash_attention_2"),
    ],
)
def test_what_is_not_traced_is_refused_by_name(given: dict[str, Any], what: str) -> None:
    with pytest.raises(PlanError, match=f"{what}.*trace method does not run it"):
        traced(tiny_spec(), max_length=512, **given)


def test_experts_are_not_tiled() -> None:
    with pytest.raises(PlanError, match="--mlp-tile-size 64 with mixtral: decoder layer 0 has no dense MLP"):
        traced(family_spec("mixtral"), max_length=128, mlp_tile_size=64)


def test_adapters_that_no_module_takes_are_refused() -> None:
    with pytest.raises(PlanError, match=r"peft cannot adapt.*no_such_proj"):
        traced(tiny_spec(), max_length=512, lora_r=8, lora_target_modules="no_such_proj")


def test_attention_that_the_model_lacks_is_refused_by_name() -> None:
    spec = ModelSpec.from_config(GPT_OSS, "gpt_oss")
    plan = plan_of(spec, max_length=512)
    assert plan.attn_implementation == "eager"
    with pytest.raises(PlanError, match=r"sdpa with gpt_oss \(gpt_oss\): .*eager"):
        plan_of(spec, max_length=512, attn_implementation="sdpa")
    from lcplan.tracing.trace import trace

    forced = plan.model_copy(update={"attn_implementation": "sdpa"})
    with pytest.raises(PlanError, match="cannot build gpt_oss with this plan: .*scaled_dot_product_attention"):
        trace(spec, forced)


def test_a_stack_without_the_names_it_needs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import trl.kernels.chunked_logprob as head

    monkeypatch.delattr(head, "_addmm_fp32")
    with pytest.raises(EnvironmentProblem, match=r"_addmm_fp32.*torch 2\.13"):
        traced(tiny_spec(), max_length=512)


def test_a_trl_without_the_traced_loss_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl.kernels.chunked_logprob", None)
    with pytest.raises(EnvironmentProblem, match=r"chunked_logprob\._use_triton.*trl 1\.16"):
        traced(tiny_spec(), max_length=512)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("max_length", [1024, 3 * 8192, 5 * 8192 + 1024])
def test_the_loss_heads_loops_hold_no_more_in_all_rounds_than_in_a_few(
    dtype: str, max_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lcplan.tracing import seams
    from lcplan.tracing.trace import trace

    # five pieces of the vocabulary, as many and a part of the tokens; in float32 each piece is cast
    spec = family_spec("qwen3", vocab_size=4 * 32768 + 512)
    plan = plan_of(spec, max_length=max_length, dtype=dtype)
    few = trace(spec, plan)
    monkeypatch.setattr(seams, "MAY_BE_MISSING", seams.MAY_BE_MISSING[:1])
    assert few.parts == trace(spec, plan).parts


@pytest.mark.parametrize("rank", [0, 3, 9, 15])
@pytest.mark.parametrize("more", [{}, {"cp_comm_strategy": "alltoall"}, {"cp_merge_dtype": "bfloat16"}])
def test_ring_attention_holds_no_more_in_all_rounds_than_in_a_few(
    rank: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import contextlib

    from lcplan.tracing import sharding
    from lcplan.tracing.trace import trace

    spec = family_spec("qwen3", num_hidden_layers=2)
    plan = plan_of(spec, max_length=16 * 2048, num_gpus=16, cp_size=16, activation_checkpointing="none", **more)
    few = trace(spec, plan, rank=rank)
    monkeypatch.setattr(sharding, "few_ring_rounds", lambda _rank: contextlib.nullcontext())
    assert few.parts == trace(spec, plan, rank=rank).parts


def test_what_was_replaced_is_put_back() -> None:
    import torch
    import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
    import torch.distributed.tensor.experimental._context_parallel._attention as ring
    import transformers.masking_utils as masks
    import trl.kernels.chunked_logprob as head
    import trl.models.activation_offloading as offloading
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    def state() -> tuple[Any, ...]:
        return (
            masks.is_tracing, masks.fast_all, head._use_triton, head._addmm_fp32, hasattr(head, "triton"),
            fsdp_param.alloc_storage, fsdp_param.free_storage, fsdp_param._to_dtype_if_needed, dict(ring.custom_ops),
            fsdp_param.FSDPParam.reset_sharded_param,
            FSDPState._force_complete_incomplete_states, offloading._get_unique_tensor_key,
            torch.accelerator.current_accelerator, torch.get_device_module, vars(torch.Tensor).get("record_stream"),
            torch.nn.functional.scaled_dot_product_attention, torch.distributed.is_initialized(),
        )  # fmt: skip

    from lcplan.tracing.trace import trace

    before = state()
    spec = tiny_spec()
    kept = {"activation_checkpointing": "selective", "offload_activations": True}
    for given in (kept, {"activation_offloading": True}, {"num_gpus": 2, "cp_size": 2, "offload_params": True}):
        trace(spec, plan_of(spec, max_length=64, **given), torch_version="2.11.0")
    assert before == state()


def test_a_process_of_a_job_cannot_trace_one() -> None:
    import torch.distributed as dist

    from lcplan.tracing.seams import fake_ranks

    spec = tiny_spec()
    with fake_ranks(0, 2), pytest.raises(EnvironmentProblem, match="process group already"):
        traced(spec, max_length=64, num_gpus=2)
    assert not dist.is_initialized()


EXTENDED: tuple[dict[str, Any], ...] = (
    {},
    {"activation_checkpointing": "none"},
    {"offload_activations": True, "lora_r": 8},
    {"gradient_accumulation_steps": 2, "optim": "adamw_torch"},
    {"dtype": "float32", "loss": "full"},
    {"num_gpus": 4, "dp_shard_size": 2, "dp_replicate_size": 2, "optim": "sgd"},
    {"lora_r": 8, "lora_dropout": 0.1},
    {"freeze_embeddings": True, "freeze_head": True},
    {"padding": True, "per_device_train_batch_size": 2, "scored_fraction": 0.3},
    {"num_gpus": 4, "dp_shard_size": 4, "reshard_after_forward": False},
    {"num_gpus": 4, "cp_size": 4, "activation_checkpointing": "selective"},
    {"num_gpus": 2, "cp_size": 2, "offload_activations": True, "offload_params": True},
    {"num_gpus": 4, "cp_size": 4, "activation_checkpointing": "selective", "offload_activations": True},
)


@pytest.mark.parametrize("given", [*EXTENDED, {"checkpoint_every_n_layers": 2}, {"activation_offloading": True}])
def test_a_few_layers_extended_are_all_layers_traced(given: dict[str, Any]) -> None:
    """To the byte, for every tensor of every part of the step."""
    from lcplan.tracing.trace import trace, trace_layers

    total = 17 if given.get("activation_offloading") else 12
    spec = family_spec("qwen3", num_hidden_layers=total)
    plan = plan_of(spec, max_length=2048, **given)
    extended = trace(spec, plan)
    first, second = extended.traced_layers
    assert first < second < total
    whole = trace_layers(spec, plan, total, rank=0)
    assert list(extended.parts) == list(whole)
    for part, alive in whole.items():
        assert {k: v for k, v in extended.parts[part].items() if v} == {k: v for k, v in alive.items() if v}, part


def test_layers_that_differ_are_all_traced() -> None:
    from lcplan.tracing.trace import trace

    spec = ModelSpec.from_config(GEMMA_3, "gemma3")
    plan = plan_of(spec, max_length=256)
    assert trace(spec, plan).traced_layers == (6,)
    with pytest.raises(PlanError, match="--layers 4: the decoder layers of gemma3 are not all alike"):
        trace(spec, plan, layers=4)


def test_layers_and_ranks_that_cannot_be_are_refused() -> None:
    from lcplan.tracing.trace import trace

    spec = family_spec("llama", num_hidden_layers=12)
    every_other = plan_of(spec, max_length=256, checkpoint_every_n_layers=2)
    with pytest.raises(PlanError, match="--layers 7: .*at least 6 .*multiple of 2. Use --layers 6"):
        trace(spec, every_other, layers=7)
    assert trace(spec, every_other, layers=8).peak == trace(spec, every_other).peak
    with pytest.raises(PlanError, match="--rank 1 does not exist: this plan has ranks 0 to 0"):
        trace(spec, every_other, rank=1)


def test_the_rank_that_formulas_name_is_the_one_that_holds_most() -> None:
    from lcplan.tracing.trace import trace

    for shape in ({}, {"intermediate_size": 512}):
        spec = family_spec("qwen3", num_hidden_layers=2, **shape)
        plan = plan_of(spec, max_length=65_536, num_gpus=4, cp_size=4)
        by_rank = [trace(spec, plan, rank=rank).peak for rank in range(4)]
        report = estimate_by_trace(spec, plan, load_gpu("h200"))
        assert report.peak_allocated_bytes == max(by_rank)
        assert by_rank[report.peak_rank] == max(by_rank)


def test_torch_2_13_gathers_the_last_layer_before_the_loss() -> None:
    """What changed between the torch of the measured rows and the one that is traced: one layer's bf16 weights."""
    from lcplan.tracing.trace import trace

    spec = family_spec("llama")
    plan = plan_of(spec, max_length=1024, num_gpus=2)
    before, now = (trace(spec, plan, torch_version=version).totals() for version in ("2.11.0+cu130", None))
    assert now["loss[backward]"] - before["loss[backward]"] == pytest.approx(2 * spec.layers[0].total, rel=0.01)
    assert now["backward[2]"] == before["backward[2]"]


def test_a_measured_row_of_every_combination_of_levers() -> None:
    """The smallest of each that is traced; ``lcplan check --method trace`` has them all."""
    from lcplan.tracing.trace import not_traced

    chosen: dict[tuple[str, ...], MeasuredRow] = {}
    for row in sorted(load_rows(), key=lambda row: row.num_hidden_layers * row.plan["max_length"]):
        plan = row_plan(row, row_spec(row))
        if not not_traced(plan):
            chosen.setdefault(lever_names(plan), row)
    report = check_rows(chosen.values(), tolerance=0.0002, method="trace")
    assert report.method == "trace"
    assert report.num_checked >= 20
    assert report.num_refused == 0
    assert report.passed, report.worst_error
    assert abs(report.mean_signed_error) < 5e-5


@pytest.mark.parametrize("frozen", [{"freeze_embeddings": True}, {"freeze_embeddings": True, "freeze_head": True}])
def test_frozen_tables_on_the_host(frozen: dict[str, Any]) -> None:
    """They get no gradient that could be followed to the host, and are gathered from there all the same."""
    from lcplan.tracing.trace import trace

    spec = family_spec("qwen3", num_hidden_layers=2)
    plan = plan_of(spec, max_length=16_384, num_gpus=4, dp_shard_size=4, offload_params=True, **frozen)
    on_host = trace(spec, plan, torch_version="2.11.0")
    assert max(formula.instants(spec, plan).totals().values()) == pytest.approx(on_host.peak, rel=1e-4)
    assert not any(kind.category == "parameter" for alive in on_host.parts.values() for kind in +alive)


@pytest.mark.parametrize("offload_params", [False, True])
def test_a_rank_with_smaller_shards_pads_them_once(offload_params: bool) -> None:
    """The last of three has 170 rows of 512 and one of padding, and holds what the first does but in the optimizer.

    The optimizer's states, and its step, are as small as the shards without padding.
    """
    from lcplan.tracing.trace import trace

    spec = family_spec("qwen3", num_hidden_layers=2)
    plan = plan_of(spec, max_length=3 * 1024, num_gpus=3, dp_shard_size=3, offload_params=offload_params)

    def held(rank: int) -> dict[str, Counter[str]]:
        parts = trace(spec, plan, rank=rank).parts
        parts.pop("optimizer_step", None)
        found = {part: Counter[str]() for part in parts}
        for part, alive in parts.items():
            for kind, num_bytes in alive.items():
                found[part][kind.category] += num_bytes
            del found[part]["optimizer_state"]
        return found

    assert held(2) == held(0)


ONE_KEY_HEAD: dict[str, Any] = {
    "num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 704,
    "moe_intermediate_size": 128, "vocab_size": 1024, "num_hidden_layers": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("qwen3", {}),
        ("qwen3", {"offload_activations": True}),
        ("qwen3", {"dtype": "float32"}),
        ("qwen3", {"lora_r": 8}),
        ("qwen3", {"num_gpus": 4, "dp_shard_size": 4}),
        ("qwen3_moe", {}),
        ("hunyuan_v1_dense", {}),
    ],
)
def test_the_norm_of_many_queries_beside_one_key_head(family: str, given: dict[str, Any]) -> None:
    """Its backward is above that of attention, whose gradients of keys and values are small."""
    spec = family_spec(family, **ONE_KEY_HEAD)
    by_formula = formula.instants(spec, plan_of(spec, max_length=8192, **given)).totals()
    assert max(by_formula, key=by_formula.__getitem__).endswith(".query_norm")
    assert max(by_formula.values()) == pytest.approx(traced(spec, max_length=8192, **given), rel=3e-4)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("given", [{"padding": True}, {"attn_implementation": "eager"}])
@pytest.mark.parametrize("rows", [1, 2])
def test_values_that_are_a_part_of_a_fused_projection(rows: int, given: dict[str, Any], kv_heads: int) -> None:
    """The forward refers to the whole projection while it attends, whether values are repeated or not."""
    from lcplan.tracing.trace import trace

    spec = family_spec("phi3", num_hidden_layers=2, num_key_value_heads=kv_heads)
    plan = plan_of(spec, max_length=16_384, per_device_train_batch_size=rows, **given)
    layers = trace(spec, plan).totals()["forward[1]"]
    instants = {name: sum(alive.values()) for name, alive in formula.Step(spec, plan, 0).forward_instants().items()}
    assert instants["attention"] == max(size for name, size in instants.items() if name != "loss")
    assert instants["attention"] == pytest.approx(layers, rel=1e-4)


def test_the_command_line() -> None:
    command = [sys.executable, "-m", "lcplan", "estimate", "Qwen/Qwen3-0.6B", "--max-length", "4096", "--gpu", "a10g"]
    traced_command = [*command, "--method", "trace", "--layers", "4", "--rank", "0", "--json"]
    done = subprocess.run(traced_command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["method"] == "trace"
    by_formula = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=False).stdout)
    assert report["peak_allocated_bytes"] == pytest.approx(by_formula["peak_allocated_bytes"], rel=1e-3)


@pytest.mark.parametrize("flags", [("--rank", "0"), ("--layers", "4"), ("--rank", "0", "--layers", "4")])
def test_flags_of_the_trace_alone(lcplan: Callable[..., Outcome], flags: tuple[str, ...]) -> None:
    outcome = lcplan("estimate", "Qwen/Qwen3-0.6B", "--max-length", "4096", "--gpu", "a10g", *flags)
    assert outcome.code == 2
    assert f"{', '.join(flags[::2])} with --method formula" in outcome.err
