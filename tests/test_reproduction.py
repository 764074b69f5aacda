"""A plan's command line gives that plan again."""

from __future__ import annotations

import inspect
import json
import shlex
from typing import Any

import pytest
import typer
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lcplan.cli.main import build_app
from lcplan.cli.plan_options import _plan_flags, read_job
from lcplan.errors import PlanError
from lcplan.hardware import load_gpu
from lcplan.model_loading import load_model
from lcplan.reproduction import ALWAYS, command_line, plan_flags
from lcplan.train_plan import KNOWN_OPTIMIZERS, TrainPlan, resolve

JOBS: list[tuple[list[str], list[str]]] = [
    (["Qwen/Qwen3-8B", "--max-length", "1Mi", "--gpu", "h100-80gb", "--num-gpus", "8", "--cp-size", "8"], []),
    (["--preset", "qwen3-8b-1m"], ["--no-offload-activations", "--cp-size", "4", "--dp-shard-size", "2"]),
    (["--preset", "qwen3-4b-128k"], ["--activation-checkpointing", "none", "--host-memory", "1TB"]),
    (["--preset", "qwen3-4b-1m-4gpu"], ["--num-gpus", "2", "--gpus-per-node", "2", "--cp-size", "2"]),
    (
        ["Qwen/Qwen3-4B", "--max-length", "32Ki", "--gpu", "h200", "--num-gpus", "4"],
        ["--backend", "deepspeed", "--zero-stage", "2", "--offload-optimizer"],
    ),
    (
        ["Qwen/Qwen3-4B", "--max-length", "32Ki", "--gpu", "h200"],
        ["--lora-r", "16", "--lora-dropout", "0.1", "--quantize", "nf4", "--scored-fraction", "0.25"],
    ),
    (
        ["Qwen/Qwen3-4B", "--max-length", "32Ki", "--gpu", "h200", "--num-gpus", "2"],
        ["--no-reshard-after-forward", "--optim", "adamw_torch", "--rope", "yarn:4"],
    ),
]


@pytest.mark.parametrize(("job", "flags"), JOBS)
def test_the_flags_give_the_plan_again(lcplan, job: list[str], flags: list[str]) -> None:
    origin = job[:2] if job[0].startswith("--") else job[:1]
    preset = job[1] if job[0] == "--preset" else None
    report: dict[str, Any] = json.loads(lcplan("estimate", *job, *flags, "--json").out)
    found = read_job(None if preset else job[0], preset, None, {}, trust_remote_code=False) if preset else None
    plan = TrainPlan(**report["plan"])
    spec = load_model(report["model"]["id"])
    base = dict(found.preset.plan) if found and found.preset else {}
    words = plan_flags(spec, plan, load_gpu(plan.gpu), base)
    again = shlex.split(command_line("estimate", [*origin, *words]))
    assert json.loads(lcplan(*again[1:], "--json").out)["plan"] == report["plan"]
    # as few as give it: none of them can be left out, so none is a default
    assert "--dtype" not in words
    assert "--loss" not in words


NUMBERS = st.sampled_from([1, 2, 4, 8])
CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "max_length": st.integers(1, 64).map(lambda n: 1024 * n),
    "per_device_train_batch_size": NUMBERS,
    "per_device_eval_batch_size": NUMBERS,
    "gradient_accumulation_steps": NUMBERS,
    "gpu": st.sampled_from(["h200", "a100-40gb", "l40s"]),
    "num_gpus": NUMBERS,
    "gpus_per_node": NUMBERS,
    "backend": st.sampled_from(["single", "ddp", "fsdp2", "deepspeed"]),
    "dp_replicate_size": NUMBERS,
    "dp_shard_size": NUMBERS,
    "cp_size": NUMBERS,
    "sp_size": NUMBERS,
    "cp_comm_strategy": st.sampled_from(["allgather", "alltoall"]),
    "cp_head_chunks": NUMBERS,
    "cp_merge_dtype": st.sampled_from(["float32", "bfloat16"]),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "optim": st.sampled_from(KNOWN_OPTIMIZERS),
    "loss": st.sampled_from(["chunked", "chunked-256", "full"]),
    "scored_fraction": st.floats(0, 1, exclude_min=True),
    "activation_checkpointing": st.sampled_from(["full", "selective", "none"]),
    "checkpoint_every_n_layers": NUMBERS,
    "offload_activations": st.booleans(),
    "offload_prefetch": st.booleans(),
    "activation_offloading": st.booleans(),
    "offload_params": st.booleans(),
    "reshard_after_forward": st.booleans(),
    "zero_stage": st.sampled_from([1, 2, 3]),
    "offload_optimizer": st.booleans(),
    "mlp_tile_size": st.integers(1, 2**17),
    "kernels": st.sampled_from(["none", "liger"]),
    "lora_r": st.integers(1, 64),
    "lora_target_modules": st.sampled_from(["all-linear", "q_proj,v_proj", "it's a; name"]),
    "lora_dropout": st.floats(0, 1, exclude_max=True),
    "quantize": st.sampled_from(["none", "nf4"]),
    "freeze_embeddings": st.booleans(),
    "freeze_head": st.booleans(),
    "padding": st.booleans(),
    "attn_implementation": st.sampled_from(["sdpa", "flash_attention_2", "eager"]),
    "rope": st.sampled_from(["auto", "none", "yarn:4"]),
    "packing": st.booleans(),
    "host_memory_bytes": st.one_of(st.integers(1, 2**42), st.sampled_from([2**41, 512 * 10**9])),
}
"""Values of every plan field."""
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "openai/gpt-oss-20b")
BASES: tuple[dict[str, Any], ...] = (
    {},
    {"num_gpus": 4},
    {"num_gpus": 8, "cp_size": 4},
    {"num_gpus": 4, "backend": "ddp"},
    {"num_gpus": 4, "backend": "deepspeed"},
    {"num_gpus": 4, "backend": "deepspeed", "sp_size": 4},
    {"lora_r": 16},
    {"offload_activations": True},
)
"""Jobs from which a few random fields lead to other legal ones more often than from none."""
ESTIMATE = typer.main.get_command(build_app(["estimate"])).get_command(None, "estimate")  # type: ignore[attr-defined]
FEW = 4


