"""Every legal combination of levers for a goal, priced in seconds, and in bytes as far as an answer needs it.

The search is exact. A plan's peak is a maximum over phases, so one phase that is too large already rules it out, and a
plan is priced in full only where no phase does. What several plans share is worked out once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

from lcplan.errors import PlanError
from lcplan.estimators import formula, step_time
from lcplan.estimators.coverage import can_fuse, can_tile, check_covered
from lcplan.estimators.host_need import host_need
from lcplan.hardware import GpuSpec, KernelRates, load_gpu, scale_rates
from lcplan.levers import BY_ID, LEVERS, OFF, TILE_SIZES, Lever, Setting, conflict
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan, resolve

ORDER_BY = "h200"
"""GPU whose rates, scaled by the spec sheet, put the plans of an untimed GPU in order; they are not printed."""
FORWARD_IGNORES = frozenset(
    (
        "cp_comm_strategy", "cp_head_chunks", "offload_prefetch", "rope", "host_memory_bytes", "num_gpus",
        "gpus_per_node", "dp_replicate_size",
    )
)  # fmt: skip
"""Plan fields that change nothing of that instant of the forward; a test holds the formulas to it."""
_forward_key = attrgetter(
    *(name for name in TrainPlan.model_fields if name not in {*FORWARD_IGNORES, "mlp_tile_size", "kernels", "optim"})
)


@dataclass(frozen=True)
class Candidate:
    """One legal plan and its time."""

    plan: TrainPlan
    seconds_per_token: float
    levers: frozenset[str]

    @property
    def order(self) -> tuple[float, int]:
        """Fastest first; of equally fast ones that with fewer levers."""
        return self.seconds_per_token, self.num_levers

    @property
    def num_levers(self) -> int:
        """Levers beside those that are on by default."""
        return sum(not BY_ID[id].is_default for id in self.levers)


@dataclass(frozen=True)
class Lattice:
    """The legal plans of one length, fastest first, and why the plainest of the others are none."""

    candidates: tuple[Candidate, ...]
    refusals: tuple[PlanError, ...]
    """Of the plans with the most GPUs those with the fewest levers; without a candidate at least one."""


@dataclass(frozen=True)
class _Choice:
    """One setting of one dimension; ``lever`` is None where nothing is pulled."""

    lever: Lever | None
    setting: Setting


def dimensions(spec: ModelSpec, num_gpus: int, fixed: Setting) -> list[list[_Choice]]:
    """For each dimension what can be chosen; what the user fixed is the only choice there."""
    groups = num_gpus // int(fixed.get("sp_size", 1))  # Ulysses is the user's to decide: what it leaves is split
    found: dict[str, list[_Choice]] = {name: [_Choice(None, off)] for name, off in OFF.items()}
    for lever in LEVERS:
        if not lever.has_alternative:
            found[lever.dimension] = []
        choices = [_Choice(lever, setting) for setting in lever.settings(spec, groups)]
        if choices:
            found.setdefault(lever.dimension, []).extend(choices)
    return [kept for choices in found.values() if (kept := _agreeing(choices, fixed))]


def _agreeing(choices: list[_Choice], fixed: Setting) -> list[_Choice]:
    """Those choices that set nothing against ``fixed``; one that is not among them stays the user's own."""
    offered = _with_own(choices, fixed)
    kept = [c for c in offered if all(fixed.get(name, value) == value for name, value in c.setting.items())]
    return kept or [_Choice(None, {})]


def _with_own(choices: list[_Choice], fixed: Setting) -> list[_Choice]:
    """The choices, and that of a lever whose many settings are alike for a value that is not among them."""
    for name, value in fixed.items():
        alike = [c for c in choices if c.lever is not None and c.lever.settings_alike and name in c.setting]
        if len(alike) > 1 and value not in [choice.setting.get(name) for choice in choices]:
            return [*choices, _Choice(alike[0].lever, alike[0].setting | {name: value})]
    return choices


