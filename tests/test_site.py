"""The site's pages: each is in the navigation, short, and its links lead somewhere. mkdocs is not needed for that."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mupscale

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OUTSIDE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that lie elsewhere; tools/docs_site.py puts them there."""

PAGES = sorted(DOCS.glob("**/*.md"))
SOURCES = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PLAIN = [DOCS / "method.md", DOCS / "results.md", *sorted((DOCS / "results").glob("*.md"))]
"""Pages whose sentences are short."""

PAGE_WORDS, README_WORDS, SENTENCE_WORDS = 1500, 890, 30


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def navigation() -> list[str]:
    """The pages that mkdocs.yml lists, in its order."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.findall(r"(\S+\.md)$", text[text.index("\nnav:") :], re.M)


def test_the_search_works_from_disk_and_nothing_is_fetched_from_elsewhere() -> None:
    """The plugin `offline` would have the page ask another site for what is in docs/iframe-worker.js."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^  - offline", text, re.M)
    assert re.search(r"^  polyfills: \[iframe-worker\.js\]", text, re.M)
    assert "http" not in (DOCS / "iframe-worker.js").read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page's prose: no code, tables, headings or pictures."""
    text = re.sub(r"```.*?```|<[^>]+>", "", text, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    kept = [line for line in text.splitlines() if not re.match(r"    \S|\||#", line)]
    for part in re.split(r"\n\s*\n|\n(?=- |\d+\. )", "\n".join(kept)):
        yield from filter(None, re.split(r"(?<=[.!?])[*)]*\s+", part.strip()))


def test_every_page_is_in_the_navigation() -> None:
    listed = navigation()
    assert len(set(listed)) == len(listed), "a page is listed twice"
    pages = {path.relative_to(DOCS).as_posix() for path in PAGES}
    pages |= {path.relative_to(DOCS).with_suffix(".md").as_posix() for path in DOCS.glob("**/*.ipynb")}
    assert set(listed) == pages | set(OUTSIDE), "docs/ and the nav of mkdocs.yml differ"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_pages_are_short(page: Path) -> None:
    """All that is on a page counts, tables and code too."""
    assert len(page.read_text(encoding="utf-8").split()) <= PAGE_WORDS, "split it"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


@pytest.mark.parametrize("page", PLAIN, ids=named)
def test_sentences_are_short(page: Path) -> None:
    long = [one for one in sentences(page.read_text(encoding="utf-8")) if _words(one) > SENTENCE_WORDS]
    assert not long, f"{len(long)} sentences of more than {SENTENCE_WORDS} words:\n  " + "\n  ".join(long)


def _words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


@pytest.mark.parametrize("page", SOURCES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)", text):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{named(page)} links to {target}"
        assert file.is_relative_to(ROOT)
        if anchor and file.suffix == ".md":
            there = anchors(file.read_text(encoding="utf-8"))
            assert anchor[1:] in there, f"{named(page)} links to {target}{anchor}, and there is no such heading"


def test_every_page_is_linked_or_listed_by_its_own_title() -> None:
    for page in PAGES:
        first = page.read_text(encoding="utf-8").splitlines()[0]
        assert re.match(r"# \S", first), f"{named(page)} does not begin with its title"


def test_the_reference_has_every_public_name() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    shown = re.findall(r"^::: ([\w.]+)$", text, re.M)
    assert len(set(shown)) == len(shown)
    missing = {f"mupscale.{name}" for name in mupscale.__all__} - set(shown)
    assert not missing, f"docs/api lacks {', '.join(sorted(missing))}"
    index = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    unnamed = [name for name in shown if f"`{name.removeprefix('mupscale.')}`" not in index]
    assert not unnamed, f"docs/api/index.md does not name {', '.join(unnamed)}"
    for name in shown:
        assert _is_listed(name), f"docs/api shows {name}, which its package does not list in __all__"


def _is_listed(name: str) -> bool:
    """Read off the sources, so that no extra is needed."""
    package, _, last = name.rpartition(".")
    tree = ast.parse((ROOT / "src" / Path(*package.split(".")) / "__init__.py").read_text(encoding="utf-8"))
    listed: Any = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    ]
    return last in listed[0]
