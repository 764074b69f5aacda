"""What a machine lacks for a plan: from facts to findings, pure functions. ``machine`` collects the facts.

A finding is red where the job would fail or train the wrong thing, yellow where it would be slow or might fail, green
where a check found nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import Field

from lcplan._record import Record
from lcplan.job_options import Device
from lcplan.units import GIB, MIB, ceil_div, format_bytes

Level = Literal["red", "yellow", "green"]
Presence = Literal["present", "reachable", "missing", "unreachable"]

TRAIN_PACKAGES = ("torch", "transformers", "accelerate", "trl", "datasets")
OLDEST = {
    "torch": (2, 9), "transformers": (5, 17), "accelerate": (1, 15), "trl": (1, 13), "datasets": (3,), "peft": (0, 18),
    "bitsandbytes": (0, 48), "deepspeed": (0, 18, 2), "torchao": (0, 10),
    "liger-kernel": (0, 8),
}  # fmt: skip
"""As pyproject.toml asks for them."""
EXTRAS = {
    "peft": "peft", "bitsandbytes": "quantize", "deepspeed": "deepspeed", "torchao": "torchao", "liger-kernel": "liger",
}  # fmt: skip
"""What to install for a package that the train extra does not bring."""
OLDEST_PYTHON = (3, 10)
DOCKER_SHM_BYTES = 64 * MIB
"""Docker's own size of /dev/shm: NCCL's buffers between a few ranks do not fit."""
ENOUGH_SHM_BYTES = GIB
GPU_SLACK_BYTES = 64 * MIB
"""A plan may meet the free memory of a GPU this closely."""
DEFAULT_PORT = 29500
"""accelerate's, for ranks to find one another."""
FLASH_HEAD_DIM = 256
"""Largest head that the fast attention kernels take."""


class Finding(Record):
    """One check's outcome."""

    code: str
    level: Level
    message: str
    fix: str = ""


class GpuFact(Record):
    """One GPU that a job would see."""

    name: str
    total_bytes: int
    free_bytes: int


class TorchFacts(Record):
    """What torch says of itself, asked in a process of its own."""

    error: str | None = None
    """Why it cannot be imported."""
    cuda: str | None = None
    """Version it was built for; None for a CPU build."""
    cuda_available: bool = False
    hip: str | None = None
    cudnn: int | None = None
    """None where torch finds none."""
    nccl: str | None = None
    sdpa_kernel: str | None = None
    """What scaled_dot_product_attention takes for the plan's heads: flash, cudnn, efficient or math."""
    missing_features: tuple[str, ...] = ()
    """Levers of the plan that the installed transformers or TRL has not."""


class MachineFacts(Record):
    """Everything the checks look at; None means that it is unknown here."""

    python: tuple[int, int]
    versions: dict[str, str] = Field(default_factory=dict)
    torch: TorchFacts | None = None
    gpus: tuple[GpuFact, ...] = ()
    nvml_error: str | None = None
    host_total_bytes: int | None = None
    host_available_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    cgroup_used_bytes: int = 0
    memlock_bytes: int | None = None
    """``ulimit -l``; None without a limit."""
    shm_free_bytes: int | None = None
    output_dir: str = "."
    output_writable: bool = True
    disk_free_bytes: int | None = None
    port_is_free: bool = True
    host_name_resolves: bool = True
    hidden_cudnn: str | None = None
    """Folder of LD_LIBRARY_PATH that has a cuDNN of its own."""
    has_sbatch: bool = False
    offline: bool = False
    """HF_HUB_OFFLINE is set."""
    data_problem: tuple[str, str] | None = None
    """Code and message of what is wrong with the data."""
    sources: dict[str, tuple[str, Presence]] = Field(default_factory=dict)
    """``weights``, ``tokenizer`` and ``data`` to their name and whether they are there."""


