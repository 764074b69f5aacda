"""The probe method: one step of the generated job on one GPU, as one rank of its N.

The job's own folder is rendered and its ``probe.py`` run; this module checks what can be checked before, starts it,
and reads what it measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from lcplan._record import Record
from lcplan.backends import launch
from lcplan.backends.job import JobSpec, ModelSource, render_job
from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.estimation import make_report
from lcplan.estimators import formula
from lcplan.estimators.host_need import host_items, host_need
from lcplan.estimators.layer import Alive
from lcplan.estimators.runtime import CUDA_CONTEXT_BYTES, NCCL_BYTES
from lcplan.hardware import GpuSpec
from lcplan.job_options import DataSource, TokenizerSource
from lcplan.ledger import Compared, MemoryReport, RopeParameters
from lcplan.model_spec import ModelSpec
from lcplan.rope import position_limit, resolve_rope
from lcplan.train_plan import TrainPlan
from lcplan.units import format_bytes

RESULT_FILE = "probe.json"
BACKENDS = ("single", "fsdp2")
"""Backends whose jobs run with PyTorch's fake process group; DDP's reducer and its collectives do not."""
PER_LAYER_KEYS = ("layer_types", "no_rope_layers", "mlp_only_layers")
"""Keys of a config.json that are lists with an entry a layer, or of layers."""
RECORD_FILE = "record.json"
"""The probe as a measured row, beside probe.json."""


class ProbeResult(Record):
    """What ``probe.json`` says."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    exit_code: int
    error: str | None
    allocator_summary: str | None = None
    peak_allocated_bytes: int | None = None
    phases: dict[str, int] = Field(default_factory=dict)
    resident: dict[str, int] = Field(default_factory=dict)
    peak_reserved_bytes: int | None = None
    pinned_peak_bytes: int | None = None
    device_used_bytes: int | None = None
    step_s: float | None = None
    whole_steps_s: list[float] = Field(default_factory=list)
    """Of every step of the plan's length; the first pins host memory."""
    loss: float | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    gpu_name: str | None = None


class Probed(Record):
    """A probe's outcome; without a report where it failed."""

    result: ProbeResult
    report: MemoryReport | None
    folder: Path


def probe(
    spec: ModelSpec,
    plan: TrainPlan,
    gpu: GpuSpec,
    *,
    folder: Path,
    assumptions: tuple[str, ...] = (),
    rank: int = 0,
    layers: int | None = None,
    capacity_bytes: int | None = None,
) -> Probed:
    """Measure one step on this machine's GPU, and put it into the one report; ``folder`` keeps job and record.

    Args:
        spec: the model
        plan: the resolved plan
        gpu: the GPU it has to fit
        folder: new folder for the job, probe.json and record.json
        assumptions: what was chosen for the user
        rank: global rank that the GPU stands for
        layers: decoder layers to measure with; the rest is added as the formulas have it
        capacity_bytes: usable bytes of another GPU, to which the process is capped

    Raises:
        PlanError: when the plan cannot be probed.
        EnvironmentProblem: when this machine cannot: no GPU, no train extra, too little host memory.
    """
    cut = with_layers(spec, layers)
    free = plan.host_memory_bytes if plan.host_memory_bytes is not None else host_memory_available()
    check_probe(cut, plan, rank=rank, host_available=free)
    added = _added_by(spec, cut, plan, rank)
    rope = resolve_rope(spec, plan.max_length, plan.rope)
    found = run_probe(probe_job(cut, plan, rope), folder, rank=rank, capacity_bytes=capacity_bytes)
    if found.error is not None:
        return Probed(result=found, report=None, folder=folder)
    write_record(folder, cut, plan, rank, found)
    if added:
        assumptions += (
            f"{spec.num_hidden_layers} layers: measured with {cut.num_hidden_layers}, the others as the formulas have "
            "them",
        )
    if capacity_bytes is not None:
        assumptions += (f"it ran with no more than {format_bytes(capacity_bytes)} of GPU memory",)
    by_phase = phases(found)
    for phase, num_bytes in added.items():
        by_phase[phase]["probe.other_layers"] = num_bytes
    report = make_report(spec, plan, gpu, "probe", by_phase, rank, assumptions)
    ran_in_it = capacity_bytes is not None and capacity_bytes <= gpu.usable_bytes and not added
    update = {"compared": compare(cut, plan, rank, found), "step_time_s": None if added else found.step_s}
    if ran_in_it:
        update["fits"] = report.host.fits is not False
    return Probed(result=found, report=report.model_copy(update=update), folder=folder)


