"""The formula method: which items are alive at which instant of a step.

A step's memory rises and falls linearly from layer to layer, so its maximum is at the last or first decoder layer, or
one before these (where FSDP2's prefetch and reduce-scatter buffers differ). Each such instant is one phase.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lcplan.errors import PlanError
from lcplan.estimators import activations, attention, gradients, host, loss_head, runtime, weights
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan

COVERED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose decoder layer is: two RMSNorms, SwiGLU with separate gate and up, optional per-head q/k norm."""

Alive = dict[str, int]
"""Item key -> bytes at one instant."""


@dataclass(frozen=True)
class Instants:
    """GPU items by phase, in step order, for one rank."""

    phases: dict[str, Alive] = field(default_factory=dict)

    def totals(self) -> dict[str, int]:
        """Allocated bytes of each phase."""
        return {phase: sum(alive.values()) for phase, alive in self.phases.items()}


def check_covered(spec: ModelSpec, plan: TrainPlan) -> None:
    """Refuse what the formulas have not been held against measurements for.

    Raises:
        PlanError: naming the model family or the lever, and what to do instead.
    """

    def refuse(what: str) -> None:
        message = f"{what}: the formula method does not cover it, and an unmeasured number would be a guess."
        raise PlanError("not-covered", message)

    if spec.model_type not in COVERED_FAMILIES or spec.moe is not None:
        refuse(f"{spec.id} (model_type {spec.model_type}; covered: {', '.join(COVERED_FAMILIES)})")
    if any(kind != "full_attention" for kind in spec.layer_types):
        refuse(f"{spec.id} has layers that are not full attention")
    uncovered = {
        "--backend deepspeed": plan.backend == "deepspeed",
        "--activation-checkpointing selective": plan.activation_checkpointing == "selective",
        f"--checkpoint-every-n-layers {plan.checkpoint_every_n_layers}": plan.checkpoint_every_n_layers > 1,
        "--offload-params": plan.offload_params,
        f"--mlp-tile-size {plan.mlp_tile_size}": plan.mlp_tile_size is not None,
        f"--lora-r {plan.lora_r}": plan.lora_r is not None,
        f"--quantize {plan.quantize}": plan.quantize != "none",
        f"--attn-implementation {plan.attn_implementation}": plan.attn_implementation != "sdpa",
        f"--optim {plan.optim}": plan.optim not in ("adamw_torch", "adamw_torch_fused"),
        "--packing": plan.packing,
        f"--dp-replicate-size {plan.dp_replicate_size}": plan.dp_replicate_size > 1,
        f"--gradient-accumulation-steps {plan.gradient_accumulation_steps} with --backend fsdp2": (
            plan.gradient_accumulation_steps > 1 and plan.backend == "fsdp2"
        ),
        "--loss full with --dtype float32": plan.loss == "full" and plan.dtype == "float32",
    }
    for what, present in uncovered.items():
        if present:
            refuse(what)


class _Sizes:
    """Integers of one (model, plan) pair that several items share."""

    def __init__(self, spec: ModelSpec, plan: TrainPlan, rank: int) -> None:
        self.fsdp = plan.backend == "fsdp2"
        self.ranks = plan.shard_size
        self.float32 = plan.dtype == "float32" and not self.fsdp  # FSDP2 computes in bf16 whatever was loaded
        self.state_bytes = weights.FP32_BYTES if self.fsdp or self.float32 else weights.BF16_BYTES
        self.compute_bytes = weights.FP32_BYTES if self.float32 else weights.BF16_BYTES
        self.gradient_bytes = self.compute_bytes
        self.tokens = plan.tokens_per_rank
        self.layers = spec.num_hidden_layers
        self.layer = spec.layers[0].total
        self.head = spec.vocab_size * spec.hidden_size + spec.final_norm_parameters
        self.tied = spec.tie_word_embeddings
        self.checkpointing = plan.activation_checkpointing == "full"
        self.offload = plan.offload_activations and self.checkpointing
        self.ring = plan.cp_size > 1
        self.rank = rank
        self.copies_output = self.ring and rank < plan.cp_size - 1
        self.holds_tied_head = self.tied and (self.fsdp or plan.gradient_accumulation_steps > 1)
        self.accumulates = plan.gradient_accumulation_steps > 1


