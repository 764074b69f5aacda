"""Activations of decoder layers outside attention: stored inputs, norms, MLP, rotary tables, batch.

Letters: T tokens per rank, N tokens of a tile, H hidden size, I intermediate size, d head_dim, b bytes of one element.
"""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.estimators.weights import BF16_BYTES, FP32_BYTES

INT64_BYTES = 8
"""torch.int64.itemsize; token ids, labels, masks and positions are int64."""
TRL_STASHED_TENSORS = 5
"""Layer inputs on their way to the host in the forward pass: trl 1.16 OffloadActivations max_fwd_stash_size."""


@item("inputs.batch", "input")
def batch(*, tokens: int, micro_batches: int) -> int:
    """input_ids, labels and attention_mask of the whole (unsplit) sequence, int64, for every micro batch of the step.

    Formula: ``3*8*L*B*micro_batches``
    Live in: every phase
    Rounding: exact
    Ignores: nothing
    Source: trl 1.16 DataCollatorForLanguageModeling; Trainer.get_batch_samples; rows m007, m012
    Confidence: exact
    """
    return 3 * INT64_BYTES * tokens * micro_batches


@item("inputs.positions", "input")
def positions(*, tokens: int) -> int:
    """Position ids of one row.

    Formula: ``8*T``
    Live in: forward, loss, backward
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 model forward; row m007
    Confidence: exact
    """
    return INT64_BYTES * tokens


@item("inputs.context_parallel_buffers", "input")
def context_parallel_buffers(*, sequence_tokens: int, rows: int, tokens_per_rank: int) -> int:
    """Shifted labels and positions of the full sequence, and the rank's share of each of six buffers.

    Formula: ``8*L*B + 8*L + 6*8*T``
    Live in: forward, loss, backward; optimizer_step without the rank's shares
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 Trainer._prepare_context_parallel_inputs; allocator trace of Qwen3-0.6B, cp 8
    Confidence: exact
    """
    return INT64_BYTES * (sequence_tokens * rows + sequence_tokens + 6 * tokens_per_rank)


@item("activations.rotary_tables", "activation")
def rotary_tables(*, tokens: int, head_dim: int, dtype_bytes: int) -> int:
    """cos and sin of the rotary embedding, kept all step.

    Where they are float32 (OLMo 2), FSDP2 casts them for each layer, which keeps its own until its backward.

    Formula: ``2*b*d*T``; float32 tables under FSDP2: ``2*2*d*T*layers_left``
    Live in: forward, loss, backward
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 Qwen3RotaryEmbedding; FSDP2 MixedPrecisionPolicy.cast_forward_inputs; rows m007, m102
    Confidence: exact
    """
    return 2 * dtype_bytes * head_dim * tokens


@item("activations.layer_inputs", "activation")
def layer_inputs(*, num_layers: int, tokens: int, hidden_size: int, dtype_bytes: int) -> int:
    """Inputs of checkpointed layers that have not run backward yet; none stay on the GPU when offloaded.

    Formula: ``b*H*T*layers_left``
    Live in: forward, loss, backward
    Rounding: exact
    Ignores: nothing
    Source: torch.utils.checkpoint; Korthikanti et al. 2022, arXiv:2205.05198, full recomputation; rows m003, m007
    Confidence: exact
    """
    return num_layers * tokens * hidden_size * dtype_bytes


@item("activations.norms", "activation")
def norms(
    *, tokens: int, hidden_size: int, num_norms: int, float32: bool, wide: bool, frozen: bool, num_linears: int
) -> int:
    """What RMSNorms before linears save: float32 input, reciprocal root, normed value, output.

    A wide norm (OLMo 2) keeps the normed value in float32. In float32 training the input is the residual itself, and
    each following linear (3 or 2) saves its own bf16 cast. Frozen weights (LoRA) need neither normed value nor output.

    Formula: ``(8*H + 4)*T*norms``; wide: ``(10*H + 4)*T*norms``; frozen: ``(4*H + 4)*T*norms``; float32: ``(4*H +
        4)*T*norms + 2*H*T*linears``
    Live in: backward of a layer; times layers without checkpointing
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 Qwen3RMSNorm; autograd of pow, rsqrt, mul; allocator traces
    Confidence: exact
    """
    if float32:
        return num_norms * (4 * hidden_size + 4) * tokens + 2 * num_linears * hidden_size * tokens
    if frozen:
        return num_norms * (4 * hidden_size + 4) * tokens
    return num_norms * ((10 if wide else 8) * hidden_size + 4) * tokens


@item("activations.fused_norms", "activation")
def fused_norms(*, tokens: int, hidden_size: int, num_norms: int) -> int:
    """What Liger's RMSNorm before linears saves beside its input, which is the residual: reciprocal root, output.

    Formula: ``(2*H + 4)*T*norms``
    Live in: backward of a layer; times layers without checkpointing
    Rounding: exact
    Ignores: partial sums of the weight's gradient, one row a multiprocessor
    Source: liger-kernel 0.8.5 ops/rms_norm.py LigerRMSNormFunction
    Confidence: modelled
    """
    return num_norms * (2 * hidden_size + 4) * tokens