def _added_by(spec: ModelSpec, cut: ModelSpec, plan: TrainPlan, rank: int) -> dict[str, int]:
    """Bytes that the layers which were not measured add to each phase."""
    if cut is spec:
        return {}
    whole, part = (of_phases(formula.instants(each, plan, rank=rank).totals()) for each in (spec, cut))
    return {phase: whole[phase] - part[phase] for phase in whole}


def of_phases(totals: Mapping[str, int]) -> dict[str, int]:
    """The formulas' largest total within each phase that a probe tells apart."""
    others = ("forward", "optimizer_step", "save")
    backward = [size for phase, size in totals.items() if phase not in others and not phase.startswith("evaluation")]
    return {
        "forward": totals["forward"],
        "backward": max(backward),
        "optimizer_step": totals["optimizer_step"],
    }


def with_layers(spec: ModelSpec, layers: int | None) -> ModelSpec:
    """The model cut to its first ``layers`` decoder layers.

    Raises:
        PlanError: when it has no so many.
    """
    if layers is None or layers == spec.num_hidden_layers:
        return spec
    if not 0 < layers < spec.num_hidden_layers:
        raise PlanError("bad-layers", f"--layers {layers}: {spec.id} has {spec.num_hidden_layers}. Use fewer.")
    config = dict(spec.config)
    inner = dict(config["text_config"]) if "text_config" in config else config
    inner["num_hidden_layers"] = layers
    for key in PER_LAYER_KEYS:
        if isinstance(inner.get(key), list):
            inner[key] = inner[key][:layers]
    if inner is not config:
        config["text_config"] = inner
    return ModelSpec.from_config(config, spec.id)


def probe_job(spec: ModelSpec, plan: TrainPlan, rope: RopeParameters | None) -> JobSpec:
    """The job that is probed: random weights and random tokens, so that nothing is downloaded."""
    return JobSpec(
        plan=plan,
        model=ModelSource(id=spec.id, init="random", config=spec.config),
        rope=rope,
        max_position_embeddings=position_limit(spec, plan.max_length, rope),
        data=DataSource(kind="python-docs"),
        tokenizer=TokenizerSource(kind="train-bpe", vocab_size=spec.vocab_size),
    )


def check_probe(spec: ModelSpec, plan: TrainPlan, *, rank: int, host_available: int) -> None:
    """Refuse what a probe cannot do, before anything is written.

    Raises:
        PlanError: naming the backend or the rank.
        EnvironmentProblem: when host memory would run out, with the number.
    """
    if plan.backend not in BACKENDS:
        raise PlanError(
            "not-probed",
            f"--backend {plan.backend}: a probe runs {' and '.join(BACKENDS)} alone, whose code runs with PyTorch's "
            "fake process group. Use --method formula.",
        )
    if not 0 <= rank < plan.num_gpus:
        raise PlanError("bad-rank", f"--rank {rank}: the plan has ranks 0 to {plan.num_gpus - 1}.")
    items = host_items(spec, plan)
    loading = items["host.load_copies"]
    needed = host_need(spec, plan).pinned_bytes_per_rank + loading
    if needed > host_available:
        raise EnvironmentProblem(
            "host-memory",
            f"the probe holds {format_bytes(needed)} in host memory (pinned layer inputs and shards, and "
            f"{format_bytes(loading)} of weights while it loads), and {format_bytes(host_available)} are free. Use "
            "--layers to probe fewer layers, or --host-memory where the machine grows into its memory.",
        )


def host_memory_available() -> int:
    """Bytes of host memory that a new process could take."""
    import psutil

    return int(psutil.virtual_memory().available)


def allocator_bytes(plan: TrainPlan, capacity_bytes: int) -> int:
    """What PyTorch's allocator may take of a GPU with ``capacity_bytes``: less what lies outside it.

    Raises:
        PlanError: when nothing is left.
    """
    outside = CUDA_CONTEXT_BYTES + (NCCL_BYTES if plan.num_gpus > 1 else 0)
    if capacity_bytes <= outside:
        raise PlanError(
            "bad-capacity",
            f"--capacity {format_bytes(capacity_bytes)}: the CUDA context and NCCL alone take "
            f"{format_bytes(outside)}. Give the usable memory of a GPU, such as 80GB.",
        )
    return capacity_bytes - outside


def run_probe(job: JobSpec, folder: Path, *, rank: int, capacity_bytes: int | None) -> ProbeResult:
    """Render the job into ``folder``, probe it, and return what it measured; a failed one is a result too.

    Raises:
        EnvironmentProblem: when this machine has no CUDA GPU or lacks the train extra.
    """
    launch.check_packages(job.plan)
    if not launch.visible_gpus():
        raise EnvironmentProblem(
            "no-gpu", "a probe needs one CUDA GPU, and none is visible. Use --method trace: it needs no GPU."
        )
    cap = None if capacity_bytes is None else allocator_bytes(job.plan, capacity_bytes)
    return start_probe(render_job(job, folder, force=True), rank=rank, cap=cap)


