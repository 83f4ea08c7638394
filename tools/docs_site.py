"""What the site has besides the pages in docs/: the README as its home, notebooks, pictures of results (mkdocs hooks).

Links lead to the same places as on the repository's pages: to a page where there is one, and otherwise to the file
in the repository, or nowhere if its address (REPOSITORY_URL) is not known.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository outside docs/, and their names on the site."""

COLUMNS = 90
"""Characters of code that fit beside the navigation."""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|data:|#)([^)#\s]+)(#[^)\s]*)?\)")
NOTEBOOKS = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "docs").glob("**/*.ipynb"))}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that do not lie in docs/."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for source, path in NOTEBOOKS.items():
        files.append(File.generated(config, place_of(source), content=notebook_markdown(path)))
    texts = {source: (ROOT / source).read_text(encoding="utf-8") for source in PAGES}
    texts |= {
        f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages() if not file.generated_by
    }
    pictures = {
        target
        for source, text in texts.items()
        for _, _, link, _ in LINK.findall(text)
        if (target := resolve(source, link)).startswith("results/") and target.endswith(".png")
    }
    for target in sorted(pictures):
        files.append(File.generated(config, place_of(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their targets are on the site."""
    here = page.file.src_uri
    sources = {name: source for source, name in PAGES.items()}
    sources |= {place_of(source): source for source in NOTEBOOKS}
    source = sources.get(here, f"docs/{here}")

    def lead(match: re.Match[str]) -> str:
        picture, text, link, anchor = match[1], match[2], match[3], match[4] or ""
        target = resolve(source, link)
        place = place_of(target)
        if place:
            return f"{picture}[{text}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{anchor})"
        if not (ROOT / target).exists():
            return match[0]  # for mkdocs to complain of
        address = os.environ.get("REPOSITORY_URL")
        return f"[{text}]({address}/blob/main/{target}{anchor})" if address else text

    return keep_together(LINK.sub(lead, markdown))


def keep_together(markdown: str) -> str:
    """The text, with numbers never parted from their percent sign or arrow at the end of a line."""
    parts = re.split(r"(^```.*?^```|(?:^    .*?\n)+|`[^`\n]*`)", markdown, flags=re.S | re.M)
    for number, part in enumerate(parts):
        inside = re.sub(r"(?<=\d) (?=[%→×])|(?<=[→×]) (?=\d)", "\u00a0", part)
        parts[number] = tighten(part) if number % 2 else inside
    return "".join(parts)


def tighten(code: str) -> str:
    """Code whose comments stand in a column of their own, without that column where its lines are too long for it."""
    is_long = any(len(line) > COLUMNS for line in code.splitlines())
    return re.sub(r"(?<=\S) {3,}#", "  #", code) if is_long else code


def resolve(source: str, link: str) -> str:
    """The file that a link of a page means, from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def place_of(target: str) -> str:
    """Where a file of the repository is on the site; nothing if it is not."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("results/") and target.endswith(".png"):
        return f"pictures/{target.removeprefix('results/')}"
    if target.startswith("docs/") and (ROOT / target).is_file():
        return re.sub(r"\.ipynb$", ".md", target.removeprefix("docs/"))
    return ""


def notebook_markdown(path: Path) -> str:
    """A notebook as a page: its text, its code, and what the code printed or drew where that was kept."""
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![](data:image/png;base64,{''.join(data['image/png']).strip()})")
            elif printed := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
