"""What the terminal reports share: text that breaks between words and never between a number and its unit, and tables.

Nothing is wider than the console, and nothing is cut off: where a table leaves too little room for its text columns,
each row's text stands above its numbers.
"""

from __future__ import annotations

import itertools
import re
import shlex
import textwrap
from collections.abc import Collection, Sequence
from typing import NamedTuple, NoReturn

from rich.console import Console
from rich.text import Text

NO_BREAK = "\u00a0"
"""Stands for the space between a number and its unit while a text is broken into lines."""
_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i?B|B|M|s|bytes|tokens|layers|GPUs|GPU|hours|TFLOP/s)(?!\w))")
GAP = 2
INDENT = 4
LEAST_TEXT = 28
"""Characters below which a text column is no longer readable."""


class Terminal(Console):
    """Where reports go; that its reader has gone is for the command line to handle, not for rich to exit 1."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise what rich caught."""
        raise BrokenPipeError


class Column(NamedTuple):
    """A heading, whether its cells are numbers, and whether they are text that may take several lines."""

    name: str
    right: bool = False
    text: bool = False


def wrap(text: str, width: int, *, hanging: int = 0) -> list[str]:
    """Lines of at most ``width`` characters; those after the first are indented by ``hanging``."""
    kept = _NUMBER_AND_UNIT.sub(NO_BREAK, text)
    lines = textwrap.wrap(kept, width, subsequent_indent=" " * hanging, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in lines] or [""]


def say(out: Console, text: str = "", *, bold: bool = False, hanging: int = 0) -> None:
    """One paragraph, as it is: neither markup nor highlighting."""
    for line in wrap(text, out.width, hanging=hanging):
        out.print(Text(line, style="bold" if bold else ""), soft_wrap=True)


def say_command(out: Console, command: str, *, lead: str = "") -> None:
    """A command that can be pasted as it is printed: broken before a flag, behind a backslash, never within quotes."""
    parts: list[list[str]] = [[]]
    for word in shlex.split(command):
        if word.startswith("--"):
            parts.append([])
        parts[-1].append(word)
    line, *flags = map(shlex.join, parts)
    line = lead + line
    for flag in flags:
        if len(f"{line} {flag} \\") <= out.width:
            line += f" {flag}"
        else:
            out.print(Text(f"{line} \\"), soft_wrap=True)
            line = " " * INDENT + flag
    out.print(Text(line), soft_wrap=True)


def print_table(
    out: Console,
    columns: Sequence[Column],
    rows: Sequence[tuple[str, ...]],
    *,
    bold: Collection[int] = (),
    least_text: int = LEAST_TEXT,
) -> None:
    """Rows under their headings; ``bold`` holds the indices of the rows that stand out.

    Args:
        out: where to
        columns: one for each cell of a row
        rows: cells as text; leading spaces indent
        bold: indices of rows that stand out
        least_text: characters that each text column needs at least
    """
    widths = [max(len(cells[i]) for cells in [_heads(columns), *rows]) for i in range(len(columns))]
    room = out.width - GAP * (len(columns) - 1)
    texts = sorted((i for i, column in enumerate(columns) if column.text), key=lambda i: widths[i])
    left = room - sum(width for i, width in enumerate(widths) if i not in texts)
    for position, i in enumerate(texts):
        widths[i] = min(widths[i], left // (len(texts) - position))
        left -= widths[i]
        if widths[i] < min(least_text, max(len(cells[i]) for cells in rows)):
            _print_stacked(out, columns, rows, bold)
            return
    for index, cells in enumerate([_heads(columns), *rows]):
        parts = [_cell(cell, width) for cell, width in zip(cells, widths, strict=True)]
        for line in itertools.zip_longest(*parts, fillvalue=""):
            _print_line(out, columns, line, widths, bold=index - 1 in bold)


def _heads(columns: Sequence[Column]) -> tuple[str, ...]:
    return tuple(column.name for column in columns)


def _cell(text: str, width: int) -> list[str]:
    """A cell's lines; those after the first keep its indent."""
    return wrap(text, width, hanging=len(text) - len(text.lstrip())) if text else [""]


def _print_line(
    out: Console, columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int], *, bold: bool, indent: int = 0
) -> None:
    padded = (
        cell.rjust(width) if column.right else cell.ljust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    )
    line = (" " * indent + (" " * GAP).join(padded)).rstrip()
    out.print(Text(line, style="bold" if bold else ""), soft_wrap=True)


def _print_stacked(
    out: Console, columns: Sequence[Column], rows: Sequence[tuple[str, ...]], bold: Collection[int]
) -> None:
    """Each row's text columns, and its numbers below them in columns of their own."""
    numbers = [i for i, column in enumerate(columns) if not column.text]
    widths = [max(len(cells[i]) for cells in [_heads(columns), *rows]) for i in numbers]
    for index, cells in enumerate([_heads(columns), *rows]):
        text = (" " * GAP).join(cell for cell, column in zip(cells, columns, strict=True) if column.text and cell)
        if text:
            say(out, text, bold=index - 1 in bold, hanging=len(text) - len(text.lstrip()) + GAP)
        if any(cells[i] for i in numbers):
            below = [columns[i] for i in numbers]
            _print_line(out, below, [cells[i] for i in numbers], widths, bold=index - 1 in bold, indent=INDENT)
