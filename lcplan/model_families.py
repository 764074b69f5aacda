"""From config.json to ModelSpec: what each architecture adds to its config, and exact parameter counts.

Source of the table and of every default: transformers 5.24.0, ``models/<model_type>/configuration_*.py`` and
``modeling_*.py``. Tests hold each count against the model itself, instantiated without memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lcplan._config_reader import ConfigReader
from lcplan.errors import ModelError
from lcplan.model_spec import LayerParameters, LayerType, ModelSpec, MoeSpec, QkNorm, RopeSpec

MAX_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a config.json leaves to its architecture."""

    qk_norm: QkNorm = "none"
    norms_per_layer: int = 2
    attention_bias: bool = False
    """Whether q, k, v have biases where the config does not say."""
    reads_attention_bias: bool = True
    o_proj_bias: bool = True
    """o_proj has a bias when q, k, v have one."""
    reads_mlp_bias: bool = False
    sinks: bool = False
    """One learned attention sink per head."""
    sdpa: bool = True
    """Attention can run through torch's scaled_dot_product_attention: no sinks, no soft-capped scores."""
    head_dim: int | None = None
    """Value where the config has none; None: hidden_size // num_attention_heads."""
    needs_head_dim: bool = False
    """transformers' own class fails without the key."""
    needs_kv_heads: bool = True
    """False: without the key every query head has its own key/value head."""
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    """Scaling where the config names none."""
    partial_rotary_factor: float = 1.0
    sliding: Literal["never", "all", "each", "upper", "pattern"] = "never"
    """Layers that slide: none, every one, those of layer_types or every one, those from max_window_layers on, all but
    each n-th."""
    sliding_pattern: int = 2
    reads_sliding_window_pattern: bool = False
    reads_use_sliding_window: bool = False
    sliding_window: int | None = None
    """Value where the config has no such key."""
    must_be_off: tuple[str, ...] = ()
    """Keys whose true or positive value changes the layer in a way that is not counted."""
    expert_size_key: str | None = None
    """Key of one expert's width; None: no experts."""
    expert_bias: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(reads_mlp_bias=True, needs_kv_heads=False),
    "mistral": Family(reads_attention_bias=False, sliding="all", sliding_window=4096),
    "qwen2": Family(
        attention_bias=True, reads_attention_bias=False, o_proj_bias=False,
        sliding="upper", sliding_window=4096, reads_use_sliding_window=True,
    ),
    "qwen3": Family(
        qk_norm="head", head_dim=128,
        sliding="upper", sliding_window=4096, reads_use_sliding_window=True,
    ),
    "qwen3_moe": Family(
        qk_norm="head", expert_size_key="moe_intermediate_size",
        sliding="all", sliding_window=4096, reads_use_sliding_window=True,
    ),
    "phi3": Family(reads_attention_bias=False, needs_kv_heads=False, sliding="all"),
    "gemma2": Family(
        norms_per_layer=4, head_dim=256, tie_word_embeddings=True, sliding="pattern", sliding_window=4096, sdpa=False,
    ),
    "gemma3_text": Family(
        qk_norm="head", norms_per_layer=4, head_dim=256, tie_word_embeddings=True, rope_theta=1_000_000.0,
        sliding="pattern", sliding_pattern=6, reads_sliding_window_pattern=True, sliding_window=4096,
    ),
    "gpt_oss": Family(
        attention_bias=True, sinks=True, sdpa=False, head_dim=64, rope_theta=150_000.0,
        rope_parameters={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        sliding="pattern", sliding_window=128, expert_size_key="intermediate_size", expert_bias=True,
    ),
    "olmo2": Family(qk_norm="full", needs_kv_heads=False),
    "glm4": Family(
        norms_per_layer=4, attention_bias=True, o_proj_bias=False, head_dim=128, partial_rotary_factor=0.5,
    ),
    "mixtral": Family(
        reads_attention_bias=False, rope_theta=1_000_000.0,
        sliding="all", expert_size_key="intermediate_size",
    ),
    "smollm3": Family(
        reads_mlp_bias=True, tie_word_embeddings=True, rope_theta=2_000_000.0, must_be_off=("use_sliding_window",),
    ),
    "granite": Family(reads_mlp_bias=True, needs_kv_heads=False),
    "ernie4_5": Family(
        reads_attention_bias=False, head_dim=128, tie_word_embeddings=True, rope_theta=500_000.0,
        must_be_off=("use_bias",),
    ),
    "hunyuan_v1_dense": Family(qk_norm="head", needs_head_dim=True, needs_kv_heads=False),
    "ministral": Family(reads_attention_bias=False, needs_head_dim=True, sliding="each", sliding_window=4096),
    "gemma": Family(head_dim=256, tie_word_embeddings=True),
    "glm": Family(attention_bias=True, o_proj_bias=False, head_dim=128, partial_rotary_factor=0.5),
    "olmo3": Family(
        qk_norm="full", needs_kv_heads=False, rope_theta=500_000.0,
        sliding="pattern", sliding_pattern=4, sliding_window=4096,
    ),
    "exaone4": Family(
        qk_norm="head", reads_attention_bias=False,
        sliding="pattern", sliding_pattern=4, reads_sliding_window_pattern=True, sliding_window=4096,
    ),
}  # fmt: skip

