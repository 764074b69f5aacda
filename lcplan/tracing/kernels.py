"""What fake tensors cannot show of operators: scratch of GPU kernels, sizes that hang on values, who fills a buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch  # noqa: TID253  (imported by the trace method alone)

from lcplan.ledger import Category

ADD = "aten.add.Tensor"
SOFTMAX_BACKWARD = "aten._softmax_backward_data.default"
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
GATHERS = ("_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.all_to_all_single.default")
"""Ring attention's exchange of keys and values."""


def beside_outputs(tied_table: tuple[int, ...] | None, operator: str, args: tuple[Any, ...]) -> int:
    """What an operator needs on a GPU beside the outputs it has here; negative where it needs less.

    The two gradients of a tied table are added in place, which autograd does not do under a dispatch mode. cuDNN's
    attention backward has scratch: see attention.backward in the formulas. Softmax backward has the product of gradient
    and output (aten/src/ATen/native/cuda/SoftMax.cu).
    """
    if operator == ADD and tied_table is not None and tuple(args[0].shape) == tied_table:
        return -int(args[0].untyped_storage().nbytes())
    if operator == SOFTMAX_BACKWARD:
        return int(args[0].untyped_storage().nbytes())
    if operator != ATTENTION_BACKWARD:
        return 0
    query, key = args[1], args[2]
    batch, heads, queries, head_dim = query.shape
    keys = key.shape[2]
    expanded = 4 * heads * head_dim * keys if key.shape[1] < heads else 0
    return int(batch * (queries * (4 * heads * head_dim + 4 * heads) + expanded))


def picked_rows(fraction: float, operator: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Rows picked by a mask, which is how the loss head leaves out tokens without a label: a ``fraction`` of all."""
    if operator is not torch.ops.aten.index.Tensor or args[1][0].dtype != torch.bool:
        return None
    given, mask = args[0], args[1][0]
    return given.new_empty((math.ceil(mask.numel() * fraction), *given.shape[mask.dim() :]))


def settled_categories(
    operator: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Iterator[tuple[torch.Tensor, Category]]:
    """Buffers of FSDP2 and ring attention, told by the operators that fill them."""
    if operator.startswith("fsdp."):
        if "all_gather_copy_in" in operator:
            yield args[1], "all_gather"
        elif "split_with_sizes_copy" in operator:
            for tensor in kwargs["out"]:
                yield tensor, "all_gather"
        elif "chunk_cat" in operator:
            for tensor in args[0]:
                yield tensor, "gradient"
            yield kwargs["out"], "reduce_scatter"
    elif operator in GATHERS:
        yield result, "all_gather"
