"""What the scripts that measure real runs share: the jobs they start, the text they train on, the record they keep.

A record is a file of JSON lines, each written when it is known: what lcplan predicts of every job before the first one
starts, then what each measured, in bytes and seconds, with versions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lcplan.backends.inputs import PYTHON_DOCS
from lcplan.errors import LcplanError
from lcplan.run_rows import read_run
from lcplan.units import ceil_div, format_bytes

ENDS_AFTER_S = 570.0
"""A script ends within ten minutes: what runs by then is told to end, what has not begun is left out."""
ENDS_WITHIN_S = 30.0
"""A job that was told to end and has not after so long is killed."""
STARTS_WITHIN_S = 120.0
"""Of a job, until its first step: imports, tokenizing, loading the weights."""
BYTES_PER_TOKEN = 5
"""The standard library's sources have 3.6 for each token of a byte-level BPE of 8,192 that is trained on them."""


@dataclass(frozen=True)
class Job:
    """One ``lcplan run``: flags that the plan has, and those that only a run takes."""

    name: str
    plan: tuple[str, ...]
    run: tuple[str, ...]

    def command(self, folder: Path) -> list[str]:
        """The whole command line."""
        return [*LCPLAN, "run", *self.plan, *self.run, "--output-dir", str(folder)]


LENGTH_STEP = 65_536
LCPLAN = (sys.executable, "-m", "lcplan")


class Record:
    """JSON lines, one a finding."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", "utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        """Add one line."""
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **fields})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def arguments(
    description: str | None, folder: str, *, model: str | None = None, preset: str | None = None, **defaults: Any
) -> argparse.ArgumentParser:
    """The options that every script has, for ``parse``; ``model`` or ``preset`` is what is run if none is named."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file of JSON lines; replaced")
    parser.add_argument("--folder", type=Path, default=Path("runs") / folder, help="new folder for the jobs")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", help="a model of the catalog or a config.json, with random weights")
    what.add_argument("--preset", help="smoke runs on the CPU")
    parser.add_argument("--max-length", type=int, help="that of the preset if not given")
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--gpu", help="that of the preset if not given, h200 for a model")
    parser.add_argument("--data", help="as lcplan run takes it; the sources of the standard library if not given")
    parser.add_argument("--dry-run", action="store_true", help="render every job, say what is predicted, start none")
    parser.add_argument("--force", action="store_true", help="passed on to lcplan run")
    parser.epilog = "Any other option is a plan's, and passed on to lcplan."
    parser.set_defaults(began=time.monotonic(), usual=(model, preset), **defaults)
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The options; ``more`` has those that lcplan reads."""
    args, more = parser.parse_known_args(argv)
    args.more = tuple(more)
    if args.model is None and args.preset is None:
        args.model, args.preset = args.usual
    return args


def plan_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """What every job's plan has: model or preset, length, GPU, and the options passed on."""
    flags = ("--preset", args.preset) if args.preset else (args.model, "--gpu", args.gpu or "h200")
    flags += ("--gpu", args.gpu) if args.preset and args.gpu else ()
    flags += ("--max-length", str(args.max_length)) if args.max_length else ()
    return flags + args.more


def run_flags(args: argparse.Namespace, report: dict[str, Any] | None) -> tuple[str, ...]:
    """What every run has: random weights, steps, and text that is long enough; a job on a CPU is small."""
    data = args.data
    if data is None and report is None:
        data = PYTHON_DOCS
    elif data is None and report is not None:
        num_tokens = rows_needed(report["plan"], args.max_steps) * report["plan"]["max_length"]
        data = str(args.folder / f"text-{num_tokens}.txt")
        write_text(Path(data), num_tokens)
    return ("--init", "random", "--data", data, "--max-steps", str(args.max_steps), "--no-save")