class Need(Record):
    """What a plan needs of the machine it is started on."""

    device: Device = "gpu"
    gpu: str = ""
    num_gpus: int = 1
    gpus_per_node: int = 1
    packages: tuple[str, ...] = TRAIN_PACKAGES
    device_peak_bytes: int | None = None
    """None where there is no estimate."""
    host_bytes_per_node: int = 0
    pinned_bytes_per_node: int = 0
    load_bytes_per_node: int = 0
    checkpoint_bytes: int = 0
    num_checkpoints: int = 0
    """On the disk at once."""
    saved_model_bytes: int = 0
    attn_implementation: str = "sdpa"
    refusal: str | None = None
    """Why the plan does not fit its GPU, if it does not."""
    launcher: Literal["local", "slurm", "print"] = "local"

    @property
    def num_nodes(self) -> int:
        """Machines of the job."""
        return ceil_div(self.num_gpus, self.gpus_per_node)

    @property
    def disk_bytes(self) -> int:
        """Most that the job keeps in its folder."""
        return self.checkpoint_bytes * self.num_checkpoints + self.saved_model_bytes


class DoctorReport(Record):
    """All findings, worst first."""

    schema_version: int = 1
    plan: dict[str, Any] | None
    findings: tuple[Finding, ...]
    passed: bool
    """Nothing is red."""


def diagnose(need: Need | None, facts: MachineFacts) -> tuple[Finding, ...]:
    """Every check's finding, worst first; without a plan only what any job needs."""
    found = [finding for check in GENERAL for finding in check(facts)]
    if need is not None:
        found += [finding for check in OF_A_PLAN for finding in check(need, facts)]
    order = {"red": 0, "yellow": 1, "green": 2}
    unique = {(finding.code, finding.message): finding for finding in found}
    return tuple(sorted(unique.values(), key=lambda finding: order[finding.level]))


