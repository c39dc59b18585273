"""A headless Chromium, told what to do over its DevTools pipe: pages of any width, real keys, what it complains of.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["CHROMIUM", "Browser"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
PIPE = 'exec {to}<&"$1" {from}>&"$2"; shift 2; exec "$@" 3<&"$to" 4>&"$from"'  # it reads from 3 and writes to 4
DEADLINE_S = 40.0  # of every answer


class Browser:
    """One page. A context manager; when it is left, no process is."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()
        command = [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            ["bash", "-c", PIPE, "bash", str(theirs), str(ours), *command],
            pass_fds=(theirs, ours),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(ours)
        self._unread, self._number = b"", 0
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            self._session = {"sessionId": session}
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def open(self, page: Path) -> None:
        """Load a file, to its end."""
        self.visit(f"file://{page}")

    def visit(self, address: str) -> None:
        """Load a page, to its end."""
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def resize(self, width: int, height: int = 900) -> None:
        """CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def wait(self, condition: str) -> bool:
        """Whether JavaScript comes true, looked at with each frame for 20 s at most."""
        look = f"const look = () => ({condition}) ? done(true) : requestAnimationFrame(look); look();"
        return bool(self.run(f"new Promise(done => {{ setTimeout(() => done(false), 20000); {look} }})"))

    def press_tab(self) -> None:
        key = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def run(self, expression: str) -> Any:
        """The value of JavaScript; of a promise, what it comes to."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings of the page's since it was opened."""
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"])[:300] for event in self.events if event.get("method") in methods]

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (reply := self._next()).get("id") != self._number:
            self.events.append(reply)
        assert "error" not in reply, (method, reply)
        return reply["result"]

    def _next(self) -> dict[str, Any]:
        """What it says next."""
        until = time.monotonic() + DEADLINE_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self._from, 1 << 20) if ready else b""
            assert chunk, f"Chromium {'ended' if ready else f'said nothing for {DEADLINE_S:g} s'}"
            self._unread += chunk
        message, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