def rows_needed(plan: dict[str, Any], max_steps: int) -> int:
    """Rows of so many steps; under Ulysses every rank loads some, and all work on each."""
    at_once = plan["per_device_train_batch_size"] * plan["dp_replicate_size"] * plan["dp_shard_size"]
    loaded = at_once * plan["sp_size"]
    return ceil_div(max_steps * at_once * plan["gradient_accumulation_steps"], loaded) * loaded


def write_text(path: Path, num_tokens: int) -> None:
    """Enough of the standard library's sources for so many tokens, as one text file.

    Raises:
        ValueError: where the standard library is too small.
    """
    wanted, library = num_tokens * BYTES_PER_TOKEN, Path(sysconfig.get_path("stdlib"))
    path.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(library.rglob("*.py")):
            if "site-packages" in source.parts or size >= wanted:
                continue
            text = source.read_text("utf-8", errors="ignore")
            file.write(text + "\n")
            size += len(text.encode())
    if size < wanted:
        raise ValueError(f"{library} has {size:,} bytes of sources, and {num_tokens:,} tokens need {wanted:,}.")


def predict(plan: Sequence[str]) -> dict[str, Any] | None:
    """The report that ``lcplan estimate`` makes of a plan's flags; None for a job on a CPU.

    Raises:
        RuntimeError: with what it said, where it refuses the plan.
    """
    done = subprocess.run([*LCPLAN, "estimate", *plan, "--json"], capture_output=True, text=True, check=False)
    if "cpu-preset" in done.stderr:
        return None
    if not done.stdout:
        raise RuntimeError(done.stderr.strip())
    return dict(json.loads(done.stdout))


def predict_all(plans: Mapping[str, Sequence[str]], record: Record) -> dict[str, dict[str, Any] | None]:
    """Predict every job before the first starts, write it down and print it; ``plans`` are flags by name of a job."""
    found = {name: predict(plan) for name, plan in plans.items()}
    for name, report in found.items():
        record.write("prediction", name=name, plan_flags=plans[name], report=report)
        if report is not None:
            peak, seconds = format_bytes(report["peak_allocated_bytes"]), report["step_time_s"]
            step = "" if seconds is None else f", {seconds:.1f} s a step"
            print(f"{name}: predicted peak {peak} ({report['peak_phase']}){step}", flush=True)
    return found


def time_left(args: argparse.Namespace) -> float:
    """Seconds until the script must have ended."""
    return float(ENDS_AFTER_S - (time.monotonic() - args.began))


def run_job(job: Job, args: argparse.Namespace, record: Record) -> dict[str, Any]:
    """Run or, with ``--dry-run``, only render a job, write down what it measured, and return that line's fields."""
    folder = args.folder / job.name
    command = job.command(folder) + (["--dry-run"] if args.dry_run else []) + (["--force"] if args.force else [])
    began = time.monotonic()
    code = run_within(command, time_left(args)) if time_left(args) > 0 else None
    seconds = round(time.monotonic() - began, 3)
    found = {"name": job.name, "command": command, "exit_code": code, "wall_s": seconds, **read_folder(folder)}
    record.write("rendered" if args.dry_run else "run", **found)
    return found


