"""``lcplan check``: formulas against recorded measurements."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from lcplan.cli.plan_options import JsonOption
from lcplan.errors import InputError


def command(
    tolerance: Annotated[str, typer.Option(help="Largest error allowed on a row, such as 1%.")] = "1%",
    rows: Annotated[Path | None, typer.Option(help="JSON-lines file of measured rows; the shipped ones.")] = None,
    json: JsonOption = False,
) -> None:
    """Hold the formulas against every recorded GPU measurement. Exit 0 if none drifts, 1 if one does."""
    from lcplan.checking import check_rows, load_rows
    from lcplan.cli.output import print_json
    from lcplan.reports.terminal import print_check

    report = check_rows(load_rows(rows), tolerance=parse_percent(tolerance))
    if json:
        print_json(report)
    else:
        print_check(report)
    raise typer.Exit(0 if report.passed else 1)


def parse_percent(text: str) -> float:
    """``"2%"`` as 0.02; a bare number is refused, since it could be either.

    Raises:
        InputError: for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is None:
        raise InputError("bad-tolerance", f"--tolerance {text!r} is not a percentage. Write 1% or 0.5%.")
    return float(match.group(1)) / 100
