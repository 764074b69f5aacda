"""One decoder layer: what its forward saves, and what is alive at the instants of its backward that can win.

Families differ in few ways, which ``Traits`` names; everything else is the shapes of the config.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lcplan.estimators import activations, attention, lora, moe, weights
from lcplan.model_spec import ModelSpec, MoeSpec

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
    copies_output: bool = False
    """q and k are concatenated from rotated parts, a layout whose attention output o_proj must copy."""
    wide_rotary: bool = False
    """cos and sin in float32."""
    interleaved_rotary: bool = False
    """cos and sin are repeated in every layer."""
    wide_routing: bool = False
    """Routing weights stay in float32."""


TRAITS: dict[str, Traits] = {
    "llama": Traits(),
    "mistral": Traits(),
    "qwen2": Traits(),
    "qwen3": Traits(),
    "qwen3_moe": Traits(),
    "mixtral": Traits(wide_routing=True),
    "phi3": Traits(fused_qkv=True, copies_output=True),
    "glm4": Traits(closing_norms=2, copies_output=True, interleaved_rotary=True),
    "olmo2": Traits(feeding_norms=0, closing_norms=2, wide_norms=True, wide_rotary=True),
}
"""Families the formulas cover, by model_type."""


@dataclass(frozen=True)
class LayerShape:
    """What of a plan matters inside a layer."""

    spec: ModelSpec
    tokens: int
    float32: bool
    offloads_input: bool
    """The layer's own input waits on the host."""
    ring_copies_output: bool
    cp_size: int
    first_rank: bool
    allgather: bool
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

    @property
    def saves_input(self) -> bool:
        """The layer's own input is a saved tensor: its first norm has no cast of it, or there is no such norm."""
        return self.float32 or not self.traits.feeding_norms

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


def saved(shape: LayerShape, tokens: int) -> Alive:
    """Everything one layer saves for ``tokens`` tokens, before its backward begins."""
    return merge(_saved_attention(shape, tokens), _saved_output(shape, tokens), _saved_mlp(shape, tokens))


def _norms(shape: LayerShape, tokens: int, *, feeding: int, closing: int, linears: int) -> Alive:
    alive = {
        activations.norms.key: activations.norms(
            tokens=tokens, hidden_size=shape.spec.hidden_size, num_norms=feeding, float32=shape.float32,
            wide=shape.traits.wide_norms, frozen=shape.frozen, num_linears=linears,
        )
    }  # fmt: skip
    if closing:
        alive[activations.closing_norms.key] = activations.closing_norms(
            tokens=tokens, hidden_size=shape.spec.hidden_size, num_norms=closing, wide=shape.traits.wide_norms
        )
    return alive


def _saved_attention(shape: LayerShape, tokens: int) -> Alive:
    """The first norm and what attention saves up to its output."""
    spec, traits = shape.spec, shape.traits
    alive = _norms(shape, tokens, feeding=min(traits.feeding_norms, 1), closing=0, linears=3)
    alive[attention.saved.key] = attention.saved(tokens=tokens, **shape.attended_heads)
    if spec.qk_norm != "none":
        wide = traits.wide_norms
        alive[attention.qk_norm.key] = attention.qk_norm(
            tokens=tokens, wide=wide, full=spec.qk_norm == "full", frozen=shape.frozen, **shape.heads
        )
    if traits.fused_qkv:
        alive[attention.fused_qkv.key] = attention.fused_qkv(tokens=tokens, **shape.heads)
    if traits.interleaved_rotary:
        width = round(spec.head_dim * spec.rope.partial_rotary_factor)
        tables = activations.rotary_tables(tokens=tokens, head_dim=width, dtype_bytes=weights.BF16_BYTES)
        alive[activations.rotary_tables.key] = tables
    return alive


def _unpacked_input(shape: LayerShape) -> Alive:
    """An offloaded input that was copied back, where it is itself one of the saved tensors."""
    return _residual(shape, shape.tokens, 1) if shape.offloads_input and shape.saves_input else {}


def _saved_output(shape: LayerShape, tokens: int) -> Alive:
    if not (shape.ring_copies_output or shape.traits.copies_output or shape.sp_size > 1):
        return {}
    if shape.frozen and ("o_proj" not in shape.lora_targets or shape.lora_dropout):
        return {}  # nothing needs the copy: a frozen o_proj has no gradient, and an adapter keeps its dropped input
    spec = shape.spec
    copied = attention.output_copy(tokens=tokens, heads=spec.num_attention_heads, head_dim=spec.head_dim)
    return {attention.output_copy.key: copied}


def _saved_mlp(shape: LayerShape, tokens: int) -> Alive:
    """The second norm, closing norms, and the MLP or the experts."""
    spec, traits = shape.spec, shape.traits
    feeding = max(traits.feeding_norms - 1, 0)
    alive = _norms(shape, tokens, feeding=feeding, closing=traits.closing_norms, linears=2)
    if spec.moe is None:
        alive[activations.mlp_saved.key] = activations.mlp_saved(
            tokens=tokens, intermediate_size=spec.intermediate_size, frozen=shape.frozen
        )
    else:
        alive[moe.router.key] = moe.router(
            tokens=tokens, num_experts=spec.moe.num_experts, experts_per_token=spec.moe.num_experts_per_tok
        )
        alive[moe.experts.key] = moe.experts(
            tokens=tokens, hidden_size=spec.hidden_size, experts_per_token=spec.moe.num_experts_per_tok,
            expert_size=spec.moe.moe_intermediate_size,
        )  # fmt: skip
    if shape.float32 or not traits.feeding_norms:
        # the mid-layer sum itself is saved: by the second norm in float32, by the MLP's linears without that norm
        alive = merge(alive, _residual(shape, tokens, 1))
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
    return tuple(LayerInstant(i.name, merge(i.alive, unpacked), i.made) for i in _instants(shape))


