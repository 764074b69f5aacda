"""The folder of ``qwen3-8b-1m`` is the job of TRL's guide on training beyond 1M tokens, in effect.

The guide's script and YAML are huggingface/trl examples/sft_qwen3_8b_1m_context (TRL 1.13 to 1.16), which is where the
values below are from. Everything that differs is listed, with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from conftest import Outcome
from jobs import run_python

pytestmark = pytest.mark.train

GUIDE_YAML = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_processes": 8,
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": True,
    },
    "parallelism_config": {"parallelism_config_cp_size": 8},
}  # fmt: skip

SAME = """
import dataclasses, json, os, sys
import arguments, model
from accelerate import ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from trl import SFTConfig

def launched(path):
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", path, "train.py"]))
    assert args.use_fsdp and args.num_processes == 8 and args.mixed_precision == "bf16"
    wanted = ("FSDP_", "PARALLELISM_", "ACCELERATE_")
    before = dict(os.environ)
    environment = {k: v for k, v in prepare_multi_gpu_env(args).items() if k.startswith(wanted)}
    os.environ.update(environment)
    plugin, parallel = FullyShardedDataParallelPlugin(), ParallelismConfig()
    os.environ.clear()
    os.environ.update(before)
    found = {name: str(value) for name, value in vars(plugin).items() if "mixed" not in name}
    sizes = {name: getattr(parallel, name) for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size",
             "sp_size", "cp_backend")}
    return found, {**sizes, "cp_comm_strategy": parallel.cp_handler.cp_comm_strategy}, environment

job = json.load(open("plan.json"))
mine, guide = launched("accelerate.yaml"), launched("guide.yaml")
assert mine[0] == guide[0], [(k, v, guide[0][k]) for k, v in mine[0].items() if v != guide[0][k]]
assert mine[1] == guide[1] and mine[1]["cp_size"] == 8, (mine[1], guide[1])

yarn = {"rope_type": "yarn", "rope_theta": 1_000_000, "factor": 32.0, "original_max_position_embeddings": 32768}
on_cpu = {"use_cpu": True, "output_dir": "out"}
mine = SFTConfig(**{**arguments.sft_arguments(job), **on_cpu})
guide = SFTConfig(max_length=1_048_576, per_device_train_batch_size=1, logging_steps=1, save_strategy="no",
    pad_to_multiple_of=16, gradient_checkpointing_kwargs={"offload": True}, bf16=True,
    model_init_kwargs={"dtype": "bfloat16", "rope_parameters": yarn}, **on_cpu)
differing = {f.name: [repr(getattr(each, f.name)) for each in (mine, guide)] for f in dataclasses.fields(SFTConfig)
             if getattr(mine, f.name) != getattr(guide, f.name)}

config = model.load_config({**job, "model": {**job["model"], "init": "random"}})
raw = {key: value for key, value in job["model"]["config"].items() if key != "model_type"}
theirs = type(config).from_dict(raw)
theirs.rope_parameters = yarn
rotary = [Qwen3RotaryEmbedding(each) for each in (config, theirs)]
assert rotary[0].inv_freq.equal(rotary[1].inv_freq)
assert rotary[0].attention_scaling == rotary[1].attention_scaling
plain = Qwen3RotaryEmbedding(type(config).from_dict(raw))
assert not rotary[0].inv_freq.equal(plain.inv_freq)
same = {name: value for name, value in config.to_dict().items() if value != theirs.to_dict().get(name)}
print(json.dumps({"arguments": differing, "model": sorted(same), "plan": job["plan"], "name": job["model"]["id"],
    "rows_per_step": arguments.rows_per_step(job["plan"]), "row_length": arguments.row_length(job["plan"])}))
"""

REASONS = {
    "pad_to_multiple_of": "rows are cut to the multiple, so that nothing is left to pad",
    "gradient_checkpointing_kwargs": "use_reentrant is said; transformers takes False where it is not",
    "activation_checkpointing_kwargs": "the newer name of the same",
    "model_init_kwargs": "train.py builds the model; its rotary embedding is compared above",
    "dataset_kwargs": "rows come tokenized",
    "dataloader_drop_last": "there are whole steps only",
    "learning_rate": "the preset's own; the guide keeps TRL's default",
    "max_steps": "the preset trains for a number of steps, the guide for three epochs of four rows",
    "num_train_epochs": "as max_steps",
    "save_total_limit": "checkpoints to resume from, where the plan saves any",
    "ddp_timeout": "rank 0 tokenizes for all",
    "disable_tqdm": "the job prints its own lines",
}


def test_the_folder_is_the_job_of_the_guide(tmp_path: Path, lcplan) -> None:
    made: Outcome = lcplan("run", "--preset", "qwen3-8b-1m", "--output-dir", str(tmp_path / "job"), "--dry-run")
    assert made.code == 0, made.err
    (tmp_path / "job" / "guide.yaml").write_text(yaml.safe_dump(GUIDE_YAML))
    done = run_python("-c", SAME, cwd=tmp_path / "job")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["name"] == "Qwen/Qwen3-8B"
    assert (found["rows_per_step"], found["row_length"]) == (1, 1_048_576)
    assert (found["plan"]["cp_size"], found["plan"]["num_gpus"], found["plan"]["offload_activations"]) == (8, 8, True)
    assert set(found["arguments"]) <= set(REASONS), {
        name: found["arguments"][name] for name in set(found["arguments"]) - set(REASONS)
    }
    # The length up to which positions are known, which YaRN with a factor of its own does not ask.
    assert set(found["model"]) <= {"rope_parameters", "max_position_embeddings"}
    document = json.loads((tmp_path / "job" / "plan.json").read_text())
    assert document["data"] == {
        "kind": "hub", "paths": [], "name": "emozilla/pg19", "config": None, "split": "train", "text_column": "text",
        "format": "auto",
    }  # fmt: skip
