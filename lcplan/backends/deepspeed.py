"""DeepSpeed ZeRO with Ulysses: accelerate's YAML.

A ``parallelism_config`` block switches itself on, and is written for Ulysses only: with it
``dp_replicate_size * dp_shard_size`` has to be ``num_processes / sp_size``, or DeepSpeed's batch check fails.
Bucket sizes and the like stay DeepSpeed's own, as the memory model has them.
"""

from __future__ import annotations

from typing import Any

from lcplan.train_plan import TrainPlan
from lcplan.units import ceil_div

DISTRIBUTED_TYPE = "DEEPSPEED"
MAX_GRAD_NORM = 1.0
"""transformers' own ``max_grad_norm``; DeepSpeed clips by its own setting, and the trainer compares the two."""


def accelerate_blocks(plan: TrainPlan) -> dict[str, Any]:
    """The blocks of a job whose states ZeRO shards over all ranks."""
    blocks: dict[str, Any] = {"deepspeed_config": _deepspeed_config(plan)}
    if plan.sp_size > 1:
        blocks["parallelism_config"] = _parallelism_config(plan)
    return blocks


def _deepspeed_config(plan: TrainPlan) -> dict[str, Any]:
    config: dict[str, Any] = {
        "zero_stage": plan.zero_stage,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "gradient_clipping": MAX_GRAD_NORM,
        "offload_optimizer_device": "cpu" if plan.offload_optimizer else "none",
    }
    if plan.zero_stage == 3:
        config |= {
            "offload_param_device": "cpu" if plan.offload_params else "none",
            # each parameter is split as it is made, and the saved model is gathered whole
            "zero3_init_flag": True,
            "zero3_save_16bit_model": True,
        }
    if ceil_div(plan.num_gpus, plan.gpus_per_node) > 1:
        config["deepspeed_multinode_launcher"] = "standard"  # accelerate's own would need pdsh
    return config


def _parallelism_config(plan: TrainPlan) -> dict[str, Any]:
    values = {
        "dp_replicate_size": plan.dp_replicate_size,
        "dp_shard_size": plan.dp_shard_size,
        "cp_size": 1,
        "tp_size": 1,
        "sp_size": plan.sp_size,
        "sp_backend": "deepspeed",
        "sp_seq_length_is_variable": True,
        "sp_attn_implementation": plan.attn_implementation,
    }
    return {f"parallelism_config_{key}": value for key, value in values.items()}
