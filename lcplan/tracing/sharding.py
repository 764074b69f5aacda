"""FSDP2 and context parallelism over ranks of which only one exists: accelerate's own wrapping, torch's own code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch  # noqa: TID253  (imported by the trace method alone)

from lcplan.tracing.seams import (
    fake_ranks,
    few_ring_rounds,
    ring_attention_on_cpu,
    shards_on_host,
    shards_padded_once,
)
from lcplan.train_plan import TrainPlan

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """The device mesh of the job, and accelerate's description of it."""

    parallelism: Any
    mesh: Any

    def accelerator(self) -> Any:
        """What accelerate's FSDP2 wrapping and the trainer's context parallelism read of an Accelerator."""
        from accelerate import Accelerator
        from torch.distributed.tensor.experimental import context_parallel

        stand_in = SimpleNamespace(
            torch_device_mesh=self.mesh,
            parallelism_config=self.parallelism,
            mixed_precision="bf16",
            is_main_process=False,
            device=CPU,
            state=SimpleNamespace(fsdp_plugin=None),
        )
        if self.parallelism.cp_enabled:
            stand_in._cp_context = partial(context_parallel, mesh=self.mesh["cp"])
            stand_in.maybe_context_parallel = partial(Accelerator.maybe_context_parallel, stand_in)
        return stand_in


@contextlib.contextmanager
def ranks_of(plan: TrainPlan, rank: int) -> Iterator[Ranks | None]:
    """The job's ranks, of which this process is ``rank``; None for one GPU. Not to be entered under fake tensors."""
    if plan.backend == "single":
        yield None
        return
    from accelerate.parallelism_config import ParallelismConfig
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    with fake_ranks(rank, plan.num_gpus), shards_padded_once(), contextlib.ExitStack() as stack:
        parallelism = ParallelismConfig(
            dp_replicate_size=plan.dp_replicate_size, dp_shard_size=plan.dp_shard_size, cp_size=plan.cp_size
        )
        if plan.cp_size > 1:
            set_rotate_method(plan.cp_comm_strategy)
            stack.enter_context(ring_attention_on_cpu(plan))
            stack.enter_context(few_ring_rounds(rank % plan.cp_size))
        if plan.offload_params:
            stack.enter_context(shards_on_host())
        yield Ranks(parallelism, parallelism.build_device_mesh("cpu"))


def shard(model: Any, plan: TrainPlan, ranks: Ranks) -> Any:
    """The model wrapped by accelerate's fsdp2_prepare_model, with the settings of the generated job."""
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=plan.reshard_after_forward,
        # fake tensors cannot be pinned
        cpu_offload=CPUOffloadPolicy(pin_memory=False) if plan.offload_params else None,
        # loading in another way would shard the same, and needs weights
        cpu_ram_efficient_loading=False,
    )
    plugin.set_mixed_precision("bf16")
    accelerator = ranks.accelerator()
    accelerator.state.fsdp_plugin = plugin
    if ranks.parallelism.cp_enabled:
        _attach_context_parallel_hooks(model)
    return fsdp2_prepare_model(accelerator, model)


@contextlib.contextmanager
def split_sequence(ranks: Ranks | None, model: Any, batch: dict[str, torch.Tensor]) -> Iterator[None]:
    """Around a forward and backward: the batch cut to this rank's part, attention as ring attention."""
    if ranks is None or not ranks.parallelism.cp_enabled:
        yield
        return
    from transformers import Trainer

    trainer = SimpleNamespace(accelerator=ranks.accelerator())
    context, _ = Trainer._prepare_context_parallel_inputs(trainer, model, batch)
    with context():
        yield
