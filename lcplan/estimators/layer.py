"""One decoder layer: what its forward saves, and what is alive at the instants of its backward that can win.

Families differ in few ways, which ``Traits`` names; everything else is the shapes of the config.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from lcplan.estimators import activations, attention, lora, moe, weights
from lcplan.model_spec import LayerParameters, ModelSpec, MoeSpec

Alive = dict[str, int]
"""Item key -> bytes at one instant."""


@dataclass(frozen=True)
class Traits:
    """How a family's layer differs from Llama's in what it keeps.

    Source: transformers 5.24 ``models/<model_type>/modeling_*.py``, and an allocator trace of each.
    """

    feeding_norms: int = 2
    """RMSNorms whose output goes into linears (before attention and MLP)."""
    closing_norms: int = 0
    """RMSNorms whose output is added to the residual (after attention and MLP)."""
    wide_norms: bool = False
    """The norm's weight multiplies in float32, so a float32 normed value is saved."""
    fused_qkv: bool = False
    """One projection for q, k, v: v keeps all of it alive."""
    fused_mlp: bool = False
    """One projection for gate and up."""
    copies_output: bool = False
    """q and k are concatenated from rotated parts, a layout whose attention output o_proj must copy."""
    wide_rotary: bool = False
    """cos and sin in float32."""
    interleaved_rotary: bool = False
    """cos and sin are repeated in every layer, so only checkpointed layers keep what the model made."""
    scales_embedding: bool = False
    """The embedding's output is multiplied before the first layer."""
    scales_residual: bool = False
    """What attention and MLP add to the residual is multiplied before."""
    rotary_by_layer_type: bool = False
    """Sliding and full layers have cos and sin of their own."""
    half_rotary: bool = False
    """cos and sin are half as wide: each serves both halves of a head."""
    wide_routing: bool = False
    """Routing weights stay in float32."""
    biased_experts: bool = False
    """Experts with biases, whose gate is clamped (gpt-oss)."""
    soft_caps_scores: bool = False
    """Scores pass through tanh before softmax (Gemma 2)."""
    norms_projected: bool = False
    """Queries and keys are normed when values are projected as well, so in the backward before all projections."""
    norms_rotated: bool = False
    """Queries and keys are normed when they are rotated already."""
    sinks: bool = False
    """Eager attention has one more column of scores, and its softmax stays in bf16 (gpt-oss)."""


_GEMMA_3 = Traits(closing_norms=2, wide_norms=True, rotary_by_layer_type=True, norms_projected=True)
TRAITS: dict[str, Traits] = {
    "llama": Traits(),
    "mistral": Traits(),
    "qwen2": Traits(),
    "qwen3": Traits(),
    "qwen3_moe": Traits(),
    "mixtral": Traits(wide_routing=True),
    "phi3": Traits(fused_qkv=True, fused_mlp=True, copies_output=True),
    "glm4": Traits(closing_norms=2, fused_mlp=True, copies_output=True, interleaved_rotary=True),
    "olmo2": Traits(feeding_norms=0, closing_norms=2, wide_norms=True, wide_rotary=True),
    "gemma2": Traits(closing_norms=2, wide_norms=True, soft_caps_scores=True),
    "gemma3_text": _GEMMA_3,
    "gemma3": _GEMMA_3,
    "smollm3": Traits(),
    "granite": Traits(scales_embedding=True, scales_residual=True),
    "ernie4_5": Traits(wide_rotary=True, interleaved_rotary=True),
    "hunyuan_v1_dense": Traits(norms_projected=True, norms_rotated=True),
    "ministral": Traits(),
    "gemma": Traits(wide_norms=True),
    "glm": Traits(fused_mlp=True, copies_output=True, interleaved_rotary=True),
    "olmo3": Traits(
        feeding_norms=0,
        closing_norms=2,
        wide_norms=True,
        wide_rotary=True,
        rotary_by_layer_type=True,
    ),
    "exaone4": Traits(feeding_norms=0, closing_norms=2, norms_projected=True),
    "gpt_oss": Traits(wide_norms=True, half_rotary=True, biased_experts=True, sinks=True),
}
"""Families the formulas cover, by model_type."""

AttentionPath = Literal["kernel", "masked", "eager"]
"""A kernel that knows causality; sdpa with a materialised mask (sliding layers); scores that exist as tensors."""


