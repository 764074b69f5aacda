"""What the generated job costs beyond a TRL script written by hand: step times of both, alternately, on one GPU.

    python -m tools.job_overhead --output record.jsonl [--model Qwen/Qwen3-0.6B] [--max-length 32768]

Starts the job, ``tools/plain_sft.py``, and both again, each in a process of its own. A step lasts from one logged loss
to the next, in both by the same clock, so that what happens between steps counts as well. The first steps are left out:
they create the optimizer states, and the job measures its phases in the second. About four minutes on one H200.
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lcplan.backends.launch import job_environment
from lcplan.backends.templates import journal
from lcplan.units import format_bytes
from tools import runs

STEADY_AFTER = 2
"""Steps that are left out."""
PLAIN = Path(__file__).parent / "plain_sft.py"


def of_job(job: runs.Job, args: Namespace, record: runs.Record) -> dict[str, Any]:
    """Run the generated job, and what both kinds are compared by."""
    done = runs.run_job(job, args, record)
    result, events = done["result"] or {"steps": []}, journal.read_events(args.folder / job.name)
    peaks = [step["peak_allocated_bytes"] for step in result["steps"] if step["peak_allocated_bytes"] is not None]
    return {
        "name": job.name,
        "exit_code": done["exit_code"],
        "log_times": [event["time"] for event in events if event["event"] == "step"],
        "losses": [step["loss"] for step in result["steps"]],
        "peak_allocated_bytes": max(peaks, default=None),
    }


def of_script(name: str, job_folder: Path, args: Namespace, record: runs.Record) -> dict[str, Any]:
    """Run the script on the rows of a job that has run."""
    output = args.folder / f"{name}.json"
    device = json.loads((job_folder / "plan.json").read_text("utf-8"))["device"]
    environment = job_environment(device, offline=True)
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with several in sight the trainer would use them all
    command = [sys.executable, str(PLAIN), str(job_folder), str(output)]
    code = runs.run_within(command, runs.time_left(args), environment)
    found = {"name": name, "exit_code": code, **(runs.read_json(output) or {})}
    record.write("script", command=command, **found)
    return found


def step_times(found: dict[str, Any]) -> list[float]:
    """Seconds of the steady steps."""
    times = found.get("log_times", [])[STEADY_AFTER - 1 :]
    return [later - earlier for earlier, later in pairwise(times)]


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all processes of each kind, and their ratio."""
    steps = {
        kind: [seconds for run in found if run["name"].startswith(kind) for seconds in step_times(run)]
        for kind in ("job", "script")
    }
    medians = {kind: statistics.median(times) if times else None for kind, times in steps.items()}
    both = medians["job"] is not None and medians["script"] is not None
    return {
        "median_step_s": medians,
        "ratio": medians["job"] / medians["script"] if both else None,
        "num_steps": {kind: len(times) for kind, times in steps.items()},
        "median_step_s_by_process": {
            run["name"]: statistics.median(step_times(run)) for run in found if step_times(run)
        },
    }


def print_table(found: Sequence[dict[str, Any]], total: dict[str, Any]) -> None:
    """Every process, and the ratio."""
    table = Table()
    for name in ("process", "median step", "peak allocated", "first and last loss"):
        table.add_column(name)
    for run in found:
        seconds, peak = step_times(run), run.get("peak_allocated_bytes")
        table.add_row(
            run["name"],
            f"{statistics.median(seconds):.4f} s" if seconds else f"exit code {run['exit_code']}",
            "-" if peak is None else format_bytes(peak),
            " ".join(f"{run['losses'][i]:.4f}" for i in (0, -1)) if run.get("losses") else "",
        )
    Console().print(table)
    if total["ratio"] is not None:
        print(f"generated job / script written by hand: {total['ratio']:.4f} of the step time")


def main(argv: list[str] | None = None) -> int:
    """Run both kinds in turn."""
    parser = runs.arguments(__doc__, "job-overhead", model="Qwen/Qwen3-0.6B", max_length=32_768, max_steps=8)
    parser.add_argument("--pairs", type=int, default=2, help="processes of each kind")
    args = runs.parse(parser, argv)
    record = runs.Record(args.output)
    plan = (*runs.plan_flags(args), "--per-device-train-batch-size", "1", "--rope", "none")
    report = runs.predict_all({"job": plan}, record)["job"]
    jobs = [runs.Job(f"job-{number}", plan, runs.run_flags(args, report)) for number in range(1, args.pairs + 1)]
    found = []
    for number, job in enumerate(jobs, 1):
        found.append(of_job(job, args, record))
        if not args.dry_run and found[0]["exit_code"] == 0:
            found.append(of_script(f"script-{number}", args.folder / jobs[0].name, args, record))
    total = summary(found)
    if not args.dry_run:
        record.write("summary", **total)
        print_table(found, total)
    return runs.failed(found)


if __name__ == "__main__":
    sys.exit(main())
