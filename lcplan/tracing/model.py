"""The model as the job builds it, without weights: architecture, adapters, checkpointing, offload, loss head."""

from __future__ import annotations

from typing import Any

import torch  # noqa: TID253  (imported by the trace method alone)

from lcplan.errors import EnvironmentProblem, PlanError
from lcplan.model_spec import ModelSpec
from lcplan.rope import position_limit, resolve_rope
from lcplan.train_plan import TrainPlan

PER_LAYER_KEYS = ("layer_types",)
"""Keys of a config.json that have one entry a layer."""


def build(spec: ModelSpec, plan: TrainPlan, num_layers: int) -> Any:
    """The model with ``num_layers`` decoder layers on the meta device; ``materialise`` gives it fake weights.

    Raises:
        PlanError: when transformers cannot build it with this plan.
        EnvironmentProblem: when the plan has adapters and peft is missing, or the model takes no loss head of TRL's.
    """
    with torch.device("meta"):
        model = _architecture(spec, plan, num_layers)
    model.train()
    _tile(spec, model, plan)
    if plan.loss == "chunked":
        from trl.trainer.utils import add_fused_lm_head

        try:
            add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        except Exception as error:  # a model that keeps its layers and its head elsewhere
            raise EnvironmentProblem("trace-failed", f"{spec.id} does not take TRL's loss head: {error}.") from error
    base = model
    _freeze(model, plan)
    if plan.lora_r is not None:
        model = _with_adapters(model, plan)
    if plan.activation_checkpointing != "none":
        _checkpoint(base, plan)
        if plan.lora_r is not None:
            model.enable_input_require_grads()
    return model


def materialise(model: Any) -> None:
    """Give the model weights on the CPU, which stands for the GPU; under fake tensors they take no memory."""
    model._apply(lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype))
    (model.get_base_model() if hasattr(model, "get_base_model") else model).tie_weights()


def config_dict(spec: ModelSpec, plan: TrainPlan, num_layers: int) -> dict[str, Any]:
    """The config.json with the plan's rotary embedding and so many layers."""
    raw = dict(spec.config)
    if num_layers != spec.num_hidden_layers:
        raw["num_hidden_layers"] = num_layers
        raw |= {key: raw[key][:num_layers] for key in PER_LAYER_KEYS if raw.get(key)}
    rope = resolve_rope(spec, plan.max_length, plan.rope)
    if rope is not None:
        raw.pop("rope_scaling", None)
        raw["rope_parameters"] = rope.model_dump()
        raw["max_position_embeddings"] = position_limit(spec, plan.max_length, rope)
    return raw


def _architecture(spec: ModelSpec, plan: TrainPlan, num_layers: int) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = config_dict(spec, plan, num_layers)
    config = CONFIG_MAPPING[raw.pop("model_type")].from_dict(raw)
    text = config.get_text_config()
    if hasattr(text, "output_router_logits"):  # as TRL's trainer sets it
        text.output_router_logits = getattr(text, "router_aux_loss_coef", 0.0) != 0.0
    with no_init_weights():
        try:
            return AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, plan.dtype), attn_implementation=plan.attn_implementation
            )
        except (ValueError, ImportError) as error:  # such as an attention implementation that the model lacks
            reason = str(error).split(". ")[0]
            raise PlanError("not-traced", f"transformers cannot build {spec.id} with this plan: {reason}.") from error


def _tile(spec: ModelSpec, model: Any, plan: TrainPlan) -> None:
    """The generated job's own tiling."""
    if plan.running_tile is None:
        return
    from lcplan.backends.templates.tiling import tile_mlps

    try:
        tile_mlps(model, plan.running_tile)
    except ValueError as error:
        raise PlanError("not-traced", f"--mlp-tile-size {plan.mlp_tile_size} with {spec.id}: {error}.") from error


def _freeze(model: Any, plan: TrainPlan) -> None:
    for module, frozen in (
        (model.get_input_embeddings(), plan.freeze_embeddings),
        (model.get_output_embeddings(), plan.freeze_head),
    ):
        if frozen:
            module.requires_grad_(False)


def _with_adapters(model: Any, plan: TrainPlan) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise EnvironmentProblem(
            "missing-extra", "--lora-r needs peft, which is not installed. Install it: pip install 'lcplan[peft]'"
        ) from None
    targets: str | list[str] = plan.lora_target_modules
    if targets != "all-linear":
        targets = [name.strip() for name in plan.lora_target_modules.split(",")]
    config = LoraConfig(r=plan.lora_r, target_modules=targets, lora_dropout=plan.lora_dropout, task_type="CAUSAL_LM")
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        reason = str(error).split(". ")[0]
        message = f"peft cannot adapt this model by --lora-target-modules {plan.lora_target_modules}: {reason}."
        raise PlanError("not-traced", message) from error


def _checkpoint(model: Any, plan: TrainPlan) -> None:
    """Checkpointing as the trainer enables it."""
    if plan.activation_checkpointing == "selective" and not plan.keeps_attention_on_host:
        from trl.models import enable_selective_activation_checkpointing

        enable_selective_activation_checkpointing(model)
    try:
        model.activation_checkpointing_enable(
            {"use_reentrant": False},
            every_n_layers=plan.checkpoint_every_n_layers,
            offload=plan.offload_activations and not plan.offloads_by_itself,
        )
    except ValueError as error:  # a model without it
        reason = str(error).rstrip(".")
        raise PlanError("not-traced", f"{reason}. Use --activation-checkpointing none.") from error
    if plan.offloads_by_itself:
        from lcplan.backends.templates import host_offload

        host_offload.install(model, keep_attention=plan.keeps_attention_on_host)


def decoder_layers(model: Any) -> list[Any]:
    """The decoder layers in order; none where the model does not show them."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else inner
    return list(getattr(decoder, "layers", ()))
