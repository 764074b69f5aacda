"""Generated jobs that really train on the CPU, in one process and in two, held against one another.

Random weights are drawn alike by every backend, and the same rows make up a step, so losses are equal but for rounding.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jobs import run_python, small_job

from lcplan.backends.job import COMMAND, ModelSource, render_job
from lcplan.job_options import DataSource, TokenizerSource

pytestmark = pytest.mark.train
STEPS = 4
ONE = {"max_length": 64, "per_device_train_batch_size": 4}
TWO = {"max_length": 64, "per_device_train_batch_size": 2, "num_gpus": 2, "gpus_per_node": 2}
LAUNCH = ("-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "--main_process_port", "0")
TRAINED = 164_224
"""Parameters of the smoke model; its head is its embedding."""
DDP = {"backend": "ddp", "dp_replicate_size": 2}
ROUNDING = 2e-5
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # ninja, which pip puts there
    "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),  # built once, in half a minute
}


class Job(NamedTuple):
    folder: Path
    result: dict[str, Any]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.result["steps"]]


def run_job(folder: Path, *, plan: dict[str, Any], training: dict[str, Any] | None = None, **fields: Any) -> Job:
    """Render a job, start it as its README says, and read its result."""
    job = small_job(plan=plan, training={"max_steps": STEPS, **(training or {})}, **fields)
    render_job(job, folder)
    done = run_python(*LAUNCH, COMMAND[-1], cwd=folder, **ENVIRONMENT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    result = json.loads((folder / "result.json").read_text())
    assert result["error"] is None
    assert len(result["steps"]) == STEPS
    return Job(folder, result)


def layout(job: Job) -> tuple[Any, ...]:
    """What was launched: kind, processes, rows and tokens in the first layer, share of the states."""
    result = job.result
    held = result["elements_held"]
    share = None if held is None else held / result["elements_sharded"]
    return (result["distributed_type"], result["world_size"], result["first_layer_sees"], share)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The reference, and the model that others start from."""
    return run_job(tmp_path_factory.mktemp("jobs") / "one", plan=ONE)


def from_the_model_of(job: Job) -> dict[str, Any]:
    saved = str(job.folder / "final_model")
    return {
        "model": ModelSource(id=saved, init="pretrained"),
        "tokenizer": TokenizerSource(kind="pretrained", id=saved),
    }


def test_one_process(one: Job) -> None:
    assert layout(one) == ("NO", 1, [4, 64], None)
    assert one.losses[-1] < one.losses[0]


def test_two_processes_with_ddp_train_as_one(one: Job, tmp_path: Path) -> None:
    two = run_job(tmp_path / "two", plan={**TWO, **DDP}, training={"save_model": False})
    assert layout(two) == ("MULTI_CPU", 2, [2, 64], None)
    assert two.losses == pytest.approx(one.losses, abs=ROUNDING)
    assert two.result["saved_model_dir"] is None


ADAPTED = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
from datasets import Dataset
folder, base = sys.argv[1:]
model = AutoPeftModelForCausalLM.from_pretrained(folder + "/final_model")
assert model.peft_config["default"].base_model_name_or_path == base
assert (model.peft_config["default"].r, model.peft_config["default"].lora_alpha) == (4, 16)
changed = [name for name, weight in model.named_parameters() if "lora_B" in name and weight.abs().max() > 0]
assert len(changed) == 14, changed
rows = Dataset.from_file(folder + "/rows/00000.arrow")
ids = torch.tensor(rows["input_ids"][:4])
with torch.no_grad():
    adapted = float(model(ids, labels=ids).loss)
    with model.disable_adapter():
        print(json.dumps([adapted, float(model(ids, labels=ids).loss)]))
