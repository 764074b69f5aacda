"""Reports at the widths of a phone, a terminal and a wide screen, without colour."""

from __future__ import annotations

import io
import itertools
import re
import shlex
from collections import Counter

import pytest
from rich.console import Console

from lcplan import estimate, load_gpu
from lcplan.ledger import Compared, PhaseTotal, TensorGroup
from lcplan.reports.layout import Column, print_table, say, say_command, wrap
from lcplan.reports.terminal import print_report
from tests.conftest import plan_of, tiny_spec

EIGHT_GPUS = ["--gpu", "h100-80gb", "--num-gpus", "8"]
REPORTS = {
    "estimate": ["estimate", "--preset", "qwen3-8b-1m", "--token-budget", "1B"],
    "does not fit": ["estimate", "Qwen/Qwen3-8B", "--max-length", "1Mi", *EIGHT_GPUS, "--cp-size", "8"],
    "naive": ["estimate", "Qwen/Qwen3-8B", "--max-length", "1Mi", *EIGHT_GPUS, "--activation-checkpointing", "none"],
    "rules": ["estimate", "--preset", "qwen3-4b-128k", "--compare-rules"],
    "explain": ["estimate", "--preset", "qwen3-8b-1m", "--explain", "attention.ring_backward"],
    "recommend": ["recommend", "Qwen/Qwen3-8B", "--max-length", "1Mi", *EIGHT_GPUS],
    "compare": [
        "recommend", "Qwen/Qwen3-8B", "--max-length", "128Ki", *EIGHT_GPUS, "--gpu", "h200", "--price", "2.5",
    ],
    "nothing fits": ["recommend", "Qwen/Qwen3-32B", "--max-length", "1Mi", "--gpu", "l40s", "--num-gpus", "8"],
    "check": ["check"],
    "times": ["check", "--time"],
    **{kind: ["list", kind] for kind in ("models", "gpus", "presets", "levers")},
}  # fmt: skip
WIDTHS = (60, 100, 160)
QUANTITY = re.compile(r"(?<!\S)\(?[+-]?\d[\d,.]*(?:%|x| (?:GiB|MiB|GB|MB|s|hours|tokens|TFLOP/s)\b)")
NARROW_HINT = "formulas: --explain ITEM, or a wider terminal"
"""What a narrow report says instead of its column of formulas."""
SHOWN: dict[tuple[str, int], str] = {}
"""Every report is made once a width."""


def quantities(text: str) -> list[str]:
    return sorted(QUANTITY.findall(" ".join(text.split())))


def characters(text: str) -> Counter[str]:
    """What is said, whatever the layout: bars and the breaks of commands aside."""
    return Counter(re.sub(r"[\s#\\]", "", text))


def show(lcplan, monkeypatch: pytest.MonkeyPatch, name: str, width: int) -> str:
    if (name, width) not in SHOWN:
        monkeypatch.setenv("COLUMNS", str(width))
        SHOWN[name, width] = lcplan(*REPORTS[name]).out
    return SHOWN[name, width]


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_no_wider_than_asked_and_loses_nothing(lcplan, monkeypatch, name: str) -> None:
    texts = {width: show(lcplan, monkeypatch, name, width) for width in WIDTHS}
    for width, text in texts.items():
        assert [line for line in text.splitlines() if len(line) > width] == []
        assert "\x1b" not in text
        assert "…" not in text
    assert characters(texts[100]) == characters(texts[160])
    assert quantities(texts[100]) == quantities(texts[160])
    if name in ("estimate", "does not fit", "naive"):
        sizes = {width: re.findall(r"[\d,.]+ GiB", text) for width, text in texts.items()}
        assert NARROW_HINT in texts[60]
        assert sizes[60] == sizes[160]
    else:
        assert characters(texts[60]) == characters(texts[160])
        assert quantities(texts[60]) == quantities(texts[160])


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_ends_between_a_number_and_its_unit(lcplan, monkeypatch, name: str, width: int) -> None:
    lines = [line.strip() for line in show(lcplan, monkeypatch, name, width).splitlines()]
    for line, following in itertools.pairwise(lines):
        unit = re.match(r"(?:[KMGT]i?B|tokens|TFLOP/s|%|[,.]\d)", following)
        assert not (re.search(r"\d$", line) and unit), (line, following)
        assert not (re.search(r"\d,$", line) and re.match(r"\d{3}(?:\D|$)", following)), (line, following)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_command_can_be_pasted(lcplan, monkeypatch, width: int) -> None:
    text = show(lcplan, monkeypatch, "recommend", width)
    command = shlex.split(text[text.index("\nlcplan estimate") :].replace("\\\n", " "))
    assert command[:3] == ["lcplan", "estimate", "Qwen/Qwen3-8B"]
    assert "--offload-activations" in command
    assert lcplan(*command[1:]).code == 0


