"""The scripts that measure real runs: every job of theirs renders, is predicted, and leaves a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import job_overhead, runs, single_gpu_runs

pytestmark = pytest.mark.train


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts start lcplan from the root of the checkout."""
    monkeypatch.chdir(Path(__file__).parent.parent)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def dry_run(script: Any, tmp_path: Path, *arguments: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The predictions and the rendered jobs of a dry run."""
    output = tmp_path / "record.jsonl"
    assert script.main(["--output", str(output), "--folder", str(tmp_path / "jobs"), "--dry-run", *arguments]) == 0
    found = lines(output)
    kinds = [line["kind"] for line in found]
    assert kinds == sorted(kinds), "everything is predicted before the first job starts"
    rendered = [line for line in found if line["kind"] == "rendered"]
    for line in rendered:
        plan = json.loads((tmp_path / "jobs" / line["name"] / "plan.json").read_text("utf-8"))
        report = next((p["report"] for p in found if p["kind"] == "prediction" and p["name"] == line["name"]), None)
        if report is not None:
            assert plan["prediction"]["peak_allocated_bytes"] == report["peak_allocated_bytes"]
            assert plan["plan"] == report["plan"], "what is predicted is what is run"
    return [line for line in found if line["kind"] == "prediction"], rendered


def test_single_gpu_runs_plan_full_lora_and_qlora(tmp_path: Path) -> None:
    predictions, rendered = dry_run(single_gpu_runs, tmp_path)
    assert [line["name"] for line in rendered] == ["full", "lora", "qlora"]
    full, lora, qlora = (line["report"] for line in predictions)
    assert full["peak_allocated_bytes"] > lora["peak_allocated_bytes"] > qlora["peak_allocated_bytes"]
    assert (lora["plan"]["lora_r"], qlora["plan"]["quantize"]) == (16, "nf4")


def test_the_overhead_script_and_the_job_do_the_same_work(tmp_path: Path) -> None:
    output = tmp_path / "record.jsonl"
    arguments = ["--preset", "smoke", "--max-length", "64", "--max-steps", "4"]
    assert job_overhead.main(["--output", str(output), "--folder", str(tmp_path / "jobs"), *arguments]) == 0
    found = lines(output)
    assert [(line["kind"], line.get("name")) for line in found] == [
        ("prediction", "job-1"),
        ("run", "job-1"),
        ("script", "script-1"),
        ("run", "job-2"),
        ("script", "script-2"),
        ("summary", None),
    ]
    total = found[-1]
    assert total["num_steps"] == {"job": 4, "script": 4}, "two steady steps of each process"
    assert total["ratio"] == total["median_step_s"]["job"] / total["median_step_s"]["script"]
    script = found[2]
    assert set(script["arguments_unlike_the_job"]) <= {"num_train_epochs", "save_total_limit", "ddp_timeout"}
    job = found[1]["result"]["steps"]
    for ours, theirs in zip(script["losses"], (step["loss"] for step in job), strict=True):
        assert ours == pytest.approx(theirs, abs=0.3), "other random weights, the same size"


def test_the_text_is_as_long_as_asked(tmp_path: Path) -> None:
    runs.write_text(tmp_path / "text.txt", 10_000)
    assert (tmp_path / "text.txt").stat().st_size >= 10_000 * runs.BYTES_PER_TOKEN
    with pytest.raises(ValueError, match="bytes of sources"):
        runs.write_text(tmp_path / "text.txt", 1 << 40)
