"""Attention: what is saved, the backward kernel's scratch, and ring attention's buffers.

Letters: T tokens per rank, h query heads, k key/value heads, d head_dim, C cp_size.
All sizes are bf16 (2 bytes) unless the formula says float32. Backward kernel: cuDNN.
"""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.estimators.activations import INT64_BYTES
from lcplan.estimators.weights import BF16_BYTES, FP32_BYTES

FLASH_ROWS = 128
"""Tokens to which FlashAttention-2 rounds a sequence: flash_api.cpp seqlen_q_rounded."""
FLASH_COLUMNS = 32
"""Columns to which it rounds a head of up to 128, and 192 and 256 are multiples: flash_api.cpp head_size_rounded."""


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


@item("attention.fused_qk_norm", "activation")
def fused_qk_norm(*, tokens: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Liger's RMSNorm of queries and keys per head: input, reciprocal root; its output is rotated in place.

    Formula: ``(2*(h+k)*d + 4*(h+k))*T``
    Live in: backward of a layer; times layers without checkpointing
    Rounding: exact
    Ignores: nothing
    Source: liger-kernel 0.8.5 ops/rms_norm.py, ops/rope.py
    Confidence: modelled
    """
    return (2 * (heads + kv_heads) * head_dim + 4 * (heads + kv_heads)) * tokens


@item("attention.query_norm_backward", "temporary")
def query_norm_backward(*, tokens: int, heads: int, kv_heads: int, head_dim: int, norms_projected: bool) -> int:
    """Backward of the queries' norm, when the kernel's is over: its saved float32 input and five float32 tensors more.

    Where all projections come before it (Gemma 3, Exaone 4, Hunyuan), gradients of keys and values wait for theirs.

    Formula: ``24*h*d*T``; behind all projections: ``(24*h*d + 4*k*d)*T``
    Live in: backward of a layer's query norm (few key/value heads, narrow MLP)
    Rounding: exact
    Ignores: some bytes a token
    Source: autograd of pow, mean, rsqrt, mul; traces of Qwen3, OLMo 2, Exaone 4 and Hunyuan with one key/value head
    Confidence: exact
    """
    waiting = 2 * BF16_BYTES * kv_heads * head_dim if norms_projected else 0
    return (6 * FP32_BYTES * heads * head_dim + waiting) * tokens


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

    With offload they wait on the host, and in the forward one layer's are on their way there.

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


@item("attention.flash_backward", "temporary")
def flash_backward(*, tokens: int, row_tokens: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """FlashAttention-2's own backward: dO, dQ, dK, dV, float32 dQ accumulator and row sums in padded blocks.

    A sequence is rounded up to 128 tokens and a head to 32 columns, T' and d'; dK and dV are at all heads if k < h.

    Formula: ``(4*h*d + 4*k*d)*T + 4*h*(d' + 1)*T'``; ``+ 4*h*d*T`` if k < h
    Live in: backward of a layer's attention (flash_attention_2)
    Rounding: exact
    Ignores: the deterministic backward, which has one accumulator a block of keys
    Source: allocator histories of Qwen3-4B and Llama-3.2-1B (32,768 tokens, H200), whose path ran over torch's own
        FlashAttention-2 kernels; the rounding from flash_api.cpp mha_bwd
    Confidence: exact
    """
    padded_tokens = tokens // row_tokens * (-(-row_tokens // FLASH_ROWS) * FLASH_ROWS)
    padded_dim = -(-head_dim // FLASH_COLUMNS) * FLASH_COLUMNS
    expanded = 4 * heads * head_dim if kv_heads < heads else 0
    kept = (4 * heads * head_dim + 4 * kv_heads * head_dim + expanded) * tokens
    return kept + 4 * heads * (padded_dim + 1) * padded_tokens


@item("attention.masks", "input")
def masks(*, tokens: int, row_tokens: int, num_masks: int, element_bytes: int) -> int:
    """Materialised masks, held by the checkpointed layers that take them: bool for sdpa, bf16 for eager attention.

    sdpa has one where a layer slides and a sequence is at least as long as its window; eager attention has one for each
    kind of layer.

    Formula: ``b*T*L*masks``
    Live in: forward; loss and backward while a checkpointed layer that takes it is left
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 masking_utils.py sdpa_mask, eager_mask; traces of Gemma 2, Gemma 3 and gpt-oss
    Confidence: exact
    """
    return num_masks * element_bytes * tokens * row_tokens


@item("attention.masked_saved", "activation")
def masked_saved(*, tokens: int, row_tokens: int, heads: int, repeated_heads: int, head_dim: int) -> int:
    """What sdpa saves with a mask: query, key and value at all heads, output, row sums, the mask as bf16 bias.

    A single key/value head is repeated without a copy: r is 1 then, else h.

    Formula: ``(4*h*d + 4*r*d + 4*h + 2*L)*T``
    Live in: backward of a sliding layer; times layers without checkpointing
    Rounding: exact
    Ignores: padding of the bias where L is no multiple of 8
    Source: transformers 5.24 sdpa_attention_forward (repeat_kv with a mask); torch convert_boolean_attn_mask; trace
    Confidence: exact
    """
    return (4 * (heads + repeated_heads) * head_dim + 4 * heads + 2 * row_tokens) * tokens


@item("attention.masked_backward", "temporary")
def masked_backward(*, tokens: int, heads: int, head_dim: int) -> int:
    """sdpa's backward with a mask: dO, dQ, dK, dV at all heads, float32 dQ accumulator, row sums.

    Formula: ``(12*h*d + 4*h)*T``
    Live in: backward of a sliding layer's attention
    Rounding: exact
    Ignores: nothing
    Source: torch 2.11-2.13 _scaled_dot_product_efficient_attention_backward, cuDNN's with a bias
    Confidence: modelled
    """
    return (12 * heads * head_dim + 4 * heads) * tokens


@item("attention.eager_saved", "activation")
def eager_saved(
    *, tokens: int, row_tokens: int, heads: int, repeated_heads: int, head_dim: int, soft_capped: bool, sinks: bool
) -> int:
    """What eager attention saves: probabilities in float32 and bf16, query, key and value at all heads, output.

    Soft-capped scores are saved as well (Gemma 2). With sinks (gpt-oss) there is one more column, probabilities are
    bf16 alone, and the position of each row's largest score is kept. r is h, or 1 where a single key/value head is
    repeated without a copy.

    Formula: ``(6*h*L + 4*h*d + 4*r*d)*T``; soft-capped: ``+ 2*h*L*T``; sinks: ``2*h*(L + 1) + 8*h`` for ``6*h*L``
    Live in: backward of a layer; times layers without checkpointing
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 eager_attention_forward of Llama, Gemma 2 and gpt-oss; traces; H200 histories of the three
    Confidence: exact
    """
    scores = 2 * (row_tokens + 1) + INT64_BYTES if sinks else (8 if soft_capped else 6) * row_tokens
    return (heads * scores + 4 * (heads + repeated_heads) * head_dim) * tokens


@item("attention.eager_backward", "temporary")
def eager_backward(
    *, tokens: int, row_tokens: int, heads: int, repeated_heads: int, head_dim: int, soft_capped: bool, sinks: bool
) -> int:
    """Backward of eager attention's softmax: probabilities, their gradient, the scores' gradient and their product.

    All four are float32, with sinks bf16 and one column wider. Query, keys at all heads and dV are there; values,
    output and the bf16 probabilities are gone.

    Formula: ``(16*h*L + 4*h*d + 2*r*d)*T``; soft-capped: ``+ 2*h*L*T``; sinks: ``8*h*(L + 1) + 8*h`` for ``16*h*L``
    Live in: backward of a layer's attention (eager)
    Rounding: exact
    Ignores: lengths below head_dim, where another instant of the same backward is larger
    Source: aten/src/ATen/native/cuda/SoftMax.cu (the product); H200 histories of Qwen3, Gemma 2 and gpt-oss
    Confidence: exact
    """
    scores = 8 * (row_tokens + 1) + INT64_BYTES if sinks else (18 if soft_capped else 16) * row_tokens
    return (heads * scores + (4 * heads + 2 * repeated_heads) * head_dim) * tokens


@item("attention.ring_gathered_kv", "all_gather")
def ring_gathered_kv(
    *, tokens: int, kv_heads: int, head_dim: int, cp_size: int, allgather: bool, head_chunks: int
) -> int:
    """Keys and values of other ranks, and the own pair packed for sending; of one of G parts of the heads at a time.

    Formula: ``(C + 1)*4*k*d*T/G``; alltoall: ``min(C, 3)*4*k*d*T/G``
    Live in: backward of a layer's attention (context parallelism)
    Rounding: exact
    Ignores: nothing
    Source: torch 2.11-2.13 _AllGatherRotater, _AllToAllRotater; allocator traces with cp 8, ranks 0, 3, 7
    Confidence: exact
    """
    shards = cp_size + 1 if allgather else min(cp_size, 3)
    return shards * 4 * kv_heads // head_chunks * head_dim * tokens


@item("attention.ring_backward", "temporary")
def ring_backward(
    *, tokens: int, heads: int, kv_heads: int, head_dim: int, first_rank: bool, head_chunks: int, merge_bytes: int
) -> int:
    """Ring attention's second backward step: dO, float32 accumulators, the last step's results, this one's, scratch.

    Alive a token: dO 2hd, accumulators 4hd + 8kd, the first step's results 2hd + 4kd, gradients in transit 16kd. This
    step adds on rank 0, where half the queries meet all keys, results hd + 4kd and scratch 2hd + 2h + 2h, and 4hd
    if k < h; on the others, where all queries meet half the keys, results 2hd + 2kd and scratch 4hd + 4h, and 2hd
    if k < h. On rank 0 with k = h the end of the first step is larger: contiguous keys and values 4kd are still there,
    and the pair packed for sending.

    With cp_merge_dtype bfloat16 accumulators and gradients in transit take b = 2 bytes for 4. With G parts of the heads
    in turn dO and the three gradients are whole, and everything else is that of one part.

    Formula: ``R = ((4 + b)*h*d + (4 + 6*b)*k*d + step)*T``; step = ``3*h*d + 4*k*d + 4*h`` or ``6*h*d + 2*k*d + 4*h``,
        and scratch; rank 0 with k = h: at least ``((4 + b)*h*d + (12 + 6*b)*k*d)*T``; G parts: ``(4*h*d + 4*k*d)*T +
        (R - 2*h*d*T)/G``
    Live in: backward of a layer's attention (context parallelism)
    Rounding: exact
    Ignores: nothing
    Source: torch 2.11-2.13 _templated_ring_attention_backward; allocator traces with cp 8, ranks 0, 3, 7; row m033;
        history of OLMo 2 with cp 4
    Confidence: exact
    """
    query, key, wide = heads * head_dim, kv_heads * head_dim, merge_bytes
    grouped = kv_heads < heads
    given = 2 * query
    common = wide * query + 2 * wide * key + 2 * query + 4 * key + 4 * wide * key
    if first_rank:
        step = query + 4 * key + 2 * query + 2 * heads + 2 * heads + (4 * query if grouped else 0)
    else:
        step = 2 * query + 2 * key + 4 * query + 4 * heads + (2 * query if grouped else 0)
    own = common + step
    if first_rank and not grouped:
        own = max(own, (2 + wide) * query + (12 + 6 * wide) * key)
    if head_chunks == 1:
        return (given + own) * tokens
    return (given + 2 * query + 4 * key) * tokens + own * tokens // head_chunks


@item("attention.forward", "temporary")
def forward(
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    qk_norm: bool,
    norms_rotated: bool,
    wide_rotary: bool,
    fused_qkv: bool,
    hidden_size: int,
) -> int:
    """Around the kernel, without saving: rotation of the queries, or their norm; beside them the layer's normed input.

    Rotating holds queries, two products and their sum, keys and values; the norm input and normed value in float32.
    With float32 tables products and sum are float32. Of each head a part d' is rotated. A fused projection (Phi) stays
    as long as its values do, beside rotated queries and keys, output and its copy. H is 0 where no norm feeds
    attention.

    Formula: ``(2*h*d + 6*h*d' + 4*k*d + 2*H)*T``; float32 tables: ``12*h*d'`` for ``6*h*d'``; with query norms at least
        ``(10*h*d + 8*h + 2*H)*T``, ``+ 4*k*d*T`` where they come after the rotation; fused projection: at least
        ``(8*h*d + 6*k*d + 2*H)*T``
    Live in: forward (checkpointed layers)
    Rounding: exact
    Ignores: some bytes a token
    Source: transformers 5.24 apply_rotary_pos_emb, Qwen3Attention; traces of Qwen2, OLMo 2; row m367
    Confidence: exact
    """
    keys = 4 * kv_heads * head_dim
    rotated = (2 * head_dim + (12 if wide_rotary else 6) * rotary_dim) * heads + keys
    normed = 10 * heads * head_dim + 8 * heads + (keys if norms_rotated else 0) if qk_norm else 0
    copied = (8 * heads + 6 * kv_heads) * head_dim if fused_qkv else 0
    return (max(rotated, normed, copied) + 2 * hidden_size) * tokens


@item("attention.masked_forward", "temporary")
def masked_forward(
    *, tokens: int, row_tokens: int, heads: int, kv_heads: int, repeated_heads: int, head_dim: int, hidden_size: int
) -> int:
    """sdpa with a mask, without saving: what attention.masked_saved has, keys and values as they were, normed input.

    r is the heads at which keys and values are repeated; where that takes no copy, they are there once. H is 0 where
    no norm feeds attention.

    Formula: ``(4*h*d + 4*r*d + 4*h + 2*L + 2*H)*T``; r > k: ``+ 4*k*d*T``
    Live in: forward (checkpointed layers that take a mask)
    Rounding: exact
    Ignores: padding of the bias where L is no multiple of 8
    Source: transformers 5.24 sdpa_attention_forward; traces of Gemma 3, Exaone 4, and Llama with padding
    Confidence: exact
    """
    repeated = 4 * kv_heads * head_dim if repeated_heads > kv_heads else 0
    kept = masked_saved(
        tokens=tokens, row_tokens=row_tokens, heads=heads, repeated_heads=repeated_heads, head_dim=head_dim
    )
    return kept + (repeated + 2 * hidden_size) * tokens


@item("attention.eager_forward", "temporary")
def eager_forward(
    *,
    tokens: int,
    row_tokens: int,
    heads: int,
    kv_heads: int,
    repeated_heads: int,
    head_dim: int,
    soft_capped: bool,
    sinks: bool,
    hidden_size: int,
) -> int:
    """Eager attention's softmax without saving: masked scores, in float32, probabilities; queries, keys, values, input.

    With sinks (gpt-oss) all three are bf16, two of them one column wider, beside the largest score of each row. A layer
    that is not checkpointed has saved its soft-capped scores (Gemma 2).

    Formula: ``(10*h*L + 2*h*d + 4*r*d + 2*H)*T``; sinks: ``6*h*L + 6*h`` for ``10*h*L``; soft-capped: ``+ 2*h*L*T``;
        r > k: ``+ 4*k*d*T``
    Live in: forward (eager)
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 eager_attention_forward of Llama, Gemma 2 and gpt-oss; traces
    Confidence: exact
    """
    scores = 6 * row_tokens + 6 if sinks else (12 if soft_capped else 10) * row_tokens
    keys = 4 * repeated_heads + (4 * kv_heads if repeated_heads > kv_heads else 0)
    return (heads * scores + (2 * heads + keys) * head_dim + 2 * hidden_size) * tokens


@item("attention.eager_weights", "temporary")
def eager_weights(*, tokens: int, row_tokens: int, heads: int, sinks: bool) -> int:
    """Probabilities of eager attention, which a decoder layer's forward refers to until its end.

    Formula: ``2*h*L*T``; sinks: ``2*h*(L + 1)*T``
    Live in: forward (checkpointed layers, eager)
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 GptOssDecoderLayer, Gemma2DecoderLayer (``hidden_states, _ = self.self_attn(...)``); trace
    Confidence: exact
    """
    return 2 * heads * (row_tokens + (1 if sinks else 0)) * tokens


@item("attention.ring_forward", "temporary")
def ring_forward(
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cp_size: int,
    cp_rank: int,
    allgather: bool,
    head_chunks: int,
    merge_bytes: int,
    hidden_size: int,
) -> int:
    """Ring attention's merge of one step's output into the sum so far, without saving.

    Queries, keys and values are there, the layer's normed input, and other ranks' keys and values: gathered at once, or
    those of this step and the next. The first rank merges half of the queries: the old sum and the new one (4hd each),
    this step's output in float32 and merged (2hd each), and as it came (hd). The others merge all: sum, output,
    their difference and its product (4hd each), and the output as it came (2hd). Row sums take 8h, or 12h.

    With cp_merge_dtype bfloat16 outputs stay as they came, but a merged sum is float32 all the same: the row sums are,
    and the first merge alone has a bf16 one. With G parts of the heads in turn the result is whole, and everything but
    queries, keys and values is that of one part. H is 0 where no norm feeds attention.

    Formula: ``(2*h*d + 4*k*d + 2*H + (m*h*d + s*h + n*4*k*d)/G)*T``; G > 1: ``+ (2*h*d + 4*h)*T``; n = C, alltoall:
        ``min(C - 1, 2)``; s = 8 on rank 0, else 12; m = 13 on rank 0, else 18; bfloat16: m = 11 on rank 0, 9 for C = 2,
        12 on rank 1, 14 on the others
    Live in: forward (context parallelism, checkpointed layers)
    Rounding: exact
    Ignores: that the last step has no next keys and values, where it is the largest (alltoall, bfloat16, C = 3)
    Source: torch 2.11-2.13 _templated_ring_attention, _SDPAMerger; traces with cp 2 and 4; rows m346 and m366
    Confidence: exact
    """
    narrow = merge_bytes == BF16_BYTES
    if cp_rank == 0:
        merged, sums = (9 if cp_size == 2 else 11) if narrow else 13, 8
    else:
        merged, sums = (12 if cp_rank == 1 else 14) if narrow else 18, 12
    shards = cp_size if allgather else min(cp_size - 1, 2)
    part = (merged * heads * head_dim + sums * heads + shards * 4 * kv_heads * head_dim) * tokens // head_chunks
    whole = (2 * heads + 4 * kv_heads) * head_dim + 2 * hidden_size
    if head_chunks > 1:
        whole += 2 * heads * head_dim + 4 * heads
    return whole * tokens + part


@item("attention.ulysses_forward", "temporary")
def ulysses_forward(*, tokens: int, heads: int, kv_heads: int, head_dim: int, sp_size: int, hidden_size: int) -> int:
    """End of attention under Ulysses, without saving: queries, keys, values and the normed input, each as it was.

    Then those of this rank's heads for all tokens, its output, and the output of all heads for its own tokens as it
    came and in its place; positions of all tokens twice. Key/value heads are repeated until every rank has one, k'.

    Formula: ``(10*h*d + 4*k*d + 4*k'*d + 2*H + 16*S)*T`` on S ranks
    Live in: forward (Ulysses, checkpointed layers)
    Rounding: exact within some bytes a token
    Ignores: nothing
    Source: deepspeed 0.19 runtime/sequence_parallel/ulysses_sp.py UlyssesSPAttentionHF; row m345
    Confidence: exact
    """
    keys = 4 * (kv_heads + max(kv_heads, sp_size)) * head_dim
    return (10 * heads * head_dim + keys + 2 * hidden_size + 2 * INT64_BYTES * sp_size) * tokens
