"""Which architectures of transformers grow that nobody described: the table in docs/huggingface-tried.md.

    python bench/architectures.py [NAME …] > rows.jsonl      # tries these, or all
    python bench/architectures.py --table rows.jsonl …       # writes the table between its two marks

Each is built small with random weights, trained for two steps, saved, and grown from folder to folder: by copies with
its optimizer (compared in float64: files, outputs, two steps of AdamW, and a step with the optimizer's state), by fresh
units (compared with the new ones silent), and by a layer (compared in outputs).
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mupscale import Fresh, MupscaleError, hf
from mupscale.hf.building import make_batches, quiet_transformers
from mupscale.planning import KeepDouble, tensors_in

PAGE = Path(__file__).parent.parent / "docs" / "huggingface-tried.md"
WAYS = "copies", "optimizer", "fresh", "layers"
MARKS = "<!-- made by bench/architectures.py -->", "<!-- end -->"

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 29}
TEXT = {**SIZES, "max_position_embeddings": 32}
GROUPED = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0}
SEQUENCES = {
    "d_model": 16,
    "vocab_size": 29,
    "max_position_embeddings": 32,
    **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4))},
    **{f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")},
}
IMAGES = {**SIZES, "image_size": 8, "patch_size": 4}
SOUND = {
    **SIZES,
    "num_hidden_layers": 1,
    "conv_dim": (8, 8),
    "conv_kernel": (3, 3),
    "conv_stride": (2, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "biogpt": ("BioGptForCausalLM", {**TEXT, "scale_embedding": False}),
    "bitnet": ("BitNetForCausalLM", GROUPED),
    "ctrl": ("CTRLLMHeadModel", {"n_embd": 16, "dff": 24, "n_layer": 2, "n_head": 4, "vocab_size": 29}),
    "ernie4_5": ("Ernie4_5ForCausalLM", GROUPED),
    "glm": ("GlmForCausalLM", {**GROUPED, "head_dim": 4}),
    "glm4": ("Glm4ForCausalLM", {**GROUPED, "head_dim": 4}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {**TEXT, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "helium": ("HeliumForCausalLM", {**GROUPED, "head_dim": 4}),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", {**GROUPED, "head_dim": 4}),
    "lfm2": ("Lfm2ForCausalLM", {**GROUPED, "layer_types": ["conv", "full_attention"]}),
    "openai-gpt": ("OpenAIGPTLMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 29}),
    "persimmon": ("PersimmonForCausalLM", TEXT),
    "seed_oss": ("SeedOssForCausalLM", {**GROUPED, "head_dim": 4}),
    "phimoe": ("PhimoeForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        {**SIZES, "num_key_value_heads": 1, "lru_width": 16, "attention_window_size": 8, "num_hidden_layers": 3},
    ),
    "gemma4_text": (
        "Gemma4ForCausalLM",
        {**GROUPED, "head_dim": 4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 29},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**GROUPED, "head_dim": 4, "vocab_size": 40},
            "vision_config": {**VISION, "image_size": 8, "patch_size": 2},
            "mm_tokens_per_image": 4,
            "image_token_index": 39,
        },
    ),
    "xlnet": ("XLNetLMHeadModel", {"d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24, "vocab_size": 29}),
    "xlstm": ("xLSTMForCausalLM", {"hidden_size": 16, "num_heads": 4, "num_blocks": 2, "vocab_size": 29}),
    "ernie": ("ErnieForMaskedLM", TEXT),
    "esm": ("EsmForMaskedLM", {**TEXT, "pad_token_id": 0, "mask_token_id": 1}),
    "ibert": ("IBertForMaskedLM", TEXT),
    "mobilebert": ("MobileBertForMaskedLM", {**TEXT, "embedding_size": 8, "intra_bottleneck_size": 8}),
    "rembert": ("RemBertForMaskedLM", {**TEXT, "input_embedding_size": 8, "output_embedding_size": 12}),
    "roformer": ("RoFormerForMaskedLM", TEXT),
    "xlm-roberta-xl": ("XLMRobertaXLForMaskedLM", TEXT),
    "marian": ("MarianMTModel", {**SEQUENCES, "pad_token_id": 0, "decoder_start_token_id": 0}),
    "mbart": ("MBartForConditionalGeneration", SEQUENCES),
    "pegasus": ("PegasusForConditionalGeneration", SEQUENCES),
    "beit": ("BeitForImageClassification", IMAGES),
    "data2vec-vision": ("Data2VecVisionForImageClassification", IMAGES),
    "ijepa": ("IJepaForImageClassification", IMAGES),
    "hubert": ("HubertModel", SOUND),
    "wavlm": ("WavLMModel", SOUND),
}
"""By model_type: the class, and its config. None of them was ever described by hand."""


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """What the models give, in float64."""
    with KeepDouble():
        return [tensor for tensor in tensors_in(model(**batch)) if tensor.is_floating_point()]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    """One, on the first output, which does not grow (or whose mean does not)."""
    outputs(model, batch)[0].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Case:
    """One architecture, saved in a folder with an optimizer."""

    def __init__(self, name: str, folder: Path) -> None:
        kind, fields = MODELS[name]
        cls = getattr(transformers, kind)
        ids = {"bos_token_id": 1, "eos_token_id": 2}
        self.cls, self.small, self.folder = cls, folder / "small", folder
        config = cls.config_class(**({**ids, **fields} if "text_config" not in fields else fields))
        config._attn_implementation = config._experts_implementation = "eager"
        torch.manual_seed(0)
        self.model = cls(config).double().eval()
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(torch.randn_like(p), alpha=0.2)
        self.batch = make_batches(self.model, size=8)[0]
        self.batch = {n: t.double() if t.is_floating_point() else t for n, t in self.batch.items()}
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.1)
        for _ in range(2):
            step(self.model, optimizer, self.batch)
        self.model.save_pretrained(self.small)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    def copies(self) -> str:
        """Exact in files, outputs and training."""
        wide, file = self.folder / "wide", self.folder / "optimizer.pt"
        hf.upscale(self.small, wide, times=2, exact=True, verify=False, progress=False, optimizer=file)
        found = hf.verify(self.small, wide, dtype="float64", train=2)
        if not found.ok:
            raise MupscaleError(str(found))
        return "exact"

    def optimizer_state(self) -> str:
        """A step more of both models, each with its state."""
        folders = self.small, self.folder / "wide"
        if not folders[1].exists():
            raise MupscaleError("as for copies")
        plain: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
        small, wide = (self.cls.from_pretrained(each, **plain).eval() for each in folders)
        resumed = torch.optim.AdamW(small.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.1)
        resumed.load_state_dict(torch.load(self.folder / "optimizer.pt", weights_only=True))
        step(small, resumed, self.batch)
        step(wide, hf.resume_optimizer(folders[1], wide, torch.optim.AdamW), self.batch)
        ours, theirs = (outputs(model, self.batch)[0] for model in (small, wide))
        if ours.shape != theirs.shape:  # hidden units, each twice, in some order
            ours, theirs = ours.sort(-1).values, theirs.sort(-1).values[..., ::2]
        off = float((ours - theirs).abs().max() / ours.abs().max())
        if off > 1e-9:
            raise MupscaleError(f"after a step with the state, outputs differ by {off:.1e}")
        return "exact"

    def fresh(self) -> str:
        """Lossless where that is possible, else with new units that move the outputs."""
        for number, (grow, word) in enumerate(((Fresh(lossless=True), "lossless"), (Fresh(), "yes"))):
            try:
                hf.upscale(self.small, self.folder / f"fresh{number}", times=2, grow=grow, progress=False)
            except MupscaleError:
                if number:
                    raise
            else:
                return word
        raise AssertionError("neither way, and no error")

    def deeper(self) -> str:
        """Twice as many layers, new ones as identities."""
        config = self.model.config.get_text_config(decoder=True)
        hf.upscale(self.small, self.folder / "deep", layers=2 * config.num_hidden_layers, progress=False)
        return "identity"


def tried(attempt: Callable[[], str]) -> tuple[str, str]:
    """The word for the table, and why not."""
    try:
        return attempt(), ""
    except MupscaleError as error:
        return "no", " ".join(str(error).split())
    except Exception as error:  # of transformers, or ours: the table says so
        return "error", f"{type(error).__name__}: {' '.join(str(error).split())}"


def row(name: str) -> dict[str, Any]:
    """One line of the table, and the reasons in full."""
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        try:
            case = Case(name, Path(folder))
        except Exception as error:  # of transformers
            why = f"transformers does not run it ({type(error).__name__}: {' '.join(str(error).split())})"
            return {"name": name, **dict.fromkeys(WAYS, "not tried"), "why": {"all": why}}
        attempts = case.copies, case.optimizer_state, case.fresh, case.deeper
        found = {way: tried(attempt) for way, attempt in zip(WAYS, attempts, strict=True)}
    return {
        "name": name,
        **{way: word for way, (word, _) in found.items()},
        "why": {w: re.sub(rf"{folder}\S*[^\s:]", "the folder", y) for w, (_, y) in found.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """In markdown; of several refusals the first is named, since it is mostly the reason of the others."""
    lines = ["| `model_type` | copies | optimizer | fresh | layers | notes |", "| --- | --- | --- | --- | --- | --- |"]
    for one in sorted(rows, key=lambda one: str(one["name"])):
        whys = [f"{way}: {why}" for way, why in one["why"].items() if why]
        note = re.sub(r"compared difference allowed .*NOT equivalent", "NOT equivalent", whys[0]) if whys else ""
        note = note.replace("|", "/")
        note = note if len(note) < 170 else note[:170].rpartition(" ")[0] + " …"
        lines.append(f"| `{one['name']}` | {' | '.join(one[way] for way in WAYS)} | {note} |")
    return "\n".join(lines)


def main(names: list[str]) -> None:
    """Try them, and print each as it is done; or write the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if names[:1] != ["--table"]:
        for name in names or MODELS:
            print(json.dumps(row(name)), flush=True)
    else:
        rows = [json.loads(line) for file in names[1:] for line in Path(file).read_text().splitlines()]
        before, rest = PAGE.read_text().split(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{table(rows)}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
