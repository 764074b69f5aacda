"""Why a plan is the answer: what each lever saves and costs, why the others were left out, what binds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lcplan._record import Record
from lcplan.errors import PlanError
from lcplan.estimators import step_time
from lcplan.estimators.coverage import check_covered
from lcplan.ledger import MemoryReport, instant_words
from lcplan.levers import BY_ID, LEVERS, OFF, Lever, active_levers, conflict
from lcplan.model_spec import ModelSpec
from lcplan.rope import explain_rope, resolve_rope
from lcplan.search import Candidate, Lattice, Prices, host_fits, ordering_rates
from lcplan.train_plan import TrainPlan, resolve
from lcplan.units import ByteUnits, format_bytes

NAIVE = "naive"
"""Name of the plan without any lever, the first row of a waterfall."""


class Step(Record):
    """One row of the waterfall from naive to chosen: peak and time after one more lever."""

    lever: str
    """Several, with commas, where the plans between are not covered."""
    change: str
    device_peak_bytes: int
    step_time_s: float | None
    fits: bool


class LeftOut(Record):
    """A lever that the plan does not pull, and why."""

    lever: str
    why: str


def binding(report: MemoryReport, units: ByteUnits, *, on_host: bool = False) -> str:
    """Which item at which instant on which device sets the limit; ``on_host`` says that the host does."""
    top = report.dominant
    if on_host or report.host.fits is False:
        return f"host memory: {format_bytes(report.host.pinned_bytes_per_node, units)} pinned a node"
    return f"{top.key} ({format_bytes(top.num_bytes, units)}) in {report.peak_phase} on {report.gpu.id}"


def short_of(report: MemoryReport, room: int, units: ByteUnits) -> str:
    """How much is missing, and at which instant."""
    if report.device_peak_bytes <= room and report.host.fits is False:
        return "Host memory is short; the GPU would have room."
    missing = format_bytes(report.device_peak_bytes - room, units)
    return f"{missing} short in {instant_words(report.peak_phase, report.model.num_hidden_layers)}."


class LeverRow(Record):
    """One lever beside a plan: what the plan would be with it flipped."""

    lever: str
    summary: str
    pulled: bool
    flipped_peak_bytes: int | None
    """Device peak of the plan without a pulled lever, or with one that is not."""
    flipped_fits: bool | None
    flipped_time: float | None
    """Time a token over the plan's own; None where the step has no time."""
    note: str
    """What it costs, or why it cannot be flipped."""


class _Alternatives:
    """Prices of plans beside the chosen one."""

    def __init__(self, spec: ModelSpec, plan: TrainPlan, prices: Prices) -> None:
        self.spec, self.plan, self.prices = spec, plan, prices
        self.timer = step_time.StepTimer(spec, prices.gpu, ordering_rates(prices.gpu))
        self.seconds = self.timer.seconds(plan)

    def changed(self, update: dict[str, Any]) -> TrainPlan:
        """The plan with other values, checked as one that a user had asked for.

        Raises:
            PlanError: where it is not legal or not covered.
        """
        values = self.plan.model_dump() | update
        plan, _ = resolve(self.spec, values, usual_gpus_per_node=self.prices.gpu.gpus_per_node)
        check_covered(self.spec, plan)
        return plan

    def slower(self, plan: TrainPlan) -> float:
        """Time a token over the chosen plan's, less 1."""
        mine, its = self.seconds / self.plan.tokens_per_step, self.timer.seconds(plan) / plan.tokens_per_step
        return its / mine - 1


RING = ("cp_comm_strategy", "cp_head_chunks", "cp_merge_dtype")
"""Plan fields that only context parallelism reads."""


