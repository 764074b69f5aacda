"""What a job leaves behind, read back: events, result, checkpoints, causes, the live view, report.json."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, run_python, small_job
from rich.console import Console

from lcplan import job_run, watching
from lcplan.backends import launch
from lcplan.backends.job import TEMPLATES, JobSpec, render_job
from lcplan.backends.templates import causes, checkpoints, journal
from lcplan.errors import InputError, PlanError
from lcplan.ledger import MemoryReport
from lcplan.reports.watch_view import event_line, format_duration, render_state
from lcplan.run_report import run_report, write_report
from lcplan.run_rows import read_run
from lcplan.watching import read_state, state_of

GIB = 1 << 30


SHRINKING = """
import json, sys
import torch, measure
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper

class Step(measure.StepRecorder):
    \"\"\"On a GPU whose allocator gave back, in the backward, what the forward had needed.\"\"\"
    peaks = [(4, 9), (7, 9), (6, 9), (8, 8), (3, 8)]  # allocated, reserved: two micro batches, optimizer step

cuda = torch.cuda
cuda.synchronize = lambda: None
cuda.memory_allocated = lambda: 2
cuda.max_memory_allocated = lambda: Step.peaks[0][0]
cuda.max_memory_reserved = lambda: Step.peaks[0][1]
cuda.reset_peak_memory_stats = lambda: Step.peaks.pop(0) if began and len(Step.peaks) > 1 else None
cuda.host_memory_stats = lambda: {}
began = False
step = Step(None, tokens_per_step=1, on_gpu=True)
step.cuda = step.parts.cuda = True
step.steps.append({"step": 1})
model, optimizer = torch.nn.Linear(1, 1), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
if "deepspeed" in sys.argv:
    wrapped = object.__new__(DeepSpeedOptimizerWrapper)
    wrapped.optimizer = optimizer
    optimizer = wrapped
step.on_step_begin(model=model, optimizer=optimizer)
began = True
step._mark("forward")
step.on_substep_end()
step._mark("forward")
step.on_pre_optimizer_step(model=model)
step.on_optimizer_step(optimizer=optimizer)
class State:
    global_step = 2
step.on_step_end(None, State, None)
print(json.dumps([step.steps[-1]["peak_allocated_bytes"], step.steps[-1]["peak_reserved_bytes"], step.parts.phases]))
"""


SIGNALLED = """
import json
import attempt, causes
LIBRARY = \"\"\"
def recompute(signal):
    try:
        raise LookupError("stops a recomputation")
    except LookupError:
        raise signal
\"\"\"
exec(compile(LIBRARY, "/elsewhere/checkpoint.py", "exec"))
signal = causes.Interrupted(15, "SIGTERM")

class Attempt:
    def __init__(self, settle):
        self.guard, self.settle = self, settle

def comes():
    raise signal

def fails(_):
    raise ValueError("first")

ends = [attempt.outcome(Attempt(lambda: None), lambda _: recompute(signal)), attempt.outcome(Attempt(comes), fails)]
print(json.dumps([type(problem).__name__ for _, problem in ends]))
"""


@pytest.mark.train
def test_a_signal_while_a_library_handles_an_error_is_what_ends_the_run() -> None:
    """Torch's checkpoint ends each recomputation by an error of its own; one that has left the run comes first."""
    done = run_python("-c", SIGNALLED, cwd=TEMPLATES)
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == ["Interrupted", "ValueError"]


@pytest.mark.train
@pytest.mark.parametrize(
    ("engine", "phases"),
    [("torch", {"forward": 6, "backward": 8, "optimizer_step": 3}), ("deepspeed", {"forward": 6, "backward": 8})],
)
def test_what_each_phase_of_all_micro_batches_held_at_most(engine: str, phases: dict[str, int]) -> None:
    """DeepSpeed's update is over when its backward returns."""
    done = run_python("-c", SHRINKING, engine, cwd=TEMPLATES)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [8, 9, phases]


SHARDED = """
import torch, measure

class OnGpu:  # as much of a tensor as is asked for
    device = torch.device("cuda")
    def __init__(self, num_bytes):
        self.num_bytes = num_bytes
    def untyped_storage(self):
        return self
    def data_ptr(self):
        return id(self)
    def nbytes(self):
        return self.num_bytes

empty, shard = OnGpu(1), OnGpu(64)
empty.ds_tensor = shard
assert measure.local_bytes([empty, OnGpu(8)]) == 72
"""


