"""Evaluation and saving: what a forward pass without gradients holds, and what gathering a full model takes.

Letters: T tokens of an evaluation batch (whole sequences, whatever cp_size), H hidden size, I intermediate size,
h query heads, k key/value heads, d head_dim, V vocabulary.
"""

from __future__ import annotations

from lcplan.estimators import loss_head
from lcplan.estimators._item import item
from lcplan.estimators.layer import Alive
from lcplan.estimators.weights import FP32_BYTES
from lcplan.model_spec import ModelSpec

LOSS = "evaluation.loss"
"""Phase of scoring, after all layers: trl 1.16 _fused_forward."""

SCORES_BYTES = 60
"""A token's five float32 statistics, their running maxima and sums, label and position: trl 1.16 chunked_logprob.py."""


@item("evaluation.mlp", "temporary")
def mlp(*, tokens: int, hidden_size: int, intermediate_size: int) -> int:
    """A layer's MLP: activation, up and product; embeddings, the layer's input, the mid-layer sum and its norm.

    Formula: ``(6*I + 8*H)*T``
    Live in: evaluation.mlp
    Rounding: exact from two layers on
    Ignores: nothing
    Source: transformers 5.24 LlamaDecoderLayer, LlamaModel.forward; trace of model.eval() without gradients
    Confidence: modelled
    """
    return (6 * intermediate_size + 8 * hidden_size) * tokens


@item("evaluation.norm", "temporary")
def norm(*, tokens: int, hidden_size: int) -> int:
    """A layer's second norm: its input and normed value in float32; embeddings, the layer's input, the mid-layer sum.

    Formula: ``(14*H + 8)*T``
    Live in: evaluation.norm
    Rounding: exact from two layers on
    Ignores: nothing
    Source: transformers 5.24 LlamaRMSNorm; trace of model.eval() without gradients
    Confidence: modelled
    """
    return (14 * hidden_size + 8) * tokens


@item("evaluation.attention", "temporary")
def attention(*, tokens: int, hidden_size: int, heads: int, kv_heads: int, head_dim: int, qk_norm: bool) -> int:
    """Rotation of the queries, or their norm: four times 2hd with keys and values, or 10hd; embeddings, input, norm.

    Formula: ``(8*h*d + 4*k*d + 6*H)*T``; with query norms the larger of that and ``(10*h*d + 8*h + 6*H)*T``
    Live in: evaluation.attention
    Rounding: exact from two layers on
    Ignores: nothing
    Source: transformers 5.24 apply_rotary_pos_emb, Qwen3Attention; trace of model.eval() without gradients
    Confidence: modelled
    """
    rotated = 8 * heads * head_dim + 4 * kv_heads * head_dim
    normed = 10 * heads * head_dim + 8 * heads if qk_norm else 0
    return (max(rotated, normed) + 6 * hidden_size) * tokens


@item("evaluation.scores", "temporary")
def scores(*, tokens: int, hidden_size: int) -> int:
    """The last hidden states, the same picked for scoring, and per-token statistics.

    Formula: ``(4*H + 60)*T``
    Live in: evaluation.loss
    Rounding: exact within some bytes a token
    Ignores: nothing
    Source: trl 1.16 trainer/utils.py _fused_forward, ChunkedLogProbFunction.forward
    Confidence: modelled
    """
    return (4 * hidden_size + SCORES_BYTES) * tokens


@item("save.gathered_parameter", "all_gather")
def gathered_parameter(*, largest_parameter: int) -> int:
    """One whole float32 parameter at a time, gathered to be copied to the host.

    Formula: ``4 * largest``
    Live in: save (FSDP2)
    Rounding: one copy
    Ignores: padding of a first dimension that the ranks do not divide
    Source: accelerate 1.15 Accelerator.get_state_dict (full_state_dict, cpu_offload); torch DTensor.full_tensor; read
    Confidence: modelled
    """
    return FP32_BYTES * largest_parameter


def instants(spec: ModelSpec, tokens: int) -> dict[str, Alive]:
    """What the instants of an evaluation's forward pass hold beside states, batch and gathered weights, by phase."""
    hidden, tile = spec.hidden_size, loss_head.logits_tile
    return {
        "evaluation.attention": {
            attention.key: attention(
                tokens=tokens, hidden_size=hidden, heads=spec.num_attention_heads, kv_heads=spec.num_key_value_heads,
                head_dim=spec.head_dim, qk_norm=spec.qk_norm != "none",
            )
        },
        "evaluation.norm": {norm.key: norm(tokens=tokens, hidden_size=hidden)},
        "evaluation.mlp": {mlp.key: mlp(tokens=tokens, hidden_size=hidden, intermediate_size=spec.intermediate_size)},
        LOSS: {tile.key: tile(tokens=tokens), scores.key: scores(tokens=tokens, hidden_size=hidden)},
    }  # fmt: skip
