"""A real browser without a window: Chromium, told what to do over two pipes (its debugging protocol)."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
DRAWN = "[...document.images].map(i => i.complete && i.naturalWidth > 50 && i.getBoundingClientRect().width > 200)"
TOO_WIDE = """[...document.querySelectorAll('body *')]
    .filter(e => !e.closest('.table') && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(e => e.tagName + '.' + e.className)"""


def find() -> str | None:
    """The browser's program, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab. `events` holds what the page did: requests, messages on its console, exceptions."""

    def __init__(self, program: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (to_child, from_child)]  # clear of 3 and 4

        def connect() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={self._home.name}"],
            preexec_fn=connect,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_child, from_child, *ends):
            os.close(end)
        self._number, self._session, self._buffer = 0, None, b""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._home.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol, and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(time.monotonic() + 600)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, page: Path, width: int, height: int = 800, *, dark: bool = False) -> None:
        """A page from the disk in a window of this size, loaded to the end."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + 600
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next(until))

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings the page gave, on its console or to the browser."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Addresses the page asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            some = os.read(self._read, 1 << 20)
            if not some:
                raise RuntimeError("the browser ended")
            self._buffer += some
        message, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(message))


def find_faults(tab: Browser, page: Path, width: int, dark: bool, *, unfold: bool = False) -> list[str]:
    """All that is wrong with a page in a window of this width. unfold: with all that is folded away opened."""
    tab.open(page, width, dark=dark)
    if unfold:
        tab.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    drawn = tab.ask(DRAWN)
    found = [f"picture {number} is not drawn" for number, good in enumerate(drawn) if not good]
    found += ["there are no pictures"] * (not drawn)
    found += tab.complaints()
    found += [f"asks for {url}" for url in tab.requests() if not url.startswith(("data:", page.resolve().as_uri()))]
    found += [f"{name} reaches beyond the page" for name in tab.ask(TOO_WIDE)]
    over = tab.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found + [f"the page scrolls sideways by {over}"] * (over > 0)
