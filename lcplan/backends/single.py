"""One process on one GPU, or on the CPU: accelerate's YAML needs nothing beyond what every job has."""

from __future__ import annotations

from typing import Any

from lcplan.train_plan import TrainPlan

DISTRIBUTED_TYPE = "NO"


def accelerate_blocks(_plan: TrainPlan) -> dict[str, Any]:
    """Nothing."""
    return {}
