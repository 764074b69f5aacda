"""FSDP2 with context parallelism: accelerate's YAML.

Keys as accelerate 1.15 reads them: ``commands/config/config_args.py`` refuses an unknown key at the top
level, ``utils/launch.py`` says what each becomes. A ``parallelism_config`` block switches itself on.
"""

from __future__ import annotations

from typing import Any

from lcplan.errors import PlanError
from lcplan.train_plan import TrainPlan
from lcplan.units import ceil_div


def accelerate_config(plan: TrainPlan) -> dict[str, Any]:
    """The YAML of a job whose states are sharded over dp_shard_size x cp_size."""
    ranks = plan.dp_replicate_size * plan.dp_shard_size * plan.cp_size
    if ranks != plan.num_gpus:
        raise PlanError(
            "parallel-sizes",
            f"dp_replicate_size={plan.dp_replicate_size} x dp_shard_size={plan.dp_shard_size} x "
            f"cp_size={plan.cp_size} is {ranks}, and every one of num_gpus={plan.num_gpus} needs a place. "
            f"Use --dp-shard-size {max(1, plan.num_gpus // (plan.cp_size * plan.dp_replicate_size))}, "
            f"or --num-gpus {ranks}.",
        )
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "num_machines": ceil_div(plan.num_gpus, plan.gpus_per_node),
        "num_processes": plan.num_gpus,
        "machine_rank": 0,
        "mixed_precision": "bf16",
        "use_cpu": False,
        "fsdp_config": _fsdp_config(plan),
        "parallelism_config": _parallelism_config(plan),
    }


def _fsdp_config(plan: TrainPlan) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": plan.reshard_after_forward,
        # Checkpoints are sharded; train.py switches to a full state dict for the final model.
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        # Rank 0 alone holds the weights in host memory and broadcasts them; train.py leaves the others empty.
        "fsdp_cpu_ram_efficient_loading": True,
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
