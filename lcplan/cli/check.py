"""``lcplan check``: formulas against recorded measurements."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lcplan.cli import completion
from lcplan.cli.plan_options import JsonOption
from lcplan.errors import InputError

if TYPE_CHECKING:
    from lcplan.checking import MeasuredRow

METHODS = ("formula", "trace")


def command(
    tolerance: Annotated[
        str | None, typer.Option(help="Largest error allowed on a row; 1% if not given, with --time 10%.")
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(help="JSON-lines file of measured rows; the shipped ones and your own where not given."),
    ] = None,
    add: Annotated[
        Path | None,
        typer.Option(
            metavar="RESULT.json",
            help="Record a run of your own: the result.json of a job folder, or a measured row. It goes to --rows, "
            "$LCPLAN_ROWS or ~/.local/share/lcplan/rows.jsonl.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="formula, or trace (peft extra, some minutes).", autocompletion=completion.one_of(*METHODS)),
    ] = "formula",
    time: Annotated[
        bool, typer.Option("--time", help="Step times instead of memory, with those that others published.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Hold the formulas against every recorded GPU measurement. Exit 0 if none drifts, 1 if one does.

    Example: lcplan check --add runs/qwen3-8b-1m/result.json
    """
    from lcplan.cli.output import check_choice, print_json
    from lcplan.reports.check_result import print_added, print_check, print_times

    check_choice("--method", method, METHODS)
    allowed = parse_percent(tolerance or ("10%" if time else "1%"))
    if time and (add is not None or method != "formula"):
        raise InputError("time-alone", "--time goes with --tolerance, --rows and --json only. Leave the others out.")
    if add is not None:
        from lcplan.user_rows import record_run, rows_path

        added = record_run(add, rows or rows_path(), tolerance=allowed)
        if json:
            print_json(added)
        else:
            print_added(added)
        raise typer.Exit(0 if added.passed else 1)
    if time:
        from lcplan.time_checking import check_times, load_published

        times = check_times(rows_to_check(rows), load_published() if rows is None else (), tolerance=allowed)
        if json:
            print_json(times)
        else:
            print_times(times)
        raise typer.Exit(0 if times.passed else 1)
    from lcplan.checking import check_rows

    report = check_rows(rows_to_check(rows), tolerance=allowed, method="trace" if method == "trace" else "formula")
    if json:
        print_json(report)
    else:
        print_check(report)
    raise typer.Exit(0 if report.passed else 1)


def rows_to_check(path: Path | None) -> tuple[MeasuredRow, ...]:
    """Those of one file, or the shipped ones and the user's own."""
    from lcplan.checking import load_rows

    if path is not None:
        return load_rows(path)
    from lcplan.user_rows import load_user_rows, rows_path

    own = rows_path()
    return load_rows() + (load_user_rows(own) if own.is_file() else ())


def parse_percent(text: str) -> float:
    """``"2%"`` as 0.02; a bare number is refused, since it could be either.

    Raises:
        InputError: for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is None:
        raise InputError("bad-tolerance", f"--tolerance {text!r} is not a percentage. Write 1% or 0.5%.")
    return float(match.group(1)) / 100
