"""What lcplan's five pictures show, as plain data; ``reports.plots`` and ``reports.text_pictures`` draw it.

Each picture is one record, made by one pure function from what was computed already or from a model and a plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from lcplan._record import Record
from lcplan.checking import CheckReport
from lcplan.errors import InputError, PlanError
from lcplan.explanation import Step, lever_plans, waterfall
from lcplan.hardware import GpuSpec
from lcplan.ledger import DEVICE, MemoryReport
from lcplan.model_spec import ModelSpec
from lcplan.recommendation import ParetoPoint, Recommendation
from lcplan.search import Prices
from lcplan.train_plan import MAX_TOKENS, TrainPlan

OTHER = "other"
"""Group of all that is nowhere large."""
SMALL_SHARE = 0.015
"""Of the highest bar: groups that stay below go into ``OTHER``."""
STACK = (
    "weights", "optimizer", "gradients", "lora", "communication", "inputs", "activations", "attention", "mlp", "moe",
    "loss_head", "evaluation", "save", "probe", "parameter", "buffer", "optimizer_state", "gradient", "all_gather",
    "reduce_scatter", "input", "activation", "temporary", "runtime", OTHER,
)  # fmt: skip
"""From the bottom up: what stays all step long first."""
SHORTEST = 1 << 12
POINTS_PER_DOUBLING = 4
REACH = 4
"""A curve goes on to so many times the plan's length."""


class Instant(Record):
    """One bar of the timeline."""

    phase: str
    sizes: tuple[int, ...]
    """Bytes of each group, in the order of ``Timeline.groups``."""
    after_others: bool
    """Layers that are alike, and never larger than their neighbours, lie between it and the bar before."""


class Timeline(Record):
    """Memory of one GPU through one step."""

    kind: Literal["timeline"] = "timeline"
    title: str
    groups: tuple[str, ...]
    """Bottom to top."""
    instants: tuple[Instant, ...]
    """In step order."""
    peak: int
    """Index of the largest instant."""
    on_top_bytes: int
    """CUDA context, NCCL and the allocator's slack, which no tensor shows; they come on top of the peak."""
    usable_bytes: int
    pinned_bytes: int
    """Pinned host memory of one rank."""
    gpu: str


class LengthCurve(Record):
    """Device peak against max_length with one set of levers."""

    lever: str
    """What was pulled last; the levers of the curves before it are pulled too."""
    points: tuple[tuple[int, int], ...]
    """(max_length, device peak bytes), shortest first."""
    longest: int | None
    """Longest max_length that fits; None where even the shortest does not, or the whole curve does."""
    always_fits: bool


class LengthPicture(Record):
    """Memory against length, from the naive plan to the plan, one lever at a time."""

    kind: Literal["length"] = "length"
    title: str
    curves: tuple[LengthCurve, ...]
    usable_bytes: int
    max_length: int
    """The plan's own."""
    gpu: str


class WaterfallPicture(Record):
    """Device peak after each lever, from naive to the plan."""

    kind: Literal["waterfall"] = "waterfall"
    title: str
    steps: tuple[Step, ...]
    usable_bytes: int
    gpu: str


class ParetoPicture(Record):
    """Plans that no other beats in both memory and time, fastest first."""

    kind: Literal["pareto"] = "pareto"
    title: str
    points: tuple[ParetoPoint, ...]
    usable_bytes: int
    headroom_bytes: int
    """What was asked to stay free."""
    gpu: str


class AccuracyRow(Record):
    """One recorded step."""

    id: str
    model: str
    measured_bytes: int
    ratio: float
    """Measured over predicted."""


class AccuracyPicture(Record):
    """Measured over predicted for every recorded row that is covered."""

    kind: Literal["accuracy"] = "accuracy"
    title: str
    rows: tuple[AccuracyRow, ...]
    tolerance: float


Picture = Timeline | LengthPicture | WaterfallPicture | ParetoPicture | AccuracyPicture


def _title(report: MemoryReport) -> str:
    plan = report.plan
    return f"{report.model.id}, {plan['max_length']:,} tokens on {plan['num_gpus']} x {plan['gpu']}"


def timeline(report: MemoryReport) -> Timeline:
    """Items of each phase by group; by category where a trace has no items of its own."""
    names = {item.key: item.category if item.group == "trace" else item.group for item in report.items}
    by_phase = [
        _summed((names[item.key], item.num_bytes) for item in report.items_in(phase.phase)) for phase in report.phases
    ]
    highest = max(sum(sizes.values()) for sizes in by_phase)
    large = {name for sizes in by_phase for name, size in sizes.items() if size >= SMALL_SHARE * highest}
    folded = [_summed((name if name in large else OTHER, size) for name, size in sizes.items()) for sizes in by_phase]
    groups = tuple(name for name in STACK if any(name in sizes for sizes in folded))
    phases = [phase.phase for phase in report.phases]
    return Timeline(
        title=f"{_title(report)}: memory of one GPU through one step",
        groups=groups,
        instants=tuple(
            Instant(
                phase=phase,
                sizes=tuple(sizes.get(name, 0) for name in groups),
                after_others=_skips(before, phase),
            )
            for before, phase, sizes in zip(["", *phases], phases, folded, strict=False)
        ),
        peak=phases.index(report.peak_phase),
        on_top_bytes=sum(item.num_bytes for item in report.items_in(DEVICE)),
        usable_bytes=report.gpu.usable_bytes,
        pinned_bytes=report.host.pinned_bytes_per_rank,
        gpu=report.gpu.id,
    )