def _instants(shape: LayerShape) -> tuple[LayerInstant, ...]:
    if "down_proj" in shape.lora_targets and not shape.narrow_adapters:
        return (_adapted_down(shape), _attention(shape))
    if "down_proj" in shape.lora_targets and shape.lora_dropout:
        return (_adapted_down(shape), *_adapted_mlp(shape), _attention(shape))
    if shape.frozen:
        return (*_adapted_mlp(shape), _attention(shape))
    if shape.spec.moe is not None:
        return (_experts(shape, shape.spec.moe), _expert_gradients(shape, shape.spec.moe), _attention(shape))
    if shape.traits.closing_norms:
        return (_closing_norm(shape), _mlp(shape), _attention(shape))
    return (_mlp(shape), _attention(shape))


def _mlp(shape: LayerShape) -> LayerInstant:
    spec = shape.spec
    item = activations.mlp_backward
    own = {item.key: item(tokens=shape.tokens, intermediate_size=spec.intermediate_size, frozen=shape.frozen)}
    # a closing norm is over when the MLP runs
    over = _norms(shape, -shape.tokens, feeding=0, closing=min(shape.traits.closing_norms, 1), linears=0)
    over.pop(activations.norms.key)
    alive = merge(saved(shape, shape.tokens), own, over, _residual(shape, shape.tokens, 1))
    alive = merge(alive, _autocast(shape, with_mlp=True))
    made = 0 if shape.frozen else spec.hidden_size * spec.intermediate_size
    return LayerInstant("mlp", alive, made)


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
    alive = merge(saved(shape, shape.tokens), own, _residual(shape, shape.tokens, copies))
    return LayerInstant("down_proj", merge(alive, _adapters(shape, shape.lora_targets)), made=0)


def _experts(shape: LayerShape, experts: MoeSpec) -> LayerInstant:
    own = {
        moe.backward.key: moe.backward(
            tokens=shape.tokens, hidden_size=shape.spec.hidden_size, experts_per_token=experts.num_experts_per_tok,
            weight_bytes=weights.FP32_BYTES if shape.traits.wide_routing else weights.BF16_BYTES,
        )
    }  # fmt: skip
    alive = merge(saved(shape, shape.tokens), own, _residual(shape, shape.tokens, 1))
    return LayerInstant("experts", alive, made=0)


def _expert_gradients(shape: LayerShape, experts: MoeSpec) -> LayerInstant:
    hidden, width = shape.spec.hidden_size, experts.moe_intermediate_size
    own = {
        moe.gate_up_backward.key: moe.gate_up_backward(
            tokens=shape.tokens, hidden_size=hidden, experts_per_token=experts.num_experts_per_tok, expert_size=width
        )
    }
    alive = merge(saved(shape, shape.tokens), own, _residual(shape, shape.tokens, 1))
    del alive[moe.experts.key]
    return LayerInstant("expert_gradients", alive, made=3 * experts.num_experts * width * hidden)


def _closing_norm(shape: LayerShape) -> LayerInstant:
    item = activations.closing_norm_backward
    own = {item.key: item(tokens=shape.tokens, hidden_size=shape.spec.hidden_size, wide=shape.traits.wide_norms)}
    alive = merge(saved(shape, shape.tokens), own, _residual(shape, shape.tokens, 1))
    return LayerInstant("closing_norm", alive, made=shape.spec.hidden_size)


def _attention(shape: LayerShape) -> LayerInstant:
    spec = shape.spec
    sizes: dict[str, Any] = {"tokens": shape.tokens, **shape.attended_heads}
    own: Alive
    if shape.cp_size > 1:
        gathered, ring = attention.ring_gathered_kv, attention.ring_backward
        own = {
            gathered.key: gathered(
                tokens=shape.tokens, kv_heads=spec.num_key_value_heads, head_dim=spec.head_dim,
                cp_size=shape.cp_size, allgather=shape.allgather,
            ),
            ring.key: ring(first_rank=shape.first_rank, **sizes),
        }  # fmt: skip
    else:
        own = {attention.backward.key: attention.backward(**sizes)}
    alive = merge(_saved_attention(shape, shape.tokens), own, _residual(shape, shape.tokens, 1))
    alive = merge(alive, _autocast(shape, with_mlp=False))
    before = [name for name in ("q_proj", "k_proj", "v_proj") if name in shape.lora_targets]
    alive = merge(alive, _adapters(shape, before))
    if shape.frozen:
        return LayerInstant("attention", alive, made=0)
    # everything behind attention: the MLP, its norms, o_proj
    norms = spec.layers[0].norms - spec.hidden_size * min(shape.traits.feeding_norms, 1)
    output = spec.num_attention_heads * spec.head_dim * spec.hidden_size
    return LayerInstant("attention", alive, made=spec.layers[0].mlp + norms + output)


def _autocast(shape: LayerShape, *, with_mlp: bool) -> Alive:
    """Bf16 copies of the running layer's float32 weights."""
    if not shape.float32:
        return {}
    spec, item = shape.spec, weights.autocast_copies
    copied = spec.layers[0].attention + (2 * spec.hidden_size * spec.intermediate_size if with_mlp else 0)
    return {item.key: item(layer_weight_parameters=copied)}
