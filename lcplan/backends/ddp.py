"""DDP, the whole model on every GPU: accelerate's YAML.

``MULTI_GPU`` on the CPU too: ``MULTI_CPU`` starts its second process through mpirun only, and reports success
without one.
"""

from __future__ import annotations

from typing import Any

from lcplan.train_plan import TrainPlan

DISTRIBUTED_TYPE = "MULTI_GPU"


def accelerate_blocks(_plan: TrainPlan) -> dict[str, Any]:
    """Nothing beyond what every job has."""
    return {}
