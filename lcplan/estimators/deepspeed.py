"""Items of DeepSpeed ZeRO: sharded masters, the gradient bucket, gathered parameters, the update.

Letters: P parameters, W ranks, V vocabulary, H hidden size, T tokens per rank, L tokens of a sequence, E elements, b
bytes of one element. Which parameters are in a bucket, a partition, or gathered is counted in ``deepspeed_order``.
"""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.estimators.activations import INT64_BYTES
from lcplan.estimators.deepspeed_order import REDUCE_BUCKET
from lcplan.estimators.weights import BF16_BYTES, FP32_BYTES
from lcplan.units import ceil_div

FP64_BYTES = 8
"""torch.float64.itemsize; norms are taken in float64 (deepspeed 0.19.8 runtime/utils.py get_norm_dtype)."""
NORM_CHUNK = 250_000_000
"""Elements of one gradient whose norm is taken at once: deepspeed 0.19.8 stage3.py _constant_buffered_norm2."""


@item("weights.zero_masters", "parameter")
def master_weights(*, num_parameters: int, ranks: int) -> int:
    """Float32 master weights of this rank's shard.

    Formula: ``4*P/W``
    Live in: every phase
    Rounding: up to whole bytes
    Ignores: nothing
    Source: deepspeed 0.19.8 single_partition_of_fp32_groups, fp32_partitioned_groups_flat; resident bytes of m300-m309
    Confidence: exact
    """
    return ceil_div(FP32_BYTES * num_parameters, ranks)


@item("gradients.zero_shards", "gradient")
def gradient_shards(*, num_parameters: int, ranks: int) -> int:
    """Bf16 gradients of this rank's shard, allocated once (stage 3).

    Formula: ``2*P/W``
    Live in: every phase
    Rounding: up to whole bytes
    Ignores: nothing
    Source: deepspeed 0.19.8 stage3.py grad_partitions_flat_buffer; resident bytes of rows m304-m309
    Confidence: exact
    """
    return ceil_div(BF16_BYTES * num_parameters, ranks)


@item("communication.zero_bucket", "reduce_scatter")
def bucket(*, dtype_bytes: int) -> int:
    """The buffer that gradients are moved into as the backward makes them, reduced whenever it is full.

    Stage 3 keeps it for good; stages 1 and 2 allocate it at the first gradient and free it after the backward. Under
    Ulysses gradients are reduced in float32 (b=4).

    Formula: ``b*500,000,000``
    Live in: every phase (stage 3); final_norm, backward (stages 1 and 2)
    Rounding: exact
    Ignores: nothing
    Source: deepspeed 0.19.8 stage3.py, stage_1_and_2.py setup_buckets; rows m300-m322
    Confidence: exact
    """
    return dtype_bytes * REDUCE_BUCKET


@item("gradients.zero_offload_buffer", "gradient")
def offload_buffer(*, largest_parameter: int) -> int:
    """Buffer for the largest gradient on its way to the host (stage 2 with the optimizer there).

    Formula: ``2*V*H`` (the largest parameter)
    Live in: every phase
    Rounding: exact
    Ignores: nothing
    Source: deepspeed 0.19.8 stage_1_and_2.py temp_grad_buffer_for_gpu_offload; resident bytes of row m318
    Confidence: exact
    """
    return BF16_BYTES * largest_parameter


@item("weights.zero_gathered", "all_gather")
def gathered(*, elements: int) -> int:
    """Whole bf16 parameters that stage 3 has gathered, and the flat buffers they came in.

    The parameter coordinator keeps what is used again within 1e9 elements and prefetches 5e7 elements: of a model
    below 1e9 parameters everything stays. The head, which no module owns, stays from the first use to the step.

    Formula: ``2*E``
    Live in: forward, loss, backward
    Rounding: up to a multiple of W for each parameter
    Ignores: nothing
    Source: deepspeed 0.19.8 partitioned_param_coordinator.py; allocator traces of Qwen3-8B (4 layers) and Llama-3.2-1B
    Confidence: exact
    """
    return BF16_BYTES * elements


@item("weights.zero_persistent", "all_gather")
def persistent(*, elements: int) -> int:
    """Parameters of at most 100,000 elements (norms, biases), which stage 3 gathers at the end of every step.

    Formula: ``2*E``
    Live in: every phase
    Rounding: exact
    Ignores: 512-byte blocks
    Source: deepspeed 0.19.8 parameter_offload.py mark_persistent_parameters
    Confidence: exact
    """
    return BF16_BYTES * elements


