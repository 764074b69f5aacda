from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from jobs import ROOT, contents, fsdp2_job, run_python, small_job

from lcplan import machine
from lcplan.backends import job, launch
from lcplan.backends.accelerate_yaml import accelerate_config
from lcplan.backends.job import ModelSource, render_job
from lcplan.doctor import GpuFact, MachineFacts
from lcplan.errors import EnvironmentProblem, LcplanError, PlanError
from lcplan.job_options import DataSource, TokenizerSource
from lcplan.job_run import run_job
from lcplan.ledger import RopeParameters
from lcplan.model_spec import ModelSpec
from lcplan.presets import list_presets, load_preset
from lcplan.train_plan import TrainPlan

FILES = {*job.SCRIPTS, "plan.json", "accelerate.yaml", "README.md"}
ROPE = RopeParameters(rope_type="yarn", factor=32, rope_theta=1e6, original_max_position_embeddings=32768)
TEMPLATES = Path(job.__file__).parent / "templates"


# --- the folder


def test_the_folder_holds_the_scripts_as_they_are_and_the_plan(tmp_path):
    asked = small_job(rope=ROPE, prediction={"peak_allocated_bytes": 3 * 2**30})
    folder = render_job(asked, tmp_path / "new" / "a job")
    assert {path.name for path in folder.iterdir()} == FILES
    for name in job.SCRIPTS:
        assert (folder / name).read_bytes() == (TEMPLATES / name).read_bytes()
        assert "lcplan" not in "".join(line for line in (folder / name).read_text().splitlines() if "import" in line)
    document = json.loads((folder / "plan.json").read_text())
    assert document == job.plan_document(asked)
    assert document["schema_version"] == 1
    assert document["plan"] == asked.plan.model_dump(mode="json")
    assert document["rope"] == {
        "rope_type": "yarn", "factor": 32.0, "rope_theta": 1e6, "original_max_position_embeddings": 32768,
    }  # fmt: skip
    assert document["model"]["config"]["hidden_size"] == 64
    readme = (folder / "README.md").read_text()
    assert "accelerate launch --config_file accelerate.yaml train.py" in readme
    assert "3.00 GiB (3221225472)" in readme
    assert '"factor": 32.0' in readme
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a job"]
    usual = tmp_path / "usual"
    usual.mkdir()
    assert folder.stat().st_mode == usual.stat().st_mode


def test_user_strings_stay_data(tmp_path):
    nasty = "\"'$(touch pwned) `touch pwned`; {{ 7*7 }} {% raw %}\n- key: [x]\n```\n"
    asked = small_job(
        model=ModelSource(id=nasty, init="random", config={"model_type": nasty}),
        data=DataSource(kind="files", paths=(nasty,), text_column=nasty),
        tokenizer=TokenizerSource(kind="pretrained", id=nasty),
    )
    folder = render_job(asked, tmp_path / "$(touch pwned) 'x'")
    document = json.loads((folder / "plan.json").read_text())
    assert document["model"]["id"] == nasty
    assert document["data"]["paths"] == [nasty]
    for name in job.SCRIPTS:
        assert (folder / name).read_bytes() == (TEMPLATES / name).read_bytes()
    assert yaml.safe_load((folder / "accelerate.yaml").read_text()) == job.accelerate_config(asked)
    assert "pwned" not in (folder / "accelerate.yaml").read_text()
    readme = (folder / "README.md").read_text()
    assert "{{ 7*7 }}" in readme
    assert "49" not in readme.split("## Plan")[0]
    assert not any(line.startswith("- key") for line in readme.splitlines())


def test_a_folder_in_use_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    before = contents(tmp_path)
    with pytest.raises(PlanError, match="is not empty.*--force") as caught:
        render_job(small_job(), tmp_path)
    assert caught.value.code == "output-not-empty"
    assert contents(tmp_path) == before
    with pytest.raises(PlanError, match="is a file"):
        render_job(small_job(), tmp_path / "mine.txt")
    assert contents(tmp_path) == before


def test_force_writes_beside_what_is_there(tmp_path):
    folder = tmp_path / "job"
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "mine.txt").write_text("keep me")
    (folder / "plan.json").write_text("an older job's")
    render_job(small_job(), folder, force=True)
    assert {path.name for path in folder.iterdir()} == FILES | {"notes"}
    assert (folder / "notes" / "mine.txt").read_text() == "keep me"
    assert json.loads((folder / "plan.json").read_text())["schema_version"] == 1