def gpu_counts(most: int, gpus_per_node: int) -> tuple[int, ...]:
    """Numbers of GPUs to try, ascending: any part of a node, 2, 4, 8 and so on whole ones, and all of them."""
    counts = [*range(1, min(gpus_per_node, most) + 1)]
    nodes = 2
    while nodes * gpus_per_node < most:
        counts.append(nodes * gpus_per_node)
        nodes *= 2
    return (*counts, most) if most > gpus_per_node else tuple(counts)


def lattice(
    spec: ModelSpec, gpu: GpuSpec, counts: Sequence[int], max_length: int, fixed: Setting, *, writable: bool = False
) -> Lattice:
    """Every legal plan on one of these numbers of GPUs, in order of time a token.

    With ``writable`` none that moves attention outputs to the host, which takes the job's own code, unless ``fixed``
    asks for just that: then the files refuse it by name.
    """
    asked = fixed.get("activation_checkpointing") == "selective" and fixed.get("offload_activations")
    leaves_out = writable and not asked
    timer = step_time.StepTimer(spec, gpu, ordering_rates(gpu))
    found: list[Candidate] = []
    refusals: list[tuple[int, int, PlanError]] = []
    for num_gpus in counts:
        given = fixed | {"gpu": gpu.id, "num_gpus": num_gpus, "max_length": max_length}
        for levers, settings in _classes(spec, num_gpus, fixed):
            try:
                first, _ = resolve(spec, given | settings[0], usual_gpus_per_node=gpu.gpus_per_node)
                check_covered(spec, first)
            except PlanError as error:
                refusals.append((-num_gpus, sum(not BY_ID[id].is_default for id in levers), error))
                continue
            for setting in settings:
                plan = first if setting is settings[0] else first.model_copy(update=setting)
                if not (leaves_out and plan.keeps_attention_on_host):
                    found.append(Candidate(plan, timer.seconds(plan) / plan.tokens_per_step, levers))
    found.sort(key=lambda candidate: candidate.order)
    if not found and (own := _own_refusal(spec, gpu, counts[-1], max_length, fixed)):
        return Lattice((), (own,))
    if not found and not refusals:
        return Lattice((), (_conflict(spec, counts[-1], fixed),))
    plainest = min((order for *order, _ in refusals), default=None)
    return Lattice(tuple(found), tuple(error for *order, error in refusals if order == plainest))


def _own_refusal(spec: ModelSpec, gpu: GpuSpec, num_gpus: int, max_length: int, fixed: Setting) -> PlanError | None:
    """What the stack or the formulas have against the user's own values, without any lever."""
    try:
        given = fixed | {"gpu": gpu.id, "num_gpus": num_gpus, "max_length": max_length}
        check_covered(spec, resolve(spec, given, usual_gpus_per_node=gpu.gpus_per_node)[0])
    except PlanError as error:
        return error
    return None


def _conflict(spec: ModelSpec, num_gpus: int, fixed: Setting) -> PlanError:
    """What the table has against the fewest levers that the user's values leave."""
    choices = [[lever for lever, _ in _alike(kept)] for kept in dimensions(spec, num_gpus, fixed)]
    pulled = min(({lever.id for lever in picked if lever} for picked in product(*choices)), key=len)
    reason = conflict(frozenset(pulled))
    return PlanError("nothing-legal", f"No combination of levers is legal for this goal: {reason}.")


def _classes(spec: ModelSpec, num_gpus: int, fixed: Setting) -> Iterator[tuple[frozenset[str], list[Setting]]]:
    """Levers that go together by the table, with the settings that are legal or not as one."""
    grouped = [_alike(choices) for choices in dimensions(spec, num_gpus, fixed)]
    for choice in product(*grouped):
        pulled = frozenset(lever.id for lever, _ in choice if lever is not None)
        if conflict(pulled) is None:
            yield pulled, [_merged(settings) for settings in product(*(settings for _, settings in choice))]


def _alike(choices: Sequence[_Choice]) -> list[tuple[Lever | None, list[Setting]]]:
    groups: list[tuple[Lever | None, list[Setting]]] = []
    for choice in choices:
        if choice.lever is not None and choice.lever.settings_alike and groups and groups[-1][0] is choice.lever:
            groups[-1][1].append(choice.setting)
        else:
            groups.append((choice.lever, [choice.setting]))
    return groups


