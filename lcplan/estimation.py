"""From a model, a plan and a GPU to a MemoryReport, by formulas, a trace or a probe."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any, Literal

from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.estimators import formula, step_time, weights
from lcplan.estimators._item import ITEMS
from lcplan.estimators.host_need import host_items, host_need
from lcplan.estimators.layer import Alive
from lcplan.estimators.working import Working, showing_working
from lcplan.hardware import GpuSpec
from lcplan.ledger import (
    DEVICE,
    BatchSize,
    Category,
    DiskUse,
    GpuSummary,
    HostMemory,
    MemoryItem,
    MemoryReport,
    ModelSummary,
    PhaseTotal,
    PlanWarning,
    StepTime,
    TokenBudget,
)
from lcplan.model_spec import ModelSpec
from lcplan.rope import resolve_rope
from lcplan.train_plan import TrainPlan
from lcplan.units import ceil_div

STACK = ("trl", "transformers", "accelerate", "torch")
NOT_MODELLED = (
    "growth of NCCL's buffers beyond two ranks",
    "one more gathered layer in the loss of FSDP2 jobs with torch 2.12 and newer",
    "the host copy of a full model while saving",
    "dataloader workers and the tokenised dataset in host memory",
)


@cache
def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # pulls in email and zipfile

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_stack() -> dict[str, str | None]:
    """Versions of the training stack in this environment; None where a package is missing."""
    return {name: _version(name) for name in STACK}


def need_train_extra(why: str) -> None:
    """Refuse to go on without the training stack.

    Raises:
        EnvironmentProblem: naming what is missing.
    """
    missing = [name for name, version in installed_stack().items() if version is None]
    if missing:
        raise EnvironmentProblem(
            "missing-extra",
            f"{why}, and {', '.join(missing)} is not installed. Install it: pip install 'lcplan[train]'",
        )


def lcplan_version() -> str:
    """Version of the installed distribution, or ``0+unknown`` when run from a bare source tree."""
    return _version("lcplan") or "0+unknown"


def estimate(spec: ModelSpec, plan: TrainPlan, gpu: GpuSpec, *, assumptions: tuple[str, ...] = ()) -> MemoryReport:
    """Peak memory of one training step, item by item and phase by phase, by the formula method.

    Raises:
        PlanError: when the formulas do not cover the model or a lever, or the rotary scaling is impossible.
    """
    by_rank = {rank: formula.instants(spec, plan, rank=rank) for rank in formula.candidate_ranks(spec, plan)}
    rank = max(by_rank, key=lambda r: max(by_rank[r].totals().values()))
    return make_report(spec, plan, gpu, "formula", by_rank[rank].phases, rank, assumptions)


def estimate_by_trace(
    spec: ModelSpec,
    plan: TrainPlan,
    gpu: GpuSpec,
    *,
    assumptions: tuple[str, ...] = (),
    rank: int | None = None,
    layers: int | None = None,
) -> MemoryReport:
    """The same report from the real training code on fake tensors; needs the train extra, no GPU.

    Args:
        spec: the model
        plan: the resolved plan
        gpu: the GPU it has to fit
        assumptions: what was chosen for the user
        rank: global rank to trace; the one that holds most if it is not given
        layers: decoder layers to trace and extend from; as few as are exact if it is not given

    Raises:
        EnvironmentProblem: when the train extra is missing or the code cannot be traced.
        PlanError: when the plan holds what is not traced, or the rotary scaling is impossible.
    """
    need_train_extra("--method trace runs the training code")
    from lcplan.tracing import report as traced
    from lcplan.tracing.trace import trace

    ranks = _ranks_to_trace(spec, plan) if rank is None else (rank,)
    by_rank = {each: trace(spec, plan, rank=each, layers=layers) for each in ranks}
    worst = max(by_rank, key=lambda each: by_rank[each].peak)
    found = by_rank[worst]
    if found.traced_layers != (spec.num_hidden_layers,):
        first, second = found.traced_layers
        assumptions += (
            f"{spec.num_hidden_layers} layers: extended from traces of {first} and {second}, the layers being alike",
        )
    report = make_report(spec, plan, gpu, "trace", traced.phases(found), worst, assumptions)
    return report.model_copy(
        update={"timeline": traced.timeline(found), "tensors_at_peak": traced.tensors_at_peak(found)}
    )


def _ranks_to_trace(spec: ModelSpec, plan: TrainPlan) -> tuple[int, ...]:
    """The rank that holds most by the formulas; every candidate where they do not cover the plan."""
    candidates = formula.candidate_ranks(spec, plan)
    if len(candidates) == 1:
        return candidates
    try:
        return (max(candidates, key=lambda rank: max(formula.instants(spec, plan, rank=rank).totals().values())),)
    except PlanError:
        return candidates


def make_report(
    spec: ModelSpec,
    plan: TrainPlan,
    gpu: GpuSpec,
    method: Literal["formula", "trace", "probe", "run"],
    phases: dict[str, Alive],
    rank: int,
    assumptions: tuple[str, ...],
) -> MemoryReport:
    """Put what a method found into the one report."""
    rope = resolve_rope(spec, plan.max_length, plan.rope)
    totals = {phase: sum(alive.values()) for phase, alive in phases.items()}
    peak_phase = max(totals, key=lambda phase: totals[phase])
    on_top = formula.on_top(plan, totals[peak_phase])
    device_peak = totals[peak_phase] + sum(on_top.values())
    host = _host(spec, plan)
    return MemoryReport(
        lcplan_version=lcplan_version(),
        method=method,
        model=_model_summary(spec),
        plan=plan.model_dump(),
        gpu=GpuSummary(id=gpu.id, usable_bytes=gpu.usable_bytes),
        stack=installed_stack(),
        peak_allocated_bytes=totals[peak_phase],
        peak_phase=peak_phase,
        peak_rank=rank,
        device_peak_bytes=device_peak,
        fits=device_peak <= gpu.usable_bytes and host.fits is not False,
        headroom_bytes=gpu.usable_bytes - device_peak,
        host=host,
        disk=_disk(spec, plan),
        items=_items(phases, on_top, host_items(spec, plan)),
        phases=tuple(PhaseTotal(phase=phase, allocated_bytes=total) for phase, total in totals.items()),
        rope=rope,
        batch=BatchSize(sequences_per_step=plan.sequences_per_step, tokens_per_step=plan.tokens_per_step),
        **_time(spec, plan, gpu),
        warnings=tuple(_warnings(spec, plan, host, rope is not None))
        + _offload_warning(spec, plan, totals[peak_phase]),
        assumptions=assumptions,
        not_modelled=(*NOT_MODELLED, *_left_out(plan, method)),
    )


def _time(spec: ModelSpec, plan: TrainPlan, gpu: GpuSpec) -> dict[str, Any]:
    """The report's fields about time."""
    reason = step_time.refusal(spec, plan, gpu)
    rates = gpu.kernel_rates
    if reason is not None or rates is None:
        return {"step_time_unknown": reason}
    timer = step_time.StepTimer(spec, gpu, rates)
    parts = timer.parts(plan)
    seconds = parts.total
    peak = plan.num_gpus * gpu.bf16_dense_flops
    source = f"those of {rates.measured_on} by the ratio of the spec sheets" if rates.scaled else "measured"
    return {
        "step_time_s": seconds,
        "tokens_per_second": plan.tokens_per_step / seconds,
        "step_time": StepTime(
            seconds=seconds,
            parts=asdict(parts),
            tokens_per_second_per_gpu=plan.tokens_per_step / seconds / plan.num_gpus,
            mfu=timer.model_flops(plan) / seconds / peak,
            mfu_convention=step_time.MFU_CONVENTION,
            rates=source,
        ),
    }


