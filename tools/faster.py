"""The guide's plan, attention kept on the host, and Liger's kernels with it: probed in one run on one GPU.

    python tools/faster.py --output faster.jsonl [--layers 9] [--whole-steps 2] [--folder DIR]

Each plan runs as rank 0 of its 8 with the first ``--layers`` layers, and is timed in its last whole step: the first
pins host memory. Line by line: what is predicted of all, what was measured of each, and its step over the guide's, with
all layers as well, since every further layer takes as long as one of these and the rest of a step (loss head,
optimizer) as long as predicted. Needs the liger extra, one GPU of 80 GB, and with 6 layers 20 GiB of host memory and
about seven minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lcplan import estimate, load_gpu
from lcplan.backends.job import render_job
from lcplan.estimators import formula
from lcplan.hardware import GpuSpec
from lcplan.model_loading import load_model
from lcplan.model_spec import ModelSpec
from lcplan.presets import load_preset
from lcplan.probing import ProbeResult, check_probe, host_memory_available, probe_job, start_probe, with_layers
from lcplan.rope import resolve_rope
from lcplan.train_plan import TrainPlan, resolve

GUIDE = "qwen3-8b-1m"
FASTER = "qwen3-8b-1m-faster"
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    GUIDE: (GUIDE, {}),
    "kept": (FASTER, {"kernels": "none"}),
    FASTER: (FASTER, {}),
}
"""Name: preset, what is changed of its plan."""


def plan_of(name: str, spec: ModelSpec, gpu: GpuSpec) -> TrainPlan:
    """One of PLANS on this GPU."""
    preset, changes = PLANS[name]
    given = {**load_preset(preset).plan, **changes, "gpu": gpu.id}
    return resolve(spec, given, usual_gpus_per_node=gpu.gpus_per_node)[0]


def predicted(spec: ModelSpec, cut: ModelSpec, plan: TrainPlan, gpu: GpuSpec) -> dict[str, Any]:
    """What lcplan expects of rank 0 with the layers that are probed, and of the whole job."""
    part, whole = estimate(cut, plan, gpu), estimate(spec, plan, gpu)
    return {
        "peak_allocated_bytes": max(formula.instants(cut, plan).totals().values()),
        "pinned_bytes": part.host.pinned_bytes_per_rank,
        "step_s": part.step_time_s,
        "all_layers": {
            "peak_allocated_bytes": whole.peak_allocated_bytes,
            "pinned_bytes": whole.host.pinned_bytes_per_rank,
            "step_s": whole.step_time_s,
        },
    }


def extended(found: ProbeResult, expected: dict[str, Any], spec: ModelSpec, cut: ModelSpec) -> float | None:
    """Seconds of a step with all layers: the rest of a step as predicted, the layers as measured."""
    if found.step_s is None:
        return None
    per_layer = (expected["all_layers"]["step_s"] - expected["step_s"]) / (
        spec.num_hidden_layers - cut.num_hidden_layers
    )
    rest = expected["step_s"] - per_layer * cut.num_hidden_layers
    return rest + (found.step_s - rest) * spec.num_hidden_layers / cut.num_hidden_layers


def main() -> int:
    """Predict, probe, compare; 1 where a probe failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are added to this file")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--whole-steps", type=int, default=2)
    parser.add_argument("--gpu", default="h200", help="the catalog's GPU whose rates predict")
    parser.add_argument("--folder", type=Path, default=Path("runs/faster"), help="of the jobs")
    args = parser.parse_args()

    def write(kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, **values})
        print(line, flush=True)
        with args.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    spec, gpu = load_model("Qwen/Qwen3-8B"), load_gpu(args.gpu)
    cut = with_layers(spec, args.layers)
    plans = {name: plan_of(name, spec, gpu) for name in PLANS}
    expected = {name: predicted(spec, cut, plan, gpu) for name, plan in plans.items()}
    write("predicted", layers=args.layers, **expected)
    step_s: dict[str, float] = {}
    whole_s: dict[str, float] = {}
    for name, plan in plans.items():
        check_probe(cut, plan, rank=0, host_available=host_memory_available())
        folder = render_job(
            probe_job(cut, plan, resolve_rope(spec, plan.max_length, plan.rope)), args.folder / name, force=True
        )
        found = start_probe(folder, rank=0, cap=None, whole_steps=args.whole_steps)
        write("measured", plan=name, layers=args.layers, **found.model_dump(mode="json", exclude={"allocator_summary"}))
        whole = extended(found, expected[name], spec, cut)
        if found.error is not None or found.step_s is None or whole is None:
            return 1
        step_s[name], whole_s[name] = found.step_s, whole
        write(
            "ratio",
            plan=name,
            layers=args.layers,
            step_s=found.step_s / step_s[GUIDE],
            all_layers_step_s=whole,
            all_layers=whole / whole_s[GUIDE],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
