"""A resolved training plan: what one step does, on which GPUs, with which levers.

Names are those of config files in the field: Transformers and TRL for training, accelerate for parallelism. A
``TrainPlan`` has no open ends: ``resolve`` fills what the user left unset, lists each choice as an assumption,
and refuses what the stack refuses.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lcplan._record import Record

Backend = Literal["single", "fsdp2", "deepspeed"]
Dtype = Literal["bfloat16", "float32"]
Loss = Literal["chunked", "full"]
ActivationCheckpointing = Literal["full", "selective", "none"]
AttnImplementation = Literal["sdpa", "flash_attention_2", "eager"]
CommStrategy = Literal["allgather", "alltoall"]


class TrainPlan(Record):
    """Every resolved choice of one training job."""

    max_length: int = Field(gt=0)
    """Tokens of one sequence over all GPUs."""
    per_device_train_batch_size: int = Field(default=1, gt=0)
    """Sequences a data-parallel rank holds in one micro step."""
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
    dtype: Dtype = "bfloat16"
    """Type the weights are loaded in; FSDP2 keeps trainable masters in float32 either way."""
    optim: str = "adamw_torch_fused"
    loss: Loss = "chunked"
    activation_checkpointing: ActivationCheckpointing = "full"
    checkpoint_every_n_layers: int = Field(default=1, gt=0)
    offload_activations: bool = False
    """Checkpointed layer inputs wait in pinned host memory."""
    offload_params: bool = False
    mlp_tile_size: int | None = Field(default=None, gt=0)
    lora_r: int | None = Field(default=None, gt=0)
    lora_target_modules: str = "all-linear"
    quantize: Literal["none", "nf4"] = "none"
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
    def shard_size(self) -> int:
        """Ranks over which parameters, gradients and optimizer states are split."""
        return self.dp_shard_size * self.cp_size * self.sp_size if self.backend != "single" else 1

    @property
    def length_multiple(self) -> int:
        """max_length must be a multiple of this: ring attention cuts a sequence into 2 x cp_size chunks."""
        return 2 * self.cp_size if self.cp_size > 1 else self.sp_size
