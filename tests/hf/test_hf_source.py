"""Checkpoints as they are found: headers, shards and their index, torch files, and all that can be wrong with them."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import mupscale as mu
from hf_files import llama_config, llama_tensors, write_checkpoint, write_index, write_llama
from mupscale import MupscaleError, hf
from mupscale.cli import main
from mupscale.hf import inspect, upscale, verify
from mupscale.hf.building import quiet_transformers
from mupscale.hf.source import DTYPES, Source, StoredTensor, open_source, read_header
from mupscale.system import make_header, raw_bytes
from mupscale.train import read_snapshot
from refusals import refuses


def read(stored: StoredTensor) -> Tensor:
    """A tensor from where it is said to lie."""
    with open(stored.file, "rb") as file:
        file.seek(stored.start)
        return torch.frombuffer(bytearray(file.read(stored.bytes)), dtype=stored.dtype).view(stored.shape)


def assert_holds(source: Source, tensors: dict[str, Tensor]) -> None:
    assert source.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert source.tensors[name].dtype == tensor.dtype
        assert torch.equal(read(source.tensors[name]), tensor)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_a_header_says_where_tensors_lie(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.randn(3, 5).to(dtype), "b": torch.ones(7).to(dtype), "c": torch.tensor(2).to(dtype)}
    tensors["empty"] = torch.empty(0, 4).to(dtype)
    save_file(tensors, tmp_path / "x.safetensors")
    found = read_header(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert found["c"].shape == ()
    assert all(torch.equal(read(found[n]), t) for n, t in tensors.items() if t.numel())


def test_a_written_header_is_read_by_safetensors_itself(tmp_path: Path) -> None:
    tensors = {"ä": torch.randn(3, 5), "b": torch.arange(4).bfloat16(), "c": torch.tensor(2)}
    first, starts = make_header({name: (t.dtype, t.shape) for name, t in tensors.items()}, {"format": "pt"})
    assert len(first) % 8 == 0
    (tmp_path / "x.safetensors").write_bytes(first + b"".join(raw_bytes(t) for t in tensors.values()))
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], t) for name, t in tensors.items())
    assert {name: stored.start for name, stored in read_header(tmp_path / "x.safetensors").items()} == starts


def with_header(content: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: int, stop: int, dtype: str = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


BROKEN = {  # safetensors itself looks at headers; that it does so is shown by a few
    "empty": (b"", "header too small"),
    "huge header": (with_header({}, length=1 << 62), "header too large"),
    "deep JSON": (with_header(b"[" * 100_000), "invalid JSON"),
    "negative shape": (with_header({"a": entry(0, 4, shape=(-1, -1))}, b"1234"), "expected usize"),
    "wrong size": (with_header({"a": entry(0, 4, shape=(2,))}, b"1234"), "invalid shape, data type, or offset"),
    "overlap": (with_header({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"), "invalid offset for tensor `b`"),
    "hole": (with_header({"a": entry(0, 4), "b": entry(8, 12)}, b"1" * 12), "invalid offset for tensor `b`"),
    "truncated": (with_header({"a": entry(0, 4)}, b"123"), "file not fully covered.. Download or copy it again"),
    "too long": (with_header({"a": entry(0, 4)}, b"12345"), "file not fully covered"),
    "8-bit floats": (with_header({"a": entry(0, 1, "F8_E4M3")}, b"1"), "dtype F8_E4M3, as in a quantised"),
    "8-bit integers": (with_header({"a": entry(0, 1, "I8")}, b"1"), "dtype I8, as in a quantised"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_in_a_sentence(tmp_path: Path, kind: str) -> None:
    content, message = BROKEN[kind]
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    (tmp_path / "model.safetensors").write_bytes(content)
    error = refuses(message, open_source, tmp_path)
    assert "\n" not in error


@pytest.mark.parametrize("read_it", [read_header, mu.load, read_snapshot], ids=["folder", "checkpoint", "weights"])
def test_a_header_larger_than_any_checkpoints(tmp_path: Path, read_it: Callable[[Path], object]) -> None:
    """Every tensor in it takes time, and every byte 15 of memory: neither is spent on what no model has."""
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path = tmp_path / "x.safetensors"
    for count, name, said in (
        (100_001, "{}", "has 100,001 tensors, more than the 100,000 that one file may have"),
        (3, "{}" + "x" * (9 << 20), "has [0-9,]{10} bytes, more than the 25,165,824 that one file may have"),
    ):
        header = json.dumps({name.format(number): empty for number in range(count)}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        refuses(f"the header of .*x.safetensors {said}.*save it in shards", read_it, path)


def test_no_header_is_written_that_would_not_be_read() -> None:
    many = {str(number): (torch.float32, (0,)) for number in range(100_001)}
    refuses("100,001 tensors .* could not be read again. Save them in shards", make_header, many, {})


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_is_opened_whole_or_in_shards(tmp_path: Path, shards: int) -> None:
    tensors = write_llama(tmp_path, torch.bfloat16, shards)
    source = open_source(str(tmp_path))
    assert_holds(source, tensors)
    assert source.shapes["model.norm.weight"] == (16,)
    assert sum(one.bytes for one in source.tensors.values()) == 2 * sum(t.numel() for t in tensors.values())
    assert source.model_type == "llama"
    assert open_source(source) is source


def save_bin(tensors: dict[str, Tensor], path: Path, legacy: bool = False) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=not legacy)


@pytest.mark.parametrize("kind", ["zip", "legacy", "transposed"])
def test_a_torch_file_is_read_as_weights_only(tmp_path: Path, kind: str) -> None:
    config = llama_config()
    tensors = {**llama_tensors(config), "half": torch.randn(9)[4:].bfloat16(), "part": torch.randn(20)[7:9]}
    tensors["tied"] = tensors["lm_head.weight"]
    tensors["position_ids"] = torch.arange(5)
    if kind == "transposed":
        tensors["t"] = torch.randn(3, 4).T
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_bin(tensors, tmp_path / "pytorch_model.bin", kind == "legacy")
    source = open_source(tmp_path)
    assert_holds(source, tensors)
    converted = next(iter(source.tensors.values())).file
    assert (converted == tmp_path / "pytorch_model.bin") == (kind == "zip")
    del source
    assert converted.exists() == (kind == "zip")  # what was converted goes with the source


def test_torch_files_in_shards(tmp_path: Path) -> None:
    config = llama_config()
    tensors = llama_tensors(config)
    names = list(tensors)
    files = {n: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, n in enumerate(names)}
    for file in set(files.values()):
        save_bin({n: tensors[n] for n in names if files[n] == file}, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_index(tmp_path, files, "pytorch_model.bin.index.json")
    assert_holds(open_source(tmp_path), tensors)


class Code:
    """What a pickle could run."""

    def __reduce__(self) -> Any:
        return (print, ("ran",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": Code()}, "holds .*print, which is code"),
        ({"a": torch.ones(2), "epoch": 3}, "more than named tensors"),
        ([torch.ones(2)], "more than named tensors"),
        ({"a": torch.ones(2, dtype=torch.int8)}, "'a' .* dtype torch.int8, as in a quantised"),
    ],
)
def test_a_torch_file_that_is_no_state_dict(
    tmp_path: Path, content: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    torch.save(content, tmp_path / "pytorch_model.bin")
    refuses(message, open_source, tmp_path)
    assert "ran" not in capsys.readouterr().out


def test_a_torch_file_that_is_truncated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    torch.save(llama_tensors(llama_config()), tmp_path / "pytorch_model.bin")
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    refuses(r"pytorch_model.bin cannot be loaded as weights only: it is truncated", open_source, tmp_path)


def config_becomes(text: str) -> Callable[[Path], None]:
    return lambda folder: void((folder / "config.json").write_text(text))


def index_becomes(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        weight_map = json.loads(path.read_text())["weight_map"]
        changed = change(weight_map)
        write_index(folder, weight_map if changed is None else changed)

    return apply


def void(_: object) -> None:
    """Nothing."""


FIRST, LAST = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
BAD = {
    "no config": (lambda f: (f / "config.json").unlink(), "there is no config.json in .*: give the folder"),
    "config is no JSON": (config_becomes("{"), "config.json is damaged: Expecting property name"),
    "config is a list": (config_becomes("[]"), "config.json is not a JSON object"),
    "no model_type": (config_becomes('{"hidden_size": 3}'), "names no model_type"),
    "quantised": (
        config_becomes(json.dumps(llama_config(quantization_config={"quant_method": "gptq"}))),
        r"is quantised \(gptq\) and cannot be widened. Use the original",
    ),
    "adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        "LoRA or another PEFT adapter.*merge_and_unload",
    ),
    "no weights": (
        lambda f: [p.unlink() for p in f.iterdir() if p.name != "config.json"],
        "there are no weights in .*: neither model.safetensors",
    ),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), f"holds {FIRST} but no index"),
    "index is no JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "index.json is damaged"),
    "index without a map": (index_becomes(lambda m: []), "no usable weight_map"),
    "index with numbers": (index_becomes(lambda m: {"a": 3}), "no usable weight_map"),
    "missing shard": (lambda f: (f / FIRST).unlink(), f"1 of 3 shards are missing in .*, the first of them {FIRST}"),
    "truncated shard": (
        lambda f: (f / LAST).write_bytes((f / LAST).read_bytes()[:-5]),
        f"{LAST} is not a complete safetensors file",
    ),
    "absent tensor": (index_becomes(lambda m: m.update(ghost=FIRST)), f"places 'ghost' in {FIRST}, which has no such"),
    "tensor not in the index": (
        index_becomes(lambda m: void(m.pop("model.norm.weight"))),
        "holds 'model.norm.weight', which model.safetensors.index.json does not place there",
    ),
    "shard not in the index": (
        lambda f: shutil.copy(f / FIRST, f / "model-00004-of-00004.safetensors"),
        "model-00004-of-00004.safetensors is not in model.safetensors.index.json: remove it",
    ),
    "parent in the index": (
        index_becomes(lambda m: m.update(a="../x.safetensors")),
        "'../x.safetensors', .*not a plain",
    ),
    "absolute path": (index_becomes(lambda m: m.update(a="/etc/passwd")), "'/etc/passwd', .*not a plain name"),
    "backslash": (index_becomes(lambda m: m.update(a="..\\x")), "not a plain name"),
    "folder itself": (index_becomes(lambda m: m.update(a="..")), "not a plain name"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_refused_in_a_sentence(tmp_path: Path, kind: str) -> None:
    change, message = BAD[kind]
    write_llama(tmp_path, shards=3)
    change(tmp_path)
    error = refuses(message, open_source, tmp_path)
    assert "\n" not in error


def test_no_tensors_at_all(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, llama_config(), {})
    refuses("hold no tensors", open_source, tmp_path)


@pytest.mark.parametrize("path", ["./nowhere", "a/b/c", "", "nowhere/"])
def test_no_such_folder(path: str) -> None:
    refuses(f"no folder at {path}.*|there is no config.json in", open_source, path)


def test_a_trainers_folder_in_place_of_its_checkpoint(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x"):
        write_llama(tmp_path / name)
    (tmp_path / "checkpoint-11").mkdir()  # not written yet
    refuses(r"no config.json in .*: give .* of which .*checkpoint-10 is the newest", open_source, tmp_path)


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    write_llama(tmp_path)
    with pytest.raises(MupscaleError, match=r"model.safetensors is a file: give the folder of a Hugging Face"):
        open_source(tmp_path / "model.safetensors")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "no-such-model"])
def test_a_hub_name_without_a_network(hub: Path, name: str) -> None:
    error = refuses(f"no folder '{name}', and it could not be downloaded from the hub", open_source, name)
    assert "\n" not in error


def test_a_hub_name_that_was_downloaded_before(hub: Path) -> None:
    model = hub / "models--owner--tiny"
    tensors = write_llama(model / "blobs")
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in (model / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    assert_holds(open_source("owner/tiny"), tensors)


# --- Checkpoints that somebody prepared to do harm: they are data, whose sizes and links are looked at first.
def checkpoint(folder: Path, without: str = "", **changed: Any) -> Path:
    """A small LLaMA, its config changed afterwards."""
    tensors = {name: tensor for name, tensor in llama_tensors(llama_config()).items() if name != without}
    return write_checkpoint(folder, {**llama_config(), "max_position_embeddings": 64, **changed}, tensors)


SIZES: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 10**9},
    "fewer layers": {"num_hidden_layers": 10**6},
    "vocabulary": {"vocab_size": 10**12},
    "hidden": {"hidden_size": 10**15},
    "heads": {"num_attention_heads": 10**9},
    "labels": {"num_labels": 10**9},
    "positions": {"max_position_embeddings": 10**12},
    "a part": {"text_config": {"num_hidden_layers": 10**9}},
}


@pytest.mark.parametrize("changed", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("command", ["inspect", "upscale", "verify"])
def test_sizes_that_no_tensor_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, changed: dict[str, Any]
) -> None:
    folder = checkpoint(tmp_path / "small", **changed)
    words = {"inspect": [], "upscale": [str(tmp_path / "wide")], "verify": [str(folder)]}[command]
    assert main([command, str(folder), *words]) == 1
    said = capsys.readouterr().err
    assert "do not belong together" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "wide").exists()


@pytest.mark.parametrize(
    ("lost", "changed"),
    [
        ("model.norm.weight", {}),
        ("model.layers.1.mlp.up_proj.weight", {}),
        ("lm_head.weight", {}),
        ("", {"num_hidden_layers": 3}),
    ],
)
def test_missing_tensors_without_verification(tmp_path: Path, lost: str, changed: dict[str, Any]) -> None:
    folder = checkpoint(tmp_path / "small", without=lost, **changed)
    with pytest.raises(MupscaleError, match=f"lacks '{lost or 'model.layers.2'}") as refused:
        hf.upscale(folder, tmp_path / "wide", verify=False, progress=False, exact=True)
    assert "do not belong together" in str(refused.value)
    assert not (tmp_path / "wide").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tie_word_embeddings": True}, "different numbers for .* which are one tensor by config.json"),
        ({"num_hidden_layers": 1}, "is in the files, and by config.json 'model.layers' has 1 layers"),
    ],
)
def test_tensors_that_the_config_does_not_know(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(MupscaleError, match=f"{message}.* do not belong together"):
        hf.upscale(checkpoint(tmp_path / "small", **changed), tmp_path / "wide", progress=False)
    assert not (tmp_path / "wide").exists()


def test_links_that_lead_out_are_not_copied(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    folder = checkpoint(tmp_path / "small")
    (folder / "tokenizer.json").symlink_to(secret)
    with pytest.raises(MupscaleError, match=r"tokenizer\.json is a link to .*secret, outside the checkpoint"):
        hf.upscale(folder, tmp_path / "wide", verify=False, progress=False, exact=True)
    assert not (tmp_path / "wide").exists()
    (folder / "tokenizer.json").unlink()
    (folder / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "chat.jinja").write_text("secret")
    refuses("outside the checkpoint", hf.upscale, folder, tmp_path / "wide", verify=False, progress=False, exact=True)


def test_links_within_the_checkpoint_and_the_hubs_store_are_files(tmp_path: Path) -> None:
    """The hub keeps files as blobs/… and links to them from snapshots/….”"""
    repository = tmp_path / "models--x"
    folder = checkpoint(repository / "snapshots" / "abc")
    (repository / "blobs").mkdir()
    (repository / "blobs" / "123").write_text("{}")
    (folder / "tokenizer.json").symlink_to("../../blobs/123")
    (folder / "merges.txt").symlink_to("tokenizer.json")
    hf.upscale(folder, tmp_path / "wide", verify=False, progress=False, exact=True)
    assert (tmp_path / "wide" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "wide" / "merges.txt").is_symlink()


@pytest.mark.quick("GPT2LMHeadModel")
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_a_text_without_a_tokenizer_to_read_it(kind: str, tmp_path: Path) -> None:
    """transformers makes one of special tokens alone, to which a text is nothing, or unknown words."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 120}
    if kind.startswith("GPT2"):
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 120}
    model = getattr(transformers, kind)
    model(model.config_class(**sizes)).save_pretrained(tmp_path / "small")
    hf.upscale(tmp_path / "small", tmp_path / "wide", verify=False, progress=False, exact=True)
    (tmp_path / "text").write_text("to be or not to be")
    with pytest.raises(MupscaleError, match=r"small has no tokenizer that .*: put its files there"):
        hf.verify(tmp_path / "small", tmp_path / "wide", text=tmp_path / "text")


