"""A Hugging Face folder as the base model of a study: its model in recipes, its weights as a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupscale.cli.arguments import UsageError
from mupscale.system import MupscaleError, fingerprint_files, read_json

_NAMED = ("config.json", "optimizer.pt")
_WEIGHTS = (".safetensors", ".bin", ".gguf")

if TYPE_CHECKING:
    from mupscale.train import Recipe

_BASE_FILE = "base-model-{}.safetensors"
_ASKED = {
    "optimizer": "the learning rate it was trained with (--optimizer AdamW --optimizer.lr 3e-4)",
    "steps": "how many steps the grown model trains (--steps 2000)",
    "batch": "the batch (--batch 32)",
    "data": "a text to train on (--data Text --data.tokens FOLDER --data.source my.txt --data.tokenizer hf:FOLDER)",
    "width": "the hidden size to grow to (--width 1536)",
    "base_steps": "how many steps it was trained, which count as its cost; the small models that stand in for it train "
    "as long (--study.base_steps 2000)",
}


def is_hugging_face(path: str | None) -> bool:
    """Whether a path is a folder that save_pretrained wrote."""
    return path is not None and (Path(path) / "config.json").is_file() and not (Path(path) / "recipe.json").exists()


def adopt_hugging_face_base(tree: dict[str, Any], unasked: Sequence[str] = ()) -> None:
    """Take the model of a Hugging Face folder over into a recipe that starts from it; what it lacks is asked for.

    Such a folder tells the model and its width, and nothing of how it was trained. unasked: what the command knows.
    """
    folder = tree.get("from")
    if not is_hugging_face(folder):
        return
    told = {*tree} - {"base_steps"} | {*(tree.get("study") or {})} & {"base_steps"}
    if "base_steps" not in {*told, *unasked} and (steps := _steps_of_trainer(Path(str(folder)))):
        tree["study"] = {**(tree.get("study") or {}), "base_steps": steps}
        told.add("base_steps")
    if lacking := [what for name, what in _ASKED.items() if name not in told and name not in unasked]:
        raise UsageError(
            f"{folder} is a Hugging Face folder, which does not say how to train the model further: give "
            f"{'; '.join(lacking)}"
        )
    from mupscale.hf import hidden_size

    tree["model"] = {"class_path": "mupscale.hf.LanguageModel", "init_args": {"folder": str(folder)}, "kept": {}}
    for name in ("base", "width"):
        tree.setdefault(name, hidden_size(str(folder)))


def _steps_of_trainer(folder: Path) -> int | None:
    """How many steps the Trainer of transformers has trained for, if the folder is a checkpoint of its."""
    path = folder / "trainer_state.json"
    steps = read_json(path).get("global_step") if path.is_file() else None
    return steps if isinstance(steps, int) and steps > 0 else None


def base_checkpoint(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe; where it starts from a Hugging Face folder, with its weights, and its Trainer's optimizer.pt, in a
    checkpoint of ours, written into a folder once.

    Its name tells which weights it holds, so that other ones are never taken for them.
    """
    if recipe.start is None or not is_hugging_face(recipe.start):
        return recipe
    from mupscale.hf import load_language_model, load_language_optimizer
    from mupscale.train import save_model_at

    source = Path(recipe.start)
    files = (path for path in source.iterdir() if path.name in _NAMED or path.suffix in _WEIGHTS)
    path = folder / _BASE_FILE.format(fingerprint_files(sorted(files)))
    if not path.exists():
        model, width = load_language_model(recipe.start)
        optimizer = None
        with suppress(MupscaleError):  # of another class than the recipe's: a note says that it is not read
            optimizer = load_language_optimizer(recipe.start, model, recipe.optimizer_class())
        save_model_at(path, model, width, optimizer)
    return replace(recipe, start=str(path))


def describe_tokens(recipe: Recipe) -> list[str]:
    """What is to be kept in mind where the data may be in another tokenizer's tokens than a Hugging Face folder's."""
    tokenizer = str(recipe.data.init_args.get("tokenizer", ""))
    if recipe.start is None or not is_hugging_face(recipe.start):
        return []
    own, named = (Path(folder) / "tokenizer.json" for folder in (recipe.start, tokenizer.removeprefix("hf:")))
    alike = own.is_file() and named.is_file() and own.read_bytes() == named.read_bytes()
    if tokenizer.startswith("hf:") and (alike or own.resolve() == named.resolve()):
        return []
    name = f" (data.tokenizer: hf:{recipe.start})" if own.is_file() else ", and that folder has no tokenizer.json"
    return [
        f"the recipe does not name the tokenizer of {recipe.start}{name}, so its tokens may differ from those that the "
        f"model was trained on"
    ]