@pytest.mark.train
def test_zero_3_keeps_its_shards_beside_the_parameters() -> None:
    done = run_python("-c", SHARDED, cwd=TEMPLATES)
    assert done.returncode == 0, done.stderr[-2000:]


# --- events and result


def test_events_are_read_as_they_were_written_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    assert journal.read_events(tmp_path) == []
    journal.append_event(tmp_path, "phase", phase="loading")
    journal.append_event(tmp_path, "step", step=1)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('7\n{"event": "step", "st')
    events = journal.read_events(tmp_path)
    assert [event["event"] for event in events] == ["phase", "step"]
    assert abs(events[0]["time"] - time.time()) < 60


def test_a_resumed_run_keeps_the_steps_before_its_checkpoint(tmp_path: Path) -> None:
    for step in range(1, 6):
        journal.append_event(tmp_path, "step", step=step)
    journal.append_event(tmp_path, "end", exit_code=1)
    (tmp_path / "result.json").write_text("{}")
    assert [event["step"] for event in journal.start(tmp_path, keep_steps=3)] == [1, 2, 3]
    assert [event["step"] for event in journal.read_events(tmp_path)] == [1, 2, 3]
    assert not (tmp_path / "result.json").exists()
    assert (tmp_path / ".reserve").stat().st_size == journal.RESERVE_BYTES
    journal.finish(tmp_path)
    assert not (tmp_path / ".reserve").exists()


def test_the_first_error_stays(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    journal.write_result(path, {"error": "out of memory", "exit_code": 1})
    journal.write_result(path, {"error": "connection closed", "exit_code": 1})
    assert json.loads(path.read_text())["error"] == "out of memory"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_the_reserve_makes_room_for_the_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.start(tmp_path, keep_steps=0)
    real = journal._replace

    def full(path: Path, text: str) -> None:
        if (tmp_path / ".reserve").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, text)

    monkeypatch.setattr(journal, "_replace", full)
    journal.write_result(tmp_path / "result.json", {"error": "the disk is full", "exit_code": 1})
    assert json.loads((tmp_path / "result.json").read_text())["exit_code"] == 1


def test_a_process_that_has_ended_has_no_state() -> None:
    assert journal.process_state(os.getpid()) in ("R", "S", "D")
    done = subprocess.Popen([sys.executable, "-c", "pass"])
    done.wait()
    assert journal.process_state(done.pid) is None


# --- checkpoints


def checkpoint(folder: Path, step: int, *, whole: bool = True) -> Path:
    path = folder / "checkpoints" / f"checkpoint-{step}"
    (path / "shards").mkdir(parents=True)
    (path / "optimizer.pt").write_bytes(b"1234")
    (path / "shards" / "0.distcp").write_bytes(b"12345")
    if whole:
        checkpoints.mark_complete(path, step=step, rows="abc")
    return path


def test_only_a_whole_checkpoint_counts(tmp_path: Path) -> None:
    assert checkpoints.newest_complete(tmp_path) is None
    first, second, third = checkpoint(tmp_path, 9), checkpoint(tmp_path, 10), checkpoint(tmp_path, 11, whole=False)
    (tmp_path / "checkpoints" / "checkpoint-x").mkdir()
    assert checkpoints.newest_complete(tmp_path) == second, "10 is later than 9"
    assert checkpoints.read_marker(second) == {
        "step": 10, "rows": "abc", "files": {"optimizer.pt": 4, "shards/0.distcp": 5},
    }  # fmt: skip
    (second / "shards" / "0.distcp").write_bytes(b"123")
    assert checkpoints.newest_complete(tmp_path) == first, "a file is shorter than it was"
    (first / "optimizer.pt").unlink()
    assert checkpoints.newest_complete(tmp_path) is None
    assert checkpoints.remove_incomplete(tmp_path) == ["checkpoint-9", "checkpoint-10", "checkpoint-11"]
    assert not third.exists()
    assert (tmp_path / "checkpoints" / "checkpoint-x").exists(), "not ours"


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"files": {}}', '{"files": 3}', '{"files": {"x": 1}}'])
def test_a_marker_that_says_nothing_is_none(tmp_path: Path, text: str) -> None:
    path = checkpoint(tmp_path, 1)
    (path / "complete.json").write_text(text)
    assert checkpoints.read_marker(path) is None