@dataclass(frozen=True)
class LayerShape:
    """What of a plan, and of the kind of a layer, matters inside it."""

    spec: ModelSpec
    parameters: LayerParameters
    moe: MoeSpec | None
    """The layer's experts; None where it has a dense MLP."""
    attention: AttentionPath
    flash: bool
    """FlashAttention's own kernel instead of sdpa's."""
    recomputed: bool
    """The layer is checkpointed."""
    tokens: int
    row_tokens: int
    """Tokens of one sequence: what attends to one another."""
    float32: bool
    casts_rotary: bool
    """The layer gets bf16 copies of float32 tables."""
    offloads_input: bool
    """The layer's own input waits on the host."""
    ring_copies_output: bool
    cp_size: int
    cp_rank: int
    """This rank's place among those that share a sequence."""
    allgather: bool
    cp_head_chunks: int
    """Parts of the heads that ring attention takes in turn."""
    cp_merge_bytes: int
    """Of one element of ring attention's sums."""
    sp_size: int
    """Ranks that exchange their tokens for heads around attention (Ulysses)."""
    narrow_adapters: bool
    """Adapters compute in bf16 and take their inputs as they are: FSDP2 casts the unit, TRL those on a 4-bit base."""
    lora_rank: int | None
    lora_dropout: bool
    quantised: bool
    """The base's linears are 4-bit."""
    lora_targets: dict[str, tuple[int, int]]
    """Adapted linears with inputs and outputs; empty without LoRA."""
    tile: int | None
    """Tokens of one tile of the MLP; None where it runs over all at once."""
    fused: bool
    """Liger's norms, rotary embedding and, without tiles, SwiGLU."""

    @property
    def saves_input(self) -> bool:
        """What enters attention or MLP is itself a saved tensor.

        A norm before them saves it where it needs no cast of it, without such a norm the linears where they need none.
        """
        return self.fused or self.float32 == bool(self.traits.feeding_norms)

    @property
    def repeated_heads(self) -> int:
        """Heads at which keys and values exist where attention takes them repeated.

        A single key/value head is repeated without a copy, except that eager attention flattens several rows.
        """
        heads, kv_heads = self.spec.num_attention_heads, self.spec.num_key_value_heads
        copied = kv_heads > 1 or (self.attention == "eager" and self.tokens > self.row_tokens)
        return heads if copied else kv_heads

    @property
    def copies_values(self) -> bool:
        """Attention copies the values it is given, so what they were part of is not kept."""
        flattened = self.attention == "eager" and self.tokens > self.row_tokens
        repeated = self.attention != "kernel" and self.repeated_heads > self.spec.num_key_value_heads
        return flattened or repeated

    @property
    def frozen(self) -> bool:
        """The base weights get no gradient."""
        return self.lora_rank is not None

    @property
    def traits(self) -> Traits:
        """How the model's family differs."""
        return TRAITS[self.spec.model_type]

    @property
    def heads(self) -> dict[str, int]:
        """Arguments that attention items share."""
        spec = self.spec
        return {"heads": spec.num_attention_heads, "kv_heads": spec.num_key_value_heads, "head_dim": spec.head_dim}

    @property
    def attended_heads(self) -> dict[str, int]:
        """Heads as the attention kernel sees them; Ulysses repeats key/value heads until every rank has one."""
        return self.heads | {"kv_heads": max(self.spec.num_key_value_heads, self.sp_size)}


def merge(*parts: Alive) -> Alive:
    """Sum of the parts, key by key."""
    total: Alive = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0) + value
    return total


def times(alive: Alive, count: int) -> Alive:
    """``count`` times each item."""
    return {key: count * value for key, value in alive.items()}


def saved(shape: LayerShape) -> Alive:
    """Everything one layer saves, before its backward begins."""
    return merge(_saved_attention(shape), _saved_output(shape), _saved_mlp(shape))


def _norms(shape: LayerShape, *, feeding: int, closing: int, linears: int) -> Alive:
    if shape.fused:
        fused = activations.fused_norms
        return {fused.key: fused(tokens=shape.tokens, hidden_size=shape.spec.hidden_size, num_norms=feeding)}
    alive = {
        activations.norms.key: activations.norms(
            tokens=shape.tokens, hidden_size=shape.spec.hidden_size, num_norms=feeding, float32=shape.float32,
            wide=shape.traits.wide_norms, frozen=shape.frozen, num_linears=linears,
        )
    }  # fmt: skip
    if closing:
        alive[activations.closing_norms.key] = activations.closing_norms(
            tokens=shape.tokens, hidden_size=shape.spec.hidden_size, num_norms=closing, wide=shape.traits.wide_norms
        )
    return alive