def instants(spec: ModelSpec, plan: TrainPlan, *, rank: int = 0) -> Instants:
    """Every phase of one steady training step on ``rank``, with the bytes of each item alive in it.

    Raises:
        PlanError: when the plan is outside what the formulas cover.
    """
    check_covered(spec, plan)
    sizes = _Sizes(spec, plan, rank)
    result: dict[str, Alive] = {}
    result["forward"] = _forward(spec, plan, sizes)
    result["loss"] = _loss(spec, plan, sizes)
    last = sizes.layers - 1
    for index in sorted({last, max(last - 1, 0), min(1, last), 0}, reverse=True):
        result[f"backward[{index}].mlp"] = _mlp(spec, plan, sizes, index)
        result[f"backward[{index}].attention"] = _attention(spec, plan, sizes, index)
    result["backward.embedding"] = _embedding(spec, plan, sizes)
    result["optimizer_step"] = _optimizer_step(spec, plan, sizes)
    return Instants({phase: {k: v for k, v in alive.items() if v} for phase, alive in result.items()})


def _states(spec: ModelSpec, plan: TrainPlan, s: _Sizes) -> Alive:
    p = spec.num_parameters
    whole = plan.max_length * plan.per_device_train_batch_size
    local = whole if s.ring else s.tokens
    return {
        weights.parameters.key: weights.parameters(num_parameters=p, dtype_bytes=s.state_bytes, ranks=s.ranks),
        weights.adamw_states.key: weights.adamw_states(num_parameters=p, dtype_bytes=s.state_bytes, ranks=s.ranks),
        runtime.cublas_workspace.key: runtime.cublas_workspace(),
        activations.batch.key: activations.batch(tokens=local, micro_batches=plan.gradient_accumulation_steps),
    }


def _gradients(spec: ModelSpec, s: _Sizes, done: int, current: int) -> Alive:
    """Gradients of ``done`` parameters, and of ``current`` ones that the running layer has made so far."""
    if s.accumulates:
        kept = gradients.accumulated(num_parameters=spec.num_parameters, dtype_bytes=s.gradient_bytes)
        return {gradients.accumulated.key: kept}
    per_parameter = weights.FP32_BYTES if s.fsdp else s.gradient_bytes
    return {
        gradients.finished.key: gradients.finished(num_parameters=done, dtype_bytes=per_parameter, ranks=s.ranks),
        gradients.current_layer.key: gradients.current_layer(num_parameters=current, dtype_bytes=s.gradient_bytes),
    }


