"""A resolved training plan: what one step does, on which GPUs, with which levers.

Names are those of config files in the field: Transformers and TRL for training, accelerate for parallelism. A
``TrainPlan`` has no open ends: ``resolve`` fills what the user left unset, lists each choice as an assumption,
and refuses what the stack refuses.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from lcplan._record import Record
from lcplan.errors import PlanError
from lcplan.model_spec import ModelSpec

Backend = Literal["single", "ddp", "fsdp2", "deepspeed"]
Dtype = Literal["bfloat16", "float32"]
Loss = Literal["chunked", "chunked-256", "full"]
ActivationCheckpointing = Literal["full", "selective", "none"]
AttnImplementation = Literal["sdpa", "flash_attention_2", "eager"]
CommStrategy = Literal["allgather", "alltoall"]
Kernels = Literal["none", "liger"]


class TrainPlan(Record):
    """Every resolved choice of one training job."""

    max_length: int = Field(gt=0)
    """Tokens of one sequence over all GPUs."""
    per_device_train_batch_size: int = Field(default=1, gt=0)
    """Sequences a data-parallel rank holds in one micro step."""
    per_device_eval_batch_size: int | None = Field(default=None, gt=0)
    """Whole sequences that every rank evaluates at once; None: no evaluation (transformers' own default is 8)."""
    gradient_accumulation_steps: int = Field(default=1, gt=0)
    gpu: str
    """GPU id of the catalog."""
    num_gpus: int = Field(default=1, gt=0)
    gpus_per_node: int = Field(default=1, gt=0)
    backend: Backend = "single"
    dp_replicate_size: int = Field(default=1, gt=0)
    dp_shard_size: int = Field(default=1, gt=0)
    """Data-parallel ranks that shard the states; FSDP2 shards over dp_shard_size x cp_size."""
    cp_size: int = Field(default=1, gt=0)
    """Ranks that share one sequence by ring attention (FSDP2)."""
    sp_size: int = Field(default=1, gt=0)
    """Ranks that share one sequence by Ulysses (DeepSpeed)."""
    cp_comm_strategy: CommStrategy = "allgather"
    cp_head_chunks: int = Field(default=1, gt=0)
    """Parts of the heads over which ring attention goes round one after another."""
    cp_merge_dtype: Dtype = "float32"
    """Type in which ring attention sums up gradients and starts to merge outputs."""
    dtype: Dtype = "bfloat16"
    """Type the weights are loaded in; FSDP2 keeps trainable masters in float32 either way."""
    optim: str = "adamw_torch_fused"
    loss: Loss = "chunked"
    """``chunked`` is TRL's since 1.15, ``chunked-256`` that of 1.13 and 1.14; ``full`` keeps all logits."""
    scored_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the tokens that have a label: less than 1 where prompts are masked (completion_only_loss)."""
    activation_checkpointing: ActivationCheckpointing = "full"
    checkpoint_every_n_layers: int = Field(default=1, gt=0)
    offload_activations: bool = False
    """Checkpointed layer inputs wait in pinned host memory."""
    offload_prefetch: bool = False
    """They travel on a side stream, and come back a layer ahead."""
    activation_offloading: bool = False
    """TRL's own offloading of saved tensors, on a side stream; offload_activations is transformers'."""
    offload_params: bool = False
    reshard_after_forward: bool = True
    """FSDP2 frees the gathered weights of a layer after its forward and gathers them again in the backward."""
    zero_stage: Literal[1, 2, 3] | None = None
    """DeepSpeed: optimizer states are sharded (1), gradients too (2), parameters too (3)."""
    offload_optimizer: bool = False
    """DeepSpeed: optimizer states, and the update, are on the host."""
    mlp_tile_size: int | None = Field(default=None, gt=0)
    """Tokens of this rank that the MLP runs over at once; None: all of them."""
    kernels: Kernels = "none"
    """``liger``: Liger's fused RMSNorm, rotary embedding and SwiGLU, and the loss that the plan has."""
    lora_r: int | None = Field(default=None, gt=0)
    lora_target_modules: str = "all-linear"
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    quantize: Literal["none", "nf4"] = "none"
    """Frozen base weights in bitsandbytes' 4-bit NormalFloat with double quantisation (QLoRA)."""
    freeze_embeddings: bool = False
    freeze_head: bool = False
    padding: bool = False
    """Rows are padded to max_length, so that attention gets a mask of every pair of positions."""
    attn_implementation: AttnImplementation = "sdpa"
    rope: str = "auto"
    """``auto``, ``none`` or ``yarn:FACTOR``."""
    packing: bool = False
    host_memory_bytes: int | None = Field(default=None, gt=0)
    """Host memory of one node; None where unknown."""

    @property
    def tokens_per_rank(self) -> int:
        """Tokens one GPU works on in a micro step."""
        return self.max_length * self.per_device_train_batch_size // (self.cp_size * self.sp_size)

    @property
    def running_tile(self) -> int | None:
        """Tokens of one MLP tile; None where one tile has all."""
        tile = self.mlp_tile_size
        return None if tile is None or tile >= self.tokens_per_rank else tile

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step; ranks that share a sequence by cp or sp count once."""
        replicas = self.num_gpus // (self.cp_size * self.sp_size)
        return self.per_device_train_batch_size * replicas * self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all GPUs."""
        return self.sequences_per_step * self.max_length

    @property
    def shard_size(self) -> int:
        """Ranks over which parameters, gradients and optimizer states are split."""
        return self.dp_shard_size * self.cp_size * self.sp_size if self.backend != "single" else 1

    @property
    def keeps_attention_on_host(self) -> bool:
        """Attention outputs wait on the host as well as layer inputs."""
        return self.activation_checkpointing == "selective" and self.offload_activations

    @property
    def offloads_by_itself(self) -> bool:
        """The job's own host_offload.py moves what layers keep, not transformers."""
        return self.keeps_attention_on_host or self.offload_prefetch

    @property
    def length_multiple(self) -> int:
        """max_length must be a multiple of this: ring attention cuts a sequence into 2 x cp_size chunks."""
        return 2 * self.cp_size if self.cp_size > 1 else self.sp_size


MAX_TOKENS = 1 << 30
"""Longest max_length taken for real; beyond it a typing mistake is likelier."""
MAX_GPUS = 1 << 16


def resolve(spec: ModelSpec, given: dict[str, Any], *, usual_gpus_per_node: int) -> tuple[TrainPlan, tuple[str, ...]]:
    """Fill what ``given`` leaves out (values of None count as left out) and refuse what cannot run.

    Returns:
        The plan, and one sentence for each choice that was made for the user.

    Raises:
        PlanError: impossible sizes, or a combination that the training stack refuses.
    """
    values = {name: value for name, value in given.items() if value is not None}
    assumptions = _fill(values, usual_gpus_per_node, sdpa=spec.has_sdpa)
    try:
        plan = TrainPlan(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = _flag(str(first["loc"][0]) if first["loc"] else "plan")
        if first["type"] == "extra_forbidden":
            raise PlanError(
                "unknown-field", f"{name} is no field of a plan. Fields: {', '.join(TrainPlan.model_fields)}."
            ) from None
        raise PlanError("bad-value", f"{name} {first.get('input')!r}: {first['msg']}.") from None
    for check in (
        _check_sizes, _check_parallelism, _check_ulysses_levers, _check_length, _check_model, _check_levers,
        _check_states, _check_lora,
    ):  # fmt: skip
        check(spec, plan)
    return plan, tuple(assumptions)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _fill(values: dict[str, Any], usual_gpus_per_node: int, *, sdpa: bool) -> list[str]:
    for name in ("max_length", "gpu"):
        if name not in values:
            hint = "--max-length 131072" if name == "max_length" else "--gpu h100-80gb (`lcplan list gpus`)"
            raise PlanError("missing-value", f"{_flag(name)} is not given and cannot be guessed. Add {hint}.")
    for name in ("num_gpus", "cp_size", "sp_size", "dp_shard_size", "dp_replicate_size", "max_length"):
        value = values.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise PlanError("bad-value", f"{_flag(name)} {value!r} is not a positive whole number.")
    chosen: list[str] = []

    def fill(name: str, value: object, why: str) -> None:
        if name not in values:
            values[name] = value
            chosen.append(f"{name} = {value}: {why}")

    fill("num_gpus", 1, "not given")
    gpus = values["num_gpus"]
    fill("gpus_per_node", min(gpus, usual_gpus_per_node), "the usual node of this GPU")
    fill("backend", "single" if gpus == 1 else "fsdp2", "TRL's path for this number of GPUs")
    if values["backend"] == "ddp":
        fill("dp_replicate_size", gpus, "DDP keeps the whole model on every GPU")
    if values["backend"] == "deepspeed":
        fill("zero_stage", 3, "the only stage that shards the parameters")
    groups = values.get("cp_size", 1) * values.get("sp_size", 1) * values.get("dp_replicate_size", 1)
    if values["backend"] != "single" and gpus % groups == 0:
        fill("dp_shard_size", gpus // groups, "the remaining GPUs shard the states and take other sequences")
    fill("dtype", "bfloat16", "the generated job sets it; TRL alone would load a named model in float32")
    fill("optim", "adamw_torch_fused", "default of transformers")
    fill("loss", "chunked", "default of TRL since 1.13")
    fill("activation_checkpointing", "full", "default of TRL")
    fill("offload_activations", False, "default of transformers")
    if sdpa:
        fill("attn_implementation", "sdpa", "default of transformers; the only one that context parallelism takes")
    else:
        fill("attn_implementation", "eager", "default of transformers for this family, which sdpa cannot compute")
    if values.get("cp_size", 1) > 1:
        fill("cp_comm_strategy", "allgather", "default of accelerate")
    return chosen


def _check_sizes(spec: ModelSpec, plan: TrainPlan) -> None:
    del spec
    for name, limit in (("max_length", MAX_TOKENS), ("num_gpus", MAX_GPUS)):
        value = getattr(plan, name)
        if value > limit:
            raise PlanError("absurd-value", f"{_flag(name)} {value:,} is above {limit:,}; is a unit wrong?")
    if plan.per_device_train_batch_size * plan.max_length > MAX_TOKENS:
        raise PlanError(
            "absurd-value",
            f"--per-device-train-batch-size {plan.per_device_train_batch_size:,} x --max-length {plan.max_length:,} is "
            f"above {MAX_TOKENS:,} tokens; is a unit wrong?",
        )
    if plan.gpus_per_node > plan.num_gpus:
        raise PlanError(
            "bad-gpus-per-node",
            f"--gpus-per-node {plan.gpus_per_node} exceeds --num-gpus {plan.num_gpus}. Use at most {plan.num_gpus}.",
        )
    if plan.num_gpus % plan.gpus_per_node:
        raise PlanError(
            "bad-gpus-per-node",
            f"--num-gpus {plan.num_gpus} is no multiple of --gpus-per-node {plan.gpus_per_node}: nodes must be alike.",
        )


def _check_parallelism(spec: ModelSpec, plan: TrainPlan) -> None:
    product = plan.dp_replicate_size * plan.dp_shard_size * plan.cp_size * plan.sp_size
    if plan.backend == "single":
        if plan.num_gpus > 1 or product > 1:
            raise PlanError(
                "single-backend",
                f"--backend single is one GPU, but the plan has --num-gpus {plan.num_gpus} and a parallel size of "
                f"{product}. Use --backend fsdp2, or --num-gpus 1 without parallel sizes.",
            )
        return
    if plan.cp_size > 1 and plan.sp_size > 1:
        raise PlanError(
            "cp-with-sp",
            f"--cp-size {plan.cp_size} and --sp-size {plan.sp_size}: one sequence is split by ring attention or by "
            "Ulysses, not by both. Set one of them to 1.",
        )
    for name, size, backend in (("cp_size", plan.cp_size, "fsdp2"), ("sp_size", plan.sp_size, "deepspeed")):
        if size > 1 and plan.backend != backend:
            raise PlanError(
                f"{name[:2]}-backend", f"{_flag(name)} {size} needs --backend {backend}, not {plan.backend}."
            )
    if product != plan.num_gpus:
        legal = [c for c in range(1, plan.num_gpus + 1) if plan.num_gpus % c == 0]
        raise PlanError(
            "sizes-do-not-multiply",
            f"dp_replicate_size {plan.dp_replicate_size} x dp_shard_size {plan.dp_shard_size} x cp_size {plan.cp_size} "
            f"x sp_size {plan.sp_size} = {product}, but --num-gpus is {plan.num_gpus}: the product must equal it. "
            f"Sizes that divide {plan.num_gpus}: {', '.join(map(str, legal[:12]))}.",
        )
    if plan.backend == "fsdp2" and plan.dp_replicate_size > 1 and plan.dp_shard_size == 1:
        raise PlanError(
            "replicas-without-shards",
            f"--dp-replicate-size {plan.dp_replicate_size} with --dp-shard-size 1: accelerate keeps replicas only of "
            "what FSDP2 shards over dp_shard_size, and refuses this. Use a --dp-shard-size of at least 2, or "
            "--dp-replicate-size 1.",
        )
    if plan.backend == "ddp" and plan.dp_replicate_size != plan.num_gpus:
        raise PlanError(
            "ddp-sizes",
            f"--backend ddp keeps the whole model on each of --num-gpus {plan.num_gpus}, so dp_replicate_size must be "
            f"{plan.num_gpus}, not {plan.dp_replicate_size}. Use --backend fsdp2 to split anything.",
        )
    if plan.backend == "deepspeed" and plan.dp_replicate_size > 1:
        raise PlanError(
            "deepspeed-sizes",
            f"--dp-replicate-size {plan.dp_replicate_size} with --backend deepspeed: ZeRO shards over all of its "
            f"GPUs. Use --dp-shard-size {plan.num_gpus // plan.sp_size}.",
        )
    if plan.sp_size > 1:
        _check_ulysses(spec, plan)


def _check_ulysses(spec: ModelSpec, plan: TrainPlan) -> None:
    heads, kv = spec.num_attention_heads, spec.num_key_value_heads

    def legal(size: int) -> bool:
        return heads % size == 0 and (kv % size == 0 or size % kv == 0)

    if not legal(plan.sp_size):
        sizes = ", ".join(str(s) for s in range(2, heads + 1) if legal(s))
        raise PlanError(
            "sp-heads",
            f"--sp-size {plan.sp_size} does not divide {spec.id}'s {heads} query and {kv} key/value heads. "
            f"Legal sizes: {sizes}.",
        )


def _check_ulysses_levers(spec: ModelSpec, plan: TrainPlan) -> None:
    """What attention Ulysses can run: a rank has all tokens of some heads."""
    if plan.sp_size == 1:
        return
    if "linear_attention" in spec.layer_types:
        raise PlanError(
            "sp-layer-types",
            f"--sp-size {plan.sp_size} with {spec.id}: its linear-attention layers would restart their state on every "
            "rank, with wrong gradients behind plausible outputs. Use --sp-size 1.",
        )
    if plan.attn_implementation == "eager":
        raise PlanError(
            "sp-attention",
            f"--attn-implementation eager with --sp-size {plan.sp_size}: Ulysses needs a kernel. Use "
            "--attn-implementation flash_attention_2, or sdpa.",
        )
    if plan.packing and plan.attn_implementation != "flash_attention_2":
        raise PlanError(
            "sp-packing",
            f"--packing with --sp-size {plan.sp_size} and --attn-implementation {plan.attn_implementation}: it would "
            "attend across the samples of a row. Use --attn-implementation flash_attention_2, or --no-packing.",
        )


def _check_length(spec: ModelSpec, plan: TrainPlan) -> None:
    del spec
    multiple = plan.length_multiple
    if plan.max_length % multiple:
        down = plan.max_length // multiple * multiple
        lever = f"--cp-size {plan.cp_size}" if plan.cp_size > 1 else f"--sp-size {plan.sp_size}"
        raise PlanError(
            "length-multiple",
            f"{lever} cannot split --max-length {plan.max_length}: it must be a multiple of {multiple}. "
            f"Use --max-length {down or multiple} or {down + multiple}.",
        )


def _check_model(spec: ModelSpec, plan: TrainPlan) -> None:
    if plan.cp_size == 1:
        for name, default in (("cp_head_chunks", 1), ("cp_merge_dtype", "float32")):
            if getattr(plan, name) != default:
                raise PlanError(
                    "ring-without-cp",
                    f"{_flag(name)} {getattr(plan, name)} is of ring attention, and --cp-size is 1. Leave it out.",
                )
        return
    if spec.num_key_value_heads % plan.cp_head_chunks:
        raise PlanError(
            "cp-head-chunks",
            f"--cp-head-chunks {plan.cp_head_chunks} does not divide the {spec.num_key_value_heads} key/value heads of "
            f"{spec.id}. Use a divisor of {spec.num_key_value_heads}.",
        )
    other = sorted({kind for kind in spec.layer_types if kind != "full_attention"})
    if other:
        raise PlanError(
            "cp-layer-types",
            f"--cp-size {plan.cp_size} with {spec.id}: it has {', '.join(other)} layers, and context parallelism drops "
            "their mask, so they would silently train with full attention. Use --cp-size 1, or a full-attention model.",
        )


def _check_levers(spec: ModelSpec, plan: TrainPlan) -> None:
    if plan.attn_implementation == "sdpa" and not spec.has_sdpa:
        raise PlanError(
            "no-sdpa",
            f"--attn-implementation sdpa with {spec.id} ({spec.model_type}): scaled_dot_product_attention has no sinks "
            "and no soft-capped scores, and transformers refuses it. Use --attn-implementation eager.",
        )
    if plan.cp_size > 1 and plan.packing:
        raise PlanError(
            "cp-packing",
            f"--packing with --cp-size {plan.cp_size}: packed documents need a block mask that context parallelism "
            "drops. Use --no-packing; texts are joined end to end anyway.",
        )
    if plan.cp_size > 1 and plan.attn_implementation != "sdpa":
        raise PlanError(
            "cp-attention",
            f"--attn-implementation {plan.attn_implementation} with --cp-size {plan.cp_size}: context parallelism "
            "takes sdpa only. Use --attn-implementation sdpa.",
        )
    if plan.offload_activations and plan.activation_checkpointing == "none":
        raise PlanError(
            "offload-without-checkpointing",
            "--offload-activations moves checkpointed layer inputs to the host, but --activation-checkpointing is "
            "none, so there are none. Use --activation-checkpointing full.",
        )
    if plan.offload_prefetch and not (plan.offload_activations and plan.activation_checkpointing == "full"):
        raise PlanError(
            "prefetch-without-offload",
            "--offload-prefetch brings offloaded layer inputs back a layer ahead: it needs --offload-activations and "
            "--activation-checkpointing full. With selective, attention's outputs travel on a side stream anyway.",
        )
    if plan.activation_offloading and plan.offload_activations:
        raise PlanError(
            "two-offloads",
            "--activation-offloading (TRL) and --offload-activations (transformers) both move the layer inputs. Use "
            "--offload-activations alone: it needs less GPU memory.",
        )
    if plan.mlp_tile_size is not None and plan.activation_offloading:
        raise PlanError(
            "tiles-activation-offloading",
            f"--mlp-tile-size {plan.mlp_tile_size} with --activation-offloading: a tile's own backward hides from TRL "
            "when a tensor was used last, and it keeps all that a layer recomputes. Use --offload-activations.",
        )
    if plan.optim not in KNOWN_OPTIMIZERS:
        raise PlanError("unknown-optim", f"--optim {plan.optim!r} is not known. Use: {', '.join(KNOWN_OPTIMIZERS)}.")


def _check_states(spec: ModelSpec, plan: TrainPlan) -> None:
    """Levers on weights, gradients and optimizer states."""
    deepspeed = plan.backend == "deepspeed"
    for name, is_set, backend in (
        ("--zero-stage", plan.zero_stage is not None and not deepspeed, "deepspeed"),
        ("--offload-optimizer", plan.offload_optimizer and not deepspeed, "deepspeed"),
        ("--no-reshard-after-forward", not plan.reshard_after_forward and plan.backend != "fsdp2", "fsdp2"),
    ):
        if is_set:
            raise PlanError("other-backend", f"{name} is a choice of --backend {backend}, not of {plan.backend}.")
    if deepspeed and plan.offload_params and plan.zero_stage != 3:
        raise PlanError(
            "offload-params-stage",
            f"--offload-params with --zero-stage {plan.zero_stage}: only stage 3 shards the parameters and can move "
            "them to the host. Use --zero-stage 3, or --offload-optimizer alone.",
        )
    if plan.backend in ("fsdp2", "deepspeed") and plan.optim in UNSHARDED_OPTIMIZERS:
        raise PlanError(
            "optim-sharded",
            f"--optim {plan.optim} with --backend {plan.backend}: its step fails on sharded parameters. Use "
            "--optim adamw_torch_fused, or adamw_torch_8bit with fsdp2.",
        )
    if spec.tie_word_embeddings and plan.freeze_embeddings != plan.freeze_head:
        raise PlanError(
            "freeze-tied",
            f"{spec.id} has one table for embedding and head: --freeze-embeddings and --freeze-head go together.",
        )


def _check_lora(spec: ModelSpec, plan: TrainPlan) -> None:
    """Levers that need adapters, or that adapters make pointless."""
    del spec
    if plan.lora_r is None:
        for flag, is_set in (("--quantize nf4", plan.quantize != "none"), ("--lora-dropout", plan.lora_dropout > 0)):
            if is_set:
                raise PlanError(
                    "without-lora",
                    f"{flag} without --lora-r: 4-bit weights cannot be trained and dropout is that of the adapters. "
                    "Add --lora-r 16, or leave it out.",
                )
    elif plan.freeze_embeddings or plan.freeze_head:
        raise PlanError(
            "freeze-with-lora",
            "--freeze-embeddings and --freeze-head with --lora-r: LoRA freezes the whole base model anyway. Leave them "
            "out.",
        )
    if plan.mlp_tile_size is not None and plan.lora_dropout > 0:
        raise PlanError(
            "tiles-lora-dropout",
            f"--mlp-tile-size {plan.mlp_tile_size} with --lora-dropout {plan.lora_dropout}: a tile runs forward twice "
            "and would draw another dropout the second time. Use --lora-dropout 0.",
        )
    if plan.quantize != "none" and plan.dtype != "bfloat16":
        raise PlanError("quantize-dtype", f"--quantize nf4 with --dtype {plan.dtype}: use --dtype bfloat16.")


KNOWN_OPTIMIZERS = (
    "adamw_torch_fused", "adamw_torch", "adamw_torch_8bit", "adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit",
    "adafactor", "sgd",
)  # fmt: skip
"""Values of transformers' ``optim`` that lcplan knows by name; transformers 5.24 and TRL 1.16 offer no Muon."""
UNSHARDED_OPTIMIZERS = ("adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "adafactor")
"""Optimizers whose step fails on DTensor shards (bitsandbytes 0.50, transformers 5.24 Adafactor; torch 2.11)."""
