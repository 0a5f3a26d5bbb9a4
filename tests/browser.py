"""A real headless chromium, driven over a pipe by its own protocol: no driver program, no port, no package.

https://chromedevtools.github.io/devtools-protocol/ ; messages are JSON, ended by a NUL byte, on descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Page:
    """One tab. Everything it asked of the network, and everything it complained about, is kept."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._id, self._buffer = read, write, 0, b""
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            got = self._next()
            if got.get("id") == self._id:
                assert "error" not in got, got["error"]
                return dict(got["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        got: dict[str, Any] = json.loads(text)
        params = got.get("params", {})
        if got.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif got.get("method") == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif got.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif got.get("method") == "Page.loadEventFired":
            self.loaded = True
        return got

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        self.loaded = False
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not self.loaded:
            self._next()

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression in the page (the page itself may run none; the protocol may)."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium() -> Iterator[Page]:
    """A browser with an empty profile. One that is not installed is a failure: scripts/test installs it."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert program, f"no browser found ({', '.join(NAMES)}); apt-get install chromium"
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        flags += [
            "--no-first-run",
            "--disable-background-networking",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]

        def descriptors() -> None:
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (to_browser[0], from_browser[1])]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        process = subprocess.Popen(
            [program, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=descriptors,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Page(from_browser[0], to_browser[1])
        finally:
            process.kill()
            process.wait(timeout=30)
            os.close(to_browser[1])
            os.close(from_browser[0])
