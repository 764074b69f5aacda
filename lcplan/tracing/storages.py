"""Live storages under a dispatch mode: what is allocated, and when it is freed.

Sizes are rounded up to 512 bytes as CUDA's caching allocator does. A storage is freed when its last reference goes,
which PyTorch tells through a weak reference to the storage object.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch  # noqa: TID253  (imported by the trace method alone)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID253
from torch.utils._pytree import tree_leaves  # noqa: TID253

BLOCK_BYTES = 512
"""c10/cuda/CUDACachingAllocator.cpp kMinBlockSize."""


class Storage(NamedTuple):
    """One live allocation."""

    num_bytes: int
    category: str


def storage_key(tensor: torch.Tensor) -> int:
    """What tells one storage from another; tensors that share memory have the same."""
    return int(tensor.untyped_storage()._cdata)


class StorageTracker(TorchDispatchMode):  # type: ignore[misc]
    """Counts live storages while it is active; ``phase`` names the part of the step that runs."""

    def __init__(self, scratch_of: Callable[[str, tuple[Any, ...]], int]) -> None:
        """``scratch_of`` gives the bytes that an operator needs on a GPU beside its outputs here."""
        super().__init__()
        self.scratch_of = scratch_of
        self.phase = "init"
        self.live: dict[int, Storage] = {}
        self.total = 0
        self.peaks: dict[str, tuple[int, dict[int, Storage], int]] = {}
        """Phase -> largest total, what was live then, scratch then."""

    def add(self, tensor: torch.Tensor, category: str) -> None:
        """Count a tensor's storage, once."""
        key = storage_key(tensor)
        if key in self.live:
            return
        storage = tensor.untyped_storage()
        num_bytes = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self.live[key] = Storage(num_bytes, category)
        self.total += num_bytes
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        gone = self.live.pop(key, None)
        if gone is not None:
            self.total -= gone.num_bytes

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operator."""
        result = func(*args, **(kwargs or {}))
        # gradients of weights are told from temporaries at the end: they are what .grad holds
        computing_gradients = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        category = "temporary" if computing_gradients else "activation"
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf, category)
        self._look(self.scratch_of(str(func), args))
        return result

    def _look(self, scratch: int) -> None:
        known = self.peaks.get(self.phase)
        if known is None or self.total + scratch > known[0]:
            self.peaks[self.phase] = (self.total + scratch, dict(self.live), scratch)
