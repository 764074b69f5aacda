"""The formula method: which items are alive at which instant of a step.

Between layers that are alike a step's memory differs by what the layers below keep and the gradients of those above, so
of each kind of layer (sliding or full, experts or dense, checkpointed or not) one has the most. That one can be the
peak, and so can the ends: the very last and first layer, those before them (FSDP2's prefetch and reduce-scatter buffers
differ there), and with every n-th layer checkpointed the n at either end. Each instant of each such layer is one phase.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

from lcplan.estimators import (
    activations,
    attention,
    evaluation,
    gradients,
    layer_forward,
    lora,
    loss_head,
    moe,
    optimizer,
    runtime,
    weights,
)
from lcplan.estimators.coverage import check_covered
from lcplan.estimators.layer import TRAITS, Alive, AttentionPath, LayerInstant, LayerShape, merge, saved, times
from lcplan.estimators.layer import instants as layer_instants
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan
from lcplan.units import ceil_div

BOOL_BYTES = 1
"""torch.bool.itemsize: one byte an element."""


@dataclass(frozen=True)
class Instants:
    """GPU items by phase, in step order, for one rank."""

    phases: dict[str, Alive] = field(default_factory=dict)

    def totals(self) -> dict[str, int]:
        """Allocated bytes of each phase."""
        return {phase: sum(alive.values()) for phase, alive in self.phases.items()}


def instants(spec: ModelSpec, plan: TrainPlan, *, rank: int = 0) -> Instants:
    """Every phase of one steady training step on ``rank``, with the bytes of each item alive in it.

    Raises:
        PlanError: when the plan is outside what the formulas cover.
    """
    check_covered(spec, plan)
    made = {phase: make() for phase, make in phases(spec, plan, rank=rank).items()}
    return Instants({phase: {k: v for k, v in alive.items() if v} for phase, alive in made.items()})


def forward_bytes(spec: ModelSpec, plan: TrainPlan) -> int:
    """Bytes of one instant of a covered plan's forward on rank 0: a bound of its peak from below that costs little."""
    return sum(_step(spec, plan, 0).end_of_layers().values())


def phases(spec: ModelSpec, plan: TrainPlan, *, rank: int = 0) -> dict[str, Callable[[], Alive]]:
    """What makes each phase of a covered plan, in step order: one phase alone already bounds the peak from below."""
    return _step(spec, plan, rank).phases()


def _step(spec: ModelSpec, plan: TrainPlan, rank: int) -> Step:
    if plan.backend != "deepspeed":
        return Step(spec, plan, rank)
    from lcplan.estimators.deepspeed_step import ZeroStep  # derives from Step

    return ZeroStep(spec, plan, rank)


class Kind(NamedTuple):
    """What tells one decoder layer from another in what it keeps."""

    mask: str | None
    """The materialised mask it takes, by layer type."""
    dense: bool
    """A dense MLP among layers with experts."""
    recomputed: bool
    """Checkpointed."""


@lru_cache(maxsize=256)
def _kinds(
    layer_types: tuple[str, ...], masks: tuple[tuple[str, str | None], ...], dense: tuple[int, ...], every: int | None
) -> tuple[Kind, ...]:
    """The kind of each layer; ``masks`` says by layer type which mask it takes."""
    mask_of = dict(masks)
    return tuple(
        Kind(mask_of[layer_type], index in dense, every is not None and index % every == 0)
        for index, layer_type in enumerate(layer_types)
    )


