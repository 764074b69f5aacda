"""What a finished job measured, as the one report: ``report.json`` beside result.json."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from lcplan.backends.job import JobSpec
from lcplan.checking import ring_rank
from lcplan.estimation import make_report
from lcplan.hardware import load_gpu
from lcplan.ledger import Compared, MemoryReport
from lcplan.model_spec import ModelSpec
from lcplan.probing import ProbeResult, compare, phases

REPORT_FILE = "report.json"


def write_report(folder: Path, job: JobSpec, result: dict[str, Any]) -> MemoryReport | None:
    """Write report.json and return it; None where nothing was measured, as on a CPU."""
    report = run_report(job, result)
    if report is not None:
        (folder / REPORT_FILE).write_text(report.model_dump_json(indent=2) + "\n", "utf-8")
    return report


def run_report(job: JobSpec, result: dict[str, Any]) -> MemoryReport | None:
    """The report of a run: the worst rank's phases in the step that has them, and the peak of all steady steps.

    ``compared`` has every rank's numbers beside the formulas'; it is empty where they do not cover the plan.
    """
    peaks = result["peak_allocated_bytes_per_rank"]
    by_rank = [_of_rank(result, rank) for rank in range(len(peaks))]
    if job.device != "gpu" or not job.model.config or any(not found.phases for found in by_rank):
        return None
    spec, gpu = ModelSpec.from_config(job.model.config, job.model.id), load_gpu(job.plan.gpu)
    worst = peaks.index(max(peaks))
    report = make_report(spec, job.plan, gpu, "run", phases(by_rank[worst]), worst, ())
    seconds = statistics.median(step["step_s"] for step in result["steps"][1:] or result["steps"])
    compared = [
        row.model_copy(update={"what": f"rank {rank}: {row.what.replace('_', ' ')}"})
        for rank, found in enumerate(by_rank)
        for row in compare(spec, job.plan, ring_rank(rank, job.plan), found)
    ]
    return report.model_copy(
        update={
            "peak_allocated_bytes": max(peaks),
            "stack": {name: result["versions"].get(name) for name in report.stack},
            "compared": tuple[Compared, ...](compared),
            "step_time_s": seconds,
            "tokens_per_second": job.plan.tokens_per_step / seconds,
            "step_time": None,
            "step_time_unknown": None,
        }
    )


def _of_rank(result: dict[str, Any], rank: int) -> ProbeResult:
    """One rank's part of result.json in the words of a probe."""
    found = {key: result[f"{key}_per_rank"][rank] for key in ("phases", "resident")}
    return ProbeResult(
        exit_code=0,
        error=None,
        peak_allocated_bytes=result["peak_allocated_bytes_per_rank"][rank],
        pinned_peak_bytes=result["pinned_peak_bytes_per_rank"][rank],
        **found,
    )
