"""GPUs: what a process can use of one, how fast it is, and the node it usually sits in."""

from __future__ import annotations

import difflib

from pydantic import Field

from lcplan import catalog
from lcplan._record import Record
from lcplan.errors import InputError
from lcplan.units import parse_bytes

_SIZES = (
    "usable_bytes", "reported_bytes", "memory_bandwidth", "link_bandwidth", "host_link_bandwidth",
    "node_host_memory_bytes",
)  # fmt: skip
"""Fields that ``gpus.json`` writes as text with a unit, e.g. "81559 MiB"."""


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
    return GpuSpec(id=known, **{**entry, **sizes})
