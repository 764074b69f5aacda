"""A running job for the terminal: one panel that is drawn over and over, or one line for each thing that happens."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lcplan.units import ByteUnits, format_bytes
from lcplan.watching import JobState

SHOWN_RANKS = 16


def render_state(state: JobState, title: str, *, units: ByteUnits = "GiB") -> Panel:
    """The live panel."""
    facts = Table.grid(padding=(0, 2))
    for label, value in _facts(state, units):
        facts.add_row(Text(label, style="dim"), Text(value))
    parts: list[Any] = [facts]
    if state.max_steps:
        parts.append(ProgressBar(total=state.max_steps, completed=state.step, width=60))
    if state.peaks:
        parts.append(_peak_table(state, units))
    parts += [Text(finding_line(finding), style="yellow") for finding in state.findings if not finding["as_planned"]]
    return Panel(Group(*parts), title=Text(title), title_align="left")


def _facts(state: JobState, units: ByteUnits) -> list[tuple[str, str]]:
    facts = [("phase", state.phase if state.exit_code is None else f"ended, exit code {state.exit_code}")]
    if state.step:
        of = f" of {state.max_steps:,}" if state.max_steps else ""
        facts.append(("step", f"{state.step:,}{of}"))
    if state.loss is not None:
        facts.append(("loss", f"{state.loss:.4f}"))
    if state.tokens_per_second is not None and state.step_s is not None:
        facts.append(("speed", f"{state.tokens_per_second:,.0f} tokens/s, {state.step_s:,.2f} s a step"))
    if state.eta_s is not None and state.exit_code is None:
        facts.append(("time left", format_duration(state.eta_s)))
    if state.pinned_bytes:
        planned = state.predicted_pinned_bytes
        beside = "" if planned is None else f", planned {format_bytes(planned, units)}"
        facts.append(("pinned on rank 0", format_bytes(state.pinned_bytes, units) + beside))
    if state.checkpoint is not None:
        facts.append(("checkpoint", f"step {state.checkpoint:,}, whole"))
    if state.error is not None:
        facts.append(("error", state.error))
    return facts


def _peak_table(state: JobState, units: ByteUnits) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "peak measured", "planned", "ratio"):
        table.add_column(name, justify="right")
    planned = state.predicted_peak_bytes
    for rank, peak in list(enumerate(state.peaks))[:SHOWN_RANKS]:
        ratio = f"{peak / planned:.4f}" if peak and planned else ""
        shown = "-" if peak is None else format_bytes(peak, units)
        table.add_row(str(rank), shown, "-" if planned is None else format_bytes(planned, units), ratio)
    return table


def event_line(event: dict[str, Any]) -> str | None:
    """One event in a line; None for what says nothing by itself."""
    kind = event["event"]
    if kind == "start":
        return f"resumed from {event['resumed_from']}" if event.get("resumed_from") else "started"
    if kind == "phase":
        return f"phase: {event['phase']}"
    if kind == "step":
        peak = event.get("peak_allocated_bytes")
        memory = "" if peak is None else f", peak {format_bytes(peak)}"
        speed = f"{event['step_s']:.2f} s, {event['tokens_per_second']:,.0f} tokens/s"
        return f"step {event['step']}/{event['max_steps']}: loss {event['loss']:.4f}, {speed}{memory}"
    if kind == "first_step":
        unlike = [finding_line(finding) for finding in event["findings"] if not finding["as_planned"]]
        return "; ".join(unlike) if unlike else "the first step is as planned"
    if kind == "checkpoint":
        return f"checkpoint-{event['step']} is whole ({format_bytes(event['num_bytes'])})"
    if kind == "end":
        return f"ended with exit code {event['exit_code']}" + (f": {event['error']}" if event["error"] else "")
    return None


def finding_line(finding: dict[str, Any]) -> str:
    """What is not as planned after the first step."""
    return f"{finding['what']}: planned {finding['planned']}, found {finding['found']}. {finding['fix']}"


def format_duration(seconds: float) -> str:
    """``2 h 05 min``, ``3 min 20 s`` or ``12 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
