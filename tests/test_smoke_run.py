"""Real trainings on the CPU, each in a process of its own."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import ROOT, contents, fsdp2_job, run_python, small_job

from lcplan.backends.job import COMMAND, render_job

pytestmark = pytest.mark.train
LOG_V = math.log(1024)

RUN = """
import sys
from pathlib import Path
from lcplan.job_run import run_job
from lcplan.model_spec import ModelSpec
from lcplan.presets import load_preset
from lcplan.train_plan import TrainPlan
smoke = load_preset("smoke")
plan = TrainPlan(**{**smoke.plan, "max_length": int(sys.argv[2])})
sys.exit(run_job(
    model=ModelSpec.from_config(smoke.config, smoke.model), plan=plan, rope=None, prediction=None, data=smoke.data,
    output_dir=Path(sys.argv[1]), init=smoke.init, training=smoke.training, device=smoke.device,
    tokenizer_vocab_size=smoke.tokenizer.vocab_size,
))
"""

LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
assert type(model).__name__ == model.config.architectures[0] == "Qwen3ForCausalLM", model.config.architectures
assert model.dtype == torch.float32
assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
text = "The statement is executed, and the expression is evaluated to yield an object. If the value is a string"
ids = tokenizer(text, return_tensors="pt")["input_ids"]
assert tokenizer.decode(ids[0]) == text
print("loss", float(model(ids, labels=ids).loss))
"""


class Run(NamedTuple):
    folder: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "a folder" / "smoke"
    return Run(folder, run_python("-c", RUN, str(folder), "256", cwd=folder.parent.parent, PYTHONPATH=ROOT))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def loaded_loss(folder: Path) -> float:
    done = run_python("-c", LOAD, str(folder), cwd=folder)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.rsplit(maxsplit=1)[-1])


