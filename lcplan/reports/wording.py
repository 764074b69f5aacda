"""Short words for groups and phases, which pictures and pages share."""

from __future__ import annotations

from lcplan.pictures import OTHER, layer_of
from lcplan.reports.terminal import GROUPS


def group_words(group: str) -> str:
    """A group of the timeline; a trace has categories instead."""
    return "small items" if group == OTHER else GROUPS.get(group, group.replace("_", " "))


def phase_words(phase: str) -> str:
    """``backward[3].mlp`` as ``layer 3: MLP``, ``optimizer_step`` as ``optimizer step``."""
    layer = layer_of(phase)
    if layer is not None:
        part = phase.partition("].")[2]
        return f"layer {layer}: {'MLP' if part == 'mlp' else part.replace('_', ' ')}"
    return phase.removeprefix("backward.").replace(".", ": ").replace("_", " ")