def test_a_tokenizer_of_code_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, wide, text = checkpoint(tmp_path / "small"), tmp_path / "wide", tmp_path / "text"
    text.write_text("to be or not to be")
    trace = tmp_path / "ran"
    (folder / "code.py").write_text(f"open({str(trace)!r}, 'w')\n")
    auto = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(auto))
    hf.upscale(folder, wide, verify=False, progress=False, exact=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 10))
    assert main(["verify", str(folder), str(wide), "--text", str(text)]) == 1
    assert "--trust-remote-code" in capsys.readouterr().err
    assert sys.stdin.read() == "y\n" * 10
    assert not trace.exists()


# --- A checkpoint with code of its own: run with the flag alone, and planned by running it.
CONFIGURATION = """
from transformers import PretrainedConfig


class MixerConfig(PretrainedConfig):
    model_type = "my_mixer"

    def __init__(self, hidden_size=8, intermediate_size=12, vocab_size=11, **kwargs):
        self.hidden_size, self.intermediate_size, self.vocab_size = hidden_size, intermediate_size, vocab_size
        super().__init__(**kwargs)
"""

MODELLING = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_mixer import MixerConfig


class MixerForCausalLM(PreTrainedModel):
    config_class = MixerConfig

    def __init__(self, config):
        super().__init__(config)
        n, m = config.hidden_size, config.intermediate_size
        self.words = nn.Parameter(torch.randn(config.vocab_size, n))
        self.up, self.down = nn.Parameter(torch.randn(n, m) / n), nn.Parameter(torch.randn(m, n) / m)
        self.head = nn.Linear(n, config.vocab_size)
        self.post_init()

    def forward(self, input_ids=None, **kwargs):
        x = self.words[input_ids]
        x = x + torch.tanh(x.cumsum(1) @ self.up) @ self.down
        return CausalLMOutput(logits=self.head(x))
