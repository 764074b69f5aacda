"""The forward of one decoder layer: what is alive at those of its instants that can be its largest.

A checkpointed layer saves nothing, so an instant holds what the layer's own code still refers to. The layer's input is
not counted: it is among what checkpointing keeps.
"""

from __future__ import annotations

from typing import Any

from lcplan.estimators import activations, attention, lora, moe, weights
from lcplan.estimators.layer import Alive, LayerShape, before_scores, merge, own_tables, saved

BEFORE_OUTPUT = ("queries", "attention")
"""Instants before attention has an output."""


def instants(shape: LayerShape) -> dict[str, Alive]:
    """Instants of a checkpointed layer's forward, by name."""
    found = {"mlp": _mlp(shape)}
    if shape.attention != "kernel" or shape.cp_size > 1 or shape.sp_size > 1:
        found["attention"] = _attention(shape)
    if not shape.fused:
        found |= {"queries": _queries(shape), "norm": _norm(shape)}
    if shape.attention == "eager":  # the layer refers to the probabilities until its end
        item = attention.eager_weights
        kept = item(
            tokens=shape.tokens, row_tokens=shape.row_tokens, heads=shape.spec.num_attention_heads,
            sinks=shape.traits.sinks,
        )  # fmt: skip
        found |= {name: merge(found[name], {item.key: kept}) for name in ("mlp", "norm")}
    return found


def instants_that_keep(shape: LayerShape) -> dict[str, Alive]:
    """Those of a layer that is not checkpointed, with what it has saved by then, that can be above its end."""
    found = {}
    if shape.attention == "eager":
        # what of attention is the normed input has been saved, and as large is the layer's input, which has not
        found["attention"] = merge(before_scores(shape), _attention(shape, keeps=True))
    if shape.moe is not None:
        item = moe.output_forward
        weight_bytes = weights.FP32_BYTES if shape.traits.wide_routing else weights.BF16_BYTES
        chosen = shape.moe.num_experts_per_tok
        sizes = {"tokens": shape.tokens, "hidden_size": shape.spec.hidden_size}
        end = {item.key: item(experts_per_token=chosen, weight_bytes=weight_bytes, **sizes)}
        found["experts"] = merge(saved(shape), end)
    return found


def _dtype_bytes(shape: LayerShape) -> int:
    return weights.FP32_BYTES if shape.float32 else weights.BF16_BYTES


def _normed_input(shape: LayerShape) -> int:
    """Elements of bf16 a token that attention's normed input takes: twice as many in float32 training."""
    return shape.spec.hidden_size * _dtype_bytes(shape) // weights.BF16_BYTES if shape.traits.feeding_norms else 0


def _queries(shape: LayerShape) -> Alive:
    """Norm and rotation of the queries."""
    spec, traits, item = shape.spec, shape.traits, attention.forward
    # Ernie 4.5 rotates in float32 whatever the tables are
    wide = shape.float32 or (traits.wide_rotary and (traits.interleaved_rotary or not shape.casts_rotary))
    sizes: dict[str, Any] = {"tokens": shape.tokens, "hidden_size": _normed_input(shape), **shape.heads}
    rotary_dim = round(spec.head_dim * spec.rope.partial_rotary_factor)
    qk_norm = spec.qk_norm == "head"
    how = {"norms_rotated": traits.norms_rotated, "wide_rotary": wide, "fused_qkv": traits.fused_qkv}
    own = item(qk_norm=qk_norm, rotary_dim=rotary_dim, **how, **sizes)
    return {item.key: own} | own_tables(shape)


def _attention(shape: LayerShape, *, keeps: bool = False) -> Alive:
    """Attention that holds more than its kernel's arguments and results."""
    sizes: dict[str, Any] = {"tokens": shape.tokens, "hidden_size": _normed_input(shape), **shape.heads}
    # a single key/value head is flattened with its rows for no longer than a product takes, unless that saves it
    single = shape.spec.num_key_value_heads == 1 and not keeps
    rows = {"row_tokens": shape.row_tokens, "repeated_heads": 1 if single else shape.repeated_heads}
    eager, masked, ring = attention.eager_forward, attention.masked_forward, attention.ring_forward
    if shape.attention == "eager":
        alive = {
            eager.key: eager(
                sinks=shape.traits.sinks, soft_capped=keeps and shape.traits.soft_caps_scores, **rows, **sizes
            )
        }
    elif shape.attention == "masked":
        alive = {masked.key: masked(**rows, **sizes)}
    elif shape.sp_size > 1:
        exchanged = attention.ulysses_forward
        alive = {exchanged.key: exchanged(sp_size=shape.sp_size, **sizes)}
    else:
        alive = {
            ring.key: ring(
                cp_size=shape.cp_size, cp_rank=shape.cp_rank, allgather=shape.allgather,
                head_chunks=shape.cp_head_chunks, merge_bytes=shape.cp_merge_bytes, **sizes,
            )
        }  # fmt: skip
    if shape.traits.fused_qkv:  # the values that were repeated are a part of it
        alive[attention.fused_qkv.key] = attention.fused_qkv(tokens=shape.tokens, **shape.heads)
    return alive


def _norm(shape: LayerShape) -> Alive:
    """The norm before the MLP with the mid-layer sum, or the one behind it with that and the MLP's output."""
    norm, traits = activations.norm_forward, shape.traits
    hidden_states = 2 if traits.closing_norms else 1
    if traits.wide_norms and not traits.feeding_norms:  # OLMo's output is cast while the normed value is still there
        hidden_states += 1
    sizes = {"tokens": shape.tokens, "hidden_size": shape.spec.hidden_size, "hidden_states": hidden_states}
    return {norm.key: norm(float32=shape.float32, **sizes)}


def _mlp(shape: LayerShape) -> Alive:
    spec, targets = shape.spec, shape.lora_targets
    sizes: dict[str, Any] = {"tokens": shape.tokens, "hidden_size": spec.hidden_size}
    if shape.moe is not None:
        experts = moe.forward
        weight_bytes = weights.FP32_BYTES if shape.traits.wide_routing else weights.BF16_BYTES
        chosen, width = shape.moe.num_experts_per_tok, shape.moe.moe_intermediate_size
        return {
            experts.key: experts(
                experts_per_token=chosen, expert_size=width, weight_bytes=weight_bytes,
                biased=shape.traits.biased_experts, **sizes,
            )
        }  # fmt: skip
    sizes["intermediate_size"] = spec.intermediate_size
    if shape.lora_rank is not None:
        adapted = lora.mlp_forward
        at = {name: f"{name}_proj" in targets for name in ("gate", "up", "down")}
        wide, dropout = not shape.narrow_adapters, shape.lora_dropout
        return {adapted.key: adapted(rank=shape.lora_rank, wide=wide, dropout=dropout, **at, **sizes)}
    # the mid-layer sum, and where a norm feeds the MLP its output
    hidden_states = 2 if shape.traits.feeding_norms else 1
    fused = shape.traits.fused_mlp
    if shape.tile is not None:
        tiled = activations.tiled_forward
        return {tiled.key: tiled(tile=shape.tile, hidden_states=hidden_states, fused_projection=fused, **sizes)}
    item, size = activations.mlp_forward, _dtype_bytes(shape)
    return {item.key: item(hidden_states=hidden_states, dtype_bytes=size, fused_projection=fused, **sizes)}