@item("gradients.zero_own", "gradient")
def own_gradients(*, elements: int) -> int:
    """Gradients that still have memory of their own: the one that just arrived, and one above the bucket's size.

    Stage 1 moves none before the backward is over; a tied head's waits for the embedding's.

    Formula: ``2*E``
    Live in: backward
    Rounding: exact
    Ignores: nothing
    Source: deepspeed 0.19.8 reduce_independent_p_g_buckets_and_remove_grads; rows m300-m322
    Confidence: exact
    """
    return BF16_BYTES * elements


@item("gradients.zero_partition", "gradient")
def partition_gradients(*, elements: int) -> int:
    """Whole gradients of every parameter that lies, if only in part, in this rank's partition (stages 1 and 2).

    Allocated when the first of them is reduced, so late in the backward on rank 0 and early on the last rank.

    Formula: ``2*E``
    Live in: backward, gradient_norm, optimizer_step
    Rounding: exact
    Ignores: nothing
    Source: deepspeed 0.19.8 stage_1_and_2.py grads_in_partition; allocator traces of Qwen3-8B (4 layers), 4 ranks
    Confidence: exact
    """
    return BF16_BYTES * elements


@item("communication.zero_reduction", "temporary")
def reduction(*, copies: int, elements: int, dtype_bytes: int, ranks: int) -> int:
    """Flat copies of a bucket while it is reduced; under Ulysses in float32, with the result's cast to bf16.

    A single gradient that divides evenly over the ranks is not copied; one above the bucket's size is cast first.

    Formula: ``2*E*copies``; under Ulysses ``4*E*copies + 2*E/W``
    Live in: backward, where a bucket is full, and at its end
    Rounding: up to whole bytes
    Ignores: nothing
    Source: deepspeed 0.19.8 reduce_scatter_coalesced, allreduce_bucket; traces of Qwen3-8B with stages 1, 2 and 3
    Confidence: exact
    """
    cast = ceil_div(BF16_BYTES * elements, ranks) if dtype_bytes != BF16_BYTES else 0
    return dtype_bytes * elements * copies + cast


@item("gradients.zero_offloaded_slice", "temporary")
def offloaded_slice(*, elements: int, returns: bool) -> int:
    """Norm, in float64, of one parameter's slice before it leaves for the host; in stage 3 it comes back first.

    Formula: ``8*E``; stage 3 ``2*E + 8*min(E, 250,000,000)``
    Live in: backward, where a bucket is reduced (offload_optimizer)
    Rounding: exact
    Ignores: the slice's float32 copy, which is smaller
    Source: deepspeed 0.19.8 set_norm_for_param_grad_in_gpu, partition_grads; row m318; trace of row m319
    Confidence: exact
    """
    if returns:
        return BF16_BYTES * elements + FP64_BYTES * min(elements, NORM_CHUNK)
    return FP64_BYTES * elements


@item("gradients.zero_norm", "temporary")
def norm(*, largest_slice: int) -> int:
    """Gradient norm in float64, one slice after the other.

    Formula: ``8*E`` (the largest slice of this rank)
    Live in: gradient_norm
    Rounding: exact
    Ignores: nothing
    Source: deepspeed 0.19.8 get_grad_norm_direct; allocator trace of Qwen3-8B (4 layers), stage 2
    Confidence: exact
    """
    return FP64_BYTES * largest_slice


@item("gradients.zero_float32", "temporary")
def float32_gradient(*, elements: int, slices: int) -> int:
    """Float32 gradient of what is updated at once, and the flat bf16 copy it is made of if that has several slices.

    Formula: ``(4 + 2)*E``; of one slice ``4*E``
    Live in: optimizer_step
    Rounding: exact
    Ignores: nothing
    Source: deepspeed 0.19.8 step, _prepare_fp32_grad_for_sub_group; allocator traces
    Confidence: exact
    """
    return (FP32_BYTES + (BF16_BYTES if slices > 1 else 0)) * elements


@item("inputs.ulysses_batch", "input")
def ulysses_batch(*, sequence_tokens: int, tokens_per_rank: int) -> int:
    """The rank's own batch whole (ids, labels, mask, positions), and the labels of its shard of the one at work.

    Formula: ``8*(4*L + T)``
    Live in: every phase (Ulysses)
    Rounding: exact
    Ignores: the shards that wait for their turn, on the host
    Source: deepspeed 0.19.8 UlyssesSPDataLoaderAdapter.refill; resident bytes of rows m307 and m309
    Confidence: exact
    """
    return INT64_BYTES * (4 * sequence_tokens + tokens_per_rank)
