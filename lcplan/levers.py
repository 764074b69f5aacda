"""The levers: what each changes in a plan, what it needs, what it goes with, what it costs.

Adding a lever is one entry here, a field of ``TrainPlan`` and its items in ``estimators``. ``recommend`` searches every
combination of ``settings``; levers of one ``dimension`` are alternatives, and ``OFF`` says what their absence means.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from lcplan._record import Record
from lcplan.estimators.coverage import PLAIN_FAMILIES
from lcplan.model_spec import ModelSpec
from lcplan.rope import resolve_rope
from lcplan.train_plan import TrainPlan
from lcplan.units import ceil_div

Setting = dict[str, Any]
"""Plan fields that a lever sets."""


def _no_settings(spec: ModelSpec, num_gpus: int) -> tuple[Setting, ...]:
    del spec, num_gpus
    return ()


class Lever(Record):
    """One thing that changes memory, time or reach of a plan."""

    id: str
    summary: str
    """What it does, in a sentence."""
    changes: str
    """The plan fields it sets."""
    costs: str
    needs: str = ""
    """What must be there beside it, in words."""
    requires: tuple[str, ...] = ()
    """Ids of levers of which one must be pulled as well."""
    excludes: tuple[str, ...] = ()
    """Ids of levers it cannot be combined with; held both ways."""
    dimension: str
    settings: Callable[[ModelSpec, int], tuple[Setting, ...]] = _no_settings
    """What the search tries, for a model and a number of GPUs; nothing where a lever is the user's to decide."""
    not_searched: str = ""
    """Why the search leaves it alone."""
    settings_alike: bool = False
    """Every setting is legal where the first is."""
    is_default: bool = False
    """Pulled by the training stack unless turned off: it does not count where plans are equally fast."""
    has_alternative: bool = True
    """False where the installed stack has nothing else: the search then tries no plan without the lever."""
    is_on: Callable[[ModelSpec, TrainPlan], bool]


OFF: dict[str, Setting] = {
    "loss": {"loss": "full"},
    "checkpointing": {"activation_checkpointing": "none"},
    "activations": {"offload_activations": False, "offload_prefetch": False, "activation_offloading": False},
    "parameters": {"offload_params": False},
    "exchange": {"cp_comm_strategy": "allgather"},
    "ring-heads": {"cp_head_chunks": 1},
    "mlp": {"mlp_tile_size": None},
    "kernels": {"kernels": "none"},
    "optimizer": {"optim": "adamw_torch_fused"},
}
"""What a plan looks like where no lever of a dimension is pulled; ``gpus`` has no such state."""
PARALLEL = ("data-parallel", "replicas", "context-parallel")
TILE_SIZES = (16_384,)
"""Tokens of an MLP's tile that the search tries. Where tiles help another instant of the layer is larger than one of
these; smaller ones are slow (axolotl#3666)."""
CHECKPOINTING = ("activation-checkpointing", "checkpoint-every-n-layers")


