"""Writes the pages of docs/ that are made from the code and the data, and the figures of README.md.

    python -m tools.pages [--check]

With ``--check`` nothing is written; exit 1 names what is not current.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import typer.main

from lcplan.checking import CheckReport, check_rows, load_rows
from lcplan.cli.main import COMMANDS, HELP, build_app
from lcplan.cli.plan_options import PLAN
from lcplan.estimation import estimate
from lcplan.estimators import deepspeed, formula  # noqa: F401  (they register the items)
from lcplan.estimators._item import ITEMS, Item
from lcplan.hardware import load_gpu
from lcplan.ledger import DEVICE, PHASE_HELP
from lcplan.levers import LEVERS, excluded
from lcplan.model_loading import load_model
from lcplan.model_spec import ModelSpec
from lcplan.presets import Preset, list_presets, load_preset
from lcplan.reports.terminal import GROUPS, answer, time_line
from lcplan.row_groups import RowGroup
from lcplan.time_checking import check_times, load_published
from lcplan.train_plan import resolve
from lcplan.units import format_bytes, format_parameters
from tools.error_codes import INTERNAL, every_message

ROOT = Path(__file__).parent.parent
WRITTEN = "This page is written by `make pages`; a test holds it to the code.\n"
TOLERANCE = 0.01
TIME_TOLERANCE = 0.1


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """A Markdown table; the columns of ``right`` are numbers."""
    lines = [heads, ["--:" if i in right else "---" for i in range(len(heads))], *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n" for cells in lines)


def page(title: str, *parts: str) -> str:
    """A whole page."""
    return "\n".join((f"# {title}\n", *parts, WRITTEN))


@cache
def checked() -> CheckReport:
    """The shipped rows, whatever the user has recorded."""
    return check_rows(load_rows(), tolerance=TOLERANCE)


def ledger() -> str:
    """Every item, from the docstrings of the estimators, and every phase."""
    phases = table(("phase", "what happens"), [(f"`{name}`", text) for name, text in PHASE_HELP.items()])
    parts = [
        "Every item that the formulas know, in the words of the function that computes it, and the phases they are "
        "alive in. [The memory model](memory-model.md) says how they fit together and what the letters mean; "
        "`lcplan estimate … --explain ITEM` puts a plan's numbers in.\n",
        "## Phases\n",
        f"In the order of a step. Items in `{DEVICE}` count for the device peak alone.\n",
        phases,
    ]
    titles = {**GROUPS, "host": "host memory", "disk": "disk"}
    by_group = sorted(ITEMS.values(), key=lambda item: list(titles).index(item.key.partition(".")[0]))
    for group, items in groupby(by_group, key=lambda item: item.key.partition(".")[0]):
        title = titles[group]
        parts.append(f"## {title[0].upper()}{title[1:]}\n")
        parts += [_item(item) for item in items]
    return page("Every item of the ledger", *parts)


def _item(item: Item[Any]) -> str:
    doc = inspect.getdoc(item) or ""
    said, _, rest = doc.partition("\nFormula: ")
    fields = re.findall(r"^(Live in|Rounding|Ignores): (.*(?:\n +.*)*)", rest, flags=re.MULTILINE)
    facts = [("Formula", f"`{item.formula}`"), *((name, " ".join(text.split())) for name, text in fields)]
    facts += [("Source", item.source), ("Confidence", f"{item.confidence}; category {item.category}")]
    lines = [f"### `{item.key}`\n", said.strip() + "\n", *(f"- {name}: {text}" for name, text in facts)]
    return "\n".join(lines) + "\n"


def levers() -> str:
    """The table of levers."""
    parts = [
        "One thing that changes memory, time or reach of a plan. `recommend` searches all of them but those that say "
        "why not. `lcplan list levers` prints this table.\n"
    ]
    for lever in LEVERS:
        facts = {
            "Sets": ", ".join(f"`{name}`" for name in lever.changes.split(", ")),
            "Needs": "; ".join(filter(None, (lever.needs, " or ".join(lever.requires)))),
            "Costs": lever.costs,
            "Does not go with": ", ".join(excluded(lever)),
            "Not searched": lever.not_searched,
        }
        lines = [
            f"## {lever.id}\n",
            f"{lever.summary}\n",
            *(f"- {name}: {text}" for name, text in facts.items() if text),
        ]
        parts.append("\n".join(lines) + "\n")
    return page("Levers", *parts)


def accuracy() -> str:
    """What check finds, row by row."""
    report = checked()
    rows = [
        (
            row.id,
            f"{row.model}, {row.num_hidden_layers} layers",
            f"{row.max_length:,}",
            ", ".join(row.levers),
            format_bytes(row.measured_bytes),
            "refused" if row.error is None else f"{row.error:+.4%}",
        )
        for row in report.rows
    ]
    return page(
        "Measured accuracy",
        "Peak allocated memory, predicted by formulas and measured on an H200. `lcplan check` computes and prints all "
        "of this; a row that drifts fails the project's tests.\n",
        figures(),
        "![Measured over predicted for every row](pictures/accuracy.svg)\n",
        "## By model family\n",
        _groups(group for group in report.groups if group.kind == "family"),
        "## By lever\n",
        _groups(group for group in report.groups if group.kind == "lever"),
        "## Step times\n",
        _times(),
        "## Every row\n",
        table(("row", "model", "tokens", "levers", "measured", "error"), rows, right=(2, 4, 5)),
    )


def figures() -> str:
    """The figures of all rows."""
    report = checked()
    families = {group.name for group in report.groups if group.kind == "family"}
    lengths = [row.max_length for row in report.rows]
    what = (
        f"{report.num_checked} measured rows, {len(families)} model types, {min(lengths):,} to {max(lengths):,} tokens"
    )
    numbers = (f"{report.worst_error:+.4%}", f"{report.mean_error:.4%}", f"{report.mean_signed_error:+.4%}")
    return table(("`lcplan check`", "worst", "mean", "mean signed"), [(what, *numbers)], right=(1, 2, 3))


def _groups(groups: Iterable[RowGroup]) -> str:
    def percent(error: float | None, form: str) -> str:
        return "-" if error is None else format(error, form)

    rows = [
        (
            group.name,
            str(group.num_rows),
            percent(group.worst_error, "+.4%"),
            percent(group.mean_error, ".4%"),
            percent(group.mean_signed_error, "+.4%"),
        )
        for group in groups
    ]
    return table(("", "rows", "worst", "mean", "mean signed"), rows, right=(1, 2, 3, 4))


def _times() -> str:
    report = check_times(load_rows(), load_published(), tolerance=TIME_TOLERANCE)
    counted = [row for row in report.rows if row.counts and row.error is not None and row.predicted_s is not None]
    rows = [
        (
            row.id,
            row.model,
            row.timed,
            str(row.num_gpus),
            f"{row.max_length:,}",
            f"{row.measured_s:,.2f} s",
            f"{row.predicted_s:,.2f} s",
            f"{row.error:+.1%}",
        )
        for row in counted
    ]
    said = (
        f"`lcplan check --time`: {report.num_checked} times above 5 s; worst {report.worst_error:+.1%}, mean "
        f"{report.mean_error:.1%}, mean signed {report.mean_signed_error:+.1%}; {report.num_ordered} of "
        f"{report.num_pairs} pairs of measured plans are in the right order.\n\n"
    )
    heads = ("row", "model", "what was timed", "GPUs", "tokens", "measured", "predicted", "error")
    return said + table(heads, rows, right=(3, 4, 5, 6, 7))


def presets() -> str:
    """Every preset with its plan and what the formulas say of it."""
    parts = [
        "A named job: model, plan, data and training in one YAML file. `lcplan estimate --preset NAME` answers for it, "
        "`lcplan run --preset NAME --output-dir FOLDER --dry-run` writes its job. Flags win over a preset's values.\n"
    ]
    for name in list_presets():
        preset = load_preset(name)
        parts += [f"## {name}\n", f"{preset.description}.\n", f"{preset.source}\n", _answer(preset)]
        parts.append(table(("plan", "value"), [(f"`{key}`", f"`{value}`") for key, value in preset.plan.items()]))
        if (ROOT / "docs" / "pictures" / f"{name}-timeline.svg").is_file():
            parts.append(f"![Memory of one GPU through one step of {name}](pictures/{name}-timeline.svg)\n")
    return page("Presets", *parts)


def _answer(preset: Preset) -> str:
    spec = load_model(preset.model) if preset.config is None else ModelSpec.from_config(preset.config, preset.model)
    size = f"{preset.model}, {format_parameters(spec.num_parameters)} parameters."
    if preset.device == "cpu":
        return f"{size} Trained on the CPU, so that there is no GPU it has to fit.\n"
    gpu = load_gpu(preset.plan["gpu"])
    plan, assumptions = resolve(spec, dict(preset.plan), usual_gpus_per_node=gpu.gpus_per_node)
    report = estimate(spec, plan, gpu, assumptions=assumptions)
    return f"{size} {answer(report, 'GiB')} {time_line(report)}.\n"


def commands() -> str:
    """Every command and flag, as typer has them."""
    app: Any = typer.main.get_command(build_app(list(COMMANDS)))
    parts = [
        f"{HELP}\n",
        "Exit 0: done, or it fits. 1: it ran and the answer is no. 2: bad input, environment or an error inside. `run` "
        "passes on the job's own code. stdout holds the result, everything else goes to stderr.\n",
        "Boolean flags have a `--no-` form. Flags win over `--config` files and presets. Unset means the default of "
        "the training stack, printed as an assumption.\n",
    ]
    shared: dict[str, Any] = {}
    for name, command in app.commands.items():
        own = [each for each in command.params if getattr(each, "rich_help_panel", None) != PLAN]
        shared |= {each.name: each for each in command.params if each not in own}
        said, _, example = (command.help or "").partition("Example: ")
        parts += [f"## lcplan {name}\n", f"{said.strip()}\n"]
        if example:
            parts.append(f"Example: `{' '.join(example.split())}`\n")
        parts.append(table(("", "what", "default"), map(_flag, own)))
        if len(own) < len(command.params):
            parts.append("And [the plan flags](#plan-flags).\n")
    parts += ["## Plan flags\n", table(("", "what"), [_flag(each)[:2] for each in shared.values()])]
    parts += ["## Completion\n", COMPLETION]
    return page("Command line", *parts)


COMPLETION = """`lcplan --install-completion` installs completion for the shell that it is called from (bash, zsh or
fish), `lcplan --show-completion` prints the script. Models, GPUs, presets, items and the values of closed sets are
completed.
"""


def _flag(parameter: Any) -> tuple[str, str, str]:
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        names = [parameter.metavar or parameter.name.upper()]
    default = parameter.default
    shown = "" if default is None or isinstance(default, bool) or callable(default) else f"`{default}`"
    return ", ".join(f"`{name}`" for name in names), parameter.help or "", shown


def troubleshooting() -> str:
    """Every code with its messages."""
    abouts = {
        "value": "Values and files",
        "model": "Models",
        "plan": "Plans",
        "data": "Data",
        "machine": "This machine",
        "warning": "Warnings",
    }
    parts = [
        "An error is printed as `error [code]: message` on stderr, with exit 2, and nothing is half-written. A message "
        "says what is wrong with which value, the rule, and the fix. A warning stands in the report. What depends on "
        "the case is in `<angle brackets>`. Mistakes of the stack that lcplan guards against are in [the table of "
        "traps](traps.md).\n",
        f"`error [{INTERNAL}]` is a defect in lcplan: please report it with the lines above it.\n",
    ]
    messages = every_message()
    for about, title in abouts.items():
        parts.append(f"## {title}\n")
        own = [message for message in messages if message.about == about]
        for code, same in groupby(own, key=lambda message: message.code):
            parts += [f"### {code}\n", *(f"```text\n{_wrapped(message.text)}\n```\n" for message in same)]
    return page("Troubleshooting by code", *parts)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 112, break_on_hyphens=False, break_long_words=False))


PAGES: dict[str, Callable[[], str]] = {
    "ledger.md": ledger,
    "levers.md": levers,
    "accuracy.md": accuracy,
    "presets.md": presets,
    "cli.md": commands,
    "troubleshooting.md": troubleshooting,
}
SECTIONS: dict[str, Callable[[], str]] = {"figures": figures}
"""Parts of README.md between ``<!-- NAME: … -->`` and ``<!-- end -->``."""


def with_sections(text: str) -> str:
    """A text with its generated parts made anew."""
    for name, make in SECTIONS.items():
        begin = re.search(rf"<!-- {name}: [^>]*-->\n", text)
        if begin is not None:
            text = text[: begin.end()] + make() + text[text.index("<!-- end -->", begin.end()) :]
    return text


def made() -> dict[Path, str]:
    """Every file that this script writes, with its content."""
    readme = ROOT / "README.md"
    pages = {ROOT / "docs" / name: make() for name, make in PAGES.items()}
    return pages | {readme: with_sections(readme.read_text("utf-8"))}


def main() -> int:
    """Write the pages, or say which are not current."""
    stale = [file for file, text in made().items() if not file.is_file() or file.read_text("utf-8") != text]
    if "--check" in sys.argv[1:]:
        print(*(file.relative_to(ROOT) for file in stale), sep="\n")
        return 1 if stale else 0
    for file in stale:
        file.write_text(made()[file], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
