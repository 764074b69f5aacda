"""A finished job beside its plan, for the terminal."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lcplan.ledger import Compared
from lcplan.units import ByteUnits, format_bytes


def print_result(
    title: str,
    prediction: dict[str, int] | None,
    result: dict[str, Any],
    compared: tuple[Compared, ...] = (),
    *,
    units: ByteUnits,
) -> None:
    """Predicted beside measured, what the run achieved, and where the model lies; ``result`` is result.json."""
    console = Console()
    console.print(_table(title, prediction or {}, result, units))
    if compared:
        console.print(_by_phase(compared, units))
    saved = result["saved_model_dir"] or "not written"
    console.print(f"Saved model: {saved}", markup=False, highlight=False, soft_wrap=True)


def _table(title: str, prediction: dict[str, int], result: dict[str, Any], units: ByteUnits) -> Table:
    table = Table(title=Text(title), title_justify="left")
    table.add_column("")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    sizes = (
        ("peak allocated, worst rank", "peak_allocated_bytes", _worst(result, "peak_allocated_bytes_per_rank")),
        # with memory to spare the allocator caches far more than the plan's device peak, which is what it needs
        ("GPU memory in use, caches included", "", result["device_used_bytes"]),
        ("pinned host memory, worst rank", "pinned_bytes_per_rank", _worst(result, "pinned_peak_bytes_per_rank")),
    )
    for name, key, measured in sizes:
        if measured is not None:
            planned = prediction.get(key)
            shown = "-" if planned is None else format_bytes(planned, units)
            ratio = f"{measured / planned:.4f}" if planned else ""
            table.add_row(name, shown, format_bytes(measured, units), ratio)
    steps = result["steps"]
    for key, name in (("step_s", "step time, seconds"), ("tokens_per_second", "tokens per second")):
        table.add_row(name, "", f"{statistics.median(step[key] for step in steps[1:] or steps):,.2f}", "")
    losses = f"{steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f}"
    table.add_row(f"loss, first to last of {len(steps)} steps", "", losses, "")
    return table


def _by_phase(compared: tuple[Compared, ...], units: ByteUnits) -> Table:
    table = Table(title="By rank and phase, one step", title_justify="left")
    for name in ("", "predicted", "measured", "ratio"):
        table.add_column(name, justify="right" if name else "left")
    for row in compared:
        ratio = f"{row.measured_bytes / row.predicted_bytes:.4f}" if row.predicted_bytes else ""
        table.add_row(
            row.what, format_bytes(row.predicted_bytes, units), format_bytes(row.measured_bytes, units), ratio
        )
    return table


def _worst(result: dict[str, Any], key: str) -> int | None:
    return max((value for value in result[key] if value is not None), default=None)
