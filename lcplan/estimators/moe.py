"""The mixture-of-experts half of a decoder layer, on transformers' grouped-matmul path.

Letters: T tokens per rank, H hidden size, E experts, t experts per token, m width of one expert.
"""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.estimators.weights import BF16_BYTES

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


@item("moe.biased_experts", "activation")
def biased_experts(*, tokens: int, hidden_size: int, experts_per_token: int, expert_size: int) -> int:
    """What gpt-oss's experts save: gathered tokens, gate and up together, five parts of the gate, each expert's output.

    The parts: the clamped gate, its sigmoid, their product, up plus one, and the gated product.

    Formula: ``t*(4*H + 14*m)*T``
    Live in: backward of a layer's experts
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 GptOssExperts._apply_gate, integrations/moe.py; trace; H200 history of gpt-oss
    Confidence: exact
    """
    return experts_per_token * (4 * hidden_size + 14 * expert_size) * tokens


@item("moe.biased_gate_forward", "temporary")
def biased_gate_forward(*, tokens: int, experts_per_token: int, expert_size: int) -> int:
    """End of gpt-oss's gate as recomputed, above moe.biased_experts: the gathered bias and the clamped up.

    The experts' output is not there yet, but its gradient is, which has the same size.

    Formula: ``6*t*m*T``
    Live in: backward of a layer's experts (checkpointed)
    Rounding: exact within some bytes a token
    Ignores: nothing
    Source: transformers 5.24 integrations/moe.py (selected_biases); trace of gpt-oss
    Confidence: exact
    """
    return experts_per_token * 6 * expert_size * tokens


@item("moe.biased_output_forward", "temporary")
def biased_output_forward(*, tokens: int, hidden_size: int, experts_per_token: int) -> int:
    """End of gpt-oss's experts as recomputed: the gathered bias, the weighted outputs, and the gradient that waits.

    Formula: ``6*t*H*T``
    Live in: backward of a layer's experts (checkpointed)
    Rounding: exact within some bytes a token
    Ignores: nothing
    Source: transformers 5.24 integrations/moe.py (selected_biases); trace of gpt-oss
    Confidence: exact
    """
    return experts_per_token * 6 * hidden_size * tokens


@item("moe.gate_backward", "temporary")
def gate_backward(*, tokens: int, hidden_size: int, experts_per_token: int, expert_size: int, biased: bool) -> int:
    """Backward of the experts' gate: what they saved but their output, and two gradients more (gpt-oss: biased).

    Formula: ``t*(2*H + 12*m)*T``; gpt-oss: ``t*(2*H + 18*m)*T``
    Live in: backward of a layer's experts (wide experts)
    Rounding: exact within some bytes a token
    Ignores: nothing
    Source: autograd of silu and mul, and of clamp, sigmoid and mul; traces of Mixtral, Qwen3-MoE and gpt-oss
    Confidence: exact
    """
    return experts_per_token * (2 * hidden_size + (18 if biased else 12) * expert_size) * tokens


@item("moe.backward", "temporary")
def backward(*, tokens: int, hidden_size: int, experts_per_token: int, weight_bytes: int, recomputed: bool) -> int:
    """Gradient of the weighted outputs, and the scatter that sorts it by expert: its zeros, its copy, its indices.

    With float32 routing weights the gradient is cast to bf16 in the end; a checkpointed layer has let go of the
    experts' output by then, another not yet.

    Formula: ``3*b*t*H*T + 32*t*T``; b is 4 where routing weights stay in float32 (Mixtral), else 2; b = 4 without
        checkpointing: ``+ 2*t*H*T``
    Live in: backward of a layer's experts
    Rounding: exact within some bytes a token
    Ignores: nothing
    Source: torch index_put; allocator traces of Qwen3-30B-A3B and Mixtral
    Confidence: exact
    """
    cast = BF16_BYTES if weight_bytes > BF16_BYTES and not recomputed else 0
    return ((3 * weight_bytes + cast) * hidden_size + 4 * INDEX_BYTES) * experts_per_token * tokens


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


@item("moe.forward", "temporary")
def forward(
    *, tokens: int, hidden_size: int, experts_per_token: int, expert_size: int, weight_bytes: int, biased: bool
) -> int:
    """Forward of the experts without saving, at the end of their gate or of their output; residual and normed input.

    At the gate: gathered tokens, gate and up together, activation, product. At the end: gathered tokens, each expert's
    output, weighted, and sorted back by token. b is 4 where routing weights stay in float32 (Mixtral), else 2.

    Formula: ``(max(t*(2*H + 8*m), t*(4 + 2*b)*H) + 4*H + 34*t)*T``; gpt-oss: ``18*m`` for ``8*m``
    Live in: forward (checkpointed layers with experts)
    Rounding: exact within some bytes a token
    Ignores: nothing
    Source: transformers 5.24 integrations/moe.py; traces of Qwen3-MoE and Mixtral
    Confidence: exact
    """
    gate = 2 * hidden_size + (18 if biased else 8) * expert_size
    output = (4 + 2 * weight_bytes) * hidden_size
    return (experts_per_token * (max(gate, output) + 34) + 4 * hidden_size) * tokens


@item("moe.output_forward", "temporary")
def output_forward(*, tokens: int, hidden_size: int, experts_per_token: int, weight_bytes: int) -> int:
    """End of the experts' forward above what they saved: their weighted outputs, sorted back; layer input, residual.

    Formula: ``(2*b*t + 4)*H*T``; b is 4 where routing weights stay in float32 (Mixtral), else 2
    Live in: forward (the last layer has experts and is not checkpointed)
    Rounding: exact within some bytes a token
    Ignores: nothing
    Source: transformers 5.24 integrations/moe.py; trace of Mixtral without checkpointing
    Confidence: exact
    """
    return (2 * weight_bytes * experts_per_token + 4) * hidden_size * tokens
