"""One process on one GPU (or on the CPU): accelerate's YAML."""

from __future__ import annotations

from typing import Any, Literal

from lcplan.errors import PlanError
from lcplan.train_plan import TrainPlan


def accelerate_config(plan: TrainPlan, *, device: Literal["gpu", "cpu"] = "gpu") -> dict[str, Any]:
    """The YAML of a job without any parallelism."""
    if plan.num_gpus != 1:
        raise PlanError(
            "parallel-sizes",
            f"backend single uses one GPU, not {plan.num_gpus}. Use --backend fsdp2, or --num-gpus 1.",
        )
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "num_machines": 1,
        "num_processes": 1,
        "machine_rank": 0,
        "mixed_precision": "no" if device == "cpu" else "bf16",
        "use_cpu": device == "cpu",
    }