def test_rows_of_other_data_have_another_digest() -> None:
    rows = [{"input_ids": [row, 2, 3]} for row in range(10)]
    other = [{"input_ids": [row, 2, 4]} for row in range(10)]
    assert checkpoints.rows_digest(rows) == checkpoints.rows_digest(list(rows))
    assert len({checkpoints.rows_digest(each) for each in (rows, other, rows[:9], rows[::-1])}) == 4
    with pytest.raises(ValueError, match="not named like"):
        checkpoints.step_of(Path("final_model"))


# --- causes


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


PLAN: dict[str, Any] = {
    "activation_checkpointing": "full", "offload_activations": True, "offload_params": False, "loss": "chunked",
    "backend": "fsdp2", "num_gpus": 8, "cp_size": 4, "sp_size": 1, "max_length": 1024,
}  # fmt: skip
ROOMY = causes.Facts(rank=3, free_gpu_bytes=70 * GIB, total_gpu_bytes=80 * GIB, free_disk_bytes=500 * GIB)
FULL = ROOMY._replace(free_gpu_bytes=GIB // 2)
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
CAUSES: list[tuple[BaseException, causes.Facts, tuple[str, ...]]] = [
    (OutOfMemoryError("CUDA out of memory. Tried 2 GiB."), FULL, ("out of GPU memory on rank 3", "--cp-size 8")),
    (RuntimeError("CUDA error: out of memory"), ROOMY, ("pinned host memory", "70.00 GiB", "--no-offload-activations")),
    (RuntimeError("CUDA error: out of memory"), FULL, ("outside PyTorch's allocator", "--cp-size 8")),
    (MemoryError(), ROOMY, ("out of host memory on rank 3", "--no-offload-activations")),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), ROOMY, ("out of host memory",)),
    (NO_SPACE, ROOMY, ("the disk is full", "save_total_limit")),
    (RuntimeError("PytorchStreamWriter failed writing file"), ROOMY._replace(free_disk_bytes=9), ("disk is full",)),
    (RuntimeError("Error: I/O error: No space left on device (os error 28)"), ROOMY, ("disk is full",)),
    (RuntimeError("PytorchStreamWriter failed writing file"), ROOMY, ("RuntimeError: Pytorch",)),
    (RuntimeError("Connection closed by peer [10.0.0.1]:5"), ROOMY, ("rank 3 lost its connection", "dmesg")),
    (RuntimeError("Connection closed by peer"), ROOMY._replace(gone=("rank 1 (pid 7)",)), ("rank 1 (pid 7) is gone",)),
    (RuntimeError("x"), ROOMY._replace(verdict="rank 2 did not answer."), ("rank 2 did not answer.",)),
    (RuntimeError("Watchdog caught collective operation timeout"), ROOMY, ("collective on rank 3 timed out",)),
    (causes.Interrupted(15, "SIGTERM"), ROOMY, ("ended by SIGTERM",)),
    (KeyboardInterrupt(), ROOMY, ("Ctrl-C",)),
    (ValueError("two\nlines"), ROOMY, ("ValueError: two lines",)),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "facts", "words"), CAUSES, ids=[case[2][0] for case in CAUSES])
def test_a_cause_is_one_line_with_a_lever(problem: BaseException, facts: causes.Facts, words: tuple[str, ...]) -> None:
    line = causes.explain(problem, PLAN, facts)
    assert "\n" not in line
    assert line.startswith(words[0]) or words[0] in line
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("changes", "levers"),
    [
        ({"activation_checkpointing": "none"}, "--activation-checkpointing full or --cp-size 8"),
        ({"offload_activations": False}, "--offload-activations or --cp-size 8"),
        ({"loss": "full"}, "--loss chunked or --cp-size 8"),
        ({"cp_size": 8}, "more GPUs (--num-gpus) or --max-length 512"),
        ({"backend": "deepspeed", "cp_size": 1, "sp_size": 2}, "--sp-size 4 or more GPUs (--num-gpus)"),
    ],
)
def test_the_levers_that_are_not_in_use(changes: dict[str, Any], levers: str) -> None:
    assert causes.gpu_levers({**PLAN, **changes}) == levers


