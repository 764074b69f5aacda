"""What the formulas have been held against measurements for; anything else is refused by name."""

from __future__ import annotations

from lcplan.errors import PlanError
from lcplan.estimators import deepspeed_order
from lcplan.estimators.layer import TRAITS
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan

LORA_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
"""Optimizers whose states over adapters are counted."""


def check_covered(spec: ModelSpec, plan: TrainPlan) -> None:
    """Refuse what the formulas do not cover.

    Raises:
        PlanError: naming the model family or the lever.
    """
    for what, uncovered in _uncovered(spec, plan).items():
        if uncovered:
            message = f"{what}: the formula method does not cover it, and an unmeasured number would be a guess."
            if plan.backend == "single":
                message += " --method trace may: it runs the modeling code itself on fake tensors."
            raise PlanError("not-covered", message)


def _uncovered(spec: ModelSpec, plan: TrainPlan) -> dict[str, bool]:
    fsdp = plan.backend == "fsdp2"
    float32 = plan.dtype == "float32" and not fsdp
    selective = plan.activation_checkpointing == "selective"
    plain = spec.model_type in ("llama", "mistral", "qwen2", "qwen3")
    return {
        f"{spec.id} (model_type {spec.model_type}; covered: {', '.join(TRAITS)})": spec.model_type not in TRAITS,
        f"{spec.id} has layers that are not full attention": not spec.is_full_attention,
        f"{spec.id} has some layers without experts": spec.moe is not None and bool(spec.moe.dense_layers),
        "--activation-checkpointing selective with --offload-activations": selective and plan.offload_activations,
        "--activation-checkpointing selective with --dtype float32": selective and float32,
        f"--checkpoint-every-n-layers {plan.checkpoint_every_n_layers} with --dtype float32": (
            plan.checkpoint_every_n_layers > 1 and float32
        ),
        "--offload-params without --backend fsdp2 or deepspeed": (
            plan.offload_params and plan.backend not in ("fsdp2", "deepspeed")
        ),
        f"--mlp-tile-size {plan.mlp_tile_size}": plan.mlp_tile_size is not None,
        **_uncovered_lora(spec, plan, plain=plain),
        **_uncovered_deepspeed(spec, plan),
        f"--attn-implementation {plan.attn_implementation}": plan.attn_implementation != "sdpa",
        f"--optim {plan.optim} with --offload-params": plan.offload_params and not plan.optim.startswith("adamw_torch"),
        f"--loss chunked-256 with --backend {plan.backend}": plan.loss == "chunked-256" and fsdp,
        "--padding": plan.padding,
        "--freeze-embeddings with --backend fsdp2 and one table for embedding and head": (
            plan.freeze_embeddings and fsdp and spec.tie_word_embeddings
        ),
        "--packing": plan.packing,
        "--activation-offloading with --backend fsdp2": plan.activation_offloading and fsdp,
        "--activation-offloading without --activation-checkpointing full": (
            plan.activation_offloading and plan.activation_checkpointing != "full"
        ),
        f"--loss {plan.loss} with --dtype float32": plan.loss != "chunked" and float32,
        f"{spec.model_type} with --dtype float32": float32 and not plain,
        f"{spec.model_type} with --cp-size {plan.cp_size}": plan.cp_size > 1 and not plain,
        # formula and trace differ by 1.5% there, and no GPU has said which is right
        "mixtral with --activation-checkpointing none": (
            spec.model_type == "mixtral" and plan.activation_checkpointing == "none"
        ),
        # torch 2.11 with transformers 5.24 stops at the first step: a view is modified in place
        f"{spec.model_type} with --backend fsdp2": spec.moe is not None and fsdp,
        f"{spec.model_type} with --optim adafactor": plan.optim == "adafactor" and not plain,
    }


def _uncovered_deepspeed(spec: ModelSpec, plan: TrainPlan) -> dict[str, bool]:
    """What of ZeRO was neither measured nor plain from DeepSpeed's code; names as in ``order.parameters``."""
    deepspeed = plan.backend == "deepspeed"
    if not deepspeed:
        return {}
    counted = sum(parameter.numel for parameter in deepspeed_order.parameters(spec).values())
    also = {
        "one GPU": plan.num_gpus == 1,
        f"model_type {spec.model_type}": spec.model_type not in ("llama", "mistral", "qwen2", "qwen3"),
        f"{spec.id}, which has biases outside q, k and v": counted != spec.num_parameters,
        f"--dtype {plan.dtype}": plan.dtype != "bfloat16",
        f"--optim {plan.optim}": plan.optim != "adamw_torch_fused",
        f"--per-device-train-batch-size {plan.per_device_train_batch_size}": plan.per_device_train_batch_size > 1,
        f"--gradient-accumulation-steps {plan.gradient_accumulation_steps}": plan.gradient_accumulation_steps > 1,
        f"--activation-checkpointing {plan.activation_checkpointing}": plan.activation_checkpointing != "full",
        f"--checkpoint-every-n-layers {plan.checkpoint_every_n_layers}": plan.checkpoint_every_n_layers > 1,
        f"--loss {plan.loss}": plan.loss != "chunked",
        f"--lora-r {plan.lora_r}": plan.lora_r is not None,
        "--freeze-embeddings": plan.freeze_embeddings,
        "--freeze-head": plan.freeze_head,
        "--activation-offloading": plan.activation_offloading,
        "--zero-stage 1 and --offload-optimizer": plan.zero_stage == 1 and plan.offload_optimizer,
        f"--zero-stage {plan.zero_stage} and --sp-size {plan.sp_size}": plan.zero_stage != 3 and plan.sp_size > 1,
        "--offload-params without --offload-optimizer": plan.offload_params and not plan.offload_optimizer,
    }
    return {f"--backend deepspeed with {what}": present for what, present in also.items()}


def _uncovered_lora(spec: ModelSpec, plan: TrainPlan, *, plain: bool) -> dict[str, bool]:
    lora = plan.lora_r is not None
    also = {
        "--offload-params": plan.offload_params,
        f"--dp-replicate-size {plan.dp_replicate_size}": plan.dp_replicate_size > 1 and plan.backend == "fsdp2",
        f"--activation-checkpointing {plan.activation_checkpointing}": plan.activation_checkpointing != "full",
        f"--checkpoint-every-n-layers {plan.checkpoint_every_n_layers}": plan.checkpoint_every_n_layers > 1,
        f"--dtype {plan.dtype}": plan.dtype != "bfloat16",
        f"--loss {plan.loss}": plan.loss != "chunked",
        f"--optim {plan.optim}": plan.optim not in LORA_OPTIMIZERS,
        "--no-reshard-after-forward": not plan.reshard_after_forward,
        spec.model_type: not plain,
    }
    return {f"--lora-r {plan.lora_r} with {what}": lora and present for what, present in also.items()}
