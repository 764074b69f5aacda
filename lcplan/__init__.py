"""lcplan: does a long-context fine-tuning run fit, what dominates, what would make it fit.

``estimate`` and ``recommend`` are pure: records in, records out; nothing is printed and torch is never imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lcplan.estimation import estimate as estimate
    from lcplan.hardware import GpuSpec as GpuSpec
    from lcplan.hardware import load_gpu as load_gpu
    from lcplan.ledger import MemoryReport as MemoryReport
    from lcplan.model_loading import load_model as load_model
    from lcplan.model_spec import ModelSpec as ModelSpec
    from lcplan.recommendation import Goal as Goal
    from lcplan.recommendation import recommend as recommend
    from lcplan.train_plan import TrainPlan as TrainPlan
    from lcplan.train_plan import resolve as resolve

_HOMES = {
    "estimate": "estimation",
    "GpuSpec": "hardware",
    "load_gpu": "hardware",
    "MemoryReport": "ledger",
    "load_model": "model_loading",
    "ModelSpec": "model_spec",
    "Goal": "recommendation",
    "recommend": "recommendation",
    "TrainPlan": "train_plan",
    "resolve": "train_plan",
}
"""Public name -> module; loaded at first use, which keeps the start of the command line quick."""

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'lcplan' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lcplan.{_HOMES[name]}"), name)
