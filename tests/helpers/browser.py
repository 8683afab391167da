"""A headless Chromium that tests drive: pages, keys, screenshots. No network.

It is spoken to by the DevTools protocol over a pair of pipes: JSON texts that end in a
zero byte. https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import contextlib
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking --disable-component-update --disable-sync"
    " --remote-debugging-pipe --window-size=1400,1000"
)
_SECONDS = 120  # that an answer may take on a busy machine
_CODES = {"PageDown": 34, "PageUp": 33, "End": 35, "Home": 36, "ArrowUp": 38}
_CODES |= {"ArrowDown": 40, "Tab": 9, "Enter": 13}


class Page:
    """One page of the browser."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from = to_browser, from_browser
        self._buffer, self._last = b"", 0
        self._session: str | None = None
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._ask("Page.enable")

    def open(self, path: Path) -> None:
        """Opens a file and waits until its script has run."""
        self._ask("Page.navigate", url=path.as_uri())
        self.wait_until("document.documentElement?.dataset.ready === 'true'")

    def wait_until(self, condition: str) -> None:
        """Waits until a JavaScript expression is true."""
        end = time.monotonic() + _SECONDS
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise AssertionError(f"waited in vain for {condition}")
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON holds it."""
        found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"])
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Presses keys one after the other, wherever the focus is."""
        for key in keys:
            code = _CODES.get(key) or ord(key.upper())
            names = dict(key=key, windowsVirtualKeyCode=code)
            text = {"text": key} if len(key) == 1 else {}
            for kind in ("keyDown", "keyUp"):
                said = text if kind == "keyDown" else {}
                self._ask("Input.dispatchKeyEvent", type=kind, **names, **said)

    def screenshot(self, path: Path) -> None:
        """Writes what is in view as a PNG."""
        found = self._ask("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], _SECONDS)
            part = os.read(self._from, 1 << 16) if ready else b""
            assert part, "the browser says nothing more"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)


@contextlib.contextmanager
def browse(folder: Path) -> Iterator[Page]:
    """A page of a browser that ends with the context.

    Args:
      folder: for its profile.
    """
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    profile = shlex.quote(f"--user-data-dir={folder / 'profile'}")
    command = f"exec {CHROMIUM} {_OPTIONS} {profile} 3<&{from_us} 4>&{to_us}"
    process = subprocess.Popen(
        ["bash", "-c", command],
        pass_fds=(from_us, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)  # The browser ends when nobody speaks to it.
        os.close(from_browser)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
