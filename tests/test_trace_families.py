"""Formula against trace: eager attention, families one trait away from another, layers of several kinds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lcplan.estimators import formula
from lcplan.model_spec import ModelSpec
from tests.conftest import plan_of
from tests.families import COMMON, FAMILIES, MORE_FAMILIES, family_spec

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore")]

EAGER_LENGTHS = (512, 3072)
CHECKPOINTING: tuple[dict[str, Any], ...] = (
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "none"},
    {"checkpoint_every_n_layers": 2},
)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_formula_and_trace_agree_on_eager_attention(model_type: str) -> None:
    plans = itertools.product((False, True), EAGER_LENGTHS, CHECKPOINTING, (1, 3))
    for tied, length, checkpointing, batch in plans:
        given = {"max_length": length, "per_device_train_batch_size": batch, **checkpointing}
        check_agreement(family_spec(model_type, tied=tied), **given, attn_implementation="eager")


def traced(spec: ModelSpec, **given: Any) -> int:
    from lcplan.tracing.trace import trace

    return trace(spec, plan_of(spec, **given)).peak


def check_agreement(spec: ModelSpec, **given: Any) -> None:
    by_formula = max(formula.instants(spec, plan_of(spec, **given)).totals().values())
    assert by_formula == pytest.approx(traced(spec, **given), rel=0.003), given


@pytest.mark.parametrize("model_type", MORE_FAMILIES)
def test_formula_and_trace_agree_on_more_families(model_type: str) -> None:
    spec = family_spec(model_type)
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
