"""The page of ``estimate --html``: self-contained, escaped, reachable without a mouse."""

from __future__ import annotations

import json
import shlex
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lcplan.units import format_bytes
from tests.conftest import tiny_config

LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "xlink:href"}
VOID = {"meta", "link", "br", "input", "img", "hr"}


class Page(HTMLParser):
    """Elements with their attributes, texts, and whether tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_self_contained(text: str, page: Page) -> None:
    """Nothing is loaded: links lead into the page, styles name no address, there is no script."""
    assert not page.all("script")
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            if name in LOADING:
                assert value.startswith("#"), (tag, name, value)
            assert not name.startswith("on"), (tag, name)
            if name == "style":
                assert "//" not in value
    assert "@import" not in text
    assert "url(http" not in text
    assert "default-src 'none'" in text


@pytest.fixture
def page_of(lcplan, tmp_path: Path) -> Any:
    def make(*args: str) -> tuple[str, Page]:
        file = tmp_path / "page.html"
        result = lcplan("estimate", *args, "--html", str(file), "--force")
        assert result.code in (0, 1), result.err
        assert str(file) in result.err.replace("\n", "")
        text = file.read_text("utf-8")
        return text, Page(text)

    return make


def test_the_page_has_everything_and_loads_nothing(lcplan, page_of) -> None:
    text, page = page_of("--preset", "qwen3-8b-1m")
    report = json.loads(lcplan("estimate", "--preset", "qwen3-8b-1m", "--json").out)
    check_self_contained(text, page)
    assert page.text.index("FITS") < page.text.index("Memory through one step"), "the answer first"
    assert "55.16 GiB of 79.10 GiB on h100-80gb, 23.94 GiB free" in page.text
    for item in report["items"]:
        assert item["key"] in page.texts
        assert item["formula"] in page.texts
        assert f"= {item['num_bytes']:,} bytes" in page.texts
        assert item["source"] in page.text
    assert "= 8 \u00d7 12,288 \u00d7 131,072" in page.texts, "the formula with the numbers put in"
    assert "8 \u00d7 intermediate_size \u00d7 tokens" in page.texts
    for phase in report["phases"]:
        assert format_bytes(phase["allocated_bytes"]) in page.texts
    for warning in report["warnings"]:
        assert f"[{warning['code']}]: {warning['message']} {warning['fix']}" in page.text
    for sentence in (*report["assumptions"], *report["not_modelled"]):
        assert sentence in page.texts
    for words in ("+ context-parallel", "9,736.37 GiB", "89.20 GiB", "offload-params", "1,753,056"):
        assert words in page.text


def test_the_page_can_be_used_without_a_mouse(page_of) -> None:
    text, page = page_of("--preset", "qwen3-4b-128k")
    assert page.all("html")[0]["lang"] == "en"
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    skip = page.all("a")[0]
    assert skip["class"] == "skip"
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert skip["href"].removeprefix("#") in ids
    assert len(ids) == len(set(ids)), "no id twice, the pictures' own included"
    assert len(page.all("table")) == len(page.all("caption"))
    assert all(attributes.get("scope") for attributes in page.all("th"))
    assert len(page.all("details")) == len(page.all("summary")) > 20
    assert all(attributes["tabindex"] == "0" for attributes in page.all("div") if attributes.get("class") == "scroll")
    for svg in page.all("svg"):
        assert svg["role"] == "img"
        assert svg["aria-label"]
    assert ":focus-visible" in text
    headings = [tag for tag, _ in page.elements if tag in ("h1", "h2", "h3")]
    assert headings.count("h1") == 1
    assert headings[0] == "h1"


def test_references_inside_the_pictures_find_their_targets(page_of) -> None:
    text, page = page_of("--preset", "qwen3-4b-128k")
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    used = {part.partition(")")[0] for part in text.split("url(#")[1:]}
    used |= {
        attributes["xlink:href"].removeprefix("#") for _, attributes in page.elements if "xlink:href" in attributes
    }
    assert used
    assert used <= ids


def test_commands_on_the_page_give_the_same_report(lcplan, page_of, tmp_path: Path) -> None:
    asked = ["--preset", "qwen3-8b-1m", "--max-length", "512Ki", "--cp-size", "4", "--dp-shard-size", "2"]
    _, page = page_of(*asked)
    commands = [text for text in page.texts if text.startswith("lcplan ")]
    estimated = next(text for text in commands if text.endswith("--json"))
    again = lcplan(*shlex.split(estimated)[1:])
    first = json.loads(lcplan("estimate", *asked, "--json").out)
    second = json.loads(again.out)
    assert second["plan"] == first["plan"]
    assert second["phases"] == first["phases"]
    assert second["items"] == first["items"]
    trained = next(text for text in commands if text.startswith("lcplan run"))
    folder = tmp_path / "job"
    assert lcplan(*shlex.split(trained.replace("runs/from-this-report", str(folder)))[1:], "--force").code == 0
    assert json.loads((folder / "plan.json").read_text())["plan"] == first["plan"]
    recommended = next(text for text in commands if text.startswith("lcplan recommend"))
    assert lcplan(*shlex.split(recommended)[1:]).code == 0


HOSTILE = '</title><script>alert(1)</script><img src=x onerror=alert(1)> & "quoted" \'$x_1$'


def test_a_hostile_model_name_is_text(lcplan, page_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / HOSTILE.replace("/", "\u2215")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    text, page = page_of(folder.name, "--max-length", "512", "--gpu", "a10g")
    check_self_contained(text, page)
    assert not page.all("img")
    assert "<script" not in text
    assert folder.name in " ".join(page.texts)
    command = next(text for text in page.texts if text.startswith("lcplan estimate") and text.endswith("--json"))
    assert shlex.split(command)[2] == folder.name


def test_a_plan_that_does_not_fit_says_what_to_try(page_of) -> None:
    text, page = page_of("--preset", "qwen3-8b-1m", "--no-offload-activations")
    assert "DOES NOT FIT" in page.text
    assert "Try: lcplan recommend Qwen/Qwen3-8B" in page.text
    assert 'class="gauge no"' in text


def test_units_and_a_token_budget_reach_the_page(page_of) -> None:
    _, page = page_of("--preset", "qwen3-8b-1m", "--units", "GB", "--token-budget", "1B")
    assert "59.23 GB of 84.93 GB" in page.text
    assert "1,000,000,000 tokens: 954 steps" in page.text
    assert not [text for text in page.texts if "GiB" in text and not text.startswith("Source: ")]


def test_a_file_is_not_overwritten_unless_asked(lcplan, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("mine")
    result = lcplan("estimate", "--preset", "qwen3-4b-128k", "--html", str(file))
    assert (result.code, result.out) == (2, "")
    assert "--force" in result.err
    assert file.read_text() == "mine"
    assert lcplan("estimate", "--preset", "qwen3-4b-128k", "--html", str(file), "--force").code == 0
    assert file.read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(("name", "message"), [("", "is a folder"), ("no/such/page.html", "cannot be written")])
def test_a_place_that_cannot_be_written(lcplan, tmp_path: Path, name: str, message: str) -> None:
    result = lcplan("estimate", "--preset", "qwen3-4b-128k", "--html", str(tmp_path / name))
    assert result.code == 2
    assert message in result.err
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(lcplan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = lcplan("estimate", "--preset", "qwen3-4b-128k", "--html", str(tmp_path / "page.html"))
    assert (result.code, result.out) == (2, "")
    assert "lcplan[plots]" in result.err
    assert not list(tmp_path.iterdir())


@pytest.mark.train
def test_a_traced_report_has_a_page_too(page_of, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    _, page = page_of(str(tmp_path), "--max-length", "512", "--gpu", "a10g", "--method", "trace")
    assert "trace method" in page.text
    assert "Part by part, as traced" in page.texts
    assert "Tensors alive at the peak, as traced" in page.texts
    assert "model.layers.*.mlp" in " ".join(page.texts)
    assert len(page.all("table")) == len(page.all("caption"))
    assert "+ activation-checkpointing" in page.text
    assert any("--method trace" in text for text in page.texts if text.startswith("lcplan estimate"))


@pytest.mark.train
def test_a_plan_that_only_a_trace_knows_has_no_levers_and_says_why(page_of, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    flags = ["--attn-implementation", "eager", "--dtype", "float32", "--method", "trace"]
    _, page = page_of(str(tmp_path), "--max-length", "512", "--gpu", "a10g", *flags)
    assert "There is none: " in page.text
    assert "the formula method does not cover it" in page.text
