"""Draws the records of ``lcplan.pictures`` with matplotlib: one pure function from a picture to a figure.

Colours are Okabe and Ito's, which the colour-blind tell apart; neighbours differ in brightness and hatch, so that the
picture reads in grey as well. What a shape is stands beside it. matplotlib is imported when a figure is made.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lcplan.errors import EnvironmentProblem, InputError
from lcplan.explanation import NAIVE
from lcplan.pictures import (
    AccuracyPicture,
    LengthCurve,
    LengthPicture,
    ParetoPicture,
    Picture,
    Timeline,
    WaterfallPicture,
)
from lcplan.reports.terminal import plan_words
from lcplan.reports.wording import group_words, phase_words
from lcplan.units import GB, GIB, ByteUnits, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FileFormat = Literal["svg", "png"]
Where = Literal["top", "left", "above", "beside"]
PNG_DPI = 150
MOST_TICKS = 9
NAMED_ROWS = 6
"""Rows furthest off that have their names beside them."""
INK, FAINT = "#222222", "#777777"
LIMIT = "#B00000"
"""The card's limit; drawn heavy and dashed as well."""
STYLE = {
    "weights": ("#0072B2", ""),
    "parameter": ("#0072B2", ""),
    "optimizer": ("#A9D8F5", "//"),
    "optimizer_state": ("#A9D8F5", "//"),
    "gradients": ("#009E73", "\\\\"),
    "gradient": ("#009E73", "\\\\"),
    "lora": ("#DDDDDD", "++"),
    "communication": ("#BBBBBB", "xx"),
    "all_gather": ("#BBBBBB", "xx"),
    "reduce_scatter": ("#EEEEEE", "xx"),
    "activations": ("#F7EE8A", ""),
    "activation": ("#F7EE8A", ""),
    "attention": ("#C24E00", ""),
    "mlp": ("#F2B84B", ".."),
    "moe": ("#5D3A6E", ""),
    "loss_head": ("#CC79A7", "oo"),
    "temporary": ("#CC79A7", "oo"),
    "evaluation": ("#CC79A7", "--"),
    "save": ("#EEEEEE", "--"),
}
"""Colour and hatch of a group; what is not here is white with dots."""
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
SHADES = ("#000000", "#0072B2", "#C24E00", "#009E73", "#8A4F7D", "#555555", "#7A6A00")