def printed(width: int) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(width=width, file=file, color_system=None), file


def test_wrap() -> None:
    assert wrap("peak 51.30 GiB of it", 12) == ["peak", "51.30 GiB of", "it"]
    assert wrap("- a reason that is long", 12, hanging=2) == ["- a reason", "  that is", "  long"]
    assert wrap("", 12) == [""]
    assert wrap("h100-80gb", 6) == ["h100-8", "0gb"]


def test_text_is_not_markup() -> None:
    out, file = printed(40)
    say(out, "backward[0].mlp and [bold]x[/bold]")
    assert file.getvalue() == "backward[0].mlp and [bold]x[/bold]\n"


def test_a_command_breaks_before_flags_only() -> None:
    out, file = printed(30)
    say_command(out, "lcplan estimate a/b --max-length 4096 --gpu h200", lead="Try: ")
    assert file.getvalue() == "Try: lcplan estimate a/b \\\n    --max-length 4096 \\\n    --gpu h200\n"
    out, file = printed(80)
    say_command(out, "lcplan estimate a/b --gpu h200")
    assert file.getvalue() == "lcplan estimate a/b --gpu h200\n"


def test_a_command_does_not_break_within_quotes() -> None:
    words = ["lcplan", "estimate", "my model --with/a name", "--lora-target-modules", "q_proj, --v_proj"]
    for width in (20, 30, 60, 200):
        out, file = printed(width)
        say_command(out, shlex.join(words))
        assert shlex.split(file.getvalue().replace("\\\n", "")) == words


COLUMNS = (Column("what it is", text=True), Column("size", right=True), Column(""))
ROWS = [("  one short thing", "1.00 GiB", ""), ("another", "12.00 GiB", "fits")]


def test_a_table_in_one_piece_wrapped_and_stacked() -> None:
    out, file = printed(40)
    print_table(out, COLUMNS, ROWS)
    assert [line.rstrip() for line in file.getvalue().splitlines()] == [
        "what it is              size",
        "  one short thing   1.00 GiB",
        "another            12.00 GiB  fits",
    ]
    out, file = printed(26)
    print_table(out, COLUMNS, ROWS, least_text=8)
    assert [line.rstrip() for line in file.getvalue().splitlines()] == [
        "what it         size",
        "is",
        "  one       1.00 GiB",
        "  short",
        "  thing",
        "another    12.00 GiB  fits",
    ]
    out, file = printed(26)
    print_table(out, COLUMNS, ROWS)
    assert file.getvalue().splitlines() == [
        "what it is",
        "         size",
        "  one short thing",
        "     1.00 GiB",
        "another",
        "    12.00 GiB  fits",
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_traced_report_and_one_beside_a_probe(width: int) -> None:
    spec = tiny_spec()
    report = estimate(spec, plan_of(spec, max_length=64), load_gpu("h200"))
    group = TensorGroup(
        category="activation", module="model.layers.*.self_attn.q_proj", operator="aten.mm.default",
        shape=(1, 131_072, 4_096), dtype="bfloat16", num_bytes=12 << 30,
    )  # fmt: skip
    traced = report.model_copy(
        update={
            "method": "trace",
            "timeline": tuple(PhaseTotal(phase=f"backward[{i}]", allocated_bytes=i << 30) for i in range(9)),
            "tensors_at_peak": (group,),
            "compared": (Compared(what="peak allocated", predicted_bytes=50 << 30, measured_bytes=51 << 30),),
        }
    )
    out, file = printed(width)
    print_report(traced, units="GiB", console=out)
    text = file.getvalue()
    assert [line for line in text.splitlines() if len(line) > width] == []
    for part in (
        "backward[2] to backward[6]",
        "model.layers.*.self_attn.q_proj",
        "mm bfloat16 1x131072x4096",
        "-1.9608%",
    ):
        assert part in text