def _step_wide(spec: ModelSpec, plan: TrainPlan, s: _Sizes) -> Alive:
    """States and what the forward leaves for the whole step: positions, rotary tables, the tied head."""
    rows = plan.per_device_train_batch_size
    alive = _states(spec, plan, s)
    if s.ring:
        buffers = activations.context_parallel_buffers
        alive[buffers.key] = buffers(sequence_tokens=plan.max_length, rows=rows, tokens_per_rank=s.tokens)
    else:
        alive[activations.positions.key] = activations.positions(tokens=s.tokens // rows)
    tables = activations.rotary_tables
    alive[tables.key] = tables(
        tokens=s.tokens if s.ring else s.tokens // rows, head_dim=spec.head_dim, dtype_bytes=s.compute_bytes
    )
    if s.fsdp and s.tied:
        alive[weights.gathered_head.key] = weights.gathered_head(head_parameters=s.head)
    return alive


def _stored_inputs(spec: ModelSpec, s: _Sizes, count: int) -> Alive:
    """Layer inputs still stored; without checkpointing what ``count`` layers saved, whole."""
    if not s.checkpointing:
        return _recomputed(spec, s, s.tokens * count)
    if s.offload:
        count = 0
    item = activations.layer_inputs
    args = {"tokens": s.tokens, "hidden_size": spec.hidden_size, "dtype_bytes": s.compute_bytes}
    return {item.key: item(num_layers=count, **args)}


def _recomputed(spec: ModelSpec, s: _Sizes, tokens: int) -> Alive:
    """Everything one layer saves for ``tokens`` tokens, before its backward begins."""
    h, k, d = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    hidden = spec.hidden_size
    alive = {
        # float32: three linears read the first norm's output (q, k, v), two the second's (gate, up)
        activations.norms.key: activations.norms(
            tokens=tokens, hidden_size=hidden, num_norms=2, float32=s.float32, num_linears=5
        ),
        attention.saved.key: attention.saved(tokens=tokens, heads=h, kv_heads=k, head_dim=d),
        activations.mlp_saved.key: activations.mlp_saved(tokens=tokens, intermediate_size=spec.intermediate_size),
    }
    if spec.qk_norm == "head":
        alive[attention.qk_norm.key] = attention.qk_norm(tokens=tokens, heads=h, kv_heads=k, head_dim=d)
    if s.copies_output:
        alive[attention.output_copy.key] = attention.output_copy(tokens=tokens, heads=h, head_dim=d)
    if s.float32:
        # the mid-layer sum is the second norm's saved input; without checkpointing so is the layer's own input
        copies = 1 if s.checkpointing else 2
        alive[activations.residual.key] = activations.residual(
            tokens=tokens, hidden_size=hidden, dtype_bytes=weights.FP32_BYTES, copies=copies
        )
    return alive


def _forward(spec: ModelSpec, plan: TrainPlan, s: _Sizes) -> Alive:
    alive = _step_wide(spec, plan, s) | _stored_inputs(spec, s, s.layers)
    if s.offload:
        one = {"tokens": s.tokens, "hidden_size": spec.hidden_size, "dtype_bytes": s.compute_bytes}
        alive[activations.layer_inputs.key] = activations.layer_inputs(num_layers=1, **one)
    if s.checkpointing:
        alive[activations.mlp_forward.key] = activations.mlp_forward(
            tokens=s.tokens, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size
        )
    if s.fsdp:
        alive[weights.gathered_layers.key] = weights.gathered_layers(layer_parameters=s.layer, num_layers=2)
    return alive | _gradients(spec, s, done=0, current=0)


def _loss(spec: ModelSpec, plan: TrainPlan, s: _Sizes) -> Alive:
    alive = _step_wide(spec, plan, s) | _stored_inputs(spec, s, s.layers)
    hidden, vocab = spec.hidden_size, spec.vocab_size
    alive[loss_head.final_norm.key] = loss_head.final_norm(tokens=s.tokens, hidden_size=hidden, float32=s.float32)
    if s.fsdp:
        alive[weights.gathered_head.key] = weights.gathered_head(head_parameters=s.head)
    if plan.loss == "full":
        alive[loss_head.full_logits.key] = loss_head.full_logits(tokens=s.tokens, vocab_size=vocab, hidden_size=hidden)
    else:
        alive[loss_head.hidden_states.key] = loss_head.hidden_states(tokens=s.tokens, hidden_size=hidden)
        alive[loss_head.weight_gradient.key] = loss_head.weight_gradient(
            vocab_size=vocab, hidden_size=hidden, float32=s.float32
        )
        alive[loss_head.logits_tile.key] = loss_head.logits_tile(tokens=s.tokens)
        if s.float32:
            alive[loss_head.casts.key] = loss_head.casts(tokens=s.tokens, hidden_size=hidden)
    if s.float32 and not s.checkpointing:
        every = s.layers * (spec.layers[0].attention + 3 * hidden * spec.intermediate_size)
        alive[weights.autocast_copies.key] = weights.autocast_copies(layer_weight_parameters=every)
    return alive | _gradients(spec, s, done=0, current=0)


def _layer_backward(spec: ModelSpec, plan: TrainPlan, s: _Sizes, index: int, current: int) -> Alive:
    """What is alive in the backward of layer ``index`` whatever part of it runs."""
    alive = _step_wide(spec, plan, s) | _stored_inputs(spec, s, index + (1 if s.checkpointing else 0))
    done = (s.layers - 1 - index) * s.layer + (0 if s.holds_tied_head else s.head)
    alive |= _gradients(spec, s, done, current) | _tied_head(s)
    return alive | _fsdp_backward(spec, s, index) if s.fsdp else alive


def _tied_head(s: _Sizes) -> Alive:
    if not s.holds_tied_head:
        return {}
    return {gradients.tied_head.key: gradients.tied_head(head_parameters=s.head, dtype_bytes=s.gradient_bytes)}


def _fsdp_backward(spec: ModelSpec, s: _Sizes, index: int) -> Alive:
    """Gathered weights and communication buffers: the current layer, the prefetched unit, the last unit's gradients."""
    alive = {
        weights.gathered_layers.key: weights.gathered_layers(layer_parameters=s.layer, num_layers=2 if index > 0 else 1)
    }
    if index == 0 and not s.tied:
        alive[weights.gathered_embedding.key] = weights.gathered_embedding(
            embedding_parameters=spec.embedding_parameters
        )
    previous_unit = s.layer if index < s.layers - 1 else (0 if s.tied else s.head)
    scatter = gradients.reduce_scatter_input
    alive[scatter.key] = scatter(unit_parameters=previous_unit)
    return alive


def _residual(spec: ModelSpec, s: _Sizes, copies: int) -> Alive:
    item = activations.residual
    return {item.key: item(tokens=s.tokens, hidden_size=spec.hidden_size, dtype_bytes=s.compute_bytes, copies=copies)}


def _autocast(spec: ModelSpec, s: _Sizes, index: int, *, with_mlp: bool) -> Alive:
    """Bf16 copies in the backward of layer ``index``; the layers below it have theirs only without checkpointing."""
    if not s.float32:
        return {}
    of_attention, of_mlp = spec.layers[0].attention, spec.hidden_size * spec.intermediate_size
    below = 0 if s.checkpointing else index * (of_attention + 3 * of_mlp)
    copied = below + of_attention + (2 * of_mlp if with_mlp else 0)
    return {weights.autocast_copies.key: weights.autocast_copies(layer_weight_parameters=copied)}


def _merge(*parts: Alive) -> Alive:
    """Sum of the parts, key by key."""
    total: Alive = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0) + value
    return total


