"""`mupscale report RUN --watch`: the losses of runs in a folder while they train, as a page on this machine alone.

The server reads and never writes: one page that is drawn anew for every look at it, and the files of RUN/report. It
answers this machine only, and no page of another site that points a name of its own here (DNS rebinding).
"""

from __future__ import annotations

import mimetypes
from collections.abc import Iterator
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mupscale.system import MupscaleError

SECONDS = 5
_MOST_RUNS, _MOST_POINTS = 12, 400
_WIDTH, _HEIGHT = 480, 120
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{seconds}">
<title>{title}</title><style>body{{font:15px/1.4 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
svg{{width:100%;height:auto;background:#f4f5f8}}polyline{{fill:none;stroke:#3f51b5;stroke-width:1.5}}
circle{{fill:#c0392b}}h2{{font-size:1rem;margin:1.5rem 0 .3rem}}p{{margin:.2rem 0}}</style></head>
<body><h1>{title}</h1>{body}</body></html>"""


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server of a folder's page at http://127.0.0.1:PORT; port 0 takes one that is free."""
    if not folder.is_dir():
        raise MupscaleError(f"there is no folder {folder}: give that of a run or a study")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            found = _find(folder, urlsplit(self.path).path) if host in ("127.0.0.1", "localhost") else None
            content, kind = found or (b"not found", "text/plain")
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the terminal is for the address."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise MupscaleError(f"port {port} cannot be used: {error.strerror}; give another (--port)") from None


def _find(folder: Path, path: str) -> tuple[bytes, str] | None:
    """The page, or a file of the report, wherever links lead not out of it."""
    if path == "/":
        return draw_live_page(folder).encode(), "text/html; charset=utf-8"
    report = (folder / "report").resolve()
    file = (folder / unquote(path).lstrip("/")).resolve()
    if not file.is_relative_to(report) or not file.is_file():
        return None
    return file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream"


def draw_live_page(folder: Path) -> str:
    """The runs in a folder as they stand, those that wrote last first."""
    files = (
        path for path in (folder / "metrics.jsonl", *folder.glob("*/*/metrics.jsonl"), *folder.glob("*/metrics.jsonl"))
    )
    found = sorted((path for path in files if path.is_file()), key=lambda path: -path.stat().st_mtime)
    parts = (
        ['<p><a href="report/index.html">The report</a></p>'] if (folder / "report" / "index.html").is_file() else []
    )
    parts += [part for path in found[:_MOST_RUNS] for part in _run(path.parent, folder)]
    if len(found) > _MOST_RUNS:
        parts.append(f"<p>and {len(found) - _MOST_RUNS} more that wrote before these</p>")
    body = "".join(parts) or "<p>no run has written a line of metrics here yet</p>"
    return _PAGE.format(seconds=SECONDS, title=escape(str(folder)), body=body)


def _run(place: Path, folder: Path) -> Iterator[str]:
    from mupscale.train import RunFolder

    try:
        records = RunFolder(place).records()
    except MupscaleError as error:  # a line that is none: another run is shown all the same
        yield f"<p>{escape(str(error))}</p>"
        return
    yield f"<h2>{escape(str(place.relative_to(folder)) if place != folder else place.name)}</h2>"
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
