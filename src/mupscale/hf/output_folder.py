"""The folder of a wide checkpoint: whether it may stand there and has room, and what lies beside the weights.

README.md among it, the model card: what it was made from, how it grew, and how to train it on.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mupscale.core import RuleSet
from mupscale.growth import Copies, word_of_operator
from mupscale.hf.building import Config
from mupscale.hf.config_fields import parts_of
from mupscale.hf.depths import layers_of
from mupscale.hf.record import RECORD_FILE, GrowthStep, Record
from mupscale.hf.source import Source
from mupscale.system import MupscaleError, make_folder, open_file, replace_text

_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".vocab", ".bpe", ".tiktoken")
_OF_THE_SMALL_ONE = ("config.json", RECORD_FILE, "trainer_state.json", "all_results.json", "train_results.json")


def copy_companions(folder: Path, source: Source) -> None:
    """Tokenizer, generation config and the like of a checkpoint, which fit it at any width."""
    for file in companion_files(source):
        target = folder / file.relative_to(source.folder)
        make_folder(target.parent)
        with open(file, "rb") as here, open_file(target, "wb") as there:
            shutil.copyfileobj(here, there)


def companion_files(source: Source) -> list[Path]:
    """Small files that are the same for the wide model: tokenizer, generation config, chat templates, its own code."""
    folder, kinds = source.folder, (*_COMPANIONS, *([".py"] if source.config.get("auto_map") else []))
    files = [f for f in folder.iterdir() if f.suffix in kinds and f.is_file()]
    own = [f for f in files if f.name not in _OF_THE_SMALL_ONE and not f.name.endswith(".index.json")]
    templates = (folder / "additional_chat_templates").glob("*.jinja")
    found = sorted(f for f in (*own, *templates) if not f.stem.lower().startswith("readme"))
    home = folder.resolve()
    homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    for file in found:  # a link may lead to another file of the checkpoint, or into the hub's own store
        if not any((there := file.resolve()).is_relative_to(place) for place in homes):
            raise MupscaleError(
                f"{file} is a link to {there}, outside the checkpoint, and is not copied. If the file belongs to the "
                "checkpoint, put the file itself there. Otherwise remove the link"
            )
    return found


CARD_FILE = "README.md"
OPTIMIZER_FILE = "optimizer.pt"
_TAG = "mupscale"
_PARTS = {"hidden": "hidden size", "ffn": "feed-forward size", "heads": "attention heads", "kv": "key/value heads"}
_LAYERS = {
    "identity": "new layers stand between or after the trained layers. They write nothing into the residual stream yet "
    "(identity, seed {seed}), so they change nothing at first",
    "stack": "a copy of all layers follows all layers (stacking), which changes the function",
    "interleaved": "copies of each layer follow it (stacking, interleaved), which changes the function",
}
_KINDS = {(True, False): "wider", (False, False): "deeper", (False, True): "a mixture of experts"}
_FRONT = re.compile(r"---\r?\n(.*?)^---\r?\n?", re.S | re.M)
_TRAINING_BEFORE = re.compile(
    r"## Training on\n\n`mupscale\.json` knows .*?in the Trainer:\s+the plain norm depends on the width\.\n", re.S
)
_TASKS = {  # what the hub calls what a model is for, by the ending of the name of its class
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
    "ForCTC": "automatic-speech-recognition",
}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

_TRAINING = """\
## Training on

`mupscale.json` knows by how much each parameter's learning rate, weight decay and eps change{by_rule}. Give it the
values that were right for {right_for}; 1e-4 and 0.1 stand for them here:

```python
import torch, transformers
from mupscale import hf

model = {load}
groups = hf.param_groups("{folder}", model, torch.optim.AdamW, lr=1e-4, groups=hf.decay_groups(model, 0.1))
optimizer = torch.optim.AdamW(groups)
```
{resume}
Clip gradients with `mupscale.clip_grad_norm_(model, 1.0, optimizer)`, or with the callback `hf.Clip` in the Trainer:
the plain norm depends on the width.
"""


_RESUME = """
`optimizer.pt` holds the small model's optimizer, grown as well; this goes on with its groups, rates and state instead.
A schedule is not in it: a Trainer or a new scheduler begins one from the start. Give the Trainer the optimizer
(`optimizers=`): this folder is no checkpoint of its own that `resume_from_checkpoint` could take.

