"""Checkpointed layers that recompute all but attention, with what they keep on the host.

TRL's selective checkpointing keeps attention's output and logsumexp on the GPU, and transformers' ``offload`` moves the
layer inputs alone; neither does both (trl #7194, transformers #48444). Here a layer keeps three things between its
forward and its backward, all in pinned host memory: its input, and attention's output and logsumexp. Its recomputation
gets the latter back instead of running attention, whose backward needs no more of the forward than these two.

Under context parallelism the operator seen here is the whole ring: its arguments are DTensors, its results the merged
ones, so one output a layer is kept and not one a ring step.

Copies to the host run on a stream of their own beside the rest of the layer's forward. An output comes back while the
layer's norm and projections are recomputed, which takes longer than the copy: nothing is fetched a layer ahead, which
would have to lie on the GPU at the peak.

Private names, looked for when used: ``_gradient_checkpointing_func`` (transformers' layers) and aten's attention
operators. Tested with torch 2.13, measured with 2.11; transformers 5.24, trl 1.16.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

STREAMS: Any = torch.cuda
SMALL = 1024
"""Results of no more elements (random seeds) stay where they are."""
LAST_BLOCK = 2**21
"""Bytes below which the end of a tensor is one block."""
ATTENTION = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(torch.ops.aten, name)
)
"""Operators whose results are kept; those of the flash_attn package are told by their name."""


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether host memory is another memory than the tensor's."""
    return bool(tensor.is_cuda)


class KeepAttention(TrainerCallback):
    """Installs it once the trainer has enabled checkpointing."""

    def on_train_begin(self, *_args: Any, model: torch.nn.Module, **_kwargs: Any) -> None:
        """Called by the trainer."""
        install(model)


def install(model: torch.nn.Module) -> None:
    """Let every layer for which checkpointing is enabled keep its input and attention's results on the host.

    Raises:
        RuntimeError: when there is no such layer.
    """
    store = HostStore()
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    layers = [layer for layer in layers if layer.gradient_checkpointing]
    if not layers:
        raise RuntimeError(f"no layer of {type(model).__name__} is checkpointed, so none can keep attention.")
    for layer in layers:
        layer._gradient_checkpointing_func = store.checkpoint


def block_bytes(num_bytes: int) -> Iterator[int]:
    """Parts of a tensor that each fill a pinned block: the allocator rounds every request up to a power of two."""
    while num_bytes >= LAST_BLOCK:
        block = 1 << (num_bytes.bit_length() - 1)
        yield block
        num_bytes -= block
    if num_bytes:
        yield num_bytes


class OnHost(NamedTuple):
    """A tensor's elements in host memory, in the order in which they lie in memory."""

    blocks: tuple[torch.Tensor, ...]
    shape: torch.Size
    order: tuple[int, ...]
    """Dimensions from the one with the largest stride on."""
    device: torch.device

    def shaped(self, elements: torch.Tensor) -> torch.Tensor:
        """The elements with the shape and the strides of the tensor."""
        place = sorted(range(len(self.order)), key=self.order.__getitem__)
        return elements.view([self.shape[dim] for dim in self.order]).permute(place)