def _without(plan: TrainPlan, lever: Lever) -> dict[str, Any]:
    """The fields of the plan with one lever not pulled."""
    if lever.id == "context-parallel":
        ring = {name: TrainPlan.model_fields[name].default for name in RING}
        return {"cp_size": 1, "dp_shard_size": plan.dp_shard_size * plan.cp_size, **ring}
    if lever.id == "sequence-parallel":
        return {"sp_size": 1, "dp_shard_size": plan.dp_shard_size * plan.sp_size}
    if lever.id == "replicas":
        return {"dp_replicate_size": 1, "dp_shard_size": plan.dp_shard_size * plan.dp_replicate_size}
    if lever.dimension == "checkpointing":
        return OFF["activations"] | {"activation_checkpointing": "none", "checkpoint_every_n_layers": 1}
    if lever.id in ("data-parallel", "yarn"):
        return {}
    return OFF.get(lever.dimension) or {name: TrainPlan.model_fields[name].default for name in _fields(lever)}


def _fields(lever: Lever) -> list[str]:
    """The plan fields that a lever changes."""
    return [name for name in lever.changes.split(", ") if name in TrainPlan.model_fields]


def reasons(
    spec: ModelSpec, chosen: Candidate, report: MemoryReport, prices: Prices, units: ByteUnits
) -> tuple[str, ...]:
    """One sentence for each lever that the plan pulls: what it saves, what it costs."""
    beside = _Alternatives(spec, chosen.plan, prices)
    return tuple(_reason(id, report, beside, units) for id in active_levers(spec, chosen.plan))


def _reason(id: str, report: MemoryReport, beside: _Alternatives, units: ByteUnits) -> str:
    lever, plan, spec = BY_ID[id], beside.plan, beside.spec
    if id == "yarn":
        return f"yarn: {explain_rope(spec, report.rope, plan.max_length)}"
    if id == "data-parallel":
        text = f"data-parallel: the states lie in {plan.shard_size} shards"
        return text + ", and every shard's rank takes a sequence of its own; that does not help length."
    try:
        bare = beside.changed(_without(plan, lever))
    except PlanError as error:
        return f"{id}: it cannot be left out ({error.code})."
    peak = beside.prices.device_peak(bare)
    saved = peak - report.device_peak_bytes
    text = f"{id}: saves {format_bytes(saved, units)} (without it {format_bytes(peak, units)}"
    if saved < 0:
        text = f"{id}: takes {format_bytes(-saved, units)} more (without it {format_bytes(peak, units)}"
    text += (
        f", which {'fits as well' if peak <= beside.prices.room else 'does not fit'}); {_price(beside.slower(bare))}"
    )
    if lever.dimension == "activations":
        text += f", and {format_bytes(report.host.pinned_bytes_per_node, units)} of pinned host memory a node"
    if id == "context-parallel":
        text += (
            f"; cp_size {plan.cp_size} leaves {plan.tokens_per_rank:,} tokens a GPU, and max_length must stay a "
            f"multiple of {plan.length_multiple}: trim, never pad"
        )
    if id == "fused-kernels":
        text += f"; needs {lever.needs}"
    return text + "."


def _price(slower_without: float) -> str:
    """What a lever costs in time, from how much slower the plan is without it."""
    costs = 1 / (1 + slower_without) - 1
    if abs(costs) < 0.0005:
        return "costs no time"
    return f"costs {costs:.1%} of the time" if costs > 0 else f"saves {-costs:.1%} of the time"


def left_out(
    spec: ModelSpec, chosen: Candidate, plans: Lattice, prices: Prices, units: ByteUnits
) -> tuple[LeftOut, ...]:
    """One sentence for each lever that the plan does not pull."""
    pulled = set(active_levers(spec, chosen.plan))
    rest = [lever for lever in LEVERS if lever.id not in pulled]
    return tuple(LeftOut(lever=lever.id, why=_why_not(lever, spec, chosen, plans, prices, units)) for lever in rest)


