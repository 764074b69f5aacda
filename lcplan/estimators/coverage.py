"""What the formulas have been held against measurements for; anything else is refused by name."""

from __future__ import annotations

from lcplan.errors import PlanError
from lcplan.estimators.layer import TRAITS
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan

OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adafactor")
"""Each has a measured row: m001, m088, m055 and m041."""


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
    fsdp, float32 = plan.backend == "fsdp2", plan.dtype == "float32" and plan.backend == "single"
    selective = plan.activation_checkpointing == "selective"
    plain = spec.model_type in ("llama", "mistral", "qwen2", "qwen3")
    return {
        f"{spec.id} (model_type {spec.model_type}; covered: {', '.join(TRAITS)})": spec.model_type not in TRAITS,
        f"{spec.id} has layers that are not full attention": not spec.is_full_attention,
        f"{spec.id} has some layers without experts": spec.moe is not None and bool(spec.moe.dense_layers),
        "--backend deepspeed": plan.backend == "deepspeed",
        "--activation-checkpointing selective with --offload-activations": selective and plan.offload_activations,
        "--activation-checkpointing selective with --dtype float32": selective and float32,
        f"--checkpoint-every-n-layers {plan.checkpoint_every_n_layers} with --dtype float32": (
            plan.checkpoint_every_n_layers > 1 and float32
        ),
        "--offload-params without --backend fsdp2": plan.offload_params and not fsdp,
        f"--mlp-tile-size {plan.mlp_tile_size}": plan.mlp_tile_size is not None,
        **_uncovered_lora(spec, plan, plain=plain),
        f"--quantize {plan.quantize}": plan.quantize != "none",
        f"--attn-implementation {plan.attn_implementation}": plan.attn_implementation != "sdpa",
        f"--optim {plan.optim}": plan.optim not in OPTIMIZERS,
        "--optim adafactor with --backend fsdp2": plan.optim == "adafactor" and fsdp,
        "--packing": plan.packing,
        "--activation-offloading with --backend fsdp2": plan.activation_offloading and fsdp,
        "--activation-offloading without --activation-checkpointing full": (
            plan.activation_offloading and plan.activation_checkpointing != "full"
        ),
        # TRL frees what it brought back a node later than experts need their memory; no row has measured it
        f"{spec.model_type} with --activation-offloading": plan.activation_offloading and spec.moe is not None,
        "--loss full with --dtype float32": plan.loss == "full" and float32,
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


def _uncovered_lora(spec: ModelSpec, plan: TrainPlan, *, plain: bool) -> dict[str, bool]:
    lora = plan.lora_r is not None
    also = {
        "--offload-params": plan.offload_params,
        f"--dp-replicate-size {plan.dp_replicate_size}": plan.dp_replicate_size > 1,
        f"--activation-checkpointing {plan.activation_checkpointing}": plan.activation_checkpointing != "full",
        f"--checkpoint-every-n-layers {plan.checkpoint_every_n_layers}": plan.checkpoint_every_n_layers > 1,
        f"--dtype {plan.dtype}": plan.dtype != "bfloat16",
        f"--loss {plan.loss}": plan.loss != "chunked",
        f"--optim {plan.optim}": not plan.optim.startswith("adamw_torch"),
        spec.model_type: not plain,
    }
    return {f"--lora-r {plan.lora_r} with {what}": lora and present for what, present in also.items()}
