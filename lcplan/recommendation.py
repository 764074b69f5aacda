"""The fastest plan that fits, the longest length that does, or the fewest GPUs; with the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import lcm
from typing import Any, Literal

from pydantic import Field

from lcplan._collection import no_collection
from lcplan._record import Record
from lcplan.errors import PlanError
from lcplan.estimation import estimate
from lcplan.estimators import step_time
from lcplan.explanation import LeftOut, Step, binding, left_out, reasons, short_of, waterfall
from lcplan.hardware import GpuSpec, load_gpu
from lcplan.ledger import SCHEMA_VERSION, MemoryReport
from lcplan.levers import active_levers
from lcplan.model_spec import ModelSpec
from lcplan.reproduction import command_line, plan_flags
from lcplan.rope import longest_reach, resolve_rope
from lcplan.search import Candidate, Lattice, Prices, gpu_counts, host_fits, lattice, order_words
from lcplan.train_plan import MAX_TOKENS, TrainPlan, resolve
from lcplan.units import ByteUnits, format_bytes

Objective = Literal["fastest", "smallest"]
HEADROOM_SHARE = 20
"""Of the usable memory, one in so many parts stays free under ``fastest``: for what is not modelled."""
AS_FAST = 0.01
"""Plans whose times differ by less are taken to be equally fast: no step time is known better."""
MOST_NODES = 8
"""Nodes up to which the search for a change that would make it fit looks."""
LORA_RANK = 16
"""Rank of the adapters that are tried where nothing fits."""
PARETO_ROWS = 12


class Goal(Record):
    """What the user wants; ``max_length`` None asks for the longest that fits."""

    max_length: int | None = Field(default=None, gt=0)
    gpu: str
    num_gpus: int = Field(default=1, gt=0)
    fixed: dict[str, Any] = Field(default_factory=dict)
    """Plan fields the user has decided; the search leaves them alone."""
    objective: Objective = "fastest"
    min_gpus: bool = False
    """Take as few of ``num_gpus`` as will do."""
    writable: bool = False
    """Only plans that TRL's own files can say, as far as ``fixed`` does not see to it: no attention on the host."""
    headroom_bytes: int | None = Field(default=None, ge=0)
    """What must stay free on a GPU; None: a twentieth under ``fastest`` with a length where that can be had."""
    disk_bytes: int | None = Field(default=None, gt=0)
    """What a checkpoint may take."""
    price_per_hour: float | None = Field(default=None, gt=0)
    """Of one GPU, in whatever money."""


class Cost(Record):
    """What a plan costs at the goal's price; None where the step has no time."""

    per_step: float | None
    per_billion_tokens: float | None


class RankedPlan(Record):
    """A plan with its report and the reason for each lever."""

    plan: TrainPlan
    report: MemoryReport
    levers: tuple[str, ...]
    why: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    steps: tuple[Step, ...]
    command: str
    """The estimate of exactly this plan, as a POSIX shell reads it."""
    cost: Cost | None = None


class ParetoPoint(Record):
    """A plan that no other one beats in both time and memory; ``relative_time`` is over the fastest of all."""

    levers: tuple[str, ...]
    plan: dict[str, Any]
    """The searched fields; ``mlp_tile_size`` is that of tiles that run, None where one has all tokens."""
    device_peak_bytes: int
    step_time_s: float | None
    relative_time: float
    fits: bool
    chosen: bool


class Recommendation(Record):
    """The answer; with nothing that fits, ``plans`` is empty and ``nearest`` the closest miss."""

    schema_version: int = SCHEMA_VERSION
    goal: Goal
    plans: tuple[RankedPlan, ...]
    searched: int
    """Legal plans of the lattice, all of which were considered."""
    binding: str
    headroom_bytes: int
    """What was asked to stay free."""
    order: str
    """Whose kernel rates put the plans in order of time."""
    fewer_gpus: str | None = None
    """Where the plan leaves GPUs idle that nobody asked to save: why."""
    pareto: tuple[ParetoPoint, ...] = ()
    nearest: RankedPlan | None = None
    changes: tuple[str, ...] = ()
    """Where nothing fits: the smallest changes that would make it fit."""

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        from lcplan.reports.notebook import recommendation_html  # only a notebook needs it

        return recommendation_html(self)


