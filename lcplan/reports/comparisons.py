"""The simple rules beside the ledger, for a terminal."""

from __future__ import annotations

from rich.console import Console

from lcplan.comparisons import Comparison, ComparisonReport
from lcplan.reports.layout import Column, Terminal, print_table, say
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
    out = console or Terminal()
    _print_rules(report, units, out)
    say(out)
    for comparison in report.comparisons:
        text = f"{comparison.rule.statement} ({comparison.rule.source})"
        if comparison.not_comparable is not None:
            text += f"; not comparable: {comparison.not_comparable}"
        say(out, f"- {text}", hanging=2)


def _print_rules(report: ComparisonReport, units: ByteUnits, out: Console) -> None:
    rows: list[tuple[str, ...]] = []
    bold = set()
    shown = None
    for comparison in report.comparisons:
        rule = comparison.rule
        if rule.versus != shown:
            shown = rule.versus
            bold.add(len(rows))
            rows.append((VERSUS[shown], "", _bytes(comparison.lcplan_bytes, units), ""))
        rows.append((f"  {rule.statement}", _bytes(comparison.rule_bytes, units), "", _error(comparison)))
    numbers = (Column(name, right=True) for name in ("rule", "lcplan", "rule's error"))
    print_table(out, (Column("simple rule, on one GPU", text=True), *numbers), rows, bold=bold)


def _bytes(num_bytes: int | None, units: ByteUnits) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes, units)


def _error(comparison: Comparison) -> str:
    return "not comparable" if comparison.error is None else f"{comparison.error:+,.1%}"
