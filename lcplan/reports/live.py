"""The watching loops: a panel that redraws itself, or lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lcplan.backends.templates import journal
from lcplan.reports.watch_view import event_line, render_state
from lcplan.units import ByteUnits
from lcplan.watching import JobState, follow, read_state

REFRESHES_PER_SECOND = 2


def follow_live(folder: Path, *, units: ByteUnits) -> JobState:
    """Redraw the panel until the job has ended."""
    state = read_state(folder)
    with Live(render_state(state, str(folder), units=units), auto_refresh=False) as live:
        for state in follow(folder):
            live.update(render_state(state, str(folder), units=units), refresh=True)
    return state


def follow_lines(folder: Path) -> JobState:
    """Print what has happened so far and then what happens, until the job has ended."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    shown, state = 0, read_state(folder)
    for state in follow(folder):  # noqa: B007
        events = journal.read_events(folder)
        shown = 0 if len(events) < shown else shown  # a resumed run has begun a new file
        for event in events[shown:]:
            if (line := event_line(event)) is not None:
                console.print(line)
        shown = len(events)
    if state.error is not None:
        console.print(state.error)
    return state


@contextmanager
def live_job(folder: Path, *, units: ByteUnits) -> Iterator[Callable[[str], None] | None]:
    """A panel on stderr above which the job's own lines scroll; None where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Live(
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
        get_renderable=lambda: render_state(read_state(folder), str(folder), units=units),
        transient=True,
    ):
        yield lambda line: console.print(Text(line))
