"""Holds predicted step times against measured and published ones.

What a row timed depends on how it was run. A generated job gives the median of its steady steps, optimizer included.
``tools`` that measure memory give the forward and backward of the first step at the row's length, which also pins the
host memory of an offload. Ranks of PyTorch's fake process group work on uninitialised weights, which run faster than
data, so their times are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources
from itertools import combinations
from typing import Any, Literal

from lcplan import catalog
from lcplan._record import Record
from lcplan.checking import MeasuredRow, row_plan, row_spec
from lcplan.errors import ModelError, PlanError
from lcplan.estimators import step_time
from lcplan.estimators.host_need import host_need
from lcplan.hardware import GpuSpec, load_gpu
from lcplan.model_loading import load_model
from lcplan.model_spec import ModelSpec
from lcplan.row_groups import figures
from lcplan.train_plan import TrainPlan, resolve

PUBLISHED_FILE = "published_times.jsonl"
SHORTEST_S = 5.0
"""Steps shorter than this are listed and not held against the bar: starting kernels is not in the model."""
LEAST_ORDERED = 0.95
"""Share of the pairs of measured plans whose order has to be right."""
Timed = Literal["steady step", "first forward and backward", "published"]


class PublishedTime(Record):
    """A step time that others published."""

    id: str
    gpu: str
    model: str
    plan: dict[str, Any]
    step_s: float
    source: str
    note: str = ""


class TimeRow(Record):
    """Prediction beside measurement; ``error`` is predicted / measured - 1, None where the plan has no time."""

    id: str
    model: str
    gpu: str
    max_length: int
    num_gpus: int
    timed: Timed
    measured_s: float
    predicted_s: float | None
    error: float | None
    refused: str | None = None
    note: str = ""
    counts: bool
    """Long enough for the bar."""


class TimeReport(Record):
    """All rows, the errors of those that count, and how many pairs of measured plans are in the right order."""

    schema_version: int = 1
    tolerance: float
    rows: tuple[TimeRow, ...]
    num_checked: int
    worst_error: float
    mean_error: float
    mean_signed_error: float
    num_pairs: int
    num_ordered: int
    passed: bool


def load_published() -> tuple[PublishedTime, ...]:
    """The shipped published times."""
    text = (resources.files("lcplan.measured") / PUBLISHED_FILE).read_text("utf-8")
    return tuple(PublishedTime.model_validate(json.loads(line)) for line in text.splitlines() if line.strip())


def check_times(rows: Iterable[MeasuredRow], published: Iterable[PublishedTime], *, tolerance: float) -> TimeReport:
    """Predict every time; passes when none that counts is further off than ``tolerance`` and the order holds."""
    measured = [found for row in rows if (found := _measured(row)) is not None]
    results = (*measured, *map(_published, published))
    errors = [row.error for row in results if row.error is not None and row.counts]
    worst, mean, mean_signed = figures(errors)
    ordered = [_in_order(a, b) for a, b in combinations([row for row in measured if row.counts], 2)]
    known = [right for right in ordered if right is not None]
    enough = sum(known) >= LEAST_ORDERED * len(known)
    return TimeReport(
        tolerance=tolerance,
        rows=results,
        num_checked=len(errors),
        worst_error=worst or 0.0,
        mean_error=mean or 0.0,
        mean_signed_error=mean_signed or 0.0,
        num_pairs=len(known),
        num_ordered=sum(known),
        passed=worst is not None and abs(worst) <= tolerance and enough,
    )


def _in_order(a: TimeRow, b: TimeRow) -> bool | None:
    """Whether the prediction ranks two rows as the measurement does; None where it says nothing."""
    if a.predicted_s is None or b.predicted_s is None or a.predicted_s == b.predicted_s or a.gpu != b.gpu:
        return None
    return (a.predicted_s < b.predicted_s) == (a.measured_s < b.measured_s)


def _measured(row: MeasuredRow) -> TimeRow | None:
    """One measured row; None where it has no time, or one that is not of real data."""
    kind = str((row.model_extra or {}).get("kind", "generated job"))
    if row.measured.step_s is None or "fake process group" in kind:
        return None
    steady = "generated job" in kind
    result = {
        "id": row.id,
        "model": row.model,
        "max_length": row.plan["max_length"],
        "measured_s": row.measured.step_s,
        "timed": "steady step" if steady else "first forward and backward",
        "counts": row.measured.step_s > SHORTEST_S,
    }
    try:
        spec = row_spec(row)
        plan, gpu = row_plan(row, spec), _gpu_of(row)
        seconds = _seconds(spec, plan, gpu, steady=steady)
    except (PlanError, ModelError) as error:
        values = {"gpu": row.gpu, "num_gpus": row.plan.get("num_gpus", 1), "refused": error.message}
        return TimeRow(**result, **values, predicted_s=None, error=None)
    return TimeRow(
        **result,
        gpu=gpu.id,
        num_gpus=plan.num_gpus,
        predicted_s=seconds,
        error=seconds / row.measured.step_s - 1,
    )


def _published(time: PublishedTime) -> TimeRow:
    spec, gpu = load_model(time.model), load_gpu(time.gpu)
    plan, _ = resolve(spec, {**time.plan, "gpu": gpu.id}, usual_gpus_per_node=gpu.gpus_per_node)
    seconds = _seconds(spec, plan, gpu, steady=True)
    return TimeRow(
        id=time.id,
        model=time.model,
        gpu=gpu.id,
        max_length=plan.max_length,
        num_gpus=plan.num_gpus,
        timed="published",
        measured_s=time.step_s,
        predicted_s=seconds,
        error=seconds / time.step_s - 1,
        note=time.note,
        counts=True,
    )


def _gpu_of(row: MeasuredRow) -> GpuSpec:
    """The catalog's GPU that the driver names."""
    name = row.gpu.casefold()
    for id in catalog.gpu_ids():
        words = load_gpu(id).name.casefold().split()
        if all(word in name for word in words[:2]):
            return load_gpu(id)
    raise PlanError("unknown-gpu", f"{row.gpu} is not in the catalog, so it has no kernel rates.")


def _seconds(spec: ModelSpec, plan: TrainPlan, gpu: GpuSpec, *, steady: bool) -> float:
    reason = step_time.refusal(spec, plan, gpu)
    rates = gpu.kernel_rates
    if reason is not None or rates is None:
        raise PlanError("no-step-time", reason or "no rates")
    parts = step_time.StepTimer(spec, gpu, rates).parts(plan)
    if steady:
        return parts.total
    pinned = host_need(spec, plan).pinned_bytes_per_rank
    pinning = step_time.pinning_seconds(pinned_bytes=pinned, by_trl=plan.activation_offloading)
    return parts.without_optimizer / plan.gradient_accumulation_steps + pinning
