"""A Hugging Face folder as the base model of a study: its model in recipes, its weights as a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mupscale.cli.arguments import UsageError, read_yaml, separate_options
from mupscale.cli.shipped_list import find_recipe
from mupscale.system import MupscaleError, fingerprint_files

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
    "as long (--study.base_steps 2000; a Trainer's trainer_state.json has it as global_step)",
}


def is_hugging_face(path: str | None) -> bool:
    """Whether a path is a folder that save_pretrained wrote."""
    return path is not None and (Path(path) / "config.json").is_file() and not (Path(path) / "recipe.json").exists()


def with_hugging_face_base(words: Sequence[str], flags: Sequence[str], unasked: Sequence[str] = ()) -> list[str]:
    """The command's words, with the model where `--from` is a Hugging Face folder; what it lacks is asked for at once.

    Such a folder tells the model and its width, and nothing of how it was trained. unasked: what the command knows.
    """
    names, options = separate_options(words, flags=(*flags, "--print_config"))
    given = dict(options)
    folder = given.get("--from")
    if folder is None or not is_hugging_face(folder) or {"-h", "--help", "--help_all", "--print_config"} & given.keys():
        return list(words)
    files = [read_yaml(find_recipe(name)) for name in [*names, *(v or "" for n, v in options if n == "--config")]]
    told = {name.removeprefix("--").partition(".")[0] for name in given} | {name for file in files for name in file}
    if "--study.base_steps" in given or any("base_steps" in (file.get("study") or {}) for file in files):
        told.add("base_steps")
    else:
        told.discard("base_steps")
    if lacking := [what for name, what in _ASKED.items() if name not in told and name not in unasked]:
        raise UsageError(
            f"{folder} is a Hugging Face folder, which does not say how to train the model further: give "
            f"{'; '.join(lacking)}"
        )
    from mupscale.hf import hidden_size

    model = ["--model", "mupscale.hf.LanguageModel", "--model.folder", folder]
    sizes = [word for name in ("base", "width") if name not in told for word in (f"--{name}", str(hidden_size(folder)))]
    return [*words, *model, *sizes]


def base_checkpoint(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with its weights, and its Trainer's optimizer.pt, in a checkpoint of ours, written into a folder once.

    Its name tells which weights it holds, so that other ones are never taken for them.
    """
    from mupscale.hf import load_language_model, load_language_optimizer
    from mupscale.train import save_model_at

    assert recipe.start is not None
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
    """What is to be kept in mind where the data may be in another tokenizer's tokens than the folder's."""
    tokenizer = str(recipe.data.init_args.get("tokenizer", ""))
    named = tokenizer.removeprefix("hf:")
    if recipe.start is None or (named != tokenizer and Path(named).resolve() == Path(recipe.start).resolve()):
        return []
    has_one = (Path(recipe.start) / "tokenizer.json").is_file()
    name = f" (data.tokenizer: hf:{recipe.start})" if has_one else ", and that folder has no tokenizer.json"
    return [
        f"the recipe does not name the tokenizer of {recipe.start}{name}, so its tokens may differ from those that the "
        f"model was trained on"
    ]
