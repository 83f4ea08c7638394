"""Make the wrong changes of mutations.txt, one at a time, and see that the tests notice each of them.

    python tools/mutate.py            # all of them, about half an hour on one core; prints CONTRIBUTING.md's table
    python tools/mutate.py clip tied  # those whose first line has one of these words

Every change is made in a temporary copy of the tree, and the tests that are named beside it run there, those of
`make test` alone. What survives shows what no test looks at: write that test.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

import pytest
import torch  # noqa: F401  # see _run_tests

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src", "mupscale")
LIST = ROOT / "tools" / "mutations.txt"


class Mutation(NamedTuple):
    """A wrong change: `old`, which stands once in the file or folder `where` of the package, becomes `new`."""

    what: str
    where: str
    tests: str
    old: str
    new: str

    def file(self, root: Path = ROOT) -> Path:
        """The one file that holds the text; an error if it stands elsewhere, or more than once."""
        place = root / PACKAGE / self.where
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        counts = {file: file.read_text(encoding="utf-8").count(self.old) for file in files}
        holders = [file for file, count in counts.items() if count]
        if len(holders) != 1 or counts[holders[0]] != 1:
            raise ValueError(f"{self.what}: its text stands {sum(counts.values())} times in {self.where}:\n{self.old}")
        return holders[0]


def read_mutations() -> list[Mutation]:
    """A paragraph for each: a line that says what it is, where, and what tests notice it; then the change, as a diff.

    A paragraph that begins with # is a title.
    """
    found = []
    for paragraph in LIST.read_text(encoding="utf-8").strip().split("\n\n"):
        first, *lines = paragraph.splitlines()
        if not first.startswith("#"):
            old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in "-+")
            found.append(Mutation(*(part.strip() for part in first.split("|")), old, new))
    return found


def find_killer(mutation: Mutation, root: Path) -> str:
    """Make the change in the copy, run its tests, and take it back; the first test that fails, or ''."""
    file = mutation.file(root)
    before = file.read_text(encoding="utf-8")
    compiled = Path(cache_from_source(str(file)))
    file.write_text(before.replace(mutation.old, mutation.new), encoding="utf-8")
    compiled.unlink(missing_ok=True)  # a file is compiled again by its time and size, which may be the same
    try:
        output, status = _run_tests(mutation.tests.split(), root)
    finally:
        file.write_text(before, encoding="utf-8")
        compiled.unlink(missing_ok=True)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if status not in (0, 1) and failed is None:
        raise RuntimeError(f"{mutation.what}: the tests do not run\n{output}")
    return failed[1].split("[")[0] if failed else ""


def _run_tests(tests: list[str], root: Path) -> tuple[str, int]:
    """Run them there, until one fails, in a fork of this process, which has loaded torch already; output and status."""
    said = root / "tests.txt"
    if not (pid := os.fork()):
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.chdir(root)
        os.environ.update(PYTHONPATH=str(root / "src"), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="")
        sys.dont_write_bytecode = False
        sys.path.insert(0, str(root / "src"))
        status = int(pytest.main(["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]))
        sys.stdout.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said.read_text(encoding="utf-8", errors="replace"), status


def main(words: list[str]) -> int:
    """Print the table; the exit status says whether all were noticed."""
    chosen = [one for one in read_mutations() if not words or any(word in one.what for word in words)]
    for one in chosen:
        one.file()
    survivors = 0
    print("| wrong change | in | noticed by |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "tree")
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "site", "demo", "dist"))
        for one in chosen:
            killer = find_killer(one, root)
            survivors += not killer
            shown = f"`{killer.removeprefix('tests/')}`" if killer else "**nothing**"
            print(f"| {one.what} | `{one.where}` | {shown} |", flush=True)
    print(f"\n{len(chosen) - survivors} of {len(chosen)} were noticed.")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