def lever_table(spec: ModelSpec, plan: TrainPlan, prices: Prices) -> tuple[LeverRow, ...]:
    """Every lever: whether the plan pulls it, and what the plan would be with it flipped."""
    pulled = set(active_levers(spec, plan))
    beside = _Alternatives(spec, plan, prices)
    timed = step_time.refusal(spec, plan, prices.gpu) is None
    return tuple(_flipped(lever, lever.id in pulled, beside, timed=timed) for lever in LEVERS)


def _flipped(lever: Lever, pulled: bool, beside: _Alternatives, *, timed: bool) -> LeverRow:
    plan, prices = beside.plan, beside.prices
    plans: list[TrainPlan] = []
    note = None
    for setting in (_without(plan, lever),) if pulled else lever.settings(beside.spec, plan.num_gpus):
        try:
            other = beside.changed(setting)
        except PlanError as error:
            note = error.message
        else:
            plans += [other] if lever.is_on(beside.spec, other) != pulled else []
    if not plans and note is None:
        note = _not_to_flip(lever, pulled, beside)
    best = min(((prices.device_peak(other), index) for index, other in enumerate(plans)), default=None)
    if best is None:
        peak, fits, time = None, None, None
    else:
        note = None
        peak, other = best[0], plans[best[1]]
        fits = peak <= prices.room and host_fits(beside.spec, other)
        time = 1 + beside.slower(other) if timed else None
    return LeverRow(
        lever=lever.id,
        summary=lever.summary,
        pulled=pulled,
        flipped_peak_bytes=peak,
        flipped_fits=fits,
        flipped_time=time,
        note=note or lever.costs,
    )


def _not_to_flip(lever: Lever, pulled: bool, beside: _Alternatives) -> str:
    """Why there is nothing to compare a lever with."""
    plan = beside.plan
    if lever.id == "yarn":
        return explain_rope(beside.spec, resolve_rope(beside.spec, plan.max_length, plan.rope), plan.max_length)
    if pulled:
        return f"{lever.costs}; the plan has no form without it"
    if lever.not_searched:
        return f"{lever.costs}; not tried here: {lever.not_searched}"
    others = {id for id in active_levers(beside.spec, plan) if BY_ID[id].dimension != lever.dimension}
    return conflict(frozenset(others | {lever.id})) or ("there is one GPU" if plan.num_gpus == 1 else "it has no place")


def _why_not(lever: Lever, spec: ModelSpec, chosen: Candidate, plans: Lattice, prices: Prices, units: ByteUnits) -> str:
    plan = chosen.plan
    if lever.id == "yarn":
        return explain_rope(spec, resolve_rope(spec, plan.max_length, plan.rope), plan.max_length)
    if lever.not_searched:
        return f"not searched: {lever.not_searched}"
    if not lever.settings(spec, plan.num_gpus):
        return "there is one GPU" if lever.dimension == "gpus" and plan.num_gpus == 1 else f"not for {spec.id}"
    others = {id for id in chosen.levers if BY_ID[id].dimension != lever.dimension}
    wanted = frozenset(others | {lever.id})
    alternatives = [candidate for candidate in plans.candidates if candidate.levers == wanted]
    if not alternatives:
        return _why_illegal(lever, wanted, plan, spec, prices)
    fitting = next((candidate for candidate in alternatives if prices.fits(candidate)), None)
    best = fitting or alternatives[0]
    peak = prices.device_peak(best.plan)
    slower = best.seconds_per_token / chosen.seconds_per_token - 1
    what = "as fast" if abs(slower) < 0.0005 else f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
    if fitting is None:
        return f"{what}, but does not fit: {format_bytes(peak, units)}"
    return f"fits at {format_bytes(peak, units)}, {what}: not needed"


def _why_illegal(lever: Lever, wanted: frozenset[str], plan: TrainPlan, spec: ModelSpec, prices: Prices) -> str:
    reason = conflict(wanted)
    if reason is not None:
        return reason
    try:
        _Alternatives(spec, plan, prices).changed(lever.settings(spec, plan.num_gpus)[0])
    except PlanError as error:
        return error.message.partition(": the formula")[0]
    return "the goal fixes it"


