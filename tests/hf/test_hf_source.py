"""Checkpoints as they are found: headers, shards and their index, torch files, and all that can be wrong with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_files import llama_config, llama_tensors, write_checkpoint, write_index, write_llama
from mupscale.hf.source import DTYPES, Source, StoredTensor, make_header, open_source, raw_bytes, read_header
from mupscale.system.errors import MupscaleError


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
    first, starts = make_header({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
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
    with pytest.raises(MupscaleError, match=message) as error:
        open_source(tmp_path)
    assert "\n" not in str(error.value)


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
    with pytest.raises(MupscaleError, match=message):
        open_source(tmp_path)
    assert "ran" not in capsys.readouterr().out


def test_a_torch_file_that_is_truncated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    torch.save(llama_tensors(llama_config()), tmp_path / "pytorch_model.bin")
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(MupscaleError, match=r"pytorch_model.bin cannot be loaded as weights only: it is truncated"):
        open_source(tmp_path)


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
    "config is a list": (config_becomes("[]"), "config.json is no JSON object"),
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
    with pytest.raises(MupscaleError, match=message) as error:
        open_source(tmp_path)
    assert "\n" not in str(error.value)


def test_no_tensors_at_all(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, llama_config(), {})
    with pytest.raises(MupscaleError, match="hold no tensors"):
        open_source(tmp_path)


@pytest.mark.parametrize("path", ["./nowhere", "a/b/c", "", "nowhere/"])
def test_no_such_folder(path: str) -> None:
    with pytest.raises(MupscaleError, match=f"no folder at {path}.*|there is no config.json in"):
        open_source(path)


def test_a_trainers_folder_in_place_of_its_checkpoint(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x"):
        write_llama(tmp_path / name)
    (tmp_path / "checkpoint-11").mkdir()  # not written yet
    with pytest.raises(MupscaleError, match=r"no config.json in .*: give .* of which .*checkpoint-10 is the newest"):
        open_source(tmp_path)


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
    with pytest.raises(
        MupscaleError, match=f"no folder '{name}', and it could not be downloaded from the hub"
    ) as error:
        open_source(name)
    assert "\n" not in str(error.value)


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