"""


LORA = {"lora_r": 4}


@pytest.fixture(scope="module")
def lora(one: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    pytest.importorskip("peft")
    plan = {**ONE, **LORA, "per_device_eval_batch_size": 4}
    training = {"eval_steps": STEPS, "lora_alpha": 16}
    return run_job(tmp_path_factory.mktemp("jobs") / "lora", plan=plan, training=training, **from_the_model_of(one))


def test_lora_saves_an_adapter_that_loads_as_it_was_trained(one: Job, lora: Job) -> None:
    assert layout(lora) == ("NO", 1, [4, 64], None)
    saved = {path.name for path in (lora.folder / "final_model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= saved
    assert "model.safetensors" not in saved
    loaded = run_python("-c", ADAPTED, str(lora.folder), str(one.folder / "final_model"), cwd=lora.folder)
    assert loaded.returncode == 0, loaded.stderr
    adapted, base = json.loads(loaded.stdout.splitlines()[-1])
    (scored,) = lora.result["evaluations"]
    assert adapted == pytest.approx(scored["eval_loss"], abs=1e-5)
    assert abs(adapted - base) > 1e-3


def test_lora_in_two_processes_trains_as_one(one: Job, lora: Job, tmp_path: Path) -> None:
    plan = {**TWO, **DDP, **LORA, "per_device_eval_batch_size": 2}
    training = {"eval_steps": STEPS, "lora_alpha": 16}
    two = run_job(tmp_path / "two", plan=plan, training=training, **from_the_model_of(one))
    assert layout(two) == ("MULTI_CPU", 2, [2, 64], None)
    assert two.losses == pytest.approx(lora.losses, abs=ROUNDING)
    held_out = [job.result["evaluations"][0]["eval_loss"] for job in (lora, two)]
    assert held_out[1] == pytest.approx(held_out[0], abs=ROUNDING)
    assert two.result["data"]["num_rows"] == 4 + 4 * STEPS


WEIGHTS = """
import json, sys
sys.path.insert(0, ".")
import train
make = train.make_trainer
def look(*args):
    trainer = make(*args)
    kinds = {}
    for name, weight in trainer.model.named_parameters():
        kind = f"{type(weight).__name__} {weight.dtype} {weight.requires_grad}"
        kinds.setdefault(kind, []).append(name)
    json.dump({kind: sorted(names) for kind, names in kinds.items()}, open("kinds.json", "w"))
    return trainer