def reds(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Those for which a job is not started."""
    return tuple(finding for finding in findings if finding.level == "red")


def _green(code: str, message: str) -> Finding:
    return Finding(code=code, level="green", message=message)


def _red(code: str, message: str, fix: str) -> Finding:
    return Finding(code=code, level="red", message=message, fix=fix)


def _yellow(code: str, message: str, fix: str) -> Finding:
    return Finding(code=code, level="yellow", message=message, fix=fix)


# --- any machine


def check_python(facts: MachineFacts) -> Iterator[Finding]:
    """The interpreter."""
    version = ".".join(map(str, facts.python))
    if facts.python < OLDEST_PYTHON:
        yield _red("python-too-old", f"Python {version} runs here.", "Use Python 3.10 or newer.")
    else:
        yield _green("python", f"Python {version}.")


def check_versions(facts: MachineFacts, packages: tuple[str, ...] = TRAIN_PACKAGES) -> Iterator[Finding]:
    """The packages a job imports, and that none is older than what this was checked with."""
    missing = [name for name in packages if name not in facts.versions]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        yield _red(
            "missing-extra",
            f"{', '.join(missing)} {verb} not installed, and a job needs {'it' if len(missing) == 1 else 'them'}.",
            f"Install it: pip install 'lcplan[{extras_of(missing)}]'",
        )
    old = [
        f"{name} {facts.versions[name]} (needs {'.'.join(map(str, OLDEST[name]))})"
        for name in packages
        if name in facts.versions and release(facts.versions[name]) < OLDEST[name]
    ]
    if old:
        yield _red("too-old", f"Too old: {', '.join(old)}.", "Upgrade: pip install -U 'lcplan[train]'")
    if not missing and not old:
        yield _green("stack", ", ".join(f"{name} {facts.versions[name]}" for name in packages) + ".")


def extras_of(packages: list[str]) -> str:
    """lcplan's extras that bring these packages, as pip takes them."""
    return ",".join(sorted({EXTRAS.get(name, "train") for name in packages}))


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.13.0+cpu`` is (2, 13, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_torch(facts: MachineFacts) -> Iterator[Finding]:
    """That torch starts, and sees the GPUs that the driver sees."""
    torch = facts.torch
    if torch is None or "torch" not in facts.versions:
        return
    if torch.error is not None:
        yield _red("torch-broken", f"torch cannot be imported: {torch.error}", "Reinstall it for this machine's CUDA.")
    elif facts.gpus and not torch.cuda_available:
        built = "without CUDA" if torch.cuda is None and torch.hip is None else f"for CUDA {torch.cuda or torch.hip}"
        yield _red(
            "torch-sees-no-gpu",
            f"the driver has {len(facts.gpus)} GPU(s), and torch {facts.versions['torch']}, built {built}, sees none.",
            "Install a torch that matches the driver (nvidia-smi shows its CUDA), and look at CUDA_VISIBLE_DEVICES.",
        )
    elif torch.cuda_available:
        yield _green("torch-cuda", f"torch sees the GPUs (CUDA {torch.cuda or torch.hip}).")


def check_cudnn(facts: MachineFacts) -> Iterator[Finding]:
    """That attention finds the cuDNN which torch brings."""
    if facts.hidden_cudnn is not None:
        yield _yellow(
            "hidden-cudnn",
            f"LD_LIBRARY_PATH has a cuDNN in {facts.hidden_cudnn}, before the one that torch brings. Attention may "
            "fall back to a kernel that is 1.6 times slower on an H100.",
            "Take it out of LD_LIBRARY_PATH.",
        )
    torch = facts.torch
    if torch is None or not torch.cuda_available or torch.hip is not None:
        return
    if torch.cudnn is None:
        yield _yellow("no-cudnn", "torch finds no cuDNN.", "Reinstall torch with its nvidia-cudnn package.")
    else:
        yield _green("cudnn", f"cuDNN {torch.cudnn}.")


def check_gpu_list(facts: MachineFacts) -> Iterator[Finding]:
    """What the driver says."""
    if facts.gpus:
        shown = "; ".join(
            f"{gpu.name}, {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free" for gpu in facts.gpus
        )
        yield _green("gpus", f"{len(facts.gpus)} GPU(s): {shown}.")
    elif facts.nvml_error is not None:
        yield _green("no-gpus", f"No NVIDIA GPU ({facts.nvml_error}).")


def check_memory(facts: MachineFacts) -> Iterator[Finding]:
    """Host memory that a new process could take."""
    free = host_free(facts)
    if free is not None:
        limit = facts.cgroup_limit_bytes
        within = "" if limit is None else f", within a cgroup limit of {format_bytes(limit)}"
        yield _green("host", f"{format_bytes(free)} of host memory free{within}.")


GENERAL: tuple[Callable[[MachineFacts], Iterator[Finding]], ...] = (
    check_python, check_versions, check_torch, check_cudnn, check_gpu_list, check_memory,
)  # fmt: skip


# --- a plan on this machine


def host_free(facts: MachineFacts) -> int | None:
    """Bytes that a job may take: what is available, and what its cgroup leaves."""
    bounds = [] if facts.host_available_bytes is None else [facts.host_available_bytes]
    if facts.cgroup_limit_bytes is not None:
        bounds.append(max(0, facts.cgroup_limit_bytes - facts.cgroup_used_bytes))
    return min(bounds, default=None)


def check_fit(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """That the plan fits the GPU it was made for."""
    del facts
    if need.refusal is not None:
        yield _red("does-not-fit", need.refusal, "")
    elif need.device_peak_bytes is not None:
        peak = format_bytes(need.device_peak_bytes)
        yield _green("fits", f"The plan needs {peak} of a {need.gpu}.")


def check_extras(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """Packages beyond the train extra."""
    yield from check_versions(facts, need.packages)


def check_gpus(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """Enough GPUs, with enough memory that nobody else holds."""
    if need.launcher != "local":
        return
    if need.num_nodes > 1:
        yield _red(
            "several-nodes",
            f"the plan spreads {need.num_gpus} GPUs over {need.num_nodes} nodes, and the local launcher starts one.",
            "Use --launcher slurm, or --launcher print for the command of each node; on one node --gpus-per-node "
            f"{need.num_gpus}.",
        )
        return
    if need.device == "cpu":
        return
    if len(facts.gpus) < need.num_gpus:
        names = ", ".join(gpu.name for gpu in facts.gpus)
        here = f"{len(facts.gpus)} GPU(s) are visible: {names}" if names else "no CUDA GPU is visible"
        yield _red(
            "too-few-gpus" if names else "no-gpu",
            f"the plan needs {need.num_gpus} GPU(s), and {here}.",
            "Render the folder with --dry-run and start it where they are, or plan with a smaller --num-gpus.",
        )
        return
    yield from _check_gpu_memory(need, facts)


def _check_gpu_memory(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    if need.device_peak_bytes is None:
        return
    used = facts.gpus[: need.num_gpus]
    smallest = min(used, key=lambda gpu: gpu.total_bytes)
    fullest = min(used, key=lambda gpu: gpu.free_bytes)
    needed = format_bytes(need.device_peak_bytes)
    if smallest.total_bytes + GPU_SLACK_BYTES < need.device_peak_bytes:
        yield _red(
            "gpu-too-small",
            f"the plan needs {needed} a GPU, and a {smallest.name} has {format_bytes(smallest.total_bytes)}.",
            "Plan for the GPU that is here: --gpu, see `lcplan list gpus`.",
        )
    elif fullest.free_bytes + GPU_SLACK_BYTES < need.device_peak_bytes:
        held = fullest.total_bytes - fullest.free_bytes
        yield _red(
            "gpu-in-use",
            f"the plan needs {needed} a GPU, and other processes hold {format_bytes(held)} of a {fullest.name}: "
            f"{format_bytes(fullest.free_bytes)} are free.",
            "End them (nvidia-smi lists them), or choose other GPUs with CUDA_VISIBLE_DEVICES.",
        )
    else:
        yield _green("gpu-memory", f"{format_bytes(fullest.free_bytes)} free on the fullest GPU, {needed} needed.")


def check_features(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """Levers that the installed versions have."""
    del need
    if facts.torch is not None and facts.torch.missing_features:
        names = ", ".join(facts.torch.missing_features)
        yield _red(
            "lever-not-installed",
            f"the installed transformers and TRL do not have {names}.",
            "Upgrade them, or plan without it.",
        )


def check_attention(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """The kernel that sdpa takes for the plan's heads."""
    kernel = facts.torch.sdpa_kernel if facts.torch is not None else None
    if need.attn_implementation != "sdpa" or kernel is None:
        return
    if kernel in ("flash", "cudnn"):
        yield _green("attention", f"scaled_dot_product_attention takes the {kernel} kernel.")
        return
    message = f"scaled_dot_product_attention falls back to the {kernel} kernel for this model's heads, which "
    fix = f"A head_dim above {FLASH_HEAD_DIM} or a GPU before Ampere has no faster one; else reinstall torch."
    if kernel == "math":
        yield _red("slow-attention", message + "keeps a square of the sequence.", fix)
    else:
        yield _yellow("slow-attention", message + "is slower.", fix)


def check_host_memory(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """Pinned memory while it trains, and whole weights while it loads."""
    free = host_free(facts)
    if free is None or need.launcher == "slurm" or not need.host_bytes_per_node:
        return
    parts = (
        f"{format_bytes(need.pinned_bytes_per_node)} pinned, {format_bytes(need.load_bytes_per_node)} while it loads"
    )
    if need.host_bytes_per_node > free:
        limit = facts.cgroup_limit_bytes
        why = "" if limit is None else f" (the cgroup allows {format_bytes(limit)})"
        yield _red(
            "host-memory",
            f"the plan holds {format_bytes(need.host_bytes_per_node)} of host memory on this node ({parts}), and "
            f"{format_bytes(free)} are free{why}.",
            "Give the container or job more memory, or plan without an offload.",
        )
    else:
        yield _green(
            "host-memory", f"{format_bytes(need.host_bytes_per_node)} needed ({parts}), {format_bytes(free)} free."
        )


def check_memlock(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """The driver pins past ``ulimit -l``, network cards do not."""
    limit = facts.memlock_bytes
    if need.device == "cpu" or limit is None or need.launcher == "slurm":
        return
    if need.num_nodes > 1 or need.pinned_bytes_per_node > limit:
        yield _yellow(
            "memlock",
            f"ulimit -l is {format_bytes(limit)}. The NVIDIA driver pins host memory past it; NCCL over InfiniBand "
            "does not, and fails to register its buffers.",
            "Raise it: ulimit -l unlimited, or docker run --ulimit memlock=-1.",
        )


def check_shm(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """NCCL passes data between the ranks of a node through /dev/shm where they have no direct path."""
    if need.num_gpus == 1 or need.device == "cpu" or facts.shm_free_bytes is None or need.launcher == "slurm":
        return
    free = format_bytes(facts.shm_free_bytes)
    fix = "docker run --ipc=host, or --shm-size=16g."
    if facts.shm_free_bytes <= DOCKER_SHM_BYTES:
        yield _red("shm", f"/dev/shm has {free}: NCCL fails to start between several GPUs of a node.", fix)
    elif facts.shm_free_bytes < ENOUGH_SHM_BYTES:
        yield _yellow("shm", f"/dev/shm has {free}: NCCL may fail to start.", fix)
    else:
        yield _green("shm", f"/dev/shm has {free}.")


def check_nccl(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """Several GPUs need it."""
    torch = facts.torch
    if need.num_gpus == 1 or need.device == "cpu" or torch is None or not torch.cuda_available:
        return
    if torch.nccl is None:
        yield _red("no-nccl", "this torch was built without NCCL.", "Install the usual build: pip install torch.")
    else:
        yield _green("nccl", f"NCCL {torch.nccl}.")


def check_network(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """How ranks find one another."""
    if need.num_gpus == 1 or need.launcher == "slurm":
        return
    if not facts.port_is_free:
        yield _yellow(
            "port-in-use",
            f"port {DEFAULT_PORT}, accelerate's own choice, is taken; lcplan uses another, the README's command not.",
            "By hand, add --main_process_port 0 on one node, or a port that is free on all.",
        )
    if not facts.host_name_resolves:
        yield _yellow(
            "host-name",
            "this machine's name does not resolve, which gloo and some launchers need.",
            "Add it to /etc/hosts.",
        )


def check_disk(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """Room for the checkpoints that stay and the final model."""
    if not facts.output_writable:
        yield _red("output-not-writable", f"{facts.output_dir} cannot be written to.", "Name another --output-dir.")
        return
    if facts.disk_free_bytes is None:
        return
    free = format_bytes(facts.disk_free_bytes)
    parts = (
        f"{need.num_checkpoints} checkpoint(s) of {format_bytes(need.checkpoint_bytes)}, "
        f"final model {format_bytes(need.saved_model_bytes)}"
    )
    if need.disk_bytes > facts.disk_free_bytes:
        yield _red(
            "disk",
            f"the job writes {format_bytes(need.disk_bytes)} ({parts}), and {facts.output_dir} has {free} free.",
            "Free space, name another --output-dir, save fewer checkpoints, or use --no-save.",
        )
    else:
        yield _green("disk", f"{format_bytes(need.disk_bytes)} needed ({parts}), {free} free.")


def check_sources(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """Data, weights and tokenizer are where the job will look for them."""
    del need
    if facts.data_problem is not None:
        code, message = facts.data_problem
        yield _red(code, message, "")
    for what, (name, presence) in facts.sources.items():
        if presence == "missing":
            yield _red(f"{what}-missing", f"the {what} {name!r} cannot be found.", _source_fix(what))
        elif presence == "unreachable":
            why = "HF_HUB_OFFLINE is set" if facts.offline else "the Hugging Face Hub does not answer"
            yield _yellow(
                f"{what}-unreachable",
                f"the {what} {name!r} is not on this machine, and {why}.",
                f"Download it first (hf download), or name a folder. {_source_fix(what)}",
            )
        else:
            where = "is here" if presence == "present" else "is on the Hub"
            yield _green(what, f"The {what} {name!r} {where}.")


def _source_fix(what: str) -> str:
    return {
        "data": "Name a file, a folder or a Hub dataset with --data.",
        "tokenizer": "Name one with --tokenizer.",
        "weights": "Name a saved model or a Hub id, or use --init random.",
    }.get(what, "")


def check_launcher(need: Need, facts: MachineFacts) -> Iterator[Finding]:
    """Slurm's own command."""
    if need.launcher == "slurm" and not facts.has_sbatch:
        yield _red(
            "no-sbatch",
            "--launcher slurm submits with sbatch, which is not on PATH.",
            "Run it on a login node of the cluster, or write the folder with --dry-run.",
        )


OF_A_PLAN: tuple[Callable[[Need, MachineFacts], Iterator[Finding]], ...] = (
    check_fit, check_extras, check_gpus, check_features, check_attention, check_host_memory, check_memlock, check_shm,
    check_nccl, check_network, check_disk, check_sources, check_launcher,
)  # fmt: skip
