"""The model that plan.json describes: its config, weights that are loaded or random, what of it is trained."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from arguments import running_tile
from checks import JobError
from tiling import tile_mlps
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.initialization import no_init_weights
from transformers.integrations import is_deepspeed_zero3_enabled
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
    """The whole model, with what the plan freezes; adapters are the trainer's to add.

    Under FSDP2 rank 0 alone has weights and hands out the shards: the others' is ``empty``.
    """
    plan = job["plan"]
    model = _build(job, config, device, empty=empty)
    fuse_kernels(model, plan)
    tile = running_tile(plan)
    if tile is not None:
        try:
            tile_mlps(model, tile)
        except ValueError as error:
            raise JobError(f"--mlp-tile-size {tile}: {error}.") from error
    frozen = {"freeze_embeddings": model.get_input_embeddings(), "freeze_head": model.get_output_embeddings()}
    for name, module in frozen.items():
        if plan[name]:
            module.requires_grad_(False)
            module.to(getattr(torch, plan["dtype"]))
    return model


def fuse_kernels(model: PreTrainedModel, plan: dict[str, Any]) -> None:
    """Liger's kernels by transformers' own switch; not its loss, and its SwiGLU only where tiles need not recompute it.

    TRL's ``use_liger_kernel`` does the same when training starts, over what has replaced an MLP by then, and is to go.
    """
    if plan["kernels"] != "liger":
        return
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:  # it would be left as it is, without a word
        raise JobError(f"--kernels liger: Liger has none for {model.config.model_type}. Leave it out.")
    whole = running_tile(plan) is None
    kernels = {"rope": True, "rms_norm": True, "swiglu": whole, "geglu": whole}
    apply_liger_kernel(model, {**kernels, "cross_entropy": False, "fused_linear_cross_entropy": False})


def _build(job: dict[str, Any], config: Any, device: torch.device, *, empty: bool) -> PreTrainedModel:
    plan, source = job["plan"], job["model"]
    dtype = getattr(torch, plan["dtype"])
    options = {"dtype": dtype, "attn_implementation": plan["attn_implementation"]}
    if plan["backend"] == "fsdp2" and plan["quantize"] == "none":
        if empty:
            # Memory that is never touched: trained weights in float32, since accelerate converts those that are not.
            trained = dtype if plan["lora_r"] is not None else torch.float32
            return empty_model(config, {**options, "dtype": trained}, "cpu")
        place: Any = "cpu"
    else:
        place = device
    quantized = {} if plan["quantize"] == "none" else quantization(plan, device)
    if source["init"] == "pretrained":
        revision = source["revision"] or "main"
        return AutoModelForCausalLM.from_pretrained(
            source["id"], config=config, revision=revision, **options, **quantized
        )
    model = empty_model(config, options, place)
    set_seed(job["training"]["seed"])  # ZeRO-3 draws numbers of its own as it builds
    fill_weights(model, getattr(config.get_text_config(), "initializer_range", 0.02), device)
    if quantized:
        model = type(model).from_pretrained(None, config=config, state_dict=model.state_dict(), **options, **quantized)
    return model


def quantization(plan: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """QLoRA's 4-bit NormalFloat with double quantisation, whole on this rank's device."""
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, plan["dtype"]),
        # FSDP2 shards packed weights only where they pose as weights of its own type
        bnb_4bit_quant_storage=getattr(torch, plan["dtype"]) if plan["backend"] == "fsdp2" else torch.uint8,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def lora_config(job: dict[str, Any]) -> Any:
    """What peft adapts, None without adapters. peft keeps them in float32, on 4-bit weights TRL in bfloat16."""
    plan = job["plan"]
    if plan["lora_r"] is None:
        return None
    from peft import LoraConfig

    targets = plan["lora_target_modules"]
    return LoraConfig(
        r=plan["lora_r"],
        lora_alpha=job["training"]["lora_alpha"] or 2 * plan["lora_r"],
        lora_dropout=plan["lora_dropout"],
        target_modules=targets if targets == "all-linear" else [name.strip() for name in targets.split(",")],
        task_type="CAUSAL_LM",
    )


def empty_model(config: Any, options: dict[str, Any], device: Any) -> PreTrainedModel:
    """The model with weights of whatever the memory held."""
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()
    return model


def whole(weights: list[torch.nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
    """Around a change of weights: ZeRO-3 gives them whole, and takes rank 0's share by share."""
    if not is_deepspeed_zero3_enabled():
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(weights, modifier_rank=0)


@torch.no_grad()
def fill_weights(model: PreTrainedModel, std: float, device: torch.device) -> None:
    """Random matrices, drawn on the GPU (a CPU needs minutes for 8 B); norms start as the model starts them.

    A function of its own: a loop variable that outlives its loop would keep the last weight's memory.
    """
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        with whole(own):
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