def workings(spec: ModelSpec, plan: TrainPlan, report: MemoryReport) -> dict[tuple[str, int], Working]:
    """How the formulas worked out each (key, bytes) of a report's items; a number without arithmetic is not there."""
    with showing_working():
        phases = formula.instants(spec, plan, rank=report.peak_rank).phases
        on_top = formula.on_top(plan, report.peak_allocated_bytes)
        on_host = host_items(spec, plan)
    every = (pair for alive in (*phases.values(), on_top, on_host) for pair in alive.items())
    return {(key, int(value)): value for key, value in every if value and isinstance(value, Working)}


def with_token_budget(report: MemoryReport, tokens: int) -> MemoryReport:
    """The report with the time that so many tokens take."""
    steps = ceil_div(tokens, report.batch.tokens_per_step)
    seconds = None if report.step_time_s is None else steps * report.step_time_s
    gpu_hours = None if seconds is None else seconds * report.plan["num_gpus"] / 3600
    budget = TokenBudget(tokens=tokens, steps=steps, seconds=seconds, gpu_hours=gpu_hours)
    return report.model_copy(update={"token_budget": budget})


def _left_out(plan: TrainPlan, method: str) -> tuple[str, ...]:
    """Phases that this method does not have for this plan."""
    if method != "formula":
        return ("evaluation and saving",)
    return ("saving under DeepSpeed",) if plan.backend == "deepspeed" else ()


def _model_summary(spec: ModelSpec) -> ModelSummary:
    return ModelSummary(
        id=spec.id,
        model_type=spec.model_type,
        num_parameters=spec.num_parameters,
        num_hidden_layers=spec.num_hidden_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
    )


def _items(phases: dict[str, Alive], on_top: Alive, host_bytes: Alive) -> tuple[MemoryItem, ...]:
    """Group the instants' values: the same key and size over several phases is one item."""
    where: dict[tuple[str, int], list[str]] = {}
    for phase, alive in phases.items():
        for key, num_bytes in alive.items():
            where.setdefault((key, num_bytes), []).append(phase)
    items = [_item(key, num_bytes, tuple(found)) for (key, num_bytes), found in where.items()]
    items.extend(_item(key, num_bytes, (DEVICE,)) for key, num_bytes in on_top.items())
    items.extend(_item(key, num_bytes, ("host",), on_host=True) for key, num_bytes in host_bytes.items() if num_bytes)
    return tuple(items)


