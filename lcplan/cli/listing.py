"""``lcplan list``: what lcplan knows by name."""

from __future__ import annotations

from typing import Annotated

import typer

from lcplan.cli.completion import one_of

KINDS = ("models", "gpus", "presets", "levers")


def command(
    kind: Annotated[str, typer.Argument(help="models, gpus, presets or levers.", autocompletion=one_of(*KINDS))],
) -> None:
    """Models, GPUs, presets or levers."""
    from lcplan.cli.output import check_choice
    from lcplan.reports import listing

    check_choice("KIND", kind, KINDS)
    getattr(listing, f"print_{kind}")()
