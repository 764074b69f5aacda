"""LoRA on a frozen bf16 base: float32 adapters, and what each adapted linear keeps beside it.

Letters: T tokens per rank, r rank of the adapters, H hidden size, I intermediate size, h heads, d head_dim,
P_a adapter parameters.
"""

from __future__ import annotations

from lcplan.errors import PlanError
from lcplan.estimators._item import item
from lcplan.estimators.weights import BF16_BYTES
from lcplan.model_spec import ModelSpec
from lcplan.units import ceil_div

ALL_LINEAR = "all-linear"
"""peft's name for every linear but the head."""


def target_shapes(spec: ModelSpec, targets: str) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each adapted linear of one layer.

    Raises:
        PlanError: for a name that no linear of the layer has, listing those there are.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, key = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    known = {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key),
        "v_proj": (hidden, key),
        "o_proj": (query, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
    names = list(known) if targets == ALL_LINEAR else [name.strip() for name in targets.split(",")]
    for name in names:
        if name not in known:
            raise PlanError(
                "lora-targets",
                f"--lora-target-modules {targets!r}: {name!r} is no linear of a decoder layer. "
                f"Use {ALL_LINEAR} or names of: {', '.join(known)}.",
            )
    return {name: known[name] for name in dict.fromkeys(names)}


def adapter_parameters(shapes: dict[str, tuple[int, int]], rank: int) -> int:
    """Parameters of one layer's adapters: A is r x inputs, B outputs x r."""
    return sum(rank * (inputs + outputs) for inputs, outputs in shapes.values())


def small_adapter_parameters(shapes: dict[str, tuple[int, int]], rank: int, below: int) -> int:
    """Parameters of one layer's adapter matrices that have fewer than ``below`` elements."""
    return sum(rank * side for shape in shapes.values() for side in shape if rank * side < below)


@item("lora.adapters", "parameter")
def adapters(*, num_parameters: int, dtype_bytes: int, ranks: int) -> int:
    """Adapter weights: float32 by peft's choice, bf16 by TRL's on a quantised base.

    Formula: ``b*P_a/W``
    Live in: every phase
    Rounding: up to whole bytes
    Ignores: 512-byte blocks of small tensors
    Source: peft 0.21 autocast_adapter_dtype; trl 1.16 SFTTrainer; resident bytes of rows m020, m122
    Confidence: exact
    """
    return ceil_div(dtype_bytes * num_parameters, ranks)


@item("lora.weight_casts", "temporary")
def weight_casts(*, layer_parameters: int) -> int:
    """Bf16 casts of one layer's adapters; until the forward ends those of all layers that ran.

    Formula: ``2*P_a_layer``; forward: ``2*P_a``, less what down_proj of the last layer has yet to cast
    Live in: forward, backward of a layer
    Rounding: exact
    Ignores: nothing
    Source: autocast; allocator trace of Qwen3-4B with r=16
    Confidence: exact
    """
    return BF16_BYTES * layer_parameters


@item("lora.saved", "activation")
def saved(*, tokens: int, sum_of_inputs: int, num_targets: int, rank: int) -> int:
    """Every adapted linear's own bf16 copy of its input, and A's output.

    Formula: ``(2*inputs + 2*r)*T`` summed over the adapted linears
    Live in: backward of a layer
    Rounding: exact
    Ignores: nothing
    Source: peft 0.21 LoraLayer.forward under autocast; allocator trace of Qwen3-4B with r=16
    Confidence: exact
    """
    return (2 * sum_of_inputs + 2 * rank * num_targets) * tokens


@item("lora.shared_inputs", "activation")
def shared_inputs(*, tokens: int, sum_of_inputs: int, num_targets: int, rank: int) -> int:
    """Inputs of adapted linears and A's outputs where adapters compute in bf16: one input serves q, k, v, one gate, up.

    Under FSDP2 mixed precision casts the adapters themselves, so no input is cast. A down_proj's input is the product.

    Formula: ``(2*inputs + 2*r*targets)*T``
    Live in: backward of a layer (FSDP2)
    Rounding: exact
    Ignores: nothing
    Source: torch.distributed.fsdp MixedPrecisionPolicy; allocator trace of Qwen3-8B with r=16, cp 4
    Confidence: exact
    """
    return (2 * sum_of_inputs + 2 * rank * num_targets) * tokens


@item("lora.dropped_inputs", "activation")
def dropped_inputs(*, tokens: int, sum_of_inputs: int, num_targets: int, rank: int) -> int:
    """With lora_dropout every adapted linear has its own dropped input (bf16), its mask (a byte each), and A's output.

    Formula: ``(2*inputs + inputs + 2*r)*T`` summed over the adapted linears
    Live in: backward of a layer (lora_dropout > 0)
    Rounding: exact
    Ignores: nothing
    Source: torch native_dropout; allocator traces of Qwen3-4B, Llama-3.2-1B and Qwen3-8B (cp 4) with dropout
    Confidence: exact
    """
    return (3 * sum_of_inputs + 2 * rank * num_targets) * tokens


@item("lora.down_forward", "temporary")
def down_forward(*, tokens: int, hidden_size: int, intermediate_size: int, wide: bool, dropout: bool) -> int:
    """End of the recomputation, in down_proj's adapter.

    The product is alive (2I), in float32 adapters its float32 copy too (4I) and with dropout the dropped copy (4I);
    and five times 2H: the mid-layer sum, the MLP's input, the base's result, and twice the incoming gradient less the
    one that every instant has.

    Formula: ``(2*I + 8*H)*T``; float32 adapters: ``(6*I + 8*H)*T``; and dropout: ``(10*I + 8*H)*T``
    Live in: backward of a layer (down_proj adapted)
    Rounding: exact
    Ignores: nothing
    Source: peft 0.21 LoraLayer._cast_input_dtype; allocator traces of Qwen3-4B with r=16, nf4, dropout; row m020
    Confidence: exact
    """
    product = (10 if dropout else 6) if wide else 2
    return (product * intermediate_size + 8 * hidden_size) * tokens


@item("lora.mlp_forward", "temporary")
def mlp_forward(
    *,
    tokens: int,
    hidden_size: int,
    intermediate_size: int,
    rank: int,
    gate: bool,
    up: bool,
    down: bool,
    wide: bool,
    dropout: bool,
) -> int:
    """Forward of an MLP, of which linears may be adapted, without saving: in one of them, or behind them.

    In up_proj the activation, the base's output, the adapter's and that scaled are alive, and the input of float32
    adapters in float32; in gate_proj all but the activation. In down_proj float32 adapters have the product's float32
    copy and its cast for the adapter, and with dropout the dropped copy. Beside them residual and normed input, in
    down_proj the base's output as well.

    Formula: ``max((6*I + 4*H)*T, gate, up, down)``; gate: ``(6*I + n*H)*T``, up: ``(8*I + n*H)*T``, n = 8 with float32
        adapters, else 4; down, float32 adapters: ``(8*I + 6*H + 2*r)*T``, with dropout ``(12*I + 6*H + 2*r)*T``
    Live in: forward (an MLP's linears adapted)
    Rounding: exact
    Ignores: nothing
    Source: peft 0.21 LoraLayer.forward; traces of Qwen2 and Mistral with r=8; rows m324 and m325
    Confidence: exact
    """
    widths = [6 * intermediate_size + 4 * hidden_size]
    hidden = (8 if wide else 4) * hidden_size
    if gate:
        widths.append(6 * intermediate_size + hidden)
    if up:
        widths.append(8 * intermediate_size + hidden)
    if down and wide:
        widths.append((12 if dropout else 8) * intermediate_size + 6 * hidden_size + 2 * rank)
    return max(widths) * tokens