def test_an_empty_folder_will_do(tmp_path):
    (tmp_path / "job").mkdir()
    assert {path.name for path in render_job(small_job(), tmp_path / "job").iterdir()} == FILES


def test_nothing_is_left_when_writing_fails(tmp_path, monkeypatch):
    def fail(_job):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job, "readme_text", fail)
    with pytest.raises(EnvironmentProblem, match="cannot be written \\(No space left") as caught:
        render_job(small_job(), tmp_path / "job")
    assert caught.value.code == "output-not-writable"
    assert list(tmp_path.iterdir()) == []


# --- what a job refuses

GPU = GpuFact(name="A", total_bytes=80 << 30, free_bytes=79 << 30)


@pytest.mark.parametrize(
    ("plan", "device", "code", "fix"),
    [
        (
            {"backend": "deepspeed", "num_gpus": 4, "sp_size": 2, "zero_stage": 3},
            "gpu",
            "parallel-sizes",
            "--dp-shard-size 2",
        ),
        (
            {"backend": "deepspeed", "num_gpus": 2, "sp_size": 2, "zero_stage": 3, "per_device_eval_batch_size": 1},
            "gpu",
            "eval-with-sp",
            "--sp-size 2",
        ),
        (
            {"backend": "deepspeed", "num_gpus": 2, "dp_shard_size": 2, "lora_r": 8, "quantize": "nf4"},
            "gpu",
            "quantize-deepspeed",
            "--backend fsdp2",
        ),
        ({"backend": "single", "num_gpus": 2}, "gpu", "parallel-sizes", "--num-gpus 1"),
        ({"backend": "fsdp2", "num_gpus": 8, "cp_size": 2}, "gpu", "parallel-sizes", "--dp-shard-size 4"),
        ({"backend": "fsdp2", "num_gpus": 4, "cp_size": 4, "max_length": 1001}, "gpu", "length-multiple", "1008"),
        ({"backend": "fsdp2", "num_gpus": 2, "dp_shard_size": 2}, "cpu", "cpu-plan", "one process"),
        ({"padding": True}, "gpu", "padding-joined", "--padding"),
        ({"scored_fraction": 0.5}, "gpu", "scored-fraction-joined", "--scored-fraction 0.5"),
        ({"packing": True}, "gpu", "lever-not-available", "--packing"),
    ],
)
def test_a_job_that_cannot_be_generated_is_refused(tmp_path, plan, device, code, fix):
    with pytest.raises(PlanError) as caught:
        render_job(small_job(plan=plan, device=device), tmp_path / "job")
    assert caught.value.code == code
    assert fix in caught.value.message
    assert list(tmp_path.iterdir()) == []


def try_run(folder, *, device="cpu", **plan):
    smoke = load_preset("smoke")
    assert smoke.config is not None
    model = ModelSpec.from_config(smoke.config, "m")
    return run_job(
        model=model, plan=TrainPlan(**{**smoke.plan, **plan}), rope=None, prediction=None, data=smoke.data,
        output_dir=folder, init="random", device=device, training=smoke.training,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("setup", "given", "code", "fix"),
    [
        ({"versions": {}}, {}, "missing-extra", "pip install 'lcplan[train]'"),
        ({"trl": "1.15.0"}, {"loss": "full"}, "loss-full-unavailable", "--loss chunked"),
        ({"gpus": ()}, {"device": "gpu"}, "no-gpu", "--dry-run"),
        (
            {"gpus": (GPU,)},
            {"device": "gpu", "backend": "fsdp2", "num_gpus": 2, "cp_size": 2, "gpus_per_node": 2},
            "too-few-gpus",
            "1 GPU(s) are visible: A",
        ),
        (
            {"gpus": (GPU,) * 8},
            {"device": "gpu", "backend": "fsdp2", "num_gpus": 16, "cp_size": 16, "gpus_per_node": 8},
            "several-nodes",
            "2 nodes",
        ),
    ],
)
def test_a_machine_that_cannot_run_the_job_is_told_so_and_nothing_is_written(
    tmp_path, monkeypatch, setup, given, code, fix
):
    facts = MachineFacts(
        python=(3, 11),
        versions=setup.get("versions", dict.fromkeys(launch.TRAIN_PACKAGES, "99.0")),
        gpus=setup.get("gpus", ()),
    )
    monkeypatch.setattr(launch, "installed_versions", lambda: {"trl": setup.get("trl", "1.14.0")})
    monkeypatch.setattr(machine, "collect", lambda *args, **kwargs: facts)
    with pytest.raises(LcplanError) as caught:
        try_run(tmp_path / "job", **given)
    assert caught.value.code == code
    assert fix in caught.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "refused"),
    [("1.13.0", False), ("1.14.1", False), ("1.15.0", True), ("1.16.0.dev0", True), ("2.0", True), (None, False)],
)
def test_full_logits_end_with_trl_1_14(version, refused):
    launch.check_loss("chunked", version)
    if not refused:
        launch.check_loss("full", version)
        return
    with pytest.raises(PlanError, match=r"trl<1\.15"):
        launch.check_loss("full", version)