def lever_plans(spec: ModelSpec, plan: TrainPlan) -> tuple[tuple[str, str, TrainPlan], ...]:
    """From the naive plan to this one, one more lever pulled each time: (lever, what it changes, the plan with it).

    A plan on the way that the formulas do not cover is left out; its lever goes with the next one. A lever that the
    naive plan has too, such as LoRA, is named there.

    Raises:
        PlanError: when the formulas do not cover the plan itself.
    """
    check_covered(spec, plan)
    naive: dict[str, Any] = {
        "loss": "full", "activation_checkpointing": "none", "checkpoint_every_n_layers": 1, "cp_size": 1, "sp_size": 1,
        "dp_replicate_size": 1, "dp_shard_size": plan.shard_size * plan.dp_replicate_size,
        **{name: TrainPlan.model_fields[name].default for name in RING},
        "offload_optimizer": False, "reshard_after_forward": True,
        **OFF["activations"], **OFF["parameters"], **OFF["optimizer"], **OFF["mlp"], **OFF["kernels"],
    }  # fmt: skip
    current = plan.model_copy(update=naive)
    steps = [(NAIVE, "full logits, everything saved", current)]
    always: list[str] = []
    for lever, text, update in _pulled(spec, plan):
        before, current = current, current.model_copy(update=update)
        if update and current == before:
            always.append(lever)
        else:
            steps.append((lever, text, current))
    if always:
        steps[0] = (NAIVE, f"{steps[0][1]}; with {', '.join(always)}", steps[0][2])
    return tuple(_covered_steps(spec, steps))


def _covered_steps(spec: ModelSpec, steps: list[tuple[str, str, TrainPlan]]) -> Iterator[tuple[str, str, TrainPlan]]:
    pulled: list[tuple[str, str]] = []
    for lever, text, plan in steps:
        pulled.append((lever, text))
        try:
            check_covered(spec, plan)
        except PlanError:
            continue
        named = [pair for pair in pulled if pair[0] != NAIVE] or pulled
        yield ", ".join(lever for lever, _ in named), ", ".join(text for _, text in named), plan
        pulled = []


def waterfall(spec: ModelSpec, plan: TrainPlan, prices: Prices) -> tuple[Step, ...]:
    """Peak and time from the naive plan to the chosen one, one lever at a time; rows may be plans nobody would run."""
    timed = step_time.refusal(spec, plan, prices.gpu) is None
    timer = step_time.StepTimer(spec, prices.gpu, ordering_rates(prices.gpu))
    rows = []
    for lever, text, current in lever_plans(spec, plan):
        peak = prices.device_peak(current)
        # a row of other sequences a step is shown for as many tokens as the chosen plan trains on
        share = plan.tokens_per_step / current.tokens_per_step
        seconds = timer.seconds(current) * share if timed else None
        rows.append(
            Step(lever=lever, change=text, device_peak_bytes=peak, step_time_s=seconds, fits=peak <= prices.room)
        )
    return tuple(rows)


def _pulled(spec: ModelSpec, plan: TrainPlan) -> list[tuple[str, str, dict[str, Any]]]:
    """Each pulled lever with what it changes from the plan without it, in an order in which every row can be priced."""
    rope = resolve_rope(spec, plan.max_length, plan.rope)
    rows: list[tuple[str, str, dict[str, Any]]] = []
    for id in active_levers(spec, plan):
        fields = _fields(BY_ID[id])
        if id == "yarn" and rope is not None:
            rows.append((id, f"factor {rope.factor:g} x {rope.original_max_position_embeddings:,}", {}))
        elif fields and not (id == "data-parallel" and plan.cp_size * plan.sp_size > 1):
            update = {name: getattr(plan, name) for name in fields}
            text = ", ".join(f"{name} {value}" for name, value in update.items())
            rows.append((id, text, update))
    return rows