# --- watching


DOCUMENT = {
    "training": {"max_steps": None},
    "prediction": {"peak_allocated_bytes": 60 * GIB, "device_peak_bytes": 61 * GIB, "pinned_bytes_per_rank": 36 * GIB},
}


def step(number: int, **changes: Any) -> dict[str, Any]:
    usual = {
        "event": "step", "time": 1000.0 + number, "step": number, "step_s": 10.0, "tokens_per_second": 500.0,
        "loss": 4.5 - number / 10, "max_steps": 100, "peak_allocated_bytes": 59 * GIB, "pinned_peak_bytes": 35 * GIB,
        "peaks_heard_of_ranks": [1, 58 * GIB, None],
    }  # fmt: skip
    return {**usual, **changes}


EVENTS = [
    {"event": "start", "time": 990.0, "host": "h", "pid": 1, "resumed_from": None},
    {"event": "phase", "time": 991.0, "phase": "training"},
    step(1, step_s=99.0),
    {
        "event": "first_step", "time": 1001.5,
        "findings": [
            {"what": "attention by", "planned": "flash", "found": "math", "as_planned": False, "fix": "See doctor."},
            {"what": "first loss", "planned": "below 8", "found": "4.4", "as_planned": True, "fix": ""},
        ],
    },
    step(2),
    {"event": "checkpoint", "time": 1002.5, "step": 2, "num_bytes": 3 * GIB},
    step(3, step_s=12.0),
]  # fmt: skip


def look(*events: dict[str, Any], result: dict[str, Any] | None = None, gone: bool = False) -> watching.JobState:
    return state_of(DOCUMENT, list(events), result, gone=gone, now=1010.0)


def test_the_state_of_a_running_job() -> None:
    state = look(*EVENTS)
    assert (state.phase, state.step, state.max_steps, state.checkpoint) == ("training", 3, 100, 2)
    assert state.step_s == 11.0, "the first step creates the optimizer states"
    assert state.eta_s == 97 * 11.0
    assert state.peaks == (59 * GIB, 58 * GIB, None)
    assert (state.predicted_peak_bytes, state.predicted_pinned_bytes) == (60 * GIB, 36 * GIB)
    assert state.since_s == pytest.approx(7.0)
    assert state.exit_code is None


def test_the_state_of_a_job_that_has_not_begun_and_of_one_that_has_ended() -> None:
    assert look().phase == "starting"
    assert look(EVENTS[2]).step_s == 99.0
    ended = look(*EVENTS, result={"exit_code": 75, "error": "stopped on request."})
    assert (ended.phase, ended.exit_code, ended.error) == ("ended", 75, "stopped on request.")
    gone = look(*EVENTS, gone=True)
    assert gone.exit_code == watching.EXIT_GONE
    assert "left no result" in (gone.error or "")


def shown(state: watching.JobState) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(render_state(state, "runs/x"))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_panel_has_peaks_beside_the_plan() -> None:
    text = shown(look(*EVENTS))
    for words in (
        "runs/x", "3 of 100", "4.2000", "500 tokens/s, 11.00 s a step", "17 min 47 s", "35.00 GiB, planned 36.00 GiB",
        "step 2, whole", "attention by: planned flash, found math. See doctor.",
    ):  # fmt: skip
        assert words in text, text
    rows = [line.split() for line in text.splitlines() if "GiB" in line and "planned 36" not in line]
    assert [row[1:-1] for row in rows] == [
        ["0", "59.00", "GiB", "60.00", "GiB", "0.9833"],
        ["1", "58.00", "GiB", "60.00", "GiB", "0.9667"],
        ["2", "-", "60.00", "GiB"],
    ]
    assert "ended, exit code 0" in shown(look(*EVENTS, result={"exit_code": 0, "error": None}))
    assert "time left" not in shown(look(*EVENTS, result={"exit_code": 0, "error": None}))


