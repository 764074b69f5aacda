"""What a plan needs of this machine, beside what the machine has: the same checks for ``doctor`` and ``run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lcplan import machine
from lcplan.backends.inputs import check_data
from lcplan.backends.job import JobSpec, ModelSource, packages
from lcplan.doctor import TRAIN_PACKAGES, Finding, MachineFacts, Need, Presence, diagnose
from lcplan.errors import DataError
from lcplan.estimators.host_need import host_need
from lcplan.job_options import DataSource, Device, TokenizerSource, TrainingOptions
from lcplan.ledger import MemoryReport
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan
from lcplan.units import ceil_div, format_bytes

Launcher = Literal["local", "slurm", "print"]


def need_of(
    spec: ModelSpec,
    plan: TrainPlan,
    report: MemoryReport | None,
    training: TrainingOptions,
    *,
    device: Device = "gpu",
    launcher: Launcher = "local",
    refusal: str | None = None,
) -> Need:
    """What the plan needs; without a report (a CPU job) no sizes."""
    values: dict[str, Any] = {
        "device": device,
        "gpu": plan.gpu,
        "num_gpus": plan.num_gpus,
        "gpus_per_node": plan.gpus_per_node,
        "packages": packages_of(plan),
        "attn_implementation": plan.attn_implementation,
        "launcher": launcher,
        "refusal": refusal,
    }
    if report is not None:
        values |= {
            "device_peak_bytes": report.device_peak_bytes,
            "host_bytes_per_node": host_need(spec, plan).bytes_per_node,
            "pinned_bytes_per_node": report.host.pinned_bytes_per_node,
            "load_bytes_per_node": report.host.load_bytes_per_node,
            "checkpoint_bytes": report.disk.checkpoint_bytes,
            "num_checkpoints": checkpoints_kept(training),
            "saved_model_bytes": report.disk.saved_model_bytes if training.save_model else 0,
        }
    return Need(**values)


def refusal_of(report: MemoryReport) -> str | None:
    """Why the plan does not fit; None where it does."""
    if report.fits:
        return None
    advice = "`lcplan recommend` says what would make it fit."
    if report.headroom_bytes >= 0:
        return f"the plan needs more host memory than --host-memory says that a node has. {advice}"
    needed, there = format_bytes(report.device_peak_bytes), format_bytes(report.gpu.usable_bytes)
    return f"the plan needs {needed} on a {report.gpu.id} and {there} are usable. {advice}"


def packages_of(plan: TrainPlan) -> tuple[str, ...]:
    """Distributions that the job imports."""
    return (*TRAIN_PACKAGES, *packages(plan))


def checkpoints_kept(training: TrainingOptions) -> int:
    """Most checkpoints on the disk at once: the newest is whole before the oldest goes."""
    if training.save_strategy == "no":
        return 0
    kept = training.save_total_limit + 1 if training.save_total_limit is not None else None
    if training.save_strategy == "epoch":
        written = ceil_div(round(training.num_train_epochs * 1000), 1000) if training.max_steps is None else None
    else:
        written = None if training.max_steps is None else ceil_div(training.max_steps, training.save_steps)
    bounds = [count for count in (kept, written) if count is not None]
    return min(bounds, default=1)


def look(
    output_dir: Path,
    *,
    plan: TrainPlan | None = None,
    spec: ModelSpec | None = None,
    device: Device = "gpu",
    ask_torch: bool = True,
) -> MachineFacts:
    """The facts of this machine as far as this plan needs them."""
    heads: dict[str, Any] = {}
    if spec is not None and device == "gpu":
        heads = {"head_dim": spec.head_dim, "heads": spec.num_attention_heads}
    return machine.collect(output_dir, ask_torch=ask_torch, levers=levers_of(plan) if plan else {}, **heads)


def levers_of(plan: TrainPlan) -> dict[str, str]:
    """Keywords of transformers' checkpointing that the plan needs and not every release has, to their flags."""
    asked = {
        "offload": ("--offload-activations", plan.offload_activations and not plan.offloads_by_itself),
        "every_n_layers": ("--checkpoint-every-n-layers", plan.checkpoint_every_n_layers > 1),
    }
    return {name: flag for name, (flag, is_set) in asked.items() if is_set}


def with_inputs(
    facts: MachineFacts,
    plan: TrainPlan,
    *,
    model: ModelSource | None,
    tokenizer: TokenizerSource | None,
    data: DataSource | None,
) -> MachineFacts:
    """The facts with what is known of weights, tokenizer and data."""
    sources: dict[str, tuple[str, Presence]] = {}
    problem: tuple[str, str] | None = None
    if model is not None and model.init == "pretrained":
        sources["weights"] = (model.id, machine.presence(model.id, kind="model", file="config.json"))
    if tokenizer is not None and tokenizer.id is not None:
        there = machine.presence(tokenizer.id, kind="model", file="tokenizer_config.json")
        sources["tokenizer"] = (tokenizer.id, there)
    if data is not None and data.kind == "hub" and data.name is not None:
        sources["data"] = (data.name, machine.presence(data.name, kind="dataset", file=None))
    elif data is not None:
        try:
            check_data(data, plan)
        except DataError as error:
            problem = (error.code, error.message)
    return facts.model_copy(update={"sources": sources, "data_problem": problem})


def check_machine(job: JobSpec, need: Need, spec: ModelSpec, output_dir: Path) -> tuple[Finding, ...]:
    """Every finding before ``run`` writes anything; a CPU job does not start torch to ask it."""
    local_gpu = job.device == "gpu" and need.launcher == "local"
    facts = look(output_dir, plan=job.plan, spec=spec, device=job.device, ask_torch=local_gpu)
    facts = with_inputs(facts, job.plan, model=job.model, tokenizer=job.tokenizer, data=job.data)
    return diagnose(need, facts)
