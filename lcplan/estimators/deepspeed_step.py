"""One training step under DeepSpeed ZeRO: activations are those of one GPU, states and gradients are DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial

from lcplan.estimators import activations, attention, deepspeed, loss_head, optimizer, runtime, weights
from lcplan.estimators import deepspeed_order as order
from lcplan.estimators.formula import Step
from lcplan.estimators.layer import Alive, LayerInstant, LayerShape, merge, saved
from lcplan.estimators.layer import instants as layer_instants
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan
from lcplan.units import ceil_div


class ZeroStep(Step):
    """What the instants of a step under ZeRO stage 1, 2 or 3 hold on one rank."""

    def __init__(self, spec: ModelSpec, plan: TrainPlan, rank: int) -> None:
        super().__init__(spec, plan, rank)
        self.rank, self.ranks, self.stage = rank, plan.shard_size, plan.zero_stage
        self.sizes = order.parameters(spec)
        # Ulysses reduces gradients in float32
        self.reduced_bytes = weights.FP32_BYTES if plan.sp_size > 1 else weights.BF16_BYTES
        self.backward_order = order.arrivals(self.sizes, self.layers)
        self.filled = {arrival.name: arrival for arrival in order.fill_buckets(self._reduction_order(), self.sizes)}
        self.gathered = order.gathered(self.sizes, self.layers, self.ranks) if self.stage == 3 else {}

    def _reduction_order(self) -> tuple[str, ...]:
        """Stage 1 reduces after the backward, group by group in model order."""
        if self.stage != 1:
            return self.backward_order
        return tuple(sorted(self.sizes, key=lambda name: not self.sizes[name].decays))

    @cached_property
    def owners(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Pieces of every parameter by rank (stages 1 and 2)."""
        return order.pieces(self.sizes, self.ranks)

    @cached_property
    def own(self) -> dict[str, int]:
        """Elements of each parameter that lie in this rank's partition, where any do."""
        cut = {name: sum(n for rank, n in pieces if rank == self.rank) for name, pieces in self.owners.items()}
        return {name: elements for name, elements in cut.items() if elements}

    # States

    @cached_property
    def states(self) -> Alive:
        """Weights, masters, moments, and the buffers that DeepSpeed keeps; workspaces and the batch."""
        plan, parameters = self.plan, self.spec.num_parameters
        alive = {runtime.cublas_workspace.key: runtime.cublas_workspace()}
        if plan.sp_size > 1:
            batch = deepspeed.ulysses_batch
            alive[batch.key] = batch(sequence_tokens=plan.max_length, tokens_per_rank=self.tokens)
        else:
            alive[activations.batch.key] = activations.batch(tokens=self.tokens, micro_batches=1)
        if not plan.offload_params:
            kept, shards = weights.parameters, self.ranks if self.stage == 3 else 1
            alive[kept.key] = kept(num_parameters=parameters, dtype_bytes=weights.BF16_BYTES, ranks=shards)
        if not plan.offload_optimizer:
            master, moments = deepspeed.master_weights, optimizer.adamw_states
            alive[master.key] = master(num_parameters=parameters, ranks=self.ranks)
            alive[moments.key] = moments(num_parameters=parameters, dtype_bytes=weights.FP32_BYTES, ranks=self.ranks)
        if self.stage == 3:
            small = sum(p.numel for p in self.sizes.values() if p.numel <= order.PERSISTENCE_THRESHOLD)
            alive[deepspeed.persistent.key] = deepspeed.persistent(elements=small)
            alive |= self._bucket()
            if not plan.offload_optimizer:
                kept_gradients = deepspeed.gradient_shards
                alive[kept_gradients.key] = kept_gradients(num_parameters=parameters, ranks=self.ranks)
        elif plan.offload_optimizer:
            largest = max(p.numel for p in self.sizes.values())
            alive[deepspeed.offload_buffer.key] = deepspeed.offload_buffer(largest_parameter=largest)
        return alive

    def _bucket(self) -> Alive:
        return {deepspeed.bucket.key: deepspeed.bucket(dtype_bytes=self.reduced_bytes)}

    # Gradients and gathered parameters

    def gradients(self, done: int, current: int) -> Alive:
        """None by count: what of them is there depends on the moment, see ``at``."""
        del done, current
        return {}

    def at(self, moment: str, *, after: str) -> Alive:
        """Gathered parameters at ``moment``, and gradients when that of ``after`` is the last that arrived."""
        alive = self._gathered_at(moment)
        item, arrived = deepspeed.own_gradients, self.backward_order[: self.backward_order.index(after) + 1]
        held = self._elements(arrived) if self.stage == 1 else self._oversize(after)
        if self.tied:
            held += self.sizes[order.EMBEDDING].numel
        if self.stage == 2 and self._is_allocated(after):
            alive |= self._partition_gradients()
        return merge(self._moving_bucket(), alive, {item.key: item(elements=held)})

    def _gathered_at(self, moment: str) -> Alive:
        item = deepspeed.gathered
        return {item.key: item(elements=self.gathered[moment])} if self.stage == 3 else {}

    def _moving_bucket(self) -> Alive:
        """The bucket where it is not resident."""
        return {} if self.stage == 3 else self._bucket()

    def _elements(self, names: Iterable[str]) -> int:
        return sum(self.sizes[name].numel for name in names)

    def _oversize(self, name: str) -> int:
        """Elements of a gradient above the bucket's size, which keeps its memory while it is the last to have come."""
        return self.sizes[name].numel if self.sizes[name].numel > order.REDUCE_BUCKET else 0

    def _partition_gradients(self) -> Alive:
        item = deepspeed.partition_gradients
        return {item.key: item(elements=self._elements(self.own))}

    @cached_property
    def _allocating(self) -> str | None:
        """Arrival that pushes out the first gradient of this rank's partition (stages 1 and 2)."""
        if self.stage == 3 or self.plan.offload_optimizer:
            return None
        held = set(self.own)
        return next((name for name, arrival in self.filled.items() if not held.isdisjoint(arrival.reduced)), None)

    def _is_allocated(self, after: str) -> bool:
        if self._allocating is None:
            return False
        names = list(self.filled)
        return names.index(self._allocating) <= names.index(after)

    # Reductions

    def reductions(self) -> dict[str, Alive]:
        """Everything alive while a full bucket is reduced, for each arrival that fills it."""
        found: dict[str, Alive] = {}
        for name, arrival in self.filled.items():
            if not arrival.reduced:
                continue
            common = merge(self._around(name), self._moving_bucket(), self._gathered_at(name))
            own = deepspeed.own_gradients
            common = merge(common, {own.key: own(elements=arrival.waiting + self._not_moved(name))})
            states = [merge(common, temporary) for temporary in self._reduction_temporaries(name, arrival)]
            found[name] = max(states, key=lambda alive: sum(alive.values()))
        return found

    def _not_moved(self, name: str) -> int:
        """Elements of gradients with memory of their own when ``name`` arrives, that arrival's included."""
        if self.stage == 1:
            names = list(self.filled)
            position = names.index(name)
            left_behind = [one for one in names[:position] if self._oversize(one) and one not in self.own]
            waiting = self.filled[name].reduced
            return self._elements(names[position:-1]) + self._elements(one for one in left_behind if one not in waiting)
        held = 0 if name == order.END else self.sizes[name].numel
        if self.tied and name not in (order.EMBEDDING, order.END):
            held += self.sizes[order.EMBEDDING].numel
        return held

    def _reduction_temporaries(self, name: str, arrival: order.Arrival) -> list[Alive]:
        """What comes and goes while a bucket is reduced: each entry is one instant."""
        item = deepspeed.reduction
        if self.stage == 3:
            scattered = self._scatter(arrival)
            if not self.plan.offload_optimizer:
                return [scattered]
            back = deepspeed.offloaded_slice
            largest = max(ceil_div(self.sizes[one].numel, self.ranks) for one in arrival.reduced)
            slices = {back.key: back(elements=largest, returns=True)}
            if self.reduced_bytes == weights.BF16_BYTES:
                return [merge(scattered, slices)]  # the slices are views of the flat copy
            elements = self._elements(arrival.reduced)
            cast = item(copies=0, elements=elements, dtype_bytes=self.reduced_bytes, ranks=self.ranks)
            return [scattered, {item.key: cast} | slices]
        copied = order.reduction_copy(arrival.reduced, self.owners)
        copy = {item.key: item(copies=1, elements=copied, dtype_bytes=weights.BF16_BYTES, ranks=self.ranks)}
        if self.plan.offload_optimizer:
            away = deepspeed.offloaded_slice
            largest = max((self.own[one] for one in arrival.reduced if one in self.own), default=0)
            return [copy, {away.key: away(elements=largest, returns=False)}]
        if name == self._allocating:
            return [copy, self._partition_gradients()]
        return [merge(copy, self._partition_gradients() if self._is_allocated(name) else {})]

    def _scatter(self, arrival: order.Arrival) -> Alive:
        """Flat copies of stage 3's reduce-scatter: none for a single gradient that divides evenly."""
        item, elements = deepspeed.reduction, self._elements(arrival.reduced)
        alone = len(arrival.reduced) == 1 and elements % self.ranks == 0
        copies = (0 if alone else 1) + (1 if arrival.waiting and self.reduced_bytes != weights.BF16_BYTES else 0)
        return {item.key: item(copies=copies, elements=elements, dtype_bytes=self.reduced_bytes, ranks=self.ranks)}

    def _around(self, name: str) -> Alive:
        """States, and activations when the gradient of ``name`` has just arrived."""
        if self.stage == 1 or name in (order.END, order.EMBEDDING):
            return self.states
        if name == order.FINAL_NORM:
            item = loss_head.final_norm
            own = {item.key: item(tokens=self.tokens, hidden_size=self.spec.hidden_size, float32=False, frozen=False)}
            return merge(self.step_wide(self.layers), self.kept_by_layers(self.layers, running=False), own)
        index, _, module = name.partition(".")
        alive = merge(self.step_wide(int(index) + 1), self.kept_by_layers(int(index) + 1, running=True))
        return merge(alive, gradient_hook(self.shapes[self.kinds[0]], module, hooked=self.stage == 3))

    # Phases

    def phases(self) -> dict[str, Callable[[], Alive]]:
        """Items alive in each phase; of the layers those that hold most, beside the first and last."""
        result = {
            "forward": self.forward(),
            "loss": merge(self.loss(), self._gathered_at("loss")),
            "final_norm": merge(self.final_norm(), self.at(order.FINAL_NORM, after=order.FINAL_NORM)),
        }
        layers: dict[str, Alive] = {}
        for instant in self.own_instants(0):  # all layers are alike
            every = {index: self.backward(index, instant) for index in reversed(range(self.layers))}
            worst = max(every, key=lambda index: sum(every[index].values()))
            for index in sorted({*self.layers_that_can_peak(), worst}, reverse=True):
                layers[f"backward[{index}].{instant.name}"] = every[index]
        result |= layers
        result["backward.embedding"] = self.embedding_backward()
        reduced = self.reductions()
        result["backward.reduction"] = max(reduced.values(), key=lambda alive: sum(alive.values()))
        result["gradient_norm"] = self.gradient_norm()
        result["optimizer_step"] = self.optimizer_step()
        return {phase: partial(dict, alive) for phase, alive in result.items()}

    def forward_instants(self) -> dict[str, Alive]:
        """Those instants of the forward pass that can be its largest, with what is gathered at them."""
        last = f"forward.{self.layers - 1}"
        return {
            name: merge(alive, self._gathered_at("loss" if name == "loss" else last))
            for name, alive in super().forward_instants().items()
        }

    def backward(self, index: int, instant: LayerInstant) -> Alive:
        """One instant of the backward of layer ``index``."""
        moment, done = {
            "mlp": (f"mlp.{index}", "down_proj"),
            "attention": (f"attention.{index}", "o_proj"),
            "query_norm": (f"{index}.q_norm", "k_proj"),
        }[instant.name]
        return merge(super().backward(index, instant), self.at(moment, after=f"{index}.{done}"))

    def embedding_backward(self) -> Alive:
        """Backward of the token embedding."""
        before = self.at(order.EMBEDDING, after=self.backward_order[-2])
        return merge(super().embedding_backward(), before)

    def gradient_norm(self) -> Alive:
        """Norm of this rank's gradients; with the optimizer on the host it was taken as they left."""
        if self.plan.offload_optimizer:
            return self.states
        item = deepspeed.norm
        if self.stage == 3:
            largest = max(ceil_div(p.numel, self.ranks) for p in self.sizes.values())
            return merge(self.states, {item.key: item(largest_slice=largest)})
        largest = max(self.own.values(), default=0)  # a rank of a tiny model may hold padding alone
        return merge(self.states, self._partition_gradients(), {item.key: item(largest_slice=largest)})

    def optimizer_step(self) -> Alive:
        """The update of what is updated at once."""
        if self.plan.offload_optimizer:
            return self.states
        item = deepspeed.float32_gradient
        if self.stage == 3:
            groups = order.sub_groups(self.sizes, self.ranks)
            largest = max(item(elements=elements, slices=count) for elements, count in groups)
            return merge(self.states, {item.key: largest})
        slices = sum(self.sizes[name].decays for name in self.own)
        largest = item(elements=order.partition_size(self.sizes, self.ranks, decays=True), slices=slices)
        return merge(self.states, self._partition_gradients(), {item.key: largest})


