"""Host memory: pinned layer inputs and the copies made while loading.

Letters: n layers, T tokens per rank, H hidden size, b bytes of one element, P parameters.
"""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.units import pow2_ceil


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
def load_copies(*, num_parameters: int, dtype_bytes: int) -> int:
    """The whole model in host memory while the job starts: the main process alone reads it and sends out the shards.

    Formula: ``b * P``
    Live in: init
    Rounding: exact
    Ignores: files in the page cache, which the kernel gives back
    Source: accelerate 1.15 fsdp2_prepare_model (float32 upcast before sharding, cpu_ram_efficient_loading)
    Confidence: modelled
    """
    return dtype_bytes * num_parameters
