"""Predicted beside measured, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from lcplan.reports.layout import Column, Terminal, print_table, say
from lcplan.units import ByteUnits, format_bytes

if TYPE_CHECKING:
    from lcplan.checking import CheckReport, RowResult
    from lcplan.row_groups import RowGroup
    from lcplan.time_checking import TimeReport
    from lcplan.user_rows import AddReport

LEAST_MODEL = 14
"""Characters that the name of a model needs; most of a row's are shorter."""


def _percent(error: float | None, *, signed: bool = True) -> str:
    return "-" if error is None else f"{error:+.4%}" if signed else f"{error:.4%}"


def print_check(report: CheckReport, console: Console | None = None) -> None:
    """One line a measured row, one a family and a lever, then the three figures."""
    out = console or Terminal()
    _print_rows(report.rows, out)
    for row in report.rows:
        if row.refused:
            say(out, f"{row.id} refused: {row.refused}", hanging=2)
    for kind in ("family", "lever"):
        say(out)
        _print_groups(kind, [group for group in report.groups if group.kind == kind], out)
    say(out)
    verdict = "no row drifts" if report.passed else "DRIFT"
    say(
        out,
        f"{verdict}: {report.num_checked} rows checked, {report.num_refused} refused; worst {report.worst_error:+.4%}, "
        f"mean {report.mean_error:.4%}, mean signed {report.mean_signed_error:+.4%}, tolerance {report.tolerance:.2%}",
        bold=True,
    )


def _print_rows(rows: tuple[RowResult, ...], out: Console) -> None:
    cells = [
        (
            row.id,
            row.model,
            str(row.num_hidden_layers),
            f"{row.max_length:,}",
            format_bytes(row.measured_bytes),
            "refused" if row.error is None else _percent(row.error),
        )
        for row in rows
    ]
    numbers = (Column(name, right=True) for name in ("layers", "tokens", "measured", "error"))
    print_table(out, (Column("row"), Column("model", text=True), *numbers), cells, least_text=LEAST_MODEL)


def _print_groups(kind: str, groups: list[RowGroup], out: Console) -> None:
    names = ["rows", *(["refused"] if any(group.num_refused for group in groups) else []), "worst", "mean", "signed"]
    cells = [
        {
            "rows": str(group.num_rows),
            "refused": str(group.num_refused) if group.num_refused else "",
            "worst": _percent(group.worst_error),
            "mean": _percent(group.mean_error, signed=False),
            "signed": _percent(group.mean_signed_error),
        }
        for group in groups
    ]
    rows = [(group.name, *(cell[name] for name in names)) for group, cell in zip(groups, cells, strict=True)]
    print_table(out, (Column(kind, text=True), *(Column(name, right=True) for name in names)), rows)


def print_times(report: TimeReport, console: Console | None = None) -> None:
    """One line a time, then the figures of those that count."""
    out = console or Terminal()
    rows = [
        (
            row.id,
            row.model,
            row.timed,
            str(row.num_gpus),
            f"{row.max_length:,}",
            f"{row.measured_s:,.2f} s",
            "-" if row.predicted_s is None else f"{row.predicted_s:,.2f} s",
            "refused" if row.error is None else f"{row.error:+.1%}" + ("" if row.counts else " *"),
        )
        for row in report.rows
    ]
    texts = (Column(name, text=True) for name in ("row", "model", "what was timed"))
    numbers = (Column(name, right=True) for name in ("GPUs", "tokens", "measured", "predicted", "error"))
    print_table(out, (*texts, *numbers), rows, least_text=LEAST_MODEL)
    for row in report.rows:
        if row.refused or row.note:
            say(out, f"{row.id}: {row.refused or row.note}", hanging=2)
    say(out, "* shorter than 5 s: not held against the bar")
    verdict = "no time drifts" if report.passed else "DRIFT"
    say(
        out,
        f"{verdict}: {report.num_checked} times checked; worst {report.worst_error:+.1%}, "
        f"mean {report.mean_error:.1%}, mean signed {report.mean_signed_error:+.1%}, "
        f"tolerance {report.tolerance:.0%}; "
        f"{report.num_ordered} of {report.num_pairs} pairs of measured plans in the right order",
        bold=True,
    )


def print_added(report: AddReport, *, units: ByteUnits = "GiB", console: Console | None = None) -> None:
    """What was recorded where, and how far off the prediction is."""
    out = console or Terminal()

    def tell(text: str) -> None:
        out.print(text, highlight=False, markup=False, soft_wrap=True)

    row = report.row
    measured = format_bytes(row.measured_bytes, units)
    if row.predicted_bytes is None:
        tell(f"measured {measured}; not predicted: {row.refused}")
    else:
        verdict = "within" if report.passed else "DRIFT: beyond"
        tell(
            f"measured {measured}, predicted {format_bytes(row.predicted_bytes, units)}: {_percent(row.error)}, "
            f"{verdict} {report.tolerance:.2%}"
        )
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    step = "" if report.step_s is None else f", {report.step_s:,.2f} s a step"
    tell(f"{row.model}, {row.num_hidden_layers} layers, {row.max_length:,} tokens on {report.gpu}{step}; {versions}")
    if row.levers:
        tell(f"levers: {', '.join(row.levers)}")
    tell(f"recorded as {row.id} in {report.rows_file}")
