"""Host memory: pinned layer inputs and the copies made while loading.

Letters: n layers, T tokens per rank, H hidden size, b bytes of one element, P parameters.
"""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.estimators.weights import FP32_BYTES
from lcplan.units import ceil_div, pow2_ceil


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


@item("host.load_copies", "parameter")
def load_copies(*, num_parameters: int, dtype_bytes: int, copies: int) -> int:
    """The whole model in host memory while the job starts: the main process alone reads it and sends out the shards.

    Under DDP every process of the node reads its own.

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