class HostStore:
    """Copies to the host and back, those of one layer at a time."""

    def __init__(self) -> None:
        self._side: Any = None
        self._leaving: list[torch.Tensor] = []
        """What the side stream still reads."""

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a layer as torch's non-reentrant checkpoint does; its tensor arguments wait on the host."""
        if self._side is not None:
            # Pinned memory is free again once the copies that used it are done: those of the backward before, of
            # another micro batch. Without this wait more would be pinned.
            self._side.synchronize()
        kept = KeptResults(self)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (Keeping(kept), Returning(kept)))

    def _pack(self, tensor: torch.Tensor) -> OnHost | torch.Tensor:
        return self.send(tensor) if tensor.numel() > SMALL else tensor

    def _unpack(self, packed: OnHost | torch.Tensor) -> torch.Tensor:
        """On the compute stream: the layer's first operation needs its input."""
        if not isinstance(packed, OnHost):
            return packed
        elements = self._room(packed)
        self._fill(elements, packed)
        return packed.shaped(elements)

    def send(self, tensor: torch.Tensor) -> OnHost:
        """Start to copy to the host. The tensor's memory must not be used again before ``sent``, which keeps it."""
        order = tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))
        elements = tensor.detach().permute(order).reshape(-1)
        on_gpu = is_on_gpu(tensor)
        parts = elements.split([size // tensor.itemsize for size in block_bytes(tensor.nbytes)])
        blocks = tuple(torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=on_gpu) for part in parts)
        with self._beside(on_gpu=on_gpu):
            for block, part in zip(blocks, parts, strict=True):
                block.copy_(part, non_blocking=on_gpu)
        if on_gpu:
            self._leaving.append(elements)
        return OnHost(blocks, tensor.shape, order, tensor.device)

    def sent(self) -> None:
        """The compute stream waits for what was sent, whose memory may be used again from here on."""
        if self._leaving:
            STREAMS.current_stream().wait_stream(self._side)
            self._leaving.clear()

    def fetch(self, held: OnHost) -> torch.Tensor:
        """Start to copy back from the host; the compute stream must wait for ``arrived``."""
        elements = self._room(held)
        with self._beside(on_gpu=is_on_gpu(elements)):
            self._fill(elements, held)
        return held.shaped(elements)

    def arrived(self) -> None:
        """The compute stream waits for what was fetched."""
        if self._side is not None:
            STREAMS.current_stream().wait_stream(self._side)

    def _room(self, held: OnHost) -> torch.Tensor:
        count = sum(block.numel() for block in held.blocks)
        return torch.empty(count, dtype=held.blocks[0].dtype, device=held.device)

    def _fill(self, elements: torch.Tensor, held: OnHost) -> None:
        for block, part in zip(held.blocks, elements.split([b.numel() for b in held.blocks]), strict=True):
            part.copy_(block, non_blocking=is_on_gpu(elements))

    @contextlib.contextmanager
    def _beside(self, *, on_gpu: bool) -> Iterator[None]:
        """On the side stream, once the compute stream has got here."""
        if not on_gpu:
            yield
            return
        if self._side is None:
            self._side = STREAMS.Stream()
        self._side.wait_stream(STREAMS.current_stream())
        with STREAMS.stream(self._side):
            yield


class Piece(NamedTuple):
    """One result of attention: what is kept of it, and what makes it whole again."""

    kept: OnHost | torch.Tensor
    whole: Callable[[torch.Tensor], torch.Tensor]


class KeptResults:
    """Attention's results of one layer, from its forward to its recomputation."""

    def __init__(self, store: HostStore) -> None:
        self.store = store
        self._calls: deque[list[Any]] = deque()

    def keep(self, results: tuple[Any, ...]) -> None:
        """Take the results of a call."""
        self.store.sent()  # the layer's input: its copy began before attention did
        self._calls.append([self._piece(each) if isinstance(each, torch.Tensor) else each for each in results])

    def _piece(self, result: torch.Tensor) -> Piece:
        whole, local = _unchanged, result
        if isinstance(result, DTensor):
            whole, local = _sharded_like(result), result.to_local()
        return Piece(self.store.send(local) if local.numel() > SMALL else local.detach(), whole)

    def start_fetching(self) -> None:
        """Begin to bring the results back."""
        self._calls = deque([self._started(each) for each in call] for call in self._calls)

    def _started(self, each: Any) -> Any:
        if not isinstance(each, Piece) or not isinstance(each.kept, OnHost):
            return each
        return each._replace(kept=self.store.fetch(each.kept))

    def take(self) -> tuple[Any, ...]:
        """The results of the next call, as they were."""
        self.store.arrived()
        return tuple(each.whole(each.kept) if isinstance(each, Piece) else each for each in self._calls.popleft())


def _unchanged(local: torch.Tensor) -> torch.Tensor:
    return local


def _sharded_like(result: DTensor) -> Callable[[torch.Tensor], torch.Tensor]:
    mesh, placements, shape, stride = result.device_mesh, result.placements, result.shape, result.stride()

    def sharded(local: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    return sharded


def is_attention(operator: Any) -> bool:
    """Whether the results of an operator are kept."""
    return operator in ATTENTION or "flash_attn" in str(operator)


class Keeping(TorchDispatchMode):
    """Around a layer's forward."""

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operator."""
        results = func(*args, **(kwargs or {}))
        if is_attention(func):
            self.kept.keep(results)
        return results

    def __exit__(self, *exception: Any) -> None:
        """The layer is over: what it sent has left."""
        super().__exit__(*exception)
        self.kept.store.sent()


class Returning(TorchDispatchMode):
    """Around a layer's recomputation."""

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self.kept = kept

    def __enter__(self) -> Any:
        """The results come back while the layer's norm and projections run."""
        self.kept.start_fetching()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operator."""
        return self.kept.take() if is_attention(func) else func(*args, **(kwargs or {}))