def gradient_hook(shape: LayerShape, module: str, *, hooked: bool) -> Alive:
    """Activations of a layer when the weight gradient of ``module`` has just arrived.

    With ``hooked`` modules (stage 3) it arrives before the gradients of gate's and up's common input are added up.
    """
    residual, saved_mlp = activations.residual, activations.mlp_saved
    size = {"tokens": shape.tokens, "hidden_size": shape.spec.hidden_size, "dtype_bytes": weights.BF16_BYTES}
    alive = saved(shape)
    if module == "down_proj":
        return merge(alive, {residual.key: residual(copies=1, **size)})  # the product is gone, its gradient is there
    if module == "up_proj":
        # gate's output and the activation's gradient are left of four; the normed input's gradient is there
        return merge(alive | {saved_mlp.key: alive[saved_mlp.key] // 2}, {residual.key: residual(copies=2, **size)})
    if module in ("gate_proj", "post_attention_layernorm"):
        # the second norm's output is gone, so that one gradient of it is not counted
        return merge(alive | {saved_mlp.key: 0}, {residual.key: residual(copies=2 if hooked else 1, **size)})
    # before attention's backward the gradient of its output is there; after it the gradients of q, k and v are less
    incoming = attention.output_copy(
        tokens=shape.tokens, heads=shape.spec.num_attention_heads, head_dim=shape.spec.head_dim
    )
    by_name = {instant.name: instant for instant in layer_instants(shape)}
    return by_name["attention"].alive | {attention.backward.key: incoming}
