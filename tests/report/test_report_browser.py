"""The report in a real browser: pictures drawn, nothing fetched, nothing complained about, no scrolling sideways."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import browser
from mupscale.report import write_report
from summaries import diverged, example, sweep_1, sweep_2, write

pytest.importorskip("matplotlib")
PROGRAM = browser.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium is installed")

_DRAWN = "[...document.images].map(i => i.complete && i.naturalWidth > 50 && i.getBoundingClientRect().width > 200)"
_TOO_WIDE = """[...document.querySelectorAll('body *')]
    .filter(e => !e.closest('.table') && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(e => e.tagName + '.' + e.className)"""


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Browser]:
    assert PROGRAM is not None
    with browser.Browser(PROGRAM) as opened:
        yield opened


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
    return {
        "whole": write_report([whole]),
        "lost": write_report([other]),
        "both": write_report([whole, other], folder / "both"),
    }


def faults(tab: browser.Browser, page: Path, width: int, dark: bool) -> list[str]:
    """All that is wrong with a page in a window of this width."""
    tab.open(page, width, dark=dark)
    drawn = tab.ask(_DRAWN)
    found = [f"picture {number} is not drawn" for number, good in enumerate(drawn) if not good]
    found += ["there are no pictures"] * (not drawn)
    found += tab.complaints()
    found += [f"asks for {url}" for url in tab.requests() if not url.startswith(("data:", page.resolve().as_uri()))]
    found += [f"{name} reaches beyond the page" for name in tab.ask(_TOO_WIDE)]
    over = tab.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found + [f"the page scrolls sideways by {over}"] * (over > 0)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("name", ["whole", "lost", "both"])
def test_page_is_drawn(tab: browser.Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    assert faults(tab, pages[name], width, dark) == []
    chosen = tab.ask("[...new Set([...document.images].map(i => i.currentSrc === i.src))]")
    assert chosen == [not dark], "the pictures are not those for this colour scheme"
    light = tab.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(c => c > 127)")
    assert light is not dark


def test_folded_parts_open(tab: browser.Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["whole"], 360)
    tab.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert "class_path: mupscale.models.MLP" in tab.ask("document.body.innerText")
    assert tab.ask(_TOO_WIDE) == []


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
    assert fault in " ".join(faults(tab, broken, 360, dark=False))