def _saved_attention(shape: LayerShape) -> Alive:
    """The first norm and what attention saves up to its output."""
    alive = before_scores(shape)
    if shape.attention == "eager":
        alive[attention.eager_saved.key] = attention.eager_saved(**_score_sizes(shape))
    elif shape.attention == "masked":
        spec = shape.spec
        alive[attention.masked_saved.key] = attention.masked_saved(
            tokens=shape.tokens, row_tokens=shape.row_tokens, heads=spec.num_attention_heads,
            repeated_heads=shape.repeated_heads, head_dim=spec.head_dim,
        )  # fmt: skip
    else:
        alive[attention.saved.key] = attention.saved(tokens=shape.tokens, **shape.attended_heads)
    if shape.traits.fused_qkv and not shape.copies_values:
        alive[attention.fused_qkv.key] = attention.fused_qkv(tokens=shape.tokens, **shape.heads)
    return alive


def _score_sizes(shape: LayerShape) -> dict[str, Any]:
    """Arguments of the two items of eager attention."""
    return {
        "tokens": shape.tokens, "row_tokens": shape.row_tokens, "heads": shape.spec.num_attention_heads,
        "repeated_heads": shape.repeated_heads, "head_dim": shape.spec.head_dim,
        "soft_capped": shape.traits.soft_caps_scores, "sinks": shape.traits.sinks,
    }  # fmt: skip


def before_scores(shape: LayerShape) -> Alive:
    """The first norm, query and key norms, rotary tables of the layer's own."""
    spec, traits, tokens = shape.spec, shape.traits, shape.tokens
    alive = _norms(shape, feeding=min(traits.feeding_norms, 1), closing=0, linears=1 if traits.fused_qkv else 3)
    if spec.qk_norm != "none" and shape.fused:
        alive[attention.fused_qk_norm.key] = attention.fused_qk_norm(tokens=tokens, **shape.heads)
    elif spec.qk_norm != "none":
        wide = traits.wide_norms
        alive[attention.qk_norm.key] = attention.qk_norm(
            tokens=tokens, wide=wide, full=spec.qk_norm == "full", frozen=shape.frozen, **shape.heads
        )
    return alive | own_tables(shape)


def own_tables(shape: LayerShape) -> Alive:
    """Rotary tables that a layer makes itself, by repeating the model's."""
    spec, item = shape.spec, activations.rotary_tables
    if not shape.traits.interleaved_rotary:
        return {}
    width = round(spec.head_dim * spec.rope.partial_rotary_factor)
    size = weights.FP32_BYTES if shape.traits.wide_rotary and not shape.casts_rotary else weights.BF16_BYTES
    return {item.key: item(tokens=shape.row_tokens, head_dim=width, dtype_bytes=size)}


def _unpacked_input(shape: LayerShape) -> Alive:
    """An offloaded input that was copied back, where it is itself one of the saved tensors."""
    return _residual(shape, shape.tokens, 1) if shape.offloads_input and shape.saves_input else {}


def _saved_output(shape: LayerShape) -> Alive:
    # eager attention's output is such a copy already, and nothing keeps the first
    copies = shape.ring_copies_output or shape.traits.copies_output or shape.sp_size > 1
    if shape.attention == "eager" or not copies:
        return {}
    if shape.frozen and ("o_proj" not in shape.lora_targets or shape.lora_dropout):
        return {}  # nothing needs the copy: a frozen o_proj has no gradient, and an adapter keeps its dropped input
    spec = shape.spec
    copied = attention.output_copy(tokens=shape.tokens, heads=spec.num_attention_heads, head_dim=spec.head_dim)
    return {attention.output_copy.key: copied}


