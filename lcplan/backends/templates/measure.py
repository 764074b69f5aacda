"""What a run really used: time and peak memory of every step, written as it goes and summed up at the end.

``events.jsonl`` gets one line a step, ``result.json`` the summary. A peak is the most that the allocator
held within a step (``torch.cuda.max_memory_allocated``); what the driver counts is kept apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import journal
import torch
from accelerate.utils import gather_object
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from transformers import TrainerCallback

PACKAGES = ("torch", "transformers", "accelerate", "trl", "datasets")


PHASES_AT_STEP = 2
"""The phases of this step of an attempt are measured apart: the first that has optimizer states from its start."""


class PhasePeaks:
    """Peak bytes of each phase of a step, and what there was before it; empty without a GPU.

    Each phase ends with a wait for the GPU, so that only a step that is measured on purpose has them.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self.cuda = on_gpu
        self.phases: dict[str, int] = {}
        self.resident: dict[str, int] = {}
        self.reserved = 0
        """Most that the allocator held in any phase: short of memory, it gives back what another phase needed."""

    def begin(self, model: Any, optimizer: Any) -> None:
        """Before the first micro batch of the step."""
        if not self.cuda:
            return
        torch.cuda.synchronize()
        self.phases.clear()
        self.reserved = 0
        self.resident = {
            "before_step": torch.cuda.memory_allocated(),
            "parameters": local_bytes(model.parameters()),
            "optimizer_states": local_bytes(states_of(optimizer)),
        }
        torch.cuda.reset_peak_memory_stats()

    def mark(self, phase: str) -> None:
        """The end of a phase; of several micro batches the largest peak counts."""
        if not self.cuda:
            return
        torch.cuda.synchronize()
        self.phases[phase] = max(self.phases.get(phase, 0), torch.cuda.max_memory_allocated())
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()

    def gradients(self, model: Any) -> None:
        """All gradients are there."""
        if self.cuda:
            self.resident["gradients"] = local_bytes(p.grad for p in model.parameters() if p.grad is not None)


class StepRecorder(TrainerCallback):
    """Measures each optimizer step on this rank; rank 0 also writes ``events.jsonl``.

    ``guard`` hears of every step, and knows the peaks of the other ranks.
    """

    def __init__(self, folder: Path, *, tokens_per_step: int, on_gpu: bool, guard: Any = None) -> None:
        self.folder = folder
        self.tokens_per_step = tokens_per_step
        self.cuda = on_gpu and torch.cuda.is_available()
        self.guard = guard
        self.steps: list[dict[str, Any]] = []
        self.earlier: list[dict[str, Any]] = []
        """Steps before a resume, as events."""
        self.parts = PhasePeaks(on_gpu=self.cuda)
        self._measures_parts = False
        self._started = 0.0

    def watch(self, model: torch.nn.Module) -> None:
        """Tell the end of the forward pass from the model itself."""
        model.register_forward_hook(lambda *_: self._mark("forward"))

    def _mark(self, phase: str) -> None:
        if self._measures_parts:
            self.parts.mark(phase)

    def on_train_begin(self, *_args: Any, model: Any = None, **_kwargs: Any) -> None:
        """Called by the trainer once the model is wrapped."""
        self.watch(model)

    def on_step_begin(self, *_args: Any, model: Any = None, optimizer: Any = None, **_kwargs: Any) -> None:
        """Called by the trainer before a step's first micro batch."""
        self._measures_parts = self.cuda and len(self.steps) + 1 == PHASES_AT_STEP
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if self._measures_parts:
            self.parts.begin(model, optimizer)
        self._started = time.perf_counter()

    def on_substep_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Called by the trainer after the backward of a micro batch that is not the step's last."""
        self._mark("backward")

    def on_pre_optimizer_step(self, *_args: Any, model: Any = None, **_kwargs: Any) -> None:
        """Called by the trainer when all gradients are there."""
        self._mark("backward")
        if self._measures_parts:
            self.parts.gradients(model)

    def on_optimizer_step(self, *_args: Any, optimizer: Any = None, **_kwargs: Any) -> None:
        """Called by the trainer after the optimizer."""
        # DeepSpeed's engine updates the weights before its backward returns: no phase of its own
        if not isinstance(optimizer, DeepSpeedOptimizerWrapper):
            self._mark("optimizer_step")

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        """Called by the trainer after the optimizer."""
        if self.cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        peak = torch.cuda.max_memory_allocated() if self.cuda else None
        reserved = torch.cuda.max_memory_reserved() if self.cuda else None
        if peak is not None and reserved is not None and self._measures_parts:  # each phase began to count anew
            peak = max(peak, *self.parts.phases.values())
            reserved = max(reserved, self.parts.reserved)
        self._measures_parts = False
        self.steps.append(
            {
                "step": state.global_step,
                "step_s": round(seconds, 4),
                "tokens_per_second": round(self.tokens_per_step / seconds, 1),
                "peak_allocated_bytes": peak,
                "peak_reserved_bytes": reserved,
                "pinned_peak_bytes": pinned_peak_bytes() if self.cuda else None,
                "loss": None,
            }
        )
        if self.guard is not None:
            self.guard.step_done(state.global_step, seconds, peak)

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_kwargs: Any) -> None:
        """Called by the trainer after each step; its loss is the mean over all ranks."""
        if not self.steps or "loss" not in (logs or {}):
            return
        self.steps[-1]["loss"] = float(logs["loss"])
        if state.is_world_process_zero:
            print(f"step {state.global_step}/{state.max_steps}: {step_text(self.steps[-1])}", flush=True)
            of_ranks = {} if self.guard is None else {"peaks_heard_of_ranks": [p["peak"] for p in self.guard.peers]}
            journal.append_event(self.folder, "step", **self.steps[-1], max_steps=state.max_steps, **of_ranks)

    def all_steps(self) -> list[dict[str, Any]]:
        """Every step of the job, those before a resume as well."""
        own = ("step", "step_s", "tokens_per_second", "peak_allocated_bytes", "peak_reserved_bytes")
        own = (*own, "pinned_peak_bytes", "loss")
        return [{key: event.get(key) for key in own} for event in self.earlier] + self.steps

    def summary(self) -> dict[str, Any]:
        """This rank's peaks over the steady steps: all but the first, which creates the optimizer states."""
        steady = self.steps[1:] or self.steps
        peaks: dict[str, Any] = {}
        for key in ("peak_allocated_bytes", "peak_reserved_bytes", "pinned_peak_bytes"):
            values = [step[key] for step in steady if step[key] is not None]
            peaks[key] = max(values, default=None)
        peaks["device_used_bytes"] = device_used_bytes() if self.cuda else None
        return {**peaks, "phases": self.parts.phases, "resident": self.parts.resident}


