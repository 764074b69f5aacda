"""Two GPUs with NCCL against one: the same job by ring attention over two ranks and on one GPU alone.

    python tools/two_gpus.py --output-dir runs/two-gpus [--max-length 131072]

Writes ``record.json``: per rank peak, reserved and pinned bytes, what the driver counts beyond the allocator (CUDA
context and NCCL), losses of both runs, and lcplan's prediction. Needs two idle GPUs, and takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from lcplan import estimate, load_gpu, load_model, resolve


def run_job(folder: Path, args: argparse.Namespace, *, cp_size: int) -> dict[str, Any]:
    """One generated job through the command line, and its result.json."""
    command = [
        sys.executable, "-m", "lcplan", "run", args.model, "--init", "random", "--max-length", str(args.max_length),
        "--gpu", args.gpu, "--num-gpus", str(cp_size), "--cp-size", str(cp_size), "--data", args.data,
        "--max-steps", str(args.max_steps), "--no-save", "--output-dir", str(folder),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return dict(json.loads((folder / "result.json").read_text("utf-8")))


def prediction(args: argparse.Namespace, *, cp_size: int) -> int:
    """Peak allocated bytes that lcplan expects of the worst rank."""
    spec, gpu = load_model(args.model), load_gpu(args.gpu)
    given = {"max_length": args.max_length, "gpu": gpu.id, "num_gpus": cp_size, "cp_size": cp_size}
    plan, _ = resolve(spec, given, usual_gpus_per_node=gpu.gpus_per_node)
    return estimate(spec, plan, gpu).peak_allocated_bytes


def main() -> None:
    """Run both jobs and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--max-length", type=int, default=262_144)
    parser.add_argument("--max-steps", type=int, default=3)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--data", required=True, help="text for --max-steps rows, as lcplan run takes it")
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()
    record: dict[str, Any] = {"model": args.model, "max_length": args.max_length}
    for cp_size in (2, 1):
        result = run_job(args.output_dir / f"cp{cp_size}", args, cp_size=cp_size)
        beyond = result["device_used_bytes"] - max(result["peak_reserved_bytes_per_rank"])
        record[f"cp{cp_size}"] = {
            "predicted_bytes": prediction(args, cp_size=cp_size),
            "peak_allocated_bytes_per_rank": result["peak_allocated_bytes_per_rank"],
            "peak_reserved_bytes_per_rank": result["peak_reserved_bytes_per_rank"],
            "pinned_peak_bytes_per_rank": result["pinned_peak_bytes_per_rank"],
            "device_used_bytes": result["device_used_bytes"],
            "beyond_allocator_bytes": beyond,
            "losses": [step["loss"] for step in result["steps"]],
            "step_s": [step["step_s"] for step in result["steps"]],
            "versions": result["versions"],
            "gpu_name": result["gpu_name"],
        }
    record["nccl_bytes"] = record["cp2"]["beyond_allocator_bytes"] - record["cp1"]["beyond_allocator_bytes"]
    (args.output_dir / "record.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
