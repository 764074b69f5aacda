"""What a job leaves behind as it goes: ``events.jsonl``, one JSON object a line, and ``result.json`` at the end.

Nothing here needs torch. Both files are rank 0's, or, for an error, those of the rank that saw it first.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
RESULT_FILE = "result.json"
STOP_FILE = "stop"
"""Written into the job's folder: save a checkpoint at the end of this step, and stop."""
RESERVE_FILE = ".reserve"
RESERVE_BYTES = 1 << 20
"""Held back on the disk, so that a job that fills it can still say so."""


def append_event(folder: Path, event: str, **fields: Any) -> None:
    """Add one event; a disk that is full or gone loses the line and stops nothing."""
    line = json.dumps({"event": event, "time": round(time.time(), 3), **fields})
    with suppress(OSError), (folder / EVENTS_FILE).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Every whole line so far; the last one may still be half written."""
    path = folder / EVENTS_FILE
    if not path.is_file():
        return []
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, dict) and "event" in content:
                events.append(content)
    return events


def start(folder: Path, *, keep_steps: int) -> list[dict[str, Any]]:
    """Make room for a new attempt; returns the events of the first ``keep_steps`` steps, which stay."""
    kept = [event for event in read_events(folder) if event["event"] == "step" and event["step"] <= keep_steps]
    (folder / RESULT_FILE).unlink(missing_ok=True)
    lines = "".join(json.dumps(event) + "\n" for event in kept)
    _replace(folder / EVENTS_FILE, lines)
    with suppress(OSError):
        (folder / RESERVE_FILE).write_bytes(bytes(RESERVE_BYTES))
    return kept


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write ``path`` whole; where several ranks fail, the first error stays: the others follow from it."""
    if content["error"] is not None and path.exists():
        return
    text = json.dumps(content, indent=2) + "\n"
    try:
        _replace(path, text)
    except OSError:
        (path.parent / RESERVE_FILE).unlink(missing_ok=True)
        _replace(path, text)


def finish(folder: Path) -> None:
    """Give the reserve back."""
    with suppress(OSError):
        (folder / RESERVE_FILE).unlink(missing_ok=True)


def process_state(pid: int) -> str | None:
    """The letter that Linux gives a process's state, None where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
