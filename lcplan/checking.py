"""Holds the formulas against recorded GPU measurements."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from lcplan import catalog
from lcplan._record import Record
from lcplan.errors import InputError, PlanError
from lcplan.estimators import formula
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan, resolve

ROWS_FILE = "h200.jsonl"


class Measurement(Record):
    """Raw bytes of one measured step; records may carry more than lcplan reads."""

    model_config = ConfigDict(frozen=True, extra="allow")
    peak_allocated_bytes: int = Field(gt=0)


class MeasuredRow(Record):
    """One recorded step: which model, which plan, which rank, what was measured."""

    model_config = ConfigDict(frozen=True, extra="allow")
    id: str
    gpu: str
    model: str
    num_hidden_layers: int
    tie_word_embeddings: bool
    plan: dict[str, Any]
    versions: dict[str, str]
    measured: Measurement
    rank: int = 0


class RowResult(Record):
    """Prediction beside measurement; ``error`` is predicted / measured - 1, None where the formulas refuse."""

    id: str
    model: str
    num_hidden_layers: int
    max_length: int
    measured_bytes: int
    predicted_bytes: int | None
    error: float | None
    refused: str | None = None


class CheckReport(Record):
    """All rows, and the three figures that bound the estimator."""

    schema_version: int = 1
    method: str = "formula"
    tolerance: float
    rows: tuple[RowResult, ...]
    num_checked: int
    num_refused: int
    worst_error: float
    mean_error: float
    mean_signed_error: float
    passed: bool


def load_rows(path: Path | None = None) -> tuple[MeasuredRow, ...]:
    """The shipped measurements, or those of a user's own JSON-lines file.

    Raises:
        InputError: naming the line that is no measured row.
    """
    if path is None:
        text = (resources.files("lcplan.measured") / ROWS_FILE).read_text("utf-8")
    else:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError("bad-rows", f"{path} cannot be read as measured rows: {error}.") from None
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(MeasuredRow.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError("bad-rows", f"line {number} is no measured row: {where}: {first['msg']}.") from None
    if not rows:
        raise InputError("bad-rows", f"{path} holds no measured row.")
    return tuple(rows)


def row_spec(row: MeasuredRow) -> ModelSpec:
    """The model as it was measured: the catalog's, with the row's number of layers and head tying."""
    id, entry = catalog.model_names()[row.model.casefold()]
    config = json.loads(json.dumps(catalog.model_config(entry)))
    config["num_hidden_layers"] = row.num_hidden_layers
    config["tie_word_embeddings"] = row.tie_word_embeddings
    config.pop("layer_types", None)
    return ModelSpec.from_config(config, id)


_UNKNOWN_TO_PLAN = ("trl_activation_offloading",)


def row_plan(row: MeasuredRow, spec: ModelSpec) -> TrainPlan:
    """The row's plan, resolved.

    Raises:
        PlanError: when the row used a lever that a plan cannot express.
    """
    extra = [name for name in _UNKNOWN_TO_PLAN if row.plan.get(name)]
    if extra:
        raise PlanError("not-covered", f"{extra[0]}: the formula method does not cover it")
    given = {k: v for k, v in row.plan.items() if k not in _UNKNOWN_TO_PLAN}
    plan, _ = resolve(spec, given | {"gpu": "h200", "rope": "none"}, usual_gpus_per_node=8)
    return plan


def _check_row(row: MeasuredRow) -> RowResult:
    predicted: int | None = None
    refused: str | None = None
    try:
        spec = row_spec(row)
        totals = formula.instants(spec, row_plan(row, spec), rank=row.rank).totals()
        predicted = max(totals.values())
    except PlanError as error:
        refused = error.message.partition(": the formula")[0]
    measured = row.measured.peak_allocated_bytes
    return RowResult(
        id=row.id,
        model=row.model,
        num_hidden_layers=row.num_hidden_layers,
        max_length=row.plan["max_length"],
        measured_bytes=measured,
        predicted_bytes=predicted,
        error=None if predicted is None else predicted / measured - 1,
        refused=refused,
    )


def check_rows(rows: Iterable[MeasuredRow], *, tolerance: float) -> CheckReport:
    """Predict every row; it passes when at least one row is covered and none is further off than ``tolerance``."""
    results = tuple(_check_row(row) for row in rows)
    errors: Sequence[float] = [row.error for row in results if row.error is not None]
    worst = max(errors, key=abs, default=0.0)
    count = len(errors)
    return CheckReport(
        tolerance=tolerance,
        rows=results,
        num_checked=count,
        num_refused=len(results) - count,
        worst_error=worst,
        mean_error=sum(map(abs, errors)) / count if count else 0.0,
        mean_signed_error=sum(errors) / count if count else 0.0,
        passed=count > 0 and abs(worst) <= tolerance,
    )
