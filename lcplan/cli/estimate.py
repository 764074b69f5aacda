"""``lcplan estimate``: does it fit, by how much, what dominates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lcplan.cli.plan_options import (
    ConfigOption,
    JsonOption,
    ModelArgument,
    PresetOption,
    TrustOption,
    UnitsOption,
    read_job,
    with_plan_flags,
)
from lcplan.errors import InputError

if TYPE_CHECKING:
    from lcplan.cli.plan_options import Job
    from lcplan.ledger import MemoryReport
    from lcplan.units import ByteUnits


@with_plan_flags
def command(
    given: dict[str, Any],
    model: ModelArgument = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    method: Annotated[
        str, typer.Option(help="How to obtain the report: formula, or trace (runs the training code on fake tensors).")
    ] = "formula",
    explain: Annotated[str | None, typer.Option(help="Print one item's formula, numbers and source.")] = None,
    compare_rules: Annotated[
        bool, typer.Option("--compare-rules", help="Print the field's simple rules beside lcplan's numbers.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(help="Trace this rank of the job; the one that holds most where not given.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Trace this many decoder layers and extend; as few as are exact where not given.")
    ] = None,
    json: JsonOption = False,
    units: UnitsOption = "GiB",
    trust_remote_code: TrustOption = False,
) -> None:
    """Memory of one GPU in a training step, item by item. Exit 0 if it fits, 1 if not.

    Example: lcplan estimate Qwen/Qwen3-8B --max-length 1Mi --gpu h100-80gb --num-gpus 8 --cp-size 8
    """
    from lcplan.cli.output import check_choice, check_units, print_json
    from lcplan.estimation import estimate, estimate_by_trace
    from lcplan.reports.terminal import explain_item, print_report

    size_units = check_units(units)
    check_choice("--method", method, ("formula", "trace"))
    if compare_rules and explain is not None:
        raise InputError(
            "two-views", f"--compare-rules and --explain {explain} both replace the report. Give one of them."
        )
    if method == "formula" and (rank is not None or layers is not None):
        given_flags = " and ".join(
            name for name, value in (("--rank", rank), ("--layers", layers)) if value is not None
        )
        raise InputError(
            "trace-only",
            f"{given_flags}: formulas answer for the worst rank and all layers. Use --method trace, or leave it out.",
        )
    job = read_job(model, preset, config, given, trust_remote_code=trust_remote_code)
    if method == "formula":
        report = estimate(job.spec, job.plan, job.gpu, assumptions=job.assumptions)
    else:
        report = estimate_by_trace(job.spec, job.plan, job.gpu, assumptions=job.assumptions, rank=rank, layers=layers)
    if compare_rules:
        _print_rules(report, job, as_json=json, units=size_units)
    elif json:
        print_json(report)
    elif explain is not None:
        explain_item(report, explain, units=size_units)
    else:
        print_report(report, units=size_units)
    raise typer.Exit(0 if report.fits else 1)


def _print_rules(report: MemoryReport, job: Job, *, as_json: bool, units: ByteUnits) -> None:
    from lcplan.cli.output import print_json
    from lcplan.comparisons import compare_rules
    from lcplan.reports.comparisons import print_comparisons
    from lcplan.reports.terminal import print_answer

    rules = compare_rules(report, job.spec, job.plan)
    if as_json:
        print_json(rules)
        return
    print_answer(report, units=units)
    print_comparisons(rules, units=units)
