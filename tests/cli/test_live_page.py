"""The page of a folder whose runs train on: read-only, for this machine alone."""

from __future__ import annotations

import http.client
import os
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import refused
from mupscale import MupscaleError
from mupscale.cli import main
from mupscale.cli.live_page import draw_live_page, make_server
from mupscale.train import RunFolder


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for name in ("stretches/<b>one", "stretches/two"):
        place = tmp_path / "study" / name
        place.mkdir(parents=True)
        run = RunFolder(place)
        for step, loss in ((10, 2.5), (20, 1.25)):
            run.write({"kind": "train", "step": step, "loss": loss})
        run.write({"kind": "grow", "step": 20, "width": 64})
        run.write({"kind": "eval", "step": 20, "loss": 1.5})
    (tmp_path / "study" / "report").mkdir()
    (tmp_path / "study" / "report" / "index.html").write_text("the answer")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "study" / "report" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "study" / "recipe.json").write_text("{}")
    return tmp_path / "study"


@pytest.fixture
def port(study: Path) -> Iterator[int]:
    with make_server(study, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def ask(port: int, path: str, host: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def get(port: int, path: str, host: str = "127.0.0.1", method: str = "GET") -> tuple[int, str]:
    return ask(port, path, f"{host}:{port}", method)[:2]


def test_the_page_shows_every_run_and_the_report(study: Path, port: int) -> None:
    status, page = get(port, "/")
    assert status == 200
    assert page.count("<polyline") == page.count("<circle") == 2
    assert "step 20, loss 1.2500, held-out 1.5000" in page
    assert "&lt;b&gt;one" in page  # a folder's name is text
    assert "<b>" not in page
    assert get(port, "/report/index.html") == (200, "the answer")
    RunFolder(study / "stretches" / "two").write({"kind": "end", "step": 30, "status": "finished"})
    assert "step 30, loss 1.2500, held-out 1.5000, finished" in get(port, "/")[1]


OUTSIDE = [
    "/recipe.json",
    "/report/../recipe.json",
    "/report/%2e%2e/recipe.json",
    "/report/out",
    "/report",
    "//etc/passwd",
]
ODD = [
    "/%00",
    "/report/%00",
    "/report/index.html%00",
    "//[",
    "/report/" + "a" * 5000,
    "/" + "b/" * 3000,
    "/?" + "c" * 70_000,
]


@pytest.mark.parametrize("path", OUTSIDE + ODD, ids=lambda path: path[:30])
def test_nothing_but_the_report_is_served(port: int, path: str, capfd: pytest.CaptureFixture[str]) -> None:
    status, said = get(port, path)
    expected = {"/?": (414, said) if len(path) > 65536 else 200}.get(path[:2], (404, "not found"))
    assert (status, said) == expected
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep such names out")
def test_a_name_that_is_no_text_hides_no_run(study: Path, port: int) -> None:
    place = Path(os.fsdecode(os.fsencode(study / "stretches") + b"/\xff"))
    place.mkdir()
    RunFolder(place).write({"kind": "train", "step": 7, "loss": 2.5})
    status, page = get(port, "/")
    assert status == 200
    assert "step 7, loss 2.5000" in page


@pytest.mark.parametrize("link", ["report", "report/index.html"])
def test_no_link_to_the_report_is_followed(study: Path, port: int, tmp_path: Path, link: str) -> None:
    (tmp_path / "other").mkdir()
    for place in (tmp_path / "other", study / "report"):
        (place / "index.html").write_text("the whole disk")
    away = study / link
    away.rename(study / "aside")
    away.symlink_to(tmp_path / "other" if link == "report" else tmp_path / "other" / "index.html")
    assert get(port, "/report/index.html") == (404, "not found")
    assert get(port, "/report/secret") == (404, "not found")
    assert "The report" not in get(port, "/")[1]


def test_no_link_to_a_run_is_followed(study: Path, port: int, tmp_path: Path) -> None:
    private = tmp_path / "private" / "run"
    private.mkdir(parents=True)
    for step in (1, 2):
        RunFolder(private).write({"kind": "train", "step": step, "loss": 77.25})
    (study / "stretches" / "three").mkdir()
    (study / "stretches" / "three" / "metrics.jsonl").symlink_to(private / "metrics.jsonl")
    (study / "all").symlink_to(tmp_path / "private")
    (study / "stretches" / "four").symlink_to(private)
    page = get(port, "/")[1]
    assert "77.25" not in page
    assert "links, which this page does not follow: all, stretches/four, stretches/three/metrics.jsonl" in page
    assert page.count("<polyline") == 2


def test_no_answer_lets_a_script_run(study: Path, port: int) -> None:
    (study / "report" / "index.html").write_text("<script>alert(1)</script>")
    for path in ("/", "/report/index.html", "/nothing", "/?" + "c" * 70_000):
        headers = ask(port, path, f"127.0.0.1:{port}")[2]
        policy = headers["Content-Security-Policy"].split("; ")
        assert "default-src 'none'" in policy
        assert not [part for part in policy if "script" in part]
        assert headers["X-Content-Type-Options"] == "nosniff"
    policies = [
        ask(port, path, f"127.0.0.1:{port}")[2]["Content-Security-Policy"] for path in ("/report/index.html", "/")
    ]
    assert [policy.endswith("; sandbox") for policy in policies] == [True, False]  # a sandbox would not refresh itself


def test_long_metrics_and_reports_take_little_memory(study: Path, port: int) -> None:
    """Files of 4 GB: holes in them cost no disk, and reading them whole would take the memory."""
    long = study / "stretches" / "two" / "metrics.jsonl"
    kept = long.read_bytes()
    with open(long, "ab") as file:
        file.truncate(4 << 30)
        file.seek(0, 2)
        file.write(b"\n" + kept.replace(b'"step": 20', b'"step": 30'))
    report = study / "report" / "index.html"
    with open(report, "r+b") as file:
        file.truncate(4 << 30)
    tracemalloc.start()
    page = draw_live_page(study)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/report/index.html")
    answer = connection.getresponse()
    assert answer.getheader("Content-Length") == str(4 << 30)
    assert len(answer.read(8 << 20)) == 8 << 20
    answer.close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 << 20
    assert "its metrics are long: this is drawn from 4 MB of them" in page
    assert "step 30, loss 1.2500, held-out 1.5000" in page


def test_of_long_metrics_the_whole_curve_is_drawn(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupscale.cli.live_page._MOST_BYTES", 1 << 17)
    lines = [f'{{"kind": "train", "step": {step}, "loss": {1 + 1 / step:.6f}}}\n' for step in range(1, 10_001)]
    (study / "stretches" / "two" / "metrics.jsonl").write_text("".join(lines))
    page = draw_live_page(study)
    assert "step 10,000, loss 1.0001" in page
    first, last = (
        point.split(",") for point in (page.split('points="')[1].split('"')[0].split()[place] for place in (0, -1))
    )
    assert float(first[0]) == 5
    assert float(first[1]) == 5  # the highest loss is the first
    assert float(last[0]) > 470


def test_no_other_name_and_no_other_method_is_answered(study: Path, port: int) -> None:
    assert get(port, "/", host="evil.example")[0] == 404
    assert get(port, "/", host="localhost")[0] == 200
    assert ask(port, "/", "127.0.0.1")[0] == 200  # as a browser asks at port 80
    assert get(port, "/", method="POST")[0] == 501
    before = sorted(study.rglob("*"))
    get(port, "/")
    assert sorted(study.rglob("*")) == before


def test_what_cannot_be_watched(study: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MupscaleError, match="there is no folder"):
        make_server(study / "absent", 0)
    assert f"port {port} cannot be used" in refused(capsys, ["report", str(study), "--watch", "--port", str(port)], 1)
    assert main(["report", "a", "b", "--watch"]) == 2
    (study / "stretches" / "two" / "metrics.jsonl").write_text('{"kind": "train", "step": "x"}\n')
    assert "must be" in draw_live_page(study)
