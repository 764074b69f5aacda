"""The probe: its own code on a CPU, where it measures no memory, and what lcplan makes of its numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from jobs import fsdp2_job, run_python, small_job

from lcplan.backends.job import render_job
from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.estimators import formula
from lcplan.job_options import DataSource, TrainingOptions
from lcplan.job_run import run_job
from lcplan.model_loading import load_model
from lcplan.probing import (
    ProbeResult,
    allocator_bytes,
    check_probe,
    compare,
    host_memory_available,
    measured_row,
    phases,
    probe_job,
    run_probe,
    start_probe,
    with_layers,
)
from lcplan.run_rows import read_run
from tests.conftest import plan_of, tiny_spec

LOG_V = math.log(1024)
MIB = 1 << 20

# As for the job itself, a private method is patched so that accelerate's FSDP2 code runs without a GPU.
ON_CPU = """
import os, sys
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
from accelerate.state import PartialState
from accelerate.utils import DistributedType
PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
import argparse
rank = os.environ["RANK"]
import probe
os.environ["RANK"] = rank
build = probe.sft_arguments
probe.sft_arguments = lambda job: {**build(job), "use_cpu": False}
probe.ARGUMENTS = argparse.Namespace(rank=int(rank), capacity=None, whole_steps=2)
sys.exit(probe.main({**probe.JOB, "device": "cpu"}))
"""


def result_of(folder: Path) -> dict:
    return json.loads((folder / "probe.json").read_text())


@pytest.mark.train
def test_one_process_runs_a_short_step_and_a_whole_one(tmp_path: Path) -> None:
    folder = render_job(small_job(plan={"max_length": 2048}, max_position_embeddings=2048), tmp_path / "a job")
    done = run_python("probe.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = result_of(folder)
    assert (found["error"], found["distributed_type"]) == (None, "NO")
    assert found["loss"] == pytest.approx(LOG_V, abs=0.1), "random tokens"
    assert found["step_s"] > 0
    assert found["peak_allocated_bytes"] is None, "a CPU run measures no GPU memory"
    assert not (folder / "result.json").exists()


@pytest.mark.train
def test_the_last_of_eight_ranks_runs_alone_with_finite_weights(tmp_path: Path) -> None:
    plan = {"num_gpus": 8, "gpus_per_node": 8, "dp_shard_size": 8, "max_length": 64}
    folder = render_job(fsdp2_job(**plan), tmp_path / "job")
    (folder / "on_cpu.py").write_text(ON_CPU)
    (folder / "environment.py").write_text("import json, probe\nprint(json.dumps(probe.launcher_environment(7)))")
    environment = json.loads(run_python("environment.py", cwd=folder).stdout.splitlines()[-1])
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("7", "8")
    assert environment["FSDP_RESHARD_AFTER_FORWARD"] == "true"
    done = run_python("on_cpu.py", cwd=folder, RANK="7")
    assert done.returncode == 0, done.stderr
    found = result_of(folder)
    assert (found["rank"], found["distributed_type"]) == (7, "FSDP")
    assert found["loss"] == pytest.approx(LOG_V, abs=0.1), "what it gathers are copies of its own share"
    assert found["step_s"] == pytest.approx(found["whole_steps_s"][1], abs=1e-3), "the last of two whole steps"


@pytest.mark.train
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    folder = render_job(small_job(device="gpu"), tmp_path / "job")
    done = run_python("probe.py", cwd=folder, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert result_of(folder)["error"] == "a probe needs one CUDA GPU, and this PyTorch sees none."
    with pytest.raises(EnvironmentProblem, match="--method trace"):
        run_probe(small_job(device="gpu"), tmp_path / "other", rank=0, capacity_bytes=None)
    assert not (tmp_path / "other").exists()


@pytest.mark.train
def test_running_out_of_memory_leaves_a_record(tmp_path: Path) -> None:
    folder = render_job(small_job(), tmp_path / "job")
    model = folder / "model.py"
    model.write_text(
        model.read_text().replace(
            'plan, source = job["plan"], job["model"]', 'raise torch.OutOfMemoryError("CUDA out of memory.")'
        )
    )
    done = run_python("probe.py", cwd=folder)
    assert done.returncode == 1
    assert result_of(folder)["error"] == "out of GPU memory: CUDA out of memory."


def test_a_killed_probe_leaves_a_record(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    (tmp_path / "probe.json").write_text("{}")
    found = start_probe(tmp_path, rank=0, cap=1)
    assert (found.exit_code, found.error) == (
        1,
        "the probe was killed by signal 9 before it could say what it measured",
    )
    assert result_of(tmp_path)["error"] == found.error
    (tmp_path / "probe.py").write_text("raise SystemExit(3)")
    assert "ended with exit code 3" in str(start_probe(tmp_path, rank=0, cap=None).error)


def test_what_cannot_be_probed_is_refused_before_anything_is_written() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    ddp = plan_of(spec, max_length=4096, num_gpus=2, backend="ddp")
    with pytest.raises(PlanError, match="--backend ddp: a probe runs single and fsdp2"):
        check_probe(spec, ddp, rank=0, host_available=1 << 40)
    plan = plan_of(spec, max_length=1 << 20, num_gpus=8, cp_size=8, offload_activations=True)
    with pytest.raises(PlanError, match="--rank 8: the plan has ranks 0 to 7"):
        check_probe(spec, plan, rank=8, host_available=1 << 40)
    # 36 GiB of layer inputs, and 8.19e9 float32 weights while it loads
    with pytest.raises(EnvironmentProblem, match="66.51 GiB in host memory.*30.51 GiB of weights.*64.00 GiB are free"):
        check_probe(spec, plan, rank=7, host_available=64 << 30)
    check_probe(spec, plan, rank=7, host_available=67 << 30)
    assert host_memory_available() > 0


def test_a_cap_leaves_room_for_what_lies_outside_the_allocator() -> None:
    spec = tiny_spec()
    one, two = (plan_of(spec, max_length=64, num_gpus=gpus) for gpus in (1, 2))
    assert allocator_bytes(one, 80 * 10**9) == 80 * 10**9 - 957_153_280
    assert allocator_bytes(two, 80 * 10**9) == 80 * 10**9 - 2_156_789_760
    with pytest.raises(PlanError, match="--capacity 0.93 GiB: the CUDA context"):
        allocator_bytes(two, 10**9)


def test_fewer_layers_are_the_first_ones() -> None:
    spec = load_model("google/gemma-3-4b-pt")
    cut = with_layers(spec, 7)
    assert cut.layer_types == spec.layer_types[:7]
    assert cut.layers == spec.layers[:7]
    assert with_layers(spec, None) is spec
    assert with_layers(tiny_spec(), 2).num_hidden_layers == 2
    for layers in (0, -1, 35):
        with pytest.raises(PlanError, match=f"--layers {layers}: google/gemma-3-4b-pt has 34"):
            with_layers(spec, layers)


def found(**changes: object) -> ProbeResult:
    values = {
        "exit_code": 0,
        "error": None,
        "peak_allocated_bytes": 900 * MIB,
        "phases": {"forward": 700 * MIB, "backward": 900 * MIB, "optimizer_step": 800 * MIB},
        "resident": {
            "before_step": 610 * MIB,
            "parameters": 200 * MIB,
            "optimizer_states": 400 * MIB,
            "gradients": 190 * MIB,
        },
        "peak_reserved_bytes": 950 * MIB,
        "pinned_peak_bytes": 5,
        "device_used_bytes": 1900 * MIB,
        "step_s": 1.5,
        "versions": {"torch": "2.11.0"},
        "gpu_name": "NVIDIA H200",
    }
    return ProbeResult.model_validate(values | changes)


def test_measured_phases_add_up() -> None:
    by_phase = phases(found())
    assert {phase: sum(alive.values()) for phase, alive in by_phase.items()} == found().phases
    assert by_phase["optimizer_step"]["probe.gradients"] == 190 * MIB
    assert by_phase["backward"] == {
        "probe.parameters": 200 * MIB, "probe.optimizer_states": 400 * MIB, "probe.other": 300 * MIB,
    }  # fmt: skip


def test_formulas_stand_beside_what_was_measured() -> None:
    spec = tiny_spec()
    plan = plan_of(spec, max_length=4096)
    pairs = {pair.what: (pair.predicted_bytes, pair.measured_bytes) for pair in compare(spec, plan, 0, found())}
    totals = formula.instants(spec, plan).totals()
    assert pairs["peak"] == (max(totals.values()), 900 * MIB)
    assert pairs["parameters"] == (2 * spec.num_parameters, 200 * MIB)
    assert pairs["optimizer_states"] == (4 * spec.num_parameters, 400 * MIB)
    assert pairs["gradients"] == (2 * spec.num_parameters, 190 * MIB)
    assert pairs["forward"] == (totals["forward"], 700 * MIB)
    assert "pinned" not in pairs, "nothing is offloaded"
    offloaded = plan_of(spec, max_length=4096, offload_activations=True)
    assert compare(spec, offloaded, 0, found())[-1].what == "pinned"
    assert compare(spec, plan_of(spec, max_length=64, packing=True), 0, found()) == ()


def test_check_add_takes_the_record(tmp_path: Path) -> None:
    spec = tiny_spec()
    plan = plan_of(spec, max_length=4096, num_gpus=4, cp_size=4)
    record = tmp_path / "record.json"
    record.write_text(json.dumps(measured_row(spec, plan, 3, found())))
    row = read_run(record)
    assert row.rank == 3
    assert row.measured.peak_allocated_bytes == 900 * MIB
    assert row.plan["cp_size"] == 4


def test_the_probed_job_needs_no_network() -> None:
    spec = tiny_spec()
    job = probe_job(spec, plan_of(spec, max_length=64), None)
    assert (job.model.init, job.data.kind) == ("random", "python-docs")


def fake_run(monkeypatch: pytest.MonkeyPatch, result: ProbeResult) -> list[dict]:
    """No GPU here: the job is rendered, and what it would have measured is given."""
    started: list[dict] = []

    def run(job, folder, *, rank, capacity_bytes):
        started.append({"job": job, "rank": rank, "capacity_bytes": capacity_bytes})
        render_job(job, folder, force=True)
        return result

    monkeypatch.setattr("lcplan.probing.run_probe", run)
    return started


def test_the_report_of_a_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lcplan) -> None:
    started = fake_run(monkeypatch, found())
    command = ["estimate", "Qwen/Qwen3-0.6B", "--max-length", "4Ki", "--gpu", "h200", "--method", "probe"]
    told = lcplan(*command, "--output-dir", str(tmp_path / "kept"), "--json")
    report = json.loads(told.out)
    assert (told.code, report["method"], report["step_time_s"]) == (0, "probe", 1.5)
    assert report["peak_allocated_bytes"] == 900 * MIB
    assert {pair["what"] for pair in report["compared"]} >= {"parameters", "optimizer_states", "peak"}
    assert "Measured on NVIDIA H200: reserved 0.93 GiB" in told.err
    assert read_run(tmp_path / "kept" / "record.json").measured.peak_allocated_bytes == 900 * MIB
    assert started[0]["capacity_bytes"] is None
    assert "not empty" in lcplan(*command, "--output-dir", str(tmp_path / "kept")).err
    shown = lcplan(*command, "--capacity", "80GB").out
    assert "it ran with no more than 74.51 GiB of GPU memory" in " ".join(shown.split())
    assert "difference" in shown


def test_layers_that_were_not_measured_are_added(monkeypatch: pytest.MonkeyPatch, lcplan) -> None:
    started = fake_run(monkeypatch, found())
    command = [
        "estimate",
        "Qwen/Qwen3-0.6B",
        "--max-length",
        "4Ki",
        "--gpu",
        "h200",
        "--method",
        "probe",
        "--layers",
        "4",
    ]
    told = lcplan(*command, "--json")
    report = json.loads(told.out)
    spec = load_model("Qwen/Qwen3-0.6B")
    plan = plan_of(spec, max_length=4096, gpu="h200")
    cut = with_layers(spec, 4)
    assert started[0]["job"].model.config["num_hidden_layers"] == 4
    whole, part = (formula.instants(each, plan).totals() for each in (spec, cut))
    step = 800 * MIB + whole["optimizer_step"] - part["optimizer_step"]
    assert {phase["phase"]: phase["allocated_bytes"] for phase in report["phases"]}["optimizer_step"] == step
    assert report["peak_allocated_bytes"] == step, "24 layers more have more states than 4,096 tokens take"
    assert any("28 layers: measured with 4" in said for said in report["assumptions"])
    assert report["step_time_s"] is None


def test_a_failed_probe_exits_1_with_what_the_allocator_held(monkeypatch: pytest.MonkeyPatch, lcplan) -> None:
    failed = found(exit_code=1, error="out of GPU memory: tried to allocate", allocator_summary="| allocated |")
    fake_run(monkeypatch, failed)
    told = lcplan("estimate", "Qwen/Qwen3-0.6B", "--max-length", "4Ki", "--gpu", "h200", "--method", "probe")
    assert (told.code, told.out) == (1, "")
    assert "The probe failed: out of GPU memory" in told.err
    assert "| allocated |" in told.err


def test_run_probe_measures_the_folder_it_wrote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lcplan) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A sentence of some words. " * 4000)
    started: list[dict] = []
    monkeypatch.setattr("lcplan.backends.launch.visible_gpus", lambda: ["NVIDIA H200"])
    monkeypatch.setattr("lcplan.job_run.start_probe", lambda folder, **given: started.append(given) or found())
    command = ["run", "Qwen/Qwen3-0.6B", "--init", "random", "--max-length", "4Ki", "--gpu", "h200", "--num-gpus", "2"]
    command += ["--cp-size", "2", "--data", str(text), "--probe", "--rank", "1", "--capacity", "80GB"]
    told = lcplan(*command, "--output-dir", str(tmp_path / "job"))
    assert told.code == 0, told.err
    assert started == [{"rank": 1, "cap": 80 * 10**9 - 2_156_789_760}]
    assert "difference" in told.out
    assert read_run(tmp_path / "job" / "record.json").rank == 1
    assert (tmp_path / "job" / "probe.py").is_file()
    monkeypatch.setattr("lcplan.job_run.start_probe", lambda folder, **given: found(exit_code=1, error="out of memory"))
    assert lcplan(*command, "--output-dir", str(tmp_path / "again")).code == 1
    refused = lcplan(*command[:-5], "--rank", "1", "--output-dir", str(tmp_path / "other"))
    assert refused.code == 2
    assert "Add --probe" in refused.err


def test_a_probe_that_should_save_checkpoints_is_refused(tmp_path: Path) -> None:
    spec = tiny_spec()
    text = tmp_path / "text.txt"
    text.write_text("A sentence of some words. " * 400)
    with pytest.raises(PlanError, match="save_strategy steps: a probe has no other ranks"):
        run_job(
            model=spec, plan=plan_of(spec, max_length=64), rope=None, prediction=None, init="random", probe=True,
            data=DataSource(kind="files", paths=(str(text),)), output_dir=tmp_path / "job",
            training=TrainingOptions(save_strategy="steps"),
        )  # fmt: skip
    assert not (tmp_path / "job").exists()
