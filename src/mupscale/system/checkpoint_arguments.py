"""A checkpoint's folder, a place for another and multipliers, as a person names them: all that shows without torch."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from mupscale.system.errors import MupscaleError, as_asked, setting

_MOST_STEPS = 8  # of which a message gives the names


def check_has_config(folder: Path) -> None:
    """Refuse a folder without a config.json; of a Trainer's folder, name the newest checkpoint."""
    if (folder / "config.json").exists():
        return
    advice = "give the folder that save_pretrained wrote, or one of the hub"
    if gguf := sorted(folder.glob("*.gguf"))[:1]:
        advice = f"give {gguf[0].name} itself, {as_asked('through mupscale.hf.read_gguf', 'with --dequantise')}"
    steps = [p.name[11:] for p in folder.glob("checkpoint-*") if (p / "config.json").exists()]
    if newest := max((step for step in steps if step.isdecimal()), key=int, default=""):
        advice = f"give a checkpoint in it, of which {folder / f'checkpoint-{newest}'} is the newest"
    raise MupscaleError(f"there is no config.json in {folder}: {advice}")


def is_dcp_folder(path: str | Path) -> bool:
    """Whether torch.distributed.checkpoint has written this folder; an error where it holds such folders instead."""
    path = Path(path)
    if (path / ".metadata").is_file() or (path / "config.json").exists():
        return (path / ".metadata").is_file()
    inside = [p.parent for pattern in ("*/.metadata", "*/*/.metadata") for p in path.glob(pattern)]
    steps = sorted(inside, key=lambda p: (int(*re.findall(r"\d+$", p.name) or "0"), p.name))
    if steps:
        names = ", ".join(str(p.relative_to(path)) for p in steps[-_MOST_STEPS:])
        raise MupscaleError(f"{path} holds checkpoints ({names}): give one of them, of which {steps[-1]} is the newest")
    return False


def is_taken(place: Path) -> bool:
    """Whether something stands where a folder is to appear; an empty folder does not count."""
    return place.is_symlink() or (place.exists() and (not place.is_dir() or any(place.iterdir())))


def place_for(out: Path, overwrite: bool) -> Path:
    """Where to write a folder that is to stand at `out`: there, or beside what it is to replace (`replace_folder`).

    What stands at `out` already is refused, unless it is mupscale's and is to be replaced.
    """
    is_ours = (out / "mupscale.json").is_file() and not out.is_symlink()
    asked = as_asked("overwrite=True", "--overwrite")
    if not is_taken(out):
        return out
    if not is_ours and overwrite:
        raise MupscaleError(f"{asked}: mupscale did not write {out}. Remove it yourself, or choose a different name")
    if not overwrite:
        remedy = f"Use {asked} to replace it" if is_ours else "Remove it"
        raise MupscaleError(f"{out} already exists. {remedy}, or choose a different name")
    return out.with_name(f".{out.name}.new-{secrets.token_hex(8)}")


def parse_multipliers(text: str) -> int | dict[str, int]:
    """A whole number, or several by name.

    >>> parse_multipliers("2"), parse_multipliers("hidden=2,ffn=3")
    (2, {'hidden': 2, 'ffn': 3})
    """
    if "=" not in text:
        return _whole_number(text.strip(), text)
    pairs = [part.partition("=") for part in text.split(",")]
    numbers = [(name.strip(), _whole_number(value.strip(), text)) for name, _, value in pairs]
    if twice := [name for i, (name, _) in enumerate(numbers) if name in dict(numbers[:i])]:
        raise MupscaleError(f"{setting('times', text)} names '{twice[0]}' twice: say once how much it grows")
    return dict(numbers)


def _whole_number(word: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", word):
        raise MupscaleError(
            f"{setting('times', text)}: '{word}' is not a whole number, as in {setting('times', 2)} or "
            f"{setting('times', 'hidden=2,ffn=3,heads=2')}; fresh units take sizes between multiples by name, as in "
            f"{as_asked('hidden=1536, ffn=6144, heads=24', '--hidden 1536 --ffn 6144 --heads 24')}"
        )
    return int(word)
