"""``lcplan check --time``: the bars on step times, and what is not held against them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from lcplan.checking import MeasuredRow, load_rows
from lcplan.time_checking import LEAST_ORDERED, check_times, load_published
from tests.conftest import Outcome


def row(id: str) -> MeasuredRow:
    return next(row for row in load_rows() if row.id == id)


def with_time(found: MeasuredRow, seconds: float, **extra: object) -> MeasuredRow:
    measured = found.measured.model_copy(update={"step_s": seconds})
    return found.model_copy(update={"measured": measured, **extra})


def test_every_long_step_is_within_a_tenth_and_the_order_of_plans_holds() -> None:
    report = check_times(load_rows(), load_published(), tolerance=0.1)
    assert report.passed
    held = [row for row in report.rows if row.counts and row.refused is None]
    assert report.num_checked == len(held) >= 29
    assert all(row.error is not None and abs(row.error) <= 0.1 for row in held)
    assert abs(report.mean_signed_error) < 0.02, "no bias"
    assert report.num_pairs > 200
    assert report.num_ordered >= LEAST_ORDERED * report.num_pairs


def test_the_published_times_are_there() -> None:
    times = {time.id: time.step_s for time in load_published()}
    assert sorted(times.values()) == [9.5, 17.8, 34.6, 137, 380, 483, 1295, 2135]
    assert all(time.source for time in load_published())


def test_what_a_row_timed_depends_on_how_it_ran() -> None:
    timed = {row.id: row for row in check_times(load_rows(), (), tolerance=0.1).rows}
    assert timed["m035"].timed == "steady step"
    assert timed["m018"].timed == "first forward and backward"
    assert "m014" not in timed, "ranks of the fake process group run on weights that are no data"
    assert not timed["m053"].counts, "too short"


def test_a_time_that_is_off_is_drift() -> None:
    report = check_times([with_time(row("m035"), 50.0)], (), tolerance=0.1)
    assert not report.passed
    assert report.worst_error == pytest.approx(31.16 / 50 - 1, rel=0.01)


def test_the_wrong_order_is_drift_whatever_the_tolerance() -> None:
    swapped = [with_time(row("m035"), 18.0), with_time(row("m108"), 31.0)]
    report = check_times(swapped, (), tolerance=9.0)
    assert (report.num_pairs, report.num_ordered, report.passed) == (1, 0, False)


def test_what_has_no_prediction_is_said() -> None:
    unknown = with_time(row("m108"), 10.0, gpu="NVIDIA Tesla V100")
    untimed = with_time(row("m108"), 10.0, gpu="NVIDIA A100-SXM4-80GB")
    strange = with_time(row("m108"), 10.0, model="nobody/knows")
    rows = check_times([unknown, untimed, strange], (), tolerance=0.1).rows
    reasons = [str(row.refused) for row in rows]
    assert "not in the catalog" in reasons[0]
    assert "no kernel has been timed on a100" in reasons[1]
    assert "nobody/knows" in reasons[2]
    assert not check_times([unknown], (), tolerance=0.1).passed, "nothing was checked"


def test_the_command(lcplan: Callable[..., Outcome]) -> None:
    result = lcplan("check", "--time")
    assert result.code == 0
    text = " ".join(result.out.split())
    assert "no time drifts: 50 times checked" in text
    assert "model and offload are assumed" in text
    report = json.loads(lcplan("check", "--time", "--json").out)
    assert report["passed"]
    assert len(report["rows"]) > 60
    assert lcplan("check", "--time", "--tolerance", "1%").code == 1
    refused = lcplan("check", "--time", "--method", "trace")
    assert refused.code == 2
    assert "--time goes with" in refused.err