```python
optimizer = hf.resume_optimizer("{folder}", model, torch.optim.AdamW)  # lr=1e-4 for another rate
```
"""


def write_model_card(
    folder: Path,
    name: str,
    source: Source,
    config: Config,
    growths: Sequence[GrowthStep],
    sizes: Mapping[str, tuple[int, int]],
    checked: str,
) -> None:
    """Write README.md into the folder of a checkpoint to be called `name`; the small model's own stands below it.

    growths: what was done to it, in turn. sizes: before and after, by hidden, ffn, heads, kv and layers. checked: what
    a comparison showed, or why there was none. What an earlier growth has said of training on is left out, since that
    model's folder and files are others.
    """
    before, small, record = source.folder / CARD_FILE, "the small model", Record.find(folder)
    fields, body = _read_card(before.read_text(encoding="utf-8", errors="replace") if before.is_file() else "")
    base = _base_model(source)
    resume = _RESUME.format(folder=name) if (folder / OPTIMIZER_FILE).exists() else ""
    if (source.folder / RECORD_FILE).is_file():
        small = "the model that was the first to grow, before this one's small model"
    rule = "" if record is None or record.decay == RuleSet.decay else f" (weight decay by the rule `{record.decay}`)"
    training = _TRAINING.format(folder=name, load=_load(config, name), resume=resume, right_for=small, by_rule=rule)
    text = f"{_story(source, growths, sizes, checked, base)}\n\n{training}"
    text += f"\n# Card of the small model, {_called(source, base)}\n\n{body}\n" if body else ""
    _write_card(folder, name, config, fields | ({"base_model": base} if base else {}), text)


def write_size_card(folder: Path, name: str, config: Config, story: str) -> None:
    """Write README.md into the folder of a finished model of a family: what it is for, its story, how it is loaded."""
    load = f"```python\nimport transformers\n\nmodel = {_load(config, name)}\n```"
    _write_card(folder, name, config, {}, f"{story}\n\n{load}\n")


def _read_card(text: str) -> tuple[dict[str, Any], str]:
    """The fields of a card's header that are true of a grown model, too, and what stands below it.

    model-index goes: its results are the small model's, which the hub would show as this one's. A base model that the
    card names stays, where the small model has no name on the hub.
    """
    front = _FRONT.match(text)
    try:
        fields = yaml.safe_load(front[1]) if front else {}
    except yaml.YAMLError:
        fields = {}
    gone = ("base_model_relation", "model-index")
    fields = {n: v for n, v in fields.items() if n not in gone} if isinstance(fields, dict) else {}
    return fields, _TRAINING_BEFORE.sub("", text[front.end() :] if front else text).strip()


def _write_card(folder: Path, name: str, config: Config, fields: Mapping[str, Any], text: str) -> None:
    """fields: of the header, which gets the library, what the model is for, and a tag of ours."""
    names = (str(name) for name in config.get("architectures") or [])
    task = next((task for name in names for ending, task in _TASKS.items() if name.endswith(ending)), None)
    ours = {"library_name": "transformers", "base_model": None, "pipeline_tag": task, "tags": None}
    tags = fields["tags"] if isinstance(fields.get("tags"), list) else []
    front = {**{n: value for n, value in fields.items() if n not in ours}, **{n: fields.get(n, ours[n]) for n in ours}}
    front["tags"] = [*(tag for tag in tags if tag != _TAG), _TAG]
    header = yaml.safe_dump({n: v for n, v in front.items() if v is not None}, sort_keys=False, allow_unicode=True)
    replace_text(folder / CARD_FILE, f"---\n{header}---\n\n# {name}\n\n{text}")


def sizes_in_words(config: Config) -> dict[str, int]:
    """The sizes of a config's model that can grow, under the names that a reader knows."""
    sizes = {**parts_of(config), "layers": layers_of(config)}
    return {_PARTS.get(part, part): size for part, size in sizes.items() if size is not None}


def _load(config: Config, name: str) -> str:
    """How the model is loaded: by the class that config.json names, where it is transformers' own."""
    named = [str(n) for n in config.get("architectures") or [] if re.fullmatch(r"[A-Za-z]\w*", str(n))]
    if named and not config.get("auto_map"):
        return f'transformers.{named[0]}.from_pretrained("{name}")'
    return f'transformers.AutoModel.from_pretrained("{name}")  # or the class of your task'


def _base_model(source: Source) -> str:
    """The name on the hub that the small model has, if it is known; empty where it is a folder of one's own."""
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/", f"{source.folder.as_posix()}/")
    if cached:
        return f"{cached.group(1)}/{cached.group(2)}"
    name = str(source.config.get("_name_or_path") or "")
    return name if _HUB_NAME.fullmatch(name) else ""


def _called(source: Source, base: str) -> str:
    """The small model's name; of a Trainer's checkpoint-N, with the run's folder."""
    folder = source.folder.absolute()
    name = f"{folder.parent.name}/{folder.name}" if re.fullmatch(r"checkpoint-\d+", folder.name) else folder.name
    return f"[{base}](https://huggingface.co/{base})" if base else f"`{name}`"


def _story(
    source: Source, growths: Sequence[GrowthStep], sizes: Mapping[str, tuple[int, int]], checked: str, base: str
) -> str:
    grown = ", ".join(f"{_PARTS.get(part, part)} {a} → {b}" for part, (a, b) in sizes.items() if a != b)
    kinds = {_KINDS[growth.is_width, growth.experts is not None]: growth for growth in growths}
    lines = [line.strip() for line in (checked[:1].upper() + checked[1:]).splitlines() if line.strip()]
    said = " ".join(line if line.endswith((".", "!", "?")) else f"{line}." for line in lines)
    return (
        f"This is {_called(source, base)} made {' and '.join(kinds)} with mupscale: {grown}. "
        f"{' '.join(map(_how, kinds.values()))} This was written right after it grew, before any training on.\n\n"
        f"**Comparison of the two models.** {said}"
    )


def _how(growth: GrowthStep) -> str:
    """What was done, in a sentence."""
    if growth.experts is not None:
        router = f"drawn, seed {growth.seed}" if growth.experts.router == "drawn" else "zero"
        return (
            f"Experts are copies of the feed-forward layer, or of the experts before, of which {growth.experts.top_k} "
            f"are active for a token (a new router is {router})."
        )
    if growth.layers is not None:
        return f"By depth: {_LAYERS[growth.deepen].format(seed=growth.seed)}."
    if growth.fresh is not None:
        kind = "lossless " if growth.fresh.lossless else ""
        how = f"trained units stayed and new ones were drawn beside them ({kind}fresh units, seed {growth.seed})"
    elif type(growth.grow) is not Copies:
        how = f"new units were made by {word_of_operator(growth.grow)} (seed {growth.seed})"
    elif growth.noise.std:
        how = f"units were copied, and noise was added (level {growth.noise.std}, seed {growth.seed})"
    else:
        how = (
            "units were copied without noise, so it computes what the small model computes, and stays a replica of it "
            "in training"
        )
    return f"By width: {how}."
