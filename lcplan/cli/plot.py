"""``lcplan plot``: the five pictures, in the terminal or as a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lcplan.cli import completion
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
    from lcplan.pictures import Picture

KINDS = ("timeline", "length", "waterfall", "pareto", "accuracy")


@with_plan_flags
def command(
    given: dict[str, Any],
    kind: Annotated[
        str,
        typer.Argument(
            help="timeline (memory through one step), length (memory against length), waterfall (naive to the plan), "
            "pareto (memory against time) or accuracy (measured over predicted; takes no plan).",
            autocompletion=completion.one_of(*KINDS),
        ),
    ],
    model: ModelArgument = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to draw into, .svg or .png; in the terminal where not given."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --output.")] = False,
    json: JsonOption = False,
    units: UnitsOption = "GiB",
    trust_remote_code: TrustOption = False,
) -> None:
    """Draw a picture of a plan, in the terminal or into a file. Files need the plots extra.

    Example: lcplan plot timeline --preset qwen3-8b-1m --output timeline.svg
    """
    from lcplan.cli.output import check_choice, check_units, print_json

    size_units = check_units(units)
    check_choice("KIND", kind, KINDS)
    if json and output is not None:
        raise InputError("two-outputs", "--json prints the picture's data, --output draws it. Give one of them.")
    if output is not None:
        from lcplan._files import check_new_file
        from lcplan.reports.plots import format_of

        format_of(output)
        check_new_file(output, force=force, flag="--output")
    if kind == "accuracy":
        if model is not None or preset is not None or config or given:
            raise InputError("no-plan-here", "plot accuracy is of the recorded rows and takes no model or plan.")
        picture = _accuracy()
    else:
        picture = _of_job(kind, read_job(model, preset, config, given, trust_remote_code=trust_remote_code), given)
    if json:
        print_json(picture)
    elif output is not None:
        from lcplan._files import write_whole
        from lcplan.reports.plots import format_of, render

        write_whole(output, render(picture, format_of(output), units=size_units), flag="--output")
        print(f"Wrote {output}.", file=sys.stderr)  # noqa: T201
    else:
        from lcplan.reports.text_pictures import print_picture

        print_picture(picture, units=size_units)


def _accuracy() -> Picture:
    from lcplan.checking import check_rows
    from lcplan.cli.check import rows_to_check
    from lcplan.pictures import accuracy

    return accuracy(check_rows(rows_to_check(None), tolerance=0.01))


def _of_job(kind: str, job: Job, given: dict[str, Any]) -> Picture:
    from lcplan import pictures
    from lcplan.estimation import estimate

    if kind == "timeline":
        return pictures.timeline(estimate(job.spec, job.plan, job.gpu, assumptions=job.assumptions))
    if kind == "length":
        return pictures.length_curves(job.spec, job.plan, job.gpu)
    if kind == "waterfall":
        return pictures.waterfall_steps(job.spec, job.plan, job.gpu)
    from lcplan.recommendation import SEARCHED, Goal, recommend

    fixed = {name: value for name, value in (job.preset.plan if job.preset else {}).items() if name not in SEARCHED}
    fixed |= given
    for name in ("max_length", "gpu", "num_gpus"):
        fixed.pop(name, None)
    goal = Goal(max_length=job.plan.max_length, gpu=job.plan.gpu, num_gpus=job.plan.num_gpus, fixed=fixed)
    return pictures.pareto_points(recommend(job.spec, goal, job.gpu))
