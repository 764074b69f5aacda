"""What plan.json asks of the trainer, under the names that the installed versions know."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from pathlib import Path
from typing import Any

import transformers
import trl
from checks import JobError
from transformers import PreTrainedModel
from trl import SFTConfig

HERE = Path(__file__).resolve().parent
PATIENCE_S = 4 * 3600
"""Ranks wait this long for one another: rank 0 tokenizes the data and loads the weights for all."""


def sft_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of SFTConfig."""
    plan, training, on_cpu = job["plan"], job["training"], job["device"] == "cpu"
    fields = {field.name: field for field in dataclasses.fields(SFTConfig)}
    prefix = "activation" if "activation_checkpointing" in fields else "gradient"
    arguments = {
        "output_dir": str(HERE / "checkpoints"),
        "max_length": plan["max_length"],
        "per_device_train_batch_size": plan["per_device_train_batch_size"],
        "gradient_accumulation_steps": plan["gradient_accumulation_steps"],
        "optim": plan["optim"],
        "loss_type": loss_type(plan["loss"], fields["loss_type"].default),
        f"{prefix}_checkpointing": plan["activation_checkpointing"] != "none",
        f"{prefix}_checkpointing_kwargs": checkpointing_kwargs(plan),
        "activation_offloading": plan["activation_offloading"],
        "bf16": not on_cpu,
        "use_cpu": on_cpu,
        "learning_rate": training["learning_rate"],
        "lr_scheduler_type": training["lr_scheduler_type"],
        "warmup_steps": training["warmup_steps"],
        "weight_decay": training["weight_decay"],
        "max_steps": training["max_steps"] or -1,
        "num_train_epochs": training["num_train_epochs"],
        "seed": training["seed"],
        "save_strategy": training["save_strategy"],
        "save_steps": training["save_steps"],
        "save_total_limit": training["save_total_limit"],
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "ddp_timeout": PATIENCE_S,
        # Rows arrive tokenized, at most max_length long; a last batch that is not full is left out.
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "dataloader_drop_last": True,
        **evaluation_arguments(job),
    }
    if unknown := sorted(set(arguments) - set(fields)):
        raise JobError(f"trl {trl.__version__} does not know {', '.join(unknown)}. Install a release that does.")
    return arguments


def evaluation_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """When and in what batches the held-out rows are scored; nothing where the plan has no evaluation."""
    rows = job["plan"]["per_device_eval_batch_size"]
    if rows is None:
        return {}
    steps = min(job["training"]["eval_steps"], job["training"]["max_steps"] or math.inf)
    return {"per_device_eval_batch_size": rows, "eval_strategy": "steps", "eval_steps": steps}


def loss_type(loss: str, default: str | None) -> str:
    """TRL 1.13 and 1.14 (no default) have two; later ones call the chunked one ``nll`` and have no other."""
    if default is None:
        if loss == "chunked":
            print(f"Note: trl {trl.__version__} scores 256 rows at a time (--loss chunked-256).", file=sys.stderr)
        return "nll" if loss == "full" else "chunked_nll"
    if loss != "chunked":
        raise JobError(
            f"trl {trl.__version__} always computes the loss in large chunks; 1.14 is the last with --loss {loss}. "
            "Plan with --loss chunked, or install trl<1.15."
        )
    return "nll"


def checkpointing_kwargs(plan: dict[str, Any]) -> dict[str, Any] | None:
    """Keys that transformers and TRL take out of the dict; only ``use_reentrant`` reaches torch's checkpoint."""
    if plan["activation_checkpointing"] == "none":
        return None
    asked: dict[str, Any] = {}
    if plan["offload_activations"] and not offloads_by_itself(plan):
        asked["offload"] = True
    if plan["checkpoint_every_n_layers"] > 1:
        asked["every_n_layers"] = plan["checkpoint_every_n_layers"]
    newer_name = getattr(PreTrainedModel, "activation_checkpointing_enable", None)
    enable = newer_name or PreTrainedModel.gradient_checkpointing_enable
    if unknown := sorted(set(asked) - set(inspect.signature(enable).parameters)):
        raise JobError(
            f"transformers {transformers.__version__} cannot checkpoint with {', '.join(unknown)}. "
            "Install a later release, or plan without it."
        )
    if plan["activation_checkpointing"] == "selective" and not keeps_attention_on_host(plan):
        if not hasattr(trl.models, "enable_selective_activation_checkpointing"):
            raise JobError(f"trl {trl.__version__} has no selective checkpointing. Install trl>=1.15.")
        asked["selective"] = True
    # Adapters under ZeRO-3 train right with the reentrant kind alone, as TRL sets it by itself.
    reentrant = plan["lora_r"] is not None and plan["backend"] == "deepspeed" and plan["zero_stage"] == 3
    return {**asked, "use_reentrant": reentrant}


def keeps_attention_on_host(plan: dict[str, Any]) -> bool:
    """Layer inputs and attention outputs both wait on the host."""
    return bool(plan["activation_checkpointing"] == "selective" and plan["offload_activations"])


def offloads_by_itself(plan: dict[str, Any]) -> bool:
    """The job's host_offload.py moves what layers keep, not transformers and TRL."""
    return bool(keeps_attention_on_host(plan) or plan["offload_prefetch"])


def rows_per_step(plan: dict[str, Any]) -> int:
    """Rows of one optimizer step over all ranks."""
    data_parallel_size = plan["dp_replicate_size"] * plan["dp_shard_size"]
    return plan["per_device_train_batch_size"] * data_parallel_size * plan["gradient_accumulation_steps"]


def rows_per_load(plan: dict[str, Any]) -> int:
    """Rows that the data loader deals out at once. Under Ulysses every rank loads some, and all work on each."""
    data_parallel_size = plan["dp_replicate_size"] * plan["dp_shard_size"] * plan["sp_size"]
    return plan["per_device_train_batch_size"] * data_parallel_size


def rows_held_out(job: dict[str, Any]) -> int:
    """Rows for evaluation: what was asked for, in whole batches of all ranks; none where the plan has no evaluation."""
    plan = job["plan"]
    if plan["per_device_eval_batch_size"] is None:
        return 0
    at_once = plan["per_device_eval_batch_size"] * plan["num_gpus"]
    return math.ceil((job["training"]["eval_rows"] or at_once) / at_once) * at_once


def row_length(plan: dict[str, Any]) -> int:
    """max_length trimmed to what the ranks of a sequence can share."""
    return plan["max_length"] - plan["max_length"] % length_multiple(plan)


def length_multiple(plan: dict[str, Any]) -> int:
    """Ring attention balances its load for multiples of 2 x cp_size only; Ulysses cuts into sp_size parts."""
    return 2 * plan["cp_size"] if plan["cp_size"] > 1 else plan["sp_size"]


def ranks_per_sequence(plan: dict[str, Any]) -> int:
    """Ranks that share a sequence."""
    return plan["cp_size"] * plan["sp_size"]


def running_tile(plan: dict[str, Any]) -> int | None:
    """Tokens of one MLP tile; None where one tile has all that a rank trains on."""
    tile, tokens = plan["mlp_tile_size"], plan["per_device_train_batch_size"] * row_length(plan)
    return None if tile is None or tile >= tokens // ranks_per_sequence(plan) else tile
