"""Host memory: pinned layer inputs and the copies made while loading.

Letters: n layers, T tokens per rank, H hidden size, h query heads, d head_dim, b bytes of one element, P parameters.
"""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.estimators.weights import BF16_BYTES, FP32_BYTES
from lcplan.units import ceil_div, pow2_ceil

LAST_BLOCK = 1 << 21
"""LAST_BLOCK of backends/templates/host_offload.py."""


@item("host.pinned_layer_inputs", "activation")
def pinned_layer_inputs(*, num_layers: int, tokens: int, hidden_size: int, dtype_bytes: int) -> int:
    """Pinned blocks that hold the offloaded layer inputs of one rank.

    Formula: ``n * pow2ceil(b*H*T)``
    Live in: forward, loss, backward; the pinned cache keeps them between steps
    Rounding: the pinned allocator rounds every block up to a power of two
    Ignores: batches on their way to the GPU, some MB
    Source: torch CachingHostAllocator; pinned bytes of rows m004, m006, m014, m019, m031, m034
    Confidence: exact
    """
    return num_layers * pow2_ceil(dtype_bytes * hidden_size * tokens)


@item("host.pinned_kept_layers", "activation")
def pinned_kept_layers(
    *, num_layers: int, tokens: int, hidden_size: int, heads: int, head_dim: int, dtype_bytes: int
) -> int:
    """Pinned blocks that hold what the job itself offloads: layer inputs, and attention outputs with their logsumexp.

    ``heads`` is 0 where attention is recomputed. Each tensor is cut into blocks of a power of two, so that only what is
    left below 2 MiB is rounded up.

    Formula: ``n * (up(b*H*T) + up(2*h*d*T) + up(4*h*T))``; up(x) = ``x - x % 2 MiB + pow2ceil(x % 2 MiB)``
    Live in: forward, loss, backward; the pinned cache keeps them between steps
    Rounding: the pinned allocator rounds every block up to a power of two
    Ignores: batches on their way to the GPU, some MB
    Source: backends/templates/host_offload.py; torch CachingHostAllocator
    Confidence: modelled
    """
    sizes = (dtype_bytes * hidden_size * tokens, BF16_BYTES * heads * head_dim * tokens, FP32_BYTES * heads * tokens)
    return num_layers * sum(size - size % LAST_BLOCK + pow2_ceil(size % LAST_BLOCK) for size in sizes)


@item("host.load_copies", "parameter")
def load_copies(*, num_parameters: int, dtype_bytes: int, copies: int) -> int:
    """The whole model in host memory while the job starts: the main process alone reads it and sends out the shards.

    Under DDP and DeepSpeed (without zero.Init) every process of the node reads its own.

    Formula: ``b * P * copies``
    Live in: init
    Rounding: exact
    Ignores: files in the page cache, which the kernel gives back
    Source: accelerate 1.15 fsdp2_prepare_model (float32 upcast before sharding, cpu_ram_efficient_loading)
    Confidence: modelled
    """
    return dtype_bytes * num_parameters * copies


@item("host.pinned_shards", "parameter")
def pinned_shards(*, parameters: tuple[int, ...], ranks: int) -> int:
    """Pinned float32 shards of every matrix and of its gradient, under parameter offload.

    Formula: ``2 * pow2ceil(4*P_matrix/W)`` summed over matrices
    Live in: every phase
    Rounding: the pinned allocator rounds every block up to a power of two
    Ignores: norms
    Source: torch CPUOffloadPolicy(pin_memory=True); pinned bytes of Qwen3-8B (4 layers, 4 ranks) within 0.1%
    Confidence: exact
    """
    return 2 * sum(pow2_ceil(ceil_div(FP32_BYTES * count, ranks)) for count in parameters)


@item("host.optimizer_states", "optimizer_state")
def optimizer_states(*, num_parameters: int, ranks: int) -> int:
    """Both AdamW moments of a rank's shards, in ordinary host memory, under parameter offload.

    Formula: ``8*P/W``
    Live in: every phase from the second step on
    Rounding: up to whole bytes
    Ignores: nothing
    Source: torch.optim.AdamW on CPU shards
    Confidence: modelled
    """
    return ceil_div(2 * FP32_BYTES * num_parameters, ranks)


@item("host.paged_states", "optimizer_state")
def paged_states(*, narrow_parameters: int, wide_parameters: int) -> int:
    """Paged optimizer states: managed memory, which moves to the host where the GPU is full.

    Formula: ``2*P_narrow + 8*P_wide``
    Live in: every phase from the second step on
    Rounding: exact
    Ignores: that they stay on the GPU while there is room, beside what PyTorch's allocator holds
    Source: bitsandbytes 0.50 functional.get_paged (cudaMallocManaged); rows m114 and m115
    Confidence: modelled
    """
    return 2 * narrow_parameters + 2 * FP32_BYTES * wide_parameters


@item("host.zero_pinned_gradients", "gradient")
def zero_pinned_gradients(*, updated: tuple[int, ...], masters_too: bool) -> int:
    """Pinned float32 gradients of what ZeRO updates at once; in stage 2 the masters beside them.

    Formula: ``pow2ceil(4*E)`` summed over groups; stage 2 twice that
    Live in: every phase (offload_optimizer)
    Rounding: the pinned allocator rounds every block up to a power of two
    Ignores: nothing
    Source: deepspeed 0.19.8 stage3.py initialize_optimizer_states, stage_1_and_2.py; pinned bytes of m310, m318-m320
    Confidence: exact
    """
    blocks = sum(pow2_ceil(FP32_BYTES * elements) for elements in updated)
    return 2 * blocks if masters_too else blocks


@item("host.zero_pinned_copies", "parameter")
def zero_pinned_copies(*, buffers: tuple[int, ...]) -> int:
    """Pinned bf16 buffers of ZeRO's offload.

    Stage 3: the gradients of the shard, and with offload_params its parameters, once as they were loaded, which the
    pinned cache keeps, and once flat. Stage 2: the updated partitions, and the largest gradient.

    Formula: ``pow2ceil(2*E)`` summed over buffers
    Live in: every phase (offload_optimizer, offload_params)
    Rounding: the pinned allocator rounds every block up to a power of two
    Ignores: nothing
    Source: deepspeed 0.19.8 stage3.py, stage_1_and_2.py, partition_parameters.py; pinned bytes of m310, m318-m320
    Confidence: exact
    """
    return sum(pow2_ceil(BF16_BYTES * elements) for elements in buffers)


@item("host.zero_masters", "parameter")
def zero_masters(*, num_parameters: int, ranks: int) -> int:
    """Float32 masters of a rank's shard in ordinary host memory (stage 3, offload_optimizer).

    Formula: ``4*P/W``
    Live in: every phase
    Rounding: up to whole bytes
    Ignores: the second copy while they are made
    Source: deepspeed 0.19.8 stage3.py _create_fp32_partitions
    Confidence: modelled
    """
    return ceil_div(FP32_BYTES * num_parameters, ranks)


PINNED = (pinned_layer_inputs, pinned_kept_layers, pinned_shards, zero_pinned_gradients, zero_pinned_copies)
"""Items that stay in pinned memory while the job trains."""
PAGEABLE = (optimizer_states, paged_states, zero_masters)
"""Items in ordinary host memory while the job trains."""