@item("activations.closing_norms", "activation")
def closing_norms(*, tokens: int, hidden_size: int, num_norms: int, wide: bool) -> int:
    """What RMSNorms behind attention and MLP save: float32 input, reciprocal root, normed value.

    Their output is added to the residual, which saves nothing.

    Formula: ``(6*H + 4)*T*norms``; wide (normed value in float32): ``(8*H + 4)*T*norms``
    Live in: backward of a layer
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 Glm4RMSNorm, Olmo2RMSNorm; allocator traces of both
    Confidence: exact
    """
    return num_norms * ((8 if wide else 6) * hidden_size + 4) * tokens


@item("activations.closing_norm_backward", "temporary")
def closing_norm_backward(*, tokens: int, hidden_size: int, wide: bool) -> int:
    """Backward of the norm behind the MLP, while everything the layer saved is still there.

    Five float32 tensors are alive; the saved normed value is gone, which is as wide in float32 training as with a wide
    norm.

    Formula: ``(20 - 2)*H*T``; wide: ``(20 - 4)*H*T``
    Live in: backward of a layer's closing norm
    Rounding: exact
    Ignores: nothing
    Source: autograd of pow, mean, rsqrt, mul; allocator traces of GLM-4 and OLMo 2; row m192 in float32
    Confidence: exact
    """
    return (16 if wide else 18) * hidden_size * tokens


@item("activations.feeding_norm_backward", "temporary")
def feeding_norm_backward(*, tokens: int, hidden_size: int) -> int:
    """Backward of the norm before experts or a tiled MLP: its saved float32 input and five float32 tensors more.

    Formula: ``24*H*T``
    Live in: backward of a layer with experts (narrow ones, short sequences) or tiles, when their gradients exist
    Rounding: exact
    Ignores: some bytes a token
    Source: autograd of pow, mean, rsqrt, mul; trace of Qwen3-MoE with narrow experts
    Confidence: exact
    """
    return 6 * FP32_BYTES * hidden_size * tokens


@item("activations.residual", "activation")
def residual(*, tokens: int, hidden_size: int, dtype_bytes: int, copies: int) -> int:
    """Residual stream in the running layer: the gradient that flows in, and the mid-layer sum where it is saved.

    It is saved in float32 training, and where the MLP has no norm before it (OLMo 2).

    Formula: ``b*H*T*copies``
    Live in: backward of a layer
    Rounding: exact
    Ignores: nothing
    Source: allocator traces of Qwen3-0.6B and Qwen3-4B float32
    Confidence: exact
    """
    return copies * dtype_bytes * hidden_size * tokens


@item("mlp.saved", "activation")
def mlp_saved(*, tokens: int, intermediate_size: int, frozen: bool) -> int:
    """gate, up, activation and product of a SwiGLU MLP, bf16; a frozen down_proj does not need the product.

    Formula: ``8*I*T``; frozen: ``6*I*T``
    Live in: backward of a layer's MLP; times layers without checkpointing
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 Qwen3MLP; autograd of silu and mul; allocator traces
    Confidence: exact
    """
    return (6 if frozen else 8) * intermediate_size * tokens


@item("mlp.backward", "temporary")
def mlp_backward(*, tokens: int, intermediate_size: int, frozen: bool) -> int:
    """Gradients inside the SwiGLU backward, above mlp.saved: three alive, a saved product gone.

    Formula: ``4*I*T``; frozen: ``6*I*T``
    Live in: backward of a layer's MLP
    Rounding: exact
    Ignores: nothing
    Source: allocator traces of Qwen3-0.6B and Llama-3.2-1B; rows m001-m011
    Confidence: exact
    """
    return (6 if frozen else 4) * intermediate_size * tokens


@item("mlp.fused_saved", "activation")
def fused_mlp_saved(*, tokens: int, intermediate_size: int) -> int:
    """gate, up and product of a SwiGLU MLP whose activation Liger recomputes, bf16.

    Formula: ``6*I*T``
    Live in: backward of a layer's MLP; times layers without checkpointing
    Rounding: exact
    Ignores: nothing
    Source: liger-kernel 0.8.5 ops/swiglu.py LigerSiLUMulFunction
    Confidence: modelled
    """
    return 6 * intermediate_size * tokens


@item("mlp.fused_backward", "temporary")
def fused_mlp_backward(*, tokens: int, hidden_size: int, intermediate_size: int) -> int:
    """Gradients of the product and of down_proj's weight, above mlp.fused_saved; gate's and up's take their place.

    Formula: ``2*I*T + 2*H*I``
    Live in: backward of a layer's MLP
    Rounding: exact
    Ignores: nothing
    Source: liger-kernel 0.8.5 ops/swiglu.py swiglu_backward
    Confidence: modelled
    """
    return BF16_BYTES * intermediate_size * (tokens + hidden_size)


