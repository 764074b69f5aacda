"""What a probe leaves: where its record is, or why it failed; on stderr, beside the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lcplan.probing import RECORD_FILE, RESULT_FILE
from lcplan.reports.layout import Terminal
from lcplan.reports.terminal import print_comparison
from lcplan.units import ByteUnits, format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from lcplan.ledger import Compared
    from lcplan.probing import ProbeResult


def _say(text: str) -> None:
    Terminal(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def print_probe(found: ProbeResult, compared: tuple[Compared, ...], folder: Path, *, units: ByteUnits) -> None:
    """The formulas beside what was measured, on stdout, and the record."""
    if compared:
        print_comparison(compared, units, Terminal())
    print_record(found, folder, units=units)


def print_record(result: ProbeResult, folder: Path, *, units: ByteUnits) -> None:
    """Reserved and device bytes, time of the step, and how to keep the record."""
    sizes = {
        "reserved": result.peak_reserved_bytes,
        "GPU memory in use": result.device_used_bytes,
        "pinned": result.pinned_peak_bytes,
    }
    said = [f"{name} {format_bytes(size, units)}" for name, size in sizes.items() if size is not None]
    said += [] if result.step_s is None else [f"step {result.step_s:.2f} s without communication"]
    _say(f"Measured on {result.gpu_name}: {', '.join(said)}.")
    _say(f"Record: {folder / RECORD_FILE} (lcplan check --add keeps it).")


def print_failure(result: ProbeResult, folder: Path) -> None:
    """The reason, and what the allocator held."""
    _say(f"The probe failed: {result.error}")
    if result.allocator_summary:
        _say(result.allocator_summary)
    _say(f"Record: {folder / RESULT_FILE}")
