"""Headless Chromium over its DevTools pipe: no driver, no library, no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SLOWEST_S = 60


def find_chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. Messages are JSON ended by a null byte, on file descriptors 3 and 4 of the browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser = to_browser, from_browser
        self.buffer = b""
        self.number = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + SLOWEST_S
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.from_browser], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self.from_browser, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("Chromium does not answer")
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + SLOWEST_S
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > until:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def press(self, key: str, code: int, text: str = "") -> None:
        """One key; ``text`` is what it types."""
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def screenshot(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        image = base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])
        if path is not None:
            path.write_bytes(image)
        return image

    def requested(self) -> list[str]:
        """Addresses that the page asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """What the console holds of errors, refused resources among them."""
        found = [e["params"]["entry"]["text"] for e in self.events if e.get("method") == "Log.entryAdded"]
        return found + [str(e["params"]) for e in self.events if e.get("method") == "Runtime.exceptionThrown"]


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A page of a fresh browser whose profile is ``folder``."""
    program = find_chromium()
    assert program is not None
    read_by_browser, to_browser = os.pipe()
    from_browser, written_by_browser = os.pipe()
    # the browser reads 3 and writes 4, whatever numbers the pipes have here
    script = f'exec "$0" "$@" 3<&{read_by_browser} 4>&{written_by_browser}'
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
    ]  # fmt: skip
    with subprocess.Popen(
        ["bash", "-c", script, program, *flags],
        pass_fds=(read_by_browser, written_by_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(read_by_browser)
        os.close(written_by_browser)
        try:
            yield Page(to_browser, from_browser)
        finally:
            process.kill()
            process.wait()
            os.close(to_browser)
            os.close(from_browser)