def test_a_plan_that_does_not_fit_needs_force(tmp_path, capsys):
    smoke = load_preset("smoke")
    model = ModelSpec.from_config(smoke.config, "m")
    settings = {
        "model": model, "plan": TrainPlan(**smoke.plan), "rope": None, "prediction": None, "data": smoke.data,
        "output_dir": tmp_path / "job", "init": "random", "refusal": "too big.", "dry_run": True,
    }  # fmt: skip
    assert run_job(**settings) == 1
    assert list(tmp_path.iterdir()) == []
    assert "does not fit: too big. --force" in capsys.readouterr().err
    assert run_job(**settings, force=True) == 0
    out = capsys.readouterr().out
    assert out == f"cd {tmp_path / 'job'} && accelerate launch --config_file accelerate.yaml train.py\n"


# --- accelerate's YAML, read by accelerate


def test_yaml_of_one_process():
    gpu = accelerate_config(TrainPlan(max_length=64, gpu="h200"))
    assert (gpu["distributed_type"], gpu["num_processes"], gpu["mixed_precision"], gpu["use_cpu"]) == (
        "NO", 1, "bf16", False,
    )  # fmt: skip
    cpu = accelerate_config(TrainPlan(max_length=64, gpu="cpu"), device="cpu")
    assert (cpu["mixed_precision"], cpu["use_cpu"]) == ("no", True)


LAUNCHER = """
import json, os, sys
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
config = load_config_from_file(sys.argv[1])
assert type(config) is ClusterConfig, config
args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", sys.argv[1], "train.py"]))
wanted = ("FSDP_", "PARALLELISM_", "ACCELERATE_USE", "ACCELERATE_MIXED")
env = prepare_multi_gpu_env(args) if args.use_fsdp else {}
print(json.dumps({
    "type": config.distributed_type.value, "processes": args.num_processes, "fsdp": args.use_fsdp,
    "machines": args.num_machines, "cpu": args.use_cpu, "mixed": args.mixed_precision,
    "env": {key: value for key, value in env.items() if key.startswith(wanted)},
}))
"""


