"""Every finding of the doctor from made-up facts, and the facts of this machine."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from lcplan import machine, preflight
from lcplan.doctor import GpuFact, MachineFacts, Need, TorchFacts, diagnose, reds, release
from lcplan.job_options import TrainingOptions
from tests.conftest import plan_of, tiny_spec

GIB = 1 << 30
STACK = {"torch": "2.13.0+cpu", "transformers": "5.24.0", "accelerate": "1.15.0", "trl": "1.16.0", "datasets": "5.2.0"}
GPU = GpuFact(name="NVIDIA H100", total_bytes=80 * GIB, free_bytes=79 * GIB)
TORCH = TorchFacts(cuda="13.0", cuda_available=True, cudnn=91300, nccl="2.28.9", sdpa_kernel="flash")


def facts(**changes: Any) -> MachineFacts:
    """A node of eight GPUs on which nothing is wrong."""
    good: dict[str, Any] = {
        "python": (3, 11), "versions": STACK, "torch": TORCH, "gpus": (GPU,) * 8, "host_total_bytes": 2000 * GIB,
        "host_available_bytes": 1900 * GIB, "shm_free_bytes": 500 * GIB, "disk_free_bytes": 9000 * GIB,
    }  # fmt: skip
    return MachineFacts(**{**good, **changes})


def need(**changes: Any) -> Need:
    """Eight GPUs, offload, checkpoints."""
    usual: dict[str, Any] = {
        "gpu": "h100-80gb", "num_gpus": 8, "gpus_per_node": 8, "device_peak_bytes": 60 * GIB,
        "host_bytes_per_node": 288 * GIB, "pinned_bytes_per_node": 288 * GIB, "load_bytes_per_node": 31 * GIB,
        "checkpoint_bytes": 92 * GIB, "num_checkpoints": 3, "saved_model_bytes": 31 * GIB,
    }  # fmt: skip
    return Need(**{**usual, **changes})


def changed_torch(**changes: Any) -> dict[str, Any]:
    return {"torch": TORCH.model_copy(update=changes)}


def test_a_good_node_is_green() -> None:
    findings = diagnose(need(), facts())
    assert {finding.level for finding in findings} == {"green"}
    codes = {finding.code for finding in findings}
    assert codes == {
        "python", "stack", "torch-cuda", "cudnn", "gpus", "host", "fits", "gpu-memory", "attention", "host-memory",
        "shm", "nccl", "disk",
    }  # fmt: skip
    assert all(finding.message.endswith(".") for finding in findings)


WRONG: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("python-too-old", "red", {"python": (3, 9)}, {}, "3.9"),
    ("missing-extra", "red", {"versions": {}}, {}, "pip install 'lcplan[train]'"),
    ("missing-extra", "red", {}, {"packages": (*STACK, "peft")}, "pip install 'lcplan[peft]'"),
    ("missing-extra", "red", {}, {"packages": (*STACK, "deepspeed")}, "pip install 'lcplan[deepspeed]'"),
    ("missing-extra", "red", {}, {"packages": (*STACK, "peft", "bitsandbytes")}, "'lcplan[peft,quantize]'"),
    ("too-old", "red", {"versions": {**STACK, "trl": "1.12.3"}}, {}, "trl 1.12.3 (needs 1.13)"),
    ("torch-broken", "red", changed_torch(error="no libcudart"), {}, "no libcudart"),
    ("torch-sees-no-gpu", "red", changed_torch(cuda=None, cuda_available=False), {}, "built without CUDA"),
    ("torch-sees-no-gpu", "red", changed_torch(cuda_available=False), {}, "built for CUDA 13.0"),
    ("hidden-cudnn", "yellow", {"hidden_cudnn": "/opt/old"}, {}, "/opt/old"),
    ("no-cudnn", "yellow", changed_torch(cudnn=None), {}, "no cuDNN"),
    ("does-not-fit", "red", {}, {"refusal": "the plan needs 90 GiB."}, "90 GiB"),
    ("no-gpu", "red", {"gpus": ()}, {}, "needs 8 GPU(s), and no CUDA GPU is visible"),
    ("too-few-gpus", "red", {"gpus": (GPU,)}, {}, "1 GPU(s) are visible: NVIDIA H100"),
    ("several-nodes", "red", {}, {"num_gpus": 16}, "2 nodes"),
    ("several-nodes", "red", {}, {"num_gpus": 2, "gpus_per_node": 1, "device": "cpu"}, "--gpus-per-node 2"),
    ("gpu-too-small", "red", {}, {"device_peak_bytes": 81 * GIB}, "81.00 GiB a GPU, and a NVIDIA H100 has 80.00 GiB"),
    (
        "gpu-in-use", "red", {"gpus": (*(GPU,) * 7, GPU.model_copy(update={"free_bytes": 50 * GIB}))}, {},
        "other processes hold 30.00 GiB",
    ),
    ("lever-not-installed", "red", changed_torch(missing_features=("--offload-activations",)), {}, "--offload-act"),
    ("slow-attention", "red", changed_torch(sdpa_kernel="math"), {}, "square of the sequence"),
    ("slow-attention", "yellow", changed_torch(sdpa_kernel="efficient"), {}, "slower"),
    ("host-memory", "red", {"host_available_bytes": 200 * GIB}, {}, "288.00 GiB pinned"),
    (
        "host-memory", "red", {"cgroup_limit_bytes": 256 * GIB, "cgroup_used_bytes": 6 * GIB}, {},
        "250.00 GiB are free (the cgroup allows 256.00 GiB)",
    ),
    ("memlock", "yellow", {"memlock_bytes": 8 << 20}, {}, "ulimit -l unlimited"),
    ("memlock", "yellow", {"memlock_bytes": 900 * GIB}, {"num_gpus": 16, "launcher": "print"}, "InfiniBand"),
    ("shm", "red", {"shm_free_bytes": 64 << 20}, {}, "--ipc=host"),
    ("shm", "yellow", {"shm_free_bytes": 512 << 20}, {}, "--shm-size"),
    ("no-nccl", "red", changed_torch(nccl=None), {}, "without NCCL"),
    ("port-in-use", "yellow", {"port_is_free": False}, {}, "29500"),
    ("host-name", "yellow", {"host_name_resolves": False}, {}, "/etc/hosts"),
    ("output-not-writable", "red", {"output_writable": False, "output_dir": "/ro"}, {}, "/ro cannot be written"),
    ("disk", "red", {"disk_free_bytes": 300 * GIB}, {}, "3 checkpoint(s) of 92.00 GiB, final model 31.00 GiB"),
    ("data-too-short", "red", {"data_problem": ("data-too-short", "the data holds 3 tokens.")}, {}, "3 tokens"),
    ("weights-missing", "red", {"sources": {"weights": ("me/x", "missing")}}, {}, "'me/x' cannot be found"),
    ("tokenizer-missing", "red", {"sources": {"tokenizer": ("me/x", "missing")}}, {}, "--tokenizer"),
    ("data-unreachable", "yellow", {"sources": {"data": ("me/x", "unreachable")}}, {}, "does not answer"),
    (
        "weights-unreachable", "yellow", {"sources": {"weights": ("me/x", "unreachable")}, "offline": True}, {},
        "HF_HUB_OFFLINE is set",
    ),
    ("no-sbatch", "red", {}, {"launcher": "slurm"}, "sbatch"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "level", "fact", "plan", "words"), WRONG, ids=[f"{w[0]}-{w[1]}" for w in WRONG])
def test_what_is_wrong_is_found(code: str, level: str, fact: dict[str, Any], plan: dict[str, Any], words: str) -> None:
    findings = diagnose(need(**plan), facts(**fact))
    found = [finding for finding in findings if finding.code == code]
    assert [finding.level for finding in found] == [level]
    assert words in f"{found[0].message} {found[0].fix}"
    assert {finding.code for finding in findings if finding.level != "green"} == {code}, "and nothing else"
    order = [("red", "yellow", "green").index(finding.level) for finding in findings]
    assert order == sorted(order)
    assert bool(reds(findings)) is (level == "red")


def test_what_does_not_concern_the_plan_is_left_out() -> None:
    bare = facts(gpus=(), torch=None, shm_free_bytes=1, memlock_bytes=1, port_is_free=False, disk_free_bytes=None)
    assert not reds(diagnose(Need(device="cpu"), bare))
    assert not reds(diagnose(need(launcher="slurm"), bare.model_copy(update={"has_sbatch": True})))
    assert not reds(diagnose(None, bare.model_copy(update={"nvml_error": "no driver"})))


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("1.16.0.dev0", (1, 16, 0)), ("5", (5,)), ("x", ())]
)
def test_release(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


# --- what a plan needs


def test_the_need_of_a_plan() -> None:
    spec = tiny_spec()
    plan = plan_of(spec, max_length=64, lora_r=4, quantize="nf4", offload_activations=True)
    found = preflight.need_of(spec, plan, None, TrainingOptions())
    assert found.packages[5:] == ("peft", "bitsandbytes")
    assert found.disk_bytes == 0
    assert preflight.levers_of(plan) == {"offload": "--offload-activations"}
    from lcplan import estimate, load_gpu

    report = estimate(spec, plan_of(spec, max_length=64), load_gpu("h200"))
    training = TrainingOptions(save_strategy="steps", save_steps=10, max_steps=100)
    found = preflight.need_of(spec, plan_of(spec, max_length=64), report, training)
    assert found.device_peak_bytes == report.device_peak_bytes
    assert found.disk_bytes == 3 * report.disk.checkpoint_bytes + report.disk.saved_model_bytes


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 0),
        ({"save_strategy": "steps", "save_steps": 100, "max_steps": 100}, 1),
        ({"save_strategy": "steps", "save_steps": 10, "max_steps": 100}, 3),
        ({"save_strategy": "steps", "save_steps": 10, "max_steps": 100, "save_total_limit": None}, 10),
        ({"save_strategy": "epoch", "num_train_epochs": 2.0}, 2),
        ({"save_strategy": "steps"}, 3),
    ],
)
def test_checkpoints_on_the_disk_at_once(options: dict[str, Any], count: int) -> None:
    assert preflight.checkpoints_kept(TrainingOptions(**options)) == count


# --- the facts of a machine


def test_this_machine_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.collect(tmp_path / "not" / "there", ask_torch=False)
    assert found.python == sys.version_info[:2]
    assert found.output_writable
    assert found.disk_free_bytes
    assert found.offline
    assert list(tmp_path.iterdir()) == []
    if "psutil" in sys.modules:
        assert found.host_available_bytes
        assert found.host_total_bytes
        assert found.host_available_bytes <= found.host_total_bytes


@pytest.mark.train
def test_torch_is_asked_in_a_process_of_its_own() -> None:
    from importlib.metadata import version

    found, gpus = machine.torch_facts({"levers": {"offload": "--offload-activations", "no_such": "--no-such"}})
    assert found is not None
    assert found.error is None
    assert found.missing_features == ("--no-such",)
    if "+cpu" in version("torch"):
        assert (found.cuda, found.cuda_available, gpus) == (None, False, ())


def test_a_torch_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "versions", lambda: {"torch": "2.13.0"})
    monkeypatch.setattr(machine, "_ASK_TORCH", "raise SystemExit('libcudart is missing')")
    found, _ = machine.torch_facts({})
    assert found is not None
    assert "libcudart is missing" in (found.error or "")
    monkeypatch.setattr(machine, "versions", dict)
    assert machine.torch_facts({}) == (None, ())


def cgroup(root: Path, limits: dict[str, tuple[str, int]], names: tuple[str, str]) -> None:
    for path, (limit, used) in limits.items():
        folder = root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")


def test_cgroup_2_takes_the_tightest_of_the_branch(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/slurm/job_7/step_0\n")
    names = ("memory.max", "memory.current")
    cgroup(tmp_path / "cg", {"slurm/job_7": (str(100 * GIB), 10 * GIB), "slurm/job_7/step_0": ("max", 5)}, names)
    assert machine.cgroup_memory(tmp_path / "cg", own) == (100 * GIB, 10 * GIB)
    cgroup(tmp_path / "cg", {"slurm": (str(101 * GIB), 90 * GIB)}, names)
    assert machine.cgroup_memory(tmp_path / "cg", own) == (101 * GIB, 90 * GIB), "less is left above"


def test_cgroup_1_and_none(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    # inside a container the root of the tree is the container's own group
    cgroup(tmp_path / "cg" / "memory", {".": (str(64 * GIB), GIB)}, names)
    assert machine.cgroup_memory(tmp_path / "cg", own) == (64 * GIB, GIB)
    cgroup(tmp_path / "cg" / "memory", {".": (str((1 << 63) - 4096), GIB)}, names)
    assert machine.cgroup_memory(tmp_path / "cg", own) == (None, 0)
    assert machine.cgroup_memory(tmp_path / "cg", tmp_path / "missing") == (None, 0)


def test_a_port_in_use() -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        assert not machine.port_is_free(server.getsockname()[1])


def test_a_folder_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.is_writable(tmp_path)
    if Path("/proc/self").is_dir():
        assert not machine.is_writable(Path("/proc/self"))
    assert machine.nearest_folder(tmp_path / "a" / "b") == tmp_path


class Nvml:
    """The library of a driver with four GPUs."""

    class NVMLError(Exception):
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, text: str) -> int:  # noqa: N802
        if text != "GPU-abc":
            raise self.NVMLError
        return 2

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return f"G{handle}".encode()

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return type("Info", (), {"total": 80 * GIB, "free": handle * GIB})()


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, "G0 G1 G2 G3"), ("", ""), ("3,1", "G3 G1"), ("1,7,2", "G1"), ("GPU-abc", "G2"), ("GPU-x,0", "")],
)
def test_gpus_as_cuda_would_see_them(monkeypatch: pytest.MonkeyPatch, visible: str | None, names: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())  # type: ignore[arg-type]
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus, error = machine.nvml_gpus()
    assert error is None
    assert [gpu.name for gpu in gpus] == names.split()
    assert all(gpu.free_bytes == int(gpu.name[1:]) * GIB for gpu in gpus)


def test_without_the_drivers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.nvml_gpus() == ((), "nvidia-ml-py is not installed")


def test_whether_a_source_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert machine.presence(str(tmp_path), kind="model", file="config.json") == "present"
    assert machine.presence(str(tmp_path), kind="model", file="tokenizer_config.json") == "missing"
    assert machine.presence("nobody/nothing", kind="model", file="config.json") == "unreachable", "offline"
    assert machine.presence("not a name//", kind="model", file=None) == "missing"


# --- on the command line


def test_doctor_of_a_plan(lcplan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "collect", lambda *args, **kwargs: facts(output_dir=str(tmp_path)))
    result = lcplan("doctor", "--preset", "qwen3-8b-1m", "--json")
    answer = json.loads(result.out)
    assert result.code == 0, answer
    assert answer["passed"]
    assert answer["plan"]["cp_size"] == 8
    assert {"weights-unreachable", "tokenizer-unreachable", "data-unreachable"} == {
        finding["code"] for finding in answer["findings"] if finding["level"] == "yellow"
    }
    text = lcplan("doctor", "--preset", "qwen3-8b-1m", "--max-length", "4Mi")
    assert text.code == 1
    assert text.out.startswith("red    [does-not-fit] the plan needs")
    assert "2 in the way; run would refuse without --force." in text.out
    bad = lcplan("doctor", "--preset", "qwen3-8b-1m", "--data", "missing.txt")
    assert bad.code == 1
    assert "[data-not-found]" in bad.out
    assert lcplan("doctor", "--preset", "nothing").code == 2


def test_doctor_of_a_machine(lcplan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "collect", lambda *args, **kwargs: facts(gpus=()))
    result = lcplan("doctor")
    assert result.code == 0
    assert "Nothing is in the way." in result.out


def test_run_refuses_what_is_red_and_force_starts_it(
    lcplan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lcplan import job_run

    monkeypatch.setattr(machine, "collect", lambda *args, **kwargs: facts(disk_free_bytes=1, port_is_free=False))
    started: list[Path] = []
    monkeypatch.setattr(job_run, "_start", lambda job, folder, **kwargs: started.append(folder) or 0)
    arguments = ("run", "--preset", "qwen3-8b-1m", "--init", "random", "--data", "python-docs", "--force")
    folder = tmp_path / "job"
    result = lcplan(*arguments[:-1], "--output-dir", str(folder))
    assert result.code == 2
    assert "error [disk]: the job writes 30.51 GiB" in result.err
    assert "--force starts it all the same." in result.err
    assert "warning [port-in-use]" in result.err
    assert not folder.exists()
    assert started == []
    result = lcplan(*arguments, "--output-dir", str(folder))
    assert result.code == 0
    assert "warning [disk]" in result.err
    assert started == [folder]


def test_run_never_starts_what_does_not_fit(lcplan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "collect", lambda *args, **kwargs: facts())
    given = ("run", "--preset", "qwen3-8b-1m", "--max-length", "4Mi", "--data", "python-docs", "--init", "random")
    result = lcplan(*given, "--output-dir", str(tmp_path / "job"))
    assert result.code == 1
    assert "does not fit: the plan needs" in result.err
    assert list(tmp_path.iterdir()) == []


def test_other_launchers_do_not_ask_this_machine_for_gpus(lcplan: Any, tmp_path: Path) -> None:
    given = ("run", "--preset", "qwen3-8b-1m", "--data", "python-docs", "--num-gpus", "16", "--cp-size", "16")
    result = lcplan(*given, "--launcher", "print", "--output-dir", str(tmp_path / "job"))
    assert result.code == 0, result.err
    assert [line.split("--machine_rank ")[1][0] for line in result.out.splitlines()] == ["0", "1"]
    result = lcplan(*given, "--launcher", "slurm", "--dry-run", "--slurm", "time=8:00:00", "--output-dir",
                    str(tmp_path / "two"))  # fmt: skip
    assert result.code == 0, result.err
    assert result.out == f"cd {tmp_path / 'two'} && sbatch job.sbatch\n"
    assert "#SBATCH --time=8:00:00" in (tmp_path / "two" / "job.sbatch").read_text()
    for wrong, code in (
        (("--launcher", "pbs"), "bad-choice"),
        (("--slurm", "time=1"), "slurm-only"),
        (("--launcher", "slurm", "--probe"), "probe-only"),
        (("--resume", str(tmp_path / "two")), "resume-alone"),
    ):
        refused = lcplan(*given, *wrong, "--output-dir", str(tmp_path / "three"))
        assert (refused.code, code in refused.err) == (2, True), refused.err
    assert not (tmp_path / "three").exists()
