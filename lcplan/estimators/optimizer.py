"""Optimizer states, and what an optimizer needs while it updates.

Letters: P parameters, W ranks that share the states, b bytes of one element, V vocabulary, H hidden size.
"""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.estimators.weights import FP32_BYTES
from lcplan.units import ceil_div

QUANTISED_BLOCK = 256
"""Elements that share one float32 scale: bitsandbytes 0.50 and torchao 0.18, 8-bit AdamW."""
PAGED_FROM = 100_000
"""Elements from which on bitsandbytes 0.50 pages a tensor's states (Optimizer2State.get_state_buffer)."""


@item("optimizer.adamw_states", "optimizer_state")
def adamw_states(*, num_parameters: int, dtype_bytes: int, ranks: int) -> int:
    """First and second moment of AdamW, in the dtype of the weights they belong to.

    Formula: ``2*b*P/W``
    Live in: every phase from the second step on
    Rounding: up to whole bytes
    Ignores: one 512-byte step counter per parameter tensor
    Source: torch.optim.AdamW (fused); resident bytes of rows m001-m034
    Confidence: exact
    """
    return ceil_div(2 * dtype_bytes * num_parameters, ranks)


@item("optimizer.foreach_temporary", "temporary")
def foreach_temporary(*, num_parameters: int, dtype_bytes: int, ranks: int) -> int:
    """Denominators of all parameters at once: AdamW without the fused kernel updates them as one list.

    Formula: ``b*P/W``
    Live in: optimizer_step (adamw_torch)
    Rounding: up to whole bytes
    Ignores: nothing
    Source: torch.optim.adamw _multi_tensor_adamw; optimizer phase of Qwen3-4B with adamw_torch
    Confidence: exact
    """
    return ceil_div(dtype_bytes * num_parameters, ranks)


@item("optimizer.adamw_8bit_states", "optimizer_state")
def adamw_8bit_states(*, num_parameters: int, ranks: int) -> int:
    """Two one-byte codes a parameter and a float32 scale for each block of 256 codes.

    Formula: ``(2 + 2*4/256)*P/W``
    Live in: every phase from the second step on
    Rounding: up to whole bytes
    Ignores: tensors below 4,096 elements, whose states stay wide, and tables of 256 values; below 0.3 MB
    Source: bitsandbytes 0.50 optim.AdamW, torchao 0.18 AdamW8bit; rows m109-m113, m116-m118
    Confidence: exact
    """
    return ceil_div(2 * num_parameters + 2 * FP32_BYTES * num_parameters // QUANTISED_BLOCK, ranks)


@item("optimizer.wide_embedding_states", "optimizer_state")
def wide_embedding_states(*, embedding_parameters: int) -> int:
    """Float32 moments of the embedding: transformers keeps it out of bitsandbytes' 8-bit states.

    Formula: ``8*V*H``
    Live in: every phase from the second step on
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 Trainer.create_optimizer (register_module_override); rows m109-m112
    Confidence: exact
    """
    return 2 * FP32_BYTES * embedding_parameters


@item("optimizer.paged_scales", "optimizer_state")
def paged_scales(*, num_parameters: int) -> int:
    """Scales of paged 8-bit states: the states themselves are in managed memory, which no allocator of torch counts.

    Formula: ``2*4/256*P``
    Live in: every phase from the second step on
    Rounding: exact
    Ignores: states of tensors below 100,000 elements, which are not paged
    Source: bitsandbytes 0.50 Optimizer2State.init_state, get_paged; row m114
    Confidence: exact
    """
    return 2 * FP32_BYTES * num_parameters // QUANTISED_BLOCK


@item("optimizer.torchao_update", "temporary")
def torchao_update(*, largest_parameter: int, ranks: int) -> int:
    """Both moments of one parameter in float32, and their new scales, in the compiled 8-bit update.

    Formula: ``(8 + 2*4/256)*V*H/W`` (the largest matrix)
    Live in: optimizer_step (adamw_torch_8bit)
    Rounding: up to whole bytes
    Ignores: nothing
    Source: torchao 0.18 single_param_adam under torch.compile; optimizer phase of rows m116-m118
    Confidence: exact
    """
    wide = 2 * FP32_BYTES * largest_parameter
    return ceil_div(wide + wide // QUANTISED_BLOCK, ranks)


@item("optimizer.adafactor_states", "optimizer_state")
def adafactor_states(*, sum_of_sides: int) -> int:
    """Row and column statistics of every matrix, float32.

    Formula: ``4*(rows + columns)`` summed over matrices
    Live in: every phase from the second step on
    Rounding: exact
    Ignores: statistics of norms, and 512-byte blocks
    Source: transformers 5.24 optimization.Adafactor; resident bytes of Qwen3-4B with adafactor
    Confidence: exact
    """
    return FP32_BYTES * sum_of_sides


@item("optimizer.adafactor_update", "temporary")
def adafactor_update(*, largest_parameter: int) -> int:
    """Float32 gradient, its square, the update and the weight's copy, of one parameter at a time.

    Formula: ``16*V*H`` (the largest matrix)
    Live in: optimizer_step (adafactor)
    Rounding: exact
    Ignores: nothing
    Source: transformers 5.24 optimization.Adafactor.step; optimizer phase of Qwen3-4B with adafactor
    Confidence: exact
    """
    return 4 * FP32_BYTES * largest_parameter
