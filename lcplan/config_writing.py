"""Writes a plan as the two files that TRL and accelerate read: ``accelerate launch --config_file accelerate.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lcplan.backends.accelerate_yaml import accelerate_config
from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.model_spec import ModelSpec
from lcplan.rope import position_limit, resolve_rope
from lcplan.train_plan import MAX_TOKENS, TrainPlan

ACCELERATE_FILE, TRL_FILE = "accelerate.yaml", "sft.yaml"
WRITABLE: dict[str, Any] = {
    "mlp_tile_size": MAX_TOKENS, "kernels": "none", "offload_prefetch": False, "cp_head_chunks": 1,
}  # fmt: skip
"""Plan fields that keep a search to what TRL has keys for: one tile has all tokens."""


def trl_values(spec: ModelSpec, plan: TrainPlan) -> dict[str, Any]:
    """Keys of TRL's SFTConfig and ModelConfig, as ``trl sft --config`` reads them.

    Raises:
        PlanError: for a lever that these keys cannot say.
    """
    for name, problem in (
        ("mlp_tile_size", plan.running_tile is not None),
        ("loss", plan.loss == "full"),
        ("cp_head_chunks", plan.cp_head_chunks > 1),
        ("cp_merge_dtype", plan.cp_merge_dtype != "float32"),
        ("offload_prefetch", plan.offload_prefetch),
    ):
        if problem:
            raise PlanError("emit-lever", f"--emit: trl has no key for --{name.replace('_', '-')}. Leave it out.")
    if plan.kernels != "none":
        raise PlanError(
            "emit-kernels", f"--emit: trl gives up its key for --kernels {plan.kernels} in 2.0. Leave it out."
        )
    if plan.keeps_attention_on_host:
        raise PlanError(
            "emit-lever",
            "--emit: trl's selective checkpointing keeps attention outputs on the GPU, also with offload; only the job "
            "of lcplan run sends them to the host. Use --activation-checkpointing full, or --no-offload-activations.",
        )
    values: dict[str, Any] = {
        "model_name_or_path": spec.id,
        "max_length": plan.max_length,
        "per_device_train_batch_size": plan.per_device_train_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "optim": plan.optim,
        "loss_type": "nll",
        "bf16": True,
        "packing": plan.packing,
        "activation_offloading": plan.activation_offloading,
        "gradient_checkpointing": plan.activation_checkpointing != "none",
        "model_init_kwargs": _model_arguments(spec, plan),
    }
    if options := _checkpointing_options(plan):
        values["gradient_checkpointing_kwargs"] = options
    if plan.length_multiple > 1:
        values["pad_to_multiple_of"] = plan.length_multiple
    if plan.lora_r is not None:
        targets = plan.lora_target_modules
        named = targets if targets == "all-linear" else targets.split(",")
        values |= {"use_peft": True, "lora_r": plan.lora_r, "lora_target_modules": named}
    if plan.quantize == "nf4":
        values["load_in_4bit"] = True
    return values


def _model_arguments(spec: ModelSpec, plan: TrainPlan) -> dict[str, Any]:
    arguments: dict[str, Any] = {"dtype": plan.dtype, "attn_implementation": plan.attn_implementation}
    rope = resolve_rope(spec, plan.max_length, plan.rope)
    if rope is not None:
        arguments["rope_parameters"] = rope.model_dump()
        arguments["max_position_embeddings"] = position_limit(spec, plan.max_length, rope)
    return arguments


def _checkpointing_options(plan: TrainPlan) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if plan.activation_checkpointing == "selective":
        options["selective"] = True
    if plan.offload_activations:
        options["offload"] = True
    if plan.checkpoint_every_n_layers > 1:
        options["every_n_layers"] = plan.checkpoint_every_n_layers
    return options


def write_configs(spec: ModelSpec, plan: TrainPlan, folder: Path, *, force: bool = False) -> tuple[Path, Path]:
    """Write both files into a folder; existing ones only with ``force``.

    Raises:
        PlanError: for a plan that the files cannot say.
        EnvironmentProblem: where they are there already, or cannot be written.
    """
    contents = {ACCELERATE_FILE: accelerate_config(plan), TRL_FILE: trl_values(spec, plan)}
    paths = (folder / ACCELERATE_FILE, folder / TRL_FILE)
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise EnvironmentProblem("emit-exists", f"{there[0]} is there already. Name another folder with --emit.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.write_text(yaml.safe_dump(contents[path.name], sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(
            "emit-not-writable", f"--emit {folder} cannot be written ({error.strerror}). Name another folder."
        ) from None
    return paths
