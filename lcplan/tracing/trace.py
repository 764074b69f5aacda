"""Peak memory of a step by running the real code on fake tensors: no GPU, no weights, no data.

The model is transformers' own class, the loss head TRL's, checkpointing torch's; only sizes flow. What a GPU kernel
needs beside its outputs is invisible to fake tensors and is an item of its own (the backward of attention and softmax).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch  # noqa: TID253  (imported by the trace method alone)

from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.estimators.runtime import cublas_workspace
from lcplan.ledger import Category
from lcplan.model_spec import ModelSpec
from lcplan.tracing.seams import gpu_behaviour
from lcplan.tracing.storages import Storage, StorageTracker, storage_key
from lcplan.train_plan import TrainPlan

Alive = dict[str, int]
CATEGORIES: dict[str, Category] = {
    "trace.parameters": "parameter",
    "trace.buffers": "buffer",
    "trace.optimizer_states": "optimizer_state",
    "trace.gradients": "gradient",
    "trace.activations": "activation",
    "trace.temporaries": "temporary",
    "trace.inputs": "input",
    "trace.kernel_scratch": "temporary",
}
"""Keys of the report's items, and the category of each."""
_KEY_OF = {
    "parameter": "trace.parameters",
    "buffer": "trace.buffers",
    "gradient": "trace.gradients",
    "activation": "trace.activations",
    "temporary": "trace.temporaries",
    "input": "trace.inputs",
}
ADD = "aten.add.Tensor"
SOFTMAX_BACKWARD = "aten._softmax_backward_data.default"
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def check_traceable(plan: TrainPlan) -> None:
    """Refuse what the trace does not run yet.

    Raises:
        PlanError: naming the lever.
    """
    refused = {
        f"--backend {plan.backend}": plan.backend != "single",
        "--offload-activations": plan.offload_activations,
        "--activation-offloading": plan.activation_offloading,
        "--activation-checkpointing selective": plan.activation_checkpointing == "selective",
        f"--lora-r {plan.lora_r}": plan.lora_r is not None,
        f"--quantize {plan.quantize}": plan.quantize != "none",
        f"--mlp-tile-size {plan.mlp_tile_size}": plan.mlp_tile_size is not None,
        f"--optim {plan.optim}": plan.optim != "adamw_torch_fused",
        f"--loss {plan.loss}": plan.loss != "chunked",
        f"--gradient-accumulation-steps {plan.gradient_accumulation_steps}": plan.gradient_accumulation_steps > 1,
        f"--dtype {plan.dtype}": plan.dtype != "bfloat16",
        f"--attn-implementation {plan.attn_implementation}": plan.attn_implementation == "flash_attention_2",
        "--packing": plan.packing,
        f"--per-device-eval-batch-size {plan.per_device_eval_batch_size}": plan.per_device_eval_batch_size is not None,
    }
    for what, present in refused.items():
        if present:
            raise PlanError("not-traced", f"{what}: the trace method does not run it. --method formula may cover it.")


def trace(spec: ModelSpec, plan: TrainPlan) -> dict[str, Alive]:
    """Bytes by item and phase (forward, backward, optimizer_step) of one steady training step.

    Raises:
        PlanError: when the plan holds what is not traced.
        EnvironmentProblem: when the modeling code cannot run on fake tensors, or the stack is unknown.
    """
    check_traceable(plan)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with gpu_behaviour(), FakeTensorMode():
        model = _build(spec, plan)
        table = tuple(model.get_input_embeddings().weight.shape) if spec.tie_word_embeddings else None
        tracker = StorageTracker(partial(_beside_outputs, table))
        inputs = _add_resident(tracker, model, plan)
        try:
            with tracker:
                _step(tracker, model, inputs)
        except Exception as error:  # whatever a model's own code raises on tensors without values
            raise EnvironmentProblem(
                "trace-failed", f"{spec.id} cannot run on fake tensors: {error}. --method formula may cover it."
            ) from error
        # the optimizer has states for what got a gradient: not for a vision tower without pictures
        weights = {storage_key(p) for p in model.parameters() if p.grad is not None}
        gradients = {storage_key(p.grad) for p in model.parameters() if p.grad is not None}
        num_bytes = sum(tracker.live[key].num_bytes for key in weights)
        phases = {phase: _sum(peak[1], gradients, peak[2]) for phase, peak in tracker.peaks.items()}
        phases["optimizer_step"] = _sum(_remaining(tracker, gradients), gradients, scratch=0)
    for alive in phases.values():
        alive["trace.optimizer_states"] = 2 * num_bytes
        alive[cublas_workspace.key] = cublas_workspace()
    return phases