train.make_trainer = look
sys.exit(train.main(train.JOB))
"""


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_qlora_trains_bfloat16_adapters_on_4_bit_weights(one: Job, lora: Job, tmp_path: Path, init: str) -> None:
    pytest.importorskip("bitsandbytes")
    fields = from_the_model_of(one) if init == "pretrained" else {}
    plan = {**ONE, **LORA, "quantize": "nf4", "dtype": "bfloat16", "per_device_eval_batch_size": 4}
    job = render_job(small_job(plan=plan, training={"max_steps": STEPS, "lora_alpha": 16}, **fields), tmp_path / "job")
    done = run_python("-c", WEIGHTS, cwd=job)
    assert done.returncode == 0, done.stderr
    kinds = json.loads((job / "kinds.json").read_text())
    assert set(kinds) == {
        "Params4bit torch.uint8 False", "Parameter torch.bfloat16 True", "Parameter torch.bfloat16 False",
    }  # fmt: skip
    assert len(kinds["Params4bit torch.uint8 False"]) == 14, "every linear of both layers, not the head"
    assert all("lora" in name for name in kinds["Parameter torch.bfloat16 True"])
    result = json.loads((job / "result.json").read_text())
    assert (result["distributed_type"], result["world_size"], result["first_layer_sees"]) == ("NO", 1, [4, 64])
    if init == "pretrained":
        losses = [step["loss"] for step in result["steps"]]
        assert losses == pytest.approx(lora.losses, abs=0.02)
        assert losses != lora.losses


def test_frozen_tables_are_not_trained(one: Job, tmp_path: Path) -> None:
    frozen = {"freeze_embeddings": True, "freeze_head": True}
    job = run_job(tmp_path / "job", plan={**ONE, **frozen}, **from_the_model_of(one))
    from safetensors.torch import load_file

    before, after = (load_file(each.folder / "final_model" / "model.safetensors") for each in (one, job))
    assert before["model.embed_tokens.weight"].equal(after["model.embed_tokens.weight"])
    assert not before["model.norm.weight"].equal(after["model.norm.weight"])


def test_examples_are_trained_on_their_completions(tmp_path: Path) -> None:
    start = "The statement is executed, and the expression is evaluated. " * 3
    records = [{"prompt": start, "completion": f" Then {number}."} for number in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataSource(kind="files", paths=(str(tmp_path / "a.jsonl"),))
    tokenizer = TokenizerSource(kind="train-bpe", vocab_size=400)
    plan = {"max_length": 256, "per_device_train_batch_size": 1}
    job = run_job(tmp_path / "job", plan=plan, data=data, tokenizer=tokenizer)
    assert job.result["first_layer_sees"][1] < 256
    made = job.result["data"]
    assert (made["format"], made["num_rows"]) == ("prompt-completion", STEPS)
    assert 0 < made["num_scored"] < made["num_tokens"] / 3
    assert job.losses[-1] < job.losses[0]


# --- DeepSpeed, with real collectives over gloo

needs_deepspeed = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.skipif(
        shutil.which("g++") is None and shutil.which("c++") is None,
        reason="deepspeed builds its CPU collectives with a C++ compiler, and there is none",
    ),
    pytest.mark.skipif(
        " " in str(getattr(find_spec("torch"), "origin", "")),
        reason="torch's C++ builds fail where its own path has a blank in it",
    ),
]
ZERO = {**TWO, "backend": "deepspeed"}


def deepspeed_tests(test: Any) -> Any:
    for mark in needs_deepspeed:
        test = mark(test)
    return test


@deepspeed_tests
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_trains_as_one_process(one: Job, tmp_path: Path, stage: int) -> None:
    job = run_job(tmp_path / "job", plan={**ZERO, "dp_shard_size": 2, "zero_stage": stage})
    kind, processes, seen, share = layout(job)
    assert (kind, processes, seen) == ("DEEPSPEED", 2, [2, 64])
    assert share == pytest.approx(0.5, abs=0.01)
    assert job.result["elements_sharded"] == TRAINED
    assert job.losses == pytest.approx(one.losses, abs=ROUNDING)
    from safetensors.torch import load_file

    saved = load_file(job.folder / "final_model" / "model.safetensors")
    saved.pop("lm_head.weight", None)  # tied; stages 1 and 2 write it beside the embedding
    assert sum(weight.numel() for weight in saved.values()) == TRAINED


@deepspeed_tests
def test_ulysses_trains_as_one_process(one: Job, tmp_path: Path) -> None:
    plan = {**ZERO, "per_device_train_batch_size": 4, "sp_size": 2, "zero_stage": 3}
    job = run_job(tmp_path / "job", plan=plan)
    assert layout(job)[:3] == ("DEEPSPEED", 2, [4, 32])
    assert layout(job)[3] == pytest.approx(0.5, abs=0.01)
    assert job.losses == pytest.approx(one.losses, abs=ROUNDING)


@deepspeed_tests
def test_lora_under_zero_3_trains_as_one_process(one: Job, lora: Job, tmp_path: Path) -> None:
    plan = {**ZERO, "dp_shard_size": 2, "zero_stage": 3, **LORA, "per_device_eval_batch_size": 2}
    training = {"eval_steps": STEPS, "lora_alpha": 16}
    job = run_job(tmp_path / "job", plan=plan, training=training, **from_the_model_of(one))
    assert layout(job)[:3] == ("DEEPSPEED", 2, [2, 64])
    assert job.losses == pytest.approx(lora.losses, abs=ROUNDING)
    held_out = [each.result["evaluations"][0]["eval_loss"] for each in (lora, job)]
    assert held_out[1] == pytest.approx(held_out[0], abs=ROUNDING)
    assert (job.folder / "final_model" / "adapter_model.safetensors").is_file()


@deepspeed_tests
def test_a_rank_of_ulysses_without_any_label_does_no_harm(one: Job, tmp_path: Path) -> None:
    """Its own mean is 0 / 0; the loss of all ranks is that of one process."""
    records = [
        {"input_ids": [5 + n % 90 for n in range(63)] + [200 + n], "labels": [-100] * 60 + [8, 9, 10, 11]}
        for n in range(30)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    fields = {
        "data": DataSource(kind="files", paths=(str(tmp_path / "a.jsonl"),)),
        **from_the_model_of(one),
    }
    plan = {**ONE, "per_device_train_batch_size": 1}
    alone = run_job(tmp_path / "one", plan=plan, **fields)
    two = run_job(
        tmp_path / "two",
        plan={**plan, **ZERO, "per_device_train_batch_size": 1, "sp_size": 2, "zero_stage": 3},
        **fields,
    )
    assert two.losses == pytest.approx(alone.losses, abs=ROUNDING)