"""


@pytest.fixture
def mixer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    paths, modules = list(sys.path), {*sys.modules}
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "configuration_mixer.py").write_text(CONFIGURATION)
    (folder / "modeling_mixer.py").write_text(MODELLING)
    code = {"AutoConfig": "configuration_mixer.MixerConfig", "AutoModelForCausalLM": "modeling_mixer.MixerForCausalLM"}
    config = {"model_type": "my_mixer", "architectures": ["MixerForCausalLM"], "auto_map": code}
    config |= {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 11}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {"words": (11, 8), "up": (8, 12), "down": (12, 8), "head.weight": (11, 8), "head.bias": (11,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    yield folder
    sys.path[:] = paths
    for name in {*sys.modules} - modules:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def test_without_the_flag_it_is_one_sentence(mixer: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = mixer / "modeling_mixer.py"
    code.write_text(f"open({str(marker)!r}, 'w').close()\n{MODELLING}")
    for call in (lambda: upscale(mixer, tmp_path / "wide", exact=True), lambda: inspect(mixer)):
        e = refuses(r"'my_mixer' is the checkpoint's own code .*trust_remote_code=True", call)
        assert "\n" not in e
    assert main(["inspect", str(mixer)]) == 1
    assert not marker.exists(), "code of the checkpoint's own was run"
    assert not (tmp_path / "wide").exists()


def test_with_the_flag_it_is_planned_by_running_and_verified(mixer: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    made = upscale(mixer, wide, times=2, trust_remote_code=True, progress=False, exact=True)
    assert made.comparison.ok
    assert all(row.difference < 1e-6 for row in made.comparison.rows)
    assert {n: tuple(t.shape) for n, t in load_file(wide / "model.safetensors").items()}["up"] == (16, 24)
    assert (wide / "modeling_mixer.py").read_text() == MODELLING
    assert verify(mixer, wide, dtype="float64", train=3, trust_remote_code=True).ok
    refuses("trust_remote_code=True", verify, mixer, wide)
    with quiet_transformers():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(wide, trust_remote_code=True)
    assert loaded.config.hidden_size == 16


@pytest.mark.slow
def test_the_commands_have_the_flag(mixer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = str(tmp_path / "wide")
    assert main(["inspect", str(mixer), "--trust-remote-code"]) == 0
    assert "hidden_size 8 → 16" in capsys.readouterr().out
    assert main(["upscale", str(mixer), wide, "--trust-remote-code"]) == 0
    assert main(["verify", str(mixer), wide, "--trust-remote-code"]) == 0


def test_code_in_another_repository_is_not_fetched(mixer: Path, tmp_path: Path) -> None:
    config = json.loads((mixer / "config.json").read_text())
    config["auto_map"] = {name: f"somebody/else--{path}" for name, path in config["auto_map"].items()}
    (mixer / "config.json").write_text(json.dumps(config))
    refuses("is in a different repository", upscale, mixer, tmp_path / "wide", trust_remote_code=True, exact=True)
