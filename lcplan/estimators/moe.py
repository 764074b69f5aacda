"""The mixture-of-experts half of a decoder layer, on transformers' grouped-matmul path.

Letters: T tokens per rank, H hidden size, E experts, t experts per token, m width of one expert.
"""

from __future__ import annotations

from lcplan.estimators._item import item

INDEX_BYTES = 8
"""int64 positions, one an expert and token, in several permutations."""


@item("moe.router", "activation")
def router(*, tokens: int, num_experts: int, experts_per_token: int) -> int:
    """Router probabilities (float32), chosen experts and the permutations that sort tokens by expert.

    Formula: ``(4*E + 34*t)*T``
    Live in: backward of a layer's experts
    Rounding: exact within some bytes a token
    Ignores: nothing
    Source: transformers 5.24 integrations/moe.py; allocator trace of Qwen3-30B-A3B (2 layers, 65,536 tokens)
    Confidence: exact
    """
    return (4 * num_experts + 34 * experts_per_token) * tokens


@item("moe.experts", "activation")
def experts(*, tokens: int, hidden_size: int, experts_per_token: int, expert_size: int) -> int:
    """Tokens gathered by expert, gate and up together, activation, product, and each expert's output; bf16.

    Formula: ``t*(4*H + 8*m)*T``
    Live in: backward of a layer's experts
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 integrations/moe.py; allocator traces of Qwen3-30B-A3B and Mixtral
    Confidence: exact
    """
    return experts_per_token * (4 * hidden_size + 8 * expert_size) * tokens


@item("moe.backward", "temporary")
def backward(*, tokens: int, hidden_size: int, experts_per_token: int, weight_bytes: int) -> int:
    """Gradient of the weighted outputs, and the scatter that sorts it by expert: its zeros, its copy, its indices.

    Formula: ``3*b*t*H*T + 32*t*T``; b is 4 where routing weights stay in float32 (Mixtral), else 2
    Live in: backward of a layer's experts
    Rounding: exact within some bytes a token
    Ignores: nothing
    Source: torch index_put; allocator traces of Qwen3-30B-A3B and Mixtral
    Confidence: exact
    """
    return (3 * weight_bytes * hidden_size + 4 * INDEX_BYTES) * experts_per_token * tokens


@item("moe.gate_up_backward", "temporary")
def gate_up_backward(*, tokens: int, hidden_size: int, experts_per_token: int, expert_size: int) -> int:
    """Last part of the experts' backward: gathered tokens, their gradient, and that of gate and up.

    Formula: ``t*(4*H + 4*m)*T``
    Live in: backward of a layer's experts, when the gradients of all its expert weights exist (short sequences)
    Rounding: exact
    Ignores: nothing
    Source: torch grouped_mm backward; allocator traces of Qwen3-30B-A3B at 16,384 and 65,536 tokens
    Confidence: exact
    """
    return experts_per_token * (4 * hidden_size + 4 * expert_size) * tokens


@item("moe.router_gradients", "gradient")
def router_gradients(*, tokens: int, num_experts: int, num_layers: int) -> int:
    """Gradients of router logits: the load-balancing loss makes those of all layers at once; bf16.

    Formula: ``2*E*T*layers_left``
    Live in: loss, backward
    Rounding: exact
    Ignores: a load-balancing coefficient of 0, without which there are none
    Source: trl 1.16 add_fused_lm_head, transformers 5.24 load_balancing_loss_func; allocator trace of Qwen3-30B-A3B
    Confidence: exact
    """
    return 2 * num_experts * tokens * num_layers
