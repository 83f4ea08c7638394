"""The page of a comparison in a real browser: wide and on a phone, light and dark, with all that is folded away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import browser
from comparisons import ALL, comparison, write
from mupscale.report import write_report

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five seeds, all contenders, one of which diverged, and words without a place to break them."""
    words = "anamewithoutanyplacetobreakit" * 4
    summary = comparison(5, ALL, lost={"copies": 2}, name=words, command=words, notes=[words])
    few = replace(summary, small=summary.small[:1], tuned=summary.tuned[1:4])
    return write_report([write(tmp_path_factory.mktemp("pages") / "run", few)])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page_is_drawn(tab: browser.Browser, page: Path, width: int, dark: bool) -> None:
    assert browser.find_faults(tab, page, width, dark, unfold=True) == []
    drawn = tab.ask("document.images[0].naturalWidth")
    assert drawn < 400 if width == 390 else drawn > 800, "the picture is not the one for this width"
    sources = tab.ask("[...document.images].map(i => atob(i.currentSrc.split(',')[1]))")
    assert [("#171c23" in source) for source in sources] == [dark] * len(sources)


def test_a_phone_has_rows_below_each_other(tab: browser.Browser, page: Path) -> None:
    wide = "[...document.querySelectorAll('.stacks')].filter(t => t.scrollWidth > t.clientWidth).length"
    tab.open(page, 390)
    tab.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.ask("document.querySelectorAll('.stacks').length") == 4
    assert tab.ask(wide) == 0