def test_the_loss_falls_and_the_result_says_so(smoke):
    assert smoke.done.returncode == 0, smoke.done.stderr
    result = json.loads((smoke.folder / "result.json").read_text())
    assert (result["error"], result["exit_code"]) == (None, 0)
    assert (result["world_size"], result["distributed_type"]) == (1, "NO")
    losses = [step["loss"] for step in result["steps"]]
    assert len(losses) == 40
    assert losses[0] == pytest.approx(LOG_V, abs=0.05)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.8
    assert all(step["step_s"] > 0 and step["tokens_per_second"] > 0 for step in result["steps"])
    assert result["data"]["num_rows"] == 40 * 8
    assert set(result["versions"]) == {"torch", "transformers", "accelerate", "trl", "datasets"}
    events = [json.loads(line) for line in (smoke.folder / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert [{key: event[key] for key in result["steps"][0]} for event in steps] == result["steps"]
    others = [event.get("phase", event["event"]) for event in events if event["event"] != "step"]
    assert others == ["start", "tokenizing", "loading", "training", "first_step", "saving", "end"]
    assert not (smoke.folder / ".reserve").exists()


def test_the_closing_note(smoke):
    assert "loss, first to last of 40 steps" in smoke.done.stdout
    assert f"Saved model: {smoke.folder / 'final_model'}\n" in smoke.done.stdout
    assert "step 40/40: loss" in smoke.done.stderr
    assert f"cd '{smoke.folder}' && accelerate launch --config_file accelerate.yaml train.py" in smoke.done.stderr
    assert "a byte-level BPE of 1,024 tokens" in smoke.done.stderr


def test_the_saved_model_loads_again_and_has_learnt(smoke):
    assert loaded_loss(smoke.folder / "final_model") < LOG_V - 0.8


def test_a_second_run_into_the_folder_is_refused_and_changes_nothing(smoke):
    before = contents(smoke.folder)
    done = run_python("-c", RUN, str(smoke.folder), "256", cwd=smoke.folder.parent, PYTHONPATH=ROOT)
    assert done.returncode != 0
    assert "is not empty" in done.stderr
    assert contents(smoke.folder) == before


def test_too_little_text_is_found_before_the_model_is_built(tmp_path):
    done = run_python("-c", RUN, str(tmp_path / "job"), "1048576", cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 2, done.stderr
    assert "tokens, and one step needs 8,388,608 (8 rows of 1,048,576)" in done.stderr
    result = json.loads((tmp_path / "job" / "result.json").read_text())
    assert (result["exit_code"], result["steps"]) == (2, [])
    assert not (tmp_path / "job" / "rows").exists()


# --- FSDP2. accelerate has none on a CPU: it would run DDP, or two separate runs, and report success. Here, and only
# here, a private method is patched so that its FSDP2 code runs over gloo.

ON_CPU = """
import os, sys
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
from accelerate.state import PartialState
from accelerate.utils import DistributedType
PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
import train
build = train.sft_arguments
train.sft_arguments = lambda job: {**build(job), "use_cpu": False}
if __name__ == "__main__":
    sys.exit(train.main({**train.JOB, "device": "cpu"}))
"""

RANK_0_OF_N = """
import os, sys, yaml
config = yaml.safe_load(open("accelerate.yaml"))
size = str(config["num_processes"])
settings = {**config["fsdp_config"], **config["parallelism_config"]}
os.environ.update({key.upper(): str(value).lower() for key, value in settings.items()})
os.environ.update(FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT",
    ACCELERATE_USE_FSDP="true", ACCELERATE_USE_PARALLELISM_CONFIG="true", ACCELERATE_MIXED_PRECISION="bf16",
    RANK="0", LOCAL_RANK="0", WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=int(size), store=FakeStore())
import on_cpu
from lcplan.tracing.seams import ring_attention_on_cpu
with ring_attention_on_cpu():
    sys.exit(on_cpu.train.main({**on_cpu.train.JOB, "device": "cpu"}))
"""


def test_fsdp2_shards_trains_alike_and_saves_a_model_that_loads(tmp_path):
    reference = render_job(small_job(plan={"max_length": 64}, training={"max_steps": 3}), tmp_path / "one")
    sharded = render_job(fsdp2_job(max_length=64, dtype="bfloat16"), tmp_path / "two")
    (sharded / "on_cpu.py").write_text(ON_CPU)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml"]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(run_python, *launcher, COMMAND[-1], cwd=reference)
        two = run_python(*launcher, "--main_process_port", "0", "on_cpu.py", cwd=sharded)
        one = first.result()
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    results = [json.loads((folder / "result.json").read_text()) for folder in (reference, sharded)]
    assert (results[1]["world_size"], results[1]["distributed_type"]) == (2, "FSDP")
    assert len(results[1]["peak_allocated_bytes_per_rank"]) == 2
    losses = [[step["loss"] for step in result["steps"]] for result in results]
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
    assert loaded_loss(sharded / "final_model") < LOG_V


UNPINNED = ON_CPU.replace("import train\n", "import torch, train\ntorch.Tensor.pin_memory = lambda self, *_: self\n")
"""Without a GPU no memory can be pinned."""


def test_levers_of_fsdp2_change_nothing_of_the_losses(tmp_path):
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "--main_process_port", "0"]
    losses = {}
    for name, plan in {"": {}, "kept": {"reshard_after_forward": False}, "host": {"offload_params": True}}.items():
        folder = render_job(fsdp2_job(max_length=64, **plan), tmp_path / f"job {name}")
        (folder / "on_cpu.py").write_text(UNPINNED)
        done = run_python(*launcher, "on_cpu.py", cwd=folder)
        assert done.returncode == 0, done.stderr[-4000:]
        losses[name] = [step["loss"] for step in json.loads((folder / "result.json").read_text())["steps"]]
    assert losses["kept"] == losses[""]
    assert losses["host"] == losses[""]


BROKEN = """
import sys
from transformers.models.qwen3 import modeling_qwen3
import train

def broken(self, *_args):
    raise RuntimeError("broken layer")

modeling_qwen3.Qwen3MLP.forward = broken
sys.exit(train.main(train.JOB))
"""


def test_an_error_in_the_first_layer_ends_the_job_with_its_own_exit_code(tmp_path):
    """The profiler that looks at the layer must not outlive it: Python then ends with a segmentation fault."""
    folder = render_job(small_job(plan={"max_length": 64}, training={"max_steps": 1}), tmp_path / "job")
    done = run_python("-c", BROKEN, cwd=folder)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "broken layer" in json.loads((folder / "result.json").read_text())["error"]


def test_a_launcher_that_ignores_the_plan_is_found_out(tmp_path):
    folder = render_job(fsdp2_job(max_length=64), tmp_path / "job")
    (folder / "on_cpu.py").write_text(ON_CPU)
    done = run_python("on_cpu.py", cwd=folder, LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=free_port())  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "distributed_type is MULTI_GPU, planned FSDP; num_gpus is 1, planned 2" in done.stderr


RING_ON_CPU = ON_CPU.replace(
    "    sys.exit(",
    """
    from lcplan.tracing.seams import ring_attention_on_cpu
    threading.Thread(target=outlive, daemon=True).start()
    with ring_attention_on_cpu():
        sys.exit(""",
).replace(
    "if __name__",
    """
import threading
from contextlib import suppress
from datetime import timedelta
from torch.distributed import DistStoreError, TCPStore

def outlive():
    store = TCPStore("127.0.0.1", 0, is_master=True)
    while True:
        with suppress(DistStoreError):
            store.wait(["never"], timedelta(milliseconds=50))

if __name__""",
)
"""A thread inside torch aborts a Python that ends, as a thread of gloo may."""


def test_ring_attention_over_two_ranks_resumes_to_the_same_losses(tmp_path):
    """Two real processes, each with its half of every sequence and of the weights, and sharded checkpoints."""
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_model": False}
    job = fsdp2_job(max_length=64, per_device_train_batch_size=1, dp_shard_size=1, cp_size=2)
    folder = render_job(job.model_copy(update={"training": job.training.model_copy(update=steps)}), tmp_path / "job")
    (folder / "ring_on_cpu.py").write_text(RING_ON_CPU)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "--main_process_port", "0"]
    results = []
    for more in ([], ["--resume"]):
        done = run_python(*launcher, "ring_on_cpu.py", *more, cwd=folder, PYTHONPATH=ROOT)
        assert done.returncode == 0, done.stderr[-4000:]
        results.append(json.loads((folder / "result.json").read_text()))
        assert (folder / "checkpoints" / "checkpoint-2" / "complete.json").is_file()
        shutil.rmtree(folder / "checkpoints" / "checkpoint-4")
    assert "Resuming from checkpoint-2, which is whole." in done.stderr + done.stdout
    assert (results[0]["world_size"], results[0]["first_layer_sees"]) == (2, [1, 32])
    losses = [[step["loss"] for step in result["steps"]] for result in results]
    assert len(losses[0]) == 4
    assert losses[1] == losses[0]


def test_context_parallelism_trains_as_rank_0_of_8(tmp_path):
    """accelerate's FSDP2, the trainer's context parallelism and torch's ring attention, with the CPU's kernel."""
    plan = {"num_gpus": 8, "gpus_per_node": 8, "dp_shard_size": 2, "cp_size": 4, "max_length": 512}
    folders = [render_job(fsdp2_job(**plan), tmp_path / name) for name in ("as planned", "too long")]
    for folder in folders:
        (folder / "on_cpu.py").write_text(ON_CPU)
        (folder / "rank_0.py").write_text(RANK_0_OF_N)
        document = json.loads((folder / "plan.json").read_text())
        document["training"] |= {"save_model": False, "max_steps": 2}  # no other ranks could send their shards
        (folder / "plan.json").write_text(json.dumps(document))
    checks = (folders[1] / "checks.py").read_text()
    (folders[1] / "checks.py").write_text(checks.replace("found[1] == tokens", "found[1] == tokens + 1"))
    with ThreadPoolExecutor() as pool:
        done, caught = pool.map(lambda folder: run_python("rank_0.py", cwd=folder, PYTHONPATH=ROOT), folders)
    assert done.returncode == 0, done.stderr
    result = json.loads((folders[0] / "result.json").read_text())
    assert (result["distributed_type"], result["world_size"], len(result["steps"])) == ("FSDP", 8, 2)
    assert result["first_layer_sees"] == [4, 512 // 4]
    assert result["elements_sharded"] == 164_224
    assert result["elements_held"] == 164_224 // 8
    assert caught.returncode == 2, caught.stderr
    assert "a decoder layer sees 4 x 128 tokens, planned 4 x 128" in caught.stderr
