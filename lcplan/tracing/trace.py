"""Peak memory of a step by running the real code on fake tensors: no GPU, no weights, no data.

The model is transformers' own class, the loss head and offloading TRL's, adapters peft's, sharding accelerate's and
torch's, ring attention torch's; only sizes flow. What a GPU kernel needs beside its outputs is invisible to fake
tensors and is an item of its own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.estimators.runtime import cublas_workspace
from lcplan.ledger import Category
from lcplan.model_spec import ModelSpec
from lcplan.tracing.kernels import beside_outputs, settled_categories
from lcplan.tracing.model import build, materialise
from lcplan.tracing.modules import RunningModule, name_phases, without_index
from lcplan.tracing.seams import fsdp_as_in, gpu_behaviour, watched_storages
from lcplan.tracing.sharding import Ranks, ranks_of, shard
from lcplan.tracing.step import micro_steps, optimizer_step
from lcplan.tracing.storages import Alive, Kind, StorageTracker, storage_key
from lcplan.train_plan import TrainPlan

CATEGORIES: dict[str, Category] = {
    "trace.parameters": "parameter",
    "trace.buffers": "buffer",
    "trace.optimizer_states": "optimizer_state",
    "trace.gradients": "gradient",
    "trace.activations": "activation",
    "trace.temporaries": "temporary",
    "trace.all_gather": "all_gather",
    "trace.reduce_scatter": "reduce_scatter",
    "trace.inputs": "input",
    "trace.kernel_scratch": "temporary",
}
"""Keys of the report's items, and the category of each."""
SCRATCH = "kernel scratch"
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adafactor")


def check_traceable(plan: TrainPlan) -> None:
    """Refuse what the trace does not run.

    Raises:
        PlanError: naming the lever.
    """
    refused = {
        f"--backend {plan.backend}": plan.backend == "deepspeed",
        f"--quantize {plan.quantize}": plan.quantize != "none",
        f"--mlp-tile-size {plan.mlp_tile_size}": plan.mlp_tile_size is not None,
        f"--optim {plan.optim}": plan.optim not in OPTIMIZERS,
        f"--attn-implementation {plan.attn_implementation}": plan.attn_implementation == "flash_attention_2",
        "--packing": plan.packing,
    }
    for what, present in refused.items():
        if present:
            raise PlanError("not-traced", f"{what}: the trace method does not run it. --method formula may cover it.")


def trace_layers(
    spec: ModelSpec, plan: TrainPlan, num_layers: int, rank: int, torch_version: str | None = None
) -> dict[str, Alive]:
    """What is alive at the largest instant of each part of a steady step, of a model with so many layers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    sharded = plan.backend == "fsdp2"
    with gpu_behaviour(sharded=sharded), ranks_of(plan, rank) as ranks, contextlib.ExitStack() as stack:
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
            scratch_of=partial(beside_outputs, table), category_of=settled_categories, module_of=modules.name
        )
        name_phases(tracker, model)
        try:
            _run(tracker, modules, model, plan, ranks)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise EnvironmentProblem(
                "trace-failed", f"{spec.id} cannot run on fake tensors: {error}. --method formula may cover it."
            ) from error
        return _phases(tracker)


def _run(tracker: StorageTracker, modules: RunningModule, model: Any, plan: TrainPlan, ranks: Ranks | None) -> None:
    for name, parameter in model.named_parameters():
        if plan.offload_params:
            tracker.forget(_local(parameter))
            parameter.register_post_accumulate_grad_hook(lambda p: tracker.forget(_local(p.grad)))
        else:
            tracker.add(_local(parameter), "parameter", module=without_index(name))
    for name, buffer in model.named_buffers():
        tracker.add(buffer, "buffer", module=without_index(name))
    watching = contextlib.nullcontext() if ranks is None else watched_storages(tracker.resized)
    with watching, modules.watched(), tracker:
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
