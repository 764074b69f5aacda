"""Collects what ``doctor`` looks at; every question may go unanswered, and none changes anything."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lcplan.backends import launch
from lcplan.doctor import DEFAULT_PORT, OLDEST, GpuFact, MachineFacts, Presence, TorchFacts

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number about as large as a page count can be."""
TORCH_TIMEOUT_S = 120
HUB_TIMEOUT_S = 5.0

_ASK_TORCH = """
import inspect, json, sys
asked = json.loads(sys.argv[1])
found = {"error": None}
try:
    import torch
    found["cuda"], found["hip"] = torch.version.cuda, torch.version.hip
    found["cuda_available"] = torch.cuda.is_available()
    found["cudnn"] = torch.backends.cudnn.version() if found["cuda_available"] else None
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if nccl and found["cuda_available"] else None
    count = torch.cuda.device_count() if found["cuda_available"] else 0
    found["gpus"] = [[torch.cuda.get_device_name(i), *reversed(torch.cuda.mem_get_info(i))] for i in range(count)]
    if count and asked.get("head_dim"):
        shape = (1, asked["heads"], 256, asked["head_dim"])
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
        names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
        found["sdpa_kernel"] = names.get(torch._fused_sdp_choice(q, k, v, None, 0.0, True))
    if asked.get("levers"):
        from transformers import PreTrainedModel
        newer = getattr(PreTrainedModel, "activation_checkpointing_enable", None)
        known = inspect.signature(newer or PreTrainedModel.gradient_checkpointing_enable).parameters
        found["missing_features"] = [flag for name, flag in asked["levers"].items() if name not in known]
except Exception as problem:
    found["error"] = f"{type(problem).__name__}: {problem}"
print(json.dumps(found))
"""


def collect(
    output_dir: Path,
    *,
    ask_torch: bool = True,
    head_dim: int | None = None,
    heads: int = 1,
    levers: dict[str, str] | None = None,
) -> MachineFacts:
    """Look at this machine; nothing is written but a file that is gone at once.

    Args:
        output_dir: folder of the job, which need not exist
        ask_torch: start Python once more to ask torch, some seconds
        head_dim: of the model whose attention kernel is asked for
        heads: of the same
        levers: keywords of transformers' checkpointing that the plan needs, to the flag that asks for them
    """
    asked = {"head_dim": head_dim, "heads": heads, "levers": levers or {}}
    torch, torch_gpus = torch_facts(asked) if ask_torch else (None, ())
    gpus, nvml_error = nvml_gpus()
    folder = nearest_folder(output_dir)
    limit, used = cgroup_memory()
    return MachineFacts(
        python=sys.version_info[:2],
        versions=versions(),
        torch=torch,
        gpus=gpus or torch_gpus,
        nvml_error=nvml_error,
        **host_memory(),
        cgroup_limit_bytes=limit,
        cgroup_used_bytes=used,
        memlock_bytes=memlock_bytes(),
        shm_free_bytes=free_bytes(Path("/dev/shm")),
        output_dir=str(output_dir),
        output_writable=is_writable(folder),
        disk_free_bytes=free_bytes(folder),
        port_is_free=port_is_free(DEFAULT_PORT),
        host_name_resolves=host_name_resolves(),
        hidden_cudnn=launch.hidden_cudnn(os.environ),
        has_sbatch=shutil.which("sbatch") is not None,
        offline=os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"),
    )


def versions() -> dict[str, str]:
    """Installed versions of everything a job may import."""
    found = {}
    for name in OLDEST:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def torch_facts(asked: dict[str, Any]) -> tuple[TorchFacts | None, tuple[GpuFact, ...]]:
    """What torch says, in a process that then gives the GPUs back."""
    if "torch" not in versions():
        return None, ()
    command = [sys.executable, "-c", _ASK_TORCH, json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"no answer within {TORCH_TIMEOUT_S} s"), ()
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return TorchFacts(error=f"it ended with exit code {done.returncode}: {done.stderr.strip()[-200:]}"), ()
    gpus = tuple(GpuFact(name=name, total_bytes=total, free_bytes=free) for name, total, free in found.pop("gpus", ()))
    return TorchFacts(**found), gpus


def nvml_gpus() -> tuple[tuple[GpuFact, ...], str | None]:
    """The GPUs that a job would see, by the driver's library; or why it cannot be asked."""
    try:
        import pynvml
    except ImportError:
        return (), "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), str(error)
    try:
        return tuple(_nvml_gpu(pynvml, handle) for handle in _visible(pynvml)), None
    except pynvml.NVMLError as error:
        return (), str(error)
    finally:
        pynvml.nvmlShutdown()


def _visible(pynvml: Any) -> list[Any]:
    """Handles in the order of CUDA_VISIBLE_DEVICES; as for CUDA, the list ends at the first that is unknown."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = pynvml.nvmlDeviceGetCount()
    if named is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    handles = []
    for entry in filter(None, (part.strip() for part in named.split(","))):
        if entry.isdigit():
            if int(entry) >= count:
                break
            handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(entry)))
        else:
            try:
                handles.append(pynvml.nvmlDeviceGetHandleByUUID(entry))
            except pynvml.NVMLError:
                break
    return handles


def _nvml_gpu(pynvml: Any, handle: Any) -> GpuFact:
    name = pynvml.nvmlDeviceGetName(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    text = name.decode() if isinstance(name, bytes) else str(name)
    return GpuFact(name=text, total_bytes=int(memory.total), free_bytes=int(memory.free))


def host_memory() -> dict[str, int]:
    """Total and available host memory; empty where psutil is missing."""
    try:
        import psutil
    except ImportError:
        return {}
    memory = psutil.virtual_memory()
    return {"host_total_bytes": int(memory.total), "host_available_bytes": int(memory.available)}


def cgroup_memory(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> tuple[int | None, int]:
    """The tightest memory limit of this process's cgroups, version 2 or 1, and what is used under it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None, 0
    found: list[tuple[int, int]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _limits(root, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            found += _limits(root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(found, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _limits(root: Path, path: str, limit_name: str, used_name: str) -> list[tuple[int, int]]:
    """Limit and use of a cgroup and of all above it; inside a container only the root may be visible."""
    here = root / path.lstrip("/")
    folders = [here, *here.parents]
    folders = folders[: folders.index(root) + 1]
    found = []
    for folder in folders:
        try:
            limit, used = (folder / limit_name).read_text().strip(), (folder / used_name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < UNLIMITED_BYTES:
            found.append((int(limit), int(used)))
    return found


def memlock_bytes() -> int | None:
    """``ulimit -l``; None without a limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def free_bytes(folder: Path) -> int | None:
    """Free space of the file system that holds a folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def is_writable(folder: Path) -> bool:
    """Whether a file can be made there; root may be told no by a read-only mount, which no permission shows."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def port_is_free(port: int) -> bool:
    """Whether nobody listens on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def host_name_resolves() -> bool:
    """Whether this machine finds itself by its name."""
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return False
    return True


def presence(name: str, *, kind: str, file: str | None) -> Presence:
    """Whether a folder or Hub repository is there; ``file`` is one that it must have."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return "present" if file is None or (folder / file).is_file() else "missing"
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if file is not None and isinstance(try_to_load_from_cache(name, file, repo_type=kind), str):
            return "present"
        HfApi().repo_info(name, repo_type=kind, timeout=HUB_TIMEOUT_S)
    except (RepositoryNotFoundError, HFValidationError):
        return "missing"
    except Exception:  # no network, or offline on purpose
        return "unreachable"
    return "reachable"
