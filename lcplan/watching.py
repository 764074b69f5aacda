"""How a job is doing, from what it writes into its folder; nothing of it needs the job's own process."""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from lcplan._record import Record
from lcplan.backends.job import RESULT_FILE
from lcplan.backends.templates import journal
from lcplan.errors import InputError

POLL_S = 1.0
EXIT_GONE = 1
"""Of ``lcplan watch`` where the job's process ended without a result."""
RECENT_STEPS = 20
"""Step times and speed are the medians of so many."""


class JobState(Record):
    """One look at a job."""

    phase: str
    """starting, tokenizing, loading, training, saving or ended."""
    step: int = 0
    max_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    step_s: float | None = None
    eta_s: float | None = None
    peaks: tuple[int | None, ...] = ()
    """Measured peak of every rank, as far as rank 0 has heard."""
    predicted_peak_bytes: int | None = None
    pinned_bytes: int | None = None
    predicted_pinned_bytes: int | None = None
    checkpoint: int | None = None
    """Step of the newest whole checkpoint."""
    findings: tuple[dict[str, Any], ...] = Field(default=(), repr=False)
    """Planned against found after the first step."""
    since_s: float | None = None
    """Seconds since the last event."""
    exit_code: int | None = None
    """None while it runs."""
    error: str | None = None


def read_state(folder: Path, *, now: float | None = None) -> JobState:
    """What the job's folder says right now.

    Raises:
        InputError: where it is no job folder.
    """
    events = journal.read_events(folder)
    return state_of(_plan(folder), events, _result(folder), gone=is_gone(events), now=now or time.time())


def state_of(
    document: dict[str, Any], events: list[dict[str, Any]], result: dict[str, Any] | None, *, gone: bool, now: float
) -> JobState:
    """A job's state from its plan, events and result; ``gone`` says that its process has ended."""
    steps = [event for event in events if event["event"] == "step"]
    phases = [event["phase"] for event in events if event["event"] == "phase"]
    last: dict[str, Any] = steps[-1] if steps else {}
    prediction = document.get("prediction") or {}
    values: dict[str, Any] = {
        "phase": phases[-1] if phases else "starting",
        "step": last.get("step", 0),
        "max_steps": last.get("max_steps") or document["training"].get("max_steps"),
        "loss": last.get("loss"),
        "peaks": _peaks(last),
        "predicted_peak_bytes": prediction.get("peak_allocated_bytes"),
        "pinned_bytes": last.get("pinned_peak_bytes"),
        "predicted_pinned_bytes": prediction.get("pinned_bytes_per_rank"),
        "checkpoint": max((event["step"] for event in events if event["event"] == "checkpoint"), default=None),
        "findings": next((tuple(e["findings"]) for e in reversed(events) if e["event"] == "first_step"), ()),
        "since_s": now - events[-1]["time"] if events else None,
        **_speed(steps),
    }
    if values["step_s"] is not None and values["max_steps"] is not None:
        values["eta_s"] = (values["max_steps"] - values["step"]) * values["step_s"]
    if result is not None:
        values |= {"phase": "ended", "exit_code": result["exit_code"], "error": result["error"]}
    elif gone:
        error = "its process has ended and left no result: killed from outside, or the machine went down."
        values |= {"phase": "ended", "exit_code": EXIT_GONE, "error": error}
    return JobState(**values)


def _peaks(step: dict[str, Any]) -> tuple[int | None, ...]:
    """Rank 0's own is of this step, the others' what they last said."""
    own = step.get("peak_allocated_bytes")
    heard = step.get("peaks_heard_of_ranks") or [own]
    return (own, *heard[1:]) if own is not None else ()


def _speed(steps: list[dict[str, Any]]) -> dict[str, float | None]:
    """Medians of the latest steps; the first of all creates the optimizer states and is left out."""
    steady = [step for step in steps if step["step"] > 1][-RECENT_STEPS:] or steps
    if not steady:
        return {"step_s": None, "tokens_per_second": None}
    return {name: statistics.median(step[name] for step in steady) for name in ("step_s", "tokens_per_second")}


def is_gone(events: list[dict[str, Any]]) -> bool:
    """Whether the process that wrote the events has ended; only its own machine can tell."""
    start = next((event for event in reversed(events) if event["event"] == "start"), None)
    if start is None or start["host"] != socket.gethostname() or not Path("/proc").is_dir():
        return False
    return journal.process_state(start["pid"]) in (None, "Z")


def follow(folder: Path, *, poll_s: float = POLL_S, sleep: Callable[[float], None] = time.sleep) -> Iterator[JobState]:
    """The job's state again and again, until it has ended."""
    missing = 0
    while True:
        state = read_state(folder)
        # a process that has just ended may be about to rename its result into place
        if state.exit_code == EXIT_GONE and _result(folder) is None and missing < 2:
            missing += 1
            sleep(poll_s)
            continue
        yield state
        if state.exit_code is not None:
            return
        sleep(poll_s)


def _plan(folder: Path) -> dict[str, Any]:
    path = folder / "plan.json"
    try:
        document = json.loads(path.read_text("utf-8"))
        if isinstance(document, dict) and isinstance(document.get("training"), dict):
            return document
    except (OSError, ValueError):
        pass
    raise InputError(
        "not-a-job", f"{folder} is no job folder: it has no plan.json. Give the --output-dir of a lcplan run."
    )


def _result(folder: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / RESULT_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "exit_code" in content else None
