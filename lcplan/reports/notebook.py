"""Small HTML tables for a notebook; every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from lcplan.reports.terminal import answer, time_line
from lcplan.units import format_bytes

if TYPE_CHECKING:
    from lcplan.ledger import MemoryReport
    from lcplan.recommendation import Recommendation

ITEMS_SHOWN = 8
LEFT, RIGHT = "text-align:left", "text-align:right"


def report_html(report: MemoryReport) -> str:
    """The answer, and the largest items at the peak with their formulas."""
    alive = report.items_in(report.peak_phase)
    rows = [
        (item.key, format_bytes(item.num_bytes), f"{item.num_bytes / report.peak_allocated_bytes:.1%}", item.formula)
        for item in alive[:ITEMS_SHOWN]
    ]
    rest = sum(item.num_bytes for item in alive[ITEMS_SHOWN:])
    if rest:
        rows.append(("smaller ones", format_bytes(rest), f"{rest / report.peak_allocated_bytes:.1%}", ""))
    rows.append(("peak allocated", format_bytes(report.peak_allocated_bytes), "", ""))
    rows += [(item.key, format_bytes(item.num_bytes), "", item.formula) for item in report.items_in("device")]
    rows.append(("device peak", format_bytes(report.device_peak_bytes), "", ""))
    said = [answer(report, "GiB"), f"{report.model.id}, {report.method} method. {time_line(report)}."]
    return _paragraphs(said) + _table(("in " + report.peak_phase, "bytes", "share", "formula"), rows)


def recommendation_html(recommendation: Recommendation) -> str:
    """The chosen plan, the way to it lever by lever, and its command; the nearest miss where nothing fits."""
    ranked = recommendation.plans[0] if recommendation.plans else recommendation.nearest
    if ranked is None:
        return _paragraphs(["Nothing fits."])
    rows = [
        (
            step.lever,
            step.change,
            format_bytes(step.device_peak_bytes),
            "-" if step.step_time_s is None else f"{step.step_time_s:,.1f} s",
            "fits" if step.fits else "",
        )
        for step in ranked.steps
    ]
    said = [] if recommendation.plans else ["Nothing fits. The nearest miss:"]
    said += [answer(ranked.report, "GiB").partition(" Try:")[0], f"Binding: {recommendation.binding}."]
    heads = ("lever", "change", "device peak", "step", "")
    return _paragraphs(said) + _table(heads, rows) + f"<pre>{escape(ranked.command)}</pre>"


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th style="{LEFT}">{escape(cell)}</th>' for cell in heads)
    body = "".join(f"<tr>{''.join(map(_cell, cells))}</tr>" for cells in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    is_number = text[:1].isdigit() and text[-1:] in "B%s"
    return f'<td style="{RIGHT if is_number else LEFT}">{escape(text)}</td>'
