"""Optimizer states, and what an optimizer needs while it updates.

Letters: P parameters, W ranks that share the states, b bytes of one element, V vocabulary, H hidden size.
"""

from __future__ import annotations

from lcplan.estimators._item import item
from lcplan.estimators.weights import FP32_BYTES
from lcplan.units import ceil_div


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
