"""Live storages under a dispatch mode: what is allocated, by which module, and when it is freed.

Sizes are rounded up to 512 bytes as CUDA's caching allocator does. A storage is freed when its last reference goes,
which PyTorch tells through a weak reference to the storage object. The CPU stands in for the GPU, and the meta device
for the host: a pinned tensor is made there and counts for nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch  # noqa: TID253  (imported by the trace method alone)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID253
from torch.utils._pytree import tree_leaves  # noqa: TID253

from lcplan.ledger import Category

BLOCK_BYTES = 512
"""c10/cuda/CUDACachingAllocator.cpp kMinBlockSize."""
WAIT = "_c10d_functional.wait_tensor.default"
HOST = "meta"
"""Device type of tensors that stand for host memory."""


class Kind(NamedTuple):
    """What tensors have in common that a report counts together."""

    category: Category
    module: str
    """Module whose forward, or whose backward, made it."""
    operator: str
    shape: tuple[int, ...]
    dtype: str


Alive = Counter[Kind]
"""Bytes of what is alive at one instant."""


class Storage:
    """One allocation; its category may be settled after it was made, when it turns out to be a gradient."""

    __slots__ = ("category", "kind", "num_bytes")

    def __init__(self, num_bytes: int, kind: Kind) -> None:
        self.num_bytes, self.kind, self.category = num_bytes, kind, kind.category


class Peak(NamedTuple):
    """The largest total of a phase: how far the log was then, and what a kernel had beside its tensors."""

    total: int
    position: int
    scratch: int


def blocks(num_bytes: int) -> int:
    """Bytes that the allocator hands out for a request."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def storage_key(tensor: torch.Tensor) -> int:
    """What tells one storage from another; tensors that share memory have the same."""
    return int(tensor.untyped_storage()._cdata)


class StorageTracker(TorchDispatchMode):  # type: ignore[misc]
    """Counts live storages while it is active; ``phase`` names the part of the step that runs."""

    def __init__(
        self,
        *,
        scratch_of: Callable[[str, tuple[Any, ...]], int],
        category_of: Callable[[str, tuple[Any, ...], dict[str, Any], Any], Iterable[tuple[torch.Tensor, Category]]],
        module_of: Callable[[], str],
        stand_in_for: Callable[[Any, tuple[Any, ...]], torch.Tensor | None],
    ) -> None:
        """What the tracker asks at every operator.

        Args:
            scratch_of: bytes that an operator needs on a GPU beside its outputs here
            category_of: tensors whose category the operator settles
            module_of: the module that runs
            stand_in_for: result of an operator that cannot run on tensors without values, None for all others
        """
        super().__init__()
        self.scratch_of, self.category_of, self.module_of = scratch_of, category_of, module_of
        self.stand_in_for = stand_in_for
        self.phase = "init"
        self.live: dict[int, Storage] = {}
        self.on_host: set[int] = set()
        self.total = 0
        self.log: list[tuple[Storage, int]] = []
        """Every allocation (its bytes) and release (the negative)."""
        self.peaks: dict[str, Peak] = {}
        self.kept: Alive = Counter()
        """What is there all the time but was made late: the optimizer's states."""

    def add(self, tensor: torch.Tensor, category: Category, operator: str = "", module: str = "") -> None:
        """Count a tensor's storage, once; the host's not at all."""
        if tensor.device.type == HOST:
            return
        key = storage_key(tensor)
        if key in self.live or key in self.on_host:
            return
        kind = Kind(category, module, operator, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        storage = tensor.untyped_storage()
        self.live[key] = Storage(0, kind)
        self._change(self.live[key], blocks(storage.nbytes()))
        weakref.finalize(storage, self._free, key)

    def settle(self, tensor: torch.Tensor, category: Category) -> None:
        """Give a tensor's storage the category that it turns out to have."""
        known = self.live.get(storage_key(tensor))
        if known is not None:
            known.category = category

    def forget(self, tensor: torch.Tensor) -> None:
        """Count a tensor no longer: it lies on the host."""
        key, storage = storage_key(tensor), tensor.untyped_storage()
        self._free(key)
        self.on_host.add(key)
        weakref.finalize(storage, self.on_host.discard, key)

    def resized(self, tensor: torch.Tensor) -> None:
        """Take note that a tensor's storage was emptied or filled again."""
        known = self.live.get(storage_key(tensor))
        if known is not None:
            self._change(known, blocks(tensor.untyped_storage().nbytes()) - known.num_bytes)
            self._look(0)

    def same_memory(self, made: torch.Tensor, given: torch.Tensor) -> None:
        """Count once what are two storages here and one on a GPU: what a collective is waited for is its own output."""
        key, known = storage_key(made), self.live.pop(storage_key(given), None)
        if known is not None:
            self.live[key] = known
            weakref.finalize(made.untyped_storage(), self._free, key)
            self.forget(given)

    def keep(self, category: Category) -> None:
        """Note what of a category is alive now, as something that is there in every steady step."""
        for storage in self.live.values():
            if storage.category == category:
                self.kept[storage.kind._replace(category=category)] += storage.num_bytes

    def alive(self, phase: str) -> Alive:
        """What was alive when the phase was at its largest, kernel scratch aside."""
        held: dict[int, int] = {}
        of: dict[int, Storage] = {}
        for storage, change in self.log[: self.peaks[phase].position]:
            of[id(storage)] = storage
            held[id(storage)] = held.get(id(storage), 0) + change
        found: Alive = Counter()
        for key, num_bytes in held.items():
            if num_bytes:
                found[of[key].kind._replace(category=of[key].category)] += num_bytes
        return found

    def _change(self, storage: Storage, by: int) -> None:
        storage.num_bytes += by
        self.total += by
        self.log.append((storage, by))

    def _free(self, key: int) -> None:
        gone = self.live.pop(key, None)
        if gone is not None:
            self._change(gone, -gone.num_bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operator."""
        if func is torch.ops.prim.device.default:
            # asked more often than all operators together
            return getattr(args[0], "fake_device", None) or func(*args)
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper (DTensor) goes first; what it does to its own tensor comes here
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False, "device": torch.device(HOST)}
        result = self.stand_in_for(func, args)
        if result is None:
            result = func(*args, **kwargs)
        name = str(func)
        if name.startswith("profiler."):
            return result
        # gradients of weights are told from temporaries at the end: they are what .grad holds
        computing_gradients = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        category: Category = "temporary" if computing_gradients else "activation"
        module = self.module_of()
        if name == WAIT:
            self.same_memory(result, args[0])
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf, category, name, module)
        for tensor, settled in self.category_of(name, args, kwargs, result):
            self.settle(tensor, settled)
        self._look(self.scratch_of(name, args))
        return result

    def _look(self, scratch: int) -> None:
        known = self.peaks.get(self.phase)
        if known is None or self.total + scratch > known.total:
            self.peaks[self.phase] = Peak(self.total + scratch, len(self.log), scratch)
