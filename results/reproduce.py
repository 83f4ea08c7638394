"""The experiments of docs/results.md, one after another: `make reproduce COVTYPE=covtype.data.gz TEXT=books.jsonl.gz`.

Each folder beside this file is one, with its recipe. All of them go through `mupscale run` and `mupscale
transfer-check`, which go on where they were stopped, so the same command finishes what was interrupted. Words after
`--` are passed on to each, such as `-- --dry-run`.
"""

from __future__ import annotations

import argparse
import json
import os
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
PICTURES = ("training-flops*.png", "held-out.png", "gain.png", "sweep-*.png")  # `mupscale report` draws the others


def main(words: Sequence[str] | None = None) -> int:
    """Run what is asked for, and keep it if told to."""
    asked, passed_on = _options(words)
    for name in asked.names or NAMES:
        text = "mupscale.data.Text" in (HERE / name / "recipe.yaml").read_text(encoding="utf-8")
        source = asked.text if text else asked.covtype
        if source is None:
            print(f"{name}: left out, since {'--text' if text else '--covtype'} is not given", flush=True)
            continue
        if text and (code := _tokens(source, asked.runs)):
            return code
        data = ["--data.tokens", str(asked.runs / TOKENS)] if text else ["--data.path", str(source)]
        if code := _call([*command(name), *data, "--out", str(asked.runs / name), *passed_on]):
            return code
        if asked.keep:
            keep(name, asked.runs / name, source)
    return 0


def command(name: str) -> list[str]:
    """What trains an experiment."""
    recipe = os.path.relpath(HERE / name / "recipe.yaml")
    return ["transfer-check", recipe, "--widths", WIDTHS] if name.startswith("transfer") else ["run", recipe]


def keep(name: str, run: Path, source: Path) -> None:
    """What a run has found into its folder here: numbers to six digits, pictures, and no path of a machine."""
    folder, transfer = HERE / name, run / "transfer-check.json"
    found = json.loads((transfer if transfer.exists() else run / "summary.json").read_text(encoding="utf-8"))
    if transfer.exists():
        _write(folder / transfer.name, found)
        shutil.copy(run / "transfer-check.png", folder)
        return
    (given,) = (key for key in ("path", "tokens") if key in found["recipe"]["data"]["init_args"])
    found["recipe"]["data"]["init_args"][given] = shown = source.name if given == "path" else f"runs/{TOKENS}"
    found["recipe"]["out"] = f"runs/{name}"
    words = [*command(name), f"--data.{given}", shown, "--out", f"runs/{name}"]
    _write(folder / "summary.json", {**found, "name": name, "command": shlex.join(["mupscale", *words])})
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


def _tokens(source: Path, runs: Path) -> int:
    """The text as tokens, once; 2 % of the books are for validation."""
    if (runs / TOKENS / "index.json").exists():
        return 0
    return _call(["data", "tokenize", str(source), str(runs / TOKENS), "--vocab", "8192", "--validation", "0.02"])


def _call(words: Sequence[str]) -> int:
    print(f"$ mupscale {shlex.join(words)}", flush=True)
    try:
        return subprocess.run([sys.executable, "-m", "mupscale", *words], check=False).returncode
    except KeyboardInterrupt:
        return 130


def _options(words: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    given = list(sys.argv[1:] if words is None else words)
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(NAMES)}")
    parser.add_argument("--covtype", type=Path, help="UCI's covtype.data.gz")
    parser.add_argument("--text", type=Path, help="the books, JSON lines with a field `text`")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs go (default: runs)")
    parser.add_argument("--keep", action="store_true", help="put what was found in place of what is here")
    asked = parser.parse_args(given[:at])
    if unknown := [name for name in asked.names if name not in NAMES]:
        parser.error(f"there is no {unknown[0]!r}: choose from {', '.join(NAMES)}")
    return asked, given[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
