"""Why a job ended, in one line with the lever that would help. Nothing here needs torch."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_STOPPED = 75
"""Stopped on request with a checkpoint written: start it again with --resume (EX_TEMPFAIL of sysexits.h)."""
LITTLE_DISK_BYTES = 64 << 20
_FULL_DISK = ("no space left on device", "disk quota exceeded", "pytorchstreamwriter failed", "inline_container")
_LOST_PEER = (
    "connection closed by peer", "connection reset by peer", "connection was closed", "remote process exited",
    "ncclremoteerror", "nccl communicator was aborted", "socket closed", "broken pipe",
)  # fmt: skip
_TIMED_OUT = ("collective operation timeout", "timed out waiting", "wait timeout", "watchdog caught")
_HOST_MEMORY = ("defaultcpuallocator", "cannot allocate memory", "can't allocate memory")


class Facts(NamedTuple):
    """What the machine looked like when a job failed."""

    rank: int = 0
    free_disk_bytes: int | None = None
    free_gpu_bytes: int | None = None
    total_gpu_bytes: int | None = None
    gone: tuple[str, ...] = ()
    """Ranks that no longer live, described."""
    verdict: str | None = None
    """What the guard had found wrong with the group before."""


class Interrupted(BaseException):
    """A signal asked the job to end at once."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(name)
        self.number = number


def free_disk_bytes(folder: Path) -> int | None:
    """Bytes that a job may still write into ``folder``."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def explain(problem: BaseException, plan: dict[str, Any], facts: Facts) -> str:
    """One line: what happened, and what would help."""
    text = " ".join(f"{type(problem).__name__}: {problem}".split())
    low = text.lower()
    if is_full_disk(problem, facts):
        free = "" if facts.free_disk_bytes is None else f" ({facts.free_disk_bytes / 2**30:.2f} GiB are free)"
        return (
            f"the disk is full{free}: {_short(text)} No half-written checkpoint is resumed from. Free space, "
            "or write fewer: a larger save_steps, save_total_limit 2, --no-save."
        )
    if type(problem).__name__ == "OutOfMemoryError" or "cuda out of memory" in low:
        return f"out of GPU memory on rank {facts.rank}: {_short(text)} Would help: {gpu_levers(plan)}."
    if "out of memory" in low and ("cuda" in low or "hip" in low):
        return _outside_the_allocator(text, plan, facts)
    if isinstance(problem, MemoryError) or any(words in low for words in _HOST_MEMORY):
        return f"out of host memory on rank {facts.rank}: {_short(text)} Would help: {host_levers(plan)}."
    if facts.verdict is not None:
        return facts.verdict
    if facts.gone:
        return lost_peers(facts.gone)
    if any(words in low for words in _LOST_PEER):
        return (
            f"rank {facts.rank} lost its connection to another rank, which ended first: {_short(text)} Its own "
            "message, or the kernel's log (dmesg, for out of memory) on its node, says why."
        )
    if any(words in low for words in _TIMED_OUT):
        return (
            f"a collective on rank {facts.rank} timed out: {_short(text)} Another rank is stuck or took another path; "
            "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and py-spy show which."
        )
    if isinstance(problem, Interrupted):
        return f"ended by {problem}; nothing was saved after the last whole checkpoint."
    if isinstance(problem, KeyboardInterrupt):
        return "interrupted (Ctrl-C); nothing was saved after the last whole checkpoint."
    return text


def is_full_disk(problem: BaseException, facts: Facts) -> bool:
    """Whether a write failed for want of space; torch and safetensors hide the error number in their text."""
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    low = str(problem).lower()
    if not any(words in low for words in _FULL_DISK):
        return False
    if "no space left" in low or "quota" in low:
        return True
    return facts.free_disk_bytes is not None and facts.free_disk_bytes < LITTLE_DISK_BYTES


def lost_peers(gone: tuple[str, ...]) -> str:
    """What to say of ranks that are no more."""
    verb = "is" if len(gone) == 1 else "are"
    return (
        f"{', '.join(gone)} {verb} gone: killed from outside, or the process crashed. Where host memory has run out, "
        "the kernel kills without a word: see dmesg there. Continue with --resume if a checkpoint was written."
    )


def _outside_the_allocator(text: str, plan: dict[str, Any], facts: Facts) -> str:
    """CUDA says "out of memory" for pinned host memory as well, with an empty GPU."""
    free, total = facts.free_gpu_bytes, facts.total_gpu_bytes
    if free is not None and total and free < total // 20:
        return (
            f"out of GPU memory on rank {facts.rank}, outside PyTorch's allocator ({free / 2**30:.2f} GiB free): "
            f"{_short(text)} Would help: {gpu_levers(plan)}."
        )
    room = "" if free is None else f", with {free / 2**30:.2f} GiB of GPU memory free"
    return (
        f"pinned host memory ran out on rank {facts.rank}{room}: {_short(text)} The node's free memory, its cgroup "
        f"limit and ulimit -l ({memlock()}) bound it. Would help: {host_levers(plan)}."
    )


def gpu_levers(plan: dict[str, Any]) -> str:
    """The flags, not yet in the plan, that lower its peak on a GPU most; two of them."""
    ranks = plan.get("num_gpus", 1) // max(1, plan.get("cp_size", 1) * plan.get("sp_size", 1))
    candidates = [
        ("--activation-checkpointing full", plan.get("activation_checkpointing") == "none"),
        ("--loss chunked", plan.get("loss") == "full"),
        (
            "--offload-activations",
            plan.get("activation_checkpointing") != "none" and not plan.get("offload_activations"),
        ),
        (f"--cp-size {2 * plan.get('cp_size', 1)}", plan.get("backend") == "fsdp2" and ranks > 1),
        (f"--sp-size {2 * plan.get('sp_size', 1)}", plan.get("backend") == "deepspeed" and ranks > 1),
        ("more GPUs (--num-gpus)", True),
        (f"--max-length {max(1, plan.get('max_length', 2) // 2)}", True),
    ]
    return " or ".join([flag for flag, useful in candidates if useful][:2])


def host_levers(plan: dict[str, Any]) -> str:
    """The flags of the plan that take host memory."""
    offloads = ("offload_activations", "activation_offloading", "offload_params", "offload_optimizer")
    taken = [f"--no-{name.replace('_', '-')}" for name in offloads if plan.get(name)]
    return " or ".join([*taken, "a node with more host memory"])


def memlock() -> str:
    """``ulimit -l`` in words."""
    try:
        import resource
    except ImportError:  # not on Windows
        return "unknown"
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024:,} KiB"


def _short(text: str, limit: int = 300) -> str:
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return cut if cut.endswith((".", "!", "?")) else cut + "."


def rank_of_this_process() -> int:
    """Global rank as the launcher set it."""
    return int(os.environ.get("RANK", "0"))
