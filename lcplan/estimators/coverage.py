"""What the formulas have been held against measurements for; anything else is refused by name."""

from __future__ import annotations

from lcplan.errors import PlanError
from lcplan.estimators import deepspeed_order
from lcplan.estimators.layer import TRAITS
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan

LORA_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
"""Optimizers whose states over adapters are counted."""
PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families alike but for biases and norms of q and k, with rows of nearly every lever; Liger has kernels for all."""


def check_covered(spec: ModelSpec, plan: TrainPlan) -> None:
    """Refuse what the formulas do not cover.

    Raises:
        PlanError: naming the model family or the lever.
    """
    for what, uncovered in _uncovered(spec, plan).items():
        if uncovered:
            message = f"{what}: the formula method does not cover it, and an unmeasured number would be a guess."
            if plan.backend != "deepspeed":
                message += " --method trace may: it runs the training code itself on fake tensors."
            raise PlanError("not-covered", message)


def _uncovered(spec: ModelSpec, plan: TrainPlan) -> dict[str, bool]:
    fsdp = plan.backend == "fsdp2"
    float32 = plan.dtype == "float32" and not fsdp
    selective = plan.activation_checkpointing == "selective"
    plain = spec.model_type in PLAIN_FAMILIES
    # rows of an H200 hold these in float32 and under ring attention
    measured = plain or spec.model_type in ("phi3", "olmo2")
    dropout = spec.config.get("attention_dropout")
    gemma = spec.model_type in ("gemma2", "gemma3", "gemma3_text")
    lora = plan.lora_r is not None
    return {
        f"{spec.id} (model_type {spec.model_type}; covered: {', '.join(TRAITS)})": spec.model_type not in TRAITS,
        "--activation-checkpointing selective with --dtype float32": selective and float32,
        f"--checkpoint-every-n-layers {plan.checkpoint_every_n_layers} with --dtype float32": (
            plan.checkpoint_every_n_layers > 1 and float32
        ),
        "--offload-params without --backend fsdp2 or deepspeed": (
            plan.offload_params and plan.backend not in ("fsdp2", "deepspeed")
        ),
        **_with(f"--mlp-tile-size {plan.mlp_tile_size}", _not_tiled(spec, plan) if plan.mlp_tile_size else {}),
        **_with(f"--kernels {plan.kernels}", _not_fused(spec, plan) if plan.kernels != "none" else {}),
        **_uncovered_lora(spec, plan),
        **_uncovered_deepspeed(spec, plan),
        # a family that hands attention's layout on might not with that kernel, and gpt-oss has one of its own
        f"{spec.model_type} with --attn-implementation flash_attention_2": (
            plan.attn_implementation == "flash_attention_2" and spec.model_type in ("phi3", "glm4", "gpt_oss")
        ),
        **_uncovered_masks(spec, plan),
        **_uncovered_evaluation(spec, plan),
        f"{spec.id} with attention_dropout {dropout}": bool(dropout),
        "gemma2 with --loss full": spec.model_type == "gemma2" and plan.loss == "full",
        f"{spec.model_type} with more than one GPU": gemma and plan.num_gpus > 1,
        f"--optim {plan.optim} with --offload-params": plan.offload_params and not plan.optim.startswith("adamw_torch"),
        f"--loss chunked-256 with --backend {plan.backend}": plan.loss == "chunked-256" and fsdp,
        "--padding with --attn-implementation flash_attention_2": (
            plan.padding and plan.attn_implementation == "flash_attention_2"
        ),
        f"--padding with --backend {plan.backend} and --cp-size 1": (
            plan.padding and plan.num_gpus > 1 and plan.cp_size == 1
        ),
        f"--padding with --cp-size {plan.cp_size} and {spec.model_type}": (
            plan.padding and plan.cp_size > 1 and not plain
        ),
        "--freeze-embeddings with --backend fsdp2 and one table for embedding and head": (
            plan.freeze_embeddings and fsdp and spec.tie_word_embeddings
        ),
        "--freeze-embeddings with --activation-checkpointing none": (
            plan.freeze_embeddings and plan.activation_checkpointing == "none"
        ),
        "--packing": plan.packing,
        f"--activation-offloading with --lora-r {plan.lora_r}": plan.activation_offloading and lora,
        "--activation-offloading with --backend fsdp2": plan.activation_offloading and fsdp,
        "--activation-offloading without --activation-checkpointing full": (
            plan.activation_offloading and plan.activation_checkpointing != "full"
        ),
        f"--loss {plan.loss} with --dtype float32": plan.loss != "chunked" and float32,
        f"{spec.model_type} with --dtype float32": float32 and not measured,
        f"{spec.model_type} with --cp-size {plan.cp_size}": plan.cp_size > 1 and not measured,
        # TRL frees what it brought back a node later than experts need their memory; no row has measured it
        f"{spec.model_type} with --activation-offloading": plan.activation_offloading and spec.moe is not None,
        # torch 2.11 with transformers 5.24 stops at the first step: a view is modified in place
        f"{spec.model_type} with --backend fsdp2": spec.moe is not None and fsdp,
        f"{spec.model_type} with --optim adafactor": plan.optim == "adafactor" and not plain,
    }


def _with(what: str, also: dict[str, bool]) -> dict[str, bool]:
    return {f"{what} with {other}": present for other, present in also.items()}


def can_tile(spec: ModelSpec, plan: TrainPlan) -> bool:
    """Whether the formulas cover the plan's MLPs in tiles."""
    return not plan.activation_offloading and not any(_not_tiled(spec, plan).values())