def need_matplotlib() -> None:
    """Refuse to go on without matplotlib.

    Raises:
        EnvironmentProblem: naming the extra.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblem(
            "missing-extra", f"pictures need matplotlib ({error}). Install it: pip install 'lcplan[plots]'"
        ) from None


def draw(picture: Picture, *, units: ByteUnits = "GiB") -> Figure:
    """The figure of a picture.

    Raises:
        EnvironmentProblem: when matplotlib is not installed.
    """
    need_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_settings(picture.kind)):
        figure = Figure(layout="constrained")
        if isinstance(picture, Timeline):
            _draw_timeline(picture, figure, units)
        elif isinstance(picture, LengthPicture):
            _draw_lengths(picture, figure, units)
        elif isinstance(picture, WaterfallPicture):
            _draw_waterfall(picture, figure, units)
        elif isinstance(picture, ParetoPicture):
            _draw_pareto(picture, figure, units)
        else:
            _draw_accuracy(picture, figure, units)
        figure.suptitle(picture.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def _settings(kind: str) -> dict[str, Any]:
    return {
        "font.family": "sans-serif", "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": f"lcplan-{kind}",
        "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT, "axes.labelcolor": INK,
        "xtick.color": INK, "ytick.color": INK, "text.color": INK, "hatch.linewidth": 0.5, "hatch.color": "#444444",
        "axes.unicode_minus": False, "text.parse_math": False,
    }  # fmt: skip


def render(picture: Picture, file_format: FileFormat, *, units: ByteUnits = "GiB") -> bytes:
    """The picture as the content of an SVG or PNG file, the same bytes each time.

    Raises:
        EnvironmentProblem: when matplotlib is not installed.
    """
    figure = draw(picture, units=units)
    import matplotlib as mpl

    stream = io.BytesIO()
    metadata = {"Date": None, "Creator": "lcplan", "Title": picture.title} if file_format == "svg" else {}
    with mpl.rc_context(_settings(picture.kind)), warnings.catch_warnings():
        # a name in a script that matplotlib's own font lacks: an SVG has it as text, a PNG shows boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(stream, format=file_format, dpi=PNG_DPI, metadata=metadata)
    return stream.getvalue()


def inline_svg(picture: Picture, *, units: ByteUnits = "GiB") -> str:
    """The picture as an ``<svg>`` element for a page: no prolog, no metadata, its own ids.

    Raises:
        EnvironmentProblem: when matplotlib is not installed.
    """
    import re
    from html import escape

    text = render(picture, "svg", units=units).decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{picture.kind}-", text)
    points = float(re.findall(r'\bwidth="([\d.]+)pt"', text)[0])
    title = escape(picture.title, quote=True)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" style="min-width: {0.8 * points:.0f}pt" ', 1)


def format_of(path: Path) -> FileFormat:
    """The format that a file's name asks for.

    Raises:
        InputError: for any other ending than .svg and .png.
    """
    ending = path.suffix.casefold()
    if ending not in (".svg", ".png"):
        raise InputError("bad-picture-file", f"{path}: a picture's file ends in .svg or .png. Name it so.")
    return "svg" if ending == ".svg" else "png"


# What several pictures share


def _scale(units: ByteUnits) -> int:
    return GIB if units == "GiB" else GB


def _limit(axes: Axes, usable: int, gpu: str, units: ByteUnits, *, where: Where) -> None:
    """The card's usable memory as a heavy dashed line with its words on or beside it."""
    value = usable / _scale(units)
    line = axes.axvline if where == "top" else axes.axhline
    line(value, color=LIMIT, linewidth=2, linestyle=(0, (6, 2)), zorder=5)
    words = f"{gpu}: {format_bytes(usable, units)} usable"
    if where == "above":
        words = f"- - -  {words}"
    if where == "beside":
        words = words.replace(": ", ":\n")
    at, coords, offset, align = {
        "top": ((value, 1), ("data", "axes fraction"), (4, 2), ("left", "bottom")),
        "left": ((0, value), ("axes fraction", "data"), (4, 3), ("left", "bottom")),
        "above": ((0, 1), ("axes fraction", "axes fraction"), (0, 2), ("left", "bottom")),
        "beside": ((1, value), ("axes fraction", "data"), (6, 0), ("left", "center")),
    }[where]
    axes.annotate(
        words, at, xycoords=coords, xytext=offset, textcoords="offset points", color=LIMIT, fontweight="bold",
        ha=align[0], va=align[1],
    )  # fmt: skip


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    """Round numbers along a log axis; 2 and 5 times powers of ten as well where there are few of those."""
    powers = [10.0**k for k in range(-3, 10)]
    ticks = [power * part for power in powers for part in (1, 2, 5) if low <= power * part <= high]
    if len(ticks) > MOST_TICKS:
        ticks = [power for power in powers if low <= power <= high]
    axis.set_ticks(ticks, [f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def _spread(wanted: list[float], least: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, ascending, at least ``least`` apart and within the bounds where that can be."""
    places: list[float] = []
    for value in wanted:
        places.append(max(value, places[-1] + least) if places else max(value, low))
    over = places[-1] - high if places else 0
    if over > 0:
        places[-1] -= over
        for index in range(len(places) - 2, -1, -1):
            places[index] = min(places[index], places[index + 1] - least)
    return places


# Memory through one step


def _draw_timeline(picture: Timeline, figure: Figure, units: ByteUnits) -> None:
    one = _scale(units)
    count = len(picture.instants)
    figure.set_size_inches(max(9.0, 4.2 + 0.42 * count), 5.2)
    step, peak = figure.subplots(1, 2, width_ratios=[max(count, 8), 7], sharey=True)
    bottoms = [0.0] * count
    for index, group in enumerate(picture.groups):
        colour, hatch = STYLE.get(group, ("#FFFFFF", ".."))
        sizes = [instant.sizes[index] / one for instant in picture.instants]
        step.bar(range(count), sizes, 0.86, bottoms, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.4)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    highest = max(picture.usable_bytes, (max(map(sum, (i.sizes for i in picture.instants))) + picture.on_top_bytes))
    step.set_ylim(0, 1.1 * highest / one)
    step.set_xlim(-0.7, count - 0.3)
    step.set_xticks(range(count), [phase_words(instant.phase) for instant in picture.instants], rotation=90)
    gaps = sum(instant.after_others for instant in picture.instants)
    for index, instant in enumerate(picture.instants):
        if instant.after_others:
            step.axvline(index - 0.5, color=FAINT, linestyle=":", linewidth=1)
            step.annotate(
                "layers between" if gaps == 1 else "...", (index - 0.5, 1), xycoords=("data", "axes fraction"),
                ha="center", va="bottom", fontsize=8, color=FAINT,
            )  # fmt: skip
    step.set_ylabel(f"memory of one GPU, {units}")
    step.set_xlabel("instants of the step, in order")
    top = bottoms[picture.peak]
    step.annotate(
        f"{top:,.1f}", (picture.peak, top), xytext=(0, 3), textcoords="offset points", ha="center",
        fontweight="bold", zorder=7,
    )  # fmt: skip
    _limit(step, picture.usable_bytes, picture.gpu, units, where="above")
    _name_those_elsewhere(picture, step, one)
    _draw_peak(picture, peak, units)


def _name_those_elsewhere(picture: Timeline, axes: Axes, one: int) -> None:
    """Words above the bar where a group is largest, for groups that the peak's bar does not have."""
    named: dict[int, list[str]] = {}
    for index, group in enumerate(picture.groups):
        sizes = [instant.sizes[index] for instant in picture.instants]
        if not sizes[picture.peak]:
            words = f"{group_words(group).rpartition(' / ')[2]} {max(sizes) / one:,.1f}"
            named.setdefault(sizes.index(max(sizes)), []).append(words)
    for place, lines in named.items():
        axes.annotate(
            "\n".join(lines), (place, sum(picture.instants[place].sizes) / one), xytext=(0, 5),
            textcoords="offset points", ha="center", va="bottom", rotation=90, fontsize=8.5, zorder=7,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip


def _draw_peak(picture: Timeline, axes: Axes, units: ByteUnits) -> None:
    """The peak's bar once more, each part with its words, and the pinned host memory beside it."""
    one = _scale(units)
    sizes = picture.instants[picture.peak].sizes
    parts = [(group, size / one) for group, size in zip(picture.groups, sizes, strict=True) if size]
    bottom, wanted, words = 0.0, [], []
    for group, size in parts:
        colour, hatch = STYLE.get(group, ("#FFFFFF", ".."))
        axes.bar(0, size, 0.8, bottom, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.4)
        wanted.append(bottom + size / 2)
        words.append(f"{group_words(group)} {size:,.1f}")
        bottom += size
    on_top = picture.on_top_bytes / one
    axes.bar(0, on_top, 0.8, bottom, color="white", hatch="////", edgecolor=FAINT, linewidth=0.8)
    wanted.append(bottom + on_top / 2)
    words.append(f"outside tensors {on_top:,.1f}")
    top = axes.get_ylim()[1]
    for place, value, text in zip(_spread(wanted, top / 22, 0, top), wanted, words, strict=True):
        axes.annotate(
            text, (0.4, value), xytext=(0.62, place), va="center", fontsize=8.5,
            arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
    host = picture.pinned_bytes / one
    axes.bar(4.2, host, 0.8, color="#E5E5E5", edgecolor=INK, linewidth=0.8)
    axes.annotate(
        f"{host:,.1f}" if host else "none", (4.2, host), xytext=(0, 3), textcoords="offset points", ha="center"
    )
    axes.axhline(picture.usable_bytes / one, 0.0, 0.24, color=LIMIT, linewidth=2, linestyle=(0, (6, 2)))
    axes.set_xlim(-0.6, 4.9)
    where = phase_words(picture.instants[picture.peak].phase).replace(": ", ":\n")
    words = [f"device peak\n{bottom + on_top:,.1f}, at\n{where}", "host memory,\npinned,\none rank"]
    axes.set_xticks([0, 4.2], words)
    axes.tick_params(axis="y", left=False)
    axes.spines["left"].set_visible(False)


# Memory against length


def _draw_lengths(picture: LengthPicture, figure: Figure, units: ByteUnits) -> None:
    one = _scale(units)
    figure.set_size_inches(10, 5.8)
    axes = figure.subplots()
    usable = picture.usable_bytes / one
    for index, curve in enumerate(picture.curves):
        colour, line = SHADES[index % len(SHADES)], LINES[index % len(LINES)]
        lengths, sizes = zip(*curve.points, strict=True)
        axes.plot(lengths, [size / one for size in sizes], color=colour, linestyle=line, linewidth=1.8, zorder=3)
        if curve.longest is not None:
            leaves = (curve.longest, usable)
        else:
            leaves = (lengths[-1], sizes[-1] / one) if curve.always_fits else (lengths[0], usable)
        axes.plot(leaves[0], leaves[1], MARKS[index % len(MARKS)], color=colour, markersize=8, zorder=6, clip_on=False)
        # a lane of its own above the axes, the lower the further right: no words cross a line
        lane = 1.03 + 0.055 * (len(picture.curves) - 1 - index)
        axes.annotate(
            _curve_words(curve), (leaves[0], lane), xycoords=("data", "axes fraction"), xytext=(4, 0),
            textcoords="offset points", color=colour, va="center", annotation_clip=False,
        )  # fmt: skip
        axes.annotate(
            "", leaves, xytext=(leaves[0], lane), textcoords=("data", "axes fraction"), annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 4},
        )  # fmt: skip
    axes.set_ylim(0, 1.5 * usable)
    axes.set_xscale("log", base=2)
    first, last = picture.curves[0].points[0][0], picture.curves[0].points[-1][0]
    axes.set_xlim(first, last)
    doublings = (last // first).bit_length()
    ticks = [first << i for i in range(0, doublings, 2 if doublings > 6 else 1)]
    axes.set_xticks(ticks, [_tokens(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("max_length, tokens of one sequence (log scale)")
    axes.set_ylabel(f"device peak of one GPU, {units}")
    axes.axvline(picture.max_length, color=FAINT, linewidth=1, linestyle=":")
    axes.annotate(
        f"the plan: {_tokens(picture.max_length)}", (picture.max_length, 0), xytext=(-4, 4),
        textcoords="offset points", rotation=90, ha="right", va="bottom", color=FAINT,
    )  # fmt: skip
    _limit(axes, picture.usable_bytes, picture.gpu, units, where="beside")


def _curve_words(curve: LengthCurve) -> str:
    name = "naive: full logits, everything saved" if curve.lever == NAIVE else f"+ {curve.lever}"
    if curve.always_fits:
        return f"{name}: fits all the way"
    return f"{name}: never fits" if curve.longest is None else f"{name}: up to {curve.longest:,} tokens"


def _tokens(count: int) -> str:
    """``256Ki``, ``1Mi``: as ``--max-length`` reads it; other numbers in full."""
    for size, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if count >= size and count % size == 0:
            return f"{count // size:,}{unit}"
    return f"{count:,}"


# From naive to the plan


def _draw_waterfall(picture: WaterfallPicture, figure: Figure, units: ByteUnits) -> None:
    one = _scale(units)
    steps = picture.steps
    figure.set_size_inches(9, 1.6 + 0.5 * len(steps))
    axes = figure.subplots()
    sizes = [step.device_peak_bytes / one for step in steps]
    axes.set_xscale("log")
    axes.set_xlim(min(*sizes, picture.usable_bytes / one) / 1.6, max(*sizes, picture.usable_bytes / one) * 4)
    axes.set_ylim(len(steps) - 0.5, -0.6)
    for row, (step, size) in enumerate(zip(steps, sizes, strict=True)):
        before = sizes[row - 1] if row else size
        if before != size:
            saved = size < before
            axes.barh(
                row, before - size, 0.5, size, color="#DCE9F2" if saved else "#F3D9CC", hatch="" if saved else "xx",
                edgecolor=FAINT, linewidth=0.6,
            )  # fmt: skip
        if row:
            axes.plot([before, before], [row - 1, row + 0.25], color=FAINT, linewidth=0.8)
        mark, colour = ("o", "#0072B2") if step.fits else ("X", INK)
        axes.plot([size], [row], mark, color=colour, markersize=9, zorder=6)
        text = f"{format_bytes(step.device_peak_bytes, units)}" + ("  fits" if step.fits else "")
        axes.annotate(
            text, (max(size, before), row), xytext=(10, 0), textcoords="offset points", va="center", zorder=7,
            fontweight="bold" if step.fits else "normal",
        )  # fmt: skip
    names = [step.lever if step.lever == NAIVE else f"+ {step.lever}" for step in steps]
    axes.set_yticks(range(len(steps)), names)
    axes.set_xlabel(f"device peak of one GPU, {units} (log scale); a band is what the lever saves")
    _log_ticks(axes.xaxis, *axes.get_xlim())
    axes.tick_params(axis="y", length=0)
    _limit(axes, picture.usable_bytes, picture.gpu, units, where="top")


# Memory against time


def _draw_pareto(picture: ParetoPicture, figure: Figure, units: ByteUnits) -> None:
    one = _scale(units)
    points = sorted(picture.points, key=lambda point: point.device_peak_bytes)
    figure.set_size_inches(10.5, max(4.6, 1.6 + 0.3 * len(points)))
    axes = figure.subplots()
    times = [point.relative_time for point in points]
    sizes = [point.device_peak_bytes / one for point in points]
    axes.plot(times, sizes, color=FAINT, linewidth=1, drawstyle="steps-pre", zorder=2)
    axes.set_yscale("log")
    low, high = min(*sizes, picture.usable_bytes / one) / 1.5, max(*sizes, picture.usable_bytes / one) * 1.5
    axes.set_ylim(low, high)
    span = max(times) - min(times) or 0.1
    axes.set_xlim(min(times) - 0.06 * span, max(times) + 0.06 * span)
    wanted = [_share(size, low, high) for size in sizes]
    places = _spread(wanted, 0.95 / max(len(points), 12), 0.02, 0.98)
    for point, time, size, place in zip(points, times, sizes, places, strict=True):
        face = "#0072B2" if point.fits else "white"
        mark = "*" if point.chosen else "o"
        axes.plot([time], [size], mark, color=INK, markerfacecolor=face, markersize=15 if point.chosen else 8, zorder=6)
        fate = "chosen: " if point.chosen else "fits: " if point.fits else ""
        axes.annotate(
            f"{fate}{plan_words(point.plan)}, {size:,.0f} {units}, {time:.2f}x", (time, size), xytext=(1.04, place),
            textcoords="axes fraction", va="center", fontsize=8, annotation_clip=False,
            fontweight="bold" if point.chosen else "normal",
            arrowprops={
                "arrowstyle": "-", "color": FAINT, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 4, "relpos": (0, 0.5),
            },
        )  # fmt: skip
    axes.set_xlabel("time a token, over the fastest plan's")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.2f}x")
    axes.set_ylabel(f"device peak of one GPU, {units} (log scale)")
    _log_ticks(axes.yaxis, low, high)
    _limit(axes, picture.usable_bytes, picture.gpu, units, where="left")
    if picture.headroom_bytes:
        room = (picture.usable_bytes - picture.headroom_bytes) / one
        axes.axhline(room, color=LIMIT, linewidth=1, linestyle=":")
        axes.annotate(
            f"{format_bytes(picture.headroom_bytes, units)} asked to stay free", (0, room),
            xycoords=("axes fraction", "data"), xytext=(4, -3), textcoords="offset points", color=LIMIT, va="top",
        )  # fmt: skip


def _share(value: float, low: float, high: float) -> float:
    """Where a value lies on a log axis, as a share of it."""
    from math import log

    return log(value / low) / log(high / low)


# Measured over predicted


def _draw_accuracy(picture: AccuracyPicture, figure: Figure, units: ByteUnits) -> None:
    one = _scale(units)
    figure.set_size_inches(9, 4.6)
    axes = figure.subplots()
    sizes = [row.measured_bytes / one for row in picture.rows]
    errors = [100 * (row.ratio - 1) for row in picture.rows]
    axes.axhline(0, color=FAINT, linewidth=0.8)
    axes.plot(sizes, errors, "o", color="#0072B2", markeredgecolor="white", markeredgewidth=0.4, markersize=5)
    reach = max(1.4 * max(map(abs, errors)), 1e-3)
    tolerance = 100 * picture.tolerance
    if tolerance <= 4 * reach:
        reach = max(reach, 1.15 * tolerance)
        for sign in (1, -1):
            axes.axhline(sign * tolerance, color=LIMIT, linewidth=2, linestyle=(0, (6, 2)))
        words = f"tolerance {tolerance:g}%"
        axes.annotate(
            words, (1, tolerance), xycoords=("axes fraction", "data"), xytext=(-4, 3), textcoords="offset points",
            ha="right", color=LIMIT, fontweight="bold",
        )  # fmt: skip
    else:
        axes.annotate(
            f"tolerance ±{tolerance:g}% is outside the picture", (1, 1), xycoords="axes fraction", ha="right",
            va="top", color=LIMIT, fontweight="bold",
        )  # fmt: skip
    axes.set_ylim(-reach, reach)
    axes.set_xscale("log")
    _log_ticks(axes.xaxis, *axes.get_xlim())
    worst = sorted(sorted(picture.rows, key=lambda row: -abs(row.ratio - 1))[:NAMED_ROWS], key=lambda row: row.ratio)
    places = _spread([100 * (row.ratio - 1) for row in worst], reach / 14, -reach, reach)
    for row, place in zip(worst, places, strict=True):
        error = 100 * (row.ratio - 1)
        axes.annotate(
            f"{row.id}, {row.model}: {error:+.3f}%", (row.measured_bytes / one, error), xytext=(1.02, place),
            textcoords=("axes fraction", "data"), va="center", fontsize=8, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": FAINT, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5),
            },
        )  # fmt: skip
    axes.set_xlabel(f"measured peak allocated, {units} (log scale)")
    axes.set_ylabel("measured over predicted, difference from 1 in %")
