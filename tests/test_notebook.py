from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser

import pytest

from lcplan import Goal, estimate, load_gpu, load_model, recommend
from lcplan.units import format_bytes
from tests.conftest import plan_of, tiny_spec


class Cells(HTMLParser):
    """The rows of the table, and every tag that was left open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_a_report_is_a_small_table() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    report = estimate(spec, plan_of(spec, max_length=1 << 20, num_gpus=8, cp_size=8), load_gpu("h100-80gb"))
    html = report._repr_html_()
    cells = Cells(html)
    assert cells.open == []
    assert "DOES NOT FIT: 89.20 GiB" in html
    assert cells.rows[0] == ["in backward[35].mlp", "bytes", "share", "formula"]
    top = report.dominant
    assert cells.rows[1][:2] == [top.key, format_bytes(top.num_bytes)]
    assert cells.rows[-1][:2] == ["device peak", format_bytes(report.device_peak_bytes)]
    shares = [float(row[2].rstrip("%")) for row in cells.rows[1:] if row[2]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert len(cells.rows) < 20


def test_a_recommendation_is_its_way_and_its_command() -> None:
    answer = recommend(
        load_model("Qwen/Qwen3-4B"), Goal(gpu="h100-80gb", num_gpus=1, max_length=65_536), load_gpu("h100-80gb")
    )
    cells = Cells(answer._repr_html_())
    assert [row[0] for row in cells.rows[1:]] == [step.lever for step in answer.plans[0].steps]
    assert "<pre>lcplan estimate Qwen/Qwen3-4B --max-length 65536" in answer._repr_html_()
    missed = recommend(load_model("Qwen/Qwen3-32B"), Goal(gpu="a10g", num_gpus=1, max_length=65_536), load_gpu("a10g"))
    assert "Nothing fits. The nearest miss:" in missed._repr_html_()
    assert "Nothing fits." in missed.model_copy(update={"nearest": None})._repr_html_()


def test_names_are_escaped() -> None:
    spec = tiny_spec().model_copy(update={"id": "<script>alert(1)</script>"})
    report = estimate(spec, plan_of(spec, max_length=64), load_gpu("h200"))
    assert "<script>" not in report._repr_html_()
    assert "&lt;script&gt;" in report._repr_html_()
    answer = recommend(spec, Goal(gpu="h200", num_gpus=1, max_length=64), load_gpu("h200"))
    assert "<script>" not in answer._repr_html_()


def test_a_record_does_not_import_its_report() -> None:
    script = "import sys, lcplan.ledger, lcplan.recommendation; sys.exit('lcplan.reports' in str(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == 0
