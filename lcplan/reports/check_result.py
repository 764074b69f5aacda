"""Predicted beside measured, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from lcplan.units import ByteUnits, format_bytes

if TYPE_CHECKING:
    from lcplan.checking import CheckReport, RowResult
    from lcplan.row_groups import RowGroup
    from lcplan.time_checking import TimeReport
    from lcplan.user_rows import AddReport


def _table(*, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    """Columns aligned left, then columns aligned right."""
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", overflow="fold", no_wrap=True)
    return table


def _percent(error: float | None, *, signed: bool = True) -> str:
    return "-" if error is None else f"{error:+.4%}" if signed else f"{error:.4%}"


def print_check(report: CheckReport, console: Console | None = None) -> None:
    """One line a measured row, one a family and a lever, then the three figures."""
    out = console or Console()
    out.print(_rows(report.rows))
    for row in report.rows:
        if row.refused:
            out.print(f"{row.id} refused: {row.refused}", highlight=False, markup=False)
    for kind in ("family", "lever"):
        out.print()
        out.print(_groups(kind, [group for group in report.groups if group.kind == kind]))
    out.print()
    verdict = "no row drifts" if report.passed else "DRIFT"
    out.print(
        f"{verdict}: {report.num_checked} rows checked, {report.num_refused} refused; worst {report.worst_error:+.4%}, "
        f"mean {report.mean_error:.4%}, mean signed {report.mean_signed_error:+.4%}, tolerance {report.tolerance:.2%}",
        style="bold",
        highlight=False,
    )


def _rows(rows: tuple[RowResult, ...]) -> Table:
    table = _table(left=("row", "model"), right=("layers", "tokens", "measured", "error"))
    for row in rows:
        error = "refused" if row.error is None else _percent(row.error)
        measured = format_bytes(row.measured_bytes)
        table.add_row(row.id, row.model, str(row.num_hidden_layers), f"{row.max_length:,}", measured, error)
    return table


def _groups(kind: str, groups: list[RowGroup]) -> Table:
    table = _table(left=(kind,), right=("rows", "refused", "worst", "mean", "signed"))
    for group in groups:
        table.add_row(
            group.name,
            str(group.num_rows),
            str(group.num_refused) if group.num_refused else "",
            _percent(group.worst_error),
            _percent(group.mean_error, signed=False),
            _percent(group.mean_signed_error),
        )
    return table


def print_times(report: TimeReport, console: Console | None = None) -> None:
    """One line a time, then the figures of those that count."""
    out = console or Console()
    table = _table(left=("row", "model", "what was timed"), right=("GPUs", "tokens", "measured", "predicted", "error"))
    for row in report.rows:
        predicted = "-" if row.predicted_s is None else f"{row.predicted_s:,.2f} s"
        error = "refused" if row.error is None else f"{row.error:+.1%}" + ("" if row.counts else " *")
        measured = f"{row.measured_s:,.2f} s"
        table.add_row(
            row.id, row.model, row.timed, str(row.num_gpus), f"{row.max_length:,}", measured, predicted, error
        )
    out.print(table)
    for row in report.rows:
        if row.refused or row.note:
            out.print(f"{row.id}: {row.refused or row.note}", highlight=False, markup=False)
    out.print("* shorter than 5 s: not held against the bar", highlight=False, markup=False)
    verdict = "no time drifts" if report.passed else "DRIFT"
    out.print(
        f"{verdict}: {report.num_checked} times checked; worst {report.worst_error:+.1%}, "
        f"mean {report.mean_error:.1%}, mean signed {report.mean_signed_error:+.1%}, "
        f"tolerance {report.tolerance:.0%}; "
        f"{report.num_ordered} of {report.num_pairs} pairs of measured plans in the right order",
        style="bold",
        highlight=False,
        markup=False,
    )


def print_added(report: AddReport, *, units: ByteUnits = "GiB", console: Console | None = None) -> None:
    """What was recorded where, and how far off the prediction is."""
    out = console or Console()

    def say(text: str) -> None:
        out.print(text, highlight=False, markup=False, soft_wrap=True)

    row = report.row
    measured = format_bytes(row.measured_bytes, units)
    if row.predicted_bytes is None:
        say(f"measured {measured}; not predicted: {row.refused}")
    else:
        verdict = "within" if report.passed else "DRIFT: beyond"
        say(
            f"measured {measured}, predicted {format_bytes(row.predicted_bytes, units)}: {_percent(row.error)}, "
            f"{verdict} {report.tolerance:.2%}"
        )
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    step = "" if report.step_s is None else f", {report.step_s:,.2f} s a step"
    say(f"{row.model}, {row.num_hidden_layers} layers, {row.max_length:,} tokens on {report.gpu}{step}; {versions}")
    if row.levers:
        say(f"levers: {', '.join(row.levers)}")
    say(f"recorded as {row.id} in {report.rows_file}")
