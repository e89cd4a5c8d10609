"""Chromium without a window, driven over its debugging pipe: pages are opened, clicked and looked at."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
# Chromium reads commands from descriptor 3 and answers on 4.
LAUNCH = """
import fcntl, os, sys
ours = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 100) for fd in sys.argv[1:3]]
for there, fd in zip((3, 4), ours):
    os.dup2(fd, there)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 120  # s for an answer: it ends a test that hangs, and times nothing


class Browser:
    """One page in one browser."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={self._folder.name}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._read, self._id, self._session = b"", 0, ""
        self.errors: list[str] = []  # what the page's script threw
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Runtime.enable")
        self._ask("Page.enable")

    def open(self, file: str | Path, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of this size, and wait until its script has run."""
        mobile = width < 600
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self.errors.clear()
        self._ask("Page.navigate", url=Path(file).absolute().as_uri())
        self.wait("'ready' in (document.documentElement?.dataset ?? {}) && location.href !== 'about:blank'")

    def js(self, code: str) -> Any:
        """The value of an expression in the page."""
        found = self._ask("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, code: str) -> None:
        """Wait until an expression in the page is true."""
        end = time.monotonic() + PATIENCE
        while not self.js(code):
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.02)

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse from one place of the window to another."""
        self._mouse("mouseMoved", begin)
        self._mouse("mousePressed", begin, button="left", buttons=1, clickCount=1)
        for k in range(1, 6):
            at = begin[0] + (end[0] - begin[0]) * k / 5, begin[1] + (end[1] - begin[1]) * k / 5
            self._mouse("mouseMoved", at, button="left", buttons=1)
        self._mouse("mouseReleased", end, button="left", clickCount=1)

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        at = self.place(selector)
        self._mouse("mousePressed", at, button="left", buttons=1, clickCount=1)
        self._mouse("mouseReleased", at, button="left", clickCount=1)

    def place(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """Where a point of an element is in the window, after scrolling to it; x and y as shares of its size."""
        code = (
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); "
            f"const r = e.getBoundingClientRect(); return [r.x + r.width * {x}, r.y + r.height * {y}]; }})()"
        )
        found = self.js(code)
        return float(found[0]), float(found[1])

    def pdf(self) -> bytes:
        """The page as it would be printed."""
        return base64.b64decode(self._ask("Page.printToPDF")["data"])

    def print_view(self) -> None:
        """Lay the open page out as on A4: its style and its script's answer to printing, in a window as wide."""
        self._ask("Emulation.setDeviceMetricsOverride", width=703, height=1000, deviceScaleFactor=1, mobile=False)
        self._ask("Emulation.setEmulatedMedia", media="print")
        self.js("dispatchEvent(new Event('beforeprint'))")

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _mouse(self, kind: str, at: tuple[float, float], **more: Any) -> None:
        self._ask("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **more)

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Runtime.exceptionThrown":
                details = answer["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            if answer.get("id") == self._id:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._read += more
        line, self._read = self._read.split(b"\0", 1)
        return json.loads(line)
