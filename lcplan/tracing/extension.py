"""From a trace of a few layers to one of all: identical layers change every instant by the same amount.

Each part of a step holds a fixed part, a share for every layer of the model (weights, states), one for every layer
below the running one (saved inputs) and one for every layer above (gradients). So it is linear in the number of layers
and in the index of the running one, away from the first and last layers; two traces give the slopes.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from lcplan.errors import PlanError
from lcplan.model_families import FAMILIES
from lcplan.model_spec import ModelSpec
from lcplan.tracing.storages import Alive
from lcplan.train_plan import TrainPlan

EDGE = 1
"""Layers at either end that differ from those between: FSDP2 prefetches the embedding in the first, and the head's
gradients are on their way in the last."""
EDGE_WITH_STASH = 6
"""TRL's offloading keeps the last five layer inputs on the GPU for a while (max_fwd_stash_size)."""
_INDEXED = re.compile(r"^(\w+)\[(\d+)\]$")


class Extension(NamedTuple):
    """How many layers are traced, first and second, to stand for all."""

    first: int
    period: int
    """Layers after which checkpointing repeats itself."""
    edge: int

    @property
    def second(self) -> int:
        """Layers of the second trace."""
        return self.first + self.period


def extension_of(spec: ModelSpec, plan: TrainPlan, layers: int | None) -> Extension | None:
    """The layers to trace, ``layers`` in the first trace if it is given; None where all are traced.

    Raises:
        PlanError: when ``layers`` cannot stand for all.
    """
    total = spec.num_hidden_layers
    if layers is not None and layers >= total:
        return None
    period = plan.checkpoint_every_n_layers if plan.activation_checkpointing != "none" else 1
    edge = EDGE_WITH_STASH if plan.activation_offloading else EDGE * period
    least = 2 * edge + period
    if not _uniform(spec):
        if layers is None:
            return None
        raise PlanError(
            "layers-differ",
            f"--layers {layers}: the decoder layers of {spec.id} are not all alike, so some of them do not stand for "
            "the rest. Leave --layers out: all are traced.",
        )
    first = least + (total - least) % period if layers is None else layers
    if first < least or (total - first) % period:
        raise PlanError(
            "bad-layers",
            f"--layers {layers}: this plan needs at least {least} to stand for {total}, and a number that differs from "
            f"{total} by a multiple of {period}. Use --layers {least + (total - least) % period}, or leave it out.",
        )
    found = Extension(first, period, edge)
    return found if found.second < total else None


def _uniform(spec: ModelSpec) -> bool:
    """Every decoder layer is like every other; only for families whose config is known to say so."""
    per_layer = [
        key
        for key, value in spec.config.items()
        if key != "layer_types" and isinstance(value, list) and len(value) == spec.num_hidden_layers
    ]
    return (
        spec.model_type in FAMILIES
        and len(set(spec.layers)) == 1
        and len(set(spec.layer_types)) == 1
        and not per_layer
        and not (spec.moe is not None and spec.moe.dense_layers)
    )


def extend(first: dict[str, Alive], second: dict[str, Alive], extension: Extension, total: int) -> dict[str, Alive]:
    """Every part of the step with ``total`` layers, from the two traces."""
    times = (total - extension.first) // extension.period
    found: dict[str, Alive] = {}
    for part, alive in first.items():
        indexed = _INDEXED.match(part)
        if indexed is None:
            found[part] = _plus((alive, 1 - times), (second[part], times))
            continue
        name = indexed[1]
        if f"{name}[0]" not in found:  # the first layer of a pass: all of them follow
            for layer in reversed(range(total)) if name == "backward" else range(total):
                found[f"{name}[{layer}]"] = _layer(first, second, name, layer, extension, times)
    return found


def _layer(
    first: dict[str, Alive], second: dict[str, Alive], name: str, layer: int, extension: Extension, times: int
) -> Alive:
    """What a traced layer, with so many like it below and above, holds in the whole model."""
    above = min(max((layer - extension.edge) // extension.period, 0), times)
    index = layer - above * extension.period
    base, below = first[f"{name}[{index}]"], second[f"{name}[{index}]"]
    higher = second[f"{name}[{index + extension.period}]"]
    return _plus((base, 1 - times), (higher, above), (below, times - above))


def _plus(*parts: tuple[Alive, int]) -> Alive:
    found: Alive = Counter()
    for alive, times in parts:
        for kind, num_bytes in alive.items():
            found[kind] += num_bytes * times
    return Counter({kind: num_bytes for kind, num_bytes in found.items() if num_bytes})
