"""The page of a folder whose runs train on: read-only, for this machine alone."""

from __future__ import annotations

import http.client
import threading
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


def get(port: int, path: str, host: str = "127.0.0.1", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers={"Host": f"{host}:{port}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


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


@pytest.mark.parametrize(
    "path",
    ["/recipe.json", "/report/../recipe.json", "/report/%2e%2e/recipe.json", "/report/out", "/report", "//etc/passwd"],
)
def test_nothing_but_the_report_is_served(port: int, path: str) -> None:
    assert get(port, path) == (404, "not found")


def test_no_other_name_and_no_other_method_is_answered(study: Path, port: int) -> None:
    assert get(port, "/", host="evil.example")[0] == 404
    assert get(port, "/", host="localhost")[0] == 200
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
