"""Ring attention that holds less: over some heads at a time, and summed up without float32.

Torch's ring attention holds partial outputs, gradients in transit and float32 sums of all heads at once, several times
the size of queries and keys. Heads do not depend on one another, so the ring may go round once for each part of them
(UPipe, arXiv:2602.21196, does so with Ulysses): the same kernels on the same numbers, and as many bytes exchanged.
Without float32 (trl #6846) the sums of the gradients round at each step of the ring.

Private names of torch, looked for by ``install``: the operators that context parallelism replaces (``custom_ops``) and
``_cp_options``. Tested with torch 2.13.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

RING = "torch.distributed.tensor.experimental._context_parallel._attention"
HEADS = 1
"""Dimension of the heads in every tensor of attention: queries, keys, outputs, their gradients, logsumexp."""


def install(*, head_chunks: int, merge_dtype: str) -> None:
    """To be called before the first step.

    Raises:
        RuntimeError: where this torch's ring attention is built in another way.
    """
    if head_chunks == 1 and merge_dtype == "float32":
        return
    try:
        ring = importlib.import_module(RING)
        options, operators = ring._cp_options, ring.custom_ops
    except (ModuleNotFoundError, AttributeError) as error:
        raise RuntimeError(
            f"torch {torch.__version__} has another ring attention than {RING}. Plan without --cp-head-chunks and "
            "--cp-merge-dtype."
        ) from error
    options.convert_to_f32 = merge_dtype == "float32"
    if head_chunks > 1:
        for operator, handler in list(operators.items()):
            operators[operator] = in_chunks(handler, head_chunks)


def in_chunks(handler: Callable[..., Any], chunks: int) -> Callable[..., tuple[Any, ...]]:
    """Ring attention, or its backward, over one part of the heads after another."""

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        whole: list[Any] = []
        for index in range(chunks):
            results = handler(operator, tuple(_part(each, index, chunks) for each in args), kwargs)
            whole = whole or [_room(each, chunks) for each in results]
            whole = [_filled(room, each, index) for room, each in zip(whole, results, strict=True)]
            del results  # not beside those of the next part
        return tuple(whole)

    return run


def _has_heads(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > HEADS + 1


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _part(value: Any, index: int, chunks: int) -> Any:
    """Some heads of an argument that has any."""
    if not _has_heads(value):
        return value
    return _like(value, _local(value).chunk(chunks, dim=HEADS)[index])


def _room(value: Any, chunks: int) -> Any:
    """Memory for all heads of a result, in the order in which those of a part lie in memory."""
    if not _has_heads(value):
        return value
    part = _local(value)
    order = sorted(range(part.dim()), key=lambda dim: -part.stride(dim))
    shape = [size * (chunks if dim == HEADS else 1) for dim, size in enumerate(part.shape)]
    place = sorted(range(part.dim()), key=order.__getitem__)
    return _like(value, part.new_empty([shape[dim] for dim in order]).permute(place))


def _filled(room: Any, value: Any, index: int) -> Any:
    """The part written to its place; what has no heads is that of the last part."""
    if not _has_heads(value):
        return value
    part = _local(value)
    heads = part.shape[HEADS]
    _local(room).narrow(HEADS, index * heads, heads).copy_(part)
    return room


def _like(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return local
    return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False)
