"""Holds the formulas against recorded GPU measurements."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator

from lcplan import catalog
from lcplan._record import Record
from lcplan.errors import InputError, ModelError, PlanError
from lcplan.estimators import formula
from lcplan.model_spec import ModelSpec
from lcplan.row_groups import GroupedRow, RowGroup, figures, group_rows, lever_names
from lcplan.train_plan import TrainPlan, resolve

ROWS_FILE = "h200.jsonl"
Method = Literal["formula", "trace"]


class Measurement(Record):
    """Raw bytes of one measured step; records may carry more than lcplan reads."""

    model_config = ConfigDict(frozen=True, extra="allow")
    peak_allocated_bytes: int = Field(gt=0)
    step_s: float | None = Field(default=None, gt=0)


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
    rank: int = Field(default=0, ge=0)
    """Global rank that the bytes are of."""
    config: dict[str, Any] | None = None
    """The config.json of a model that the catalog does not have as it was trained."""

    @field_validator("plan")
    @classmethod
    def _has_a_length(cls, plan: dict[str, Any]) -> dict[str, Any]:
        length = plan.get("max_length")
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError("max_length must be a positive whole number")
        return plan


class RowResult(Record):
    """Prediction beside measurement; ``error`` is predicted / measured - 1, None where the formulas refuse."""

    id: str
    model: str
    model_type: str | None
    num_hidden_layers: int
    max_length: int
    levers: tuple[str, ...]
    measured_bytes: int
    predicted_bytes: int | None
    error: float | None
    refused: str | None = None


class CheckReport(Record):
    """All rows, and the three figures that bound the estimator; ``groups`` has them by family and by lever."""

    schema_version: int = 1
    method: Method = "formula"
    tolerance: float
    rows: tuple[RowResult, ...]
    groups: tuple[RowGroup, ...]
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
    rows = parse_rows(text, where=str(path or ROWS_FILE))
    if not rows:
        raise InputError("bad-rows", f"{path} holds no measured row. Record a run with lcplan check --add RESULT.json.")
    return rows


def parse_rows(text: str, *, where: str) -> tuple[MeasuredRow, ...]:
    """The rows of a JSON-lines text; empty lines are passed over.

    Raises:
        InputError: naming the line that is no measured row.
    """
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    return tuple(parse_row(line, where=f"{where}: line {number}") for number, line in lines)


def parse_row(text: str, *, where: str) -> MeasuredRow:
    """One row from its JSON.

    Raises:
        InputError: naming the first field that is wrong.
    """
    try:
        return MeasuredRow.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise InputError("bad-rows", f"{where} is no measured row: {field}: {first['msg']}.") from None


def row_spec(row: MeasuredRow) -> ModelSpec:
    """The model as it was measured: the row's own config, or the catalog's with the row's layers and head tying.

    Raises:
        ModelError: when the row has no config and the catalog does not know its model.
    """
    if row.config is not None:
        return ModelSpec.from_config(row.config, row.model)
    names = catalog.model_names()
    if row.model.casefold() not in names:
        raise ModelError(
            "unknown-model",
            f"row {row.id}: {row.model!r:.120} is not in the catalog, and the row holds no config. Add the model's "
            'config.json to the row as "config", or name a model of lcplan list models.',
        )
    id, entry = names[row.model.casefold()]
    config = json.loads(json.dumps(catalog.model_config(entry)))
    config["num_hidden_layers"] = row.num_hidden_layers
    config["tie_word_embeddings"] = row.tie_word_embeddings
    config.pop("layer_types", None)
    return ModelSpec.from_config(config, id)


def row_plan(row: MeasuredRow, spec: ModelSpec) -> TrainPlan:
    """The row's plan, resolved.

    Raises:
        PlanError: when the row used a lever that a plan cannot express.
    """
    unknown = [name for name in row.plan if name not in TrainPlan.model_fields]
    used = [name for name in unknown if row.plan[name]]
    if used:
        raise PlanError("not-covered", f"{used[0]}: the formula method does not cover it")
    given = {name: value for name, value in row.plan.items() if name not in unknown}
    plan, _ = resolve(spec, given | {"gpu": "h200", "rope": "none"}, usual_gpus_per_node=8)
    return plan


def ring_rank(rank: int, plan: TrainPlan) -> int:
    """Place of a global rank among those that share its sequence; they are neighbours in accelerate's mesh.

    Under ZeRO the global rank decides which partition it holds.
    """
    return rank if plan.backend == "deepspeed" else rank % plan.cp_size


def predicted_peak(spec: ModelSpec, plan: TrainPlan, row: MeasuredRow, method: Method) -> int:
    """Peak allocated bytes of the row's rank by the method.

    Raises:
        PlanError: when the method does not cover the plan.
    """
    if method == "formula":
        return max(formula.instants(spec, plan, rank=ring_rank(row.rank, plan)).totals().values())
    from lcplan.tracing.trace import trace

    return trace(spec, plan, rank=row.rank, torch_version=row.versions.get("torch")).peak


def check_row(row: MeasuredRow, method: Method = "formula") -> RowResult:
    """Predict one row; what the method refuses is said, not raised.

    Raises:
        ModelError: when the row's model cannot be rebuilt at all.
    """
    spec: ModelSpec | None = None
    levers: tuple[str, ...] = ()
    predicted: int | None = None
    refused: str | None = None
    try:
        spec = row_spec(row)
        plan = row_plan(row, spec)
        levers = lever_names(plan)
        predicted = predicted_peak(spec, plan, row, method)
    except (PlanError, ModelError) as error:
        if error.code == "unknown-model":
            raise
        refused = error.message.partition(f": the {method}")[0]
    measured = row.measured.peak_allocated_bytes
    return RowResult(
        id=row.id,
        model=row.model,
        model_type=None if spec is None else spec.model_type,
        num_hidden_layers=row.num_hidden_layers,
        max_length=row.plan["max_length"],
        levers=levers,
        measured_bytes=measured,
        predicted_bytes=predicted,
        error=None if predicted is None else predicted / measured - 1,
        refused=refused,
    )


def check_rows(rows: Iterable[MeasuredRow], *, tolerance: float, method: Method = "formula") -> CheckReport:
    """Predict every row; it passes when at least one row is covered and none is further off than ``tolerance``."""
    results = tuple(check_row(row, method) for row in rows)
    errors = [row.error for row in results if row.error is not None]
    worst, mean, mean_signed = figures(errors)
    return CheckReport(
        method=method,
        tolerance=tolerance,
        rows=results,
        groups=group_rows(GroupedRow(row.model_type, row.levers, row.error) for row in results),
        num_checked=len(errors),
        num_refused=len(results) - len(errors),
        worst_error=worst or 0.0,
        mean_error=mean or 0.0,
        mean_signed_error=mean_signed or 0.0,
        passed=worst is not None and abs(worst) <= tolerance,
    )
