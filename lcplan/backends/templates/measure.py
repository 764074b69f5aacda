"""What a run really used: time and peak memory of every step, written as it goes and summed up at the end.

``events.jsonl`` gets one line a step, ``result.json`` the summary. A peak is the most that the allocator
held within a step (``torch.cuda.max_memory_allocated``); what the driver counts is kept apart.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

PACKAGES = ("torch", "transformers", "accelerate", "trl", "datasets")


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write ``path`` whole; where several ranks fail, the first error stays: the others follow from it."""
    if content["error"] is not None and path.exists():
        return
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


LOSS_OF_A_WRONG_ROPE = 8.0
"""Pretrained weights start far below it; with rotary positions they have never seen they start near 10."""


def first_loss_warning(loss: float, *, pretrained: bool) -> str | None:
    """What a first loss that is too high for pretrained weights means."""
    if not pretrained or loss <= LOSS_OF_A_WRONG_ROPE:
        return None
    return (
        f"the first loss is {loss:.2f}, and pretrained weights start far below {LOSS_OF_A_WRONG_ROPE:g}: the rotary "
        "scaling or the tokenizer is likely wrong. Compare rope_parameters in plan.json with the model's card."
    )


class StepRecorder(TrainerCallback):
    """Measures each optimizer step on this rank; rank 0 also writes ``events.jsonl``."""

    def __init__(self, folder: Path, *, tokens_per_step: int, on_gpu: bool, pretrained: bool = False) -> None:
        self.pretrained = pretrained
        self.events_file = folder / "events.jsonl"
        self.tokens_per_step = tokens_per_step
        self.cuda = on_gpu and torch.cuda.is_available()
        self.steps: list[dict[str, Any]] = []
        self._started = 0.0

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Called by the trainer before a step's first micro batch."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._started = time.perf_counter()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        """Called by the trainer after the optimizer."""
        if self.cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        self.steps.append(
            {
                "step": state.global_step,
                "step_s": round(seconds, 4),
                "tokens_per_second": round(self.tokens_per_step / seconds, 1),
                "peak_allocated_bytes": torch.cuda.max_memory_allocated() if self.cuda else None,
                "peak_reserved_bytes": torch.cuda.max_memory_reserved() if self.cuda else None,
                "pinned_peak_bytes": pinned_peak_bytes() if self.cuda else None,
                "loss": None,
            }
        )

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_kwargs: Any) -> None:
        """Called by the trainer after each step; its loss is the mean over all ranks."""
        if not self.steps or "loss" not in (logs or {}):
            return
        self.steps[-1]["loss"] = float(logs["loss"])
        if state.is_world_process_zero:
            if state.global_step == 1 and (problem := first_loss_warning(logs["loss"], pretrained=self.pretrained)):
                print(f"Warning: {problem}", file=sys.stderr, flush=True)
            print(f"step {state.global_step}/{state.max_steps}: {step_text(self.steps[-1])}", flush=True)
            with self.events_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.steps[-1]) + "\n")

    def summary(self) -> dict[str, Any]:
        """This rank's peaks over the steady steps: all but the first, which creates the optimizer states."""
        steady = self.steps[1:] or self.steps
        peaks: dict[str, Any] = {}
        for key in ("peak_allocated_bytes", "peak_reserved_bytes", "pinned_peak_bytes"):
            values = [step[key] for step in steady if step[key] is not None]
            peaks[key] = max(values, default=None)
        peaks["device_used_bytes"] = device_used_bytes() if self.cuda else None
        return peaks


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


def gather_ranks(summary: dict[str, Any]) -> dict[str, Any]:
    """Every rank's peaks as lists in order of rank; a collective call."""
    ranks = gather_object([summary])
    return {
        "peak_allocated_bytes_per_rank": [rank["peak_allocated_bytes"] for rank in ranks],
        "peak_reserved_bytes_per_rank": [rank["peak_reserved_bytes"] for rank in ranks],
        "pinned_peak_bytes_per_rank": [rank["pinned_peak_bytes"] for rank in ranks],
        "device_used_bytes": max(rank["device_used_bytes"] or 0 for rank in ranks) or None,
    }


def environment() -> dict[str, Any]:
    """Versions and hardware of this run."""
    return {
        "versions": {name: version(name) for name in PACKAGES},
        "gpu_name": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