KNOWN_FAMILIES: tuple[str, ...] = (*FAMILIES, "gemma3")
"""Every ``model_type`` whose config is read; gemma3 is gemma3_text with a vision tower."""

GEMMA3_TEXT_DEFAULTS: dict[str, int] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""A nested text_config is saved without its class's own values: google/gemma-3-4b-pt has none of these."""

QWEN_ROPE_THETA = 1_000_000.0
PRETRAINED_LENGTH: dict[tuple[str, int], int] = {
    # Qwen3 model cards: 32,768 natively; 40,960 leaves 8,192 for the output
    ("qwen3", 40_960): 32_768,
    ("qwen3_moe", 40_960): 32_768,
    # Qwen2.5 Technical Report, arXiv:2412.15115: trained at 32,768, served at 131,072 by YaRN and DCA
    ("qwen2", 131_072): 32_768,
    ("qwen2", 40_960): 32_768,
}
"""Tokens that Qwen's models (known by their rope_theta) saw, by (model_type, max_position_embeddings)."""

SCALED_FROM_ORIGINAL = ("llama3", "yarn", "longrope")
"""RoPE types for which transformers fills in original_max_position_embeddings."""
PHI3_ORIGINAL_LENGTH = 4096


def read_config(config: Mapping[str, Any], id: str) -> ModelSpec:
    """The spec of a config.json's content; every value is checked, none guessed."""
    outer, model_type = _known(config, id)
    reader, other = outer, 0
    if model_type == "gemma3":
        reader = outer.object("text_config")
        reader.values = {**GEMMA3_TEXT_DEFAULTS, **reader.values}
        other = _vision_parameters(outer.object("vision_config"), reader.size("hidden_size"))
    family = FAMILIES["gemma3_text" if model_type == "gemma3" else model_type]
    if reader.flag("use_bidirectional_attention", False):
        problem = "is true. The formulas know causal models only: choose one."
        raise reader.error("unsupported-architecture", "use_bidirectional_attention", problem)

    for key in family.must_be_off:
        if reader.values.get(key):
            raise reader.error("unsupported-architecture", key, "is set. The formulas know the family without it.")
    hidden, vocab = reader.size("hidden_size"), reader.size("vocab_size")
    num_layers = reader.size("num_hidden_layers", most=MAX_LAYERS)
    heads = reader.size("num_attention_heads")
    kv_heads = _kv_heads(reader, family, heads)
    head_dim = _head_dim(reader, family, hidden, heads)
    max_length = reader.size("max_position_embeddings")
    layer_types, window = _layer_types(reader, family, num_layers)
    moe = _moe(reader, family, num_layers)
    rope = _rope(reader, family, max_length, is_phi3=model_type == "phi3")
    # a gemma3 model is tied by its outer config, whatever its text_config says
    tied = outer.flag("tie_word_embeddings", family.tie_word_embeddings)

    layers = _layers(
        reader,
        family,
        moe,
        num_layers=num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    return ModelSpec(
        id=id,
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=reader.size("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        layer_types=layer_types,
        sliding_window=window,
        rope=rope,
        pretrained_length=_pretrained_length(model_type, max_length, rope),
        qk_norm=family.qk_norm,
        norms_per_layer=family.norms_per_layer,
        has_sdpa=family.sdpa,
        moe=moe,
        layers=layers,
        embedding_parameters=vocab * hidden,
        lm_head_parameters=0 if tied else vocab * hidden,
        final_norm_parameters=hidden,
        other_parameters=other,
        config=dict(config),
    )


def _known(config: Mapping[str, Any], id: str) -> tuple[ConfigReader, str]:
    if not isinstance(config, Mapping):
        problem = f"config.json holds a {type(config).__name__}, not a JSON object of a model's settings."
        raise ModelError("bad-config", f"{id}: {problem} Use the model's own config.json.")
    reader = ConfigReader(config, id=id)
    if not reader.has("model_type"):
        raise reader.missing("model_type")
    model_type = config["model_type"]
    if model_type in KNOWN_FAMILIES:
        return reader, str(model_type)
    raise ModelError(
        "unsupported-architecture",
        f"{id}: the formulas do not know model_type {model_type!r:.60} "
        f"(architectures: {config.get('architectures')!r:.120}). They know these families: "
        f"{', '.join(KNOWN_FAMILIES)}. Use estimate --method trace, which runs transformers' own class, or choose a "
        "model of one of them.",
    )


def _kv_heads(reader: ConfigReader, family: Family, heads: int) -> int:
    # null means one for each query head everywhere; an absent key means so only where the class says so
    optional = not family.needs_kv_heads or "num_key_value_heads" in reader.values
    kv_heads = reader.size("num_key_value_heads", heads if optional else None)
    if heads % kv_heads:
        problem = f"is {kv_heads} and num_attention_heads {heads}. Query heads share key/value heads in equal "
        problem += "groups: the one must divide the other."
        raise reader.error("uneven-heads", "num_key_value_heads", problem)
    return kv_heads


def _head_dim(reader: ConfigReader, family: Family, hidden: int, heads: int) -> int:
    if not (reader.has("head_dim") or family.needs_head_dim or family.head_dim) and hidden % heads:
        problem = f"is {hidden} and num_attention_heads {heads}. Without head_dim the heads share it equally"
        raise reader.error("uneven-heads", "hidden_size", problem + ": add head_dim, or correct the two.")
    return reader.size("head_dim", None if family.needs_head_dim else family.head_dim or hidden // heads)


def _layer_types(reader: ConfigReader, family: Family, num_layers: int) -> tuple[tuple[LayerType, ...], int | None]:
    full: LayerType = "full_attention"
    slides: LayerType = "sliding_attention"
    window: int | None = None
    if not family.reads_use_sliding_window or reader.flag("use_sliding_window", False):
        default = 0 if "sliding_window" in reader.values else family.sliding_window or 0
        window = reader.size("sliding_window", default) or None

    types: tuple[LayerType, ...] = (full,) * num_layers
    if family.sliding in ("each", "upper", "pattern") and reader.has("layer_types"):
        types = _given_layer_types(reader, num_layers)
    elif family.sliding == "pattern":
        every = family.sliding_pattern
        if family.reads_sliding_window_pattern:
            every = reader.size("sliding_window_pattern", every)
        types = tuple(slides if (index + 1) % every else full for index in range(num_layers))
    elif family.sliding != "never" and window is not None:
        first = reader.size("max_window_layers", 28, least=0) if family.sliding == "upper" else 0
        types = tuple(slides if index >= first else full for index in range(num_layers))
    if slides not in types:
        return types, None
    if window is None:
        problem = "is not set, but some layers slide. Set it to the tokens that they see."
        raise reader.error("missing-key", "sliding_window", problem)
    return types, window


def _given_layer_types(reader: ConfigReader, num_layers: int) -> tuple[LayerType, ...]:
    given = reader.values["layer_types"]
    if not isinstance(given, list | tuple) or len(given) != num_layers:
        found = f"names {len(given)} layers" if isinstance(given, list | tuple) else f"is {given!r:.60}"
        problem = f"{found} and num_hidden_layers is {num_layers}. It must be a list with one entry for each layer."
        raise reader.error("layer-types-length", "layer_types", problem)
    for kind in given:
        if kind not in ("full_attention", "sliding_attention"):
            problem = f"holds {kind!r:.60}. The layers of this family are full_attention or sliding_attention."
            raise reader.error("unknown-layer-type", "layer_types", problem)
    return tuple(given)


def _moe(reader: ConfigReader, family: Family, num_layers: int) -> MoeSpec | None:
    if family.expert_size_key is None:
        return None
    # transformers 5 writes num_local_experts for every family, 4 wrote num_experts for Qwen
    key = "num_experts" if reader.has("num_experts") else "num_local_experts"
    num_experts = reader.size(key)
    active = reader.size("num_experts_per_tok")
    if active > num_experts:
        problem = f"is {active} and {key} {num_experts}. A token cannot go to more experts than exist: lower it."
        raise reader.error("too-many-experts", "num_experts_per_tok", problem)
    dense: tuple[int, ...] = ()
    if family.expert_size_key == "moe_intermediate_size":
        step = reader.size("decoder_sparse_step", 1)
        only = reader.values.get("mlp_only_layers") or []
        if not isinstance(only, list | tuple) or not all(type(index) is int for index in only):
            problem = f"is {only!r:.60}. It must be a list of layer indices: correct config.json."
            raise reader.error("bad-size", "mlp_only_layers", problem)
        dense = tuple(index for index in range(num_layers) if index in only or (index + 1) % step)
    return MoeSpec(
        num_experts=num_experts,
        num_experts_per_tok=active,
        moe_intermediate_size=reader.size(family.expert_size_key),
        dense_layers=dense,
        has_router_loss=reader.values.get("router_aux_loss_coef") != 0,
    )


def _rope(reader: ConfigReader, family: Family, max_length: int, *, is_phi3: bool) -> RopeSpec:
    """Reads rope_theta and rope_scaling (transformers 4), or rope_parameters (5), flat or per layer type."""
    key = "rope_scaling" if reader.values.get("rope_scaling") else "rope_parameters"
    scaling = ConfigReader(family.rope_parameters, id=reader.id)
    if reader.values.get(key):
        scaling = reader.object(key)
    for layer_type in ("full_attention", "sliding_attention"):
        if scaling.has(layer_type):
            scaling = scaling.object(layer_type)
            break
    rope_type = scaling.values.get("rope_type") or scaling.values.get("type") or "default"
    if not isinstance(rope_type, str):
        problem = f"is {rope_type!r:.60}. It must be a name such as 'yarn' or 'default': correct config.json."
        raise scaling.error("bad-rope", "rope_type", problem)
    if is_phi3 and rope_type in ("su", "yarn"):
        rope_type = "longrope"
    original: int | None = None
    if rope_type in SCALED_FROM_ORIGINAL and is_phi3:
        original = reader.size("original_max_position_embeddings", PHI3_ORIGINAL_LENGTH)
    elif rope_type in SCALED_FROM_ORIGINAL:
        original = scaling.size("original_max_position_embeddings", max_length)
    elif scaling.has("original_max_position_embeddings"):
        original = scaling.size("original_max_position_embeddings")
    partial = reader.number("partial_rotary_factor", family.partial_rotary_factor)
    return RopeSpec(
        rope_type=rope_type,
        rope_theta=scaling.number("rope_theta", reader.number("rope_theta", family.rope_theta)),
        factor=scaling.number("factor", 0) or None,
        original_max_position_embeddings=original,
        partial_rotary_factor=scaling.number("partial_rotary_factor", partial),
    )


def _pretrained_length(model_type: str, max_length: int, rope: RopeSpec) -> int:
    if rope.original_max_position_embeddings is not None:
        return rope.original_max_position_embeddings
    if rope.rope_theta == QWEN_ROPE_THETA:
        return PRETRAINED_LENGTH.get((model_type, max_length), max_length)
    return max_length


def _layers(
    reader: ConfigReader,
    family: Family,
    moe: MoeSpec | None,
    *,
    num_layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> tuple[LayerParameters, ...]:
    mlp_bias = family.reads_mlp_bias and reader.flag("mlp_bias", False)
    dense = LayerParameters(
        attention=_attention_parameters(
            reader, family, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim
        ),
        mlp=_mlp_parameters(hidden, reader.size("intermediate_size"), bias=mlp_bias),
        norms=family.norms_per_layer * hidden,
    )
    if moe is None:
        return (dense,) * num_layers
    expert = _mlp_parameters(hidden, moe.moe_intermediate_size, bias=family.expert_bias)
    router = hidden + int(family.expert_bias)
    sparse = dense.model_copy(update={"mlp": moe.num_experts * (expert + router)})
    return tuple(dense if index in moe.dense_layers else sparse for index in range(num_layers))


def _attention_parameters(
    reader: ConfigReader, family: Family, *, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> int:
    queries, keys = heads * head_dim, kv_heads * head_dim
    count = 2 * hidden * (queries + keys)
    bias = family.attention_bias
    if family.reads_attention_bias:
        bias = reader.flag("attention_bias", bias)
    if bias:
        count += queries + 2 * keys + (hidden if family.o_proj_bias else 0)
    count += {"none": 0, "head": 2 * head_dim, "full": queries + keys}[family.qk_norm]
    return count + (heads if family.sinks else 0)


def _mlp_parameters(hidden: int, intermediate: int, *, bias: bool) -> int:
    """One gated MLP: gate, up and down."""
    return 3 * hidden * intermediate + (2 * intermediate + hidden if bias else 0)


def _vision_parameters(vision: ConfigReader, hidden_size: int) -> int:
    """SigLIP tower (patches, positions, layers, pooling head) and Gemma 3's projector."""
    width, inner = vision.size("hidden_size"), vision.size("intermediate_size")
    patch, image = vision.size("patch_size"), vision.size("image_size")
    attention = 4 * (width * width + width)
    mlp = 2 * width * inner + inner + width
    norm = 2 * width
    count = vision.size("num_channels", 3) * patch * patch * width + width
    count += (image // patch) ** 2 * width
    count += vision.size("num_hidden_layers", most=MAX_LAYERS) * (attention + mlp + 2 * norm) + norm
    if vision.flag("vision_use_head", True):
        count += width + attention + mlp + norm
    return count + width * hidden_size + width
