"""The ledger: what is alive at which instant of a training step.

A *phase* is one instant class of a step, named in the order it happens; ``PHASE_HELP`` explains each. A phase total is
a plain sum of the items alive in it, the peak a plain maximum over phases. An item that changes size between phases is
several items with the same key. Items in the pseudo-phase ``device`` lie on top of what the allocator has handed out
(CUDA context, allocator slack): they count for the device peak only.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lcplan._record import Record

Category = Literal[
    "parameter", "buffer", "gradient", "optimizer_state", "activation", "temporary", "all_gather",
    "reduce_scatter", "input", "runtime",
]  # fmt: skip
Confidence = Literal["exact", "modelled", "fitted"]

SCHEMA_VERSION = 1
DEVICE = "device"
PHASE_HELP = {
    "forward": "the forward pass at its largest: in the last layer, with all stored layer inputs, or in the loss head",
    "loss": "backward of the loss head",
    "final_norm": "backward of the final norm, when the head's gradient is there",
    "backward[i].mlp": "backward of the MLP of layer i, after that layer was recomputed",
    "backward[i].attention": "backward of the attention of layer i",
    "backward[i].query_norm": "backward of the norm of the queries of layer i, when that of its attention is over",
    "backward[i].closing_norm": "backward of the norm behind the MLP of layer i, with all that the layer saved",
    "backward[i].down_proj": "end of the recomputation of layer i, in down_proj's adapter",
    "backward[i].down_proj_backward": "backward of down_proj of layer i, whose 4-bit weight is unpacked",
    "backward[i].experts": "backward of the weighted sum of experts in layer i",
    "backward[i].expert_gate": "backward of the gate of the experts in layer i",
    "backward[i].expert_gate_forward": "gate of the experts in layer i, as they are recomputed",
    "backward[i].expert_output_forward": "output of the experts in layer i, as they are recomputed",
    "backward[i].mlp_norm": "backward of the norm before the tiled MLP of layer i, whose weights' gradients exist",
    "backward[i].expert_norm": "backward of the norm before the experts of layer i: all their gradients exist",
    "backward[i].expert_gradients": "end of the experts' backward in layer i: all their gradients exist",
    "backward.embedding": "backward of the token embedding",
    "backward": "backward of the decoder layers (traced or probed)",
    "evaluation.attention": "attention of a layer in a forward pass without gradients",
    "evaluation.norm": "second norm of a layer in a forward pass without gradients",
    "evaluation.mlp": "MLP of a layer in a forward pass without gradients",
    "evaluation.loss": "scoring of an evaluation batch",
    "save": "saving the trained model; FSDP2 gathers one parameter after another",
    "backward.reduction": "DeepSpeed: the largest reduction of a full bucket of gradients",
    "gradient_norm": "DeepSpeed: the norm of this rank's gradients, in float64",
    "optimizer_step": "optimizer step: all gradients, no activations",
    DEVICE: "on top of every phase; not handed out by PyTorch's allocator",
}


def instant_words(phase: str, num_layers: int) -> str:
    """A phase as one would say it: ``backward[0].mlp`` is the backward of the MLP of the first layer."""
    if not phase.startswith("backward["):
        named = {"loss": "the backward of the loss", "optimizer_step": "the optimizer step"}
        return named.get(phase, "the backward of the embedding" if phase == "backward.embedding" else f"the {phase}")
    index, _, part = phase.removeprefix("backward[").partition("].")
    layer = {0: "the first layer", num_layers - 1: "the last layer"}.get(int(index), f"layer {index}")
    name = {"mlp": "MLP", "mlp_norm": "norm before the MLP"}.get(part, part.replace("_", " "))
    return f"the backward of the {name} of {layer}"


class MemoryItem(Record):
    """One line of the ledger."""

    key: str
    """``group.name``, stable."""
    category: Category
    num_bytes: int = Field(ge=0)
    phases: tuple[str, ...]
    device: Literal["gpu", "host"] = "gpu"
    formula: str
    source: str
    confidence: Confidence

    @property
    def group(self) -> str:
        """The part of the key before the first dot."""
        return self.key.partition(".")[0]


class PhaseTotal(Record):
    """Sum of the GPU items alive in one phase."""

    phase: str
    allocated_bytes: int = Field(ge=0)


class ModelSummary(Record):
    """Which model the report is about."""

    id: str
    model_type: str
    num_parameters: int
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int


class GpuSummary(Record):
    """Which GPU the report is about."""

    id: str
    usable_bytes: int


class HostMemory(Record):
    """Host memory of the job; ``fits`` is None where the node's memory is unknown."""

    pinned_bytes_per_rank: int
    pinned_bytes_per_node: int
    load_bytes_per_node: int
    fits: bool | None


