"""What upstream ignores without a word, made into errors.

A launcher that starts one process where eight were planned, a sharding that was not applied, a sequence that
was not cut: each still trains, and its memory says nothing about the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from first_step import first_layer
from transformers import TrainerCallback

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class JobError(Exception):
    """The plan and this machine or its versions do not go together; the message says what to change."""


DISTRIBUTED_TYPES = {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}
"""accelerate's name for what each backend launches; DDP on the CPU is MULTI_CPU."""
PARALLEL_SIZES = ("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size")


def check_layout(accelerator: Any, plan: dict[str, Any], *, on_cpu: bool) -> None:
    """The launcher set up what the plan says: the kind, the number of processes, the sizes of the mesh, the stage."""
    backend = plan["backend"]
    kind = "MULTI_CPU" if on_cpu and backend == "ddp" else DISTRIBUTED_TYPES[backend]
    pairs = {
        "distributed_type": (accelerator.distributed_type.value, kind),
        "num_gpus": (accelerator.num_processes, plan["num_gpus"]),
    }
    if backend == "fsdp2" or plan["sp_size"] > 1:
        parallel = accelerator.parallelism_config
        pairs |= {name: (getattr(parallel, name, 1), plan[name]) for name in PARALLEL_SIZES}
    zero = accelerator.deepspeed_plugin if accelerator.distributed_type.value == "DEEPSPEED" else None
    if zero is not None:
        pairs |= {
            "zero_stage": (zero.zero_stage, plan["zero_stage"]),
            "offload_optimizer": (zero.offload_optimizer_device == "cpu", plan["offload_optimizer"]),
            "offload_params": (zero.offload_param_device == "cpu", plan["offload_params"]),
        }
    wrong = [f"{key} is {found}, planned {planned}" for key, (found, planned) in pairs.items() if found != planned]
    if backend == "fsdp2" and not accelerator.is_fsdp2:
        wrong.append("FSDP is not version 2")
    if wrong:
        raise JobError(f"the launcher did not set up the plan: {'; '.join(wrong)}. Use the README's command.")


class Held(NamedTuple):
    """Elements that a rank holds, and how many there are on all."""

    held: int
    whole: int


def check_shards(model: torch.nn.Module, shard_size: int) -> Held:
    """Under FSDP2 a rank holds its share of every parameter, and no more."""
    from torch.distributed.tensor import DTensor

    total = held = 0
    for name, weight in model.named_parameters():
        if not isinstance(weight, DTensor):
            raise JobError(f"{name} is not sharded: accelerate did not apply FSDP2.")
        share = -(-weight.shape[0] // shard_size) * (weight.numel() // weight.shape[0])
        held += _held(weight.to_local().numel(), share, name)
        total += weight.numel()
    return Held(held, total)


def check_zero3_shards(model: torch.nn.Module, shard_size: int) -> Held:
    """Under ZeRO-3 a rank holds its share of every parameter."""
    total = held = 0
    for name, weight in model.named_parameters():
        if not hasattr(weight, "ds_tensor"):
            raise JobError(f"{name} is not sharded: DeepSpeed did not apply ZeRO-3.")
        held += _held(weight.ds_tensor.ds_numel, -(-weight.ds_numel // shard_size), name)
        total += weight.ds_numel
    return Held(held, total)


def check_zero_partition(model: torch.nn.Module, optimizer: Any, shard_size: int) -> Held:
    """Under ZeRO-1 and 2 a rank updates its share of the trained parameters; partitions are padded to be equal."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    groups = optimizer.single_partition_of_fp32_groups
    share = -(-trained // shard_size) + PARTITION_PADDING * len(groups)
    held = _held(sum(group.numel() for group in groups), share, "the optimizer's masters")
    return Held(held, trained)


def _held(held: int, share: int, name: str) -> int:
    if held > share:
        raise JobError(f"this rank holds {held:,} elements of {name}, planned {share:,}.")
    return held


PARTITION_PADDING = 256
"""Elements that DeepSpeed may add to a partition, to align it."""


class ShardCheck(TrainerCallback):
    """Looks at the model once it has been taken apart, before the first step."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.found: Held | None = None
        """None where nothing is sharded."""

    def on_train_begin(self, *_args: Any, model: torch.nn.Module, optimizer: Any = None, **_kwargs: Any) -> None:
        """Called by the trainer."""
        shard_size = self.plan["dp_shard_size"] * self.plan["cp_size"] * self.plan["sp_size"]
        if self.plan["backend"] == "fsdp2":
            self.found = check_shards(model, shard_size)
        elif self.plan["zero_stage"] == 3:
            self.found = check_zero3_shards(model, shard_size)
        elif self.plan["backend"] == "deepspeed":
            self.found = check_zero_partition(model, optimizer.optimizer, shard_size)


def watch_first_sequence(model: PreTrainedModel, batch_size: int, tokens: int, *, exact: bool = True) -> list[int]:
    """The first decoder layer must see this many tokens: the ranks of a sequence really cut it.

    Rows of examples may be shorter: not ``exact``. The list returned gets the shape that was seen.
    """
    first = first_layer(model)
    if first is None:
        raise JobError(f"{type(model).__name__} names no decoder layer to watch.")
    found: list[int] = []

    def look(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        hidden_states = args[0] if args else kwargs["hidden_states"]
        found.extend(hidden_states.shape[:2])
        as_planned = found[1] == tokens if exact else found[1] <= tokens
        if found[0] != batch_size or not as_planned:
            raise JobError(
                f"a decoder layer sees {found[0]} x {found[1]:,} tokens, planned {batch_size} x {tokens:,}: "
                "the sequence was not cut as planned."
            )

    handle = first.register_forward_pre_hook(look, with_kwargs=True)
    return found
