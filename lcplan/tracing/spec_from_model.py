"""ModelSpec of an architecture that lcplan has no table for: sizes from its config class, counts from the model itself.

The model is transformers' own class on the meta device, which has shapes and no memory. Only the trace method can use
such a spec; the formulas refuse its model_type by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch  # noqa: TID253  (imported by the trace method alone)

from lcplan.errors import ModelError
from lcplan.model_families import KNOWN_FAMILIES
from lcplan.model_spec import LayerParameters, LayerType, ModelSpec, RopeSpec

UNLIMITED_POSITIONS = 1 << 30
"""max_position_embeddings of a model without a limit (no rotary embedding, no table of positions)."""


def spec_of_config(config: Mapping[str, Any], id: str) -> ModelSpec:
    """The spec of a config.json's content, by lcplan's own table or from the model that transformers builds of it.

    Raises:
        ModelError: when transformers has no such causal language model, or the config brings code of its own.
    """
    if config.get("model_type") in (None, *KNOWN_FAMILIES):
        try:
            return ModelSpec.from_config(config, id)
        except ModelError as error:
            if error.code != "unsupported-architecture":
                raise  # otherwise a variant of the family that the table does not count
    if config.get("auto_map"):
        raise ModelError(
            "remote-code",
            f"{id} (model_type {config['model_type']!r:.60}) brings its own code (auto_map), which lcplan never runs. "
            "Choose a model that transformers has a class for.",
        )
    settings, model = _build(config, id)
    layers = _decoder_layers(model, settings, id)
    return _spec(config, id, settings, model, layers)


def _build(config: Mapping[str, Any], id: str) -> tuple[Any, Any]:
    """The settings of the language model, and the model without memory."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = dict(config)
    model_type = raw.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            "unsupported-architecture",
            f"{id}: the installed transformers has no model_type {model_type!r:.60}. Correct config.json, or install a "
            "release that has it.",
        )
    try:
        full = CONFIG_MAPPING[model_type].from_dict(raw)
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(full)
        model.tie_weights()
    except Exception as error:  # whatever an architecture's own code raises
        reason = str(error).partition("\n")[0][:200]
        raise ModelError(
            "unsupported-architecture",
            f"{id}: transformers builds no causal language model of model_type {model_type!r:.60} from this config: "
            f"{reason} Correct config.json, or choose another model.",
        ) from error
    return full.get_text_config(decoder=True), model


def _decoder_layers(model: Any, settings: Any, id: str) -> Any:
    """The module list of the decoder's layers: that of the config's length with the most parameters."""
    lists = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == settings.num_hidden_layers
    ]
    if not lists:
        raise ModelError(
            "unsupported-architecture",
            f"{id} (model_type {settings.model_type!r:.60}) has no list of {settings.num_hidden_layers} decoder "
            "layers. Choose a model that is a stack of layers.",
        )
    return max(lists, key=lambda module: _count(module.parameters()))


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _layer_parameters(layer: Any) -> LayerParameters:
    parts = {"attention": 0, "mlp": 0, "norms": 0}
    for name, parameter in layer.named_parameters():
        # query and key norms count as attention
        attends = any(word in name for word in ("attn", "attention"))
        part = "attention" if attends and parameter.dim() > 1 else "norms" if parameter.dim() == 1 else "mlp"
        parts[part] += parameter.numel()
    return LayerParameters(**parts)


def _spec(config: Mapping[str, Any], id: str, settings: Any, model: Any, layers: Any) -> ModelSpec:
    heads = getattr(settings, "num_attention_heads", None) or 1  # state-space models have none
    hidden = settings.hidden_size
    per_layer = tuple(_layer_parameters(layer) for layer in layers)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is None or head.weight is embedding
    outside = embedding.numel() + (0 if tied else head.weight.numel())
    other = _count(model.parameters()) - sum(layer.total for layer in per_layer) - outside
    limit = getattr(settings, "max_position_embeddings", None) or UNLIMITED_POSITIONS
    types = _layer_types(settings, len(per_layer))
    return ModelSpec(
        id=id,
        model_type=str(config["model_type"]),
        hidden_size=hidden,
        intermediate_size=_widest(layers[0], hidden),
        num_hidden_layers=len(per_layer),
        num_attention_heads=heads,
        num_key_value_heads=getattr(settings, "num_key_value_heads", None) or heads,
        head_dim=getattr(settings, "head_dim", None) or max(hidden // heads, 1),
        vocab_size=embedding.shape[0],
        max_position_embeddings=limit,
        tie_word_embeddings=tied,
        layer_types=types,
        sliding_window=getattr(settings, "sliding_window", None) if "sliding_attention" in types else None,
        rope=_rope(settings),
        pretrained_length=limit,
        has_sdpa=bool(model._supports_sdpa),
        layers=per_layer,
        embedding_parameters=embedding.numel(),
        lm_head_parameters=0 if tied else head.weight.numel(),
        final_norm_parameters=0,
        other_parameters=other,
        config=dict(config),
    )


def _widest(layer: Any, hidden: int) -> int:
    return max((max(p.shape) for p in layer.parameters() if p.dim() == 2), default=hidden)


def _layer_types(settings: Any, num_layers: int) -> tuple[LayerType, ...]:
    """What each layer attends to; a kind that is no attention counts as linear."""
    slides: LayerType = "sliding_attention" if getattr(settings, "sliding_window", None) else "full_attention"
    given = getattr(settings, "layer_types", None)
    if given is None:
        return (slides,) * num_layers
    return tuple(kind if kind in get_args(LayerType) else "linear_attention" for kind in given)


def _rope(settings: Any) -> RopeSpec:
    """The rotary embedding; a model without one cannot be stretched, which its rope_type says."""
    scaling = getattr(settings, "rope_parameters", None) or {}
    scaling = scaling.get("full_attention", scaling)
    if "rope_theta" not in scaling:
        return RopeSpec(rope_type="no rotary embedding", rope_theta=1.0)
    return RopeSpec(
        rope_type=scaling.get("rope_type", "default"),
        rope_theta=scaling["rope_theta"],
        factor=scaling.get("factor"),
        original_max_position_embeddings=scaling.get("original_max_position_embeddings"),
    )
