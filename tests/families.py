"""Small models of every family that tests build."""

from __future__ import annotations

from typing import Any

from lcplan.model_spec import ModelSpec

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
"""What each family's config.json has beside the common keys."""

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
"""Families that differ from one of those in little."""


def family_spec(model_type: str, *, tied: bool = False, **changes: Any) -> ModelSpec:
    own = {**FAMILIES, **MORE_FAMILIES}[model_type]
    config = {**COMMON, **own, "model_type": model_type, "tie_word_embeddings": tied, **changes}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    return ModelSpec.from_config(config, model_type)
