"""The core's tests under every Python and torch that can be had here: python tools/test_matrix.py (make test-matrix)

Every supported Python with the newest torch, and the oldest Python with every minor release of torch from the oldest
supported one. An interpreter is looked for on the PATH, among pyenv's and through uv; releases of torch are those that
pip's index offers for it. Each pair gets an environment of its own below .matrix, with the package and what its tests
need and nothing pinned. What is not offered is listed as such; the exit status is 1 if any pair failed, or none ran.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST_TORCH = (2, 9)
TESTS = ("tests/core", "tests/optim", "tests/checks", "tests/system", "tests/cli/test_startup.py")
TESTS += (
    "tests/growth/test_draws.py",
    "tests/growth/test_noise.py",
    "tests/family/test_family.py",
    "tests/test_checkpoint.py",
)


def find_python(version: str) -> str | None:
    """An interpreter of this version, if there is one."""
    candidates = [shutil.which(f"python{version}")]
    folders = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python")
    candidates += [str(path) for path in sorted(folders)]
    if uv := shutil.which("uv"):
        found = subprocess.run([uv, "python", "find", version], capture_output=True, text=True, check=False)
        candidates.append(found.stdout.strip() or None)
    for candidate in candidates:
        command = [candidate or "false", "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        said = subprocess.run(command, capture_output=True, text=True, check=False) if candidate else None
        if said and said.stdout.strip() == version:
            return candidate
    return None


def torch_releases(python: Path) -> list[str]:
    """The newest patch of every supported minor release that the index offers to this interpreter, oldest first."""
    listed = subprocess.run(
        [python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, check=False
    ).stdout
    versions = sorted({tuple(map(int, found)) for found in re.findall(r"\b(\d+)\.(\d+)\.(\d+)(?=,|\s|$)", listed)})
    newest = {version[:2]: version for version in versions if version[:2] >= OLDEST_TORCH}
    return [".".join(map(str, version)) for version in newest.values()]


def environment(folder: Path, interpreter: str) -> Path:
    """The interpreter of an environment, which is made where it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
    return python


def run_pair(folder: Path, python: Path, torch: str, tests: list[str]) -> str:
    """Install and test one pair: what came of it, in a word or two."""
    packages = [f"torch=={torch}", "-e", str(ROOT), "pytest", "hypothesis"]
    with open(folder / "log.txt", "w", encoding="utf-8") as log:
        if subprocess.run(
            [python, "-m", "pip", "install", "-q", *packages], stdout=log, stderr=log, check=False
        ).returncode:
            return f"cannot be installed ({folder / 'log.txt'})"
        words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        failed = subprocess.run(words, cwd=ROOT, env=settings, stdout=log, stderr=log, check=False).returncode
    log_text = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    names = re.findall(r"^FAILED (\S+)", log_text, re.M)
    return f"FAILED: {', '.join(names)} ({folder / 'log.txt'})" if failed else "passed"


def main() -> int:
    """Run every pair that can be had, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=PYTHONS, help="versions of Python, the oldest first")
    parser.add_argument("--torch", nargs="*", help="minor releases of torch, such as 2.9 (default: see above)")
    parser.add_argument("--tests", nargs="*", default=list(TESTS), help="what to run")
    options = parser.parse_args()
    rows: list[tuple[str, str, str]] = []
    for number, version in enumerate(options.python):
        interpreter = find_python(version)
        if interpreter is None:
            rows.append((version, "—", "no interpreter here"))
            continue
        releases = torch_releases(environment(ROOT / ".matrix" / f"python{version}", interpreter))
        wanted = releases if number == 0 else releases[-1:]
        if options.torch is not None:
            wanted = [release for release in releases if release.rpartition(".")[0] in options.torch]
        if not wanted:
            rows.append((version, "—", "no release of torch is offered"))
        for release in wanted:
            folder = ROOT / ".matrix" / f"python{version}-torch{release}"
            python = environment(folder, interpreter)
            rows.append((version, release, run_pair(folder, python, release, options.tests)))
            print("python {} torch {}: {}".format(*rows[-1]), flush=True)
    print("\n".join(["", "python  torch    result", *(f"{a:<8}{b:<9}{c}" for a, b, c in rows)]))
    outcomes = [row[2] for row in rows]
    return (
        0
        if any(o.startswith("passed") for o in outcomes)
        and not any(o.startswith(("FAILED", "cannot")) for o in outcomes)
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
