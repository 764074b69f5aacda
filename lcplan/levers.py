"""The levers of the guide, in its order: each changes a plan in one way and says what it does.

Adding a lever is one entry here and its items in ``estimators``.
"""

from __future__ import annotations

from collections.abc import Callable

from lcplan._record import Record
from lcplan.model_spec import ModelSpec
from lcplan.rope import resolve_rope
from lcplan.train_plan import TrainPlan


class Lever(Record):
    """One thing that changes memory or reach of a plan."""

    id: str
    summary: str
    """What it changes, in a sentence."""
    costs: str
    """What it costs."""
    excludes: str = ""
    """What it cannot be combined with."""
    is_on: Callable[[ModelSpec, TrainPlan], bool]


def _scales(spec: ModelSpec, plan: TrainPlan) -> bool:
    return resolve_rope(spec, plan.max_length, plan.rope) is not None


LEVERS: tuple[Lever, ...] = (
    Lever(
        id="chunked-loss",
        summary="Scores tokens in tiles, so the logits of a whole sequence never exist.",
        costs="no time; the default since TRL 1.13",
        is_on=lambda _, plan: plan.loss == "chunked",
    ),
    Lever(
        id="yarn",
        summary="Scales the rotary embedding so that positions beyond the pretrained length keep their meaning.",
        costs="no memory, no time",
        excludes="a model that scales already",
        is_on=_scales,
    ),
    Lever(
        id="activation-checkpointing",
        summary="Keeps only each layer's input and recomputes the layer in the backward pass.",
        costs="one more forward pass a step",
        is_on=lambda _, plan: plan.activation_checkpointing == "full",
    ),
    Lever(
        id="offload-activations",
        summary="Moves the layer inputs to pinned host memory between forward and backward.",
        costs="host memory (blocks rounded up to a power of two); copies that are about 1% of a step at 1M tokens",
        excludes="activation checkpointing off",
        is_on=lambda _, plan: plan.offload_activations,
    ),
    Lever(
        id="context-parallel",
        summary="Splits one sequence over GPUs by ring attention; FSDP2 shards the states over the same GPUs.",
        costs="exchange of keys and values; fewer sequences a step",
        excludes="packing, sliding-window or linear attention, sp_size, attention other than sdpa",
        is_on=lambda _, plan: plan.cp_size > 1,
    ),
)


def active_levers(spec: ModelSpec, plan: TrainPlan) -> tuple[str, ...]:
    """Ids of the levers that ``plan`` pulls, in the guide's order; yarn only where the length needs it."""
    return tuple(lever.id for lever in LEVERS if lever.is_on(spec, plan))
