"""Wiring of ``estimate --method probe``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lcplan.units import parse_bytes

if TYPE_CHECKING:
    from lcplan.cli.plan_options import Job
    from lcplan.ledger import MemoryReport
    from lcplan.units import ByteUnits


def probe_report(
    job: Job,
    *,
    units: ByteUnits,
    rank: int = 0,
    layers: int | None = None,
    capacity: str | None = None,
    output_dir: Path | None = None,
) -> MemoryReport:
    """Probe the job and return its report; a probe that failed says why and ends with exit 1."""
    from lcplan.backends.job import check_output_dir
    from lcplan.probing import probe
    from lcplan.reports.probe_result import print_failure, print_record

    if output_dir is not None:
        check_output_dir(output_dir)
    folder = output_dir or Path(tempfile.mkdtemp(prefix="lcplan-probe-")) / "job"
    found = probe(
        job.spec,
        job.plan,
        job.gpu,
        folder=folder.expanduser().absolute(),
        assumptions=job.assumptions,
        rank=rank,
        layers=layers,
        capacity_bytes=None if capacity is None else parse_bytes(capacity),
    )
    if found.report is None:
        print_failure(found.result, found.folder)
        raise typer.Exit(found.result.exit_code)
    print_record(found.result, found.folder, units=units)
    return found.report