def _saved_mlp(shape: LayerShape) -> Alive:
    """The second norm, closing norms, and the MLP or the experts."""
    spec, traits = shape.spec, shape.traits
    feeding = max(traits.feeding_norms - 1, 0)
    alive = _norms(shape, feeding=feeding, closing=traits.closing_norms, linears=1 if traits.fused_mlp else 2)
    if shape.tile is not None:
        pass  # its input alone, which is the norm's output
    elif shape.fused:
        own = activations.fused_mlp_saved
        alive[own.key] = own(tokens=shape.tokens, intermediate_size=spec.intermediate_size)
    elif shape.moe is None:
        alive[activations.mlp_saved.key] = activations.mlp_saved(
            tokens=shape.tokens, intermediate_size=spec.intermediate_size, frozen=shape.frozen
        )
    else:
        # gpt-oss takes the softmax over the chosen experts alone
        scored = 0 if traits.biased_experts else shape.moe.num_experts
        alive[moe.router.key] = moe.router(
            tokens=shape.tokens, num_experts=scored, experts_per_token=shape.moe.num_experts_per_tok
        )
        kept = moe.biased_experts if traits.biased_experts else moe.experts
        alive[kept.key] = kept(
            tokens=shape.tokens, hidden_size=spec.hidden_size, experts_per_token=shape.moe.num_experts_per_tok,
            expert_size=shape.moe.moe_intermediate_size,
        )  # fmt: skip
    if shape.saves_input:  # the mid-layer sum
        alive = merge(alive, _residual(shape, shape.tokens, 1))
    return alive


def _residual(shape: LayerShape, tokens: int, copies: int) -> Alive:
    item = activations.residual
    size = weights.FP32_BYTES if shape.float32 else weights.BF16_BYTES
    hidden = shape.spec.hidden_size
    return {item.key: item(tokens=tokens, hidden_size=hidden, dtype_bytes=size, copies=copies)}


@dataclass(frozen=True)
class LayerInstant:
    """One instant of a layer's backward."""

    name: str
    alive: Alive
    made: int
    """Parameters of this layer whose gradients exist already."""


def instants(shape: LayerShape) -> tuple[LayerInstant, ...]:
    """Those instants of a layer's backward that can be its largest."""
    unpacked = _unpacked_input(shape)
    found = _instants(shape)
    found += tuple(late for late in _query_norm(shape) if all(_may_exceed(late, other, shape) for other in found))
    return tuple(LayerInstant(i.name, merge(i.alive, unpacked), i.made) for i in found)


def _instants(shape: LayerShape) -> tuple[LayerInstant, ...]:
    if "down_proj" in shape.lora_targets and not shape.narrow_adapters:
        return (_adapted_down(shape), _attention(shape))
    if "down_proj" in shape.lora_targets and shape.lora_dropout:
        return (_adapted_down(shape), *_adapted_mlp(shape), _attention(shape))
    if shape.frozen:
        return (*_adapted_mlp(shape), _attention(shape))
    if shape.moe is not None:
        recomputing = _biased_experts(shape, shape.moe) if shape.traits.biased_experts and shape.recomputed else ()
        backward = (_experts(shape, shape.moe), _expert_gate(shape, shape.moe), _expert_gradients(shape, shape.moe))
        return (*recomputing, *backward, _norm_before_experts(shape), _attention(shape))
    closing = (_closing_norm(shape),) if shape.traits.closing_norms else ()
    if shape.tile is None:
        return (*closing, _mlp(shape), _attention(shape))
    feeding = (_norm_before_mlp(shape),) if shape.traits.feeding_norms > 1 and not shape.fused else ()
    return (*closing, _mlp_tile(shape, shape.tile), *feeding, _attention(shape))


