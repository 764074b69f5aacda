"""The Slurm launcher: its script as text, and a real Slurm of two emulated nodes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, fsdp2_job, small_job

from lcplan.backends import slurm
from lcplan.backends.job import JobSpec, render_job
from lcplan.backends.launch import free_port
from lcplan.backends.templates import checkpoints, journal
from lcplan.errors import EnvironmentProblem, InputError

# --- the script


def directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    return dict(line.partition("=")[::2] for line in lines)


def check_syntax(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_script_of_two_nodes() -> None:
    job = fsdp2_job(num_gpus=16, gpus_per_node=8, dp_shard_size=16)
    text = slurm.batch_script(job, Path("/runs/a job"), options={"partition": "long", "time": "12:00:00"}, notice_s=900)
    check_syntax(text)
    assert directives(text) == {
        "job-name": "lcplan", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "signal": "B:TERM@900",
        "open-mode": "append", "partition": "long", "time": "12:00:00", "requeue": "",
    }  # fmt: skip
    assert "cd -- '/runs/a job' || exit 2" in text
    assert '--machine_rank "$SLURM_NODEID" --main_process_ip "$ADDRESS" --main_process_port "$PORT"' in text
    assert "scontrol show node" in text
    one = slurm.batch_script(fsdp2_job(), Path("/runs/x"), options={})
    check_syntax(one)
    assert "--machine_rank" not in one


def test_a_folder_name_is_no_shell_code(tmp_path: Path) -> None:
    folder = tmp_path / "$(touch pwned) `touch pwned` 'x' \"y\";touch pwned"
    folder.mkdir()
    text = slurm.batch_script(small_job(), folder, options={}, python="/bin/true")
    check_syntax(text)
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    tools = tmp_path / "bin"
    tools.mkdir()
    # srun runs what it is given
    for name, does in (("srun", 'shift; exec "$@"'), ("scontrol", "exit 0")):
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    "text", ["partition", "partition=", "=long", "partition=a b", "partition=$(x)", "Comment=x", "a=b\n#SBATCH -p x",
             "comment='x'", "nodes=3", "wrap=ls", "signal=TERM"],
)  # fmt: skip
def test_bad_options_are_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        slurm.parse_options([text])
    assert caught.value.code == "bad-slurm-option"


def test_good_options() -> None:
    asked = ["partition=long", "time=1-12:00:00", "mail-user=me@example.org", "constraint=h100&nvlink"]
    with pytest.raises(InputError):
        slurm.parse_options(asked)  # & is read by a shell
    assert slurm.parse_options(asked[:3]) == {
        "partition": "long", "time": "1-12:00:00", "mail-user": "me@example.org",
    }  # fmt: skip


def test_the_notice_covers_two_steps_and_a_checkpoint() -> None:
    assert slurm.notice_seconds(None, 0) == 120
    assert slurm.notice_seconds(380.0, 100 * 10**9) == 760 + 200


def test_one_command_for_each_node() -> None:
    job = fsdp2_job(num_gpus=16, gpus_per_node=8, dp_shard_size=16)
    commands = slurm.node_commands(job, Path("/runs/a job"))
    assert commands == [
        "cd '/runs/a job' && accelerate launch --config_file accelerate.yaml --machine_rank "
        f"{rank} --main_process_ip HOST --main_process_port 29500 train.py"
        for rank in range(2)
    ]
    assert slurm.node_commands(fsdp2_job(), Path("/x")) == [
        "cd /x && accelerate launch --config_file accelerate.yaml train.py"
    ]


def test_without_slurm_the_submission_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="sbatch is not on PATH"):
        slurm.submit(tmp_path)


# --- a real one

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
ENDS_WITHIN_S = 240


def missing() -> str | None:
    absent = [name for name in COMMANDS if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None]
    if absent:
        return f"needs slurm-wlm and munge: {', '.join(absent)} not found"
    return None if os.geteuid() == 0 else "needs root"


def tool(name: str) -> str:
    return shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") or name


def start_munge(folder: Path) -> Path:
    (folder / "key").mkdir(mode=0o700)
    key = folder / "key" / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    (folder / "run").mkdir(mode=0o755)
    (folder / "run").chmod(0o755)
    path = folder / "run" / "munge.sock"
    files = {"pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munged.seed"}
    options = [f"--{name}={folder / 'key' / file}" for name, file in files.items()]
    subprocess.run([tool("munged"), f"--key-file={key}", f"--socket={path}", *options], check=True)
    return path


def write_config(folder: Path, munge: Path) -> Path:
    host, ports = socket.gethostname().split(".")[0], [free_port() for _ in range(4)]
    text = f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={munge}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
KillWait=5
RequeueExit=99
SchedulerParameters=sched_interval=1,bf_interval=1
GresTypes=gpu
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000 Gres=gpu:2
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
    config = folder / "slurm.conf"
    config.write_text(text)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    for name in ("state", "spool-node1", "spool-node2"):
        (folder / name).mkdir()
    return config


def poll(what: str, test: Any, seconds: float, log: Any = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not test():
        if time.monotonic() > deadline:
            pytest.fail(f"no {what} within {seconds:.0f} s: {log()}")
        time.sleep(0.2)


def ask(*command: str) -> str:
    return subprocess.run([tool(command[0]), *command[1:]], capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """Two nodes of two "GPUs" each, on this machine; stopped by the process numbers that they wrote."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    # munge's socket must be open to all, and pytest's own folders are not
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    patch = pytest.MonkeyPatch()
    try:
        config = write_config(folder, start_munge(folder))
        patch.setenv("SLURM_CONF", str(config))
        patch.setenv("PATH", os.environ["PATH"] + ":/usr/sbin:/sbin")
        subprocess.run([tool("slurmctld")], check=True)
        for node in ("node1", "node2"):
            subprocess.run([tool("slurmd"), "-N", node], check=True)
        poll("idle nodes", lambda: set(ask("sinfo", "-h", "-o", "%T").split()) == {"idle"}, 60)
        yield folder
    finally:
        ask("scancel", "--user=root")
        time.sleep(1)
        patch.undo()
        for path in (*folder.glob("slurmd-*.pid"), folder / "slurmctld.pid", folder / "key" / "munged.pid"):
            stop(path)
        shutil.rmtree(folder, ignore_errors=True)