def _item(key: str, num_bytes: int, phases: tuple[str, ...], *, on_host: bool = False) -> MemoryItem:
    source = ITEMS.get(key)
    if source is None:
        return _traced_item(key, num_bytes, phases)
    return MemoryItem(
        key=key,
        category=source.category,
        num_bytes=num_bytes,
        phases=phases,
        device="host" if on_host else "gpu",
        formula=source.formula,
        source=source.source,
        confidence=source.confidence,
    )


PROBED: dict[str, Category] = {
    "probe.parameters": "parameter",
    "probe.optimizer_states": "optimizer_state",
    "probe.gradients": "gradient",
    "probe.other": "activation",
    "probe.other_layers": "activation",
}
"""Items of a probe: what is no weight, state or finished gradient is activations, gradients under way and buffers."""


def _traced_item(key: str, num_bytes: int, phases: tuple[str, ...]) -> MemoryItem:
    if key in PROBED:
        return MemoryItem(
            key=key,
            category=PROBED[key],
            num_bytes=num_bytes,
            phases=phases,
            formula="torch.cuda.max_memory_allocated, less the items above it",
            source="the job's own step on this machine's GPU",
            confidence="exact",
        )
    from lcplan.tracing.report import ITEMS as TRACED_ITEMS

    return MemoryItem(
        key=key,
        category=TRACED_ITEMS[key],
        num_bytes=num_bytes,
        phases=phases,
        formula="sum of live storages",
        source="the installed training code, run on fake tensors",
        confidence="exact",
    )


def _offload_warning(spec: ModelSpec, plan: TrainPlan, peak: int) -> tuple[PlanWarning, ...]:
    """Say so where the peak is set elsewhere, so that offloading moves bytes without lowering it."""
    if not plan.offload_activations:
        return ()
    kept = plan.model_copy(update={"offload_activations": False})
    try:
        without = max(
            max(formula.instants(spec, kept, rank=r).totals().values()) for r in formula.candidate_ranks(spec, kept)
        )
    except PlanError:
        return ()
    if without > peak:
        return ()
    message = f"The peak stays at {peak:,} bytes without --offload-activations: it is not set by the layer inputs."
    fix = "Leave it out; it costs time and host memory."
    return (PlanWarning(code="offload-without-gain", message=message, fix=fix),)


def _host(spec: ModelSpec, plan: TrainPlan) -> HostMemory:
    needed = host_need(spec, plan)
    available = plan.host_memory_bytes
    return HostMemory(
        pinned_bytes_per_rank=needed.pinned_bytes_per_rank,
        pinned_bytes_per_node=needed.pinned_bytes_per_rank * needed.ranks_per_node,
        load_bytes_per_node=needed.load_bytes_per_node,
        fits=None if available is None else needed.bytes_per_node <= available,
    )


def _disk(spec: ModelSpec, plan: TrainPlan) -> DiskUse:
    kept = weights.FP32_BYTES if plan.backend == "fsdp2" or plan.dtype == "float32" else weights.BF16_BYTES
    checkpoint = weights.checkpoint(num_parameters=spec.num_parameters, dtype_bytes=kept)
    if plan.backend == "deepspeed":
        checkpoint = weights.zero_checkpoint(num_parameters=spec.num_parameters)
    return DiskUse(
        saved_model_bytes=weights.saved_model(num_parameters=spec.num_parameters, dtype_bytes=kept),
        checkpoint_bytes=checkpoint,
    )


def _warnings(spec: ModelSpec, plan: TrainPlan, host: HostMemory, scaled: bool) -> list[PlanWarning]:
    found: list[PlanWarning] = []

    def warn(code: str, message: str, fix: str) -> None:
        found.append(PlanWarning(code=code, message=message, fix=fix))

    if plan.loss == "full":
        warn(
            "loss-full-old-trl",
            "A loss over full logits exists in TRL up to 1.14 only; from 1.15 on the default loss is chunked.",
            "Use --loss chunked; it gives the same loss.",
        )
    if plan.rope == "none" and plan.max_length > spec.max_position_embeddings and not scaled:
        warn(
            "rope-too-short",
            f"{plan.max_length:,} tokens exceed the {spec.max_position_embeddings:,} positions of {spec.id}, unscaled.",
            "Use --rope auto.",
        )
    if host.fits is None and host.pinned_bytes_per_node:
        warn(
            "host-memory-unknown",
            "Offload pins host memory, and how much a node has is not known.",
            "Give --host-memory to have it checked.",
        )
    if plan.num_gpus > 1 and plan.cp_size * plan.sp_size == 1:
        warn(
            "gpus-without-length",
            "Data-parallel GPUs share the states but each still holds whole sequences: they do not help length.",
            f"Use --{'sp' if plan.backend == 'deepspeed' else 'cp'}-size to split a sequence.",
        )
    return found
