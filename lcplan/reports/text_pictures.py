"""Draws the records of ``lcplan.pictures`` in a terminal: plain characters that need no colour, at any width."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import log

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lcplan.explanation import NAIVE
from lcplan.pictures import (
    AccuracyPicture,
    LengthPicture,
    ParetoPicture,
    Picture,
    Timeline,
    WaterfallPicture,
)
from lcplan.reports.layout import Terminal
from lcplan.reports.terminal import plan_words
from lcplan.reports.wording import group_words, phase_words
from lcplan.units import ByteUnits, format_bytes

LETTERS = {
    "weights": "W", "parameter": "W", "optimizer": "O", "optimizer_state": "O", "gradients": "G", "gradient": "G",
    "lora": "R", "communication": "C", "all_gather": "C", "reduce_scatter": "S", "activations": "A", "activation": "A",
    "attention": "T", "mlp": "M", "moe": "X", "loss_head": "L", "evaluation": "E", "save": "V", "temporary": "P",
    "probe": "B", "input": "I", "inputs": "I", "buffer": "F", "runtime": "U", "other": ".",
}  # fmt: skip
"""One character a group, so that a stack reads without colour."""
LEAST_BAR = 16
GAPS = 2
"""Columns between name, picture and number."""
BINS = (-1e-2, -1e-3, -1e-4, -1e-5, 1e-5, 1e-4, 1e-3, 1e-2)
"""Bounds of measured over predicted less 1."""


def print_picture(picture: Picture, *, units: ByteUnits = "GiB", console: Console | None = None) -> None:
    """A picture as text, as wide as the terminal."""
    out = console or Terminal()
    out.print(Text(picture.title), style="bold", highlight=False)
    out.print()
    if isinstance(picture, Timeline):
        _print_timeline(picture, units, out)
    elif isinstance(picture, LengthPicture):
        _print_lengths(picture, units, out)
    elif isinstance(picture, WaterfallPicture):
        _print_waterfall(picture, units, out)
    elif isinstance(picture, ParetoPicture):
        _print_pareto(picture, units, out)
    else:
        _print_accuracy(picture, out)


def _rows(out: Console, rows: Sequence[tuple[str, str, str]]) -> None:
    """Name, picture, number; the name folds, the other two do not."""
    table = Table(box=None, pad_edge=False, show_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, bar, number in rows:
        table.add_row(Text(name), Text(bar), Text(number))
    out.print(table)


def _width(out: Console, names: Sequence[str], numbers: Sequence[str]) -> int:
    """Columns left for the bars, between names and numbers."""
    beside = out.width - max(map(len, numbers)) - GAPS
    return max(beside - min(max(map(len, names)), beside - LEAST_BAR), LEAST_BAR)


def _say(out: Console, text: str) -> None:
    out.print(Text(text), highlight=False)


def _stack(sizes: Sequence[int], letters: str, scale: float) -> str:
    """Each part as so many of its letter; what is rounded away goes to the next part."""
    bar, total = "", 0
    for size, letter in zip(sizes, letters, strict=True):
        total += size
        bar += letter * (round(total * scale) - len(bar))
    return bar


def _print_timeline(picture: Timeline, units: ByteUnits, out: Console) -> None:
    names = [phase_words(instant.phase) for instant in picture.instants]
    totals = [sum(instant.sizes) for instant in picture.instants]
    numbers = [format_bytes(total, units) for total in totals]
    numbers[picture.peak] += " peak"
    numbers = [number.ljust(max(map(len, numbers))) for number in numbers]
    width = _width(out, names, numbers)
    scale = (width - 1) / max(picture.usable_bytes, max(totals) + picture.on_top_bytes)
    edge = round(picture.usable_bytes * scale)
    letters = "".join(LETTERS[group] for group in picture.groups)
    rows = []
    for index, (name, instant, number) in enumerate(zip(names, picture.instants, numbers, strict=True)):
        if instant.after_others:
            rows.append(("(layers between)", "", ""))
        bar = _stack(instant.sizes, letters, scale)
        if index == picture.peak:
            bar += "/" * (round((totals[index] + picture.on_top_bytes) * scale) - len(bar))
        rows.append((name, _with_edge(bar, edge), number))
    host = "H" * min(round(picture.pinned_bytes * scale), width)
    rows.append(("host, pinned, one rank", host, format_bytes(picture.pinned_bytes, units)))
    _rows(out, rows)
    out.print()
    here = picture.instants[picture.peak].sizes
    for index, (group, letter) in enumerate(zip(picture.groups, letters, strict=True)):
        most = max(instant.sizes[index] for instant in picture.instants)
        sizes = f"{format_bytes(here[index], units)} at the peak, {format_bytes(most, units)} at most"
        _say(out, f"{letter} {group_words(group)}: {sizes}")
    _say(out, f"/ outside tensors (CUDA, NCCL, allocator): {format_bytes(picture.on_top_bytes, units)}")
    _say(out, f"| {picture.gpu}: {format_bytes(picture.usable_bytes, units)} usable")


def _with_edge(bar: str, edge: int) -> str:
    """The bar with the card's limit in its place."""
    return bar.ljust(edge)[:edge] + "|" + bar[edge + 1 :]


