"""What tensors do not show: cuBLAS workspaces, the CUDA context, the allocator's own slack."""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.units import MIB

CUBLAS_WORKSPACE_BYTES = 64 * MIB
"""32 MiB cuBLAS and 32 MiB cuBLASLt on Hopper; resident bytes of every row minus the states."""
CUDA_CONTEXT_BYTES = 957_153_280
"""Largest device-used minus reserved over the measured rows (m014); they span 767 to 913 MiB."""
NCCL_BYTES = 1_199_636_480
"""Device-used minus reserved of two ranks with NCCL (row m106: 2,156,789,760), less the CUDA context."""
NCCL_BYTES_OF_ULYSSES = 1_927_348_224
"""The same of row m345: 2,884,501,504."""
ALLOCATOR_SLACK_PERMILLE = 36
"""Largest smallest-capacity-that-ran over peak allocated in measured/capacity.jsonl with expandable segments: 35.2."""


@item("runtime.cublas_workspace", "runtime")
def cublas_workspace() -> int:
    """Workspaces that cuBLAS takes from PyTorch's allocator and keeps.

    Formula: 64 MiB
    Live in: every phase
    Rounding: exact
    Ignores: other architectures than Hopper, some of which take 8 MiB
    Source: resident_before_step_bytes of rows m001-m034
    Confidence: fitted
    """
    return CUBLAS_WORKSPACE_BYTES


@item("runtime.cuda_context", "runtime")
def cuda_context() -> int:
    """CUDA context, loaded kernels and libraries; outside PyTorch's allocator.

    Formula: 957,153,280 bytes
    Live in: device
    Rounding: largest of the measured rows
    Ignores: NCCL communicators
    Source: device_used_bytes - peak_reserved_bytes of the measured rows (0.75 to 0.89 GiB)
    Confidence: fitted
    """
    return CUDA_CONTEXT_BYTES


@item("runtime.nccl", "runtime")
def nccl(*, ulysses: bool = False) -> int:
    """NCCL communicators and their buffers; outside PyTorch's allocator.

    Args:
        ulysses: DeepSpeed's sequence parallelism, which has a group of its own for all-to-all

    Formula: 1,199,636,480 bytes; 1,927,348,224 with Ulysses
    Live in: device (more than one GPU)
    Rounding: first measurement; rows m346 and m347 have 13 and 50 MB more, far less than the allocator's slack
    Ignores: growth with the number of ranks and of communicators, which has not been measured beyond two ranks
    Source: device_used_bytes - peak_reserved_bytes, less the context, on two H200 with NVLink: rows m107 and m168 (ring
        attention, 131,072 and 262,144 tokens: the same), row m345 (Ulysses)
    Confidence: fitted
    """
    return NCCL_BYTES_OF_ULYSSES if ulysses else NCCL_BYTES


@item("runtime.allocator_slack", "runtime")
def allocator_slack(*, peak_allocated_bytes: int) -> int:
    """What PyTorch's allocator needs beyond the tensors before a step runs, with expandable segments.

    Formula: ``0.036 * peak``
    Live in: device
    Rounding: the largest seen; the smallest is 0.9%
    Ignores: expandable segments off, where up to 13% was seen
    Source: measured/capacity.jsonl, rows found by lowering the process's capacity until the step failed
    Confidence: fitted
    """
    return peak_allocated_bytes * ALLOCATOR_SLACK_PERMILLE // 1000
