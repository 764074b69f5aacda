"""`lcplan check --add`: a user's own run as a measured row."""

from __future__ import annotations

import json
import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from lcplan.backends.job import plan_document
from lcplan.checking import MeasuredRow, check_rows, load_rows, ring_rank, row_spec
from lcplan.errors import EnvironmentProblem, InputError, ModelError
from lcplan.model_loading import load_model
from lcplan.run_rows import read_run
from lcplan.train_plan import TrainPlan, resolve
from lcplan.user_rows import append_row, load_user_rows, record_run, rows_path
from tests.conftest import tiny_config
from tests.jobs import small_job

PEAK = 64_270_504_448
"""Qwen3-4B at 98,304 tokens on one H200, as row m035 has it."""


def plan_of(**changes: Any) -> dict[str, Any]:
    spec = load_model("Qwen/Qwen3-4B")
    plan, _ = resolve(spec, {"max_length": 98304, "gpu": "h200"} | changes, usual_gpus_per_node=8)
    return plan.model_dump(mode="json")


def result_of(**changes: Any) -> dict[str, Any]:
    steps = [{"step": step, "step_s": seconds} for step, seconds in ((1, 99.6), (2, 32.0), (3, 31.0))]
    return {
        "exit_code": 0, "error": None, "peak_allocated_bytes_per_rank": [PEAK],
        "peak_reserved_bytes_per_rank": [67_729_620_992], "pinned_peak_bytes_per_rank": [6_291_471],
        "device_used_bytes": 68_533_747_712, "world_size": 1, "steps": steps,
        "versions": {"torch": "2.11.0", "trl": "1.16.0"}, "gpu_name": "NVIDIA H200",
    } | changes  # fmt: skip


def job(
    folder: Path, *, result: dict[str, Any] | None = None, plan: dict[str, Any] | None = None, **document: Any
) -> Path:
    """A job folder as `lcplan run` leaves it; returns its result.json."""
    config = load_model("Qwen/Qwen3-4B").config
    model = {"id": "Qwen/Qwen3-4B", "init": "pretrained", "revision": None, "config": config}
    content = {"schema_version": 1, "plan": plan or plan_of(), "model": model, "device": "gpu"} | document
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(content))
    (folder / "result.json").write_text(json.dumps(result or result_of()))
    return folder / "result.json"


def test_a_run_becomes_a_row(tmp_path: Path) -> None:
    row = read_run(job(tmp_path))
    assert (row.gpu, row.model, row.num_hidden_layers, row.rank) == ("NVIDIA H200", "Qwen/Qwen3-4B", 36, 0)
    assert row.plan == plan_of()
    assert row.versions == {"torch": "2.11.0", "trl": "1.16.0"}
    assert row.config is None, "the catalog has this model"
    measured = row.measured.model_dump()
    assert measured == {
        "peak_allocated_bytes": PEAK, "peak_reserved_bytes": 67_729_620_992, "pinned_peak_bytes": 6_291_471,
        "device_used_bytes": 68_533_747_712, "step_s": 31.5,
    }  # fmt: skip
    assert read_run(tmp_path) == row, "the job's folder will do"


def test_what_a_generated_job_writes_can_be_added(tmp_path: Path) -> None:
    """plan.json as the backend renders it, of a model that the catalog does not have."""
    spec = small_job(plan={"gpu": "h200", "max_length": 512}, device="gpu")
    (tmp_path / "plan.json").write_text(json.dumps(plan_document(spec)))
    (tmp_path / "result.json").write_text(json.dumps(result_of(peak_allocated_bytes_per_rank=[200 << 20])))
    row = read_run(tmp_path / "result.json")
    assert row.config == spec.model.config
    assert row_spec(row).num_hidden_layers == row.num_hidden_layers
    report = record_run(tmp_path, tmp_path / "rows.jsonl", tolerance=0.01)
    assert report.row.predicted_bytes is not None
    assert load_user_rows(tmp_path / "rows.jsonl")[0].config == spec.model.config