def _merged(settings: Sequence[Setting]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for setting in settings:
        merged.update(setting)
    return merged


def ordering_rates(gpu: GpuSpec) -> KernelRates:
    """Rates that put plans in order: the GPU's own, or another's by the ratio of the spec sheets."""
    return gpu.kernel_rates or scale_rates(gpu, load_gpu(ORDER_BY))


def order_words(gpu: GpuSpec) -> str:
    """Whose rates put the plans of a GPU in order."""
    rates = ordering_rates(gpu)
    if not rates.scaled:
        return f"kernel rates measured on {gpu.id}"
    note = "" if gpu.kernel_rates else ", for the order of the plans alone"
    return f"kernel rates of {rates.measured_on} by the ratio of the spec sheets{note}"


class Prices:
    """Peaks of plans of one model, with what they share."""

    def __init__(self, spec: ModelSpec, gpu: GpuSpec, room: int) -> None:
        """``room`` is what a plan may use of the GPU, in bytes."""
        self.spec, self.gpu, self.room = spec, gpu, room
        self._forwards: dict[tuple[Any, ...], int] = {}
        self._worst: dict[frozenset[str], str] = {}
        self.num_priced = 0

    def device_peak(self, plan: TrainPlan) -> int:
        """Device peak of the plan's worst rank."""
        self.num_priced += 1
        ranks = formula.candidate_ranks(self.spec, plan)
        return max(
            self._on_device(plan, sum(make().values()))
            for rank in ranks
            for make in formula.phases(self.spec, plan, rank=rank).values()
        )

    def exceeds(self, candidate: Candidate, limit: int) -> bool:
        """Whether the device peak is above ``limit``; one phase that is, is enough."""
        plan = candidate.plan
        if self._is_above(plan, self.forward(plan), limit):
            return True
        for rank in reversed(formula.candidate_ranks(self.spec, plan)):
            makers = formula.phases(self.spec, plan, rank=rank)
            likely = self._worst.get(candidate.levers, "")
            for phase in sorted(makers, key=lambda phase: phase != likely):
                if self._is_above(plan, sum(makers[phase]().values()), limit):
                    self._worst[candidate.levers] = phase
                    return True
        return False

    def fits(self, candidate: Candidate, limit: int | None = None) -> bool:
        """Whether GPU and host have room, the GPU for ``limit`` bytes at most if it is given."""
        limit = self.room if limit is None else limit
        return not self.exceeds(candidate, limit) and host_fits(self.spec, candidate.plan)

    def forward(self, plan: TrainPlan) -> int:
        """A bound of the peak from below, shared by plans that differ in nothing that it depends on.

        Bytes of one instant of the forward with the smallest tiles, where the MLP can have any, and with Liger's
        kernels, where the plan can have them: then plans with and without share it.
        """
        key = (plan.optim.removesuffix("_fused"), *_forward_key(plan))  # a fused optimizer keeps the same states
        if key not in self._forwards:
            if plan.mlp_tile_size is None and can_tile(self.spec, plan):
                plan = plan.model_copy(update={"mlp_tile_size": min(TILE_SIZES)})
            if can_fuse(self.spec, plan):
                plan = plan.model_copy(update={"kernels": "liger"})
            self._forwards[key] = formula.forward_bytes(self.spec, plan)
        return self._forwards[key]

    def _is_above(self, plan: TrainPlan, allocated: int, limit: int) -> bool:
        return allocated > limit or self._on_device(plan, allocated) > limit

    def _on_device(self, plan: TrainPlan, allocated: int) -> int:
        return allocated + sum(formula.on_top(plan, allocated).values())


def host_fits(spec: ModelSpec, plan: TrainPlan) -> bool:
    """Whether the node's memory suffices; an unknown one is taken to."""
    available = plan.host_memory_bytes
    return available is None or host_need(spec, plan).bytes_per_node <= available
