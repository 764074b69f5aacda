"""Model weights: resident shards, gathered copies, and what a save writes.

Letters: P parameters, W ranks that share the states, b bytes of one element.
"""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.units import ceil_div

BF16_BYTES = 2
"""torch.bfloat16.itemsize."""
FP32_BYTES = 4
"""torch.float32.itemsize."""
NF4_BLOCK = 64
"""Weights that share one scale: bitsandbytes 0.50 default blocksize of 4-bit weights on CUDA."""
NF4_NESTED_BLOCK = 256
"""Scales that share one float32 scale of their own: double quantisation, bitsandbytes 0.50 quantize_4bit."""


@item("weights.parameters", "parameter")
def parameters(*, num_parameters: int, dtype_bytes: int, ranks: int) -> int:
    """Weights resident on one rank; FSDP2 keeps trainable ones in float32 (b=4) even if they were loaded in bf16.

    Frozen ones stay as they were loaded.

    Formula: ``b*P/W``
    Live in: every phase
    Rounding: up to whole bytes; each small tensor takes a 512-byte block, about 0.3 MB for a whole model
    Ignores: padding of a parameter whose first dimension is no multiple of W
    Source: accelerate 1.15 utils/fsdp_utils.py fsdp2_prepare_model (upcast); resident bytes of rows m001-m034
    Confidence: exact
    """
    return ceil_div(dtype_bytes * num_parameters, ranks)


@item("weights.nf4", "parameter")
def nf4(*, num_parameters: int, ranks: int) -> int:
    """Linear weights in 4-bit NormalFloat: two a byte, a one-byte scale a block, a float32 scale for 256 scales.

    FSDP2 shards the packed weights and leaves the scales whole on every rank.

    Formula: ``P/(2*W) + P/64 + 4*P/(64*256)``
    Live in: every phase
    Rounding: up to whole bytes
    Ignores: tables of 16 and 256 values for each matrix, 2 kB
    Source: bitsandbytes 0.50 quantize_4bit with compress_statistics; resident bytes of rows m122-m126
    Confidence: exact
    """
    scales = ceil_div(num_parameters, NF4_BLOCK)
    return ceil_div(num_parameters, 2 * ranks) + scales + FP32_BYTES * ceil_div(scales, NF4_NESTED_BLOCK)


@item("weights.dequantised", "temporary")
def dequantised(*, largest_matrix: int) -> int:
    """One 4-bit matrix unpacked to bf16 for the gradient of its input.

    Formula: ``2*H*I`` (the largest matrix of a layer)
    Live in: backward of a layer (nf4)
    Rounding: exact
    Ignores: nothing
    Source: bitsandbytes 0.50 MatMul4Bit.backward; allocator trace of Qwen3-4B with nf4; row m123
    Confidence: exact
    """
    return BF16_BYTES * largest_matrix


@item("weights.gathered_layers", "all_gather")
def gathered_layers(*, layer_parameters: int, num_layers: int) -> int:
    """Unsharded bf16 weights of decoder layers under FSDP2: the current one and the prefetched next.

    N is 2 in the backward of layers 1 and up, 1 in layer 0, and 1 in the loss under peft. Where layers are not
    resharded after their forward, all that have not yet run backward are there.

    Formula: ``2*P_layer*N``
    Live in: forward, backward, loss (LoRA)
    Rounding: exact
    Ignores: the flat all-gather buffer between copy-in and copy-out
    Source: torch.distributed.fsdp fully_shard, one unit a decoder layer; allocator trace of Qwen3-8B, cp 8
    Confidence: exact
    """
    return BF16_BYTES * layer_parameters * num_layers


