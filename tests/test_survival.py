"""Jobs that are stopped, killed, starved and resumed: each ends within 30 s, says why in one line, and leaves no half
checkpoint that a resume would take."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, run_python, small_job

from lcplan.backends.job import render_job
from lcplan.backends.launch import free_port
from lcplan.backends.templates import checkpoints, journal

pytestmark = pytest.mark.train
ENDS_WITHIN_S = 30
STARTS_WITHIN_S = 240
SMALL = ("--max-length", "64", "--per-device-train-batch-size", "2")
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT, "COLUMNS": "100"}


def run_arguments(folder: Path, *more: str) -> list[str]:
    return ["-m", "lcplan", "run", "--preset", "smoke", "--output-dir", str(folder), *SMALL, *more]


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Whatever a failed test leaves running is ended."""
    yield
    for pid in alive(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)
    for job in STARTED:
        job.wait(timeout=10)
    STARTED.clear()


STARTED: list[subprocess.Popen[bytes]] = []


def start(*arguments: str, log: Path, cwd: Path) -> subprocess.Popen[bytes]:
    """A process in a session of its own, its output in a file."""
    with log.open("wb") as file:
        job = subprocess.Popen(
            [sys.executable, *arguments], cwd=cwd, env=ENVIRONMENT, stdout=file, stderr=file, start_new_session=True
        )
    STARTED.append(job)
    return job


def until(what: str, test: Any, *, job: subprocess.Popen[bytes] | None = None, log: Path | None = None) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while not test():
        ended = job is not None and job.poll() is not None
        if ended or time.monotonic() > deadline:
            pytest.fail(f"no {what}: {log.read_text()[-3000:] if log else ''}")
        time.sleep(0.1)


def steps_done(folder: Path) -> int:
    return max((event["step"] for event in journal.read_events(folder) if event["event"] == "step"), default=0)


def result_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text()))


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in result_of(folder)["steps"]]


