"""The two pages in a real browser: drawn, used by keyboard and by control, and nothing asked of the network."""

from __future__ import annotations

import io
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lcplan.cli.plan_options import read_job
from lcplan.reports.serve_page import page_files
from lcplan.serving import Planner, PlanServer
from tests.browser import Page, chromium, find_chromium

TAB, ENTER = ("Tab", 9, ""), ("Enter", 13, "\r")
LEFT, RIGHT = ("ArrowLeft", 37, ""), ("ArrowRight", 39, "")


def missing() -> str | None:
    """Why there is no browser; None where there is one."""
    program = find_chromium()
    if program is None:
        return "needs Chromium: apt-get install chromium"
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program} cannot be run: {error}"
    return None if done.returncode == 0 else f"{program} cannot be run: {done.stderr.strip()}"


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Page]:
    with chromium(tmp_path / "profile") as page:
        yield page


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    job = read_job(None, "qwen3-8b-1m", None, {}, trust_remote_code=False)
    planner = Planner(job.spec)
    asked = dict(job.preset.plan) if job.preset else {}
    with PlanServer(0, planner, page_files(planner.models(), job.spec, job.plan, asked)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def shades(screenshot: bytes) -> int:
    from PIL import Image

    with Image.open(io.BytesIO(screenshot)) as image:
        return len(set(image.convert("L").tobytes()))


def press(page: Page, key: tuple[str, int, str]) -> None:
    page.press(*key)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_in_a_browser(lcplan, browser: Page, tmp_path: Path, width: int) -> None:
    file = tmp_path / "page.html"
    assert lcplan("estimate", "--preset", "qwen3-8b-1m", "--html", str(file)).code == 0
    browser.resize(width, 900)
    browser.open(file.as_uri())
    assert browser.complaints() == []
    assert browser.requested() == [file.as_uri()], "nothing else is asked for"
    assert browser.evaluate("document.documentElement.scrollWidth") == width, "only boxes scroll sideways"
    assert browser.evaluate("document.querySelector('h1').getBoundingClientRect().top") < 200
    for svg in ("timeline", "waterfall", "length"):
        box = f"document.querySelector('h2#{svg} ~ figure svg').getBoundingClientRect()"
        assert browser.evaluate(f"{box}.width") > 500
        assert browser.evaluate(f"{box}.height") > 150
    # the pictures' words are as large as small print, whatever the width
    size = "Math.min(...[...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height))"
    assert browser.evaluate(size) > 6
    assert shades(browser.screenshot()) > 50


def test_the_report_by_keyboard(lcplan, browser: Page, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert lcplan("estimate", "--preset", "qwen3-4b-128k", "--html", str(file)).code == 0
    browser.open(file.as_uri())
    press(browser, TAB)
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left") >= 0, "the skip link shows"
    browser.call(
        "Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
    )
    browser.wait("location.hash === '#main'")
    for _ in range(200):
        press(browser, TAB)
        if browser.evaluate("document.activeElement.textContent") == "mlp.saved":
            break
    focused = "document.activeElement"
    assert browser.evaluate(f"{focused}.tagName") == "SUMMARY"
    assert browser.evaluate(f"getComputedStyle({focused}).outlineStyle") == "solid", "focus is visible"
    assert not browser.evaluate(f"{focused}.parentElement.open")
    browser.call(
        "Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
    )
    browser.wait(f"{focused}.parentElement.open")
    assert "intermediate_size" in browser.evaluate(f"{focused}.parentElement.innerText")


def answered(page: Page, address: str) -> None:
    page.open(address)
    page.wait("document.getElementById('words').textContent")


def test_moving_a_control_recalculates_at_once(browser: Page, address: str) -> None:
    browser.resize(1280, 1000)
    answered(browser, address)
    words = "document.getElementById('words').textContent"
    assert browser.evaluate(words).startswith("55.16 GiB of 79.10 GiB on h100-80gb")
    before = browser.screenshot()
    browser.evaluate("document.querySelector('[name=offload_activations]').click()")
    browser.wait("document.getElementById('verdict').textContent === 'DOES NOT FIT'")
    assert browser.evaluate(words).startswith("89.20 GiB of 79.10 GiB")
    assert "--offload-activations" not in browser.evaluate("document.getElementById('command').textContent")
    assert browser.screenshot() != before
    assert browser.evaluate("document.querySelectorAll('.bar').length") == 15, "14 instants and the host"
    assert browser.complaints() == []
    assert {url.partition("/api")[0].partition("/page")[0].rstrip("/") for url in browser.requested()} == {
        address.rstrip("/")
    }


def test_sliders_by_keyboard(browser: Page, address: str) -> None:
    answered(browser, address)
    browser.evaluate("document.getElementById('length-slider').focus()")
    press(browser, RIGHT)
    browser.wait("document.querySelector('[name=max_length]').value === '1572864'")
    browser.wait("document.getElementById('command').textContent.includes('--max-length 1572864')")
    browser.evaluate("document.querySelector('[name=num_gpus]').focus()")
    for _ in range(2):
        press(browser, LEFT)
    browser.wait("document.getElementById('num_gpus-text').value === '6'")
    assert browser.evaluate("document.getElementById('cp_size-text').value") == "6", "a size that divides them"
    browser.wait("document.getElementById('command').textContent.includes('--num-gpus 6 --cp-size 6')")


def test_a_mistake_is_shown_on_the_page_and_goes_away(lcplan, browser: Page, address: str) -> None:
    answered(browser, address)
    write = (
        "(text => {{ const box = document.querySelector('[name=max_length]'); box.value = text;"
        " box.dispatchEvent(new Event('input', {{bubbles: true}})); }})({!r})"
    )
    browser.evaluate(write.format("1000001"))
    browser.wait("!document.getElementById('problem').hidden")
    said = lcplan("estimate", "--preset", "qwen3-8b-1m", "--max-length", "1000001").err.strip()
    assert browser.evaluate("document.getElementById('problem').textContent") == said
    browser.evaluate(write.format("<img src=x>"))
    browser.wait("document.getElementById('problem').textContent.includes('<img src=x>')")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    browser.evaluate(write.format("512Ki"))
    browser.wait("document.getElementById('problem').hidden")
    assert "--max-length 524288" in browser.evaluate("document.getElementById('command').textContent")


def test_the_page_on_a_phone(browser: Page, address: str) -> None:
    browser.resize(390, 844)
    answered(browser, address)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert browser.evaluate("document.getElementById('verdict').getBoundingClientRect().top") < 60, "the answer first"
    below = "document.querySelector('[name=cp_size]').getBoundingClientRect().top"
    assert browser.evaluate(f"{below} < document.getElementById('timeline').getBoundingClientRect().top")
    browser.evaluate("document.querySelector('[name=cp_size]').scrollIntoView()")
    assert browser.evaluate("document.getElementById('verdict').getBoundingClientRect().top") >= 0, "it stays in sight"
