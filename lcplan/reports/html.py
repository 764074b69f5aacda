"""Renders a report as one self-contained page: inline style and pictures, nothing loaded, no script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lcplan.report_page import HOST, ReportPage
from lcplan.reports.terminal import GROUPS, answer, budget_line, suggestion, time_line
from lcplan.reports.wording import phase_words
from lcplan.units import ByteUnits, format_bytes, format_parameters

if TYPE_CHECKING:
    from jinja2 import Environment

TITLES = GROUPS | {"device": "outside PyTorch's allocator", HOST: "host memory"}


def environment() -> Environment:
    """Templates of this package; every value is escaped, and a name that is not there is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("lcplan.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render_page(page: ReportPage, *, units: ByteUnits) -> str:
    """The page as HTML.

    Raises:
        EnvironmentProblem: when matplotlib, which draws the pictures, is not installed.
    """
    from markupsafe import Markup

    from lcplan.reports.plots import inline_svg

    report = page.report
    pictures = {
        picture.kind: Markup(inline_svg(picture, units=units))
        for picture in (page.timeline, page.waterfall, page.lengths)
        if picture is not None
    }
    jinja = environment()
    jinja.filters |= {
        "bytes": lambda size: format_bytes(size, units),
        "phase": phase_words,
        "group": lambda name: TITLES.get(name, name.replace("_", " ")),
    }
    share = min(report.device_peak_bytes / report.gpu.usable_bytes, 1.0)
    values: dict[str, Any] = {
        "page": page,
        "report": report,
        "pictures": pictures,
        "answer": answer(report, units).partition(" Try:")[0],
        "suggestion": None if report.fits else suggestion(report),
        "time": time_line(report),
        "budget": budget_line(report),
        "parameters": format_parameters(report.model.num_parameters),
        "filled": f"{share:.1%}",
        "units": units,
    }
    return jinja.get_template("report.html.j2").render(values)
