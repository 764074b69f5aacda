"""Families and attention paths against an H200 (torch 2.11, transformers 5.24, trl 1.16): peaks of single steps.

Few layers each, so that a step takes seconds; what decides the peak is one layer and the states.
"""

from __future__ import annotations

from typing import Any

import pytest

from lcplan.estimators import formula
from lcplan.model_loading import load_model
from lcplan.model_spec import ModelSpec
from tests.conftest import plan_of

NARROW: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024, "max_position_embeddings": 131_072,
}  # fmt: skip
"""So narrow an MLP that attention decides."""
SLIDING = {"model_type": "gemma3_text", "layer_types": ["sliding_attention"] * 2}
FULL = {"model_type": "gemma3_text", "layer_types": ["full_attention"] * 2}
MISTRAL = {"model_type": "mistral", "tie_word_embeddings": False}
GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 2560, "intermediate_size": 10_240,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 1024,
    "max_position_embeddings": 131_072,
}  # fmt: skip
GEMMA_2_9B: dict[str, Any] = {
    "model_type": "gemma2", "vocab_size": 256_000, "hidden_size": 3584, "intermediate_size": 14_336,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "sliding_window": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32_768,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip


def cut(name: str, num_layers: int, **changes: Any) -> dict[str, Any]:
    """A catalog model with fewer layers."""
    config = {**load_model(name).config, "num_hidden_layers": num_layers, **changes}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    return config


MOE, PHI, OLMO = "Qwen/Qwen3-30B-A3B", "microsoft/phi-4", "allenai/OLMo-2-1124-7B"
RING = {"num_gpus": 4, "cp_size": 4}
MEASURED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "sliding, heads of 256": (
        NARROW | SLIDING | {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4},
        {"max_length": 8192},
        875_374_876,
    ),
    "full, heads of 256": (
        NARROW | FULL | {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4},
        {"max_length": 8192},
        674_048_284,
    ),
    "sliding, heads of 128": (NARROW | SLIDING, {"max_length": 8192}, 872_097_052),
    "sliding, heads of 64": (
        NARROW | SLIDING | {"head_dim": 64, "num_attention_heads": 32, "num_key_value_heads": 16},
        {"max_length": 8192},
        871_837_696,
    ),
    "sliding mistral, two rows": (
        NARROW | MISTRAL,
        {"max_length": 4096, "per_device_train_batch_size": 2},
        566_122_780,
    ),
    "sliding mistral, a length that 8 does not divide": (NARROW | MISTRAL, {"max_length": 12_300}, 1_107_228_672),
    "eager mistral, two rows": (
        NARROW | MISTRAL | {"sliding_window": None},
        {"max_length": 2048, "per_device_train_batch_size": 2, "attn_implementation": "eager"},
        2_329_043_456,
    ),
    "gemma 3 4b": (GEMMA_3_4B, {"max_length": 32_768}, 21_761_829_888),
    "gemma 2 9b": (GEMMA_2_9B, {"max_length": 6144}, 21_932_517_900),
    "gemma 2 9b, short": (GEMMA_2_9B, {"max_length": 2048}, 13_755_467_776),
    "gpt-oss": (cut("openai/gpt-oss-20b", 2), {"max_length": 4096}, 30_212_785_676),
    "gpt-oss, short": (cut("openai/gpt-oss-20b", 2), {"max_length": 1024}, 22_512_319_488),
    "mixtral without checkpointing": (
        MIXTRAL,
        {"max_length": 8192, "activation_checkpointing": "none"},
        27_024_752_668,
    ),
    "a dense layer below experts": (cut(MOE, 3, mlp_only_layers=[0]), {"max_length": 16_384}, 18_499_831_808),
    "no load-balancing loss": (cut(MOE, 3, router_aux_loss_coef=0.0), {"max_length": 16_384}, 23_073_729_536),
    "phi-4, ring": (cut(PHI, 2), {"max_length": 65_536, **RING}, 14_636_036_644),
    "olmo 2, ring": (cut(OLMO, 3), {"max_length": 65_536, **RING}, 13_294_539_812),
    "phi-4, float32": (cut(PHI, 2), {"max_length": 16_384, "dtype": "float32"}, 31_214_523_392),
    "olmo 2, float32": (cut(OLMO, 2), {"max_length": 16_384, "dtype": "float32"}, 24_076_584_960),
    "padded rows": (
        cut("Qwen/Qwen3-0.6B", 4),
        {"max_length": 8192, "per_device_train_batch_size": 2, "padding": True},
        3_716_315_164,
    ),
    "padded rows of a wider model": (
        cut("Qwen/Qwen3-4B", 4),
        {"max_length": 16_384, "per_device_train_batch_size": 2, "padding": True},
        15_469_467_136,
    ),
    "padded rows of a length that 8 does not divide": (
        cut("meta-llama/Llama-3.2-1B", 6),
        {"max_length": 8190, "per_device_train_batch_size": 2, "padding": True},
        7_956_604_928,
    ),
    "padded rows, ring": (
        cut("Qwen/Qwen3-0.6B", 4),
        {"max_length": 32_768, **RING, "padding": True},
        2_626_808_832,
    ),
    "eager mistral 7b": (
        cut("mistralai/Mistral-7B-v0.3", 2),
        {"max_length": 4096, "attn_implementation": "eager"},
        14_313_380_864,
    ),
    "eager qwen 3 without checkpointing": (
        cut("Qwen/Qwen3-0.6B", 4),
        {"max_length": 4096, "attn_implementation": "eager", "activation_checkpointing": "none"},
        11_942_020_608,
    ),
}


@pytest.mark.parametrize("what", MEASURED)
def test_peak_on_an_h200(what: str) -> None:
    config, given, measured = MEASURED[what]
    spec = ModelSpec.from_config(config, what)
    totals = formula.instants(spec, plan_of(spec, **given)).totals()
    assert max(totals.values()) == pytest.approx(measured, rel=3e-4)


def test_the_loss_of_gemma_3_on_an_h200() -> None:
    """Read from the allocator's history; without it the peak of a short row is the loss."""
    spec = ModelSpec.from_config(GEMMA_3_4B, "gemma3_text")
    totals = formula.instants(spec, plan_of(spec, max_length=8192)).totals()
    assert max(totals, key=lambda phase: totals[phase]) == "loss"
    assert totals["loss"] == pytest.approx(12_459_953_655, rel=1e-5)


def test_the_experts_of_an_unchecked_mixtral_on_an_h200() -> None:
    """Read from the allocator's history: the cast of the weighted outputs' gradient, with their input still there."""
    spec = ModelSpec.from_config(MIXTRAL, "mixtral")
    plan = plan_of(spec, max_length=8192, activation_checkpointing="none")
    totals = formula.instants(spec, plan).totals()
    assert totals["backward[0].experts"] == pytest.approx(26_085_160_508, rel=1e-4)
    assert totals["backward[1].expert_gate"] == pytest.approx(26_842_316_876, rel=1e-4)
    assert totals["backward[1].expert_gradients"] == pytest.approx(26_976_534_604, rel=1e-4)


def test_only_the_rings_first_rank_builds_the_mask() -> None:
    spec = ModelSpec.from_config(cut("Qwen/Qwen3-0.6B", 4), "qwen3")
    plan = plan_of(spec, max_length=32_768, **RING, padding=True)
    totals = formula.instants(spec, plan, rank=3).totals()
    assert max(totals.values()) == pytest.approx(2_559_695_908, rel=3e-4)
