"""`mupscale report RUN --watch`: the losses of runs in a folder while they train, as a page on this machine alone.

The server reads and never writes. It serves two pages by name: one that is drawn anew for every look at it, and the
report. Both are the only files of the folder that a browser sees, no link in the folder is followed, and the headers
allow no script. It answers this machine only, and no page of another site that points a name of its own here (DNS
rebinding).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mupscale.system import MupscaleError, open_below, printable, show

SECONDS = 5
_MOST_RUNS, _MOST_POINTS = 12, 400
_MOST_BYTES, _PIECES = 4 << 20, 256  # of one run's metrics that a look at the page reads, in this many pieces
_REPORT = ("report", "index.html")
_METRICS = "metrics.jsonl"
_OWN_NAMES = ("127.0.0.1", "localhost")
_NO_SCRIPT = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_WIDTH, _HEIGHT = 480, 120
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{seconds}">
<title>{title}</title><style>body{{font:15px/1.4 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
svg{{width:100%;height:auto;background:#f4f5f8}}polyline{{fill:none;stroke:#3f51b5;stroke-width:1.5}}
circle{{fill:#c0392b}}h2{{font-size:1rem;margin:1.5rem 0 .3rem}}p{{margin:.2rem 0}}</style></head>
<body><h1>{title}</h1>{body}</body></html>"""


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no news; anything else is one line, for the terminal is for the address."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            show(printable(f"mupscale report: {type(error).__name__}: {error}"), stream="stderr")


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server of a folder's page at http://127.0.0.1:PORT; port 0 takes one that is free."""
    if not folder.is_dir():
        raise MupscaleError(f"there is no folder {folder}: give that of a run or a study")

    class Handler(BaseHTTPRequestHandler):
        timeout = 60
        policy = _NO_SCRIPT

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").partition(":")[0]
            path = self.path.partition("?")[0]
            if host not in _OWN_NAMES or path not in ("/", "/report/index.html"):
                self._send(404, b"not found", "text/plain")
            elif path == "/":
                page = draw_live_page(folder).encode("utf-8", errors="replace")  # names may be no UTF-8
                self._send(200, page, "text/html; charset=utf-8")
            else:
                self._send_report()

        def _send_report(self) -> None:
            try:
                file = open_below(folder, *_REPORT)
            except OSError:
                self._send(404, b"not found", "text/plain")
                return
            self.policy = f"{_NO_SCRIPT}; sandbox"  # whoever made the folder wrote this page
            with file:
                self._begin(200, os.fstat(file.fileno()).st_size, "text/html; charset=utf-8")
                shutil.copyfileobj(file, self.wfile)

        def _send(self, status: int, content: bytes, kind: str) -> None:
            self._begin(status, len(content), kind)
            self.wfile.write(content)

        def _begin(self, status: int, length: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def end_headers(self) -> None:
            """On every answer, those included that the base class gives to a bad request."""
            for name, value in {**_HEADERS, "Content-Security-Policy": self.policy}.items():
                self.send_header(name, value)
            super().end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the terminal is for the address."""

    try:
        return _Server(("127.0.0.1", port), Handler)
    except OSError as error:
        raise MupscaleError(f"port {port} cannot be used: {error.strerror}; give another (--port)") from None


class _Found(NamedTuple):
    """What lies in a folder: runs, by the names that lead to them, those that wrote last first; and links."""

    runs: list[tuple[str, ...]]
    links: list[str]


def draw_live_page(folder: Path) -> str:
    """The runs in a folder as they stand, those that wrote last first."""
    found = _find_runs(folder)
    parts = []
    if _has_report(folder):
        parts.append('<p><a href="report/index.html">The report</a></p>')
    for names in found.runs[:_MOST_RUNS]:
        parts += _run(folder, names)
    if len(found.runs) > _MOST_RUNS:
        parts.append(f"<p>and {len(found.runs) - _MOST_RUNS} more that wrote before these</p>")
    if not found.runs:
        parts.append("<p>no run has written a line of metrics here yet</p>")
    if found.links:
        parts.append(f"<p>links, which this page does not follow: {escape(', '.join(found.links[:_MOST_RUNS]))}</p>")
    return _PAGE.format(seconds=SECONDS, title=escape(str(folder)), body="".join(parts))


def _has_report(folder: Path) -> bool:
    try:
        open_below(folder, *_REPORT).close()
    except OSError:
        return False
    return True


def _find_runs(folder: Path, depth: int = 2) -> _Found:
    """The runs in a folder and in the folders down to this depth; links are named, and never followed."""
    times, links, waiting = dict[tuple[str, ...], float](), list[str](), list[tuple[str, ...]]([()])
    while waiting:
        names = waiting.pop()
        with suppress(OSError):  # gone since it was listed, or not for us to read
            for entry in sorted(os.scandir(folder.joinpath(*names)), key=lambda entry: entry.name):
                inner = (*names, entry.name)
                is_metrics = entry.name == _METRICS
                may_hold_runs = len(names) < depth and entry.is_dir()
                if entry.is_symlink():
                    links += ["/".join(inner)] if is_metrics or may_hold_runs else []
                elif may_hold_runs:
                    waiting.append(inner)
                elif is_metrics and entry.is_file():
                    times[names] = entry.stat().st_mtime
    return _Found(sorted(times, key=lambda names: -times[names]), links)


def _read_metrics(file: BinaryIO, where: str) -> tuple[list[dict[str, Any]], bool]:
    """The records of a run, and whether these are all: of a long file they are from pieces all over it."""
    from mupscale.train import read_record

    size = os.fstat(file.fileno()).st_size
    starts, length = [0], size
    if size > _MOST_BYTES:
        length = _MOST_BYTES // _PIECES
        starts = [number * (size - length) // (_PIECES - 1) for number in range(_PIECES)]
    records = []
    for start in starts:
        file.seek(start)
        lines = file.read(length).split(b"\n")
        whole_lines = lines[1 if start else 0 : -1]  # the first began before the piece, the last is not finished
        for number, line in enumerate(whole_lines, 1):
            place = f"{where}, line {number}" if length == size else where
            record = read_record(line.decode("utf-8", errors="replace"), place)
            if record is not None:
                records.append(record)
    return records, length == size


def _run(folder: Path, names: tuple[str, ...]) -> Iterator[str]:
    where = "/".join((*names, _METRICS))
    try:
        with open_below(folder, *names, _METRICS) as file:
            records, are_all = _read_metrics(file, where)
    except MupscaleError as error:  # a line that is none: another run is shown all the same
        yield f"<p>{escape(str(error))}</p>"
        return
    except OSError as error:
        yield f"<p>{escape(where)} cannot be read: {escape(error.strerror or type(error).__name__)}</p>"
        return
    yield f"<h2>{escape('/'.join(names) or folder.name)}</h2>"
    if not are_all:
        yield f"<p>its metrics are long: this is drawn from {_MOST_BYTES >> 20} MB of them, and may miss a growth</p>"
    losses = [(r["step"], r["loss"]) for r in records if r["kind"] == "train" and isinstance(r.get("loss"), float)]
    last = {record["kind"]: record for record in records}
    said = [f"step {max((record['step'] for record in records), default=0):,}"]
    said += [f"loss {losses[-1][1]:.4f}"] if losses else []
    said += [f"held-out {last['eval']['loss']:.4f}"] if isinstance(last.get("eval", {}).get("loss"), float) else []
    said += [str(last["end"].get("status", ""))] if "end" in last else []
    yield f"<p>{escape(', '.join(said))}</p>"
    if len(losses) > 1:
        yield _curve(losses, [record["step"] for record in records if record["kind"] == "grow"])


def _curve(points: list[tuple[int, float]], grown: list[int]) -> str:
    """A line of losses, and a dot below where the model grew."""
    points = points[:: -(-len(points) // _MOST_POINTS)]
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    first, span = points[0][0], max(points[-1][0] - points[0][0], 1)

    def across(step: int) -> float:
        return 5 + (_WIDTH - 10) * (step - first) / span

    line = " ".join(
        f"{across(step):.1f},{5 + (_HEIGHT - 10) * (high - loss) / ((high - low) or 1.0):.1f}" for step, loss in points
    )
    dots = "".join(f'<circle cx="{across(step):.1f}" cy="{_HEIGHT - 4}" r="3"/>' for step in grown)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}"><polyline points="{line}"/>{dots}</svg>'