@pytest.mark.train
def test_accelerate_reads_what_was_meant(tmp_path):
    plan = TrainPlan(
        max_length=4096, gpu="h100-80gb", num_gpus=8, gpus_per_node=8, backend="fsdp2", cp_size=4, dp_shard_size=2,
        cp_comm_strategy="alltoall", offload_params=True,
    )  # fmt: skip
    (tmp_path / "sharded.yaml").write_text(yaml.safe_dump(accelerate_config(plan)))
    one = accelerate_config(TrainPlan(max_length=64, gpu="h200"))
    (tmp_path / "single.yaml").write_text(yaml.safe_dump(one))
    done = run_python("-c", LAUNCHER, "sharded.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["type"], seen["processes"], seen["machines"], seen["fsdp"]) == ("FSDP", 8, 1, True)
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
        "PARALLELISM_CONFIG_CP_SIZE": "4",
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall",
        "PARALLELISM_CONFIG_TP_SIZE": "1",
        "PARALLELISM_CONFIG_SP_SIZE": "1",
    }
    assert {key: seen["env"].get(key) for key in expected} == expected
    done = run_python("-c", LAUNCHER, "single.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["type"], seen["processes"], seen["fsdp"], seen["mixed"]) == ("NO", 1, False, "bf16")


# --- the arguments that train.py builds, accepted by the installed TRL

ARGUMENTS = """
import json, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1])))
import arguments, train
from trl import SFTConfig
for folder in sys.argv[1:]:
    job = json.loads(Path(folder, "plan.json").read_text())
    built = arguments.sft_arguments(job)
    plan = job["plan"]
    assert built["bf16"] is (job["device"] == "gpu")
    assert built["loss_type"] == "nll"
    config = SFTConfig(**{**built, "use_cpu": True, "bf16": False})
    assert config.gradient_checkpointing is (plan["activation_checkpointing"] != "none")
    kwargs = config.gradient_checkpointing_kwargs or {}
    ours = arguments.keeps_attention_on_host(plan)
    assert kwargs.get("offload", False) is (plan["offload_activations"] and not ours), kwargs
    assert config.max_length == plan["max_length"]
    assert config.max_steps == job["training"]["max_steps"]
assert arguments.loss_type("chunked", None) == "chunked_nll"
assert arguments.loss_type("full", None) == "nll"
assert arguments.loss_type("chunked", "nll") == "nll"
try:
    arguments.loss_type("full", "nll")
except arguments.JobError as error:
    assert "--loss chunked" in str(error)
else:
    raise AssertionError("full logits on a TRL without them")
selective = {"checkpoint_every_n_layers": 2, "activation_checkpointing": "selective", "offload_activations": False}
wanted = {"every_n_layers": 2, "use_reentrant": False}
assert arguments.checkpointing_kwargs({**plan, **selective}) == {**wanted, "selective": True}
assert arguments.checkpointing_kwargs({**plan, **selective, "offload_activations": True}) == wanted
plan = {**plan, "checkpoint_every_n_layers": 2, "activation_checkpointing": "full", "offload_activations": True}
assert arguments.checkpointing_kwargs(plan) == {**wanted, "offload": True}
arguments.PreTrainedModel.activation_checkpointing_enable = lambda self, activation_checkpointing_kwargs=None: None
try:
    arguments.checkpointing_kwargs(plan)
except arguments.JobError as error:
    assert "every_n_layers, offload" in str(error), error
else:
    raise AssertionError("offload on a transformers without it")
for cp_size, sp_size, length in ((4, 1, 1000), (1, 1, 1001), (1, 3, 999)):
    assert arguments.row_length({"max_length": 1001, "cp_size": cp_size, "sp_size": sp_size}) == length
"""


@pytest.mark.train
def test_trl_accepts_the_arguments_of_every_preset(tmp_path):
    for name in list_presets():
        preset = load_preset(name)
        asked = small_job(
            plan=None, device=preset.device, training=preset.training.model_dump(exclude_unset=True)
        ).model_copy(update={"plan": TrainPlan(**preset.plan)})
        render_job(asked, tmp_path / name)
    done = run_python("-c", ARGUMENTS, *(str(tmp_path / name) for name in list_presets()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# --- the launcher


def test_the_launcher_passes_on_exit_code_folder_and_environment(tmp_path):
    code = "import os, sys; sys.exit(7 if os.environ['X'] == 'y z' and os.getcwd() == sys.argv[1] else 1)"
    command = [sys.executable, "-c", code, str(tmp_path.resolve())]
    assert launch.stream(command, tmp_path, {**os.environ, "X": "y z"}) == 7
    killed = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    assert launch.stream(killed, tmp_path, dict(os.environ)) == 128 + signal.SIGKILL


def test_what_the_job_prints_goes_to_stderr(tmp_path, capfd):
    launch.stream([sys.executable, "-c", "print('step 1')"], tmp_path, dict(os.environ))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "step 1\n")


def test_a_signal_reaches_the_job_and_its_children(tmp_path):
    child = "import time; open('started', 'w').close(); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    code = (
        "import os, sys; from pathlib import Path; from lcplan.backends import launch; "
        f"sys.exit(launch.stream([sys.executable, '-c', {parent!r}], Path({str(tmp_path)!r}), dict(os.environ)))"
    )
    running = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ROOT})
    deadline = time.monotonic() + 20
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    before = time.monotonic()
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=20) == 128 + signal.SIGTERM
    assert time.monotonic() - before < 15
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert left.stdout == ""


def test_the_environment_of_a_job(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert launch.job_environment("gpu", offline=False)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "HF_HUB_OFFLINE" not in launch.job_environment("gpu", offline=False)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in launch.job_environment("cpu", offline=True)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "mine")
    assert launch.job_environment("gpu", offline=True)["PYTORCH_CUDA_ALLOC_CONF"] == "mine"
    assert not launch.needs_hub(small_job())
    assert launch.needs_hub(small_job(data=DataSource(kind="hub", name="emozilla/pg19")))
    assert launch.needs_hub(fsdp2_job().model_copy(update={"model": ModelSource(id="Qwen/Qwen3-8B")}))
