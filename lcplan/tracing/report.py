"""What a trace says, in the words of a report: items by category and phase, the timeline, the tensors at the peak."""

from __future__ import annotations

from lcplan.estimators.runtime import cublas_workspace
from lcplan.ledger import Category, PhaseTotal, TensorGroup
from lcplan.tracing.storages import Alive
from lcplan.tracing.trace import SCRATCH, Trace

ITEMS: dict[str, Category] = {
    "trace.parameters": "parameter",
    "trace.buffers": "buffer",
    "trace.optimizer_states": "optimizer_state",
    "trace.gradients": "gradient",
    "trace.activations": "activation",
    "trace.temporaries": "temporary",
    "trace.all_gather": "all_gather",
    "trace.reduce_scatter": "reduce_scatter",
    "trace.inputs": "input",
    "trace.kernel_scratch": "temporary",
}
"""Keys of the report's items, and the category of each."""
_KEY_OF = {category: key for key, category in ITEMS.items() if key != "trace.kernel_scratch"}


def phases(trace: Trace) -> dict[str, dict[str, int]]:
    """Bytes by item of each phase: forward, loss, backward, backward.embedding, optimizer_step.

    A phase of all layers is taken at the largest of them.
    """
    totals = trace.totals()
    largest: dict[str, str] = {}
    for part in trace.parts:
        phase = part.partition("[")[0]
        if phase not in largest or totals[part] > totals[largest[phase]]:
            largest[phase] = part
    return {phase: _items(trace.parts[part]) for phase, part in largest.items()}


def _items(alive: Alive) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind, num_bytes in alive.items():
        if kind.operator == SCRATCH and num_bytes > 0:
            key = "trace.kernel_scratch"
        elif kind.category == "runtime":
            key = cublas_workspace.key
        else:
            key = _KEY_OF[kind.category]
        found[key] = found.get(key, 0) + num_bytes
    return found


def timeline(trace: Trace) -> tuple[PhaseTotal, ...]:
    """The largest total of each part of the step, in step order."""
    return tuple(PhaseTotal(phase=part, allocated_bytes=total) for part, total in trace.totals().items())


def tensors_at_peak(trace: Trace) -> tuple[TensorGroup, ...]:
    """What is alive at the peak, largest first."""
    totals = trace.totals()
    alive = trace.parts[max(totals, key=lambda part: totals[part])]
    groups = [
        TensorGroup(
            category=kind.category,
            module=kind.module,
            operator=kind.operator,
            shape=kind.shape,
            dtype=kind.dtype,
            num_bytes=num_bytes,
        )
        for kind, num_bytes in alive.items()
        if num_bytes > 0
    ]
    return tuple(sorted(groups, key=lambda group: (-group.num_bytes, group.module, group.operator)))