def alive(marker: str) -> list[int]:
    """Processes whose command line or working directory is below a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
                here = str((entry / "cwd").readlink())
            except OSError:
                continue
            if marker in line or here.startswith(marker):
                found.append(int(entry.name))
    return found


def assert_ends(job: subprocess.Popen[bytes], folder: Path, log: Path) -> float:
    """Launcher and every rank; returns the seconds."""
    began = time.monotonic()
    try:
        job.wait(timeout=ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still runs after {ENDS_WITHIN_S} s: {log.read_text()[-3000:]}")
    while left := alive(str(folder)):
        if time.monotonic() - began > ENDS_WITHIN_S:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"processes {left} are left: {log.read_text()[-3000:]}")
        time.sleep(0.1)
    return time.monotonic() - began


def one_line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


# --- stop and resume, one process


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 7 steps that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "job"
    done = run_python(
        *run_arguments(folder, "--max-steps", "7", "--save-steps", "2"), cwd=folder.parent, PYTHONPATH=ROOT
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_sigterm_saves_and_a_resume_gives_the_losses_of_an_undisturbed_run(whole: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "job", tmp_path / "log"
    # many steps of the same schedule: a constant learning rate makes those of the shorter run the same
    job = start(*run_arguments(folder, "--max-steps", "7", "--save-steps", "100"), log=log, cwd=tmp_path)
    until("second step", lambda: steps_done(folder) >= 2, job=job, log=log)
    job.send_signal(signal.SIGTERM)
    assert_ends(job, folder, log)
    stopped = result_of(folder)
    step = stopped["steps"][-1]["step"]
    if step == 7:
        pytest.skip("the machine was too busy to stop the run in time")
    assert job.returncode == stopped["exit_code"] == 75, log.read_text()
    assert f"stopped on request after step {step} of 7" in stopped["error"]
    assert "Continue with: lcplan run --resume" in log.read_text()
    assert checkpoints.newest_complete(folder) == folder / "checkpoints" / f"checkpoint-{step}"
    assert not (folder / "final_model").exists()
    done = run_python("-m", "lcplan", "run", "--resume", str(folder), cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stderr
    assert losses(folder) == losses(whole), "to the last digit, the order of the data included"
    assert digest(folder) == digest(whole)
    events = journal.read_events(folder)
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 8))
    assert events[-1]["event"] == "end"


def digest(folder: Path) -> bytes:
    return (folder / "final_model" / "model.safetensors").read_bytes()


def test_a_half_written_checkpoint_is_not_taken_and_is_cleared_away(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    shutil.copytree(whole, folder)
    (folder / "result.json").unlink()
    newest, older = (folder / "checkpoints" / f"checkpoint-{step}" for step in (7, 6))
    (newest / "complete.json").unlink()
    (newest / "optimizer.pt").write_bytes(b"half")
    assert checkpoints.newest_complete(folder) == older
    done = run_python("-m", "lcplan", "run", "--resume", str(folder), cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Resuming from checkpoint-6, which is whole." in done.stderr
    assert losses(folder) == losses(whole)
    assert journal.read_events(folder)[6]["removed"] == ["checkpoint-7"]
    assert checkpoints.read_marker(newest) is not None


def test_resume_refuses_other_data(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    shutil.copytree(whole, folder)
    (folder / "result.json").unlink()
    plan = json.loads((folder / "plan.json").read_text())
    text = tmp_path / "other.txt"
    text.write_text("Quite other words. " * 2000)
    plan["data"] = {**plan["data"], "kind": "files", "paths": [str(text)]}
    (folder / "plan.json").write_text(json.dumps(plan))
    done = run_python("-m", "lcplan", "run", "--resume", str(folder), cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 2, done.stderr
    assert "on other rows than those that the data gives now" in result_of(folder)["error"]


def test_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "job", tmp_path / "log"
    job = start(*run_arguments(folder, "--max-steps", "500"), log=log, cwd=tmp_path)
    until("step", lambda: steps_done(folder) >= 1, job=job, log=log)
    job.send_signal(signal.SIGINT)
    assert_ends(job, folder, log)
    assert job.returncode == result_of(folder)["exit_code"] == 130, log.read_text()
    assert one_line(log.read_text(), "The job failed:").startswith("The job failed: interrupted (Ctrl-C)")
    assert checkpoints.newest_complete(folder) is None


def test_sigterm_without_checkpoints_ends_it_at_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "job", tmp_path / "log"
    job = start(*run_arguments(folder, "--max-steps", "500"), log=log, cwd=tmp_path)
    until("step", lambda: steps_done(folder) >= 1, job=job, log=log)
    job.send_signal(signal.SIGTERM)
    assert_ends(job, folder, log)
    assert job.returncode == result_of(folder)["exit_code"] == 143, log.read_text()
    assert "ended by SIGTERM" in result_of(folder)["error"]


def test_a_training_process_that_is_killed_is_named(tmp_path: Path) -> None:
    folder, log = tmp_path / "job", tmp_path / "log"
    job = start(*run_arguments(folder, "--max-steps", "500", "--save-steps", "1"), log=log, cwd=tmp_path)
    until("checkpoint", lambda: checkpoints.newest_complete(folder), job=job, log=log)
    os.kill(journal.read_events(folder)[0]["pid"], signal.SIGKILL)
    assert_ends(job, folder, log)
    assert job.returncode == result_of(folder)["exit_code"] != 0
    assert "killed from outside" in one_line(log.read_text(), "The job failed:")
    assert "Continue with: lcplan run --resume" in log.read_text()
    watched = run_python("-m", "lcplan", "watch", str(folder), cwd=tmp_path, PYTHONPATH=ROOT)
    assert watched.returncode == job.returncode
    assert "killed from outside" in watched.stdout


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small disk needs root and mount: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="a small disk needs root and mount")
def test_a_full_disk_is_named_and_its_half_checkpoint_not_taken(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "48m"):
        folder, log = tmp_path / "disk" / "job", tmp_path / "log"
        job = start(*run_arguments(folder, "--max-steps", "500", "--save-steps", "1"), log=log, cwd=tmp_path)
        until("checkpoint", lambda: checkpoints.newest_complete(folder), job=job, log=log)
        fill(tmp_path / "disk" / "ballast", leave=200_000)
        assert_ends(job, folder, log)
        assert job.returncode == result_of(folder)["exit_code"] == 1, log.read_text()
        line = one_line(log.read_text(), "The job failed: the disk is full")
        assert "save_total_limit" in line
        kept = checkpoints.newest_complete(folder)
        assert kept is not None
        assert kept.name != f"checkpoint-{result_of(folder)['steps'][-1]['step']}", "the one that did not fit"


def fill(path: Path, *, leave: int) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while (free := shutil.disk_usage(path.parent).free) > leave:
                file.write(bytes(min(free - leave, 1 << 20)))
        except OSError:  # the job's own writing was quicker
            file.truncate(max(file.tell() - leave, 0))


# --- two processes over gloo


def two_ranks(folder: Path, *, training: dict[str, Any] | None = None, inject: str = "") -> Path:
    """A job of two processes that keep the whole model each; ``inject`` is run at the start of every step."""
    sizes = {"max_length": 64, "per_device_train_batch_size": 1, "num_gpus": 2, "gpus_per_node": 2}
    render_job(small_job(plan={**sizes, "backend": "ddp", "dp_replicate_size": 2}, training=training), folder)
    if inject:
        measure = (folder / "measure.py").read_text()
        head = '        """Called by the trainer before a step\'s first micro batch."""\n'
        body = "".join(f"        {line}\n" for line in inject.splitlines())
        (folder / "measure.py").write_text(measure.replace(head, head + body, 1))
    return folder