def run_within(command: list[str], seconds: float, environment: Mapping[str, str] | None = None) -> int:
    """Run a command, end it when the time is over, and return its exit code."""
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            return process.wait(timeout=ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def check_time(job: Job, report: dict[str, Any] | None, args: argparse.Namespace) -> None:
    """Refuse a job whose predicted steps would not end in time.

    Raises:
        SystemExit: with the length at which they would.
    """
    step_s = None if report is None else report["step_time_s"]
    free = (time_left(args) - STARTS_WITHIN_S) / args.max_steps
    if step_s is None or report is None or step_s <= free:
        return
    length = report["plan"]["max_length"]
    shorter = int(length * (free / step_s) ** 0.5) // LENGTH_STEP * LENGTH_STEP
    raise SystemExit(
        f"{job.name}: {args.max_steps} steps of {step_s:.0f} s at {length:,} tokens do not end within ten minutes. "
        f"Attention grows with the square of the length: use --max-length {shorter}, or fewer --max-steps."
    )


def run_on_several_gpus(name: str, args: argparse.Namespace) -> int:
    """One job, predicted beside measured on every rank, and its exit code."""
    record, plan = Record(args.output), plan_flags(args)
    report = predict_all({name: plan}, record)[name]
    job = Job(name, plan, run_flags(args, report))
    if not args.dry_run:
        check_time(job, report, args)
    done = run_job(job, args, record)
    if not args.dry_run:
        compared_table([done])
        rank_table(done, report)
    return failed([done])


def rank_table(run: dict[str, Any], report: dict[str, Any] | None) -> None:
    """Print what each rank held, what the driver counts beyond the allocator, and the steps."""
    result = run["result"]
    if result is None or result["error"] is not None:
        return
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "pinned_peak_bytes")
    table = Table("rank", *(name.removesuffix("_bytes").replace("_", " ") for name in names))
    for rank in range(result["world_size"]):
        sizes = [result[f"{name}_per_rank"][rank] for name in names]
        table.add_row(str(rank), *("-" if size is None else format_bytes(size) for size in sizes))
    Console().print(table)
    if result["device_used_bytes"] is not None:
        print(f"CUDA context and NCCL, beyond the allocator: {format_bytes(beyond_allocator_bytes(result))}")
    predicted = "-" if report is None or report["step_time_s"] is None else f"{report['step_time_s']:.2f} s"
    seconds = ", ".join(f"{step['step_s']:.2f} s" for step in result["steps"])
    losses = ", ".join(f"{step['loss']:.4f}" for step in result["steps"])
    print(f"steps: {seconds} (predicted {predicted}); losses: {losses}")


def beyond_allocator_bytes(result: dict[str, Any]) -> int:
    """What the driver counts and the allocator does not: the CUDA context and, with several ranks, NCCL."""
    return int(result["device_used_bytes"] - max(result["peak_reserved_bytes_per_rank"]))


def read_folder(folder: Path) -> dict[str, Any]:
    """What a job left: its result, predicted beside measured bytes, and its measured row, as far as there are any."""
    found: dict[str, Any] = {name: read_json(folder / f"{name}.json") for name in ("result", "report")}
    try:
        row = read_run(folder).model_dump(mode="json") if found["result"] else None
    except LcplanError as why_not:
        row, found["no_row"] = None, str(why_not)
    report = found.pop("report")
    return {**found, "compared": report["compared"] if report else [], "row": row}


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file, if it is there."""
    return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else None


def compared_table(runs: Sequence[dict[str, Any]]) -> None:
    """Print predicted beside measured for every phase and rank of every run."""
    table = Table()
    for name in ("run", "", "predicted", "measured", "ratio"):
        table.add_column(name, justify="left" if name in ("run", "") else "right")
    for run in runs:
        for row in run["compared"]:
            predicted, measured = row["predicted_bytes"], row["measured_bytes"]
            ratio = f"{measured / predicted:.4f}" if predicted else ""
            table.add_row(run["name"], row["what"], format_bytes(predicted), format_bytes(measured), ratio)
        if not run["compared"]:
            table.add_row(run["name"], why_nothing(run), "", "", "")
        table.add_section()
    Console().print(table)


def why_nothing(run: dict[str, Any]) -> str:
    """Why a run has nothing to compare."""
    if run["exit_code"] is None:
        return "not started: no time was left"
    result = run["result"]
    if result is None:
        return f"no result (exit code {run['exit_code']})"
    if result["error"]:
        return str(result["error"])
    if result["peak_allocated_bytes_per_rank"][0] is None:
        return "ran on a CPU, which has no GPU memory"
    return "measured, and not compared: one step alone, or a plan that the formulas do not cover"


def failed(runs: Sequence[dict[str, Any]]) -> int:
    """Exit code of a script: 1 where a job failed or was not started."""
    return int(any(run["exit_code"] != 0 for run in runs))