def _mlp(spec: ModelSpec, plan: TrainPlan, s: _Sizes, index: int) -> Alive:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    own: Alive = {
        activations.mlp_backward.key: activations.mlp_backward(tokens=s.tokens, intermediate_size=inner),
    }
    recomputed = _recomputed(spec, s, s.tokens)
    # float32 offload: the unpacked layer input is what the first norm saved
    copies = 2 if s.float32 and s.offload else 1
    common = _layer_backward(spec, plan, s, index, current=hidden * inner)
    return _merge(common, recomputed, own, _residual(spec, s, copies), _autocast(spec, s, index, with_mlp=True))


def _attention(spec: ModelSpec, plan: TrainPlan, s: _Sizes, index: int) -> Alive:
    h, k, d, hidden = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.hidden_size
    shape: dict[str, Any] = {"tokens": s.tokens, "heads": h, "kv_heads": k, "head_dim": d}
    own: Alive = {
        activations.norms.key: activations.norms(
            tokens=s.tokens, hidden_size=hidden, num_norms=1, float32=s.float32, num_linears=3
        ),
        attention.saved.key: attention.saved(**shape),
    }
    if spec.qk_norm == "head":
        own[attention.qk_norm.key] = attention.qk_norm(**shape)
    if s.ring:
        own[attention.ring_gathered_kv.key] = attention.ring_gathered_kv(
            tokens=s.tokens, kv_heads=k, head_dim=d, cp_size=plan.cp_size,
            allgather=plan.cp_comm_strategy == "allgather",
        )  # fmt: skip
        own[attention.ring_backward.key] = attention.ring_backward(first_rank=s.rank == 0, **shape)
    else:
        own[attention.backward.key] = attention.backward(**shape)
    copies = (2 if s.offload or not s.checkpointing else 1) if s.float32 else 1
    made = spec.layers[0].mlp + hidden + h * d * hidden
    common = _layer_backward(spec, plan, s, index, current=made)
    return _merge(common, own, _residual(spec, s, copies), _autocast(spec, s, index, with_mlp=False))


def _embedding(spec: ModelSpec, plan: TrainPlan, s: _Sizes) -> Alive:
    table = spec.embedding_parameters
    done = s.layers * s.layer + (0 if s.holds_tied_head else s.head)
    alive = _step_wide(spec, plan, s) | _gradients(spec, s, done, current=0) | _tied_head(s)
    alive[gradients.embedding.key] = gradients.embedding(embedding_parameters=table, dtype_bytes=s.gradient_bytes)
    if s.fsdp:
        if not s.tied:
            alive[weights.gathered_embedding.key] = weights.gathered_embedding(embedding_parameters=table)
        alive[gradients.reduce_scatter_input.key] = gradients.reduce_scatter_input(unit_parameters=s.layer)
    return _merge(alive, _residual(spec, s, copies=1))


def _optimizer_step(spec: ModelSpec, plan: TrainPlan, s: _Sizes) -> Alive:
    return _states(spec, plan, s) | _gradients(spec, s, spec.num_parameters, current=0)


def on_top(peak_allocated_bytes: int) -> Alive:
    """What lies on top of the allocated peak; with it the sum is the device peak."""
    return {
        runtime.cuda_context.key: runtime.cuda_context(),
        runtime.allocator_slack.key: runtime.allocator_slack(peak_allocated_bytes=peak_allocated_bytes),
    }


def host_items(spec: ModelSpec, plan: TrainPlan) -> Alive:
    """Host bytes of one rank (pinned) and of one node (load copies)."""
    s = _Sizes(spec, plan, rank=0)
    pinned = host.pinned_layer_inputs(
        num_layers=s.layers if s.offload else 0,
        tokens=s.tokens,
        hidden_size=spec.hidden_size,
        dtype_bytes=s.compute_bytes,
    )
    load = host.load_copies(num_parameters=spec.num_parameters, dtype_bytes=s.state_bytes)
    return {host.pinned_layer_inputs.key: pinned, host.load_copies.key: load}


def candidate_ranks(plan: TrainPlan) -> tuple[int, ...]:
    """Ranks of which one holds the most.

    The ring's first rank runs kernels of another shape than the others, which all run the same; the last alone keeps no
    second copy of the attention output, so it never holds more than the one before it.
    """
    return (0, 1) if plan.cp_size > 1 else (0,)
