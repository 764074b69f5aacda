"""What accelerate's YAML says of a plan, whatever the backend: one entry per backend, and the keys that all share.

Keys as accelerate 1.15 reads them: ``commands/config/config_args.py`` refuses an unknown key at the top
level, ``utils/launch.py`` says what each becomes.
"""

from __future__ import annotations

from typing import Any

from lcplan.backends import ddp, deepspeed, fsdp2, single
from lcplan.errors import PlanError
from lcplan.job_options import Device
from lcplan.train_plan import TrainPlan
from lcplan.units import ceil_div

BACKENDS = {"single": single, "ddp": ddp, "fsdp2": fsdp2, "deepspeed": deepspeed}


def accelerate_config(plan: TrainPlan, *, device: Device = "gpu") -> dict[str, Any]:
    """The YAML that ``accelerate launch --config_file`` takes.

    Raises:
        PlanError: where the plan's parallel sizes do not make up its GPUs.
    """
    _check_sizes(plan)
    backend = BACKENDS[plan.backend]
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": backend.DISTRIBUTED_TYPE,
        "num_machines": ceil_div(plan.num_gpus, plan.gpus_per_node),
        "num_processes": plan.num_gpus,
        "machine_rank": 0,
        "mixed_precision": "no" if device == "cpu" else "bf16",
        "use_cpu": device == "cpu",
        **backend.accelerate_blocks(plan),
    }


def _check_sizes(plan: TrainPlan) -> None:
    if plan.backend == "single" and plan.num_gpus != 1:
        raise PlanError(
            "parallel-sizes",
            f"backend single uses one GPU, not {plan.num_gpus}. Use --backend fsdp2, or --num-gpus 1.",
        )
    ranks = plan.dp_replicate_size * plan.dp_shard_size * plan.cp_size * plan.sp_size
    if ranks != plan.num_gpus:
        others = plan.cp_size * plan.sp_size * plan.dp_replicate_size
        raise PlanError(
            "parallel-sizes",
            f"dp_replicate_size={plan.dp_replicate_size} x dp_shard_size={plan.dp_shard_size} x "
            f"cp_size={plan.cp_size} x sp_size={plan.sp_size} is {ranks}, and every one of num_gpus={plan.num_gpus} "
            f"needs a place. Use --dp-shard-size {max(1, plan.num_gpus // others)}, or --num-gpus {ranks}.",
        )