def test_events_in_lines() -> None:
    lines = [event_line(event) for event in EVENTS]
    assert lines == [
        "started",
        "phase: training",
        "step 1/100: loss 4.4000, 99.00 s, 500 tokens/s, peak 59.00 GiB",
        "attention by: planned flash, found math. See doctor.",
        "step 2/100: loss 4.3000, 10.00 s, 500 tokens/s, peak 59.00 GiB",
        "checkpoint-2 is whole (3.00 GiB)",
        "step 3/100: loss 4.2000, 12.00 s, 500 tokens/s, peak 59.00 GiB",
    ]
    assert event_line({"event": "end", "exit_code": 1, "error": "full"}) == "ended with exit code 1: full"
    assert event_line({"event": "start", "resumed_from": "checkpoint-2"}) == "resumed from checkpoint-2"
    assert event_line({"event": "other"}) is None
    assert [format_duration(seconds) for seconds in (12.4, 200, 7500)] == ["12 s", "3 min 20 s", "2 h 05 min"]


def job_folder(folder: Path, **training: Any) -> Path:
    return render_job(small_job(training=training), folder)


def test_watch_follows_a_job_to_its_end(lcplan: Callable[..., Any], tmp_path: Path) -> None:
    folder = job_folder(tmp_path / "job")
    for event in EVENTS[1:]:
        journal.append_event(folder, **{key: value for key, value in event.items() if key != "time"})
    once = lcplan("watch", str(folder), "--once")
    assert once.code == 0
    assert "3 of 100" in once.out
    journal.write_result(folder / "result.json", {"exit_code": 1, "error": "out of GPU memory on rank 1."})
    result = lcplan("watch", str(folder))
    assert result.code == 1
    assert "step 3/100: loss 4.2000" in result.out
    assert "out of GPU memory on rank 1." in result.out
    state = json.loads(lcplan("watch", str(folder), "--json").out)
    assert (state["exit_code"], state["step"]) == (1, 3)
    missing = lcplan("watch", str(tmp_path))
    assert missing.code == 2
    assert "error [not-a-job]" in missing.err


def test_watch_notices_that_the_process_is_gone(lcplan: Callable[..., Any], tmp_path: Path) -> None:
    folder = job_folder(tmp_path / "job")
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    journal.append_event(folder, "start", host=socket.gethostname(), pid=dead.pid, resumed_from=None)
    result = lcplan("watch", str(folder))
    assert result.code == 1
    assert "its process has ended and left no result" in result.out
    journal.start(folder, keep_steps=0)
    journal.append_event(folder, "start", host="another", pid=dead.pid, resumed_from=None)
    assert read_state(folder).exit_code is None, "of another machine nothing is known"


# --- resuming


def test_what_cannot_be_resumed_is_refused_by_name(lcplan: Callable[..., Any], tmp_path: Path) -> None:
    folder = job_folder(tmp_path / "job", save_strategy="steps", save_steps=1)
    for path, code in ((tmp_path / "nothing", "not-a-job"), (folder, "no-checkpoint")):
        refused = lcplan("run", "--resume", str(path))
        assert (refused.code, f"error [{code}]" in refused.err) == (2, True), refused.err
    checkpoint(folder, 3)
    journal.append_event(folder, "start", host=socket.gethostname(), pid=os.getpid())
    assert "error [still-running]" in lcplan("run", "--resume", str(folder)).err
    journal.write_result(folder / "result.json", {"exit_code": 0, "error": None})
    assert "error [already-finished]" in lcplan("run", "--resume", str(folder)).err
    document = json.loads((folder / "plan.json").read_text())
    document["plan"] |= {"backend": "deepspeed", "sp_size": 2, "num_gpus": 2}
    (folder / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanError, match="Ulysses .sp_size 2.") as caught:
        job_run.resume_job(folder)
    assert caught.value.code == "resume-ulysses"
    (folder / "plan.json").write_text('{"plan": 3}')
    with pytest.raises(InputError, match="plan.json cannot be read"):
        job_run.resume_job(folder)


