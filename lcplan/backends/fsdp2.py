"""FSDP2 with context parallelism: accelerate's YAML. A ``parallelism_config`` block switches itself on."""

from __future__ import annotations

from typing import Any

from lcplan.train_plan import TrainPlan

DISTRIBUTED_TYPE = "FSDP"


def accelerate_blocks(plan: TrainPlan) -> dict[str, Any]:
    """The blocks of a job whose states are sharded over dp_shard_size x cp_size."""
    return {"fsdp_config": _fsdp_config(plan), "parallelism_config": _parallelism_config(plan)}


def _fsdp_config(plan: TrainPlan) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": plan.reshard_after_forward,
        # Checkpoints are sharded; train.py switches to a full state dict for the final model.
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        # Rank 0 alone holds the weights in host memory and broadcasts them; train.py leaves the others empty. Nobody
        # broadcasts 4-bit weights: every rank has to load its own.
        "fsdp_cpu_ram_efficient_loading": plan.quantize == "none",
        "fsdp_offload_params": plan.offload_params,
        # The training arguments ask for checkpointing; two mechanisms at once are refused.
        "fsdp_activation_checkpointing": False,
    }


def _parallelism_config(plan: TrainPlan) -> dict[str, Any]:
    sizes = {
        "dp_replicate_size": plan.dp_replicate_size,
        "dp_shard_size": plan.dp_shard_size,
        "cp_size": plan.cp_size,
        "cp_backend": "torch",
        "cp_comm_strategy": plan.cp_comm_strategy,
        "tp_size": 1,
        "sp_size": 1,
    }
    return {f"parallelism_config_{key}": value for key, value in sizes.items()}