def test_the_worst_rank_is_recorded_and_predicted(tmp_path: Path) -> None:
    peaks = [50 << 30, 52 << 30, 51 << 30, 49 << 30]
    plan = plan_of(num_gpus=4, cp_size=2, dp_shard_size=2)
    result = result_of(
        peak_allocated_bytes_per_rank=peaks, world_size=4,
        peak_reserved_bytes_per_rank=[1 << 30, 2 << 30, 3 << 30, 4 << 30], pinned_peak_bytes_per_rank=[None] * 4,
    )  # fmt: skip
    row = read_run(job(tmp_path, result=result, plan=plan))
    measured = row.measured.model_dump()
    assert (row.rank, measured["peak_allocated_bytes"], measured["peak_reserved_bytes"]) == (1, 52 << 30, 2 << 30)
    assert "pinned_peak_bytes" not in measured


def test_neighbours_share_a_sequence() -> None:
    plan = TrainPlan.model_validate(plan_of(num_gpus=8, cp_size=2, dp_shard_size=4))
    assert [ring_rank(rank, plan) for rank in range(8)] == [0, 1] * 4


def test_another_shape_of_a_known_model_keeps_its_config(tmp_path: Path) -> None:
    config = load_model("Qwen/Qwen3-4B").config
    fewer = {"id": "Qwen/Qwen3-4B", "config": {**config, "num_hidden_layers": 4, "layer_types": None}}
    row = read_run(job(tmp_path / "layers", model=fewer))
    assert (row.num_hidden_layers, row.config) == (4, None), "layers and head tying are fields of a row"
    wider = {"id": "Qwen/Qwen3-4B", "config": {**config, "intermediate_size": 10240}}
    row = read_run(job(tmp_path / "wider", model=wider))
    assert row.config == wider["config"]
    assert row_spec(row).intermediate_size == 10240


def test_a_folder_on_this_machine_is_recorded_by_its_name(tmp_path: Path) -> None:
    model = {"id": str(tmp_path / "my-model"), "config": tiny_config()}
    assert read_run(job(tmp_path, model=model, plan=plan_of(max_length=512))).model == "my-model"


def failing(**changes: Any) -> dict[str, Any]:
    return {"result": result_of(**changes)}


REFUSED = [
    ("failed-run", {"result": {"exit_code": 1, "error": "out of GPU memory", "steps": []}}, "out of GPU memory"),
    ("failed-run", failing(exit_code=3), "exit code 3"),
    ("cpu-run", failing(gpu_name=None, peak_allocated_bytes_per_rank=[None]), "without a GPU"),
    ("cpu-run", failing(peak_allocated_bytes_per_rank=[None]), "without a GPU"),
    ("cpu-run", {"device": "cpu"}, "without a GPU"),
    ("not-a-result", failing(peak_allocated_bytes_per_rank=[]), "one a rank"),
    ("not-a-result", failing(peak_allocated_bytes_per_rank=["much"]), "peak_allocated_bytes_per_rank.0"),
    ("bad-rows", failing(peak_allocated_bytes_per_rank=[-5]), "peak_allocated_bytes"),
    ("too-few-steps", failing(steps=[{"step_s": 1.0}]), "--max-steps 2"),
    ("wrong-world-size", failing(world_size=2, peak_allocated_bytes_per_rank=[1, 2]), "2 process"),
    ("no-config", {"model": {"id": "Qwen/Qwen3-4B"}}, "model.config"),
    ("bad-rows", {"plan": {"gpu": "h200", "num_gpus": 1}}, "max_length"),
    ("bad-value", {"plan": {**plan_of(), "loss": "quick"}}, "--loss"),
    ("not-a-result", {"model": 7}, "model"),
]


