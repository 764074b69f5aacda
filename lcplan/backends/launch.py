"""What this machine has, and the local launcher: ``accelerate launch`` as an argument list, no shell."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import PIPE, STDOUT
from types import FrameType
from typing import Any

from lcplan.backends.job import COMMAND, JobSpec, packages
from lcplan.backends.templates.journal import STOP_FILE
from lcplan.doctor import TRAIN_PACKAGES, extras_of
from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.job_options import Device
from lcplan.train_plan import TrainPlan
from lcplan.units import ceil_div

LAST_TRL_WITH_FULL_LOGITS = (1, 14)
"""trl/trainer/sft_config.py: from 1.15 on ``nll`` is the chunked head and none computes all logits."""
GRACE_S = 20.0
"""A job that was told to end and has not after so long is killed."""
STDERR = 2
"""The job's own output goes where lcplan's progress goes; stdout is kept for the result."""


def installed_versions() -> dict[str, str]:
    """Versions of what a job needs, without importing it; what is missing is left out."""
    return {name: installed for name in TRAIN_PACKAGES if (installed := _version(name)) is not None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_packages(plan: TrainPlan) -> None:
    """Refuse to train without the train extra, and without what the plan needs on top."""
    missing = [name for name in (*TRAIN_PACKAGES, *packages(plan)) if _version(name) is None]
    if missing:
        one = len(missing) == 1
        raise EnvironmentProblem(
            "missing-extra",
            f"{', '.join(missing)} {'is' if one else 'are'} not installed, and this job needs "
            f"{'it' if one else 'them'}. Install the extra: pip install 'lcplan[{extras_of(missing)}]'",
        )


def check_loss(loss: str, trl_version: str | None) -> None:
    """Refuse full logits where the installed TRL has no such loss any more."""
    if loss != "full" or trl_version is None:
        return
    release = tuple(int(part) for part in trl_version.split(".")[:2] if part.isdigit())
    if release > LAST_TRL_WITH_FULL_LOGITS:
        raise PlanError(
            "loss-full-unavailable",
            f"--loss full needs trl 1.14 or older, and {trl_version} is installed: from 1.15 on TRL always "
            "computes the loss in chunks. Use --loss chunked, or: pip install 'trl<1.15'",
        )


def visible_gpus() -> list[str]:
    """Names of the CUDA GPUs that a job would see; asked in a process that gives them back."""
    code = (
        "import json, torch; "
        "print(json.dumps([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = answer.stdout.splitlines()
    return list(json.loads(lines[-1])) if answer.returncode == 0 and lines else []


def check_gpus(*, num_gpus: int, gpus_per_node: int) -> list[str]:
    """Refuse a GPU plan that this machine cannot hold; return the names of its GPUs."""
    if (nodes := ceil_div(num_gpus, gpus_per_node)) > 1:
        raise EnvironmentProblem(
            "several-nodes",
            f"the plan spreads {num_gpus} GPUs over {nodes} nodes, and the local launcher starts one. "
            "Render the folder with --dry-run and start it on every node.",
        )
    names = visible_gpus()
    if len(names) < num_gpus:
        here = "no CUDA GPU is visible" if not names else f"{len(names)} GPU(s) are visible: {', '.join(names)}"
        raise EnvironmentProblem(
            "no-gpu" if not names else "too-few-gpus",
            f"the plan needs {num_gpus} GPU(s), and {here}. Render the folder with --dry-run and start it "
            "where they are, or plan with a smaller --num-gpus.",
        )
    return names


def hidden_cudnn(environment: Mapping[str, str]) -> str | None:
    """Where LD_LIBRARY_PATH has a cuDNN of its own, which then stands before the one torch brings; None where not."""
    for entry in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        folder = Path(entry)
        try:
            if folder.is_dir() and any(folder.glob("libcudnn*.so*")):
                return entry
        except OSError:
            continue
    return None


def needs_hub(job: JobSpec) -> bool:
    """Whether the job may have to download a model, a tokenizer or data."""
    return job.model.init == "pretrained" or job.tokenizer.kind == "pretrained" or job.data.kind == "hub"


def job_environment(device: Device, *, offline: bool) -> dict[str, str]:
    """This process's environment with what the job needs on top."""
    added = {"HF_HUB_OFFLINE": "1"} if offline else {}
    if device == "gpu":
        added["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return {**added, **os.environ}


def launch(
    folder: Path,
    environment: dict[str, str],
    *,
    num_processes: int = 1,
    resume: bool = False,
    saves: bool = False,
    show: Callable[[str], None] | None = None,
) -> int:
    """Run the job in its folder and return the launcher's exit code; see ``stream`` for the rest."""
    # another job on this machine may have accelerate's own choice of port
    port = ["--main_process_port", str(free_port())] if num_processes > 1 else []
    command = [sys.executable, "-m", "accelerate.commands.launch", *COMMAND[2:4], *port, *COMMAND[4:]]
    stop_file = folder / STOP_FILE if saves else None
    return stream([*command, *(["--resume"] if resume else [])], folder, environment, stop_file=stop_file, show=show)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _outlive(group: int) -> None:
    """Wait until every process of a group has ended: a launcher may end before the worker that writes the result."""
    import psutil

    def lives(process: psutil.Process) -> bool:
        try:
            return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    deadline = time.monotonic() + GRACE_S
    while any(map(lives, psutil.process_iter())):
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
            return
        time.sleep(0.1)


def stream(
    command: list[str],
    folder: Path,
    environment: dict[str, str],
    *,
    stop_file: Path | None = None,
    show: Callable[[str], None] | None = None,
) -> int:
    """Run one command; 128 + the signal's number where a signal ended it, as shells count.

    SIGINT and SIGTERM are passed on, and what has not ended after GRACE_S is killed. Where there is a ``stop_file`` the
    first SIGTERM writes it instead: the job saves a checkpoint at the end of its step. What the command prints goes to
    stderr, or line by line to ``show``.
    """
    sys.stderr.flush()
    output: dict[str, Any] = {"stdout": STDERR} if show is None else {"stdout": PIPE, "stderr": STDOUT, "text": True}
    # A session of its own, so that a signal reaches launcher and workers once, by us.
    job = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **output)
    last_resort: list[threading.Timer] = []

    def end(number: int) -> None:
        if job.poll() is None:
            os.killpg(job.pid, number)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM and stop_file is not None and not stop_file.exists():
            try:
                stop_file.touch()
                os.write(STDERR, b"SIGTERM: the job saves a checkpoint at the end of its step; again ends it now.\n")
                return
            except OSError:
                pass  # a full disk takes no checkpoint either
        end(number)
        if not last_resort:
            last_resort.append(threading.Timer(GRACE_S, end, (signal.SIGKILL,)))
            last_resort[0].daemon = True
            last_resort[0].start()

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if show is not None and job.stdout is not None:
            with job.stdout:
                for line in job.stdout:
                    show(line.rstrip("\n"))
        code = job.wait()
        _outlive(job.pid)
    finally:
        for timer in last_resort:
            timer.cancel()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