def divisors(number: int) -> tuple[int, ...]:
    """Every whole number that divides ``number``, ascending."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def _sizes(num_gpus: int, *, replicate: bool, context: bool) -> tuple[Setting, ...]:
    """Every split of the GPUs into replicas, shards and ranks of one sequence, of one kind."""
    return tuple(
        {"dp_replicate_size": replicas, "dp_shard_size": num_gpus // replicas // cp, "cp_size": cp}
        for cp in divisors(num_gpus)
        for replicas in divisors(num_gpus // cp)
        if (cp > 1) == context and (context or (replicas > 1) == replicate)
        if replicas == 1 or num_gpus // replicas // cp > 1
    )


def spacings(spec: ModelSpec) -> tuple[int, ...]:
    """Every n above 1 that can be the best for a number of checkpointed layers.

    Where all layers are alike that is the smallest: at any layer as many below it are checkpointed, or more.
    """
    every = range(2, spec.num_hidden_layers + 1)
    if len(set(spec.layer_types)) > 1 or len(set(spec.layers)) > 1:
        return tuple(every)
    smallest = {ceil_div(spec.num_hidden_layers, n): n for n in reversed(every)}
    return tuple(sorted(smallest.values()))


def _each_key_head(spec: ModelSpec) -> tuple[Setting, ...]:
    """One key/value head at a time: fewer parts need more memory, and hardly less time."""
    return ({"cp_head_chunks": spec.num_key_value_heads},) if spec.num_key_value_heads > 1 else ()


def _scales(spec: ModelSpec, plan: TrainPlan) -> bool:
    return resolve_rope(spec, plan.max_length, plan.rope) is not None


LEVERS: tuple[Lever, ...] = (
    Lever(
        id="chunked-loss",
        summary="Scores tokens in tiles, so the logits of a whole sequence never exist.",
        changes="loss",
        costs="the logits are computed once more in the backward; the default since TRL 1.13",
        needs="trl >= 1.13; from 1.15 on there is no other loss",
        dimension="loss",
        settings=lambda _spec, _gpus: ({"loss": "chunked"},),
        is_default=True,
        has_alternative=False,
        is_on=lambda _, plan: plan.loss == "chunked",
    ),
    Lever(
        id="yarn",
        summary="Scales the rotary embedding so that positions beyond the pretrained length keep their meaning.",
        changes="rope",
        costs="no memory, no time",
        needs="a model that does not scale already; set before the model is built",
        dimension="rope",
        not_searched="it follows the length",
        is_on=_scales,
    ),
    Lever(
        id="activation-checkpointing",
        summary="Keeps only each layer's input and recomputes the layer in the backward pass.",
        changes="activation_checkpointing",
        costs="one more forward pass a step",
        dimension="checkpointing",
        settings=lambda _spec, _gpus: ({"activation_checkpointing": "full", "checkpoint_every_n_layers": 1},),
        is_on=lambda _, plan: plan.activation_checkpointing == "full" and plan.checkpoint_every_n_layers == 1,
    ),
    Lever(
        id="checkpoint-every-n-layers",
        summary="Checkpoints every n-th layer only; the layers between keep what they saved.",
        changes="activation_checkpointing, checkpoint_every_n_layers",
        costs="the forward of one layer in n a step",
        needs="transformers >= 5.17",
        dimension="checkpointing",
        settings=lambda spec, _gpus: tuple(
            {"activation_checkpointing": "full", "checkpoint_every_n_layers": n} for n in spacings(spec)
        ),
        settings_alike=True,
        is_on=lambda _, plan: plan.activation_checkpointing == "full" and plan.checkpoint_every_n_layers > 1,
    ),
    Lever(
        id="selective-checkpointing",
        summary="Recomputes a layer but for its attention, whose output is kept.",
        changes="activation_checkpointing",
        costs=(
            "the forward of the linears a step; the attention outputs of all layers stay on the GPU, or with "
            "offload-activations on the host"
        ),
        needs="trl >= 1.15",
        excludes=("activation-offloading", "lora"),
        dimension="checkpointing",
        settings=lambda _spec, _gpus: ({"activation_checkpointing": "selective"},),
        is_on=lambda _, plan: plan.activation_checkpointing == "selective",
    ),
    Lever(
        id="offload-activations",
        summary="Moves the layer inputs to pinned host memory between forward and backward.",
        changes="offload_activations",
        costs="host memory (blocks rounded up to a power of two); copies that are about 1% of a step at 1M tokens",
        needs="transformers >= 5.17; host memory, about twice as much with selective-checkpointing",
        requires=(*CHECKPOINTING, "selective-checkpointing"),
        excludes=("activation-offloading", "offload-prefetch"),
        dimension="activations",
        settings=lambda _spec, _gpus: (OFF["activations"] | {"offload_activations": True},),
        is_on=lambda _, plan: plan.offload_activations and not plan.offload_prefetch,
    ),
    Lever(
        id="offload-prefetch",
        summary="Moves the layer inputs to pinned host memory on a stream of their own, and back a layer ahead.",
        changes="offload_activations, offload_prefetch",
        costs="host memory, in blocks that waste nothing; one more layer input on the GPU",
        needs="transformers >= 5.17; host memory",
        requires=CHECKPOINTING,
        excludes=("activation-offloading", "selective-checkpointing", "zero"),
        dimension="activations",
        settings=lambda _spec, _gpus: (OFF["activations"] | {"offload_activations": True, "offload_prefetch": True},),
        is_on=lambda _, plan: plan.offload_prefetch,
    ),
    Lever(
        id="activation-offloading",
        summary="TRL's own offload of the layer inputs, on a stream of its own.",
        changes="activation_offloading",
        costs="host memory, and more GPU memory than offload-activations",
        needs="one GPU; host memory",
        requires=CHECKPOINTING,
        excludes=(*PARALLEL, "selective-checkpointing", "offload-activations"),
        dimension="activations",
        settings=lambda _spec, _gpus: (OFF["activations"] | {"activation_offloading": True},),
        is_on=lambda _, plan: plan.activation_offloading,
    ),
    Lever(
        id="offload-params",
        summary="Keeps weights, gradients and optimizer states on the host; the optimizer runs there.",
        changes="offload_params",
        costs="16 bytes a parameter of host memory, copies of every shard, a slow optimizer step",
        needs="FSDP2; host memory",
        requires=PARALLEL,
        excludes=("lora",),
        dimension="parameters",
        settings=lambda _spec, _gpus: ({"offload_params": True},),
        is_on=lambda _, plan: plan.offload_params,
    ),
    Lever(
        id="data-parallel",
        summary="Shards the states over the GPUs; each GPU takes sequences of its own.",
        changes="dp_shard_size",
        costs="gathering every layer's weights; it does not help the length of a sequence",
        needs="more than one GPU",
        dimension="gpus",
        settings=lambda _spec, gpus: _sizes(gpus, replicate=False, context=False) if gpus > 1 else (),
        is_default=True,
        is_on=lambda _, plan: plan.dp_shard_size > 1,
    ),
    Lever(
        id="replicas",
        summary="Shards the states over part of the GPUs and keeps copies on the others.",
        changes="dp_replicate_size, dp_shard_size",
        costs="the states once a replica",
        needs="more than one GPU",
        excludes=("lora",),
        dimension="gpus",
        settings=lambda _spec, gpus: _sizes(gpus, replicate=True, context=False),
        is_on=lambda _, plan: plan.dp_replicate_size > 1,
    ),
    Lever(
        id="context-parallel",
        summary="Splits one sequence over GPUs by ring attention; FSDP2 shards the states over the same GPUs.",
        changes="cp_size, dp_shard_size, dp_replicate_size",
        costs="exchange of keys and values, merging of partial results; fewer sequences a step",
        needs="more than one GPU, full attention in every layer, attn_implementation sdpa, a multiple of 2 x cp_size",
        excludes=("packing", "sequence-parallel", "activation-offloading"),
        dimension="gpus",
        settings=lambda _spec, gpus: _sizes(gpus, replicate=False, context=True),
        is_on=lambda _, plan: plan.cp_size > 1,
    ),
    Lever(
        id="alltoall",
        summary="Passes keys and values round the ring instead of gathering them.",
        changes="cp_comm_strategy",
        costs="no time where the exchange hides behind attention",
        requires=("context-parallel",),
        dimension="exchange",
        settings=lambda _spec, _gpus: ({"cp_comm_strategy": "alltoall"},),
        is_on=lambda _, plan: plan.cp_size > 1 and plan.cp_comm_strategy == "alltoall",
    ),
    Lever(
        id="cp-head-chunks",
        summary="Lets ring attention go round once for each part of the heads, so that it holds those of one alone.",
        changes="cp_head_chunks",
        costs="as many kernels and exchanges more, each smaller: 2% of a step for eight parts where each has two heads",
        needs="a divisor of the key/value heads",
        requires=("context-parallel",),
        dimension="ring-heads",
        settings=lambda spec, _gpus: _each_key_head(spec),
        is_on=lambda _, plan: plan.cp_head_chunks > 1,
    ),
    Lever(
        id="cp-merge-bfloat16",
        summary="Sums up the gradients of ring attention in bfloat16 instead of float32.",
        changes="cp_merge_dtype",
        costs="rounding at every step of the ring",
        requires=("context-parallel",),
        dimension="ring-dtype",
        not_searched="it changes what is computed; ask for it with --cp-merge-dtype bfloat16",
        is_on=lambda _, plan: plan.cp_merge_dtype == "bfloat16",
    ),
    Lever(
        id="unfused-optimizer",
        summary="Updates all weights as one list instead of each in one kernel; nothing is gained by it.",
        changes="optim",
        costs="temporaries of the size of all weights, more memory traffic",
        dimension="optimizer",
        not_searched="never faster and never smaller than the fused one; ask for it with --optim adamw_torch",
        is_on=lambda _, plan: plan.optim == "adamw_torch",
    ),
    Lever(
        id="sequence-parallel",
        summary="Splits one sequence over GPUs by Ulysses, head by head, with DeepSpeed.",
        changes="sp_size, dp_shard_size",
        costs="two all-to-all a layer",
        needs="DeepSpeed; a size that divides the heads (lcplan estimate lists them)",
        excludes=("context-parallel",),
        dimension="sequence",
        requires=("zero",),
        not_searched="DeepSpeed's step has not been timed; ask for it with --backend deepspeed --sp-size",
        is_on=lambda _, plan: plan.sp_size > 1,
    ),
    Lever(
        id="zero",
        summary="Shards optimizer states (stage 1), gradients as well (2) and weights as well (3) with DeepSpeed.",
        changes="backend, zero_stage",
        costs="reduce and gather buffers of 0.5 billion elements; float32 masters in every stage",
        needs="DeepSpeed; more than one GPU",
        excludes=("context-parallel", "kept-gathered", "ddp"),
        dimension="backend",
        not_searched="DeepSpeed's step has not been timed; ask for it with --backend deepspeed",
        is_on=lambda _, plan: plan.backend == "deepspeed",
    ),
    Lever(
        id="offload-optimizer",
        summary="Keeps optimizer states on the host and updates them there, with DeepSpeed.",
        changes="offload_optimizer",
        costs="12 bytes a parameter of host memory, copies of every gradient, a slow optimizer step",
        needs="stage 2 or 3; host memory",
        requires=("zero",),
        dimension="optimizer-place",
        not_searched="DeepSpeed's step has not been timed; ask for it with --backend deepspeed --offload-optimizer",
        is_on=lambda _, plan: plan.offload_optimizer,
    ),
    Lever(
        id="kept-gathered",
        summary="Keeps a layer's gathered weights from its forward to its backward.",
        changes="reshard_after_forward",
        costs="the weights of all layers on every GPU; one gather a step less",
        needs="FSDP2",
        requires=PARALLEL,
        dimension="resharding",
        not_searched="its time has not been measured; ask for it with --no-reshard-after-forward",
        is_on=lambda _, plan: plan.backend == "fsdp2" and not plan.reshard_after_forward,
    ),
    Lever(
        id="ddp",
        summary="Keeps whole states on every GPU; each takes sequences of its own.",
        changes="backend",
        costs="all states and a second copy of the gradients on every GPU",
        needs="more than one GPU",
        excludes=PARALLEL,
        dimension="backend",
        not_searched="FSDP2 holds less; ask for it with --backend ddp",
        is_on=lambda _, plan: plan.backend == "ddp",
    ),
    Lever(
        id="smaller-states",
        summary="An optimizer with less state than two moments of the weights' type: 8-bit, paged, Adafactor, SGD.",
        changes="optim",
        costs="another training; its own temporaries",
        needs="bitsandbytes or torchao for the 8-bit ones; bitsandbytes and Adafactor one GPU",
        excludes=("unfused-optimizer",),
        dimension="optimizer",
        not_searched="it changes what is trained; ask for it with --optim",
        is_on=lambda _, plan: plan.optim not in ("adamw_torch_fused", "adamw_torch"),
    ),
    Lever(
        id="frozen-tables",
        summary="Leaves the embedding, the head or both as they are: no gradient, no optimizer state.",
        changes="freeze_embeddings, freeze_head",
        costs="another training",
        excludes=("lora",),
        dimension="frozen",
        not_searched="it changes what is trained; ask for it with --freeze-embeddings, --freeze-head",
        is_on=lambda _, plan: plan.freeze_embeddings or plan.freeze_head,
    ),
    Lever(
        id="mlp-tiles",
        summary="Runs the MLP over tiles of tokens, so that its intermediates never exist for a whole sequence.",
        changes="mlp_tile_size",
        costs="one more forward of the MLP, none where the layer is checkpointed and ends with its MLP",
        needs="dense MLPs; a patch of the model, which the generated job has",
        excludes=("activation-offloading",),
        dimension="mlp",
        settings=lambda spec, _gpus: tuple({"mlp_tile_size": size} for size in TILE_SIZES if spec.moe is None),
        settings_alike=True,
        is_on=lambda _, plan: plan.running_tile is not None,
    ),
    Lever(
        id="fused-kernels",
        summary="Liger's RMSNorm, rotary embedding and SwiGLU: one kernel each, which saves its input alone.",
        changes="kernels",
        costs="no time: less memory traffic",
        needs="liger-kernel (pip install 'lcplan[liger]'), a GPU that Triton compiles for",
        excludes=("activation-offloading", "lora"),
        dimension="kernels",
        settings=lambda spec, _gpus: ({"kernels": "liger"},) if spec.model_type in PLAIN_FAMILIES else (),
        is_on=lambda _, plan: plan.kernels == "liger",
    ),
    Lever(
        id="lora",
        summary="Trains small adapters and freezes the weights.",
        changes="lora_r, lora_target_modules",
        costs="another training: only the adapters learn",
        needs="peft",
        excludes=("offload-params", "replicas", "selective-checkpointing"),
        dimension="training",
        not_searched="it changes what is trained; ask for it with --lora-r",
        is_on=lambda _, plan: plan.lora_r is not None,
    ),
    Lever(
        id="nf4",
        summary="Keeps the frozen weights in four bits.",
        changes="quantize",
        costs="another training; dequantization in every pass",
        needs="bitsandbytes, lora",
        requires=("lora",),
        dimension="quantization",
        not_searched="it changes what is trained; ask for it with --quantize nf4",
        is_on=lambda _, plan: plan.quantize == "nf4",
    ),
    Lever(
        id="packing",
        summary="Puts short samples into one row, each attending to itself alone.",
        changes="packing",
        costs="nothing where the kernel knows the samples' bounds",
        needs="an attention kernel for rows of several samples",
        excludes=("context-parallel",),
        dimension="rows",
        not_searched="a matter of the data; ask for it with --packing",
        is_on=lambda _, plan: plan.packing,
    ),
)

BY_ID: dict[str, Lever] = {lever.id: lever for lever in LEVERS}


def active_levers(spec: ModelSpec, plan: TrainPlan) -> tuple[str, ...]:
    """Ids of the levers that ``plan`` pulls, in the table's order; yarn only where the length needs it."""
    return tuple(lever.id for lever in LEVERS if lever.is_on(spec, plan))


def excluded(lever: Lever) -> tuple[str, ...]:
    """Ids of the levers that do not go with one, whichever of the two says so."""
    both = {other.id for other in LEVERS if lever.id in other.excludes} | set(lever.excludes)
    return tuple(other.id for other in LEVERS if other.id in both)


@lru_cache(maxsize=4096)
def conflict(pulled: frozenset[str]) -> str | None:
    """Why these levers do not go together, by the table; None where they do."""
    for id in sorted(pulled):
        lever = BY_ID[id]
        if clash := sorted(pulled.intersection(lever.excludes)):
            return f"{id} does not go with {clash[0]}"
        if lever.requires and not pulled.intersection(lever.requires):
            return f"{id} needs {' or '.join(lever.requires)}"
    return None
