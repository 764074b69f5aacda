"""The simple rules beside the ledger, for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lcplan.comparisons import Comparison, ComparisonReport
from lcplan.units import ByteUnits, format_bytes

VERSUS = {
    "layer": "what one decoder layer saves",
    "layer_inputs": "layer inputs that checkpointing stores",
    "states": "weights, gradients and optimizer states",
    "loss_head": "loss head at its largest",
    "device_peak": "device peak",
}
"""What of lcplan's a rule is held against, in words."""


def print_comparisons(report: ComparisonReport, *, units: ByteUnits, console: Console | None = None) -> None:
    """One line a rule under what it is held against, then the sources and why a rule cannot be compared."""
    out = console or Console()
    out.print(_table(report, units))
    out.print()
    for comparison in report.comparisons:
        text = f"{comparison.rule.statement} ({comparison.rule.source})"
        if comparison.not_comparable is not None:
            text += f"; not comparable: {comparison.not_comparable}"
        out.print(f"- {text}", highlight=False, markup=False)


def _table(report: ComparisonReport, units: ByteUnits) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("simple rule, on one GPU", overflow="fold")
    for name in ("rule", "lcplan", "rule's error"):
        table.add_column(name, justify="right", overflow="fold")
    shown = None
    for comparison in report.comparisons:
        rule = comparison.rule
        if rule.versus != shown:
            shown = rule.versus
            table.add_row(VERSUS[shown], "", _bytes(comparison.lcplan_bytes, units), "", style="bold")
        table.add_row(f"  {rule.statement}", _bytes(comparison.rule_bytes, units), "", _error(comparison))
    return table


def _bytes(num_bytes: int | None, units: ByteUnits) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes, units)


def _error(comparison: Comparison) -> str:
    return "not comparable" if comparison.error is None else f"{comparison.error:+,.1%}"