@item("weights.gathered_nf4_layers", "all_gather")
def gathered_nf4_layers(*, linear_parameters: int, num_layers: int) -> int:
    """Unsharded 4-bit linears of decoder layers under FSDP2, the current one and the prefetched next.

    Formula: ``P_linear/2*N``
    Live in: forward, backward
    Rounding: up to whole bytes
    Ignores: nothing
    Source: torch.distributed.fsdp fully_shard over bitsandbytes' packed storage; row m126
    Confidence: exact
    """
    return ceil_div(linear_parameters, 2) * num_layers


@item("weights.gathered_embedding", "all_gather")
def gathered_embedding(*, embedding_parameters: int) -> int:
    """Unsharded bf16 token embedding, prefetched while layer 0 runs backward (untied models).

    Twice before the backward of a frozen one: the flat all-gather buffer, and what is copied out of it.

    Formula: ``2*V*H``; frozen, in its own backward: ``4*V*H``
    Live in: backward of layer 0, backward of the embedding
    Rounding: exact
    Ignores: nothing
    Source: accelerate 1.15 fsdp2_prepare_model (the embedding is a unit of its own); row m014
    Confidence: exact
    """
    return BF16_BYTES * embedding_parameters


@item("weights.gathered_head", "all_gather")
def gathered_head(*, head_parameters: int) -> int:
    """Unsharded bf16 [norm, lm_head] under FSDP2, not resharded after forward; with tied weights all step long.

    Formula: ``2*(V*H + H)``
    Live in: loss; every phase up to the backward of the embedding when the head is tied
    Rounding: exact
    Ignores: nothing
    Source: accelerate 1.15 fsdp2_prepare_model (tail unit, reshard_after_forward=False); rows m012, m033
    Confidence: exact
    """
    return BF16_BYTES * head_parameters


@item("weights.autocast_copies", "temporary")
def autocast_copies(*, layer_weight_parameters: int) -> int:
    """Bf16 copies of float32 weights that autocast keeps for the backward.

    Norms are not cast. Until the forward ends those of every layer that ran are there, checkpointed or not. In the
    layer that runs backward, down_proj's copy is gone in the MLP's backward, the MLP's in the attention's. Without
    checkpointing every layer still to come keeps all of its copies.

    Formula: ``2*(P_attention + 2*H*I)``, ``2*P_attention``; layers to come: ``2*(P_attention + 3*H*I)``
    Live in: forward (all layers that ran), backward of a layer (float32 weights on one GPU)
    Rounding: exact
    Ignores: nothing
    Source: allocator trace of Qwen3-4B float32 under bf16 autocast; row m024
    Confidence: exact
    """
    return BF16_BYTES * layer_weight_parameters


@item("disk.saved_model", "parameter")
def saved_model(*, num_parameters: int, dtype_bytes: int) -> int:
    """Weights in the saved model; FSDP2 saves its float32 masters.

    Formula: ``b*P``
    Live in: save
    Rounding: exact
    Ignores: headers and tokenizer, some MB
    Source: safetensors file size
    Confidence: exact
    """
    return dtype_bytes * num_parameters


@item("disk.checkpoint", "optimizer_state")
def checkpoint(*, num_parameters: int, dtype_bytes: int) -> int:
    """One resumable checkpoint: weights and both AdamW moments.

    Formula: ``3*b*P``
    Live in: save
    Rounding: exact
    Ignores: scheduler, random states, trainer state
    Source: transformers Trainer._save_checkpoint
    Confidence: modelled
    """
    return 3 * dtype_bytes * num_parameters


@item("disk.zero_checkpoint", "optimizer_state")
def zero_checkpoint(*, num_parameters: int) -> int:
    """One resumable checkpoint of DeepSpeed: bf16 weights, float32 masters and both moments, in files of all ranks.

    Formula: ``(2 + 4 + 8)*P``
    Live in: save
    Rounding: exact
    Ignores: padding of the shards, scheduler, random states
    Source: deepspeed 0.19.8 runtime/engine.py save_checkpoint
    Confidence: modelled
    """
    return (BF16_BYTES + 3 * FP32_BYTES) * num_parameters