@pytest.mark.parametrize(("code", "changes", "words"), REFUSED)
def test_a_run_that_teaches_nothing_is_refused(tmp_path: Path, code: str, changes: dict[str, Any], words: str) -> None:
    rows = tmp_path / "rows.jsonl"
    with pytest.raises(InputError) as error:
        record_run(job(tmp_path / "job", **changes), rows, tolerance=0.01)
    assert error.value.code == code
    assert words in error.value.message
    assert not rows.exists()


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "{}", '{"a": 1}\n{"b": 2}', "[" * 100_000, "\x00"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InputError, match="result.json"):
        read_run(path)


def test_a_result_without_its_plan(tmp_path: Path) -> None:
    path = job(tmp_path)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(InputError, match="inside the job's own folder"):
        read_run(path)


def measured_row(**changes: Any) -> dict[str, Any]:
    row = json.loads(load_rows()[0].model_dump_json())
    row["measured"]["peak_allocated_bytes"] += 512
    return row | changes


def test_a_measured_row_is_taken_too(tmp_path: Path) -> None:
    path = tmp_path / "row.json"
    path.write_text(json.dumps(measured_row()))
    report = record_run(path, tmp_path / "rows.jsonl", tolerance=0.01)
    assert report.row.id == "u001"
    assert report.passed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": "out of memory"}, "failed"),
        ({"exit_code": 1}, "failed"),
        ({"gpu": "cpu"}, "without a GPU"),
        ({"gpu": " "}, "without a GPU"),
        ({"model": "nobody/nothing"}, "not in the catalog"),
        ({"plan": {"max_length": 0}}, "max_length"),
        ({"plan": {}}, "max_length"),
        ({"rank": -1}, "rank"),
    ],
)
def test_a_measured_row_is_checked(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "row.json"
    path.write_text(json.dumps(measured_row(**changes)))
    with pytest.raises(InputError, match=words):
        read_run(path)


def test_a_lever_beyond_the_formulas_is_recorded_and_said(tmp_path: Path) -> None:
    row = measured_row()
    row["plan"]["some_new_lever"] = True
    path = tmp_path / "row.json"
    path.write_text(json.dumps(row))
    report = record_run(path, tmp_path / "rows.jsonl", tolerance=0.01)
    assert report.row.predicted_bytes is None
    assert "some_new_lever" in (report.row.refused or "")
    assert report.passed
    assert len(load_user_rows(tmp_path / "rows.jsonl")) == 1


def test_rows_follow_one_another_and_a_duplicate_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "deep" / "er" / "rows.jsonl"
    first = read_run(job(tmp_path / "a"))
    second = read_run(job(tmp_path / "b", result=result_of(device_used_bytes=68_000_000_000)))
    assert append_row(first, rows).id == "u001"
    assert append_row(second, rows).id == "u002"
    before = rows.read_bytes()
    with pytest.raises(InputError, match="as u001 in .*rows.jsonl") as error:
        append_row(first, rows)
    assert error.value.code == "duplicate-row"
    assert rows.read_bytes() == before
    assert [row.id for row in load_user_rows(rows)] == ["u001", "u002"]
    assert check_rows(load_user_rows(rows), tolerance=0.01).num_checked == 2
    assert [path.name for path in rows.parent.iterdir()] == ["rows.jsonl"], "nothing is left beside it"


def test_a_row_that_ships_is_a_duplicate(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="as m001 in lcplan's own rows"):
        append_row(load_rows()[0], tmp_path / "rows.jsonl")


def test_what_is_in_the_file_stays(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    kept = json.dumps(measured_row(id="mine"), indent=None)
    rows.write_text(kept)  # no newline at the end
    append_row(read_run(job(tmp_path / "a")), rows)
    assert rows.read_text().splitlines()[0] == kept
    assert [row.id for row in load_user_rows(rows)] == ["u001", "u002"]


def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    rows = tmp_path / "notes.txt"
    rows.write_text("not mine to touch\n")
    with pytest.raises(InputError, match="line 1 is no measured row"):
        append_row(read_run(job(tmp_path / "a")), rows)
    assert rows.read_text() == "not mine to touch\n"
    with pytest.raises(InputError, match="is not a file"):
        append_row(read_run(job(tmp_path / "a")), tmp_path)


def test_a_kill_before_the_rename_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    append_row(read_run(job(tmp_path / "a")), rows)
    before = rows.read_bytes()

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        append_row(read_run(job(tmp_path / "b", result=result_of(device_used_bytes=1))), rows)
    assert rows.read_bytes() == before


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentProblem, match="No space left on device.*--rows"):
        append_row(read_run(job(tmp_path / "a")), tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()


def _append(arguments: tuple[dict[str, Any], str]) -> None:
    content, path = arguments
    append_row(MeasuredRow.model_validate(content), Path(path))


def test_two_at_once_lose_no_row(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    contents = []
    for number in range(8):
        row = measured_row(id="")
        row["measured"]["device_used_bytes"] = number + 1
        contents.append((row, str(rows)))
    with get_context("spawn").Pool(4) as pool:
        pool.map(_append, contents)
    assert [row.id for row in load_user_rows(rows)] == [f"u{number:03d}" for number in range(1, 9)]


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LCPLAN_ROWS", str(tmp_path / "mine.jsonl"))
    assert rows_path() == tmp_path / "mine.jsonl"
    monkeypatch.setenv("LCPLAN_ROWS", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert rows_path() == tmp_path / "lcplan" / "rows.jsonl"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for data_home in ("", "relative/folder"):
        monkeypatch.setenv("XDG_DATA_HOME", data_home)
        assert rows_path() == tmp_path / "home" / ".local" / "share" / "lcplan" / "rows.jsonl"


def test_a_row_of_an_unknown_model_without_a_config() -> None:
    row = load_rows()[0].model_copy(update={"model": "nobody/nothing"})
    with pytest.raises(ModelError, match="holds no config"):
        check_rows([row], tolerance=0.01)


def test_on_the_command_line(lcplan, tmp_path: Path) -> None:
    path = str(job(tmp_path))
    result = lcplan("check", "--add", path)
    assert result.code == 0
    text = " ".join(result.out.split())
    for words in ("measured 59.86 GiB, predicted 59.86 GiB", "within 1.00%", "31.50 s a step", "NVIDIA H200"):
        assert words in text
    assert f"recorded as u001 in {os.environ['LCPLAN_ROWS']}" in result.out
    again = lcplan("check", "--add", path)
    assert (again.code, again.out) == (2, "")
    assert "recorded already, as u001" in again.err
    checked = lcplan("check")
    assert checked.code == 0
    assert "u001" in checked.out
    assert "u001" not in lcplan("check", "--rows", _shipped(tmp_path)).out


def _shipped(folder: Path) -> str:
    path = folder / "shipped.jsonl"
    path.write_text("".join(row.model_dump_json() + "\n" for row in load_rows()[:2]))
    return str(path)


def test_a_drift_is_recorded_and_exits_1(lcplan, tmp_path: Path) -> None:
    path = str(job(tmp_path, result=result_of(peak_allocated_bytes_per_rank=[PEAK + PEAK // 50])))
    rows = str(tmp_path / "rows.jsonl")
    result = lcplan("check", "--add", path, "--rows", rows, "--json")
    assert result.code == 1
    answer = json.loads(result.out)
    assert set(answer) == {
        "schema_version", "rows_file", "tolerance", "gpu", "versions", "step_s", "row", "passed",
    }  # fmt: skip
    assert answer["passed"] is False
    assert answer["row"]["error"] == pytest.approx(-0.02, abs=1e-3)
    assert len(load_user_rows(Path(rows))) == 1
    drifted = lcplan("check", "--rows", rows)
    assert drifted.code == 1
    assert "DRIFT" in drifted.out


def test_the_users_broken_file_is_named(lcplan) -> None:
    Path(os.environ["LCPLAN_ROWS"]).write_text("{}\n")
    result = lcplan("check")
    assert result.code == 2
    assert os.environ["LCPLAN_ROWS"] in result.err