@pytest.mark.train
def test_the_job_itself_refuses_to_resume_ulysses(tmp_path: Path) -> None:
    folder = job_folder(tmp_path / "job")
    document = json.loads((folder / "plan.json").read_text())
    document["plan"] |= {"sp_size": 2}
    (folder / "plan.json").write_text(json.dumps(document))
    done = run_python("train.py", "--resume", cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "cannot be resumed" in json.loads((folder / "result.json").read_text())["error"]


# --- the launcher


def test_the_first_sigterm_asks_and_the_second_ends(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from lcplan.backends import launch; "
        'child = \'import time; open("started", "w").close(); time.sleep(60)\'; '
        "sys.exit(launch.stream([sys.executable, '-c', child], Path.cwd(), dict(os.environ), stop_file=Path('stop')))"
    )
    running = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT})
    wait_for(tmp_path / "started")
    running.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "stop")
    assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=20) == 128 + signal.SIGTERM


def test_what_ignores_a_signal_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from lcplan.backends import launch; launch.GRACE_S = 1; "
        'child = \'import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); open("started", "w").close(); '
        "time.sleep(60)'; "
        "sys.exit(launch.stream([sys.executable, '-c', child], Path.cwd(), dict(os.environ)))"
    )
    running = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT})
    wait_for(tmp_path / "started")
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=20) == 128 + signal.SIGKILL
    assert launch.GRACE_S < 30


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.05)