def start_probe(folder: Path, *, rank: int, cap: int | None, whole_steps: int = 1) -> ProbeResult:
    """Run ``probe.py`` of a job's folder, which measures the last step; where it was killed, the record says so."""
    (folder / RESULT_FILE).unlink(missing_ok=True)
    command = [sys.executable, "probe.py", "--rank", str(rank), "--whole-steps", str(whole_steps)]
    command += [] if cap is None else ["--capacity", str(cap)]
    code = launch.stream(command, folder, launch.job_environment("gpu", offline=True))
    path = folder / RESULT_FILE
    if not path.is_file():
        killed = f"killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        found = ProbeResult(exit_code=1, error=f"the probe was {killed} before it could say what it measured")
        path.write_text(json.dumps(found.model_dump(mode="json"), indent=2) + "\n", "utf-8")
        return found
    return ProbeResult.model_validate_json(path.read_text("utf-8"))


def phases(found: ProbeResult) -> dict[str, Alive]:
    """Measured bytes by phase, as far as they can be told apart."""
    resident = found.resident
    by_phase: dict[str, Alive] = {}
    for phase, peak in found.phases.items():
        alive = {f"probe.{name}": resident.get(name, 0) for name in ("parameters", "optimizer_states")}
        if phase == "optimizer_step":
            alive["probe.gradients"] = resident.get("gradients", 0)
        alive["probe.other"] = peak - sum(alive.values())
        by_phase[phase] = {key: size for key, size in alive.items() if size}
    return by_phase


def compare(spec: ModelSpec, plan: TrainPlan, rank: int, found: ProbeResult) -> tuple[Compared, ...]:
    """The formulas' numbers beside the measured ones; none where they do not cover the plan."""
    try:
        instants = formula.instants(spec, plan, rank=rank)
    except PlanError:
        return ()
    totals, step = of_phases(instants.totals()), instants.phases["optimizer_step"]
    states = sum(size for key, size in step.items() if key.startswith("optimizer.") and "states" in key)
    parts: Mapping[str, int] = {
        "parameters": sum(step.get(key, 0) for key in ("weights.parameters", "weights.nf4", "lora.adapters")),
        "optimizer_states": states,
        "gradients": step.get("gradients.finished", 0) + step.get("gradients.accumulated", 0),
    }
    pairs: list[tuple[str, int, int | None]] = [
        (name, predicted, found.resident.get(name)) for name, predicted in parts.items()
    ]
    pairs += [(phase, predicted, found.phases.get(phase)) for phase, predicted in totals.items()]
    pairs.append(("peak", max(totals.values()), found.peak_allocated_bytes))
    pinned = host_need(spec, plan).pinned_bytes_per_rank
    pairs.append(("pinned", pinned, found.pinned_peak_bytes if pinned else None))
    return tuple(
        Compared(what=what, predicted_bytes=predicted, measured_bytes=measured)
        for what, predicted, measured in pairs
        if measured is not None
    )


def write_record(folder: Path, spec: ModelSpec, plan: TrainPlan, rank: int, found: ProbeResult) -> None:
    """Write record.json."""
    row = json.dumps(measured_row(spec, plan, rank, found), indent=2) + "\n"
    (folder / RECORD_FILE).write_text(row, "utf-8")


def measured_row(spec: ModelSpec, plan: TrainPlan, rank: int, found: ProbeResult) -> dict[str, Any]:
    """The probe as a measured row, which ``lcplan check --add`` takes."""
    measured = {
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "resident_before_step_bytes": found.resident.get("before_step"),
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "device_used_bytes": found.device_used_bytes,
        "pinned_peak_bytes": found.pinned_peak_bytes,
        "step_s": found.step_s,
    }
    ranks = "one GPU" if plan.num_gpus == 1 else f"rank {rank} of {plan.num_gpus}, fake process group on one GPU"
    return {
        "id": "",
        "gpu": found.gpu_name,
        "kind": f"{ranks}, probe",
        "model": spec.id,
        "num_hidden_layers": spec.num_hidden_layers,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "num_parameters": spec.num_parameters,
        "rank": rank,
        "plan": plan.model_dump(),
        "versions": found.versions,
        "measured": {key: value for key, value in measured.items() if value is not None},
        "config": spec.config,
    }
