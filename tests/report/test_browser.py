"""The page in a real browser: wide and on a phone, light and dark, with all that is folded away.

Pictures drawn, nothing fetched, nothing complained about, no scrolling sideways.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import browser
from comparisons import ALL, comparison
from mupscale.report import write_report
from mupscale.study.results import PageTable
from summaries import all_runs, diverged, example, sweep_1, sweep_2, write

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(
    paper_page: Path, tmp_path_factory: pytest.TempPathFactory, svg_alone: Callable[..., None]
) -> Callable[[str], Path]:
    """The paper's comparison; five seeds of all contenders, one of which diverged; and that beside a run in ruins."""
    folder = tmp_path_factory.mktemp("pages")
    words = "anamewithoutanyplacetobreakit" * 4
    summary = comparison(5, ALL, lost={"copies": 2}, name=words, command=words, notes=[words])

    @cache
    def draw(name: str) -> Path:
        if name == "paper":
            return paper_page
        runs = [write(folder / f"{name}-run", replace(summary, small=summary.small[:1], tuned=summary.tuned[1:4]))]
        if name == "both":
            lost = {
                "runs": [diverged(one) for one in all_runs()[:2]],
                "tuned": [sweep_1(), sweep_2()],
            }
            ruins = replace(example(name=words, **lost), coords=None)
            runs = [write(folder / "beside", replace(summary, small=[], tuned=[])), write(folder / "lost", ruins)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("matplotlib.figure.Figure.savefig", svg_alone)
            return write_report(runs, folder / name)

    return draw


CASES = {f"{name}-{width}-{mode}": (name, width, mode == "dark") for name in ("paper", "pay", "both")
         for width in (360, 1280) for mode in ("light", "dark")}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_page_is_drawn(tab: browser.Browser, pages: Callable[[str], Path], case: str) -> None:
    name, width, dark = CASES[case]
    assert browser.find_faults(tab, pages(name), width, dark, unfold=True) == []
    light = tab.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(c => c > 127)")
    assert light is not dark
    sources = tab.ask("[...document.images].map(i => atob(i.currentSrc.split(',')[1]))")
    assert [("#171c23" in source) for source in sources] == [dark] * len(sources)
    if name == "pay":
        drawn = tab.ask("document.images[0].naturalWidth")
        assert drawn < 400 if width == 360 else drawn > 800, "the picture is not the one for this width"


def test_a_phone_has_rows_below_each_other(tab: browser.Browser, pages: Callable[[str], Path]) -> None:
    wide = "[...document.querySelectorAll('.stacks')].filter(t => t.scrollWidth > t.clientWidth).length"
    tab.open(pages("paper"), 360)
    tab.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert "class_path: mupscale.models.GPT2" in tab.ask("document.body.innerText")
    assert tab.ask("document.querySelectorAll('.stacks').length") == 5
    assert tab.ask(wide) == 0
    assert tab.ask("Math.min(...[...document.querySelectorAll('.cards .what')].map(e => e.clientWidth))") > 150


def test_no_column_of_a_familys_table_is_cut_at_1000_pixels(tab: browser.Browser, tmp_path: Path) -> None:
    head = ["size", "parameters", "steps, trunk + branch", "tokens", "FLOPs here", "FLOPs alone", "held-out loss"]
    row = ["channels 12", "9,070", "17 + 15", "3,850", "8.41 MFLOPs", "15.8 MFLOPs", "0.758"]
    table = PageTable("Every size", [*head, "from scratch"], [[*row, "0.763"]])
    tab.open(write_report([write(tmp_path / "run", replace(comparison(1, ALL), tables=[table]))]), 1000)
    assert tab.ask("[...document.querySelectorAll('.table')].filter(t => t.scrollWidth > t.clientWidth).length") == 0


def test_a_good_result_is_not_red(tab: browser.Browser, pages: Callable[[str], Path]) -> None:
    tab.open(pages("paper"), 1280)
    red, green, blue = tab.ask("getComputedStyle(document.querySelector('.number')).color.match(/\\d+/g).map(Number)")
    assert red < max(green, blue)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (r'src="data:image/svg\+xml;base64,.{400}', 'src="data:image/svg+xml;base64,', "picture 0 is not drawn"),
        (r"<main>", '<main><img src="https://example.org/x.png">', "Content Security Policy"),
        (r"<main>", '<main><div style="width: 2000px">x</div>', "scrolls sideways"),
    ],
)
def test_faults_are_found(
    tab: browser.Browser, pages: Callable[[str], Path], tmp_path: Path, old: str, new: str, fault: str
) -> None:
    """The checks above can fail."""
    broken = tmp_path / "index.html"
    broken.write_text(re.sub(old, new, pages("paper").read_text(encoding="utf-8"), count=1), encoding="utf-8")
    assert fault in " ".join(browser.find_faults(tab, broken, 360, dark=False))
