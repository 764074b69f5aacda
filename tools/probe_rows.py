"""Measured rows of what the job offloads by itself, Liger beside, and of ring attention's two levers, by probe.

    python tools/probe_rows.py --output rows.jsonl [--only NAME] [--folder DIR]

One line for each plan, before the next begins: what the formulas predict, what was measured, the error, and the row as
``lcplan check --add`` takes it. Random weights, few layers. About a minute each on an H200, 40 GiB of host memory;
those named fused need the liger extra.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lcplan.backends.job import render_job
from lcplan.checking import ring_rank
from lcplan.estimators import formula
from lcplan.estimators.host_need import host_need
from lcplan.model_loading import load_model
from lcplan.probing import check_probe, host_memory_available, measured_row, probe_job, start_probe, with_layers
from lcplan.rope import resolve_rope
from lcplan.train_plan import resolve

KEPT = {"activation_checkpointing": "selective", "offload_activations": True}
AHEAD = {"offload_activations": True, "offload_prefetch": True}
RING = {"num_gpus": 8, "cp_size": 8}
FUSED = {"kernels": "liger"}
LAYERS = 4
FEWER_LAYERS = {"kept-fused-ring": 2}
"""Of cases whose steps are long."""
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "kept-16k": ("Qwen/Qwen3-4B", 0, {"max_length": 16_384, **KEPT}),
    "kept-odd": ("Qwen/Qwen3-4B", 0, {"max_length": 98_304, **KEPT}),
    "kept-every-2": ("Qwen/Qwen3-8B", 0, {"max_length": 32_768, "checkpoint_every_n_layers": 2, **KEPT}),
    "kept-accumulated": ("Qwen/Qwen3-4B", 0, {"max_length": 65_536, "gradient_accumulation_steps": 2, **KEPT}),
    "kept-ring": ("Qwen/Qwen3-8B", 0, {"max_length": 524_288, **RING, **KEPT}),
    "kept-ring-last": ("Qwen/Qwen3-8B", 7, {"max_length": 262_144, **RING, **KEPT, "cp_comm_strategy": "alltoall"}),
    "ahead-16k": ("Qwen/Qwen3-4B", 0, {"max_length": 16_384, **AHEAD}),
    "ahead-odd": ("Qwen/Qwen3-4B", 0, {"max_length": 98_304, **AHEAD}),
    "ahead-ring": ("Qwen/Qwen3-8B", 0, {"max_length": 524_288, **RING, **AHEAD}),
    "ahead-ring-last": ("Qwen/Qwen3-8B", 7, {"max_length": 262_144, **RING, **AHEAD}),
    "ring": ("Qwen/Qwen3-0.6B", 0, {"max_length": 524_288, **RING}),
    "chunks-2": ("Qwen/Qwen3-0.6B", 0, {"max_length": 524_288, **RING, "cp_head_chunks": 2}),
    "chunks-2-rank-3": ("Qwen/Qwen3-0.6B", 3, {"max_length": 524_288, **RING, "cp_head_chunks": 2}),
    "chunks-4-kept": ("Qwen/Qwen3-0.6B", 0, {"max_length": 524_288, **RING, **KEPT, "cp_head_chunks": 4}),
    "bfloat16": ("Qwen/Qwen3-0.6B", 0, {"max_length": 524_288, **RING, "cp_merge_dtype": "bfloat16"}),
    "bfloat16-last": ("Qwen/Qwen3-0.6B", 7, {"max_length": 262_144, **RING, "cp_merge_dtype": "bfloat16"}),
    "bfloat16-chunks-2": (
        "Qwen/Qwen3-0.6B", 1, {"max_length": 524_288, **RING, "cp_merge_dtype": "bfloat16", "cp_head_chunks": 2},
    ),
    "kept-fused-16k": ("Qwen/Qwen3-4B", 0, {"max_length": 16_384, **KEPT, **FUSED}),
    "kept-fused-long": ("Qwen/Qwen3-8B", 0, {"max_length": 262_144, **KEPT, **FUSED}),
    "kept-fused-ring": ("Qwen/Qwen3-8B", 0, {"max_length": 1 << 20, **RING, **KEPT, **FUSED}),
    "kept-fused-tiles": ("Qwen/Qwen3-8B", 0, {"max_length": 196_608, **KEPT, **FUSED, "mlp_tile_size": 16_384}),
    "selective-fused": (
        "Qwen/Qwen3-8B", 0, {"max_length": 131_072, "activation_checkpointing": "selective", **FUSED},
    ),
}  # fmt: skip
"""Name: model, rank, plan."""


def main() -> int:
    """Predict and probe each; 1 where a probe failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are added to this file")
    parser.add_argument("--only", action="append", choices=CASES, help="may be given several times")
    parser.add_argument("--folder", type=Path, default=Path("runs/rows"))
    args = parser.parse_args()
    failed = 0
    for name in args.only or CASES:
        model, rank, given = CASES[name]
        spec = with_layers(load_model(model), FEWER_LAYERS.get(name, LAYERS))
        plan, _ = resolve(spec, {"gpu": "h200", **given}, usual_gpus_per_node=8)
        predicted = {
            "peak_allocated_bytes": max(formula.instants(spec, plan, rank=ring_rank(rank, plan)).totals().values()),
            "pinned_peak_bytes": host_need(spec, plan).pinned_bytes_per_rank,
        }
        check_probe(spec, plan, rank=rank, host_available=host_memory_available())
        job = probe_job(spec, plan, resolve_rope(spec, plan.max_length, plan.rope))
        found = start_probe(render_job(job, args.folder / name, force=True), rank=rank, cap=None)
        peak = found.peak_allocated_bytes
        line = {
            "name": name,
            "predicted": predicted,
            "failed": found.error,
            "error": None if peak is None else predicted["peak_allocated_bytes"] / peak - 1,
            "pinned_error": found.pinned_peak_bytes and predicted["pinned_peak_bytes"] / found.pinned_peak_bytes - 1,
            "step_s": found.step_s,
            "loss": found.loss,
            "row": measured_row(spec, plan, rank, found),
        }
        failed += found.error is not None
        text = json.dumps(line)
        print(text, flush=True)
        with args.output.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
