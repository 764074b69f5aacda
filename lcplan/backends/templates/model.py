"""The model that plan.json describes: its config, and weights that are loaded or random."""

from __future__ import annotations

from typing import Any

import torch
from checks import JobError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def load_config(job: dict[str, Any]) -> Any:
    """The config with the plan's rotary embedding, set before the model is built: later edits do nothing."""
    source = job["model"]
    if source["init"] == "random":
        raw = dict(source["config"])
        config = CONFIG_MAPPING[raw.pop("model_type")].from_dict(raw)
    else:
        config = AutoConfig.from_pretrained(source["id"], revision=source["revision"] or "main")
    if job["rope"] is not None:
        text_config = config.get_text_config()
        own = getattr(text_config, "rope_parameters", None) or {}
        if any(isinstance(value, dict) for value in own.values()):
            raise JobError(f"{source['id']} has a rotary embedding per kind of layer: use --rope none.")
        text_config.rope_parameters = dict(job["rope"])
        text_config.max_position_embeddings = job["max_position_embeddings"]
    return config


def build_model(job: dict[str, Any], config: Any, device: torch.device, *, empty: bool) -> PreTrainedModel:
    """The whole model; under FSDP2 rank 0 alone has weights and hands out the shards: the others' is ``empty``."""
    plan, source = job["plan"], job["model"]
    options = {"dtype": getattr(torch, plan["dtype"]), "attn_implementation": plan["attn_implementation"]}
    if empty:
        # Memory that is never touched: in float32, since accelerate converts what is not.
        return empty_model(config, {**options, "dtype": torch.float32}, "cpu")
    if source["init"] == "pretrained":
        revision = source["revision"] or "main"
        return AutoModelForCausalLM.from_pretrained(source["id"], config=config, revision=revision, **options)
    model = empty_model(config, options, "cpu" if plan["backend"] == "fsdp2" else device)
    fill_weights(model, getattr(config.get_text_config(), "initializer_range", 0.02), device)
    return model


def empty_model(config: Any, options: dict[str, Any], device: Any) -> PreTrainedModel:
    """The model with weights of whatever the memory held."""
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()
    return model


@torch.no_grad()
def fill_weights(model: PreTrainedModel, std: float, device: torch.device) -> None:
    """Random matrices, drawn on the GPU (a CPU needs minutes for 8 B); norms start as the model starts them.

    A function of its own: a loop variable that outlives its loop would keep the last weight's memory.
    """
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and all(weight.dim() < 2 for weight in own):
            model._init_weights(module)
            continue
        for weight in own:
            if weight.dim() < 2:
                weight.zero_()
            elif weight.device.type == device.type:
                weight.normal_(0.0, std)
            else:
                weight.copy_(torch.empty_like(weight, device=device).normal_(0.0, std))
    if device.type == "cuda":
        torch.cuda.empty_cache()
