"""The shipped measurements against the formulas, as a user and CI run them."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from lcplan.checking import MeasuredRow, check_rows, load_rows, ring_rank, row_plan, row_spec
from lcplan.errors import InputError
from lcplan.estimators import formula
from lcplan.probing import of_phases

CAPACITY = resources.files("lcplan.measured") / "capacity.jsonl"
DENSE = {f"m{n:03d}" for n in (*range(1, 20), 22, 23, 24, 29, 30, 31, 33, 34, 35, 36)}
"""Rows without LoRA, selective checkpointing, TRL's own offloading or experts."""


def test_every_dense_row_is_covered_and_within_a_tenth_of_a_percent() -> None:
    report = check_rows(load_rows(), tolerance=0.001)
    covered = {row.id for row in report.rows if row.error is not None}
    assert covered >= DENSE
    assert report.passed
    assert report.mean_error < 0.0003
    assert abs(report.mean_signed_error) < 0.0003


PHASES_WITHIN = 0.005


def test_each_measured_phase_is_within_half_a_percent() -> None:
    """What a job or probe measured of forward, backward and update, beside the largest total that the formulas have."""
    found: dict[str, float] = {}
    for row in load_rows():
        measured = getattr(row.measured, "phases", None)
        if measured is None:
            continue
        spec = row_spec(row)
        plan = row_plan(row, spec)
        predicted = of_phases(formula.instants(spec, plan, rank=ring_rank(row.rank, plan)).totals())
        if plan.backend == "deepspeed":
            # its update ends within what is measured as the backward, and zero_grad alone is left
            measured = {phase: size for phase, size in measured.items() if phase != "optimizer_step"}
        found |= {f"{row.id} {phase}": predicted[phase] / size - 1 for phase, size in measured.items()}
    assert len(found) >= 38
    assert {name: error for name, error in found.items() if abs(error) > PHASES_WITHIN} == {}
    forwards = [error for name, error in found.items() if name.endswith("forward")]
    assert len(forwards) >= 13
    assert max(map(abs, forwards)) < 0.0002


def test_a_drift_is_found() -> None:
    """The check can fail: one row is made 1% larger."""
    row = load_rows()[0]
    measured = row.measured.model_copy(update={"peak_allocated_bytes": int(row.measured.peak_allocated_bytes * 1.01)})
    report = check_rows([row.model_copy(update={"measured": measured})], tolerance=0.005)
    assert not report.passed
    assert report.worst_error == pytest.approx(-0.0099, abs=2e-4)


def test_rows_outside_the_formulas_are_named_not_counted() -> None:
    first, second = load_rows()[:2]
    row = first.model_copy(update={"plan": first.plan | {"lever_of_tomorrow": True}})
    report = check_rows([row, second], tolerance=0.02)
    assert (report.num_checked, report.num_refused) == (1, 1)
    assert report.rows[0].refused == "lever_of_tomorrow"
    assert report.rows[0].error is None
    assert not check_rows([row], tolerance=1).passed, "nothing was checked"


def test_a_users_own_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(load_rows()[0].model_dump_json() + "\n\n")
    assert check_rows(load_rows(path), tolerance=0.01).num_checked == 1


@pytest.mark.parametrize(
    "text", ["", "{}", "nonsense", json.dumps({"id": "x", "measured": {"peak_allocated_bytes": 0}})]
)
def test_broken_rows_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match="measured row"):
        load_rows(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_rows(tmp_path / "none.jsonl")


def test_a_plan_called_fitting_ran_in_every_capacity_study() -> None:
    """Predicted peak and slack reach the smallest capacity at which the step still ran (expandable segments)."""
    rows = [json.loads(line) for line in CAPACITY.read_text("utf-8").splitlines()]
    studied = [row for row in rows if row["expandable_segments"]]
    assert len(studied) >= 8
    for data in studied:
        row = MeasuredRow.model_validate(data)
        spec = row_spec(row)
        peak = max(formula.instants(spec, row_plan(row, spec)).totals().values())
        allowed = peak + formula.on_top(row_plan(row, spec), peak)["runtime.allocator_slack"]
        assert allowed >= data["measured"]["largest_failed_capacity_bytes"], row.id
        assert allowed * 1.002 >= data["measured"]["smallest_capacity_bytes"], row.id
        assert peak == pytest.approx(data["measured"]["peak_allocated_bytes"], rel=3e-3)