def start_two(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    launcher = ("-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml")
    return start(*launcher, "--main_process_port", str(free_port()), "train.py", log=log, cwd=folder)


def rank_pids(folder: Path) -> dict[int, int]:
    """Process by rank, from their environment."""
    found = {}
    for pid in alive(str(folder)):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [entry for entry in environment if entry.startswith(b"RANK=")]
        if ranks and b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found[int(ranks[0][5:])] = pid
    return found


LONG = {"max_steps": 2000, "save_strategy": "steps", "save_steps": 3}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_group(tmp_path: Path, rank: int) -> None:
    folder, log = two_ranks(tmp_path / "job", training=LONG), tmp_path / "log"
    job = start_two(folder, log)
    until("checkpoint", lambda: checkpoints.newest_complete(folder), job=job, log=log)
    ranks = rank_pids(folder)
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[rank], signal.SIGKILL)
    assert_ends(job, folder, log)
    assert job.returncode != 0
    error = result_of(folder)["error"]
    assert f"rank {rank} (process {ranks[rank]} on" in error, log.read_text()[-3000:]
    assert "is gone: killed from outside" in error
    assert "dmesg" in error
    whole = checkpoints.newest_complete(folder)
    assert whole is not None
    assert all(checkpoints.read_marker(path) for path in (folder / "checkpoints").glob("checkpoint-*") if path <= whole)


def test_ranks_do_not_outlive_their_launcher(tmp_path: Path) -> None:
    folder, log = two_ranks(tmp_path / "job", training={"max_steps": 2000}), tmp_path / "log"
    job = start_two(folder, log)
    until("step", lambda: steps_done(folder) >= 1, job=job, log=log)
    job.kill()
    assert_ends(job, folder, log)
    assert "the launcher of this rank is gone" in result_of(folder)["error"]


OUT_OF_MEMORY = """\
if self.guard.rank == 1 and len(self.steps) == 1:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total of 79 GiB.")"""
HANG = """\
if self.guard.rank == 1 and len(self.steps) == 2:
    time.sleep(1000)"""


def test_out_of_memory_on_one_rank_is_named_with_a_lever(tmp_path: Path) -> None:
    folder, log = two_ranks(tmp_path / "job", training={"max_steps": 2000}, inject=OUT_OF_MEMORY), tmp_path / "log"
    job = start_two(folder, log)
    until("result", lambda: (folder / "result.json").exists(), job=None, log=log)
    assert_ends(job, folder, log)
    result = result_of(folder)
    assert result["exit_code"] == 1
    assert result["error"].startswith("out of GPU memory on rank 1: OutOfMemoryError: CUDA out of memory. Tried to")
    assert "Would help: --offload-activations or more GPUs" in result["error"]


def test_a_hung_collective_ends_the_group(tmp_path: Path) -> None:
    training = {"max_steps": 2000, "hang_timeout_s": 8.0}
    folder, log = two_ranks(tmp_path / "job", training=training, inject=HANG), tmp_path / "log"
    job = start_two(folder, log)
    until("second step", lambda: steps_done(folder) >= 2, job=job, log=log)
    assert_ends(job, folder, log)
    result = result_of(folder)
    assert "step 3 has not ended after" in result["error"], log.read_text()[-3000:]
    assert "a collective hangs" in result["error"]
    assert "(most recent call first)" in log.read_text(), "the stack says where"


def test_a_frozen_rank_ends_the_group(tmp_path: Path) -> None:
    folder, log = two_ranks(tmp_path / "job", training={"max_steps": 2000}), tmp_path / "log"
    job = start_two(folder, log)
    until("step", lambda: steps_done(folder) >= 2, job=job, log=log)
    frozen = rank_pids(folder)[1]
    os.kill(frozen, signal.SIGSTOP)
    assert_ends(job, folder, log)
    error = result_of(folder)["error"]
    assert f"rank 1 (process {frozen} on" in error
    assert "did not answer for 15 s" in error


def test_two_ranks_stop_at_the_same_step_and_resume(tmp_path: Path) -> None:
    folder, log = two_ranks(tmp_path / "job", training={**LONG, "max_steps": 40, "save_steps": 100}), tmp_path / "log"
    job = start_two(folder, log)
    until("second step", lambda: steps_done(folder) >= 2, job=job, log=log)
    # to one rank alone, as a scheduler may send it
    os.kill(rank_pids(folder)[1], signal.SIGTERM)
    assert_ends(job, folder, log)
    stopped = result_of(folder)
    step = stopped["steps"][-1]["step"]
    if step == 40:
        pytest.skip("the machine was too busy to stop the run in time")
    assert stopped["exit_code"] == 75, log.read_text()[-3000:]
    checkpoint = checkpoints.newest_complete(folder)
    assert checkpoint is not None
    assert checkpoints.step_of(checkpoint) == step
    done = run_python("-m", "lcplan", "run", "--resume", str(folder), cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [entry["step"] for entry in result_of(folder)["steps"]] == list(range(1, 41))