@lru_cache(maxsize=256)
def _above(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Parameters of the layers from each on up, those of all first, and 0 behind the last."""
    return (0, *accumulate(reversed(sizes)))[::-1]


class Step:
    """One training step of one (model, plan, rank): what its instants have in common."""

    def __init__(self, spec: ModelSpec, plan: TrainPlan, rank: int) -> None:
        self.spec, self.plan, self.rank = spec, plan, rank
        self._wide: dict[int, Alive] = {}
        self.fsdp = plan.backend == "fsdp2"
        self.float32 = plan.dtype == "float32" and not self.fsdp  # FSDP2 computes in bf16 whatever was loaded
        self.state_bytes = state_bytes(plan)
        targets = lora.target_shapes(spec, plan.lora_target_modules) if plan.lora_r else {}
        self.frozen = plan.lora_r is not None
        self.quantised = plan.quantize == "nf4"
        adapters = lora.adapter_parameters(targets, plan.lora_r or 0)
        self.trains_embedding = not self.frozen and not plan.freeze_embeddings
        self.trains_head = not self.frozen and not plan.freeze_head
        self.trainable_layers = (adapters,) * spec.num_hidden_layers if self.frozen else spec.layer_sizes
        self.trainable_head = 0 if self.frozen else spec.final_norm_parameters
        self.trainable_head += spec.vocab_size * spec.hidden_size if self.trains_head else 0
        self.trainable = (
            adapters * spec.num_hidden_layers if self.frozen else spec.num_parameters - self._untrained_parameters()
        )
        self.compute_bytes = weights.FP32_BYTES if self.float32 else weights.BF16_BYTES
        self.trained_bytes = self.state_bytes
        if self.frozen:
            self.trained_bytes = weights.BF16_BYTES if self.quantised else weights.FP32_BYTES
        self.tokens = plan.tokens_per_rank
        self.tile = plan.running_tile
        self.fused = plan.kernels == "liger"
        self.layers = spec.num_hidden_layers
        self.layer = spec.layer_sizes[0] + (adapters if self.frozen else 0)
        self.head = spec.vocab_size * spec.hidden_size + spec.final_norm_parameters
        self.tied = spec.tie_word_embeddings
        self.gradient_bytes = self.trained_bytes if self.frozen else self.compute_bytes
        self.every = plan.checkpoint_every_n_layers if plan.activation_checkpointing != "none" else None
        self.ring = plan.cp_size > 1
        self.accumulates = plan.gradient_accumulation_steps > 1
        # FSDP2 casts what enters a unit to bf16: float32 tables become each layer's own
        self.casts_rotary = self.fsdp and TRAITS[spec.model_type].wide_rotary
        self.holds_tied_head = self.tied and (self.fsdp or self.accumulates) and self.trains_head
        self.ring_copies_output = self.ring and rank < plan.cp_size - 1
        self.first_rank = rank == 0
        self.targets = targets
        masks = tuple((kind, self._mask(kind)) for kind in sorted(set(spec.layer_types)))
        self.masks = {mask for _, mask in masks}
        self.kinds = _kinds(spec.layer_types, masks, () if spec.moe is None else spec.moe.dense_layers, self.every)
        self.shapes = {kind: self._shape(kind, self.kinds.index(kind)) for kind in dict.fromkeys(self.kinds)}
        self.saved = {kind: saved(shape) for kind, shape in self.shapes.items()}
        self.saves_input = self.shapes[self.kinds[0]].saves_input
        self.trainable_above = _above(self.trainable_layers)

    @cached_property
    def instants(self) -> dict[Kind, tuple[LayerInstant, ...]]:
        """By kind of layer those instants of its backward that can be its largest."""
        return {kind: layer_instants(shape) for kind, shape in self.shapes.items()}

    def _mask(self, layer_type: str) -> str | None:
        """The layer type whose materialised mask a layer takes; None where its kernel needs none."""
        if self.plan.attn_implementation == "eager" or (self.plan.padding and not self.ring):
            return layer_type
        window = self.spec.sliding_window
        slides = layer_type != "full_attention" and window is not None and self.plan.max_length >= window
        return layer_type if slides and self.plan.attn_implementation == "sdpa" else None

    def _shape(self, kind: Kind, index: int) -> LayerShape:
        mask, dense, recomputed = kind
        plan = self.plan
        path: AttentionPath = "kernel"
        if mask is not None:
            path = "eager" if plan.attn_implementation == "eager" else "masked"
        return LayerShape(
            spec=self.spec,
            parameters=self.spec.layers[index],
            moe=None if dense else self.spec.moe,
            attention=path,
            flash=plan.attn_implementation == "flash_attention_2",
            recomputed=recomputed,
            tokens=self.tokens,
            row_tokens=plan.max_length,
            float32=self.float32,
            casts_rotary=self.casts_rotary,
            offloads_input=plan.offload_activations,
            ring_copies_output=self.ring_copies_output,
            cp_size=plan.cp_size,
            cp_rank=self.rank,
            allgather=plan.cp_comm_strategy == "allgather",
            cp_head_chunks=plan.cp_head_chunks,
            cp_merge_bytes=weights.FP32_BYTES if plan.cp_merge_dtype == "float32" else weights.BF16_BYTES,
            sp_size=plan.sp_size,
            narrow_adapters=self.fsdp or self.quantised,
            lora_rank=plan.lora_r,
            lora_dropout=plan.lora_dropout > 0,
            quantised=self.quantised,
            lora_targets=self.targets,
            tile=self.tile,
            fused=self.fused,
        )

    def phases(self) -> dict[str, Callable[[], Alive]]:
        """What makes each phase, in step order."""
        makers: dict[str, Callable[[], Alive]] = {
            "forward": self.forward, "loss": self.loss, "final_norm": self.final_norm,
        }  # fmt: skip
        for index in self.layers_that_can_peak():
            for instant in self.own_instants(index):
                makers[f"backward[{index}].{instant.name}"] = partial(self.backward, index, instant)
        makers |= {"backward.embedding": self.embedding_backward, "optimizer_step": self.optimizer_step}
        makers |= {phase: partial(dict, alive) for phase, alive in self.evaluation().items()}
        return makers | {"save": self.save}

    def own_instants(self, index: int) -> tuple[LayerInstant, ...]:
        """Those instants of a layer's backward that can be its largest."""
        return self.instants[self.kinds[index]]

    def _untrained_parameters(self) -> int:
        """Parameters that are not trained although the layers are: frozen tables, a vision tower without pictures."""
        spec, plan = self.spec, self.plan
        embedding = spec.embedding_parameters if plan.freeze_embeddings else 0
        return spec.other_parameters + embedding + (spec.lm_head_parameters if plan.freeze_head else 0)

    def layers_that_can_peak(self) -> list[int]:
        """Indices of decoder layers, in the order of the backward pass."""
        near = max(self.every or 1, 1)
        last = self.layers - 1
        ends = {*range(max(last - near, 0), self.layers), *range(min(near, last) + 1)}
        if len(self.shapes) > 1 or TRAITS[self.spec.model_type].rotary_by_layer_type:
            ends.update(self._fullest_of_each_kind())
        return sorted(ends, reverse=True)

    def _fullest_of_each_kind(self) -> list[int]:
        """Of each kind of layer the one at whose backward there is most beside what the layer itself has."""
        beside = [
            sum(self._beside(index).values()) + self.gradient_bytes * self.trainable_above[index + 1]
            for index in range(self.layers)
        ]
        return [
            max((i for i, other in enumerate(self.kinds) if other == kind), key=beside.__getitem__)
            for kind in self.shapes
        ]

    # What is there all step long

    @cached_property
    def states(self) -> Alive:
        """Weights, optimizer states, workspaces and the batch."""
        plan = self.plan
        local = plan.max_length * plan.per_device_train_batch_size if self.ring else self.tokens
        alive = {
            runtime.cublas_workspace.key: runtime.cublas_workspace(),
            activations.batch.key: activations.batch(tokens=local, micro_batches=plan.gradient_accumulation_steps),
        }
        if plan.offload_params:
            return alive
        ranks = plan.shard_size
        alive |= self._weights(ranks)
        alive |= self._optimizer_states(ranks)
        if plan.backend == "ddp":
            buckets = gradients.ddp_buckets
            alive[buckets.key] = buckets(num_parameters=self.trainable, dtype_bytes=self.gradient_bytes)
        return alive

    def _weights(self, ranks: int) -> Alive:
        spec, item = self.spec, weights.parameters
        # FSDP2 upcasts what is trained, and nothing casts the rest down: it stays as it was loaded
        frozen_bytes = weights.FP32_BYTES if self.plan.dtype == "float32" else weights.BF16_BYTES
        trained = 0 if self.frozen else self.trainable
        packed = _linear_parameters(spec) if self.quantised else 0
        kept = item(num_parameters=trained, dtype_bytes=self.state_bytes, ranks=ranks)
        kept += item(num_parameters=spec.num_parameters - trained - packed, dtype_bytes=frozen_bytes, ranks=ranks)
        alive = {item.key: kept}
        if self.quantised:
            alive[weights.nf4.key] = weights.nf4(num_parameters=packed, ranks=ranks)
        if self.frozen:
            adapters = lora.adapters
            alive[adapters.key] = adapters(num_parameters=self.trainable, dtype_bytes=self.trained_bytes, ranks=ranks)
        return alive

    def _optimizer_states(self, ranks: int) -> Alive:
        spec, optim = self.spec, self.plan.optim
        wide = spec.embedding_parameters if self.trains_embedding else 0
        if optim in ("adamw_torch_fused", "adamw_torch"):
            item = optimizer.adamw_states
            return {item.key: item(num_parameters=self.trainable, dtype_bytes=self.trained_bytes, ranks=ranks)}
        if optim == "adamw_torch_8bit":
            narrow = optimizer.adamw_8bit_states
            return {narrow.key: narrow(num_parameters=self.trainable, ranks=ranks)}
        if optim == "adamw_bnb_8bit":
            narrow, embedding = optimizer.adamw_8bit_states, optimizer.wide_embedding_states
            return {
                narrow.key: narrow(num_parameters=self.trainable - wide, ranks=ranks),
                embedding.key: embedding(embedding_parameters=wide),
            }
        if optim.startswith("paged"):
            return self._paged_states(narrow=optim == "paged_adamw_8bit", wide=wide)
        if optim == "adafactor":
            sides = sum(rows + columns for rows, columns in spec.matrix_shapes())
            return {optimizer.adafactor_states.key: optimizer.adafactor_states(sum_of_sides=sides)}
        return {}  # sgd has no states

    def _paged_states(self, *, narrow: bool, wide: int) -> Alive:
        """What of paged states torch's allocator sees; base weights are all large enough to be paged."""
        small = lora.small_adapter_parameters(self.targets, self.plan.lora_r or 0, optimizer.PAGED_FROM)
        small *= self.layers
        if not narrow:
            item = optimizer.adamw_states
            return {item.key: item(num_parameters=small, dtype_bytes=weights.FP32_BYTES, ranks=1)}
        kept, scales = optimizer.adamw_8bit_states, optimizer.paged_scales
        return {
            kept.key: kept(num_parameters=small, ranks=1),
            scales.key: scales(num_parameters=self.trainable - wide - small),
        }

    def step_wide(self, layers: int) -> Alive:
        """States, and what the forward leaves for the whole step: positions, rotary tables, the tied head.

        Rotary tables of a kind of layer go with the last of the ``layers`` still to run that use them.
        """
        if layers not in self._wide:
            self._wide[layers] = self._step_wide(layers)
        return self._wide[layers]

    def _step_wide(self, layers: int) -> Alive:
        spec, plan = self.spec, self.plan
        rows = plan.per_device_train_batch_size
        alive = dict(self.states)
        if self.ring:
            buffers = activations.context_parallel_buffers
            alive[buffers.key] = buffers(sequence_tokens=plan.max_length, rows=rows, tokens_per_rank=self.tokens)
        else:
            alive[activations.positions.key] = activations.positions(tokens=self.tokens // rows)
        traits = TRAITS[spec.model_type]
        number = len(set(spec.layer_types[:layers])) if traits.rotary_by_layer_type else 1
        if traits.interleaved_rotary and not any(kind.recomputed for kind in self.kinds[:layers]):
            number = 0
        if not self.casts_rotary:
            alive |= self.rotary_tables(number, wide=self.float32 or traits.wide_rotary)
        if self.fsdp and self.tied:
            alive[weights.gathered_head.key] = weights.gathered_head(head_parameters=self.head)
        elif self.fsdp and not plan.reshard_after_forward:
            alive |= self._gathered_embedding()
        return alive

    def rotary_tables(self, number: int, *, wide: bool) -> Alive:
        """``number`` pairs of cos and sin of this rank's positions."""
        spec, item = self.spec, activations.rotary_tables
        rows = 1 if self.ring else self.plan.per_device_train_batch_size
        width = spec.head_dim * spec.rope.partial_rotary_factor / (2 if TRAITS[spec.model_type].half_rotary else 1)
        size = weights.FP32_BYTES if wide else weights.BF16_BYTES
        return {item.key: number * item(tokens=self.tokens // rows, head_dim=round(width), dtype_bytes=size)}

    # What layers that have yet to run backward keep

    def kept_by_layers(self, count: int, *, running: bool, stashed: int = activations.TRL_STASHED_TENSORS) -> Alive:
        """What the first ``count`` layers keep; with ``running`` the last of them runs backward and holds its own.

        ``stashed`` layer inputs wait on the GPU for TRL's offloading.
        """
        below = count - 1 if running else count
        kinds = self.kinds[:count]
        checkpointed = sum(kind.recomputed for kind in kinds)
        kept: Alive = {}
        # the running layer's own instant has what it saved
        for kind, number in Counter(kind for kind in kinds[:below] if not kind.recomputed).items():
            kept = merge(kept, times(self.saved[kind], number))
        kept = merge(kept, self._masks({kind.mask for kind in kinds if kind.recomputed}))
        if self.ring and self.plan.padding and self.first_rank and checkpointed:
            # the mask of the rank's own tokens is built and handed to every layer, though ring attention ignores it
            kept = merge(kept, self._masks({"full_attention"}))
        if self.saves_input:
            kept = merge(kept, self._inputs(count - checkpointed))
        on_gpu, offloads = checkpointed, self.plan.offload_activations or self.plan.activation_offloading
        if self.plan.offload_activations:
            ahead = self.plan.offload_prefetch and running and any(kind.recomputed for kind in self.kinds[below:])
            on_gpu = int(ahead and any(kind.recomputed for kind in kinds[:below]))
        elif self.plan.activation_offloading:
            on_gpu = 1 if running else min(checkpointed, stashed)
        # a frozen embedding's output is a leaf of the graph, which stays for its own gradient: else the first layer's
        # input is the same tensor
        if not self.trains_embedding and (offloads or TRAITS[self.spec.model_type].scales_embedding):
            on_gpu += 1
        kept = merge(kept, self._inputs(on_gpu))
        if self.casts_rotary:
            # a layer that interleaves them keeps what it made; as its arguments a checkpoint keeps them
            holders = checkpointed if TRAITS[self.spec.model_type].interleaved_rotary else count
            kept = merge(kept, self.rotary_tables(holders, wide=False))
        if self.plan.activation_checkpointing == "selective" and not self.plan.keeps_attention_on_host:
            # a layer that is not checkpointed has its output among what it saves
            kept = merge(kept, self._kept_outputs(sum(kind.recomputed for kind in kinds[:below])))
        if self.spec.moe is not None and self.spec.moe.has_router_loss:
            kept[moe.router_gradients.key] = moe.router_gradients(
                tokens=self.tokens, num_experts=self.spec.moe.num_experts,
                num_layers=sum(not kind.dense for kind in kinds),
            )  # fmt: skip
        return kept

    def _masks(self, layer_types: set[str | None]) -> Alive:
        """Materialised masks of the layer types named."""
        item, eager = attention.masks, self.plan.attn_implementation == "eager"
        number = len(layer_types - {None})
        own_row = self.plan.max_length // self.plan.cp_size
        size = {"tokens": self.tokens, "row_tokens": own_row, "num_masks": number}
        return {item.key: item(element_bytes=weights.BF16_BYTES if eager else BOOL_BYTES, **size)}

    def _inputs(self, num_layers: int) -> Alive:
        item = activations.layer_inputs
        size = {"tokens": self.tokens, "hidden_size": self.spec.hidden_size, "dtype_bytes": self.compute_bytes}
        return {item.key: item(num_layers=num_layers, **size)}

    def _kept_outputs(self, num_layers: int) -> Alive:
        spec, item = self.spec, attention.kept_outputs
        size = {"tokens": self.tokens, "heads": spec.num_attention_heads, "head_dim": spec.head_dim}
        return {item.key: item(num_layers=num_layers, **size)}

    def _autocast_of(self, num_layers: int) -> Alive:
        """Bf16 copies of float32 weights that layers keep which were not checkpointed."""
        if not self.float32 or self.every is not None:
            return {}
        item = weights.autocast_copies
        return {item.key: item(layer_weight_parameters=num_layers * self._cast_parameters)}

    @property
    def _cast_parameters(self) -> int:
        """Parameters of one layer that autocast copies: all but the norms'."""
        return self.spec.layers[0].attention + 3 * self.spec.hidden_size * self.spec.intermediate_size

    # Gradients

    def gradients(self, done: int, current: int) -> Alive:
        """Gradients of ``done`` parameters, and of ``current`` ones that the running layer has made so far."""
        if self.accumulates and not self.fsdp:
            kept = gradients.accumulated(num_parameters=self.trainable, dtype_bytes=self.gradient_bytes)
            return {gradients.accumulated.key: kept}
        made = gradients.current_layer(num_parameters=current, dtype_bytes=self.compute_bytes)
        alive = {gradients.current_layer.key: made}
        if self.accumulates:
            # FSDP2 reduces in the last micro step only: until a unit's turn its gradients are whole on every rank
            left = gradients.accumulated(num_parameters=self.trainable - done, dtype_bytes=self.compute_bytes)
            alive = {gradients.accumulated.key: left}
        ranks = self.plan.shard_size
        if not self.plan.offload_params:
            per_parameter = self.trained_bytes if self.fsdp else self.gradient_bytes
            alive[gradients.finished.key] = gradients.finished(
                num_parameters=done, dtype_bytes=per_parameter, ranks=ranks
            )
        if self.fsdp and self.plan.dp_replicate_size > 1:
            reduced = gradients.all_reduce_input
            alive[reduced.key] = reduced(num_parameters=done, ranks=ranks)
        return alive

    def tied_head(self) -> Alive:
        """The tied head's gradient while it waits for the embedding's."""
        if not self.holds_tied_head:
            return {}
        item = gradients.tied_head
        return {item.key: item(head_parameters=self.head, dtype_bytes=self.compute_bytes)}

    # Instants

    def forward(self) -> Alive:
        """The forward pass of the model at its largest: in the last layer, or in the loss head."""
        return max(self.forward_instants().values(), key=lambda alive: sum(alive.values()))

    def end_of_layers(self) -> Alive:
        """The forward of the last layer's MLP, or of the final norm behind a layer that keeps what it saves."""
        if self.kinds[-1].recomputed:
            return merge(self._last_layer()["mlp"], self.gradients(done=0, current=0))
        return merge(self._last_layer_that_keeps()["final_norm"], self.gradients(done=0, current=0))

    def forward_instants(self) -> dict[str, Alive]:
        """Those instants of the forward pass that can be its largest, by name."""
        found = self._last_layer() if self.kinds[-1].recomputed else self._last_layer_that_keeps()
        if self.fsdp:
            found["embedding"] = self._first_layer_gathered()
        found["loss"] = self._loss_forward()
        made = self.gradients(done=0, current=0)
        return {name: merge(alive, made) for name, alive in found.items()}

    def _layers_ran(self) -> Alive:
        """What the layers keep when the last of them runs, and what the model's forward itself refers to."""
        kept = self.kept_by_layers(self.layers, running=False)
        alive = merge(self.step_wide(self.layers), kept, self._inputs(self._embedding_outputs()))
        if self.masks - {None}:
            alive |= self._masks(self.masks)
        if self.casts_rotary:
            traits = TRAITS[self.spec.model_type]
            number = len(set(self.spec.layer_types)) if traits.rotary_by_layer_type else 1
            alive = merge(alive, self.rotary_tables(number, wide=True))
        return merge(alive, self._gathered(2, kept=self.layers + 1)) if self.fsdp else alive

    def _embedding_outputs(self) -> int:
        """One where the embedding's output, which the model's forward refers to until its end, is kept by no layer."""
        recomputed = sum(kind.recomputed for kind in self.kinds)
        if self.plan.offload_activations:
            kept = not self.kinds[0].recomputed and self.saves_input
        elif self.plan.activation_offloading:
            kept = recomputed <= activations.TRL_STASHED_TENSORS
        else:
            kept = self.kinds[0].recomputed or self.saves_input
        # a frozen embedding's output is counted where the layers' inputs are
        is_leaf = not self.trains_embedding and not TRAITS[self.spec.model_type].scales_embedding
        if is_leaf and (self.plan.offload_activations or self.plan.activation_offloading):
            return -1 if kept else 0
        return 0 if kept else 1

    def _last_layer(self) -> dict[str, Alive]:
        """Instants of the last layer, which is checkpointed."""
        spec, shape = self.spec, self.shapes[self.kinds[-1]]
        common = self._layers_ran()
        if self.plan.offload_activations and self.layers > 1:
            common = merge(common, self._inputs(1))
        selective = self.plan.activation_checkpointing == "selective"
        own_output = self._kept_outputs(1) if selective else {}
        on_host = self.plan.keeps_attention_on_host
        found = {}
        for name, alive in layer_forward.instants(shape).items():
            at_attention = name in layer_forward.BEFORE_OUTPUT
            # of a layer's float32 weights those are cast that ran
            left = spec.hidden_size * spec.intermediate_size * (3 if at_attention else 1)
            found[name] = merge(common, alive, self._casts_in_forward(left))
            if at_attention and not on_host:
                found[name] = merge(found[name], times(own_output, -1))  # not there yet
            elif on_host and not at_attention:
                found[name] = merge(found[name], own_output)  # on its way to the host
        return found

    def _casts_in_forward(self, left: int) -> Alive:
        """Bf16 copies that autocast keeps until the forward ends, but for ``left`` parameters that have yet to run."""
        if self.float32:
            item = weights.autocast_copies
            return {item.key: item(layer_weight_parameters=self.layers * self._cast_parameters - left)}
        if self.frozen and not (self.fsdp or self.quantised):
            casts = lora.weight_casts
            down = {name: sides for name, sides in self.targets.items() if name == "down_proj"}
            waiting = lora.adapter_parameters(down, self.plan.lora_r or 0) if left else 0
            return {casts.key: casts(layer_parameters=self.trainable - waiting)}
        return {}

    def _last_layer_that_keeps(self) -> dict[str, Alive]:
        """Instants of a last layer that is not checkpointed, and of the final norm behind it."""
        norm, fused = loss_head.final_norm_forward, loss_head.fused_norm_forward
        size = {"tokens": self.tokens, "hidden_size": self.spec.hidden_size}
        wide, kept = TRAITS[self.spec.model_type].wide_norms, self.saved[self.kinds[-1]]
        last = {norm.key: norm(wide=wide, float32=self.float32, **size)}
        if self.fused:
            last = {fused.key: fused(**size)}
        own = layer_forward.instants_that_keep(self.shapes[self.kinds[-1]]) | {"final_norm": merge(kept, last)}
        common = merge(self._layers_ran(), times(kept, -1), self._casts_in_forward(0))
        return {name: merge(common, alive) for name, alive in own.items()}

    def _first_layer_gathered(self) -> Alive:
        """The first layer's weights, the second's on their way, and the embedding's table, which has just been used."""
        alive = merge(self.step_wide(self.layers), self._gathered(2, kept=2), self._inputs(1))
        # a tied table is whole twice: in the buffer that it was gathered into, and out of it for the whole step
        return merge(alive, self._gathered_head()) if self.tied else alive | self._gathered_embedding()

    def _loss_forward(self) -> Alive:
        """Forward of the loss head; that of TRL 1.13's loss in chunks is its norm alone."""
        spec, tokens = self.spec, self.tokens
        alive = merge(self._at_the_head(frozen=self.frozen), self._casts_in_forward(0))
        if self.fsdp:
            alive = merge(alive, self._gathered_at_the_loss())
        size = {"hidden_size": spec.hidden_size, "dtype_bytes": self.compute_bytes}
        if self.plan.loss == "full":
            full = loss_head.full_logits_forward
            alive[full.key] = full(tokens=tokens, vocab_size=spec.vocab_size, **size)
        elif self.plan.loss == "chunked":
            item, scored = loss_head.forward, math.ceil(tokens * self.plan.scored_fraction)
            alive[item.key] = item(tokens=tokens, scored=scored, **size)
            alive[loss_head.logits_tile.key] = loss_head.logits_tile(tokens=scored)
            if self.float32:
                cast = loss_head.casts_forward
                alive[cast.key] = cast(tokens=tokens, hidden_size=spec.hidden_size, vocab_size=spec.vocab_size)
        return alive

    def _at_the_head(self, *, frozen: bool) -> Alive:
        """What the layers keep when all ran, and what the final norm saves; a ``frozen`` one saves less."""
        tokens, hidden = self.tokens, self.spec.hidden_size
        kept = self.kept_by_layers(self.layers, running=False, stashed=0)
        alive = merge(self.step_wide(self.layers), kept)
        norm, fused = loss_head.final_norm, loss_head.fused_norm
        wide = self.float32 or TRAITS[self.spec.model_type].wide_norms
        if self.fused:
            alive[fused.key] = fused(tokens=tokens, hidden_size=hidden)
        else:
            alive[norm.key] = norm(tokens=tokens, hidden_size=hidden, float32=wide, frozen=frozen)
        return alive

    def loss(self) -> Alive:
        """Backward of the loss head."""
        spec = self.spec
        hidden, vocab, tokens = spec.hidden_size, spec.vocab_size, self.tokens
        # by then TRL's offloading has sent away all layer inputs and the normed value: the head's own tensors wait
        alive = self._at_the_head(frozen=self.frozen or self.plan.activation_offloading)
        if self.fsdp:
            alive |= self._gathered_at_the_head()
        if self.plan.loss == "full":
            full = loss_head.full_logits
            alive[full.key] = full(tokens=tokens, vocab_size=vocab, hidden_size=hidden)
        elif self.plan.loss == "chunked-256":
            chunks = loss_head.chunks_of_rows
            alive[chunks.key] = chunks(tokens=tokens, vocab_size=vocab, hidden_size=hidden)
        else:
            scored = math.ceil(tokens * self.plan.scored_fraction)
            alive[loss_head.hidden_states.key] = loss_head.hidden_states(tokens=scored, hidden_size=hidden)
            if self.trains_head:
                gradient = loss_head.weight_gradient
                alive[gradient.key] = gradient(vocab_size=vocab, hidden_size=hidden, float32=self.float32)
            alive[loss_head.logits_tile.key] = loss_head.logits_tile(tokens=scored)
            if self.float32:
                alive[loss_head.casts.key] = loss_head.casts(tokens=tokens, hidden_size=hidden, vocab_size=vocab)
        return merge(alive, self._autocast_of(self.layers), self.gradients(done=0, current=0))

    def final_norm(self) -> Alive:
        """Backward of the final norm, when the head's gradient is there."""
        spec, norm = self.spec, loss_head.fused_norm_backward if self.fused else loss_head.final_norm_backward
        alive = merge(self.step_wide(self.layers), self.kept_by_layers(self.layers, running=False, stashed=0))
        alive = merge(alive, self._autocast_of(self.layers))
        alive[norm.key] = norm(tokens=self.tokens, hidden_size=spec.hidden_size)
        if self.fsdp:
            alive |= self._gathered_at_the_head()
        made = 0 if self.holds_tied_head or not self.trains_head else spec.vocab_size * spec.hidden_size
        return merge(alive, self.gradients(done=0, current=made), self.tied_head())

    def backward(self, index: int, instant: LayerInstant) -> Alive:
        """One instant of the backward of layer ``index``."""
        done = self.trainable_above[index + 1]
        done += 0 if self.holds_tied_head else self.trainable_head
        alive = merge(self._beside(index), self.gradients(done, instant.made), self.tied_head(), instant.alive)
        return merge(alive, self._fsdp_buffers(index)) if self.fsdp else alive

    def _beside(self, index: int) -> Alive:
        """What is there in the backward of layer ``index`` beside gradients and what the layer has itself."""
        return merge(self.step_wide(index + 1), self.kept_by_layers(index + 1, running=True), self._autocast_of(index))

    def _fsdp_buffers(self, index: int) -> Alive:
        """Gathered weights of this layer and the prefetched unit, and the last unit's gradients."""
        alive = self._gathered(2 if index > 0 else 1, kept=index + 1)
        if index == 0 and not self.tied and self.plan.reshard_after_forward:
            alive |= self._gathered_embedding()
        above = index + 1
        previous_unit = (
            self.trainable_layers[above] if above < self.layers else (0 if self.tied else self.trainable_head)
        )
        scatter = gradients.reduce_scatter_input
        return alive | {scatter.key: scatter(unit_parameters=previous_unit)}

    def _gathered(self, num_layers: int, *, kept: int) -> Alive:
        """Whole weights of ``num_layers`` decoder layers, or of ``kept`` ones where none is freed early."""
        item, packed = weights.gathered_layers, weights.gathered_nf4_layers
        if not self.plan.reshard_after_forward:
            num_layers = kept
        linears = _linear_parameters(self.spec) // self.layers if self.quantised else 0
        alive = {item.key: item(layer_parameters=self.layer - linears, num_layers=num_layers)}
        if self.quantised:
            alive[packed.key] = packed(linear_parameters=linears, num_layers=num_layers)
        return alive

    def _gathered_head(self) -> Alive:
        item = weights.gathered_head
        return {item.key: item(head_parameters=self.head)}

    def _gathered_after_forward(self, *, prefetched: int) -> Alive:
        return self._gathered_head() | self._gathered(prefetched, kept=self.layers)

    def _gathered_at_the_loss(self) -> Alive:
        """In the loss's forward the head and the buffer that it was gathered into, or still the last layer's buffer."""
        if self.tied:
            return self._gathered(1, kept=self.layers + 1)
        if self.frozen:
            return merge(self._gathered_head(), self._gathered(1, kept=self.layers + 1))
        return merge(self._gathered_head(), self._gathered_head(), self._gathered(0, kept=self.layers))

    def _gathered_at_the_head(self) -> Alive:
        # accelerate does not find peft's final norm: it stays with the root, which prefetches the last layer
        return self._gathered_after_forward(prefetched=1 if self.frozen else 0)

    def _gathered_embedding(self) -> Alive:
        item = weights.gathered_embedding
        return {item.key: item(embedding_parameters=self.spec.embedding_parameters)}

    def embedding_backward(self) -> Alive:
        """Backward of the token embedding."""
        spec, tokens = self.spec, self.tokens
        done = self.trainable_above[0] + (0 if self.holds_tied_head else self.trainable_head)
        table = gradients.embedding(embedding_parameters=spec.embedding_parameters, dtype_bytes=self.compute_bytes)
        incoming = activations.residual(
            tokens=tokens, hidden_size=spec.hidden_size, dtype_bytes=self.compute_bytes, copies=1
        )
        alive = merge(self.step_wide(1), self.gradients(done, current=0), self.tied_head())
        alive = merge(alive, {activations.residual.key: incoming})
        alive.pop(activations.rotary_tables.key, None)
        if self.trains_embedding:
            alive[gradients.embedding.key] = table
            sums = gradients.embedding_partial_sums
            alive[sums.key] = sums(tokens=tokens, vocab_size=spec.vocab_size, hidden_size=spec.hidden_size)
        if self.fsdp:
            scatter = gradients.reduce_scatter_input
            alive[scatter.key] = scatter(unit_parameters=self.trainable_layers[0])
            if not self.tied:
                # copied out of the flat buffer first, whose place a trained table's gradient takes
                alive |= {key: size * (2 if self.frozen else 1) for key, size in self._gathered_embedding().items()}
        return alive

    def optimizer_step(self) -> Alive:
        """All gradients and the optimizer's own temporaries."""
        plan = self.plan
        alive = merge(self.states, self.gradients(self.trainable, current=0))
        if self.ring:
            whole = activations.context_parallel_buffers
            rows = plan.per_device_train_batch_size
            alive[whole.key] = whole(sequence_tokens=plan.max_length, rows=rows, tokens_per_rank=0)
        if plan.optim == "adamw_torch" and not plan.offload_params:
            item = optimizer.foreach_temporary
            alive[item.key] = item(num_parameters=self.trainable, dtype_bytes=self.trained_bytes, ranks=plan.shard_size)
        if plan.optim == "adafactor":
            alive[optimizer.adafactor_update.key] = optimizer.adafactor_update(largest_parameter=self._largest_matrix())
        if plan.optim == "adamw_torch_8bit":
            update = optimizer.torchao_update
            alive[update.key] = update(largest_parameter=self._largest_matrix(), ranks=plan.shard_size)
        return alive

    def _largest_matrix(self) -> int:
        """Parameters of the largest matrix that is trained."""
        tables = (self.trains_embedding, self.trains_head and not self.tied)
        shapes = self.spec.matrix_shapes()
        layers = shapes[: len(shapes) - (1 if self.tied else 2)]
        trained = layers + shapes[len(layers) : len(layers) + sum(tables)]
        return max(rows * columns for rows, columns in trained)

    def evaluation(self) -> dict[str, Alive]:
        """Forward passes over evaluation rows, whole sequences on every rank, where the plan asks for them."""
        spec, rows, length = self.spec, self.plan.per_device_eval_batch_size, self.plan.max_length
        if rows is None:
            return {}
        batch, positions, tables = activations.batch, activations.positions, activations.rotary_tables
        tables_bytes = tables(tokens=length, head_dim=spec.head_dim, dtype_bytes=weights.BF16_BYTES)
        common = merge(self.states, {batch.key: batch(tokens=rows * length, micro_batches=1)})
        in_layer = merge(common, {positions.key: positions(tokens=length), tables.key: tables_bytes})
        if self.fsdp:
            in_layer = merge(in_layer, self._gathered(2, kept=self.layers))
            common = merge(common, self._gathered_after_forward(prefetched=0))
            if self.tied:
                in_layer[weights.gathered_head.key] = weights.gathered_head(head_parameters=self.head)
        return {
            phase: merge(common if phase == evaluation.LOSS else in_layer, alive)
            for phase, alive in evaluation.instants(spec, rows * length).items()
        }

    def save(self) -> Alive:
        """Saving the trained model: FSDP2 gathers one parameter after another on every rank."""
        alive = dict(self.states)
        if self.fsdp:
            spec, item = self.spec, evaluation.gathered_parameter
            widest = max(spec.vocab_size, spec.intermediate_size)
            alive[item.key] = item(largest_parameter=widest * spec.hidden_size)
        return alive


def _linear_parameters(spec: ModelSpec) -> int:
    """Weights of all linears of the decoder layers, which nf4 packs; head, embedding and norms stay bf16."""
    tables = 1 if spec.tie_word_embeddings else 2
    return sum(rows * columns for rows, columns in spec.matrix_shapes()[:-tables])


def state_bytes(plan: TrainPlan) -> int:
    """Bytes of one weight or moment: FSDP2 upcasts trainable weights whatever they were loaded in."""
    float32 = plan.backend == "fsdp2" or plan.dtype == "float32"
    return weights.FP32_BYTES if float32 else weights.BF16_BYTES


def on_top(plan: TrainPlan, peak_allocated_bytes: int) -> Alive:
    """What lies on top of the allocated peak; with it the sum is the device peak."""
    alive = {
        runtime.cuda_context.key: runtime.cuda_context(),
        runtime.allocator_slack.key: runtime.allocator_slack(peak_allocated_bytes=peak_allocated_bytes),
    }
    return alive | {runtime.nccl.key: runtime.nccl(ulysses=plan.sp_size > 1)} if plan.num_gpus > 1 else alive


def candidate_ranks(spec: ModelSpec, plan: TrainPlan) -> tuple[int, ...]:
    """Ranks of which one holds the most.

    The ring's first rank runs kernels of another shape than the others, which all run the same; the last alone keeps no
    second copy of the attention output, so it never holds more than the one before it. Under ZeRO stages 1 and 2 a rank
    holds whole gradients of what its partition cuts: both ends, and where the tables end and begin.
    """
    if plan.backend == "deepspeed" and plan.zero_stage != 3:
        each = ceil_div(spec.num_parameters, plan.shard_size)
        table, last = spec.vocab_size * spec.hidden_size, plan.shard_size - 1
        edges = (table // each, (spec.num_parameters - table) // each)
        near = {rank for edge in edges for rank in (edge - 1, edge, edge + 1)}
        return tuple(sorted({0, last} | {rank for rank in near if 0 <= rank <= last}))
    return (0, 1) if plan.cp_size > 1 else (0,)