def can_fuse(spec: ModelSpec, plan: TrainPlan) -> bool:
    """Whether the formulas cover the plan with Liger's kernels."""
    return not any(_not_fused(spec, plan).values())


def _not_tiled(spec: ModelSpec, plan: TrainPlan) -> dict[str, bool]:
    return {
        f"{spec.id}, which has experts": spec.moe is not None,
        f"--backend {plan.backend}": plan.backend not in ("single", "fsdp2"),
        f"--lora-r {plan.lora_r}": plan.lora_r is not None,
        f"--dtype {plan.dtype}": plan.dtype == "float32" and plan.backend != "fsdp2",
    }


def _not_fused(spec: ModelSpec, plan: TrainPlan) -> dict[str, bool]:
    return {
        spec.model_type: spec.model_type not in PLAIN_FAMILIES,
        f"--backend {plan.backend}": plan.backend not in ("single", "fsdp2"),
        f"--dtype {plan.dtype}": plan.dtype == "float32" and plan.backend != "fsdp2",
        f"--lora-r {plan.lora_r}": plan.lora_r is not None,
        f"--loss {plan.loss}": plan.loss != "chunked",
        f"--attn-implementation {plan.attn_implementation}": plan.attn_implementation != "sdpa",
        "a materialised attention mask (padding, or a sliding window)": _takes_masks(spec, plan),
        "--activation-offloading": plan.activation_offloading,
        f"--per-device-eval-batch-size {plan.per_device_eval_batch_size}": plan.per_device_eval_batch_size is not None,
    }


def _uncovered_deepspeed(spec: ModelSpec, plan: TrainPlan) -> dict[str, bool]:
    """What of ZeRO was neither measured nor plain from DeepSpeed's code; names as in ``order.parameters``."""
    deepspeed = plan.backend == "deepspeed"
    if not deepspeed:
        return {}
    counted = sum(parameter.numel for parameter in deepspeed_order.parameters(spec).values())
    also = {
        "one GPU": plan.num_gpus == 1,
        f"model_type {spec.model_type}": spec.model_type not in PLAIN_FAMILIES,
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
        "--offload-prefetch": plan.offload_prefetch,
        f"--attn-implementation {plan.attn_implementation}": plan.attn_implementation != "sdpa",
        "--padding": plan.padding,
        "layers that are not full attention": not spec.is_full_attention,
        f"--per-device-eval-batch-size {plan.per_device_eval_batch_size}": plan.per_device_eval_batch_size is not None,
        "--zero-stage 1 and --offload-optimizer": plan.zero_stage == 1 and plan.offload_optimizer,
        f"--zero-stage {plan.zero_stage} and --sp-size {plan.sp_size}": plan.zero_stage != 3 and plan.sp_size > 1,
        "--offload-params without --offload-optimizer": plan.offload_params and not plan.offload_optimizer,
    }
    return _with("--backend deepspeed", also)


def _uncovered_evaluation(spec: ModelSpec, plan: TrainPlan) -> dict[str, bool]:
    if plan.per_device_eval_batch_size is None:
        return {}
    also = {
        spec.model_type: spec.model_type not in PLAIN_FAMILIES,
        "a materialised attention mask (eager, padding, or a sliding window)": _takes_masks(spec, plan),
        f"--lora-r {plan.lora_r}": plan.lora_r is not None,
        "--dtype float32": plan.dtype == "float32" and plan.backend != "fsdp2",
        f"--loss {plan.loss}": plan.loss != "chunked",
        "--offload-params": plan.offload_params,
        "--no-reshard-after-forward": not plan.reshard_after_forward,
        "--backend ddp": plan.backend == "ddp",
    }
    return _with(f"--per-device-eval-batch-size {plan.per_device_eval_batch_size}", also)


def _uncovered_masks(spec: ModelSpec, plan: TrainPlan) -> dict[str, bool]:
    if not _takes_masks(spec, plan):
        return {}
    also = {
        "--dtype float32": plan.dtype == "float32" and plan.backend != "fsdp2",
        "--activation-checkpointing selective": plan.activation_checkpointing == "selective",
        "--offload-activations": plan.offload_activations,
        "--activation-offloading": plan.activation_offloading,
        f"--lora-r {plan.lora_r}": plan.lora_r is not None,
    }
    return _with(f"{spec.id}: a materialised attention mask (eager, padding, or a sliding window)", also)


def _takes_masks(spec: ModelSpec, plan: TrainPlan) -> bool:
    slides = spec.sliding_window is not None and plan.max_length >= spec.sliding_window
    return plan.padding or plan.attn_implementation == "eager" or (plan.attn_implementation == "sdpa" and slides)


def _uncovered_lora(spec: ModelSpec, plan: TrainPlan) -> dict[str, bool]:
    if plan.lora_r is None:
        return {}
    also = {
        "--offload-params": plan.offload_params,
        f"--dp-replicate-size {plan.dp_replicate_size}": plan.dp_replicate_size > 1 and plan.backend == "fsdp2",
        f"--activation-checkpointing {plan.activation_checkpointing}": plan.activation_checkpointing != "full",
        f"--checkpoint-every-n-layers {plan.checkpoint_every_n_layers}": plan.checkpoint_every_n_layers > 1,
        f"--dtype {plan.dtype}": plan.dtype != "bfloat16",
        f"--loss {plan.loss}": plan.loss != "chunked",
        f"--optim {plan.optim}": plan.optim not in LORA_OPTIMIZERS,
        "--no-reshard-after-forward": not plan.reshard_after_forward,
        spec.model_type: spec.model_type not in PLAIN_FAMILIES,
    }
    return _with(f"--lora-r {plan.lora_r}", also)