def _print_lengths(picture: LengthPicture, units: ByteUnits, out: Console) -> None:
    first, last = picture.curves[0].points[0][0], picture.curves[0].points[-1][0]
    names = [curve.lever if curve.lever == NAIVE else f"+ {curve.lever}" for curve in picture.curves]
    numbers = []
    for curve in picture.curves:
        number = "none" if curve.longest is None else f"{curve.longest:,}"
        numbers.append(f"over {last:,}" if curve.always_fits else number)
    width = _width(out, names, numbers)

    def place(length: int) -> int:
        return round((width - 1) * log(max(length, first) / first) / log(last / first))

    own = place(picture.max_length)
    rows = []
    for name, curve, number in zip(names, picture.curves, numbers, strict=True):
        reach = last if curve.always_fits else curve.longest
        bar = "=" * (0 if reach is None else place(reach) + 1)
        rows.append((name, _with_edge(bar, own), number))
    _rows(out, rows)
    out.print()
    usable = format_bytes(picture.usable_bytes, units)
    _say(out, f"= lengths that fit {picture.gpu} ({usable} usable), one lever more each row")
    _say(out, f"| the plan's {picture.max_length:,} tokens; from {first:,} to {last:,}, log scale")


def _print_waterfall(picture: WaterfallPicture, units: ByteUnits, out: Console) -> None:
    names = [step.lever if step.lever == NAIVE else f"+ {step.lever}" for step in picture.steps]
    numbers = [format_bytes(step.device_peak_bytes, units) + (" fits" if step.fits else "") for step in picture.steps]
    sizes = [step.device_peak_bytes for step in picture.steps]
    width = _width(out, names, numbers)
    low, high = min(*sizes, picture.usable_bytes) / 2, max(*sizes, picture.usable_bytes)

    def place(size: int) -> int:
        return max(1, round(width * log(size / low) / log(high / low)))

    edge = min(place(picture.usable_bytes), width - 1)
    rows = []
    for index, (name, size, number) in enumerate(zip(names, sizes, numbers, strict=True)):
        bar = "#" * place(size)
        bar += "-" * (place(sizes[index - 1]) - len(bar)) if index else ""
        rows.append((name, _with_edge(bar, edge), number))
    _rows(out, rows)
    out.print()
    _say(out, "# device peak of one GPU, log scale; - saved by the lever")
    _say(out, f"| {picture.gpu}: {format_bytes(picture.usable_bytes, units)} usable")


def _print_pareto(picture: ParetoPicture, units: ByteUnits, out: Console) -> None:
    numbers = [
        f"{point.relative_time:.2f}x {format_bytes(point.device_peak_bytes, units)}"
        + (" chosen" if point.chosen else " fits" if point.fits else "")
        for point in picture.points
    ]
    names = [plan_words(point.plan) for point in picture.points]
    sizes = [point.device_peak_bytes for point in picture.points]
    width = _width(out, names, numbers)
    low, high = min(*sizes, picture.usable_bytes) / 2, max(*sizes, picture.usable_bytes)

    def place(size: int) -> int:
        return max(1, round((width - 1) * log(size / low) / log(high / low)))

    edge = place(picture.usable_bytes - picture.headroom_bytes)
    rows = [
        (name, _with_edge("#" * place(size), edge), number)
        for name, size, number in zip(names, sizes, numbers, strict=True)
    ]
    _rows(out, rows)
    out.print()
    _say(out, "# device peak of one GPU, log scale; time a token is over the fastest plan's")
    free = f" less {format_bytes(picture.headroom_bytes, units)} asked to stay free" if picture.headroom_bytes else ""
    _say(out, f"| {picture.gpu}: {format_bytes(picture.usable_bytes, units)} usable{free}")


def _print_accuracy(picture: AccuracyPicture, out: Console) -> None:
    errors = [row.ratio - 1 for row in picture.rows]
    bounds = [-float("inf"), *BINS, float("inf")]
    names, counts = [], []
    for lower, upper in itertools.pairwise(bounds):
        counts.append(sum(lower <= error < upper for error in errors))
        if lower == -float("inf"):
            names.append(f"under {upper:+.3%}")
        elif upper == float("inf"):
            names.append(f"over {lower:+.3%}")
        else:
            names.append(f"{lower:+.3%} to {upper:+.3%}")
    numbers = [f"{count} rows" for count in counts]
    width = _width(out, names, numbers)
    most = max(counts)
    _rows(out, [(n, "#" * -(-width * c // most), t) for n, c, t in zip(names, counts, numbers, strict=True)])
    out.print()
    worst = max(picture.rows, key=lambda row: abs(row.ratio - 1))
    mean = sum(map(abs, errors)) / len(errors)
    _say(out, "# rows by measured over predicted, difference from 1")
    _say(out, f"furthest off: {worst.id}, {worst.model}, {worst.ratio - 1:+.4%}; mean {mean:.4%}")
    _say(out, f"tolerance {picture.tolerance:.2%}")
