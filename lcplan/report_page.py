"""What ``estimate --html`` shows, as plain data: the report, its ledger with the arithmetic, pictures, levers.

``reports.html`` renders it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lcplan._record import Record
from lcplan.errors import PlanError
from lcplan.estimation import workings
from lcplan.explanation import LeverRow, lever_table
from lcplan.hardware import GpuSpec
from lcplan.ledger import DEVICE, MemoryItem, MemoryReport
from lcplan.model_spec import ModelSpec
from lcplan.pictures import LengthPicture, Timeline, WaterfallPicture, length_curves, timeline, waterfall_steps
from lcplan.reproduction import command_line, plan_flags
from lcplan.search import Prices
from lcplan.train_plan import TrainPlan

HOST = "host"
"""Group of the items that are not on the GPU."""


class LedgerSize(Record):
    """One size that an item has, where, and how it comes about."""

    num_bytes: int
    phases: tuple[str, ...]
    names: str | None
    """The arithmetic in the names of its arguments; None where the number is no arithmetic of the formulas."""
    numbers: str | None
    """The same with the numbers put in."""


class LedgerRow(Record):
    """One item of the ledger."""

    item: MemoryItem
    at_peak_bytes: int
    at_most_bytes: int
    sizes: tuple[LedgerSize, ...]
    """The one at the peak first, then by size."""


class LedgerGroup(Record):
    """Items that belong together."""

    name: str
    at_peak_bytes: int
    at_most_bytes: int
    rows: tuple[LedgerRow, ...]


class Command(Record):
    """One command to copy, and what it gives."""

    gives: str
    text: str


class ReportPage(Record):
    """Everything on the page."""

    report: MemoryReport
    ledger: tuple[LedgerGroup, ...]
    timeline: Timeline
    waterfall: WaterfallPicture | None = None
    lengths: LengthPicture | None = None
    levers: tuple[LeverRow, ...] = ()
    beside_unknown: str | None = None
    """Why there is no waterfall, no curve and no lever table: the formulas do not cover the plan."""
    commands: tuple[Command, ...]


def report_page(
    spec: ModelSpec, plan: TrainPlan, gpu: GpuSpec, report: MemoryReport, commands: tuple[Command, ...]
) -> ReportPage:
    """Put the page of a report together."""
    try:
        prices = Prices(spec, gpu, gpu.usable_bytes)
        return ReportPage(
            report=report,
            ledger=_ledger(spec, plan, report),
            timeline=timeline(report),
            waterfall=waterfall_steps(spec, plan, gpu),
            lengths=length_curves(spec, plan, gpu),
            levers=lever_table(spec, plan, prices),
            commands=commands,
        )
    except PlanError as error:
        if report.method == "formula":
            raise
        return ReportPage(
            report=report,
            ledger=_ledger(spec, plan, report),
            timeline=timeline(report),
            beside_unknown=error.message,
            commands=commands,
        )


def commands_of(
    spec: ModelSpec,
    plan: TrainPlan,
    gpu: GpuSpec,
    *,
    origin: Sequence[str],
    base: dict[str, object],
    has_data: bool,
    method: Sequence[str] = (),
) -> tuple[Command, ...]:
    """The commands that give this report again, and those that go on from it.

    Args:
        spec: the model
        plan: the resolved plan
        gpu: its GPU
        origin: words that name the model and the preset or file, as the user gave them
        base: plan values that the preset or file sets
        has_data: whether the preset or file names the training data
        method: further words of ``estimate``, such as ``--method trace``
    """
    job = [*origin, *plan_flags(spec, plan, gpu, base)]
    goal = [*origin, "--max-length", str(plan.max_length), "--gpu", plan.gpu, "--num-gpus", str(plan.num_gpus)]
    again = [*job, *method]
    data = [] if has_data else ["--data", "data.jsonl"]
    return (
        Command(gives="this report in a terminal", text=command_line("estimate", again)),
        Command(gives="this report as JSON", text=command_line("estimate", [*again, "--json"])),
        Command(gives="this page", text=command_line("estimate", [*again, "--html", "report.html"])),
        Command(gives="a picture of it", text=command_line("plot", ["timeline", *job, "--output", "timeline.svg"])),
        Command(gives="the fastest plan that fits", text=command_line("recommend", goal)),
        Command(
            gives="the training job, written but not started" + ("" if has_data else "; name your data with --data"),
            text=command_line("run", [*job, *data, "--output-dir", "runs/from-this-report", "--dry-run"]),
        ),
        Command(gives="the formulas against every measured row", text=command_line("check", [])),
    )


def _ledger(spec: ModelSpec, plan: TrainPlan, report: MemoryReport) -> tuple[LedgerGroup, ...]:
    worked = workings(spec, plan, report) if report.method == "formula" else {}
    by_key: dict[str, list[MemoryItem]] = {}
    for item in report.items:
        by_key.setdefault(item.key, []).append(item)
    rows: dict[str, list[LedgerRow]] = {}
    for items in by_key.values():
        here = [item for item in items if report.peak_phase in item.phases or DEVICE in item.phases]
        rest = sorted((item for item in items if item not in here), key=lambda item: -item.num_bytes)
        sizes = []
        for item in (*here, *rest):
            working = worked.get((item.key, item.num_bytes))
            sizes.append(
                LedgerSize(
                    num_bytes=item.num_bytes,
                    phases=item.phases,
                    names=None if working is None else working.names,
                    numbers=None if working is None else working.numbers,
                )
            )
        row = LedgerRow(
            item=(*here, *rest)[0],
            at_peak_bytes=sum(item.num_bytes for item in here),
            at_most_bytes=max(item.num_bytes for item in items),
            sizes=tuple(sizes),
        )
        first = items[0]
        name = HOST if first.device == "host" else DEVICE if DEVICE in first.phases else first.group
        rows.setdefault(name, []).append(row)
    groups = [_group(name, found, report) for name, found in rows.items()]
    return tuple(sorted(groups, key=lambda group: (group.name == HOST, group.name == DEVICE, -group.at_peak_bytes)))


def _group(name: str, rows: list[LedgerRow], report: MemoryReport) -> LedgerGroup:
    phases = [phase.phase for phase in report.phases] + [DEVICE, HOST]
    most = max(sum(size.num_bytes for row in rows for size in row.sizes if phase in size.phases) for phase in phases)
    return LedgerGroup(
        name=name,
        at_peak_bytes=sum(row.at_peak_bytes for row in rows),
        at_most_bytes=most,
        rows=tuple(sorted(rows, key=lambda row: (-row.at_peak_bytes, -row.at_most_bytes))),
    )
