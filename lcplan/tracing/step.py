"""One training step as the trainer runs it: micro steps of forward and backward, then the optimizer."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch  # noqa: TID253  (imported by the trace method alone)

from lcplan.tracing.modules import LOSS_BACKWARD
from lcplan.tracing.seams import trl_offloading
from lcplan.tracing.sharding import Ranks, split_sequence
from lcplan.tracing.storages import StorageTracker
from lcplan.train_plan import TrainPlan

BATCH = ("input_ids", "labels", "attention_mask")


def batches(tracker: StorageTracker, plan: TrainPlan) -> list[dict[str, torch.Tensor]]:
    """The micro batches of a step, which the trainer fetches together and keeps until the next."""
    size = (plan.per_device_train_batch_size, plan.max_length)
    found = []
    for _ in range(plan.gradient_accumulation_steps):
        batch = {name: torch.ones(size, dtype=torch.int64) for name in BATCH}
        for tensor in batch.values():
            tracker.settle(tensor, "input")
        found.append(batch)
    return found


def micro_steps(tracker: StorageTracker, model: Any, plan: TrainPlan, ranks: Ranks | None) -> list[Any]:
    """All forwards and backwards of a step; returns the batches, which outlive them."""
    found = batches(tracker, plan)
    with contextlib.ExitStack() as stack:
        offload = stack.enter_context(trl_offloading(model)) if plan.activation_offloading else None
        for index, batch in enumerate(found):
            last = index == len(found) - 1
            if ranks is not None and not last:
                model.set_requires_gradient_sync(False)
            with offload or contextlib.nullcontext(), split_sequence(ranks, model, batch):
                _forward_and_backward(tracker, model, batch, plan)
            if ranks is not None and not last:
                model.set_requires_gradient_sync(True)
    return found


def _forward_and_backward(tracker: StorageTracker, model: Any, batch: dict[str, torch.Tensor], plan: TrainPlan) -> None:
    tracker.phase = "forward"
    fused = {"fused_lm_head": True} if plan.loss == "chunked" else {}
    with _autocast(plan):
        outputs = model(**batch, use_cache=False, **fused)
    loss = -outputs.log_probs.sum() if fused else outputs.loss
    if fused and outputs.aux_loss is not None:
        loss = loss + outputs.aux_loss
    del outputs
    # apart from the forward: when autocast ends, its copies of the weights go
    tracker.phase = "backward" if tracker.phase == "forward" else LOSS_BACKWARD
    loss.backward()


def _autocast(plan: TrainPlan) -> Any:
    """Accelerate wraps the forward of a model on one GPU; under FSDP2 the mixed precision policy casts instead."""
    if plan.backend != "single":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


def optimizer_step(tracker: StorageTracker, model: Any, plan: TrainPlan) -> None:
    """The real optimizer, twice: the first makes its states, the second is the steady one.

    It has states for what got a gradient: not for a vision tower without pictures.
    """
    parameters = [_local(p) for p in model.parameters() if p.grad is not None]
    optimizer = _optimizer(plan)(parameters)
    tracker.phase = "init"
    optimizer.step()
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                # AdamW counts steps on the host unless it is fused
                on_host = name == "step" and plan.optim == "adamw_torch"
                tracker.forget(value) if on_host else tracker.settle(value, "optimizer_state")
    tracker.phase = "optimizer_step"
    optimizer.step()
    tracker.keep("optimizer_state")


def _local(parameter: Any) -> torch.nn.Parameter:
    """This rank's shard and its gradient: what an optimizer of DTensors works on, operator by operator."""
    weight, grad = parameter.detach(), parameter.grad
    if hasattr(weight, "to_local"):
        weight, grad = weight.to_local(), grad.to_local()
    local = torch.nn.Parameter(weight)
    local.grad = grad
    return local


def _optimizer(plan: TrainPlan) -> Any:
    if plan.optim == "adafactor":
        from transformers.optimization import Adafactor

        return partial(Adafactor, lr=1e-5, scale_parameter=False, relative_step=False)
    return {
        "adamw_torch_fused": partial(torch.optim.AdamW, fused=True),
        # what torch chooses by itself on a GPU
        "adamw_torch": partial(torch.optim.AdamW, foreach=True),
        "sgd": partial(torch.optim.SGD, lr=1e-5, foreach=True),
    }[plan.optim]
