"""The experiments of docs/results.md, one after another: `make reproduce COVTYPE=covtype.data.gz TEXT=books.jsonl.gz`.

Each folder beside this file is one, with its recipe. All of them go through `mupscale run` and `mupscale
transfer-check`, which go on where they were stopped, so the same command finishes what was interrupted. Words after
`--` are passed on to each of these commands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = sorted(path.parent.name for path in HERE.glob("*/recipe.yaml"))
WIDTHS = "[64, 128, 256, 512, 1024]"  # of the base models in transfer checks
TOKENS = "gutenberg"
NEEDED = {"CoverType": "covtype", "Text": "text"}  # other data ships with the package
PICTURES = ("training-flops*.png", "held-out.png", "gain.png", "sweep-*.png")  # `mupscale report` draws the others
INTERRUPTED = 130


def main(words: Sequence[str] | None = None) -> int:
    """Run what is asked for, and keep it if told to; what fails does not keep the others from running."""
    asked, passed_on = _options(words)
    codes = []
    for name in asked.names:
        codes.append(_experiment(name, asked, passed_on))
        if codes[-1] == INTERRUPTED:
            break
    return next((code for code in codes if code), 0)


def needed(name: str) -> str | None:
    """Which file an experiment needs: covtype, text, or none."""
    found = re.search(r"mupscale\.data\.(\w+)", (HERE / name / "recipe.yaml").read_text(encoding="utf-8"))
    return None if found is None else NEEDED.get(found[1])


def is_transfer(name: str) -> bool:
    """Whether it is a transfer check; the others are runs of the method."""
    return name.startswith("transfer")


def command(name: str, recipe: str, data: str, out: str) -> list[str]:
    """What trains an experiment."""
    given = {"covtype": ["--data.path", data], "text": ["--data.tokens", data], None: []}[needed(name)]
    words = [recipe, *given, "--out", out]
    return ["transfer-check", *words, "--widths", WIDTHS] if is_transfer(name) else ["run", *words, "--paper"]


def _experiment(name: str, asked: argparse.Namespace, passed_on: Sequence[str]) -> int:
    what = needed(name)
    source: Path | None = getattr(asked, what) if what else None
    if what and source is None:
        print(f"{name}: left out, since --{what} is not given", flush=True)
        return 0
    if asked.dry_run and is_transfer(name):
        print(f"{name}: left out, since only runs of the method can say how long they take", flush=True)
        return 0
    recipe, data = os.path.relpath(HERE / name / "recipe.yaml"), source
    if what == "text":
        data = asked.runs / TOKENS  # 2 % of the books are for validation; where they are tokens already, that is seen
        made = _call(["data", "tokenize", str(source), str(data), "--vocab", "8192", "--validation", "0.02"])
        if made:
            return made
    out = asked.runs / name
    code = _call([*command(name, recipe, str(data), str(out)), *(["--dry-run"] if asked.dry_run else []), *passed_on])
    if not code and asked.keep:
        keep(name, out, source)
    return code


def keep(name: str, run: Path, source: Path | None) -> None:
    """What a run has found into its folder here: numbers to six digits, pictures, and no path of a machine."""
    folder = HERE / name
    if is_transfer(name):
        _write(folder / "transfer-check.json", json.loads((run / "transfer-check.json").read_text(encoding="utf-8")))
        shutil.copy(run / "transfer-check.png", folder)
        return
    found = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    out, what, arguments = f"runs/{name}", needed(name), found["recipe"]["data"]["init_args"]
    data = f"runs/{TOKENS}" if what == "text" else source.name if source is not None else ""
    found["recipe"]["out"] = out
    if what is not None:
        arguments["tokens" if what == "text" else "path"] = data
    found["command"] = shlex.join(["mupscale", *command(name, f"results/{name}/recipe.yaml", data, out)])
    _write(folder / "summary.json", {**found, "name": name})
    for old in folder.glob("*.png"):
        old.unlink()
    for pattern in PICTURES:
        for picture in (run / "report").glob(pattern):
            shutil.copy(picture, folder)


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(_short(values), separators=(",", ":")) + "\n", encoding="utf-8")


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_short(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _call(words: Sequence[str]) -> int:
    """A command of mupscale; Ctrl-C reaches it too, and it is left the time to keep where it stands."""
    print(f"$ mupscale {shlex.join(words)}", flush=True)
    with subprocess.Popen([sys.executable, "-m", "mupscale", *words]) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            return INTERRUPTED


def _options(words: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    given = list(sys.argv[1:] if words is None else words)
    at = given.index("--") if "--" in given else len(given)
    passed_on = given[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(NAMES)}")
    parser.add_argument("--covtype", type=Path, help="UCI's covtype.data.gz")
    parser.add_argument("--text", type=Path, help="the books, JSON lines with a field `text`")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs go (default: runs)")
    parser.add_argument("--dry-run", action="store_true", help="say how long each would take on this machine")
    parser.add_argument("--keep", action="store_true", help="put what was found in place of what is here")
    asked = parser.parse_intermixed_args(given[:at])
    if unknown := [name for name in asked.names if name not in NAMES]:
        parser.error(f"there is no {unknown[0]!r}: choose from {', '.join(NAMES)}")
    if not asked.names and asked.covtype is None and asked.text is None:
        parser.error("give --covtype, --text or both: they are what most experiments are about")
    for source in (asked.covtype, asked.text):
        if source is not None and not source.exists():
            parser.error(f"there is no file {source}")
    if asked.keep and (passed_on or asked.dry_run):
        parser.error("--keep keeps what the recipes give, so nothing else can be asked of them")
    asked.names = asked.names or NAMES
    return asked, passed_on


if __name__ == "__main__":
    sys.exit(main())
