"""``lcplan estimate``: does it fit, by how much, what dominates."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lcplan.cli import completion
from lcplan.cli.plan_options import (
    ConfigOption,
    EmitOption,
    JsonOption,
    ModelArgument,
    PresetOption,
    TokenBudgetOption,
    TrustOption,
    UnitsOption,
    emit_plan,
    parse_token_budget,
    read_job,
    with_plan_flags,
)
from lcplan.errors import InputError

if TYPE_CHECKING:
    from lcplan.cli.plan_options import Job
    from lcplan.ledger import MemoryReport
    from lcplan.units import ByteUnits

METHODS = ("formula", "trace", "probe")
FLAGS_OF = {
    "rank": ("trace", "probe"),
    "layers": ("trace", "probe"),
    "capacity": ("probe",),
    "output_dir": ("probe",),
}
"""Flags that not every method takes."""
DYNAMO_DISABLE = "TORCHDYNAMO_DISABLE"
"""What torch reads when its compiler is first asked for."""


@with_plan_flags
def command(
    given: dict[str, Any],
    model: ModelArgument = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    method: Annotated[
        str,
        typer.Option(
            help="How to obtain the report: formula, trace (the training code on fake tensors), or probe (one step on "
            "this machine's GPU).",
            autocompletion=completion.one_of(*METHODS),
        ),
    ] = "formula",
    explain: Annotated[
        str | None,
        typer.Option(help="Print one item's formula, numbers and source.", autocompletion=completion.items),
    ] = None,
    compare_rules: Annotated[
        bool, typer.Option("--compare-rules", help="Print the field's simple rules beside lcplan's numbers.")
    ] = False,
    rank: Annotated[int | None, typer.Option(help="Rank to trace or probe.")] = None,
    layers: Annotated[int | None, typer.Option(help="Decoder layers to trace or probe; the rest is extended.")] = None,
    capacity: Annotated[
        str | None, typer.Option(help="Probe: memory of another GPU, such as 80GB, that the process must not exceed.")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Probe: new folder that keeps the job and its record for check --add.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the report as one self-contained page as well (plots extra). A file that is there is refused.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --html.")] = False,
    token_budget: TokenBudgetOption = None,
    emit: EmitOption = None,
    json: JsonOption = False,
    units: UnitsOption = "GiB",
    trust_remote_code: TrustOption = False,
) -> None:
    """Memory of one GPU in a training step, item by item. Exit 0 if it fits, 1 if not.

    Example: lcplan estimate Qwen/Qwen3-8B --max-length 1Mi --gpu h100-80gb --num-gpus 8 --cp-size 8
    """
    from lcplan.cli.output import check_choice, check_units, print_json
    from lcplan.estimation import with_token_budget, workings
    from lcplan.reports.terminal import explain_item, print_report

    size_units = check_units(units)
    check_choice("--method", method, METHODS)
    if compare_rules and explain is not None:
        raise InputError(
            "two-views", f"--compare-rules and --explain {explain} both replace the report. Give one of them."
        )
    flags = {"rank": rank, "layers": layers, "capacity": capacity, "output_dir": output_dir}
    asked = {name: value for name, value in flags.items() if value is not None}
    _check_flags(method, asked)
    if html is not None:
        from lcplan._files import check_new_file
        from lcplan.reports.plots import need_matplotlib

        check_new_file(html, force=force, flag="--html")
        need_matplotlib()
    traces = method == "trace"
    with _quick_imports() if traces else nullcontext():
        job = read_job(model, preset, config, given, trust_remote_code=trust_remote_code, any_architecture=traces)
        report = _report(method, job, asked, units=size_units)
    if tokens := parse_token_budget(token_budget):
        report = with_token_budget(report, tokens)
    if compare_rules:
        _print_rules(report, job, as_json=json, units=size_units)
    elif json:
        print_json(report)
    elif explain is not None:
        worked = workings(job.spec, job.plan, report) if method == "formula" else None
        explain_item(report, explain, workings=worked, units=size_units)
    else:
        print_report(report, units=size_units)
    emit_plan(job.spec, job.plan, emit)
    if html is not None:
        origin = [*([model] if model else []), *(["--preset", preset] if preset else [])]
        origin += [word for file in config or [] for word in ("--config", str(file))]
        origin += ["--trust-remote-code"] if trust_remote_code else []
        _write_page(html, report, job, origin, method, asked, units=size_units)
    raise typer.Exit(0 if report.fits else 1)


def _write_page(
    path: Path,
    report: MemoryReport,
    job: Job,
    origin: list[str],
    method: str,
    asked: dict[str, Any],
    *,
    units: ByteUnits,
) -> None:
    from lcplan._files import write_whole
    from lcplan.report_page import commands_of, report_page
    from lcplan.reports.html import render_page

    words = [] if method == "formula" else ["--method", method]
    words += [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += [] if units == "GiB" else ["--units", units]
    base = dict(job.preset.plan) if job.preset else {}
    has_data = job.preset is not None and job.preset.data is not None
    commands = commands_of(job.spec, job.plan, job.gpu, origin=origin, base=base, has_data=has_data, method=words)
    page = render_page(report_page(job.spec, job.plan, job.gpu, report, commands), units=units)
    write_whole(path, page.encode("utf-8"), flag="--html")
    print(f"Wrote {path}.", file=sys.stderr)  # noqa: T201


def _check_flags(method: str, asked: dict[str, Any]) -> None:
    """Refuse flags of another method."""
    if foreign := [name for name in asked if method not in FLAGS_OF[name]]:
        named = ", ".join("--" + name.replace("_", "-") for name in foreign)
        raise InputError(
            "other-method",
            f"{named} with --method {method}: use --method {' or '.join(FLAGS_OF[foreign[0]])}, or leave it out. "
            "Formulas answer for the worst rank and all layers.",
        )


@contextmanager
def _quick_imports() -> Iterator[None]:
    """Without what costs a trace a fifth of its time and gives it nothing.

    The libraries make millions of objects that live to the end, which Python's collector walks again and again. And
    peft imports bitsandbytes where it is installed, which imports torch's compiler to decorate two functions.
    """
    before = os.environ.get(DYNAMO_DISABLE)
    gc.disable()
    os.environ[DYNAMO_DISABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[DYNAMO_DISABLE]
        else:
            os.environ[DYNAMO_DISABLE] = before
        gc.freeze()
        gc.enable()


def _report(method: str, job: Job, asked: dict[str, Any], *, units: ByteUnits) -> MemoryReport:
    from lcplan.estimation import estimate, estimate_by_trace

    if method == "formula":
        return estimate(job.spec, job.plan, job.gpu, assumptions=job.assumptions)
    if method == "trace":
        return estimate_by_trace(job.spec, job.plan, job.gpu, assumptions=job.assumptions, **asked)
    from lcplan.cli.probe import probe_report

    return probe_report(job, units=units, **asked)


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
