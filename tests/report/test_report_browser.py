"""The report in a real browser: pictures drawn, nothing fetched, nothing complained about, no scrolling sideways."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import browser
from mupscale.report import write_report
from summaries import diverged, example, sweep_1, sweep_2, write

figure = pytest.importorskip("matplotlib.figure")


_SAVE = figure.Figure.savefig


def svg_alone(self: Any, path: Path, format: str, **more: Any) -> None:
    """Save a picture as the page has it; where a PNG would lie beside it, the picture is only laid out."""
    if format == "svg":
        _SAVE(self, path, format=format, **more)
    else:
        self.draw_without_rendering()
        path.touch()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    whole = write(folder / "whole", check=True)
    words = "anamewithoutanyplacetobreakit" * 4
    lost = example(
        name=words,
        command=words,
        runs=[diverged(runs) for runs in example().runs[:2]],
        sweeps=[sweep_1("diverged"), sweep_2(status="diverged")],
        coords=None,
    )
    other = write(folder / "lost", lost)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", svg_alone)
        return {
            "whole": write_report([whole]),
            "lost": write_report([other]),
            "both": write_report([whole, other], folder / "both"),
        }


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("name", ["whole", "lost", "both"])
def test_page_is_drawn(tab: browser.Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    assert browser.find_faults(tab, pages[name], width, dark) == []
    chosen = tab.ask("[...new Set([...document.images].map(i => i.currentSrc === i.src))]")
    assert chosen == [not dark], "the pictures are not those for this colour scheme"
    light = tab.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(c => c > 127)")
    assert light is not dark


def test_folded_parts_open(tab: browser.Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["whole"], 360)
    tab.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert "class_path: mupscale.models.MLP" in tab.ask("document.body.innerText")
    assert tab.ask(browser.TOO_WIDE) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (r'src="data:image/svg\+xml;base64,.{400}', 'src="data:image/svg+xml;base64,', "picture 0 is not drawn"),
        (r"<main>", '<main><img src="https://example.org/x.png">', "Content Security Policy"),
        (r"<main>", '<main><div style="width: 2000px">x</div>', "scrolls sideways"),
    ],
)
def test_faults_are_found(
    tab: browser.Browser, pages: dict[str, Path], tmp_path: Path, old: str, new: str, fault: str
) -> None:
    """The checks above can fail."""
    broken = tmp_path / "index.html"
    broken.write_text(re.sub(old, new, pages["lost"].read_text(encoding="utf-8"), count=1), encoding="utf-8")
    assert fault in " ".join(browser.find_faults(tab, broken, 360, dark=False))
