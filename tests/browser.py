"""A page in headless Chromium, over the DevTools protocol on a pipe: no port, no network, no package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Chromium by any of its names; None: it is not here.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """One tab. ``said``: exceptions, console messages and violations of the policy; ``asked``: addresses it requested."""

    def __init__(self, out: int, into: int) -> None:
        self._out, self._into = out, os.fdopen(into, "rb")
        self._rest, self._number, self._session = b"", 0, ""
        self.said: list[str] = []
        self.asked: list[str] = []

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._into.fileno(), 1 << 16)
            assert more, "Chromium is gone"
            self._rest += more
        one, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(one)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        of, about = event.get("method"), event.get("params", {})
        if of == "Runtime.exceptionThrown":
            self.said.append(str(about["exceptionDetails"].get("exception", {}).get("description", about)))
        elif of == "Log.entryAdded":
            self.said.append(about["entry"]["text"])
        elif of == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.said.append(" ".join(str(part.get("value", part)) for part in about["args"]))
        elif of == "Network.requestWillBeSent":
            self.asked.append(about["request"]["url"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its answer."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (found := self._next()).get("id") != self._number:
            self._note(found)
        assert "error" not in found, (method, found["error"])
        return dict(found["result"])

    def open(self, path: Path, fragment: str = "", width: int = 1440, height: int = 900) -> None:
        """Show a file in a window of this size, and wait until its scripts have run."""
        if not self._session:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.absolute().as_uri() + fragment)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Of an expression in JavaScript; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True,
                          allowUnsafeEvalBlockedByCSP=False)  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 60.0) -> Any:
        """Wait until an expression is true."""
        wait = (
            "new Promise((done, fail) => { const end = Date.now() + %d; const look = () => { const found = (%s); "
            "if (found) done(found); else if (Date.now() > end) fail(new Error('never true')); else setTimeout(look, 50); "
            "}; look(); })"
        )
        return self.value(wait % (int(seconds * 1000), expression))


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A page in a browser of its own, whose profile lies in ``folder``."""
    assert CHROMIUM
    theirs_in, out = os.pipe()
    into, theirs_out = os.pipe()
    command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    with (folder / "chromium.log").open("wb") as log:
        browser = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    watchdog = threading.Timer(300, browser.kill)  # what hangs ends, and its pipe with it
    watchdog.start()
    try:
        yield Page(out, into)
    finally:
        watchdog.cancel()
        browser.kill()
        browser.wait()
        os.close(out)
