"""Peak memory of a step by running the real code on fake tensors: no GPU, no weights, no data.

The model is transformers' own class, the loss head and offloading TRL's, adapters peft's, sharding accelerate's and
torch's, ring attention torch's; only sizes flow. What a GPU kernel needs beside its outputs is invisible to fake
tensors and is an item of its own.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, NamedTuple

from lcplan._collection import no_collection
from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.estimators.runtime import cublas_workspace
from lcplan.model_spec import ModelSpec
from lcplan.tracing.extension import extend, extension_of
from lcplan.tracing.kernels import beside_outputs, picked_rows, settled_categories
from lcplan.tracing.model import build, materialise
from lcplan.tracing.modules import RunningModule, name_phases, without_index
from lcplan.tracing.seams import fsdp_as_in, gpu_behaviour, quiet, watched_storages
from lcplan.tracing.sharding import Ranks, ranks_of, shard
from lcplan.tracing.step import micro_steps, optimizer_step
from lcplan.tracing.storages import Alive, Kind, StorageTracker
from lcplan.train_plan import TrainPlan

SCRATCH = "kernel scratch"
"""Stands for an operator where a kernel needs more than its outputs; negative where it needs less."""
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adafactor")


def not_traced(plan: TrainPlan) -> list[str]:
    """Flags of the plan that the trace does not run."""
    refused = {
        f"--backend {plan.backend}": plan.backend not in ("single", "fsdp2"),
        f"--loss {plan.loss}": plan.loss not in ("chunked", "full"),
        f"--kernels {plan.kernels}": plan.kernels != "none",
        f"--quantize {plan.quantize}": plan.quantize != "none",
        f"--optim {plan.optim}": plan.optim not in OPTIMIZERS,
        f"--attn-implementation {plan.attn_implementation}": plan.attn_implementation == "flash_attention_2",
        "--packing": plan.packing,
        f"--per-device-eval-batch-size {plan.per_device_eval_batch_size}": plan.per_device_eval_batch_size is not None,
    }
    return [what for what, present in refused.items() if present]


class Trace(NamedTuple):
    """What was alive at the largest instant of each part of a steady step, on one rank."""

    parts: dict[str, Alive]
    """In step order: forward, forward[i], loss[forward], loss[backward], backward[i], backward.embedding and
    optimizer_step."""
    traced_layers: tuple[int, ...]
    """Layers of the traces that the parts were extended from; those of the model where all were traced."""

    def totals(self) -> dict[str, int]:
        """Allocated bytes of each part."""
        return {part: alive.total() for part, alive in self.parts.items()}

    @property
    def peak(self) -> int:
        """Peak allocated bytes of the step."""
        return max(self.totals().values())


def trace(
    spec: ModelSpec, plan: TrainPlan, *, rank: int = 0, layers: int | None = None, torch_version: str | None = None
) -> Trace:
    """One steady training step of one rank, run on fake tensors.

    Args:
        spec: the model
        plan: the resolved plan
        rank: global rank
        layers: decoder layers to trace and extend from; by itself as few as are exact
        torch_version: release whose FSDP2 is meant, for measurements of another one than is installed

    Raises:
        PlanError: when the plan holds what is not traced.
        EnvironmentProblem: when the code cannot run on fake tensors, or the stack is unknown.
    """
    if refused := not_traced(plan):
        raise PlanError(
            "not-traced",
            f"{', '.join(refused)}: the trace method does not run it. --method formula may cover it.",
        )
    if not 0 <= rank < plan.num_gpus:
        raise PlanError("bad-rank", f"--rank {rank} does not exist: this plan has ranks 0 to {plan.num_gpus - 1}.")
    total = spec.num_hidden_layers
    extension = extension_of(spec, plan, layers)
    run = partial(trace_layers, spec, plan, rank=rank, torch_version=torch_version)
    if extension is None:
        return Trace(run(total), (total,))
    parts = extend(run(extension.first), run(extension.second), extension, total)
    return Trace(parts, (extension.first, extension.second))


def trace_layers(
    spec: ModelSpec, plan: TrainPlan, num_layers: int, *, rank: int, torch_version: str | None = None
) -> dict[str, Alive]:
    """What is alive at the largest instant of each part of a steady step, of a model with so many layers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    sharded = plan.backend == "fsdp2"
    with (
        quiet(),
        gpu_behaviour(sharded=sharded, padded=plan.padding and rank % plan.cp_size == 0),
        ranks_of(plan, rank) as ranks,
        contextlib.ExitStack() as stack,
    ):
        if sharded:
            stack.enter_context(fsdp_as_in(torch_version))
        model = build(spec, plan, num_layers)
        stack.enter_context(FakeTensorMode())
        materialise(model)
        table = tuple(model.get_input_embeddings().weight.shape) if spec.tie_word_embeddings else None
        if ranks is not None:
            model = shard(model, plan, ranks)
        modules = RunningModule(model)
        tracker = StorageTracker(
            scratch_of=partial(beside_outputs, table),
            category_of=settled_categories,
            module_of=modules.name,
            stand_in_for=partial(picked_rows, plan.scored_fraction),
        )
        name_phases(tracker, model)
        try:
            _run(tracker, modules, model, plan, ranks)
        except Exception as error:  # whatever a model's own code raises on tensors without values
            raise EnvironmentProblem(
                "trace-failed", f"{spec.id} cannot run on fake tensors: {error}. --method formula may cover it."
            ) from error
        return _phases(tracker)


def _run(tracker: StorageTracker, modules: RunningModule, model: Any, plan: TrainPlan, ranks: Ranks | None) -> None:
    for name, parameter in model.named_parameters():
        if plan.offload_params:
            tracker.forget(_local(parameter))
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: tracker.forget(_local(p.grad)))
        else:
            tracker.add(_local(parameter), "parameter", module=without_index(name))
    for name, buffer in model.named_buffers():
        tracker.add(buffer, "buffer", module=without_index(name))
    watching: Any = contextlib.nullcontext() if ranks is None else watched_storages(tracker.resized)
    with watching, modules.watched(), no_collection(), tracker:
        batches = micro_steps(tracker, model, plan, ranks)
        for parameter in model.parameters():
            if parameter.grad is not None:
                tracker.settle(_local(parameter.grad), "gradient")
        if not plan.offload_params:  # else the optimizer works on the host
            optimizer_step(tracker, model, plan)
        del batches


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _phases(tracker: StorageTracker) -> dict[str, Alive]:
    workspace = Kind("runtime", "", cublas_workspace.key, (), "")
    found = {}
    for phase, peak in tracker.peaks.items():
        if phase == "init":
            continue
        alive = tracker.alive(phase)
        alive[Kind("temporary", "", SCRATCH, (), "")] += peak.scratch
        alive[workspace] += cublas_workspace()
        if phase != "optimizer_step":
            alive.update(tracker.kept)
        found[phase] = alive
    return found
