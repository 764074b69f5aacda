"""The least invasive plan that fits: levers are pulled in the guide's order until the step fits.

The order is the guide's: chunked loss and YaRN cost nothing and come first, then checkpointing, offload, and at
last context parallelism over as few GPUs as will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from lcplan._record import Record
from lcplan.errors import PlanError
from lcplan.estimation import estimate
from lcplan.estimators import formula
from lcplan.hardware import GpuSpec
from lcplan.ledger import SCHEMA_VERSION, MemoryReport
from lcplan.levers import active_levers
from lcplan.model_spec import ModelSpec
from lcplan.rope import resolve_rope
from lcplan.train_plan import MAX_TOKENS, TrainPlan, resolve
from lcplan.units import ByteUnits, format_bytes


class Goal(Record):
    """What the user wants; ``max_length`` None asks for the longest that fits."""

    max_length: int | None = Field(default=None, gt=0)
    gpu: str
    num_gpus: int = Field(default=1, gt=0)
    fixed: dict[str, Any] = Field(default_factory=dict)
    """Plan fields the user has decided; the search leaves them alone."""


class Step(Record):
    """One row of the table from naive to final: the device peak after one more lever."""

    lever: str
    change: str
    device_peak_bytes: int
    fits: bool


class RankedPlan(Record):
    """A plan with its report and the reason for each lever."""

    plan: TrainPlan
    report: MemoryReport
    levers: tuple[str, ...]
    why: tuple[str, ...]
    steps: tuple[Step, ...]


class Recommendation(Record):
    """The answer; with nothing that fits, ``plans`` is empty and ``nearest`` the closest miss."""

    schema_version: int = SCHEMA_VERSION
    goal: Goal
    plans: tuple[RankedPlan, ...]
    searched: int
    binding: str
    nearest: RankedPlan | None = None


def recommend(spec: ModelSpec, goal: Goal, gpu: GpuSpec, *, units: ByteUnits = "GiB") -> Recommendation:
    """Walk the levers in order and stop at the first plan that fits; ``units`` is for the sizes in its sentences.

    Raises:
        PlanError: when no combination of the goal is legal at all (the message is that of the last one tried).
    """
    best: TrainPlan | None = None
    nearest: tuple[int, TrainPlan] | None = None
    searched = 0
    refusal: PlanError | None = None
    for values in _combinations(goal):
        try:
            plan = _plan(spec, goal, gpu, values)
            if plan is None:
                continue
            peak = _device_peak(spec, plan)
        except PlanError as error:
            refusal = error
            continue
        searched += 1
        over = peak - gpu.usable_bytes
        if over <= 0 and _host_fits(spec, plan):
            if goal.max_length is not None:
                best = plan
                break
            if best is None or plan.max_length > best.max_length:
                best = plan
        elif nearest is None or over < nearest[0]:
            nearest = (over, plan)
    if best is not None:
        ranked = _ranked(spec, best, gpu, units)
        return Recommendation(goal=goal, plans=(ranked,), searched=searched, binding=_binding(ranked.report, units))
    if nearest is None:
        raise refusal or PlanError("nothing-legal", "No combination of levers is legal for this goal.")
    missed = _ranked(spec, nearest[1], gpu, units)
    return Recommendation(
        goal=goal, plans=(), searched=searched, binding=_binding(missed.report, units), nearest=missed
    )


def _combinations(goal: Goal) -> Iterator[dict[str, Any]]:
    """Lever settings from least to most invasive; what the user fixed is not varied."""
    sizes = [size for size in range(1, goal.num_gpus + 1) if goal.num_gpus % size == 0]
    for cp_size in sizes:
        for checkpointing, offload in (("none", False), ("full", False), ("full", True)):
            values: dict[str, Any] = {
                "cp_size": cp_size, "activation_checkpointing": checkpointing, "offload_activations": offload,
            }  # fmt: skip
            if all(goal.fixed.get(name, value) == value for name, value in values.items()):
                yield values


def _plan(spec: ModelSpec, goal: Goal, gpu: GpuSpec, values: dict[str, Any]) -> TrainPlan | None:
    given = goal.fixed | values | {"gpu": goal.gpu, "num_gpus": goal.num_gpus}
    if goal.max_length is not None:
        return resolve(spec, given | {"max_length": goal.max_length}, usual_gpus_per_node=gpu.gpus_per_node)[0]
    return _longest(spec, given, gpu)


def _longest(spec: ModelSpec, given: dict[str, Any], gpu: GpuSpec) -> TrainPlan | None:
    """Largest max_length that fits with these levers, to the multiple; None where not even the smallest does."""
    unit = 2 * given["cp_size"] if given["cp_size"] > 1 else 1

    def plan_of(units: int) -> TrainPlan:
        return resolve(spec, given | {"max_length": units * unit}, usual_gpus_per_node=gpu.gpus_per_node)[0]

    def fits(units: int) -> bool:
        try:
            plan = plan_of(units)
            resolve_rope(spec, plan.max_length, plan.rope)
        except PlanError as error:
            if error.code in ("rope-stacked", "absurd-value"):
                return False
            raise
        return _device_peak(spec, plan) <= gpu.usable_bytes and _host_fits(spec, plan)

    if not fits(1):
        return None
    low, high = 1, MAX_TOKENS // unit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return plan_of(low)


def _device_peak(spec: ModelSpec, plan: TrainPlan) -> int:
    ranks = formula.candidate_ranks(spec, plan)
    worst = max(max(formula.instants(spec, plan, rank=rank).totals().values()) for rank in ranks)
    return worst + sum(formula.on_top(plan, worst).values())


def _host_fits(spec: ModelSpec, plan: TrainPlan) -> bool:
    available = plan.host_memory_bytes
    return available is None or formula.host_need(spec, plan).bytes_per_node <= available


def _ranked(spec: ModelSpec, plan: TrainPlan, gpu: GpuSpec, units: ByteUnits) -> RankedPlan:
    report = estimate(spec, plan, gpu)
    levers = active_levers(spec, plan)
    steps = _steps(spec, plan, gpu)
    return RankedPlan(plan=plan, report=report, levers=levers, why=_why(spec, plan, gpu, report, units), steps=steps)


def _without_context_parallel(plan: TrainPlan) -> dict[str, Any]:
    return {"cp_size": 1, "dp_shard_size": plan.dp_shard_size * plan.cp_size}


def _steps(spec: ModelSpec, plan: TrainPlan, gpu: GpuSpec) -> tuple[Step, ...]:
    """Device peak from the naive plan to the final one, one lever at a time."""
    naive: dict[str, Any] = {
        "loss": "full", "activation_checkpointing": "none", "offload_activations": False,
        **_without_context_parallel(plan),
    }  # fmt: skip
    levers = active_levers(spec, plan)
    changes: list[tuple[str, str, dict[str, Any]]] = [("naive", "full logits, everything saved", {})]
    changes.append(("chunked-loss", "loss = chunked", {"loss": "chunked"}))
    if "yarn" in levers and report_rope(spec, plan):
        changes.append(("yarn", report_rope(spec, plan), {}))
    if plan.activation_checkpointing == "full":
        changes.append(("activation-checkpointing", "full", {"activation_checkpointing": "full"}))
    if plan.offload_activations:
        changes.append(("offload-activations", "layer inputs to host", {"offload_activations": True}))
    if plan.cp_size > 1:
        sizes = {"cp_size": plan.cp_size, "dp_shard_size": plan.dp_shard_size}
        changes.append(("context-parallel", f"cp_size = {plan.cp_size}", sizes))
    steps = []
    current = plan.model_copy(update=naive)
    for lever, text, update in changes:
        current = current.model_copy(update=update)
        peak = _device_peak(spec, current)
        fits = peak <= gpu.usable_bytes
        steps.append(Step(lever=lever, change=text, device_peak_bytes=peak, fits=fits))
    return tuple(steps)


def report_rope(spec: ModelSpec, plan: TrainPlan) -> str:
    """``factor 32 x 32,768`` or an empty string."""
    rope = resolve_rope(spec, plan.max_length, plan.rope)
    return f"factor {rope.factor:g} x {rope.original_max_position_embeddings:,}" if rope else ""


def _why(spec: ModelSpec, plan: TrainPlan, gpu: GpuSpec, report: MemoryReport, units: ByteUnits) -> tuple[str, ...]:
    def size(num_bytes: int) -> str:
        return format_bytes(num_bytes, units)

    room = size(gpu.usable_bytes)

    def without(**update: object) -> str:
        return size(_device_peak(spec, plan.model_copy(update=update)))

    reasons = [
        f"chunked-loss: with full logits of {plan.tokens_per_rank:,} tokens x {spec.vocab_size:,} entries the peak "
        f"would be {without(loss='full')} instead of {size(report.device_peak_bytes)}; it costs nothing."
    ]
    rope = report.rope
    if rope:
        reasons.append(
            f"yarn: {plan.max_length:,} tokens are {rope.factor:g} times the {rope.original_max_position_embeddings:,} "
            f"that {spec.id} was pretrained at (its config allows {spec.max_position_embeddings:,})."
        )
    if plan.activation_checkpointing == "full":
        bare = without(activation_checkpointing="none", offload_activations=False)
        reasons.append(f"activation-checkpointing: without it the peak is {bare} of {room}.")
    if plan.offload_activations:
        reasons.append(
            f"offload-activations: without it the peak is {without(offload_activations=False)} of {room}; it pins "
            f"{size(report.host.pinned_bytes_per_node)} of host memory a node."
        )
    if plan.cp_size > 1:
        smaller = max(size for size in range(1, plan.cp_size) if plan.num_gpus % size == 0)
        sizes = {"cp_size": smaller, "dp_shard_size": plan.num_gpus // smaller // plan.dp_replicate_size}
        reasons.append(
            f"context-parallel: cp_size {plan.cp_size} leaves {plan.tokens_per_rank:,} tokens a GPU; with cp_size "
            f"{smaller} the peak is {without(**sizes)} of {room}. max_length must stay a multiple of "
            f"{plan.length_multiple}: trim, never pad."
        )
    return tuple(reasons)


def _binding(report: MemoryReport, units: ByteUnits) -> str:
    top = report.dominant
    return f"{top.key} ({format_bytes(top.num_bytes, units)}) in {report.peak_phase} on {report.gpu.id}"
