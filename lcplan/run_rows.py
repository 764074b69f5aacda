"""A finished run as a measured row: the result.json of a generated job, or a row that was measured otherwise."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from lcplan._record import Record
from lcplan.checking import MeasuredRow, parse_row, row_plan, row_spec
from lcplan.errors import InputError, ModelError, PlanError
from lcplan.model_spec import ModelSpec

R = TypeVar("R", bound=Record)
RESULT_FILE, PLAN_FILE, REPORT_FILE = "result.json", "plan.json", "report.json"
MAX_BYTES = 50 * 10**6
"""A result.json of 100,000 steps is smaller."""
STEADY_FROM = 2
"""Steps a run needs: the first creates the optimizer states and so has another peak."""
UNNAMED = ""
"""Id of a row that has not been recorded yet."""


class _Step(Record):
    model_config = ConfigDict(frozen=True, extra="ignore")
    step_s: float = Field(gt=0)


class RunResult(Record):
    """What ``--add`` reads of a job's result.json; a run that failed has no more than the first two fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    exit_code: int
    error: str | None
    peak_allocated_bytes_per_rank: tuple[int | None, ...] = ()
    peak_reserved_bytes_per_rank: tuple[int | None, ...] = ()
    pinned_peak_bytes_per_rank: tuple[int | None, ...] = ()
    phases_per_rank: tuple[dict[str, int], ...] = ()
    resident_per_rank: tuple[dict[str, int], ...] = ()
    device_used_bytes: int | None = None
    world_size: int = 0
    steps: tuple[_Step, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    gpu_name: str | None = None


class _Model(Record):
    model_config = ConfigDict(frozen=True, extra="ignore")
    id: str
    config: dict[str, Any] | None = None


class RunPlan(Record):
    """What ``--add`` reads of a job's plan.json."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    plan: dict[str, Any]
    model: _Model
    device: str = "gpu"


def read_run(path: Path) -> MeasuredRow:
    """The measured row that ``path`` holds, with no id yet.

    Raises:
        InputError: where it holds none: not JSON, a run that failed or ran on a CPU, a plan that cannot be read.
    """
    file = path / RESULT_FILE if path.is_dir() else path
    if file.name == REPORT_FILE:  # it says what was predicted; what was measured is beside it
        file = file.with_name(RESULT_FILE)
    content = _read_object(file)
    if "measured" in content:
        row = parse_row(json.dumps({**content, "id": UNNAMED}), where=str(file))
    elif "exit_code" in content:
        result = _validate(RunResult, content, file)
        _check_result(result, file)
        row = _row(result, _read_plan(file.with_name(PLAN_FILE)), file)
    else:
        raise InputError(
            "not-a-result",
            f"{file} is neither a job's result.json (it has no exit_code) nor a measured row (it has no measured). "
            "Give the result.json in the folder of a job that lcplan run wrote.",
        )
    _check_row(row, file)
    return row


def _read_object(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise InputError("not-a-result", f"{file} is larger than {MAX_BYTES // 10**6} MB, so it is no result.json.")
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InputError("unreadable-result", f"--add {file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            "not-a-result", f"{file} is not one JSON object: {error}. Give a job's result.json, whole."
        ) from None
    if not isinstance(content, dict):
        raise InputError("not-a-result", f"{file} holds a JSON {type(content).__name__}. Give a job's result.json.")
    return content


def _validate(record: type[R], content: dict[str, Any], file: Path) -> R:
    try:
        return record.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            "not-a-result",
            f"{file} was not written by a generated job: {where}: {first['msg']}. Start the job again with lcplan run.",
        ) from None


def _read_plan(file: Path) -> RunPlan:
    if not file.is_file():
        raise InputError(
            "plan-missing",
            f"{file} does not exist. A result says what was measured, the plan beside it of what: "
            "give the result.json inside the job's own folder.",
        )
    plan = _validate(RunPlan, _read_object(file), file)
    if plan.device != "gpu":
        _refuse_cpu(file)
    return plan


def _refuse_cpu(file: Path) -> None:
    raise InputError(
        "cpu-run", f"{file} is of a run without a GPU, which measures no GPU memory. Give the result of a run on one."
    )


def _check_result(result: RunResult, file: Path) -> None:
    """Refuse runs whose peak says nothing of a steady step."""
    if result.error is not None or result.exit_code != 0:
        raise InputError(
            "failed-run",
            f"{file} is of a run that failed (exit code {result.exit_code}): {result.error or 'no message'!s:.300}. "
            "Its peak is not that of a whole step. Give the result of a run that finished.",
        )
    peaks = result.peak_allocated_bytes_per_rank
    if result.gpu_name is None or any(peak is None for peak in peaks):
        _refuse_cpu(file)
    if not peaks or len(peaks) != result.world_size:
        raise InputError(
            "not-a-result",
            f"{file} has {len(peaks)} peaks and world_size {result.world_size}: there must be one a rank. "
            "Start the job again with lcplan run.",
        )
    if len(result.steps) < STEADY_FROM:
        raise InputError(
            "too-few-steps",
            f"{file} has {len(result.steps)} step(s). The first creates the optimizer states, so that its peak is "
            f"another than that of a steady step. Run at least {STEADY_FROM}: --max-steps {STEADY_FROM}.",
        )


def _row(result: RunResult, job: RunPlan, file: Path) -> MeasuredRow:
    num_gpus = job.plan.get("num_gpus", 1)
    if result.world_size != num_gpus:
        raise InputError(
            "wrong-world-size",
            f"{file} is of {result.world_size} process(es), and the plan beside it of {num_gpus}: its numbers are not "
            "those of the plan. Start the job with the command in its README.md.",
        )
    if job.model.config is None:
        raise InputError(
            "no-config",
            f"{file.with_name(PLAN_FILE)} holds no model.config, so the model cannot be rebuilt. "
            "Start the job again with lcplan run, which writes it.",
        )
    peaks = [peak or 0 for peak in result.peak_allocated_bytes_per_rank]
    rank = peaks.index(max(peaks))
    spec = ModelSpec.from_config(job.model.config, _portable(job.model.id))
    values = {
        "id": UNNAMED,
        "gpu": result.gpu_name,
        "model": spec.id,
        "num_hidden_layers": spec.num_hidden_layers,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "plan": job.plan,
        "versions": result.versions,
        "measured": _measured(result, rank),
        "rank": rank,
    }
    row = parse_row(json.dumps(values), where=str(file))
    return row if _catalog_has(row, spec) else row.model_copy(update={"config": job.model.config})


def _portable(id: str) -> str:
    """A model's id; of a folder on this machine its name."""
    return Path(id).name if Path(id).is_absolute() else id


def _measured(result: RunResult, rank: int) -> dict[str, Any]:
    """Raw bytes of the worst rank; step time as the median of the steady steps."""
    values: dict[str, Any] = {}
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "pinned_peak_bytes"):
        per_rank = getattr(result, f"{name}_per_rank")
        if rank < len(per_rank) and per_rank[rank] is not None:
            values[name] = per_rank[rank]
    if result.device_used_bytes is not None:
        values["device_used_bytes"] = result.device_used_bytes
    if rank < len(result.phases_per_rank) and result.phases_per_rank[rank]:
        values["phases"] = result.phases_per_rank[rank]
    if rank < len(result.resident_per_rank) and "before_step" in result.resident_per_rank[rank]:
        values["resident_before_step_bytes"] = result.resident_per_rank[rank]["before_step"]
    values["step_s"] = statistics.median(step.step_s for step in result.steps[1:])
    return values


def _catalog_has(row: MeasuredRow, spec: ModelSpec) -> bool:
    """Whether the catalog gives the same model, so that the row needs no config of its own."""
    try:
        found = row_spec(row)
    except ModelError:
        return False
    unlike: dict[str, Any] = {"id": "", "config": {}, "max_position_embeddings": 1}
    return found.model_copy(update=unlike) == spec.model_copy(update=unlike)


def _check_row(row: MeasuredRow, file: Path) -> None:
    """Refuse a row whose model or plan cannot be rebuilt; one that the formulas do not cover is a row."""
    extra = row.model_extra or {}
    if extra.get("error") is not None or extra.get("exit_code"):
        raise InputError(
            "failed-run", f"{file} is of a run that failed: {extra.get('error')!s:.300}. Give one that did not."
        )
    if row.gpu.strip().casefold() in ("", "cpu"):
        _refuse_cpu(file)
    spec = row_spec(row)
    try:
        row_plan(row, spec)
    except PlanError as error:
        if error.code != "not-covered":
            raise
