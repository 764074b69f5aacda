"""Host memory that a plan needs: what a rank pins and keeps there while it trains, and a node while the job loads."""

from __future__ import annotations

from dataclasses import dataclass

from lcplan.estimators import deepspeed_order, host, lora, optimizer, weights
from lcplan.estimators.formula import Step, state_bytes
from lcplan.estimators.layer import Alive
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan
from lcplan.units import ceil_div


def host_items(spec: ModelSpec, plan: TrainPlan) -> Alive:
    """Host bytes of one rank (pinned blocks, optimizer states), and of one node while the job loads."""
    float32 = plan.dtype == "float32" and plan.backend != "fsdp2"
    size = weights.FP32_BYTES if float32 else weights.BF16_BYTES
    checkpointed = ceil_div(spec.num_hidden_layers, plan.checkpoint_every_n_layers)
    offloads = plan.offload_activations or plan.activation_offloading
    alive = {
        host.pinned_layer_inputs.key: host.pinned_layer_inputs(
            num_layers=checkpointed if offloads and not plan.offloads_by_itself else 0,
            tokens=plan.tokens_per_rank,
            hidden_size=spec.hidden_size,
            dtype_bytes=size,
        )
    }
    if plan.offloads_by_itself:
        alive[host.pinned_kept_layers.key] = host.pinned_kept_layers(
            num_layers=checkpointed,
            tokens=plan.tokens_per_rank,
            hidden_size=spec.hidden_size,
            heads=spec.num_attention_heads if plan.keeps_attention_on_host else 0,
            head_dim=spec.head_dim,
            dtype_bytes=size,
        )
    if plan.backend == "deepspeed":
        alive |= _zero_on_host(spec, plan)
    elif plan.offload_params:
        shards = tuple(rows * columns for rows, columns in spec.matrix_shapes())
        alive[host.pinned_shards.key] = host.pinned_shards(parameters=shards, ranks=plan.shard_size)
        alive[host.optimizer_states.key] = host.optimizer_states(
            num_parameters=spec.num_parameters, ranks=plan.shard_size
        )
    if plan.optim.startswith("paged"):
        alive[host.paged_states.key] = _paged_states(spec, plan)
    load = host.load_copies(
        num_parameters=spec.num_parameters,
        dtype_bytes=state_bytes(plan),
        copies=min(plan.num_gpus, plan.gpus_per_node) if plan.backend in ("ddp", "deepspeed") else 1,
    )
    return alive | {host.load_copies.key: load}


def _zero_on_host(spec: ModelSpec, plan: TrainPlan) -> Alive:
    """What DeepSpeed keeps of a rank's states on the host: gradients and copies pinned, moments not."""
    if not plan.offload_optimizer:
        return {}
    ranks, stage3 = plan.shard_size, plan.zero_stage == 3
    sizes = deepspeed_order.parameters(spec)
    if stage3:
        updated = tuple(count for count, _ in deepspeed_order.sub_groups(sizes, ranks))
    else:
        updated = tuple(deepspeed_order.partition_size(sizes, ranks, decays=decays) for decays in (True, False))
    pinned = host.zero_pinned_gradients
    alive = {pinned.key: pinned(updated=updated, masters_too=not stage3)}
    copies, moments = host.zero_pinned_copies, host.optimizer_states
    numels = tuple(p.numel for p in sizes.values())
    if stage3:
        whole: tuple[int, ...] = (ceil_div(sum(numels), ranks),)
        if plan.offload_params:
            whole += tuple(deepspeed_order.shard_size(sizes, ranks, decays=decays) for decays in (True, False))
            whole += tuple(ceil_div(numel, ranks) for numel in numels)
        alive[host.zero_masters.key] = host.zero_masters(num_parameters=spec.num_parameters, ranks=ranks)
    else:
        whole = (*updated, max(numels))
    alive[copies.key] = copies(buffers=whole)
    return alive | {moments.key: moments(num_parameters=spec.num_parameters, ranks=ranks)}


def _paged_states(spec: ModelSpec, plan: TrainPlan) -> int:
    step = Step(spec, plan, rank=0)
    small = lora.small_adapter_parameters(step.targets, plan.lora_r or 0, optimizer.PAGED_FROM)
    paged = step.trainable - small * step.layers
    wide = paged if plan.optim == "paged_adamw_32bit" else spec.embedding_parameters if step.trains_embedding else 0
    return host.paged_states(narrow_parameters=paged - wide, wide_parameters=wide)


@dataclass(frozen=True)
class HostNeed:
    """Host memory of one node, from the items of one rank."""

    pinned_bytes_per_rank: int
    other_bytes_per_rank: int
    load_bytes_per_node: int
    ranks_per_node: int

    @property
    def bytes_per_node(self) -> int:
        """The most that a node holds: while it loads, or while all of its ranks train."""
        training = (self.pinned_bytes_per_rank + self.other_bytes_per_rank) * self.ranks_per_node
        return max(training, self.load_bytes_per_node)


def host_need(spec: ModelSpec, plan: TrainPlan) -> HostNeed:
    """Host memory that the plan needs."""
    items = host_items(spec, plan)
    return HostNeed(
        pinned_bytes_per_rank=sum(items.get(item.key, 0) for item in host.PINNED),
        other_bytes_per_rank=sum(items.get(item.key, 0) for item in host.PAGEABLE),
        load_bytes_per_node=items[host.load_copies.key],
        ranks_per_node=min(plan.num_gpus, plan.gpus_per_node),
    )