def _mlp(shape: LayerShape) -> LayerInstant:
    spec = shape.spec
    item, fused = activations.mlp_backward, activations.fused_mlp_backward
    own = {item.key: item(tokens=shape.tokens, intermediate_size=spec.intermediate_size, frozen=shape.frozen)}
    if shape.fused:
        sizes = {"hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size}
        own = {fused.key: fused(tokens=shape.tokens, **sizes)}
    alive = merge(saved(shape), own, _closing_norm_over(shape), _residual(shape, shape.tokens, 1))
    alive = merge(alive, _autocast(shape, linears=2))
    made = 0 if shape.frozen or shape.fused else spec.hidden_size * spec.intermediate_size
    return LayerInstant("mlp", alive, made)


def _closing_norm_over(shape: LayerShape) -> Alive:
    """What is gone when the MLP runs backward: its closing norm's."""
    return times(_norms(shape, feeding=0, closing=min(shape.traits.closing_norms, 1), linears=0), -1)


def _mlp_tile(shape: LayerShape, tile: int) -> LayerInstant:
    """The largest tile's backward: one of those behind the first, or where these are smaller the first.

    The weights' gradients are the layer's own until the last tile; the first makes them as it goes.
    """
    spec, first, later = shape.spec, activations.mlp_first_tile, activations.mlp_tile
    sums, down = activations.mlp_tile_gradients, spec.hidden_size * spec.intermediate_size
    sizes = {"hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size}
    rest = min(tile, shape.tokens - tile)
    own = max(
        {later.key: later(tile=rest, **sizes), sums.key: sums(parameters=shape.parameters.mlp)},
        {first.key: first(tile=tile, **sizes), sums.key: sums(parameters=down)},
        key=lambda alive: sum(alive.values()),
    )
    # the gradients of the residual and of the MLP's input, and that of its output where it is another than the first
    copies = 3 if shape.traits.closing_norms or shape.traits.scales_residual else 2
    alive = merge(saved(shape), own, _closing_norm_over(shape), _residual(shape, shape.tokens, copies))
    return LayerInstant("mlp", alive, made=0)


def _norm_before_mlp(shape: LayerShape) -> LayerInstant:
    """Backward of the norm before a tiled MLP, which so is not the largest instant."""
    item = activations.feeding_norm_backward
    own = {item.key: item(tokens=shape.tokens, hidden_size=shape.spec.hidden_size)}
    alive = merge(_saved_attention(shape), _saved_output(shape), own, _residual(shape, shape.tokens, 1))
    return LayerInstant("mlp_norm", alive, made=shape.parameters.mlp)


def _adapted_mlp(shape: LayerShape) -> tuple[LayerInstant, ...]:
    """The MLP's backward with adapters, and before it down_proj's, which unpacks a 4-bit weight."""
    plain = _mlp(shape)
    adapters = _adapters(shape, [name for name in shape.lora_targets if name != "down_proj"])
    # down_proj's adapter is over: its gradients exist
    down = {name: size for name, size in shape.lora_targets.items() if name == "down_proj"}
    made = lora.adapter_parameters(down, shape.lora_rank or 0)
    mlp = LayerInstant(plain.name, merge(plain.alive, adapters), made)
    if not shape.quantised:
        return (mlp,)
    spec, backward = shape.spec, activations.down_backward
    own = {
        backward.key: backward(tokens=shape.tokens, intermediate_size=spec.intermediate_size),
        weights.dequantised.key: weights.dequantised(largest_matrix=spec.hidden_size * spec.intermediate_size),
    }
    alive = {key: size for key, size in mlp.alive.items() if key != activations.mlp_backward.key}
    return (LayerInstant("down_proj_backward", merge(alive, own), made), mlp)


def _adapters(shape: LayerShape, names: Collection[str]) -> Alive:
    """What the named adapters keep, and the casts of the layer's adapter weights."""
    if shape.lora_rank is None:
        return {}
    if shape.lora_dropout:
        dropped = lora.dropped_inputs
        kept = dropped(
            tokens=shape.tokens, sum_of_inputs=sum(shape.lora_targets[name][0] for name in names),
            num_targets=len(names), rank=shape.lora_rank,
        )  # fmt: skip
        return {dropped.key: kept} | _adapter_casts(shape)
    if shape.narrow_adapters:
        hidden = shape.spec.hidden_size
        groups = [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}]
        shared = sum(hidden for group in groups if group & set(names))
        item = lora.shared_inputs
        kept = item(tokens=shape.tokens, sum_of_inputs=shared, num_targets=len(names), rank=shape.lora_rank)
        return {item.key: kept}
    kept = lora.saved(
        tokens=shape.tokens, sum_of_inputs=sum(shape.lora_targets[name][0] for name in names),
        num_targets=len(names), rank=shape.lora_rank,
    )  # fmt: skip
    return {lora.saved.key: kept} | _adapter_casts(shape)


def _adapter_casts(shape: LayerShape) -> Alive:
    if shape.narrow_adapters or shape.lora_rank is None:
        return {}
    item = lora.weight_casts
    return {item.key: item(layer_parameters=lora.adapter_parameters(shape.lora_targets, shape.lora_rank))}


def _adapted_down(shape: LayerShape) -> LayerInstant:
    spec, item = shape.spec, lora.down_forward
    own = {
        item.key: item(
            tokens=shape.tokens, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
            wide=not shape.narrow_adapters, dropout=shape.lora_dropout,
        )
    }  # fmt: skip
    # still inside the recomputation, so an offloaded input that was copied back is alive as well
    copies = 2 if shape.offloads_input else 1
    alive = merge(saved(shape), own, _residual(shape, shape.tokens, copies))
    return LayerInstant("down_proj", merge(alive, _adapters(shape, shape.lora_targets)), made=0)


def _experts(shape: LayerShape, experts: MoeSpec) -> LayerInstant:
    own = {
        moe.backward.key: moe.backward(
            tokens=shape.tokens, hidden_size=shape.spec.hidden_size, experts_per_token=experts.num_experts_per_tok,
            weight_bytes=weights.FP32_BYTES if shape.traits.wide_routing else weights.BF16_BYTES,
            recomputed=shape.recomputed,
        )
    }  # fmt: skip
    alive = merge(saved(shape), own, _residual(shape, shape.tokens, 1))
    return LayerInstant("experts", alive, made=0)


def _expert_gradients(shape: LayerShape, experts: MoeSpec) -> LayerInstant:
    hidden, width = shape.spec.hidden_size, experts.moe_intermediate_size
    own = {
        moe.gate_up_backward.key: moe.gate_up_backward(
            tokens=shape.tokens, hidden_size=hidden, experts_per_token=experts.num_experts_per_tok, expert_size=width
        )
    }
    alive = merge(_without_experts(saved(shape)), own, _residual(shape, shape.tokens, 1))
    return LayerInstant("expert_gradients", alive, made=3 * experts.num_experts * width * hidden)


def _expert_gate(shape: LayerShape, experts: MoeSpec) -> LayerInstant:
    hidden, width, item = shape.spec.hidden_size, experts.moe_intermediate_size, moe.gate_backward
    own = {
        item.key: item(
            tokens=shape.tokens, hidden_size=hidden, experts_per_token=experts.num_experts_per_tok, expert_size=width,
            biased=shape.traits.biased_experts,
        )
    }  # fmt: skip
    alive = merge(_without_experts(saved(shape)), own, _residual(shape, shape.tokens, 1))
    return LayerInstant("expert_gate", alive, made=experts.num_experts * width * hidden)


def _norm_before_experts(shape: LayerShape) -> LayerInstant:
    """Backward of the norm before the experts, when all their gradients exist."""
    item = activations.feeding_norm_backward
    own = {item.key: item(tokens=shape.tokens, hidden_size=shape.spec.hidden_size)}
    alive = merge(_saved_attention(shape), _saved_output(shape), own, _residual(shape, shape.tokens, 1))
    return LayerInstant("expert_norm", alive, made=shape.parameters.mlp)


def _without_experts(alive: Alive) -> Alive:
    return {key: value for key, value in alive.items() if key not in (moe.experts.key, moe.biased_experts.key)}


def _biased_experts(shape: LayerShape, experts: MoeSpec) -> tuple[LayerInstant, ...]:
    """Inside the experts of gpt-oss as they are recomputed: the end of the gate, the end of the output."""
    hidden, width = shape.spec.hidden_size, experts.moe_intermediate_size
    gate, output, chosen = moe.biased_gate_forward, moe.biased_output_forward, experts.num_experts_per_tok
    # the mid-layer sum is alive as long as the recomputation runs
    common = merge(saved(shape), _residual(shape, shape.tokens, 2))
    at_gate = {gate.key: gate(tokens=shape.tokens, experts_per_token=chosen, expert_size=width)}
    at_output = {output.key: output(tokens=shape.tokens, experts_per_token=chosen, hidden_size=hidden)}
    return (
        LayerInstant("expert_gate_forward", merge(common, at_gate), made=0),
        LayerInstant("expert_output_forward", merge(common, at_output), made=0),
    )


def _closing_norm(shape: LayerShape) -> LayerInstant:
    item = activations.closing_norm_backward
    size = {"tokens": shape.tokens, "hidden_size": shape.spec.hidden_size}
    own = {item.key: item(wide=shape.traits.wide_norms or shape.float32, **size)}
    alive = merge(saved(shape), own, _residual(shape, shape.tokens, 1), _autocast(shape, linears=3))
    return LayerInstant("closing_norm", alive, made=shape.spec.hidden_size)


def _attention_backward(shape: LayerShape) -> Alive:
    """What is alive when the kernel, or the softmax, runs backward."""
    spec = shape.spec
    sizes: dict[str, Any] = {"tokens": shape.tokens, **shape.attended_heads}
    if shape.attention == "eager":
        scores = attention.eager_backward
        return merge(before_scores(shape), {scores.key: scores(**_score_sizes(shape))})
    if shape.attention == "masked":
        masked = attention.masked_backward
        own = {masked.key: masked(tokens=shape.tokens, heads=spec.num_attention_heads, head_dim=spec.head_dim)}
    elif shape.cp_size > 1:
        gathered, ring = attention.ring_gathered_kv, attention.ring_backward
        own = {
            gathered.key: gathered(
                tokens=shape.tokens, kv_heads=spec.num_key_value_heads, head_dim=spec.head_dim,
                cp_size=shape.cp_size, allgather=shape.allgather, head_chunks=shape.cp_head_chunks,
            ),
            ring.key: ring(
                first_rank=shape.cp_rank == 0, head_chunks=shape.cp_head_chunks, merge_bytes=shape.cp_merge_bytes,
                **sizes,
            ),
        }  # fmt: skip
    elif shape.flash:
        flash = attention.flash_backward
        own = {flash.key: flash(row_tokens=shape.row_tokens, **sizes)}
    else:
        own = {attention.backward.key: attention.backward(**sizes)}
    return merge(_saved_attention(shape), own)


def _attention(shape: LayerShape) -> LayerInstant:
    spec = shape.spec
    alive = merge(_attention_backward(shape), _residual(shape, shape.tokens, 1))
    alive = merge(alive, _autocast(shape, linears=0))
    before = [name for name in ("q_proj", "k_proj", "v_proj") if name in shape.lora_targets]
    alive = merge(alive, _adapters(shape, before))
    if shape.frozen:
        return LayerInstant("attention", alive, made=0)
    # everything behind attention: the MLP, its norms, o_proj
    norms = shape.parameters.norms - spec.hidden_size * min(shape.traits.feeding_norms, 1)
    output = spec.num_attention_heads * spec.head_dim * spec.hidden_size
    return LayerInstant("attention", alive, made=shape.parameters.mlp + norms + output)


def _may_exceed(late: LayerInstant, other: LayerInstant, shape: LayerShape) -> bool:
    """Whether an instant can be larger than an earlier one, with as much for gradients as they may take."""
    size = weights.FP32_BYTES if shape.float32 else weights.BF16_BYTES
    return sum(late.alive.values()) + size * (late.made - other.made) > sum(other.alive.values())


def _query_norm(shape: LayerShape) -> tuple[LayerInstant, ...]:
    """Backward of the queries' norm: above attention's where the gradients of keys and values are small.

    Not above that of ring, Ulysses or eager attention.
    """
    spec, traits = shape.spec, shape.traits
    exchanges = shape.cp_size > 1 or shape.sp_size > 1
    if spec.qk_norm == "none" or shape.fused or exchanges or shape.attention == "eager":
        return ()
    item, queries = attention.query_norm_backward, spec.num_attention_heads * spec.head_dim
    own = {item.key: item(tokens=shape.tokens, norms_projected=traits.norms_projected, **shape.heads)}
    # what the layer's own norm gets of keys and values, or without one the gradient of the layer's input
    apart = bool(traits.feeding_norms) and not traits.norms_projected
    alive = merge(
        own, own_tables(shape), _residual(shape, shape.tokens, 2 if apart else 1),
        _norms(shape, feeding=min(traits.feeding_norms, 1), closing=0, linears=1),
        _adapters(shape, [name for name in shape.lora_targets if name == "q_proj"]),
    )  # fmt: skip
    if shape.float32:
        casts = weights.autocast_copies
        alive = merge(alive, {casts.key: casts(layer_weight_parameters=queries * spec.hidden_size)})
    if shape.frozen:
        return (LayerInstant("query_norm", alive, made=0),)
    left = queries + min(traits.feeding_norms, 1)
    if traits.norms_projected:
        left += 2 * spec.num_key_value_heads * spec.head_dim
    return (LayerInstant("query_norm", alive, shape.parameters.total - left * spec.hidden_size),)


def _autocast(shape: LayerShape, *, linears: int) -> Alive:
    """Bf16 copies of the running layer's float32 weights: attention's, and those of ``linears`` of its MLP."""
    if not shape.float32:
        return {}
    spec, item = shape.spec, weights.autocast_copies
    copied = shape.parameters.attention + linears * spec.hidden_size * spec.intermediate_size
    return {item.key: item(layer_weight_parameters=copied)}
