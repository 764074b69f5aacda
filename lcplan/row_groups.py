"""Measured rows in groups: how far off the formulas are for a model family, and with a lever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from lcplan._record import Record
from lcplan.train_plan import TrainPlan

LEVER_NAMES: tuple[tuple[str, Callable[[TrainPlan], bool]], ...] = (
    ("one-gpu", lambda plan: plan.num_gpus == 1),
    ("context-parallel", lambda plan: plan.cp_size > 1),
    ("alltoall", lambda plan: plan.cp_size > 1 and plan.cp_comm_strategy == "alltoall"),
    ("cp-head-chunks", lambda plan: plan.cp_head_chunks > 1),
    ("cp-merge-bfloat16", lambda plan: plan.cp_merge_dtype == "bfloat16"),
    ("ulysses", lambda plan: plan.sp_size > 1),
    ("data-parallel", lambda plan: plan.dp_shard_size * plan.dp_replicate_size > 1),
    ("replicated", lambda plan: plan.dp_replicate_size > 1 and plan.backend == "fsdp2"),
    ("deepspeed", lambda plan: plan.backend == "deepspeed"),
    ("offload-activations", lambda plan: plan.offload_activations),
    ("offload-prefetch", lambda plan: plan.offload_prefetch),
    ("activation-offloading", lambda plan: plan.activation_offloading),
    ("offload-params", lambda plan: plan.offload_params),
    ("checkpointing-none", lambda plan: plan.activation_checkpointing == "none"),
    ("checkpointing-selective", lambda plan: plan.activation_checkpointing == "selective"),
    ("checkpoint-every-n-layers", lambda plan: plan.checkpoint_every_n_layers > 1),
    ("not-resharded", lambda plan: not plan.reshard_after_forward),
    ("offload-optimizer", lambda plan: plan.offload_optimizer),
    ("zero-1", lambda plan: plan.zero_stage == 1),
    ("zero-2", lambda plan: plan.zero_stage == 2),
    ("zero-3", lambda plan: plan.zero_stage == 3),
    ("ddp", lambda plan: plan.backend == "ddp"),
    ("mlp-tiles", lambda plan: plan.running_tile is not None),
    ("fused-kernels", lambda plan: plan.kernels != "none"),
    ("full-loss", lambda plan: plan.loss == "full"),
    ("chunked-256-loss", lambda plan: plan.loss == "chunked-256"),
    ("masked-labels", lambda plan: plan.scored_fraction < 1),
    ("float32", lambda plan: plan.dtype == "float32"),
    ("batch", lambda plan: plan.per_device_train_batch_size > 1),
    ("accumulated", lambda plan: plan.gradient_accumulation_steps > 1),
    ("lora", lambda plan: plan.lora_r is not None),
    ("lora-dropout", lambda plan: plan.lora_dropout > 0),
    ("frozen-tables", lambda plan: plan.freeze_embeddings or plan.freeze_head),
    ("nf4", lambda plan: plan.quantize == "nf4"),
    ("other-optimizer", lambda plan: plan.optim not in ("adamw_torch_fused", "adamw_torch")),
    ("other-attention", lambda plan: plan.attn_implementation != "sdpa"),
    ("padding", lambda plan: plan.padding),
    ("packing", lambda plan: plan.packing),
)
"""Name of a lever in the summary of ``lcplan check``, and whether a plan pulls it."""


class Figures(NamedTuple):
    """What a set of relative errors comes to; all None where it is empty."""

    worst: float | None
    mean: float | None
    mean_signed: float | None


class RowGroup(Record):
    """The rows of one family or one lever; the figures are None where the formulas refuse every one of them."""

    kind: Literal["family", "lever"]
    name: str
    num_rows: int
    """Rows with a prediction, which the figures are of."""
    num_refused: int
    worst_error: float | None
    mean_error: float | None
    mean_signed_error: float | None


class GroupedRow(NamedTuple):
    """What the summary needs of a row; ``error`` is None where the formulas refuse it."""

    family: str | None
    levers: tuple[str, ...]
    error: float | None


def lever_names(plan: TrainPlan) -> tuple[str, ...]:
    """The levers that ``plan`` pulls, in the order of the table."""
    return tuple(name for name, pulls in LEVER_NAMES if pulls(plan))


def figures(errors: Sequence[float]) -> Figures:
    """Largest error by size with its sign, mean size, and mean with signs."""
    if not errors:
        return Figures(None, None, None)
    count = len(errors)
    return Figures(max(errors, key=abs), sum(map(abs, errors)) / count, sum(errors) / count)


def group_rows(rows: Iterable[GroupedRow]) -> tuple[RowGroup, ...]:
    """One group a family, by name, then one a lever, in the order of the table; a row is in several."""
    members: dict[tuple[Literal["family", "lever"], str], list[float | None]] = {}
    for row in rows:
        if row.family is not None:
            members.setdefault(("family", row.family), []).append(row.error)
        for lever in row.levers:
            members.setdefault(("lever", lever), []).append(row.error)
    order = [name for name, _ in LEVER_NAMES]
    keys = sorted(members, key=lambda key: (key[0], order.index(key[1]) if key[0] == "lever" else 0, key[1]))
    return tuple(_group(kind, name, members[kind, name]) for kind, name in keys)


def _group(kind: Literal["family", "lever"], name: str, errors: Sequence[float | None]) -> RowGroup:
    known = [error for error in errors if error is not None]
    worst, mean, mean_signed = figures(known)
    return RowGroup(
        kind=kind,
        name=name,
        num_rows=len(known),
        num_refused=len(errors) - len(known),
        worst_error=worst,
        mean_error=mean,
        mean_signed_error=mean_signed,
    )