def step_text(step: dict[str, Any]) -> str:
    """One step in a line."""
    peak = step["peak_allocated_bytes"]
    memory = "" if peak is None else f", peak {peak / 2**30:.2f} GiB"
    return f"loss {step['loss']:.4f}, {step['step_s']:.2f} s, {step['tokens_per_second']:,.0f} tokens/s{memory}"


def pinned_peak_bytes() -> int | None:
    """Most pinned host memory held so far, where this PyTorch can tell."""
    if not hasattr(torch.cuda, "host_memory_stats"):
        return None
    peak = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
    return None if peak is None else int(peak)


def device_used_bytes() -> int:
    """Memory of this GPU that is in use, as the driver sees it."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def states_of(optimizer: Any) -> Any:
    """Every tensor that the optimizer keeps."""
    kept = getattr(getattr(optimizer, "optimizer", optimizer), "state", {})
    return (value for state in kept.values() for value in state.values() if isinstance(value, torch.Tensor))


def with_scales(tensors: Any) -> Iterator[torch.Tensor]:
    """The tensors, and after one of 4 bits the scales that bitsandbytes keeps beside it, which are no parameters."""
    for tensor in tensors:
        yield tensor
        state = getattr(tensor, "quant_state", None)
        while state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
            state = state.state2


def local_bytes(tensors: Any) -> int:
    """Bytes on the GPU, of a sharded tensor this rank's; shared memory counts once."""
    seen: dict[int, int] = {}
    for tensor in with_scales(tensors):
        tensor = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3's shard
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type == "cuda":
            storage = local.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def gather_ranks(summary: dict[str, Any]) -> dict[str, Any]:
    """Every rank's peaks as lists in order of rank; a collective call."""
    ranks = gather_object([summary])
    return {
        "peak_allocated_bytes_per_rank": [rank["peak_allocated_bytes"] for rank in ranks],
        "peak_reserved_bytes_per_rank": [rank["peak_reserved_bytes"] for rank in ranks],
        "pinned_peak_bytes_per_rank": [rank["pinned_peak_bytes"] for rank in ranks],
        "phases_per_rank": [rank["phases"] for rank in ranks],
        "resident_per_rank": [rank["resident"] for rank in ranks],
        "device_used_bytes": max(rank["device_used_bytes"] or 0 for rank in ranks) or None,
    }


def environment() -> dict[str, Any]:
    """Versions and hardware of this run."""
    return {
        "versions": {name: version(name) for name in PACKAGES},
        "gpu_name": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