def _build(spec: ModelSpec, plan: TrainPlan) -> Any:
    """The model as the job builds it, its weights fake."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from trl.trainer.utils import add_fused_lm_head

    raw = dict(spec.config)
    config = CONFIG_MAPPING[raw.pop("model_type")].from_dict(raw)
    text = config.get_text_config()
    if hasattr(text, "output_router_logits"):  # as TRL's trainer sets it
        text.output_router_logits = getattr(text, "router_aux_loss_coef", 0.0) != 0.0
    with no_init_weights():
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, plan.dtype), attn_implementation=plan.attn_implementation
            )
        except (ValueError, ImportError) as error:  # such as an attention implementation that the model lacks
            reason = str(error).split(". ")[0]
            raise PlanError("not-traced", f"transformers cannot build {spec.id} with this plan: {reason}.") from error
    model.tie_weights()
    model.train()
    if plan.activation_checkpointing == "full":
        try:
            model.activation_checkpointing_enable(every_n_layers=plan.checkpoint_every_n_layers)
        except ValueError as error:  # a model without it
            reason = str(error).rstrip(".")
            raise PlanError("not-traced", f"{reason}. Use --activation-checkpointing none.") from error
    try:
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    except Exception as error:  # a model that keeps its layers and its head elsewhere
        raise EnvironmentProblem("trace-failed", f"{spec.id} does not take TRL's loss head: {error}.") from error
    return model


def _add_resident(tracker: StorageTracker, model: Any, plan: TrainPlan) -> dict[str, torch.Tensor]:
    """Count weights, buffers and the batch; return the batch."""
    for parameter in model.parameters():
        tracker.add(parameter, "parameter")
    for buffer in model.buffers():
        tracker.add(buffer, "buffer")
    size = (plan.per_device_train_batch_size, plan.max_length)
    batch = {name: torch.ones(size, dtype=torch.int64) for name in ("input_ids", "labels", "attention_mask")}
    for tensor in batch.values():
        tracker.add(tensor, "input")
    return batch


def _step(tracker: StorageTracker, model: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Forward and backward, as the trainer runs them."""
    tracker.phase = "forward"
    outputs = model(**inputs, use_cache=False, fused_lm_head=True)
    loss = -outputs.log_probs.sum()
    if outputs.aux_loss is not None:
        loss = loss + outputs.aux_loss
    del outputs
    tracker.phase = "backward"
    loss.backward()


def _beside_outputs(tied_table: tuple[int, ...] | None, operator: str, args: tuple[Any, ...]) -> int:
    """What an operator needs on a GPU beside the outputs it has here; negative where it needs less.

    The two gradients of a tied table are added in place, which autograd does not do under a dispatch mode. cuDNN's
    attention backward has scratch: see attention.backward in the formulas. Softmax backward has the product of gradient
    and output (aten/src/ATen/native/cuda/SoftMax.cu).
    """
    if operator == ADD and tied_table is not None and tuple(args[0].shape) == tied_table:
        return -int(args[0].untyped_storage().nbytes())
    if operator == SOFTMAX_BACKWARD:
        return int(args[0].untyped_storage().nbytes())
    if operator != ATTENTION_BACKWARD:
        return 0
    query, key = args[1], args[2]
    batch, heads, tokens, head_dim = query.shape
    expanded = 4 * heads * head_dim if key.shape[1] < heads else 0
    return int(batch * tokens * (4 * heads * head_dim + 4 * heads + expanded))


def _remaining(tracker: StorageTracker, gradients: set[int]) -> dict[int, Storage]:
    """What is there when the optimizer steps: everything but activations."""
    kept = {"parameter", "buffer", "input"}
    return {key: s for key, s in tracker.live.items() if s.category in kept or key in gradients}


def _sum(live: dict[int, Storage], gradients: set[int], scratch: int) -> Alive:
    alive: Alive = {}
    for kept, storage in live.items():
        category = "gradient" if kept in gradients and storage.category == "temporary" else storage.category
        key = _KEY_OF[category]
        alive[key] = alive.get(key, 0) + storage.num_bytes
    if scratch > 0:
        alive["trace.kernel_scratch"] = scratch
    elif scratch:
        alive["trace.temporaries"] += scratch
    return alive
