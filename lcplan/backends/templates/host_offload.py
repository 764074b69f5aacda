"""What checkpointed layers keep in host memory, where transformers and TRL do not do it: two ways, on a stream beside.

Layer inputs alone, which come back a layer ahead: transformers' ``offload`` copies them on the compute stream, which
waits for every copy, and TRL's offloading, which has a stream, does not go with FSDP2.

Or inputs and attention: TRL's selective checkpointing keeps attention's output and logsumexp on the GPU, and
transformers' ``offload`` moves the layer inputs alone; neither does both (trl #7194, transformers #48444). Here a layer
keeps three things between its forward and its backward, all in pinned host memory: its input, and attention's output
and logsumexp. Its recomputation gets the latter back instead of running attention, whose backward needs no more of the
forward than these two.

Under context parallelism the operator seen here is the whole ring: its arguments are DTensors, its results the merged
ones, so one output a layer is kept and not one a ring step.

Copies to the host run on a stream of their own beside the rest of the layer's forward. Attention's output comes back
while the layer's norm and projections are recomputed, which takes longer than the copy: it is not fetched a layer
ahead, where it would lie on the GPU at the peak.

Private names, looked for when used: ``_gradient_checkpointing_func`` (transformers' layers) and aten's attention
operators. Tested with torch 2.13, measured with 2.11; transformers 5.24, trl 1.16.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
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


class HostOffload(TrainerCallback):
    """Installs it once the trainer has enabled checkpointing."""

    def __init__(self, *, keep_attention: bool) -> None:
        self.keep_attention = keep_attention

    def on_train_begin(self, *_args: Any, model: torch.nn.Module, **_kwargs: Any) -> None:
        """Called by the trainer."""
        install(model, keep_attention=self.keep_attention)


def install(model: torch.nn.Module, *, keep_attention: bool) -> None:
    """Let every layer for which checkpointing is enabled keep its input on the host, and attention's results or not.

    Raises:
        RuntimeError: when there is no such layer.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    layers = [layer for layer in layers if layer.gradient_checkpointing]
    if not layers:
        raise RuntimeError(f"no layer of {type(model).__name__} is checkpointed, so none can offload its input.")
    run = checkpoint_with_attention if keep_attention else checkpoint_ahead
    store = HostStore()
    for layer in layers:
        layer._gradient_checkpointing_func = partial(run, store)


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
        self._queued: list[OnHost] = []
        self._ahead: torch.Tensor | None = None

    def settle(self) -> None:
        """Wait until no copy runs.

        Pinned memory is free again once the copies that used it are done: those of the backward before, of another
        micro batch. Without this wait at every layer's forward more would be pinned.
        """
        if self._side is not None:
            self._side.synchronize()

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

    def bring(self, held: OnHost) -> torch.Tensor:
        """Copy back from the host, on the compute stream."""
        elements = self._room(held)
        self._fill(elements, held)
        return held.shaped(elements)

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

    def queue(self, tensor: torch.Tensor) -> OnHost:
        """Start to copy to the host what ``next`` will ask for in reverse order."""
        held = self.send(tensor)
        self._queued.append(held)
        return held

    def next(self, held: OnHost) -> torch.Tensor:
        """What was queued last, which mostly is here by now; the one before it starts to come.

        Raises:
            RuntimeError: when another was queued last.
        """
        if self._queued.pop() is not held:
            raise RuntimeError("a layer's backward runs out of turn, so the input that came ahead is another layer's.")
        found, self._ahead = self._ahead, None
        if found is None:
            found = self.bring(held)
        else:
            self.arrived()
        if self._queued:
            self._ahead = self.fetch(self._queued[-1])
        return found

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


def checkpoint_with_attention(store: HostStore, function: Callable[..., Any], *args: Any) -> Any:
    """Run a layer as torch's non-reentrant checkpoint does; its input waits on the host, and attention's results."""
    store.settle()
    kept = KeptResults(store)

    def pack(tensor: torch.Tensor) -> OnHost | torch.Tensor:
        return store.send(tensor) if tensor.numel() > SMALL else tensor

    def unpack(packed: OnHost | torch.Tensor) -> torch.Tensor:
        # on the compute stream: the layer's first operation needs its input
        return store.bring(packed) if isinstance(packed, OnHost) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (Keeping(kept), Returning(kept)))


def checkpoint_ahead(store: HostStore, function: Callable[..., Any], *args: Any) -> Any:
    """Run a layer as torch's non-reentrant checkpoint does; its input waits on the host, to come back a layer ahead."""
    store.settle()

    def pack(tensor: torch.Tensor) -> OnHost | torch.Tensor:
        return store.queue(tensor) if tensor.numel() > SMALL else tensor

    def unpack(packed: OnHost | torch.Tensor) -> torch.Tensor:
        return store.next(packed) if isinstance(packed, OnHost) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        outputs = checkpoint(function, *args, use_reentrant=False)
    store.sent()
    return outputs


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