def recommend(spec: ModelSpec, goal: Goal, gpu: GpuSpec, *, units: ByteUnits = "GiB") -> Recommendation:
    """Search every legal combination of levers; ``units`` is for the sizes in the sentences.

    Raises:
        PlanError: when no combination of the goal is legal at all (the message is the most telling one).
    """
    with no_collection():  # of thousands of plans none refers to itself
        return _Search(spec, goal, gpu, units).answer()


def compare_gpus(answers: Sequence[Recommendation]) -> Recommendation:
    """One answer out of several GPUs' answers: those with a price first, cheapest first, then the fastest."""
    with_plans = [answer for answer in answers if answer.plans]
    if not with_plans:
        return answers[0].model_copy(update={"searched": sum(answer.searched for answer in answers)})

    def key(answer: Recommendation) -> tuple[bool, float, float]:
        best = answer.plans[0]
        cost = best.cost.per_billion_tokens if best.cost is not None else None
        return cost is None, cost or 0.0, -(best.report.tokens_per_second or 0.0)

    ordered = sorted(with_plans, key=key)
    first = ordered[0]
    plans = tuple(answer.plans[0] for answer in ordered)
    return first.model_copy(update={"plans": plans, "searched": sum(answer.searched for answer in answers)})


class _Search:
    """One goal on one kind of GPU."""

    def __init__(self, spec: ModelSpec, goal: Goal, gpu: GpuSpec, units: ByteUnits) -> None:
        self.spec, self.goal, self.gpu, self.units = spec, goal, gpu, units
        self.fixed = {name: value for name, value in goal.fixed.items() if value is not None}
        if gpu.node_host_memory_bytes is not None:
            self.fixed.setdefault("host_memory_bytes", gpu.node_host_memory_bytes)
        self.headroom = goal.headroom_bytes
        if self.headroom is None:
            roomy = goal.max_length is not None and goal.objective == "fastest" and not goal.min_gpus
            self.headroom = gpu.usable_bytes // HEADROOM_SHARE if roomy else 0
        self.prices = Prices(spec, gpu, gpu.usable_bytes - self.headroom)

    def answer(self) -> Recommendation:
        """The whole answer."""
        num_gpus, length = self.goal.num_gpus, self.goal.max_length
        counts = self._counts(num_gpus)
        if self.goal.min_gpus:
            counts = next(((n,) for n in counts if self._any_fits((n,))), counts)
        if length is None:
            length = self._longest(counts)
        plans = self._lattice(counts, length)
        pareto = self._pareto(plans)
        best = self._best(plans)
        if best is None and self.goal.headroom_bytes is None and self.headroom:
            self.headroom, self.prices.room = 0, self.gpu.usable_bytes  # a wish, where nobody asked for it
            best = self._best(plans)
        searched = len(plans.candidates)
        if best is not None and self._disk_fits(best.plan):
            ranked = self._ranked(best, plans)
            return Recommendation(
                goal=self.goal,
                plans=(ranked,),
                searched=searched,
                binding=self._binding(ranked),
                headroom_bytes=self.headroom or 0,
                order=order_words(self.gpu),
                fewer_gpus=self._fewer_gpus(best, plans),
                pareto=self._points(pareto, plans, best),
            )
        missed = best or pareto[-1]
        ranked = self._ranked(missed, plans)
        return Recommendation(
            goal=self.goal,
            plans=(),
            searched=searched,
            binding=self._binding(ranked),
            headroom_bytes=self.headroom or 0,
            order=order_words(self.gpu),
            fewer_gpus=self._fewer_gpus(missed, plans),
            pareto=self._points(pareto, plans, None),
            nearest=ranked,
            changes=tuple(self._changes(ranked.report, num_gpus)),
        )

    def _binding(self, ranked: RankedPlan) -> str:
        """What sets the limit: of the longest length what a longer one has no room for."""
        plan = ranked.plan
        longer = plan.model_copy(update={"max_length": plan.max_length + plan.length_multiple})
        on_host = self.goal.max_length is None and not host_fits(self.spec, longer)
        return binding(ranked.report, self.units, on_host=on_host)

    def _counts(self, most: int) -> tuple[int, ...]:
        """Numbers of GPUs to try; what the user said of a node is taken for all of them."""
        node = int(self.fixed.get("gpus_per_node", self.gpu.gpus_per_node))
        return gpu_counts(most, max(node, 1)) if "gpus_per_node" not in self.fixed else (most,)

    def _lattice(self, counts: Sequence[int], length: int, **fixed: Any) -> Lattice:
        resolve_rope(self.spec, length, str(self.fixed.get("rope", "auto")))
        return self._legal(counts, length, self.fixed | fixed)

    def _legal(self, counts: Sequence[int], length: int, fixed: dict[str, Any]) -> Lattice:
        found = lattice(self.spec, self.gpu, counts, length, fixed, writable=self.goal.writable)
        if not found.candidates:
            raise _most_telling(found.refusals)
        return found

    def _best(self, plans: Lattice) -> Candidate | None:
        if self.goal.objective == "fastest":
            return self._fastest(plans)
        best: tuple[int, Candidate] | None = None
        for candidate in plans.candidates:
            limit = self.prices.room if best is None else best[0] - 1
            if self.prices.fits(candidate, limit):
                best = self.prices.device_peak(candidate.plan), candidate
        return best and best[1]

    def _fastest(self, plans: Lattice) -> Candidate | None:
        """Of the plans that fit and are as fast as the fastest of them, the one with the fewest levers.

        Of equally simple ones the one that leaves most of the GPU free.
        """
        best: Candidate | None = None
        last, peak = float("inf"), 0
        for candidate in plans.candidates:
            if candidate.seconds_per_token > last:
                break
            limit = self.prices.room
            if best is not None and candidate.num_levers >= best.num_levers:
                limit = peak - 1
            if (best is None or candidate.num_levers <= best.num_levers) and self.prices.fits(candidate, limit):
                last = min(last, candidate.seconds_per_token * (1 + AS_FAST))  # the first that fits is the fastest
                best, peak = candidate, self.prices.device_peak(candidate.plan)
        return best

    def _fewer_gpus(self, best: Candidate, plans: Lattice) -> str | None:
        used, there = best.plan.num_gpus, self.goal.num_gpus
        if used == there or self.goal.min_gpus:
            return None
        start = f"{used} of {there} GPUs"
        if any(candidate.plan.num_gpus == there for candidate in plans.candidates):
            return f"{start}: no plan on all of them is as good"
        on_all = lattice(self.spec, self.gpu, (there,), best.plan.max_length, self.fixed)
        return f"{start}: {_most_telling(on_all.refusals).message}"

    def _disk_fits(self, plan: TrainPlan) -> bool:
        asked = self.goal.disk_bytes
        return asked is None or estimate(self.spec, plan, self.gpu).disk.checkpoint_bytes <= asked

    # Lengths and numbers of GPUs

    def _longest(self, counts: Sequence[int]) -> int:
        """The largest max_length at which a plan fits; the shortest legal one where none does."""
        reach = longest_reach(self.spec, str(self.fixed.get("rope", "auto")), MAX_TOKENS)
        batch = int(self.fixed.get("per_device_train_batch_size", 1))
        multiple = 2 * lcm(*counts)
        if multiple > MAX_TOKENS:
            counts, multiple = counts[-1:], 2 * counts[-1]
        base = self._legal(counts, multiple, self.fixed | {"rope": "none"})
        best = 0
        for candidate in self._most_saving_first(base.candidates, min(reach, MAX_TOKENS // batch)):
            best = self._longer(candidate, best, min(reach, MAX_TOKENS // batch))
        if best == 0:
            used = max(candidate.plan.num_gpus for candidate in base.candidates)
            advice = "more GPUs, a larger one, or a smaller model."
            if used < counts[-1]:
                advice = f"a larger GPU, or a smaller model. More of them: {_most_telling(base.refusals).message}"
            raise PlanError(
                "nothing-fits",
                f"No combination of levers fits {self.spec.id} on {used} x {self.gpu.id} at any length. Use {advice}",
            )
        return best

    def _most_saving_first(self, candidates: Sequence[Candidate], reach: int) -> list[Candidate]:
        """So that the first candidates already reach far, and most of the others fail at once."""
        probe = min(reach, 1 << 17)

        def stored(candidate: Candidate) -> int:
            multiple = candidate.plan.length_multiple
            plan = candidate.plan.model_copy(update={"max_length": max(probe // multiple, 1) * multiple})
            return self.prices.forward(plan)

        return sorted(candidates, key=stored)

    def _longer(self, candidate: Candidate, best: int, reach: int) -> int:
        """The longest length above ``best`` at which this combination fits, or ``best``."""
        multiple = candidate.plan.length_multiple

        def fits(units: int) -> bool:
            plan = candidate.plan.model_copy(update={"max_length": units * multiple})
            return self.prices.fits(Candidate(plan, 0.0, candidate.levers))

        low, high = best // multiple + 1, reach // multiple + 1
        if low >= high or not fits(low):
            return best
        step = 1
        while low + step < high and fits(low + step):
            low, step = low + step, 2 * step
        high = min(high, low + step)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * multiple

    def _any_fits(self, counts: Sequence[int], **fixed: Any) -> bool:
        if self.goal.max_length is None:
            return True
        try:
            plans = self._lattice(counts, self.goal.max_length, **fixed)
        except PlanError:
            return False
        return any(self.prices.fits(candidate) for candidate in reversed(plans.candidates))

    # What goes with a plan

    def _pareto(self, plans: Lattice) -> list[Candidate]:
        """Candidates that no other one beats in both time and memory, fastest first; the last needs the least.

        What the host has no room for beats nothing, unless the host has room for none.
        """
        return self._front(plans, in_host=True) or self._front(plans, in_host=False)

    def _front(self, plans: Lattice, *, in_host: bool) -> list[Candidate]:
        front: list[Candidate] = []
        least: int | None = None
        for candidate in plans.candidates:
            if least is not None and self.prices.exceeds(candidate, least - 1):
                continue
            if not in_host or host_fits(self.spec, candidate.plan):
                least = self.prices.device_peak(candidate.plan)
                front.append(candidate)
        return front

    def _points(self, front: list[Candidate], plans: Lattice, chosen: Candidate | None) -> tuple[ParetoPoint, ...]:
        rows = sorted({*_thinned(front, PARETO_ROWS), *([chosen] if chosen else [])}, key=lambda c: c.order)
        fastest = plans.candidates[0].seconds_per_token
        timed = plans.candidates and step_time.refusal(self.spec, plans.candidates[0].plan, self.gpu) is None
        return tuple(
            ParetoPoint(
                levers=active_levers(self.spec, row.plan),
                plan={name: getattr(row.plan, name) for name in ("num_gpus", *SEARCHED)}
                | {"mlp_tile_size": row.plan.running_tile},
                device_peak_bytes=self.prices.device_peak(row.plan),
                step_time_s=row.seconds_per_token * row.plan.tokens_per_step if timed else None,
                relative_time=row.seconds_per_token / fastest,
                fits=self.prices.fits(row),
                chosen=row is chosen,
            )
            for row in rows
        )

    def _ranked(self, candidate: Candidate, plans: Lattice) -> RankedPlan:
        _, assumptions = resolve(self.spec, self._asked(candidate), usual_gpus_per_node=self.gpu.gpus_per_node)
        if "host_memory_bytes" not in self.goal.fixed and "host_memory_bytes" in self.fixed:
            there = format_bytes(self.fixed["host_memory_bytes"], self.units)
            assumptions += (f"host_memory = {there} a node: the usual node of this GPU",)
        plan = candidate.plan.model_copy(update={"mlp_tile_size": candidate.plan.running_tile})
        report = estimate(self.spec, plan, self.gpu, assumptions=assumptions)
        return RankedPlan(
            plan=plan,
            report=report,
            levers=active_levers(self.spec, plan),
            why=reasons(self.spec, candidate, report, self.prices, self.units),
            left_out=left_out(self.spec, candidate, plans, self.prices, self.units),
            steps=waterfall(self.spec, plan, self.prices),
            command=command_line("estimate", [self.spec.id, *plan_flags(self.spec, plan, self.gpu)]),
            cost=self._cost(report),
        )

    def _asked(self, candidate: Candidate) -> dict[str, Any]:
        """What the user and the search have set, so that only the rest is an assumption."""
        plan = candidate.plan
        asked = {name: getattr(plan, name) for name in (*SEARCHED, "max_length", "gpu", "num_gpus")}
        return asked | {name: value for name, value in self.goal.fixed.items() if value is not None}

    def _cost(self, report: MemoryReport) -> Cost | None:
        price = self.goal.price_per_hour
        if price is None:
            return None
        seconds, tokens = report.step_time_s, report.batch.tokens_per_step
        per_step = None if seconds is None else seconds / 3600 * price * report.plan["num_gpus"]
        return Cost(per_step=per_step, per_billion_tokens=None if per_step is None else per_step * 1e9 / tokens)

    def _changes(self, missed: MemoryReport, num_gpus: int) -> Iterator[str]:
        """The miss in words, and each smallest change that would make it fit."""
        if missed.fits and self.goal.disk_bytes is not None:
            needed, there = (format_bytes(n, self.units) for n in (missed.disk.checkpoint_bytes, self.goal.disk_bytes))
            yield f"A checkpoint takes {needed} of disk, and {there} are there."
            return
        yield short_of(missed, self.prices.room, self.units)
        if self.goal.max_length is None:
            return
        if missed.fits:
            yield f"a headroom of {format_bytes(missed.headroom_bytes, self.units)} (--headroom)"
        beyond = (n for n in gpu_counts(self.gpu.gpus_per_node * MOST_NODES, self.gpu.gpus_per_node) if n > num_gpus)
        more = next((n for n in beyond if self._any_fits((n,))), None)
        if more is not None:
            yield f"{more - num_gpus} more {self.gpu.id} ({more} in all)"
        with suppress(PlanError):
            yield f"max_length {self._longest((num_gpus,)):,}"
        for id in _larger(self.gpu):
            larger = load_gpu(id)
            goal = self.goal.model_copy(update={"gpu": id, "headroom_bytes": None})
            if _Search(self.spec, goal, larger, self.units)._any_fits((num_gpus,)):
                yield f"{num_gpus} x {id}"
                break
        if "lora_r" not in self.fixed and self._any_fits((num_gpus,), lora_r=LORA_RANK):
            yield f"LoRA of rank {LORA_RANK} (--lora-r {LORA_RANK}): another training, only adapters learn"


SEARCHED = (
    "backend", "dp_replicate_size", "dp_shard_size", "cp_size", "cp_comm_strategy", "loss", "activation_checkpointing",
    "checkpoint_every_n_layers", "offload_activations", "offload_prefetch", "activation_offloading", "offload_params",
    "optim", "cp_head_chunks", "mlp_tile_size", "kernels",
)  # fmt: skip
"""Plan fields that the search sets."""


def _most_telling(refusals: Sequence[PlanError]) -> PlanError:
    """Of the reasons why nothing is legal the one that holds for most combinations."""
    counts: dict[str, int] = {}
    for refusal in refusals:
        counts[refusal.message] = counts.get(refusal.message, 0) + 1
    return max(refusals, key=lambda refusal: counts[refusal.message])


def _larger(gpu: GpuSpec) -> list[str]:
    from lcplan import catalog

    sizes = {id: load_gpu(id).usable_bytes for id in catalog.gpu_ids()}
    return sorted((id for id, size in sizes.items() if size > gpu.usable_bytes), key=lambda id: sizes[id])


def _thinned(front: list[Candidate], rows: int) -> list[Candidate]:
    """At most so many of the front, evenly, with both ends."""
    if len(front) <= rows:
        return front
    return [front[round(i * (len(front) - 1) / (rows - 1))] for i in range(rows)]
