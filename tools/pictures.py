"""Draws docs/pictures: the plots of three presets, and measured over predicted for every row.

    python -m tools.pictures

Each is what the ``lcplan plot`` command beside it draws.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lcplan.cli.main import main

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
PRESETS = ("qwen3-8b-1m", "qwen3-4b-128k", "qwen3-4b-1m-4gpu")
KINDS = ("timeline", "waterfall", "length", "pareto")
COMMANDS = {
    **{f"{preset}-{kind}.svg": ["plot", kind, "--preset", preset] for preset in PRESETS for kind in KINDS},
    "accuracy.svg": ["plot", "accuracy"],
}
"""File -> the command that draws it."""


def draw(folder: Path) -> None:
    """Draw every picture into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["LCPLAN_ROWS"] = os.devnull  # rows of this machine's user are not the project's
    for name, command in COMMANDS.items():
        try:
            main([*command, "--output", str(folder / name), "--force"])
        except SystemExit as stop:
            if stop.code:
                raise


if __name__ == "__main__":
    draw(FOLDER)
    sys.exit(0)
