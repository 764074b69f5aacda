"""What the estimators need to know of a model, read from its config.json.

Field names are the keys of config.json. What a config leaves to its architecture (query/key norms, biases,
norms per layer) is resolved in ``model_families``, so that estimators see plain numbers.
``model_loading`` finds the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from lcplan._record import Record

LayerType = Literal["full_attention", "sliding_attention", "chunked_attention", "linear_attention"]
QkNorm = Literal["none", "head", "full"]


class MoeSpec(Record):
    """The mixture-of-experts half of a decoder layer."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    dense_layers: tuple[int, ...] = ()
    """Indices of layers that keep a dense MLP."""
    has_router_loss: bool = True
    """TRL adds the load-balancing loss: router_aux_loss_coef is not 0."""


class RopeSpec(Record):
    """The model's own rotary embedding (of its full-attention layers), before any lever."""

    rope_type: str = "default"
    rope_theta: float
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0
    """Share of head_dim that rotates (GLM-4: 0.5)."""


class LayerParameters(Record):
    """Parameter counts of one decoder layer by part; query/key norms and sinks count as attention."""

    attention: int
    mlp: int
    norms: int

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.attention + self.mlp + self.norms


class ModelSpec(Record):
    """One causal language model; sizes in elements, counts exact."""

    id: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None = None
    """Window of the sliding layers; None where no layer slides."""
    rope: RopeSpec
    pretrained_length: int
    """Tokens the model was pretrained at: the YaRN base (Qwen3: 32,768 though its config says 40,960)."""
    qk_norm: QkNorm = "none"
    """RMSNorm on queries and keys: none, per head (Qwen3, Gemma 3), or over the whole projection (OLMo 2)."""
    norms_per_layer: int = 2
    """RMSNorms of hidden_size width in a layer (Gemma 3: 4)."""
    has_sdpa: bool = True
    """Attention can run through scaled_dot_product_attention: no sinks, no soft-capped scores."""
    moe: MoeSpec | None = None
    layers: tuple[LayerParameters, ...] = Field(repr=False)
    embedding_parameters: int
    lm_head_parameters: int
    """0 when tied to the embedding."""
    final_norm_parameters: int
    other_parameters: int = 0
    """Parameters outside the decoder (a vision tower with its projector)."""
    config: dict[str, Any] = Field(repr=False)
    """The config.json as read; the job is generated from it."""

    @property
    def num_parameters(self) -> int:
        """Every parameter of the model; shared weights counted once."""
        outside = self.embedding_parameters + self.lm_head_parameters
        outside += self.final_norm_parameters + self.other_parameters
        return outside + sum(layer.total for layer in self.layers)

    def matrix_shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of every weight matrix of a dense model with separate projections, layer by layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = (
            (query, hidden), (key, hidden), (key, hidden), (hidden, query),
            (inner, hidden), (inner, hidden), (hidden, inner),
        )  # fmt: skip
        tables = 1 if self.tie_word_embeddings else 2
        return layer * self.num_hidden_layers + ((self.vocab_size, hidden),) * tables

    @property
    def is_full_attention(self) -> bool:
        """No layer slides: what ring attention asks for."""
        return all(kind == "full_attention" for kind in self.layer_types)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], id: str) -> ModelSpec:
        """The spec of a config.json's content; ``id`` names the model in messages and in the job."""
        from lcplan.model_families import read_config

        return read_config(config, id)
