"""Attention: what is saved, the backward kernel's scratch, and ring attention's buffers.

Letters: T tokens per rank, h query heads, k key/value heads, d head_dim, C cp_size.
All sizes are bf16 (2 bytes) unless the formula says float32. Backward kernel: cuDNN.
"""

from __future__ import annotations

from lcplan.estimators._item import item


@item("attention.qk_norm", "activation")
def qk_norm(*, tokens: int, heads: int, kv_heads: int, head_dim: int, wide: bool, full: bool, frozen: bool) -> int:
    """RMSNorm of queries and keys: float32 input, normed value, reciprocal root.

    Per head (Qwen3), or over the whole projection (OLMo 2), whose wide norm keeps the normed value in float32.

    Formula: ``(6*(h+k)*d + 4*(h+k))*T``; frozen: ``(4*(h+k)*d + 4*(h+k))*T``; wide and full: ``(8*(h+k)*d + 8)*T``
    Live in: backward of a layer; times layers without checkpointing
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 Qwen3Attention, Olmo2Attention; allocator traces of Qwen3-0.6B and OLMo 2
    Confidence: exact
    """
    roots = 2 if full else heads + kv_heads
    width = 4 if frozen else 8 if wide else 6
    return (width * (heads + kv_heads) * head_dim + 4 * roots) * tokens


@item("attention.saved", "activation")
def saved(*, tokens: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Query, key, value, output and log-sum-exp that the attention kernel saves.

    Formula: ``(4*h*d + 4*k*d + 4*h)*T``
    Live in: backward of a layer; times layers without checkpointing
    Rounding: exact
    Ignores: nothing
    Source: torch _scaled_dot_product_cudnn_attention; allocator traces
    Confidence: exact
    """
    return (4 * heads * head_dim + 4 * kv_heads * head_dim + 4 * heads) * tokens


@item("attention.kept_outputs", "activation")
def kept_outputs(*, num_layers: int, tokens: int, heads: int, head_dim: int) -> int:
    """Attention outputs and row sums that selective checkpointing keeps instead of recomputing them.

    Formula: ``(2*h*d + 4*h)*T*layers_left``
    Live in: forward, loss, backward
    Rounding: exact
    Ignores: nothing
    Source: trl 1.16 enable_selective_activation_checkpointing; allocator traces of Qwen3-4B and Qwen3-8B; row m026
    Confidence: exact
    """
    return num_layers * (2 * heads * head_dim + 4 * heads) * tokens


@item("attention.fused_qkv", "activation")
def fused_qkv(*, tokens: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """The fused projection's query and key parts, kept alive by the values that attention saves (Phi-3, Phi-4).

    Formula: ``2*(h+k)*d*T``
    Live in: backward of a layer; times layers without checkpointing
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 Phi3Attention; allocator trace of Phi-4's shapes
    Confidence: exact
    """
    return 2 * (heads + kv_heads) * head_dim * tokens


@item("attention.output_copy", "activation")
def output_copy(*, tokens: int, heads: int, head_dim: int) -> int:
    """Second copy of the attention output, where it comes in a layout that o_proj must copy.

    Ring attention concatenates it so on every rank but the last; families that build q and k by concatenation (Phi,
    GLM-4) hand that layout through attention.

    Formula: ``2*h*d*T``
    Live in: backward of a layer's MLP
    Rounding: exact
    Ignores: nothing
    Source: torch 2.11-2.13 _context_parallel/_attention.py _partial_update; rows m012-m014; trace of Phi-4's shapes
    Confidence: exact
    """
    return 2 * heads * head_dim * tokens


@item("attention.backward", "temporary")
def backward(*, tokens: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """cuDNN backward on one GPU: dO, dQ, dK, dV, float32 dQ accumulator, row sums, dK/dV at all heads.

    Formula: ``(8*h*d + 4*k*d + 4*h)*T``; ``+ 4*h*d*T`` if k < h
    Live in: backward of a layer's attention
    Rounding: exact
    Ignores: other kernels' scratch (FlashAttention's is the same size within its padding)
    Source: allocator traces of Qwen3-0.6B and Llama-3.2-1B; cuDNN workspace allocation in torch MHA.cpp
    Confidence: exact
    """
    expanded = 4 * heads * head_dim if kv_heads < heads else 0
    return (8 * heads * head_dim + 4 * kv_heads * head_dim + 4 * heads + expanded) * tokens


@item("attention.ring_gathered_kv", "all_gather")
def ring_gathered_kv(*, tokens: int, kv_heads: int, head_dim: int, cp_size: int, allgather: bool) -> int:
    """Keys and values of other ranks, and the own pair packed for sending.

    Formula: ``(C + 1)*4*k*d*T``; alltoall: ``min(C, 3)*4*k*d*T``
    Live in: backward of a layer's attention (context parallelism)
    Rounding: exact
    Ignores: nothing
    Source: torch 2.11-2.13 _AllGatherRotater, _AllToAllRotater; allocator traces with cp 8, ranks 0, 3, 7
    Confidence: exact
    """
    shards = cp_size + 1 if allgather else min(cp_size, 3)
    return shards * 4 * kv_heads * head_dim * tokens


@item("attention.ring_backward", "temporary")
def ring_backward(*, tokens: int, heads: int, kv_heads: int, head_dim: int, first_rank: bool) -> int:
    """Ring attention's second backward step: dO, float32 accumulators, the last step's results, this one's, scratch.

    Alive a token: dO 2hd, accumulators 4hd + 8kd, the first step's results 2hd + 4kd, gradients in transit 16kd. This
    step adds on rank 0, where half the queries meet all keys, results hd + 4kd and scratch 2hd + 2h + 2h, and 4hd
    if k < h; on the others, where all queries meet half the keys, results 2hd + 2kd and scratch 4hd + 4h, and 2hd
    if k < h.

    Formula: ``(8*h*d + 28*k*d + step)*T``; step = ``3*h*d + 4*k*d + 4*h`` or ``6*h*d + 2*k*d + 4*h``, and scratch
    Live in: backward of a layer's attention (context parallelism)
    Rounding: exact
    Ignores: forward merges, which are always smaller
    Source: torch 2.11-2.13 _templated_ring_attention_backward; allocator traces with cp 8, ranks 0, 3, 7; row m033
    Confidence: exact
    """
    query, key = heads * head_dim, kv_heads * head_dim
    grouped = kv_heads < heads
    common = 2 * query + 4 * query + 8 * key + 2 * query + 4 * key + 16 * key
    if first_rank:
        step = query + 4 * key + 2 * query + 2 * heads + 2 * heads + (4 * query if grouped else 0)
    else:
        step = 2 * query + 2 * key + 4 * query + 4 * heads + (2 * query if grouped else 0)
    return (common + step) * tokens
