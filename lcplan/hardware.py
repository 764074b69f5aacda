"""GPUs: what a process can use of one, how fast it is, and the node it usually sits in."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import Field

from lcplan import catalog
from lcplan._record import Record
from lcplan.errors import InputError
from lcplan.units import parse_bytes

_SIZES = (
    "usable_bytes", "reported_bytes", "memory_bandwidth", "link_bandwidth", "host_link_bandwidth",
    "node_host_memory_bytes", "network_bandwidth",
)  # fmt: skip
"""Fields that ``gpus.json`` writes as text with a unit, e.g. "81559 MiB"."""


class KernelRates(Record):
    """What kernels sustain on real data, which is below every peak."""

    measured_on: str
    """GPU id."""
    scaled: bool = False
    """Taken over from ``measured_on`` by the ratio of the spec sheets: an assumption."""
    linear_flops: float = Field(gt=0)
    """Matrix products, FLOP/s."""
    attention_forward_flops: dict[int, float]
    """Causal attention by head_dim, FLOP/s."""
    attention_backward_flops: dict[int, float]
    memory_bytes: float = Field(gt=0)
    """Elementwise kernels, bytes/s read and written."""
    host_copy_bytes: float = Field(gt=0)
    """Copies to and from pinned host memory with every GPU of a node copying, bytes/s."""


class GpuSpec(Record):
    """One kind of GPU; every figure has its source in ``sources``."""

    id: str
    name: str
    usable_bytes: int = Field(gt=0)
    """All that a process is offered (the total of torch.cuda.mem_get_info), the CUDA context included."""
    reported_bytes: int = Field(gt=0)
    """What nvidia-smi reports as total: more than a process gets."""
    bf16_dense_flops: int = Field(gt=0)
    """Peak BF16 tensor FLOP/s without sparsity, accumulated in float32."""
    memory_bandwidth: int = Field(gt=0)
    """Bytes/s of device memory."""
    link_bandwidth: int = Field(gt=0)
    """Bytes/s in one direction between a GPU and the others of its node."""
    host_link_bandwidth: int = Field(gt=0)
    """Bytes/s in one direction between a GPU and host memory."""
    gpus_per_node: int = Field(default=1, gt=0)
    node_host_memory_bytes: int | None = Field(default=None, gt=0)
    """Host memory of the usual node; None where there is no usual one."""
    network_bandwidth: int | None = Field(default=None, gt=0)
    """Bytes/s in one direction between a GPU and another node; None where there is no usual network."""
    kernel_rates: KernelRates | None = None
    """None where no kernel has been timed: the GPU then has no step times."""
    as_of: str = ""
    """Date the sources were looked at."""
    sources: dict[str, str] = Field(default_factory=dict, repr=False)
    """Field name to where its value comes from."""


def load_gpu(id: str) -> GpuSpec:
    """The catalog's GPU of that id, matched without case."""
    known = id.casefold()
    if known not in catalog.gpu_ids():
        near = [gpu for gpu in catalog.gpu_ids() if known.strip() and known in gpu]
        near = near or difflib.get_close_matches(known, catalog.gpu_ids(), n=1, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise InputError(
            "unknown-gpu",
            f"GPU {id!r:.60} is not in the catalog.{hint} Give one of {', '.join(catalog.gpu_ids())}.",
        )
    entry = catalog.gpu_entry(known)
    sizes = {field: parse_bytes(entry[field]) for field in _SIZES if entry[field] is not None}
    gpu = GpuSpec(id=known, **{**entry, **sizes, "kernel_rates": None})
    return gpu.model_copy(update={"kernel_rates": _rates(gpu, entry["kernel_rates"])})


def _rates(gpu: GpuSpec, entry: dict[str, Any] | None) -> KernelRates | None:
    """Measured rates, or another GPU's by the ratio of the spec sheets where the catalog says so."""
    if entry is None:
        return None
    if "scaled_from" in entry:
        return scale_rates(gpu, load_gpu(entry["scaled_from"]))
    return KernelRates.model_validate(entry)


def scale_rates(gpu: GpuSpec, measured: GpuSpec) -> KernelRates:
    """Rates of ``measured`` by the ratio of the two spec sheets."""
    rates = measured.kernel_rates
    if rates is None:
        raise ValueError(f"{measured.id} has no measured rates")
    flops = gpu.bf16_dense_flops / measured.bf16_dense_flops
    return KernelRates(
        measured_on=measured.id,
        scaled=True,
        linear_flops=rates.linear_flops * flops,
        attention_forward_flops={d: rate * flops for d, rate in rates.attention_forward_flops.items()},
        attention_backward_flops={d: rate * flops for d, rate in rates.attention_backward_flops.items()},
        memory_bytes=rates.memory_bytes * gpu.memory_bandwidth / measured.memory_bandwidth,
        host_copy_bytes=rates.host_copy_bytes * gpu.host_link_bandwidth / measured.host_link_bandwidth,
    )