def read_back(command: str) -> TrainPlan:
    """The plan of a printed command, by the command line's own parser."""
    context = ESTIMATE.make_context("estimate", shlex.split(command)[2:])
    given = _plan_flags(**{name: context.params[name] for name in inspect.signature(_plan_flags).parameters})
    return read_job(context.params["model"], None, None, given, trust_remote_code=False).plan


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_every_legal_plan_comes_back_from_its_command(data: st.DataObject) -> None:
    spec = load_model(data.draw(st.sampled_from(MODELS)))
    names = data.draw(st.sets(st.sampled_from(sorted(CHOICES)), max_size=FEW)) | {"max_length", "gpu"}
    values = data.draw(st.sampled_from(BASES)) | {name: data.draw(CHOICES[name]) for name in sorted(names)}
    gpu = load_gpu(values["gpu"])
    try:
        plan, _ = resolve(spec, values, usual_gpus_per_node=gpu.gpus_per_node)
    except PlanError:
        assume(False)
    words = plan_flags(spec, plan, gpu)
    assert read_back(command_line("estimate", [spec.id, *words])) == plan


OTHERWISE: dict[str, dict[str, Any]] = {
    "per_device_train_batch_size": {"per_device_train_batch_size": 2},
    "per_device_eval_batch_size": {"per_device_eval_batch_size": 2},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "gpus_per_node": {"num_gpus": 4, "gpus_per_node": 2},
    "backend": {"num_gpus": 2, "backend": "deepspeed"},
    "dp_replicate_size": {"num_gpus": 4, "dp_replicate_size": 2},
    "dp_shard_size": {"num_gpus": 4, "dp_shard_size": 2, "dp_replicate_size": 2},
    "cp_size": {"num_gpus": 4, "cp_size": 2},
    "sp_size": {"num_gpus": 4, "backend": "deepspeed", "sp_size": 2},
    "cp_comm_strategy": {"num_gpus": 4, "cp_size": 2, "cp_comm_strategy": "alltoall"},
    "cp_head_chunks": {"num_gpus": 4, "cp_size": 2, "cp_head_chunks": 2},
    "cp_merge_dtype": {"num_gpus": 4, "cp_size": 2, "cp_merge_dtype": "bfloat16"},
    "dtype": {"dtype": "float32"},
    "optim": {"optim": "sgd"},
    "loss": {"loss": "full"},
    "scored_fraction": {"scored_fraction": 0.3},
    "activation_checkpointing": {"activation_checkpointing": "none"},
    "checkpoint_every_n_layers": {"checkpoint_every_n_layers": 3},
    "offload_activations": {"offload_activations": True},
    "offload_prefetch": {"offload_activations": True, "offload_prefetch": True},
    "activation_offloading": {"activation_offloading": True},
    "offload_params": {"num_gpus": 2, "offload_params": True},
    "reshard_after_forward": {"num_gpus": 2, "reshard_after_forward": False},
    "zero_stage": {"num_gpus": 2, "backend": "deepspeed", "zero_stage": 2},
    "offload_optimizer": {"num_gpus": 2, "backend": "deepspeed", "offload_optimizer": True},
    "mlp_tile_size": {"mlp_tile_size": 4096},
    "kernels": {"kernels": "liger"},
    "lora_r": {"lora_r": 16},
    "lora_target_modules": {"lora_r": 16, "lora_target_modules": "q_proj,v_proj"},
    "lora_dropout": {"lora_r": 16, "lora_dropout": 0.1},
    "quantize": {"lora_r": 16, "quantize": "nf4"},
    "freeze_embeddings": {"freeze_embeddings": True},
    "freeze_head": {"freeze_head": True},
    "padding": {"padding": True},
    "attn_implementation": {"attn_implementation": "eager"},
    "rope": {"rope": "yarn:4"},
    "packing": {"packing": True},
    "host_memory_bytes": {"host_memory_bytes": 10**12},
}
"""For every field that has a value without a flag a plan that has another."""


def test_no_plan_field_is_forgotten() -> None:
    assert set(CHOICES) == set(TrainPlan.model_fields)
    assert {*OTHERWISE, *ALWAYS} == set(TrainPlan.model_fields)


@pytest.mark.parametrize("field", sorted(OTHERWISE))
def test_a_field_that_is_not_filled_in_by_itself_has_a_flag(field: str) -> None:
    spec, gpu = load_model("Qwen/Qwen3-8B"), load_gpu("h200")
    values = {"max_length": 2**15, "gpu": gpu.id} | OTHERWISE[field]
    plan, _ = resolve(spec, values, usual_gpus_per_node=gpu.gpus_per_node)
    command = command_line("estimate", [spec.id, *plan_flags(spec, plan, gpu)])
    assert read_back(command) == plan
    assert getattr(read_back(command), field) == OTHERWISE[field][field]


def test_words_of_a_user_are_no_shell() -> None:
    assert shlex.split(command_line("estimate", ["my model; rm -rf $HOME"])) == [
        "lcplan", "estimate", "my model; rm -rf $HOME",
    ]  # fmt: skip
