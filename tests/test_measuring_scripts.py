"""The scripts that measure real runs: every job of theirs renders, is predicted, and leaves a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lcplan.presets import load_preset
from lcplan.train_plan import TrainPlan
from tests.jobs import ROOT, run_python
from tests.test_smoke_run import ON_CPU, RANK_0_OF_N
from tools import eight_gpus, job_overhead, kill_a_rank, runs, single_gpu_runs, two_gpus, ulysses

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


def test_single_gpu_runs_plan_full_offload_lora_and_qlora(tmp_path: Path) -> None:
    predictions, rendered = dry_run(single_gpu_runs, tmp_path)
    assert [line["name"] for line in rendered] == ["full", "offload", "ahead", "lora", "qlora"]
    full, offload, ahead, lora, qlora = (line["report"] for line in predictions)
    assert ahead["step_time_s"] < offload["step_time_s"]
    assert full["peak_allocated_bytes"] > lora["peak_allocated_bytes"] > qlora["peak_allocated_bytes"]
    assert (lora["plan"]["lora_r"], qlora["plan"]["quantize"]) == (16, "nf4")


def test_the_overhead_script_and_the_job_do_the_same_work(tmp_path: Path) -> None:
    output = tmp_path / "record.jsonl"
    arguments = ["--preset", "smoke", "--max-length", "64", "--max-steps", "4", "--pairs", "1"]
    assert job_overhead.main(["--output", str(output), "--folder", str(tmp_path / "jobs"), *arguments]) == 0
    found = lines(output)
    assert [(line["kind"], line.get("name")) for line in found] == [
        ("prediction", "job"),
        ("run", "job-1"),
        ("script", "script-1"),
        ("summary", None),
    ]
    total = found[-1]
    assert total["num_steps"] == {"job": 2, "script": 2}, "the first two are left out"
    assert total["ratio"] == total["median_step_s"]["job"] / total["median_step_s"]["script"]
    script = found[2]
    assert set(script["arguments_unlike_the_job"]) <= {"num_train_epochs", "save_total_limit", "ddp_timeout"}
    job = found[1]["result"]["steps"]
    for ours, theirs in zip(script["losses"], (step["loss"] for step in job), strict=True):
        assert ours == pytest.approx(theirs, abs=0.3), "other random weights, the same size"


@pytest.mark.parametrize(
    ("script", "arguments", "sizes"),
    [
        (eight_gpus, (), {"num_gpus": 8, "cp_size": 8, "max_length": 1_048_576, "gpu": "h200"}),
        (eight_gpus, ("--num-gpus", "2", "--max-length", "262144"), {"num_gpus": 2, "cp_size": 2}),
        (eight_gpus, ("--num-gpus", "8", "--cp-size", "4", "--max-length", "65536"), {"dp_shard_size": 2}),
        (eight_gpus, ("--preset", "qwen3-4b-1m-4gpu"), {"num_gpus": 4, "max_length": 1_048_576}),
        (ulysses, (), {"backend": "deepspeed", "zero_stage": 3, "num_gpus": 4, "sp_size": 4, "max_length": 262_144}),
        (ulysses, ("--num-gpus", "2"), {"sp_size": 2}),
        (job_overhead, (), {"num_gpus": 1, "max_length": 32_768}),
        (two_gpus, ("--max-length", "16384"), {"num_gpus": 2, "cp_size": 2}),
        (kill_a_rank, ("--num-gpus", "2", "--cp-size", "2"), {"cp_size": 2, "max_length": 65_536}),
    ],
)
def test_a_dry_run_renders_what_is_predicted(
    tmp_path: Path, script: Any, arguments: tuple[str, ...], sizes: dict[str, Any]
) -> None:
    predictions, rendered = dry_run(script, tmp_path, *arguments)
    plan = predictions[0]["report"]["plan"]
    assert {name: plan[name] for name in sizes} == sizes
    assert predictions[0]["report"]["fits"]
    assert rendered
    for line in rendered:
        job = json.loads((tmp_path / "jobs" / line["name"] / "plan.json").read_text("utf-8"))
        assert job["plan"] == next(
            p["report"]["plan"] for p in predictions if p["name"] in (line["name"], "job", "whole")
        )
        assert job["model"]["init"] == "random"
        tokens = job["training"]["max_steps"] * job["plan"]["max_length"] * job["plan"]["dp_shard_size"]
        assert Path(job["data"]["paths"][0]).stat().st_size >= tokens * runs.BYTES_PER_TOKEN


def test_the_job_on_several_gpus_trains_as_one_of_their_ranks(tmp_path: Path) -> None:
    """The rendered job's own FSDP2 and ring attention, as rank 0 of 8 in the fake process group on this CPU."""
    config = tmp_path / "small" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(load_preset("smoke").config), "utf-8")
    arguments = ["--model", str(config), "--num-gpus", "8", "--cp-size", "4", "--max-length", "512", "--rope", "none"]
    dry_run(eight_gpus, tmp_path, *arguments)
    folder = tmp_path / "jobs" / "job"
    (folder / "on_cpu.py").write_text(ON_CPU, "utf-8")
    (folder / "rank_0.py").write_text(RANK_0_OF_N, "utf-8")
    done = run_python("rank_0.py", cwd=folder, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    result = runs.read_folder(folder)["result"]
    assert result is not None
    assert (result["world_size"], result["distributed_type"]) == (8, "FSDP")
    assert result["first_layer_sees"] == [1, 128]
    assert len(result["steps"]) == 2


def test_a_job_that_does_not_end_in_time_is_refused_with_a_length_that_would(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="use --max-length 786432, or fewer --max-steps"):
        eight_gpus.main(["--output", str(tmp_path / "record.jsonl"), "--folder", str(tmp_path / "jobs")])
    assert [line["kind"] for line in lines(tmp_path / "record.jsonl")] == ["prediction"]


def test_a_killed_rank_of_two(tmp_path: Path) -> None:
    output = tmp_path / "record.jsonl"
    size = ["--max-length", "64", "--max-steps", "8", "--num-gpus", "2", "--gpus-per-node", "2", "--backend", "ddp"]
    assert (
        kill_a_rank.main(
            [
                "--output",
                str(output),
                "--folder",
                str(tmp_path / "jobs"),
                "--preset",
                "smoke",
                "--max-steps",
                "8",
                *size,
            ]
        )
        == 0
    )
    found = {line["kind"]: line for line in lines(output)}
    killed, total = found["killed"], found["summary"]
    assert killed["ended_after_s"] <= runs.ENDS_WITHIN_S
    assert killed["left"] == []
    assert killed["num_processes"] == 4, "lcplan, the launcher, two ranks"
    assert f"rank 1 (process {killed['killed_pid']} on" in killed["error"]
    assert total["largest_difference"] == 0.0
    assert all(total["shown"].values())


def test_rows_that_are_needed() -> None:
    plan = TrainPlan(max_length=64, gpu="h200", num_gpus=4, dp_shard_size=2, sp_size=2, backend="deepspeed")
    assert runs.rows_needed(plan.model_dump(), 3) == 8, "3 steps of 2 rows, loaded 4 at once"


def test_the_text_is_as_long_as_asked(tmp_path: Path) -> None:
    runs.write_text(tmp_path / "text.txt", 10_000)
    assert (tmp_path / "text.txt").stat().st_size >= 10_000 * runs.BYTES_PER_TOKEN
    with pytest.raises(ValueError, match="bytes of sources"):
        runs.write_text(tmp_path / "text.txt", 1 << 40)