class DiskUse(Record):
    """What a save writes."""

    saved_model_bytes: int
    checkpoint_bytes: int


class RopeParameters(Record):
    """The four keys of ``rope_parameters`` that YaRN needs; all four always."""

    rope_type: str
    factor: float
    rope_theta: float
    original_max_position_embeddings: int


class StepTime(Record):
    """Seconds of one optimizer step and what follows from them."""

    seconds: float
    parts: dict[str, float]
    """Seconds by part; they add up."""
    tokens_per_second_per_gpu: float
    mfu: float
    """Model FLOPs a second over the peak, by ``mfu_convention``."""
    mfu_convention: str
    rates: str
    """Where the rates of the kernels come from."""


class TokenBudget(Record):
    """How long a number of tokens takes; whole steps."""

    tokens: int
    steps: int
    seconds: float | None
    """None where the step has no time."""
    gpu_hours: float | None


class BatchSize(Record):
    """What one optimizer step trains on; GPUs that share a sequence count once."""

    sequences_per_step: int
    tokens_per_step: int


class PlanWarning(Record):
    """Something the user should know before renting GPUs."""

    code: str
    message: str
    fix: str


class Compared(Record):
    """One number of the formulas beside what a probe measured of it."""

    what: str
    predicted_bytes: int
    measured_bytes: int


class TensorGroup(Record):
    """Tensors alive at the peak that one operator of one module made, in whatever layer (traced)."""

    category: Category
    module: str
    """``model.layers.*.mlp``; empty where no module ran, as in the loss."""
    operator: str
    """Empty for weights and the batch."""
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class MemoryReport(Record):
    """The answer; every method (formula, trace, probe) gives one."""

    schema_version: int = SCHEMA_VERSION
    lcplan_version: str
    method: Literal["formula", "trace", "probe", "run"]
    model: ModelSummary
    plan: dict[str, Any]
    gpu: GpuSummary
    stack: dict[str, str | None]
    peak_allocated_bytes: int
    peak_phase: str
    peak_rank: int
    device_peak_bytes: int
    fits: bool
    headroom_bytes: int
    host: HostMemory
    disk: DiskUse
    items: tuple[MemoryItem, ...]
    phases: tuple[PhaseTotal, ...]
    timeline: tuple[PhaseTotal, ...] = ()
    """Largest total of each part of the step, layer by layer (traced)."""
    tensors_at_peak: tuple[TensorGroup, ...] = ()
    """What is alive at the peak, largest first (traced)."""
    rope: RopeParameters | None
    batch: BatchSize
    step_time_s: float | None = None
    tokens_per_second: float | None = None
    """Of the whole job."""
    step_time: StepTime | None = None
    step_time_unknown: str | None = None
    """Why there is no step time."""
    token_budget: TokenBudget | None = None
    compared: tuple[Compared, ...] = ()
    """The formulas' numbers beside the measured ones (probe, run)."""
    warnings: tuple[PlanWarning, ...] = ()
    assumptions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()

    def items_in(self, phase: str) -> tuple[MemoryItem, ...]:
        """GPU items alive in ``phase``, largest first."""
        alive = [item for item in self.items if phase in item.phases and item.device == "gpu"]
        return tuple(sorted(alive, key=lambda item: -item.num_bytes))

    @property
    def dominant(self) -> MemoryItem:
        """The largest item at the peak."""
        return self.items_in(self.peak_phase)[0]

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        from lcplan.reports.notebook import report_html  # only a notebook needs it

        return report_html(self)
