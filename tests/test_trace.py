"""The trace method: against the formulas on a grid of plans, and against measurements that formulas do not reach."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

from lcplan.checking import check_rows, load_rows
from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.estimation import estimate_by_trace
from lcplan.estimators import formula
from lcplan.hardware import load_gpu
from lcplan.model_spec import ModelSpec
from tests.conftest import plan_of, tiny_spec

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore")]

COMMON: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"attention_bias": False},
    "phi3": {"original_max_position_embeddings": 32768, "sliding_window": None},
    "olmo2": {},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True, "router_aux_loss_coef": 0.001,
    },
    "gemma2": {"sliding_window": 1024},
    "gemma3_text": {
        "sliding_window": 1024, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128},
}  # fmt: skip
EAGER_LENGTHS = (512, 3072)
LENGTHS = (512, 3072, 16384)
CHECKPOINTING: tuple[dict[str, Any], ...] = (
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "none"},
    {"checkpoint_every_n_layers": 2},
)
WITHIN = 0.01


def family_spec(model_type: str, *, tied: bool) -> ModelSpec:
    config = {**COMMON, **FAMILIES[model_type], "model_type": model_type, "tie_word_embeddings": tied}
    return ModelSpec.from_config(config, model_type)


GRID = [
    plan
    for plan in itertools.product(FAMILIES, (False, True), LENGTHS, CHECKPOINTING, (1, 3))
    # scores of every pair of tokens: 16,384 of them would fill any GPU
    if plan[2] in EAGER_LENGTHS or plan[0] not in ("gemma2", "gpt_oss")
]


def traced(spec: ModelSpec, **given: Any) -> int:
    from lcplan.tracing.trace import trace

    return max(sum(alive.values()) for alive in trace(spec, plan_of(spec, **given)).values())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_formula_and_trace_agree_on_the_grid(model_type: str) -> None:
    """At least 200 plans over all families: two methods that share nothing but the shapes."""
    assert len(GRID) >= 200
    worst: dict[str, float] = {}
    for family, tied, length, checkpointing, batch in GRID:
        if family != model_type:
            continue
        spec = family_spec(family, tied=tied)
        given = {"max_length": length, "per_device_train_batch_size": batch, **checkpointing}
        formula_peak = max(formula.instants(spec, plan_of(spec, **given)).totals().values())
        worst[str((tied, given))] = formula_peak / traced(spec, **given) - 1
    off = {plan: error for plan, error in worst.items() if abs(error) > WITHIN}
    assert not off, off


@pytest.mark.parametrize("model_type", FAMILIES)
def test_formula_and_trace_agree_on_eager_attention(model_type: str) -> None:
    plans = itertools.product((False, True), EAGER_LENGTHS, CHECKPOINTING, (1, 3))
    for tied, length, checkpointing, batch in plans:
        given = {"max_length": length, "per_device_train_batch_size": batch, **checkpointing}
        check_agreement(family_spec(model_type, tied=tied), **given, attn_implementation="eager")


def check_agreement(spec: ModelSpec, **given: Any) -> None:
    by_formula = max(formula.instants(spec, plan_of(spec, **given)).totals().values())
    assert by_formula == pytest.approx(traced(spec, **given), rel=0.003), given


MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "smollm3": {},
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.2, "logits_scaling": 8.0},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "ministral": {"sliding_window": 1024, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "gemma": {},
    "glm": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "olmo3": {"sliding_window": 1024, "num_hidden_layers": 4},
    "exaone4": {"sliding_window": 1024, "num_hidden_layers": 4},
}


@pytest.mark.parametrize("model_type", MORE_FAMILIES)
def test_formula_and_trace_agree_on_more_families(model_type: str) -> None:
    config = {**COMMON, **MORE_FAMILIES[model_type], "model_type": model_type, "tie_word_embeddings": False}
    spec = ModelSpec.from_config(config, model_type)
    for length, checkpointing, batch in itertools.product((512, 3072), CHECKPOINTING, (1, 2)):
        given = {"max_length": length, "per_device_train_batch_size": batch, **checkpointing}
        check_agreement(spec, **given)
    check_agreement(spec, max_length=2048, attn_implementation="eager")


ONE_SLIDES = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"sliding_window": 1024}),
        ("phi3", {"sliding_window": 1024}),
        ("qwen3", ONE_SLIDES),
        # a single key/value head is repeated without a copy
        ("qwen3", ONE_SLIDES | {"num_key_value_heads": 1}),
        ("phi3", {"num_key_value_heads": 8}),
        ("gemma3_text", {"num_key_value_heads": 1, "sliding_window_pattern": 2}),
        # layers without experts, no load-balancing loss, wide experts
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.0, "num_experts": 128}),
        ("mixtral", {"hidden_size": 256, "intermediate_size": 3072}),
        ("gpt_oss", {"hidden_size": 256, "intermediate_size": 3072, "num_attention_heads": 2}),
        ("gpt_oss", {"hidden_size": 2048, "intermediate_size": 256, "num_attention_heads": 2}),
        ("gpt_oss", {"num_local_experts": 32, "num_experts_per_tok": 4}),
    ],
)
def test_formula_and_trace_agree_on_layers_of_several_kinds(model_type: str, changes: dict[str, Any]) -> None:
    config = {**COMMON, **FAMILIES[model_type], **changes, "model_type": model_type, "tie_word_embeddings": False}
    if "sliding_window_pattern" in changes:
        del config["layer_types"]
    spec = ModelSpec.from_config(config, model_type)
    for length, checkpointing, batch in itertools.product((500, 2048), CHECKPOINTING, (1, 2)):
        given = {"max_length": length, "per_device_train_batch_size": batch, **checkpointing}
        check_agreement(spec, **given)
        if spec.num_key_value_heads in (1, 8):
            check_agreement(spec, **given, attn_implementation="eager")


def test_formula_and_trace_agree_on_gemma_3_with_its_vision_tower() -> None:
    """Trained on text alone the tower has weights and nothing else."""
    text = {**COMMON, **FAMILIES["gemma3_text"], "model_type": "gemma3_text"}
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 896, "patch_size": 14, "num_channels": 3,
    }  # fmt: skip
    spec = ModelSpec.from_config({"model_type": "gemma3", "text_config": text, "vision_config": vision}, "gemma3")
    for length in (512, 4096):
        check_agreement(spec, max_length=length)


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
    assert {phase.phase for phase in report.phases} == {"forward", "backward", "optimizer_step"}
    for phase in report.phases:
        assert phase.allocated_bytes == sum(item.num_bytes for item in report.items_in(phase.phase))
    by_key = {(item.key, phase): item for item in report.items for phase in item.phases}
    assert by_key["trace.parameters", "backward"].num_bytes == pytest.approx(2 * spec.num_parameters, rel=0.01)
    assert by_key["trace.gradients", "optimizer_step"].num_bytes == pytest.approx(2 * spec.num_parameters, rel=0.01)
    assert by_key["trace.optimizer_states", "backward"].category == "optimizer_state"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"num_gpus": 2}, "--backend fsdp2"),
        ({"offload_activations": True}, "--offload-activations"),
        ({"activation_offloading": True}, "--activation-offloading"),
        ({"activation_checkpointing": "selective"}, "selective"),
        ({"lora_r": 8}, "--lora-r 8"),
        ({"optim": "sgd"}, "--optim sgd"),
        ({"loss": "full"}, "--loss full"),
        ({"dtype": "float32"}, "--dtype float32"),
        ({"gradient_accumulation_steps": 2}, "--gradient-accumulation-steps 2"),
        ({"attn_implementation": "flash_attention_2"}, "--attn-implementation flash_attention_2"),
    ],
)
def test_what_is_not_traced_is_refused_by_name(given: dict[str, Any], what: str) -> None:
    with pytest.raises(PlanError, match=f"{what}.*trace method does not run it"):
        traced(tiny_spec(), max_length=512, **given)


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


def test_what_was_replaced_is_put_back() -> None:
    import transformers.masking_utils as masks
    import trl.kernels.chunked_logprob as head

    before = (masks.is_tracing, masks.fast_all, head._use_triton, head._addmm_fp32, hasattr(head, "triton"))
    traced(tiny_spec(), max_length=64)
    assert before == (masks.is_tracing, masks.fast_all, head._use_triton, head._addmm_fp32, hasattr(head, "triton"))


def test_small_measured_rows() -> None:
    """Every row of one GPU with few layers that the trace can express; ``lcplan check --method trace`` has them all."""
    rows = [row for row in load_rows() if row.num_hidden_layers <= 8 and row.plan["max_length"] <= 32_768]
    report = check_rows(rows, tolerance=0.001, method="trace")
    assert report.method == "trace"
    assert report.num_checked >= 20
    assert report.passed, report.worst_error


def test_the_command_line() -> None:
    command = [sys.executable, "-m", "lcplan", "estimate", "Qwen/Qwen3-0.6B", "--max-length", "4096", "--gpu", "a10g"]
    done = subprocess.run([*command, "--method", "trace", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["method"] == "trace"
    by_formula = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=False).stdout)
    assert report["peak_allocated_bytes"] == pytest.approx(by_formula["peak_allocated_bytes"], rel=1e-3)
