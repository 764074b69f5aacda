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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lcplan.errors import LcplanError
from lcplan.run_rows import read_run
from lcplan.units import format_bytes

ENDS_AFTER_S = 570.0
"""A script ends within ten minutes: what runs by then is told to end, what has not begun is left out."""
ENDS_WITHIN_S = 30.0
"""A job that was told to end and has not after so long is killed."""
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


def arguments(description: str | None, folder: str, **defaults: Any) -> argparse.ArgumentParser:
    """The options that every script has; ``parse`` reads them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file of JSON lines; replaced")
    parser.add_argument("--folder", type=Path, default=Path("runs") / folder, help="new folder for the jobs")
    parser.add_argument("--model", help="a model of the catalog, with random weights")
    parser.add_argument("--preset", help="instead of --model; smoke runs on the CPU")
    parser.add_argument("--max-length", type=int, help="that of the preset if not given")
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--gpu", help="that of the preset if not given, h200 for a model")
    parser.add_argument("--data", help="text, as lcplan run takes it; the standard library's sources if not given")
    parser.add_argument("--dry-run", action="store_true", help="render every job, say what is predicted, start none")
    parser.add_argument("--force", action="store_true", help="passed on to lcplan run")
    parser.epilog = "Any other option is a plan's, and passed on to lcplan."
    parser.set_defaults(began=time.monotonic(), **defaults)
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The options; ``more`` has those that lcplan reads."""
    args, more = parser.parse_known_args(argv)
    args.more = tuple(more)
    return args


def plan_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """What every job's plan has: model or preset, length, GPU, and the options passed on."""
    flags = ("--preset", args.preset) if args.preset else (args.model, "--gpu", args.gpu or "h200")
    flags += ("--gpu", args.gpu) if args.preset and args.gpu else ()
    flags += ("--max-length", str(args.max_length)) if args.max_length else ()
    return flags + args.more


def run_flags(args: argparse.Namespace, *, num_rows: int) -> tuple[str, ...]:
    """What every run has: random weights, steps, and text for so many rows."""
    data = args.data
    if data is None:
        data = str(args.folder / "text.txt")
        write_text(Path(data), num_rows * args.max_length)
    return ("--init", "random", "--data", data, "--max-steps", str(args.max_steps), "--no-save")


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


def predict(job: Job) -> dict[str, Any] | None:
    """The report that ``lcplan estimate`` makes of the job's plan; None for a job on a CPU.

    Raises:
        RuntimeError: with what it said, where it refuses the plan.
    """
    done = subprocess.run([*LCPLAN, "estimate", *job.plan, "--json"], capture_output=True, text=True, check=False)
    if "cpu-preset" in done.stderr:
        return None
    if not done.stdout:
        raise RuntimeError(f"{job.name}: {done.stderr.strip()}")
    return dict(json.loads(done.stdout))


def predict_all(jobs: Sequence[Job], record: Record) -> dict[str, dict[str, Any] | None]:
    """Predict every job before the first starts, write it down and print it."""
    found = {job.name: predict(job) for job in jobs}
    for job in jobs:
        report = found[job.name]
        record.write("prediction", name=job.name, plan_flags=job.plan, report=report)
        if report is not None:
            peak, seconds = format_bytes(report["peak_allocated_bytes"]), report["step_time_s"]
            step = "" if seconds is None else f", {seconds:.1f} s a step"
            print(f"{job.name}: predicted peak {peak} ({report['peak_phase']}){step}", flush=True)
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


def run_within(command: list[str], seconds: float) -> int:
    """Run a command, end it when the time is over, and return its exit code."""
    process = subprocess.Popen(command)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            return process.wait(timeout=ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


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
    return str(result["error"] or "measured, with no formula for the plan")


def failed(runs: Sequence[dict[str, Any]]) -> int:
    """Exit code of a script: 1 where a job failed or was not started."""
    return int(any(run["exit_code"] != 0 for run in runs))