def test_lines_can_be_shown_as_they_come(tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
    assert launch.stream([sys.executable, "-c", code], tmp_path, dict(os.environ), show=lines.append) == 3
    assert sorted(lines) == ["one", "two"]


# --- planned against found


@pytest.mark.train
def test_the_first_step_is_held_against_the_plan() -> None:
    """Pure parts of the job's own script, in a process that finds its siblings."""
    code = (
        "from first_step import boundary, kernel, masters, scaling_of, shards, attention_kernels, rotary, first_loss\n"
        "import torch\n"
        "plan = dict(cp_size=4, sp_size=1, max_length=4096, backend='fsdp2', dp_shard_size=1, zero_stage=None,\n"
        "            lora_r=None, dtype='bfloat16')\n"
        "assert boundary((1, 1024), plan).as_planned and boundary((1, 1020), plan).as_planned\n"
        "assert not boundary((1, 4096), plan).as_planned\n"
        "operators = ['aten::_scaled_dot_product_cudnn_attention', 'aten::mm']\n"
        "assert attention_kernels(operators) == ('cudnn_attention',)\n"
        "assert kernel(('flash_attention',), on_gpu=True).as_planned\n"
        "assert not kernel(('attention_math',), on_gpu=True).as_planned\n"
        "assert kernel(('attention_math',), on_gpu=False).as_planned\n"
        "assert not kernel(('efficient_attention',), on_gpu=True).as_planned\n"
        "model = torch.nn.Linear(8, 8)\n"
        "assert [f.as_planned for f in masters(model, plan)] == [True], 'FSDP2 keeps float32'\n"
        "assert [f.as_planned for f in masters(model.bfloat16(), plan)] == [False]\n"
        "assert [f.as_planned for f in masters(model, plan | {'backend': 'single'})] == [True]\n"
        "assert [f.as_planned for f in shards(model, plan)] == [False], 'nobody sharded it'\n"
        "model.weight.ds_numel, model.weight.ds_tensor = 64, torch.empty(16)\n"
        "zero = plan | {'backend': 'deepspeed', 'zero_stage': 3}\n"
        "assert [f.as_planned for f in shards(model, zero)] == [True]\n"
        "assert list(shards(model, plan | {'backend': 'ddp'})) == []\n"
        "plain = [1e6 ** (-2 * i / 64) for i in range(32)]\n"
        "assert abs(scaling_of(plain, 1e6) - 1) < 1e-9\n"
        "rope = {'factor': 32.0, 'rope_theta': 1e6}\n"
        "module = torch.nn.Module()\n"
        "module.register_buffer('inv_freq', torch.tensor(plain))\n"
        "assert [f.as_planned for f in rotary(module, rope)] == [False]\n"
        "module.inv_freq = torch.tensor(plain) / 32\n"
        "assert [f.as_planned for f in rotary(module, rope)] == [True]\n"
        "assert first_loss(6.9, pretrained=False, vocab_size=1024).as_planned\n"
        "assert not first_loss(9.0, pretrained=False, vocab_size=1024).as_planned\n"
    )
    done = run_python("-c", code, cwd=Path(str(TEMPLATES)))
    assert done.returncode == 0, done.stderr


@pytest.mark.train
def test_a_rope_that_transformers_builds_is_recognised(tmp_path: Path) -> None:
    """YaRN's slowest frequency is divided by the factor, whatever it does to the others."""
    from lcplan.ledger import RopeParameters

    rope = RopeParameters(rope_type="yarn", factor=4, rope_theta=1e4, original_max_position_embeddings=256)
    code = (
        "import train, torch; from first_step import rotary; from model import load_config, build_model\n"
        "job = train.JOB; model = build_model(job, load_config(job), torch.device('cpu'), empty=False)\n"
        "print([(f.found, f.as_planned) for f in rotary(model, job['rope'])])\n"
        "print([(f.found, f.as_planned) for f in rotary(model, {**job['rope'], 'factor': 8.0})])\n"
    )
    folder = render_job(small_job(rope=rope), tmp_path / "job")
    done = run_python("-c", code, cwd=folder)
    assert done.stdout.splitlines()[-2:] == ["[('x4', True)]", "[('x4', False)]"], done.stderr[-800:]


# --- learning


def gpu_run() -> tuple[JobSpec, dict[str, Any]]:
    """A job of one GPU and the result that it might have written."""
    job = small_job(plan={"gpu": "h200", "max_length": 512}, device="gpu")
    phases = {"forward": 150 << 20, "backward": 220 << 20, "optimizer_step": 90 << 20}
    result = {
        "exit_code": 0, "error": None, "peak_allocated_bytes_per_rank": [230 << 20],
        "peak_reserved_bytes_per_rank": [300 << 20], "pinned_peak_bytes_per_rank": [1 << 20],
        "phases_per_rank": [phases],
        "resident_per_rank": [{"before_step": 3 << 20, "parameters": 1 << 20, "optimizer_states": 2 << 20}],
        "device_used_bytes": 900 << 20, "world_size": 1, "gpu_name": "NVIDIA H200",
        "steps": [{"step": n, "step_s": s} for n, s in ((1, 9.0), (2, 2.0), (3, 3.0))],
        "versions": {"torch": "2.13.0", "trl": "1.16.0"},
    }  # fmt: skip
    return job, result


def test_a_run_is_a_report_like_the_others(tmp_path: Path) -> None:
    job, result = gpu_run()
    report = write_report(tmp_path, job, result)
    assert report is not None
    again = MemoryReport.model_validate_json((tmp_path / "report.json").read_text())
    assert again == report
    assert (again.method, again.peak_rank, again.peak_phase) == ("run", 0, "backward")
    assert again.peak_allocated_bytes == 230 << 20, "the most of all steady steps"
    assert [phase.allocated_bytes for phase in again.phases] == [150 << 20, 220 << 20, 90 << 20]
    assert again.step_time_s == 2.5
    assert again.tokens_per_second == 8 * 512 / 2.5
    assert again.stack["torch"] == "2.13.0"
    compared = {row.what: row for row in again.compared}
    assert compared["rank 0: backward"].measured_bytes == 220 << 20
    assert compared["rank 0: peak"].measured_bytes == 230 << 20
    assert compared["rank 0: parameters"].predicted_bytes > 0


def test_a_run_without_a_gpu_has_no_report(tmp_path: Path) -> None:
    job, result = gpu_run()
    assert run_report(job.model_copy(update={"device": "cpu"}), result) is None
    assert run_report(job, {**result, "phases_per_rank": [{}]}) is None, "one step only"
    assert list(tmp_path.iterdir()) == []


def test_a_report_can_be_added_with_its_phases(tmp_path: Path) -> None:
    job, result = gpu_run()
    render_job(job, tmp_path / "job")
    (tmp_path / "job" / "result.json").write_text(json.dumps(result))
    write_report(tmp_path / "job", job, result)
    row = read_run(tmp_path / "job" / "report.json")
    measured = row.measured.model_dump()
    assert measured["phases"] == result["phases_per_rank"][0]
    assert measured["resident_before_step_bytes"] == 3 << 20
    assert row == read_run(tmp_path / "job")