def _summed(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for name, size in sizes:
        total[name] = total.get(name, 0) + size
    return total


def layer_of(phase: str) -> int | None:
    """Index of the decoder layer of a phase; None where it has none."""
    if not phase.startswith("backward["):
        return None
    return int(phase.removeprefix("backward[").partition("]")[0])


def _skips(before: str, phase: str) -> bool:
    upper, lower = layer_of(before), layer_of(phase)
    return upper is not None and lower is not None and upper - lower > 1


def length_curves(spec: ModelSpec, plan: TrainPlan, gpu: GpuSpec) -> LengthPicture:
    """Device peak against length, for the plan with its levers pulled one after another.

    Raises:
        PlanError: when the formulas do not cover the plan.
    """
    prices = Prices(spec, gpu, gpu.usable_bytes)
    most = _reach(plan, prices)
    curves: list[LengthCurve] = []
    for lever, _, current in lever_plans(spec, plan):
        if curves and lever == "yarn":
            continue
        curves.append(_curve(lever, current, prices, most))
    return LengthPicture(
        title=f"{spec.id} on {plan.num_gpus} x {gpu.id}: memory against length",
        curves=tuple(curves),
        usable_bytes=gpu.usable_bytes,
        max_length=plan.max_length,
        gpu=gpu.id,
    )


def _reach(plan: TrainPlan, prices: Prices) -> int:
    """Where the curves end: beyond the plan's length, and where the plan itself has left the card."""
    limit = MAX_TOKENS // plan.per_device_train_batch_size // plan.length_multiple * plan.length_multiple
    most = 2 * SHORTEST
    while most < limit and (most < REACH * plan.max_length or _peak(plan, most, prices) <= prices.room):
        most *= 2
    return min(most, limit)


def _curve(lever: str, plan: TrainPlan, prices: Prices, most: int) -> LengthCurve:
    multiple = plan.length_multiple
    shortest = min(SHORTEST, most)

    def peak(units: int) -> int:
        return _peak(plan, units * multiple, prices)

    steps = POINTS_PER_DOUBLING * max(1, (most // shortest).bit_length() - 1)
    ratio = (most / shortest) ** (1 / steps)
    units = sorted({-(-round(shortest * ratio**step) // multiple) for step in range(steps + 1)})
    points = tuple((count * multiple, peak(count)) for count in units)
    over = next((index for index, (_, size) in enumerate(points) if size > prices.room), None)
    longest = None
    if over:
        low, high = units[over - 1], units[over]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if peak(middle) <= prices.room else (low, middle)
        longest = low * multiple
    return LengthCurve(lever=lever, points=points, longest=longest, always_fits=over is None)


def _peak(plan: TrainPlan, length: int, prices: Prices) -> int:
    multiple = plan.length_multiple
    return prices.device_peak(plan.model_copy(update={"max_length": -(-length // multiple) * multiple}))


def waterfall_steps(spec: ModelSpec, plan: TrainPlan, gpu: GpuSpec) -> WaterfallPicture:
    """Device peak after each lever, from the naive plan to this one.

    Raises:
        PlanError: when the formulas do not cover the plan.
    """
    return WaterfallPicture(
        title=f"{spec.id}, {plan.max_length:,} tokens on {plan.num_gpus} x {gpu.id}: from naive to the plan",
        steps=waterfall(spec, plan, Prices(spec, gpu, gpu.usable_bytes)),
        usable_bytes=gpu.usable_bytes,
        gpu=gpu.id,
    )


def pareto_points(answer: Recommendation) -> ParetoPicture:
    """The plans of a recommendation that no other beats in both memory and time.

    Raises:
        PlanError: when the recommendation has none.
    """
    ranked = answer.plans[0] if answer.plans else answer.nearest
    if ranked is None or not answer.pareto:
        raise PlanError("nothing-to-draw", "The search found no plan to draw. Ask for another length or GPU.")
    return ParetoPicture(
        title=f"{_title(ranked.report)}: memory against time",
        points=answer.pareto,
        usable_bytes=ranked.report.gpu.usable_bytes,
        headroom_bytes=answer.headroom_bytes,
        gpu=ranked.report.gpu.id,
    )


def accuracy(check: CheckReport) -> AccuracyPicture:
    """Measured over predicted for the rows of a check.

    Raises:
        InputError: when no row is covered.
    """
    rows = tuple(
        AccuracyRow(
            id=row.id,
            model=row.model,
            measured_bytes=row.measured_bytes,
            ratio=row.measured_bytes / row.predicted_bytes,
        )
        for row in check.rows
        if row.predicted_bytes
    )
    if not rows:
        raise InputError("nothing-to-draw", "None of these rows is covered by the formulas, so there is no prediction.")
    return AccuracyPicture(
        title=f"Measured over predicted peak of {len(rows)} recorded steps, {check.method} method",
        rows=rows,
        tolerance=check.tolerance,
    )
