"""What is read of other tools' files, what is refused, and the way back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lcplan.config_reading import ForeignJob, check_padding, read_configs
from lcplan.config_writing import trl_values, write_configs
from lcplan.errors import EnvironmentProblem, InputError, LcplanError, PlanError
from lcplan.model_loading import load_model
from lcplan.train_plan import resolve
from tests.conftest import Outcome

ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_machines": 2, "num_processes": 16,
    "mixed_precision": "bf16", "rdzv_backend": "static",
    "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False},
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": 1, "parallelism_config_dp_shard_size": 2,
        "parallelism_config_cp_size": 8, "parallelism_config_tp_size": 1,
        "parallelism_config_cp_comm_strategy": "alltoall",
    },
}  # fmt: skip
TRL: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-8B", "max_length": 1_048_576, "per_device_train_batch_size": 1, "bf16": True,
    "gradient_checkpointing_kwargs": {"offload": True, "use_reentrant": False}, "learning_rate": 1e-5,
    "logging_steps": 10, "dataset_name": "emozilla/pg19", "max_steps": -1,
    "model_init_kwargs": {
        "dtype": "bfloat16", "attn_implementation": "sdpa",
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "rope_theta": 1_000_000, "original_max_position_embeddings": 32_768,
        },
    },
}  # fmt: skip
AXOLOTL: dict[str, Any] = {
    "base_model": "Qwen/Qwen3-4B", "sequence_len": 32_768, "micro_batch_size": 2, "gradient_accumulation_steps": 4,
    "optimizer": "adamw_torch_fused", "gradient_checkpointing": True, "bf16": "auto", "datasets": [{"path": "x"}],
    "wandb_project": "p",
}  # fmt: skip
FACTORY: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-4B", "stage": "sft", "finetuning_type": "lora", "lora_rank": 16,
    "lora_target": "all", "cutoff_len": 8192, "per_device_train_batch_size": 1, "template": "qwen3", "bf16": True,
}  # fmt: skip


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ForeignJob]:
    def call(*contents: dict[str, Any]) -> ForeignJob:
        paths = []
        for index, content in enumerate(contents):
            paths.append(tmp_path / f"{index}.yaml")
            paths[-1].write_text(yaml.safe_dump(content))
        return read_configs(paths)

    return call


def test_accelerate_and_trl_together(read: Callable[..., ForeignJob]) -> None:
    job = read(ACCELERATE, TRL)
    assert job.formats == ("accelerate", "TRL")
    assert job.model == "Qwen/Qwen3-8B"
    assert job.plan == {
        "backend": "fsdp2", "num_gpus": 16, "gpus_per_node": 8, "dp_replicate_size": 1, "dp_shard_size": 2,
        "cp_size": 8, "cp_comm_strategy": "alltoall", "max_length": 1_048_576, "per_device_train_batch_size": 1,
        "offload_activations": True, "dtype": "bfloat16", "attn_implementation": "sdpa", "rope": "yarn:32:32768",
    }  # fmt: skip
    assert set(job.ignored) == {"rdzv_backend", "logging_steps", "dataset_name"}
    assert job.training.learning_rate == 1e-5
    assert job.training.max_steps is None
    assert "num_gpus = 16 (num_processes)" in job.taken


def test_trl_alone_loads_in_float32(read: Callable[..., ForeignJob]) -> None:
    job = read({"model_name_or_path": "Qwen/Qwen3-4B", "max_length": 4096})
    assert job.plan == {"max_length": 4096, "dtype": "float32"}
    assert job.training.save_strategy == "steps", "TRL's default"


def test_axolotl(read: Callable[..., ForeignJob]) -> None:
    job = read(AXOLOTL)
    assert job.formats == ("axolotl",)
    assert job.plan == {
        "max_length": 32_768, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
        "optim": "adamw_torch_fused", "activation_checkpointing": "full", "dtype": "bfloat16", "loss": "full",
    }  # fmt: skip
    assert set(job.ignored) == {"datasets", "wandb_project"}
    more = read(
        AXOLOTL
        | {
            "adapter": "qlora", "lora_r": 32, "lora_target_linear": True, "sample_packing": True,
            "flash_attention": True,
            "activation_offloading": True, "gradient_checkpointing": False, "fsdp_config": {"offload_params": True},
            "fsdp_version": 2, "deepspeed": "zero3.json", "dp_shard_size": 2, "bf16": False,
        }
    ).plan  # fmt: skip
    assert more["lora_r"] == 32
    assert more["lora_target_modules"] == "all-linear"
    assert (more["quantize"], more["packing"], more["attn_implementation"]) == ("nf4", True, "flash_attention_2")
    assert (more["backend"], more["offload_params"], more["dp_shard_size"]) == ("deepspeed", True, 2)
    assert (more["activation_checkpointing"], more["activation_offloading"]) == ("none", True)
    assert "dtype" not in more


def test_llama_factory(read: Callable[..., ForeignJob]) -> None:
    job = read(FACTORY)
    assert job.formats == ("LLaMA-Factory",)
    assert job.plan == {
        "max_length": 8192, "per_device_train_batch_size": 1, "activation_checkpointing": "full", "lora_r": 16,
        "lora_target_modules": "all-linear", "attn_implementation": "sdpa", "loss": "full",
    }  # fmt: skip
    assert job.ignored == ("template",)
    more = read(
        FACTORY
        | {
            "finetuning_type": "full", "disable_gradient_checkpointing": True, "flash_attn": "fa2",
            "neat_packing": True,
            "deepspeed": "zero3.json", "quantization_bit": 4,
        }
    ).plan  # fmt: skip
    assert (more["activation_checkpointing"], more["attn_implementation"]) == ("none", "flash_attention_2")
    assert (more["packing"], more["backend"], more["quantize"]) == (True, "deepspeed", "nf4")


def test_more_of_trl(read: Callable[..., ForeignJob]) -> None:
    job = read(
        {
            "max_length": 4096, "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"selective": True, "every_n_layers": 2}, "activation_offloading": True,
            "padding_free": True, "loss_type": "nll", "dtype": "bfloat16", "use_peft": True, "lora_r": 8,
            "lora_target_modules": ["q_proj", "v_proj"], "load_in_4bit": True, "deepspeed": "z3.json",
            "pad_to_multiple_of": 16, "attn_implementation": "flash_attention_2",
        }
    )  # fmt: skip
    assert job.plan == {
        "max_length": 4096, "activation_checkpointing": "selective", "checkpoint_every_n_layers": 2, "loss": "chunked",
        "activation_offloading": True, "packing": True, "dtype": "bfloat16", "attn_implementation": "flash_attention_2",
        "lora_r": 8, "lora_target_modules": "q_proj,v_proj", "quantize": "nf4", "backend": "deepspeed",
    }  # fmt: skip
    assert job.pad_to_multiple_of == 16
    off = read({"max_length": 4096, "gradient_checkpointing": False, "model_init_kwargs": {"dtype": "float32"}})
    assert off.plan["activation_checkpointing"] == "none"
    scaled = read({"max_length": 4096, "model_init_kwargs": {"rope_scaling": {"rope_type": "default"}}})
    assert scaled.plan["rope"] == "none"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (ACCELERATE | {"distributed_type": "MULTI_GPU"}, "ddp"),
        (ACCELERATE | {"distributed_type": "NO"}, "ddp"),
        (ACCELERATE | {"distributed_type": "MEGATRON_LM"}, "distributed-type"),
        (ACCELERATE | {"mixed_precision": "fp8"}, "precision"),
        (ACCELERATE | {"use_cpu": True}, "cpu-plan"),
        (ACCELERATE | {"fsdp_config": {"fsdp_version": 1}}, "fsdp1"),
        (ACCELERATE | {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}}, "no-reshard"),
        (ACCELERATE | {"parallelism_config": {"parallelism_config_tp_size": 2}}, "tp"),
        (ACCELERATE | {"num_processes": "many"}, "bad-config"),
        (TRL | {"use_liger_kernel": True}, "liger-loss"),
        (TRL | {"use_liger_kernel": True, "loss_type": "chunked_nll"}, "liger-loss"),
        (TRL | {"loss_type": "dft"}, "loss-type"),
        (TRL | {"gradient_checkpointing_kwargs": {"selective": True, "offload": True}}, "selective-offload"),
        (TRL | {"fp16": True}, "precision"),
        (TRL | {"load_in_8bit": True}, "int8"),
        (TRL | {"model_init_kwargs": {"dtype": "float16"}}, "precision"),
        (TRL | {"model_init_kwargs": {"rope_parameters": {"rope_type": "linear", "factor": 4}}}, "rope-type"),
        (TRL | {"model_init_kwargs": {"rope_parameters": {"rope_type": "yarn", "factor": 4}}}, "rope-keys"),
        (AXOLOTL | {"context_parallel_size": 4}, "axolotl-cp"),
        (AXOLOTL | {"fsdp_version": 1}, "fsdp1"),
        (AXOLOTL | {"gradient_checkpointing": "offload"}, "offload-kind"),
        (AXOLOTL | {"adapter": "llama-adapter"}, "adapter"),
        (AXOLOTL | {"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, "plugins"),
        (FACTORY | {"stage": "dpo"}, "stage"),
        (FACTORY | {"flash_attn": "fa9"}, "attention"),
        (FACTORY | {"enable_liger_kernel": True}, "liger-loss"),
        ({"anything": 1}, "unknown-config"),
    ],
)  # fmt: skip
def test_what_no_plan_can_express(read: Callable[..., ForeignJob], content: dict[str, Any], code: str) -> None:
    with pytest.raises(LcplanError) as caught:
        read(content)
    assert caught.value.code == code


def test_files_must_agree(read: Callable[..., ForeignJob]) -> None:
    with pytest.raises(InputError, match="configs-disagree|another file"):
        read(TRL, TRL | {"max_length": 4096})
    with pytest.raises(PlanError, match="refuses both at once"):
        read(ACCELERATE | {"fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}, TRL)
    one = read(
        ACCELERATE | {"fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}},
    )
    assert one.plan["activation_checkpointing"] == "full"


def test_warnings(read: Callable[..., ForeignJob]) -> None:
    job = read(
        ACCELERATE
        | {
            "fsdp_config": {
                "fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": False, "fsdp_state_dict_type": "FULL_STATE_DICT",
                "fsdp_offload_params": True,
            }
        }
    )  # fmt: skip
    assert {warning.code for warning in job.warnings} == {"every-rank-loads", "full-state-dict"}
    assert job.plan["offload_params"] is True


def test_padding_has_to_divide(read: Callable[..., ForeignJob]) -> None:
    job = read(TRL | {"pad_to_multiple_of": 8})
    check_padding(job, 1)
    check_padding(job, 8)
    with pytest.raises(PlanError, match="no multiple of 16"):
        check_padding(job, 16)


@pytest.mark.parametrize("text", ["- a", "a: [", "a: 1\na: 2", "1: 2"])
def test_files_that_are_no_mapping(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError, match="not"):
        read_configs([tmp_path / "c.yaml"])
    with pytest.raises(InputError, match="cannot be read"):
        read_configs([tmp_path / "missing.yaml"])


PLANS: tuple[dict[str, Any], ...] = (
    {"max_length": 1 << 20, "num_gpus": 8, "cp_size": 8, "offload_activations": True},
    {
        "max_length": 65_536,
        "num_gpus": 8,
        "dp_replicate_size": 2,
        "cp_size": 2,
        "activation_checkpointing": "selective",
    },
    {"max_length": 8192, "activation_checkpointing": "none", "gradient_accumulation_steps": 4},
    {"max_length": 65_536, "checkpoint_every_n_layers": 2, "activation_offloading": True, "rope": "yarn:2"},
    {"max_length": 65_536, "num_gpus": 4, "lora_r": 16, "lora_target_modules": "q_proj,v_proj"},
    {"max_length": 16_384, "num_gpus": 16, "dp_shard_size": 16, "offload_params": True, "gpus_per_node": 8},
    {"max_length": 16_384, "lora_r": 16, "quantize": "nf4"},
    {"max_length": 65_536, "num_gpus": 8, "backend": "deepspeed", "sp_size": 4, "offload_optimizer": True},
    {"max_length": 8192, "num_gpus": 8, "backend": "deepspeed", "zero_stage": 1},
)


@pytest.mark.parametrize("given", PLANS)
def test_what_is_written_reads_back_as_the_same_plan(tmp_path: Path, given: dict[str, Any]) -> None:
    spec = load_model("Qwen/Qwen3-8B")
    plan, _ = resolve(spec, given | {"gpu": "h100-80gb"}, usual_gpus_per_node=8)
    job = read_configs(write_configs(spec, plan, tmp_path))
    again, _ = resolve(spec, job.plan | {"gpu": "h100-80gb"}, usual_gpus_per_node=8)
    ignored = {"rope", "lora_target_modules"} if plan.lora_r is None else {"rope"}
    assert again.model_dump(exclude=ignored) == plan.model_dump(exclude=ignored)
    from lcplan.rope import resolve_rope

    assert resolve_rope(spec, again.max_length, again.rope) == resolve_rope(spec, plan.max_length, plan.rope)
    assert job.model == spec.id
    with pytest.raises(EnvironmentProblem, match="there already"):
        write_configs(spec, plan, tmp_path)
    write_configs(spec, plan, tmp_path, force=True)


@pytest.mark.train
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")  # the name that every transformers 5 takes
@pytest.mark.parametrize("given", PLANS)
def test_trl_and_accelerate_take_what_is_written(tmp_path: Path, given: dict[str, Any]) -> None:
    import dataclasses

    from accelerate.commands.config.config_args import load_config_from_file
    from trl import ModelConfig, SFTConfig

    spec = load_model("Qwen/Qwen3-8B")
    plan, _ = resolve(spec, given | {"gpu": "h100-80gb"}, usual_gpus_per_node=8)
    launcher, trainer = write_configs(spec, plan, tmp_path)
    values = yaml.safe_load(trainer.read_text())
    of_model = {field.name for field in dataclasses.fields(ModelConfig)}
    mine = {name: value for name, value in values.items() if name not in of_model}
    config = SFTConfig(output_dir=str(tmp_path / "out"), use_cpu=True, **mine | {"bf16": False})
    assert config.max_length == plan.max_length
    assert config.activation_offloading == plan.activation_offloading
    assert config.model_init_kwargs["dtype"] == plan.dtype
    ModelConfig(**{name: value for name, value in values.items() if name in of_model})
    found = load_config_from_file(str(launcher))
    assert found.num_processes == plan.num_gpus
    kind = {"single": "NO", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}[plan.backend]
    assert str(found.distributed_type).endswith(kind)


def test_an_nvme_offload_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 8\n"
        "deepspeed_config: {zero_stage: 3, offload_param_device: nvme}\n"
    )
    with pytest.raises(PlanError, match="nvme"):
        read_configs([tmp_path / "a.yaml"])


def test_what_cannot_be_written() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    full, _ = resolve(spec, {"max_length": 64, "gpu": "h200", "loss": "full"}, usual_gpus_per_node=8)
    with pytest.raises(PlanError, match="--loss"):
        trl_values(spec, full)
    given = {"max_length": 64, "gpu": "h200", "num_gpus": 2, "cp_size": 2}
    for lever in ({"cp_head_chunks": 2}, {"cp_merge_dtype": "bfloat16"}):
        ring, _ = resolve(spec, given | lever, usual_gpus_per_node=8)
        with pytest.raises(PlanError, match="trl has no key for --cp-"):
            trl_values(spec, ring)
    ahead = {"offload_activations": True, "offload_prefetch": True}
    for lever, name in (({"mlp_tile_size": 8}, "mlp-tile-size"), (ahead, "offload-prefetch")):
        plan, _ = resolve(spec, {"max_length": 64, "gpu": "h200", **lever}, usual_gpus_per_node=8)
        with pytest.raises(PlanError, match=name):
            trl_values(spec, plan)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    spec = load_model("Qwen/Qwen3-8B")
    plan, _ = resolve(spec, {"max_length": 64, "gpu": "h200"}, usual_gpus_per_node=8)
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        write_configs(spec, plan, tmp_path / "file")


def test_the_commands(lcplan: Callable[..., Outcome], tmp_path: Path) -> None:
    goal = ["--max-length", "1048576", "--gpu", "h100-80gb", "--num-gpus", "8"]
    kept = [*goal, "--cp-size", "8", "--activation-checkpointing", "selective", "--offload-activations"]
    asked = lcplan("recommend", "Qwen/Qwen3-8B", *kept, "--emit", str(tmp_path / "out"))
    assert asked.code == 2
    assert "--emit: trl" in asked.err
    told = lcplan("recommend", "Qwen/Qwen3-8B", *goal, "--emit", str(tmp_path / "out"))
    assert told.code == 0
    assert "Wrote" in told.err
    files = [arg for name in ("accelerate.yaml", "sft.yaml") for arg in ("--config", str(tmp_path / "out" / name))]
    read = lcplan("estimate", *files, "--gpu", "h100-80gb", "--json")
    assert read.code == 0
    assert "cp_size = 8 (parallelism_config_cp_size)" in read.err
    report = json.loads(read.out)
    assert report["plan"]["cp_size"] == 8
    assert report["rope"]["factor"] == 32
    assert lcplan("recommend", *files, "--gpu", "h100-80gb").code == 0


def test_a_plan_for_trl_has_no_kernels_that_it_cannot_say(lcplan: Callable[..., Outcome], tmp_path: Path) -> None:
    goal = ["recommend", "Qwen/Qwen3-4B", "--max-length", "32768", "--gpu", "h200"]
    emit = ["--emit", str(tmp_path / "out")]
    assert "--kernels liger" in lcplan(*goal).out
    for fixes in (["--kernels", "none"], emit):
        out = lcplan(*goal, *fixes).out
        assert "left out: fused-kernels: " in out
        assert "Liger" not in out.partition("left out: ")[0] + out.partition("memory against time")[2]
    asked = lcplan(*goal, *emit, "--kernels", "liger")
    assert asked.code == 2
    assert "--emit: trl gives up its key for --kernels liger" in asked.err


def test_a_theta_that_is_not_the_models_is_refused(lcplan: Callable[..., Outcome], tmp_path: Path) -> None:
    rope = TRL["model_init_kwargs"]["rope_parameters"] | {"rope_theta": 10_000}
    content = TRL | {"model_init_kwargs": TRL["model_init_kwargs"] | {"rope_parameters": rope}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(content))
    result = lcplan("estimate", "--config", str(tmp_path / "sft.yaml"), "--gpu", "h100-80gb")
    assert result.code == 2
    assert "rope-theta" in result.err


def test_a_file_without_a_model_needs_one(lcplan: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(ACCELERATE))
    result = lcplan("estimate", "--config", str(tmp_path / "a.yaml"), "--gpu", "h200", "--max-length", "1Mi")
    assert result.code == 2
    assert "names no model" in result.err
    named = lcplan(
        "estimate", "Qwen/Qwen3-8B", "--config", str(tmp_path / "a.yaml"), "--gpu", "h200", "--max-length", "1Mi"
    )
    assert named.code in (0, 1)


def test_a_foreign_job_runs_with_data_of_its_own(lcplan: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(
        yaml.safe_dump(TRL | {"max_length": 4096, "model_init_kwargs": {"dtype": "bfloat16"}})
    )
    config = ["--config", str(tmp_path / "sft.yaml"), "--gpu", "h200", "--no-offload-activations", "--dry-run"]
    missing = lcplan("run", *config, "--output-dir", str(tmp_path / "a"))
    assert missing.code == 2
    assert "--data" in missing.err
    done = lcplan("run", *config, "--data", "python-docs", "--init", "random", "--output-dir", str(tmp_path / "b"))
    assert done.code == 0
    assert json.loads((tmp_path / "b" / "plan.json").read_text())["training"]["learning_rate"] == 1e-5
