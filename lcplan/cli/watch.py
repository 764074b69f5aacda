"""``lcplan watch``: look at a job from another shell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lcplan.cli.plan_options import JsonOption, UnitsOption


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a job, running or ended.")],
    once: Annotated[bool, typer.Option("--once", help="One look, then exit 0.")] = False,
    json: JsonOption = False,
    units: UnitsOption = "GiB",
) -> None:
    """Follow a job until it ends, and exit with its code. Ctrl-C leaves the job alone.

    Example: lcplan watch runs/qwen3-8b-1m
    """
    from lcplan.cli.output import check_units, print_json
    from lcplan.watching import follow, read_state

    size_units = check_units(units)
    state = read_state(folder)
    if json:
        if not once:
            *_, state = follow(folder)
        print_json(state)
    elif once:
        from rich.console import Console

        from lcplan.reports.watch_view import render_state

        Console().print(render_state(state, str(folder), units=size_units))
    elif sys.stdout.isatty():
        from lcplan.reports.live import follow_live

        state = follow_live(folder, units=size_units)
    else:
        from lcplan.reports.live import follow_lines

        state = follow_lines(folder)
    raise typer.Exit(0 if once else state.exit_code or 0)