def stop(pid_file: Path) -> None:
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, 15)
    except (OSError, ValueError):
        return
    for _ in range(50):
        if journal.process_state(pid) in (None, "Z"):
            return
        time.sleep(0.1)
    os.kill(pid, 9)


def spread_job(folder: Path, **training: Any) -> tuple[Path, JobSpec]:
    """Two processes on two nodes, without GPUs."""
    sizes = {"max_length": 64, "per_device_train_batch_size": 1, "num_gpus": 2, "gpus_per_node": 1}
    job = small_job(plan={**sizes, "backend": "ddp", "dp_replicate_size": 2}, training=training)
    render_job(job, folder)
    (folder / slurm.SCRIPT).write_text(slurm.batch_script(job, folder, options={"mem": "1000"}))
    return folder, job


def log_of(folder: Path) -> str:
    return "".join(path.read_text()[-4000:] for path in folder.glob("slurm-*.out"))


@pytest.mark.train
def test_two_nodes_train_together_and_a_preempted_job_queues_again_and_resumes(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    folder, _ = spread_job(tmp_path / "a job", max_steps=600, save_strategy="steps", save_steps=1000)
    number = slurm.submit(folder)
    poll("third step", lambda: len(journal.read_events(folder)) > 8, ENDS_WITHIN_S, lambda: log_of(folder))
    # what Slurm does some time before the end of an allocation, by --signal=B:TERM@N
    subprocess.run(["scancel", "--signal=TERM", "--batch", number], check=True)
    poll(
        "requeue", lambda: "Restarts=1" in ask("scontrol", "show", "job", number), ENDS_WITHIN_S, lambda: log_of(folder)
    )
    first = json.loads((folder / "result.json").read_text())
    assert first["exit_code"] == 75
    assert "stopped on request" in first["error"]
    stopped_at = len(first["steps"])
    checkpoint = checkpoints.newest_complete(folder)
    assert checkpoint is not None
    assert checkpoints.step_of(checkpoint) == stopped_at
    assert first["world_size"] == 2
    document = json.loads((folder / "plan.json").read_text())

    def state() -> str:
        return ask("scontrol", "show", "job", number)

    # Slurm holds a job that queues again back for two minutes; asked more than once, it never starts
    poll("queue", lambda: "JobState=PENDING Reason=BeginTime" in state(), 60, state)
    time.sleep(3)  # Slurm revokes credentials by the second: a job that starts in the second of its requeue is killed
    ask("scontrol", "update", f"JobId={number}", "StartTime=now")

    def outcome() -> str:
        return log_of(folder) + state() + (cluster / "slurmctld.log").read_text()[-3000:]

    poll("end", lambda: "JobState=COMPLETED" in state(), ENDS_WITHIN_S, outcome)
    result = json.loads((folder / "result.json").read_text())
    assert (result["exit_code"], result["error"], result["world_size"]) == (0, None, 2), log_of(folder)
    assert [step["step"] for step in result["steps"]] == list(range(1, document["training"]["max_steps"] + 1))
    start = journal.read_events(folder)
    assert next(event for event in start if event["event"] == "start")["resumed_from"] == checkpoint.name


@pytest.mark.train
def test_the_command_line_submits_and_slurm_takes_the_gpus(cluster: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": ROOT, "HF_HUB_OFFLINE": "1"}
    preset = ["--preset", "smoke", "--output-dir", str(tmp_path / "job"), "--max-steps", "2", "--launcher", "slurm"]
    done = subprocess.run(
        [sys.executable, "-m", "lcplan", "run", *preset, "--slurm", "comment=tiny"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    assert f"lcplan watch {shlex.quote(str(tmp_path / 'job'))}" in done.stderr
    assert "Comment=tiny" in ask("scontrol", "show", "job", number)
    watched = subprocess.run(
        [sys.executable, "-m", "lcplan", "watch", str(tmp_path / "job")],
        env=environment, capture_output=True, text=True, check=False, timeout=ENDS_WITHIN_S,
    )  # fmt: skip
    assert watched.returncode == 0, watched.stdout + log_of(tmp_path / "job")
    assert "step 2/2: loss" in watched.stdout
    assert "ended with exit code 0" in watched.stdout
    # a job of two nodes with two GPUs each is one that this cluster would run, one of four GPUs each is not
    for gpus, allowed in ((2, True), (4, False)):
        job = fsdp2_job(num_gpus=2 * gpus, gpus_per_node=gpus, dp_shard_size=2 * gpus)
        script = tmp_path / f"{gpus}.sbatch"
        script.write_text(slurm.batch_script(job, tmp_path, options={}))
        tried = subprocess.run(["sbatch", "--test-only", str(script)], capture_output=True, text=True, check=False)
        assert (tried.returncode == 0) is allowed, tried.stderr
    (tmp_path / slurm.SCRIPT).write_text(slurm.batch_script(job, tmp_path, options={"partition": "nowhere"}))
    with pytest.raises(EnvironmentProblem, match="invalid partition"):
        slurm.submit(tmp_path)