@item("mlp.down_backward", "temporary")
def down_backward(*, tokens: int, intermediate_size: int) -> int:
    """Gradient of the product through down_proj, from its adapter and from its base; the product itself is gone.

    Formula: ``4*I*T``
    Live in: backward of a layer's down_proj (nf4)
    Rounding: exact
    Ignores: nothing
    Source: order of autograd; allocator trace of Qwen3-4B with nf4
    Confidence: exact
    """
    return 4 * intermediate_size * tokens


@item("mlp.first_tile", "temporary")
def mlp_first_tile(*, tile: int, hidden_size: int, intermediate_size: int) -> int:
    """The first tile of a tiled MLP in its backward, where those behind it are smaller.

    Formula: ``(2*H + 12*I)*N``
    Live in: backward of a layer's MLP (two tiles)
    Rounding: exact
    Ignores: nothing
    Source: lcplan/backends/templates/tiling.py; mlp.saved and mlp.backward; trace of Llama-3.1-8B in tiles of 40,000
    Confidence: exact
    """
    return (2 * hidden_size + 12 * intermediate_size) * tile


@item("mlp.tile", "temporary")
def mlp_tile(*, tile: int, hidden_size: int, intermediate_size: int) -> int:
    """A tile behind the first in the backward of a tiled MLP: N tokens' intermediates, recomputed, and their output.

    Either three gradients are alive beside the saved tensors, one of which is gone, or down_proj makes its gradient.

    Formula: ``(2*H + 10*I)*N + 2*I*max(N, H)``
    Live in: backward of a layer's MLP (tiles)
    Rounding: exact
    Ignores: nothing
    Source: lcplan/backends/templates/tiling.py; mlp.saved and mlp.backward; traces of Qwen3-8B in tiles of 16,384
    Confidence: exact
    """
    return (2 * hidden_size + 10 * intermediate_size) * tile + 2 * intermediate_size * max(tile, hidden_size)


@item("mlp.tile_gradients", "gradient")
def mlp_tile_gradients(*, parameters: int) -> int:
    """Gradients of an MLP's weights, bf16, summed up over its tiles; in the first tile that of down_proj alone.

    Formula: ``2*P_mlp``; first tile: ``2*H*I``
    Live in: backward of a layer's MLP (tiles)
    Rounding: exact
    Ignores: nothing
    Source: lcplan/backends/templates/tiling.py
    Confidence: exact
    """
    return BF16_BYTES * parameters


@item("mlp.tiled_forward", "temporary")
def tiled_forward(
    *, tile: int, tokens: int, hidden_size: int, intermediate_size: int, hidden_states: int, fused_projection: bool
) -> int:
    """Forward of a tiled MLP without saving: n hidden states (residual, normed input), a tile, the output so far.

    Behind the first tile there are the whole output and the last tile's; the second may be smaller than the first.
    Where one projection makes gate and up (Phi, GLM) the gate stays as long as up does.

    Formula: ``2*n*H*T + max(6*I*N, 6*I*min(N, T - N) + 2*H*N + 2*H*T)``; one projection: ``8*I`` for ``6*I``
    Live in: forward (checkpointed layers, tiles)
    Rounding: exact
    Ignores: nothing
    Source: lcplan/backends/templates/tiling.py; traces of Qwen3-8B in tiles of 16,384
    Confidence: exact
    """
    inner = (8 if fused_projection else 6) * intermediate_size
    output = BF16_BYTES * hidden_size
    later = inner * min(tile, tokens - tile) + output * (tile + tokens)
    return output * hidden_states * tokens + max(inner * tile, later)


@item("mlp.forward", "temporary")
def mlp_forward(
    *,
    tokens: int,
    hidden_size: int,
    intermediate_size: int,
    hidden_states: int,
    dtype_bytes: int,
    fused_projection: bool,
) -> int:
    """Forward of the MLP without saving: activation, up, product, and n hidden states (residual, normed input).

    Where one projection makes gate and up (Phi, GLM) the gate stays as long as up does.

    Formula: ``(6*I + n*b*H)*T``; one projection: ``(8*I + n*b*H)*T``
    Live in: forward (checkpointed layers)
    Rounding: exact
    Ignores: nothing
    Source: forward events of row m007; traces of every family; rows m323, m347, m359
    Confidence: exact
    """
    inner = (8 if fused_projection else 6) * intermediate_size
    return (inner + hidden_states * dtype_bytes * hidden_size) * tokens


@item("activations.norm_forward", "temporary")
def norm_forward(*, tokens: int, hidden_size: int, hidden_states: int, float32: bool) -> int:
    """Forward of a layer's RMSNorm without saving: n hidden states, its input and its normed value in float32.

    In float32 training the input is such a hidden state itself, and the output is a third.

    Formula: ``(2*n*H + 8*H + 4)*T``; float32: ``(4*n*H + 8*H + 4)*T``
    Live in: forward (checkpointed layers, tiles)
    Rounding: exact
    Ignores: some bytes a token
    Source: transformers 5.24 LlamaRMSNorm, Glm4RMSNorm; traces of tiled MLPs
    Confidence: exact
    """
    size = FP32_BYTES if float32 else BF16_BYTES
    return (size * hidden_states * hidden_size + 2 * FP32_BYTES * hidden_size + 4) * tokens
