"""What upstream ignores without a word, made into errors.

A launcher that starts one process where eight were planned, a sharding that was not applied, a sequence that
was not cut: each still trains, and its memory says nothing about the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class JobError(Exception):
    """The plan and this machine or its versions do not go together; the message says what to change."""


def check_layout(accelerator: Any, plan: dict[str, Any]) -> None:
    """The launcher set up what the plan says: the kind, the number of processes, the sizes of the mesh."""
    parallel = accelerator.parallelism_config
    found = {
        "distributed_type": accelerator.distributed_type.value,
        "num_gpus": accelerator.num_processes,
        "dp_replicate_size": parallel.dp_replicate_size if parallel else 1,
        "dp_shard_size": parallel.dp_shard_size if parallel else 1,
        "cp_size": parallel.cp_size if parallel else 1,
    }
    sharded = plan["backend"] == "fsdp2"
    planned = {**plan, "distributed_type": "FSDP" if sharded else "NO"}
    differing = [key for key, value in found.items() if value != planned[key]]
    wrong = [f"{key} is {found[key]}, planned {planned[key]}" for key in differing]
    if sharded and not accelerator.is_fsdp2:
        wrong.append("FSDP is not version 2")
    if wrong:
        raise JobError(f"the launcher did not set up the plan: {'; '.join(wrong)}. Use the README's command.")


def check_shards(model: torch.nn.Module, shard_size: int) -> None:
    """Under FSDP2 a rank holds its share of every parameter, and no more."""
    from torch.distributed.tensor import DTensor

    for name, weight in model.named_parameters():
        if not isinstance(weight, DTensor):
            raise JobError(f"{name} is not sharded: accelerate did not apply FSDP2.")
        share = -(-weight.shape[0] // shard_size) * (weight.numel() // weight.shape[0])
        held = weight.to_local().numel()
        if held > share:
            raise JobError(f"this rank holds {held:,} elements of {name}, planned {share:,}.")


class ShardCheck(TrainerCallback):
    """Looks at the model once FSDP2 has taken it apart, before the first step."""

    def __init__(self, shard_size: int) -> None:
        self.shard_size = shard_size

    def on_train_begin(self, *_args: Any, model: torch.nn.Module, **_kwargs: Any) -> None:
        """Called by the trainer."""
        check_shards(model, self.shard_size)


def watch_first_sequence(model: PreTrainedModel, batch_size: int, tokens: int) -> None:
    """The first decoder layer must see this many tokens: ring attention really cut the sequence."""
    layers = set(model._no_split_modules or ())
    # FSDP2 gives a layer a class of another name, derived from its own
    first = next((m for m in model.modules() if any(base.__name__ in layers for base in type(m).__mro__)), None)
    if first is None:
        raise JobError(f"{type(model).__name__} names no decoder layer to watch.")

    def look(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        hidden_states = args[0] if args else kwargs["hidden_states"]
        seen = tuple(hidden_states.shape[:2])
        if seen != (batch_size, tokens):
            raise JobError(
                f"a decoder layer sees {seen[0]} x {seen[1]:,} tokens, planned {batch_size} x {tokens:,}: "
                "the sequence was not cut as planned."
            )

    handle = first.register_forward_pre_hook(look, with_kwargs=True)
