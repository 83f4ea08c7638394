"""The pass from file to file: pieces, shards, dtypes and noise; always the same numbers as in memory."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mupscale as mu
from hf_files import llama_config, llama_tensors, read_checkpoint, write_checkpoint
from mupscale import MupscaleError
from mupscale.core import Axis, Constants, Entry, Initial, Plan, expand
from mupscale.hf import stream
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.config_fields import Times
from mupscale.hf.record import GrowthStep, PlannedGrowth, Record
from mupscale.hf.source import open_source
from mupscale.hf.stream import arrange_shards, parse_size, pieces, write_index, write_shards
from refusals import refuses


@st.composite
def grown(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[int, Axis]]:
    """A shape and axes: blocks, packed sections, dimensions that stay."""
    shape, axes = [], {}
    for dim in range(draw(st.integers(1, 3))):
        block = draw(st.integers(1, 3))
        lengths = [block * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
        shape.append(sum(lengths))
        if draw(st.booleans()):
            sections = tuple((n, draw(st.sampled_from([1, block]))) for n in lengths)
            packed = draw(st.booleans())
            axes[dim] = Axis(draw(st.integers(1, 3)), 1 if packed else block, sections if packed else ())
    return tuple(shape), axes


@settings(max_examples=60)
@given(grown(), st.integers(1, 200))
def test_pieces_make_up_the_widened_tensor(of: tuple[tuple[int, ...], dict[int, Axis]], size: int) -> None:
    shape, axes = of
    wide = [n * axes[d].copies if d in axes else n for d, n in enumerate(shape)]
    narrow = torch.arange(math.prod(shape)).view(shape)
    made, read = torch.full([math.prod(wide)], -1), 0
    for piece in pieces(shape, axes, size):
        length = math.prod(piece.shape)
        part = narrow.view(-1)[piece.start : piece.start + length].view(piece.shape)
        target = [n * piece.axes[d].copies if d in piece.axes else n for d, n in enumerate(piece.shape)]
        copied = expand(part, piece.axes, part.new_empty(target)).view(-1)
        for at in piece.at:
            assert (made[at : at + len(copied)] == -1).all()  # every entry is written once
            made[at : at + len(copied)] = copied
        read += length
        row = math.prod(target[1:])
        assert len(copied) <= max(size, row)  # one row at least
    assert read == narrow.numel()  # and read once
    assert torch.equal(made.view(wide), expand(narrow, axes, narrow.new_empty(wide)))


def test_inputs_that_do_not_grow_are_refused() -> None:
    """They are not divided among copies, as the rest of a tensor on disk is."""
    joined = {1: Axis(2, sections=((4, 1), (1, 0)))}
    refuses("which a checkpoint on disk cannot do", lambda: list(pieces((3, 5), joined, 100)))


def test_a_tensor_of_experts_is_cut_within_an_expert() -> None:
    assert max(math.prod(p.shape) for p in pieces((4, 64, 32), {1: Axis(2), 2: Axis(2)}, 512)) == 128


def test_nothing_to_do_for_an_empty_tensor() -> None:
    assert list(pieces((0, 4), {1: Axis(2)}, 10)) == []


def test_blocks_that_do_not_divide() -> None:
    with pytest.raises(MupscaleError, match="6 units does not divide into blocks of 4"):
        list(pieces((6, 2), {0: Axis(2, 4)}, 10))


def run(
    folder: Path,
    tensors: dict[str, Tensor],
    plan: Plan,
    *,
    noise: Any = None,
    seed: int = 0,
    threads: int | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Tensors → file → pass → files → tensors."""
    write_checkpoint(folder / "small", config or {"model_type": "x"}, tensors)
    out = folder / "wide"
    out.mkdir()
    growth = GrowthStep(Times(), mu.Copies(noise or 0.0), seed)
    step = PlannedGrowth(growth, plan, plan, {}, Record({}))
    shards = arrange_shards(open_source(folder / "small"), [step], **options)
    write_shards(shards, out, threads=threads)
    write_index(shards, out)
    return read_checkpoint(out)


LLAMA = llama_config(hidden_size=96, intermediate_size=200, vocab_size=500)
"""Sizes that are no powers of two, and tensors of more than one block of noise."""


def llama_plan(config: dict[str, Any], times: int | str, tensors: dict[str, Tensor]) -> Plan:
    return ConfigFamily(config).plan_files(Times.of(times), {name: tuple(t.shape) for name, t in tensors.items()})


def as_module(tensors: dict[str, Tensor]) -> nn.Module:
    """A module whose parameters have these names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(tensor.clone()))
    return root


def in_memory(tensors: dict[str, Tensor], plan: Plan, noise: Any, seed: int) -> dict[str, Tensor]:
    wide = as_module({n: torch.empty(plan.parameters[n].wide, dtype=t.dtype) for n, t in tensors.items()})
    mu.widen(as_module(tensors), wide, plan)
    mu.perturb(wide, plan, noise, seed)
    return {name: p.detach() for name, p in wide.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


@pytest.mark.quick("dtype0-noise1", "dtype1-noise2")
@pytest.mark.parametrize("noise", [mu.GaussianNoise(0.0), mu.GaussianNoise(0.7), mu.GaussianNoise(0.1, unit="theory")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_file_gets_bit_for_bit_what_memory_gets(tmp_path: Path, noise: mu.GaussianNoise, dtype: torch.dtype) -> None:
    tensors = llama_tensors(LLAMA, dtype)
    plan = llama_plan(LLAMA, "hidden=2,ffn=3,heads=2", tensors)
    assert max(math.prod(e.wide) for e in plan.parameters.values()) > 1 << 16
    made = run(tmp_path, tensors, plan, noise=noise, seed=5)
    assert same(made, in_memory(tensors, plan, noise, 5))
    copied = in_memory(tensors, plan, 0.0, 0)
    assert same(made, copied) == (noise.std == 0.0)


@pytest.mark.quick("2-*", "8-*")
@pytest.mark.parametrize("noise", [pytest.param(None, marks=pytest.mark.slow), mu.GaussianNoise(0.7)])
@pytest.mark.parametrize(
    ("threads", "shard_size", "piece"), [(1, "5GB", 100), (3, "100KB", 1000), (2, 1, 70_001), (8, "300kb", 1 << 22)]
)
def test_the_same_for_any_threads_shards_and_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: Any, threads: int, shard_size: Any, piece: int
) -> None:
    tensors = llama_tensors(LLAMA, torch.bfloat16)
    plan = llama_plan(LLAMA, 2, tensors)
    monkeypatch.setattr("mupscale.growth.draws._BLOCK", 1 << 12)  # of which small pieces draw many in vain
    expected = run(tmp_path / "usual", tensors, plan, noise=noise)
    monkeypatch.setattr(stream, "_PIECE", piece)
    assert same(expected, run(tmp_path, tensors, plan, noise=noise, threads=threads, shard_size=shard_size))


def test_tied_copies_in_a_file_stay_equal(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    tensors = llama_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    made = run(tmp_path, tensors, llama_plan(config, 2, tensors), noise=mu.GaussianNoise(1.0))
    assert torch.equal(made["lm_head.weight"], made["model.embed_tokens.weight"])
    assert made["lm_head.weight"].shape == (11, 32)


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.quick("*source0-*", "noise1-source3-*")
@pytest.mark.parametrize("target", [None, *FLOATS])
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("noise", [None, mu.GaussianNoise(0.5)])
def test_rounded_once_from_whatever_to_whatever(
    tmp_path: Path, source: torch.dtype, target: torch.dtype | None, noise: Any
) -> None:
    config = llama_config()
    tensors = llama_tensors(config, source)
    plan = llama_plan(config, 3, tensors)
    made = run(tmp_path, tensors, plan, noise=noise, dtype=target)
    dtype = target or source
    exact = torch.float64 if source == torch.float64 else torch.float32
    expected = in_memory({n: t.to(exact) for n, t in tensors.items()}, plan, noise or 0.0, 0)
    assert same(made, {n: t.to(dtype) for n, t in expected.items()})


def plan_of(**entries: Entry) -> Plan:
    named = {n: replace(e, names=(n,)) for n, e in entries.items()}
    return Plan(named, initial=dict.fromkeys(named, Initial(0.1)))


def test_packed_sections_three_dimensions_and_an_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_PIECE", 50)
    packed = Axis(2, 1, ((8, 4), (4, 2), (4, 2)))
    plan = plan_of(
        qkv=Entry((16, 6), (32, 12), {0: replace(packed, side="out"), 1: Axis(2, side="in")}),
        conv1d=Entry((6, 16), (12, 32), {0: Axis(2, side="in"), 1: replace(packed, side="out")}),
        experts=Entry((3, 4, 6), (3, 8, 12), {1: Axis(2, side="out"), 2: Axis(2, side="in")}),
        patches=Entry((4, 3, 2, 2), (8, 3, 2, 2), {0: Axis(2, side="out")}),
        gain=Entry((6,), (12,), {0: Axis(2, side="out")}, Constants(fold=0.5, offset=1)),
        scalar=Entry((), ()),
        nothing=Entry((0, 6), (0, 12), {1: Axis(2, side="out")}),
    )
    tensors = {n: torch.randn(e.narrow) for n, e in plan.parameters.items()}
    made = run(tmp_path, tensors, plan, shard_size=500, threads=2)
    for name, entry in plan.parameters.items():
        expected = expand(tensors[name], entry.axes, torch.empty(entry.wide), entry.rule.weight) + entry.shift
        assert torch.equal(made[name], expected), name
    gain = tensors["gain"].repeat_interleave(2)
    assert torch.allclose(made["gain"] + 1, (gain + 1) / 2)
    assert torch.equal(made["qkv"][:8, 0], made["qkv"][:4, 0].repeat(2))  # a block of four, and its copy


def test_integers_pass_through(tmp_path: Path) -> None:
    tensors = {"position_ids": torch.arange(7), "mask": torch.tensor([[True, False]]), "byte": torch.tensor([3]).byte()}
    tensors["weight"] = torch.randn(2, 3)
    entries = {n: Entry(tuple(t.shape), tuple(t.shape)) for n, t in tensors.items()}
    entries["weight"] = Entry((2, 3), (4, 3), {0: Axis(2, side="out")})
    made = run(tmp_path, tensors, plan_of(**entries), dtype=torch.bfloat16, noise=mu.GaussianNoise(1.0))
    assert made["weight"].dtype == torch.bfloat16
    del made["weight"], tensors["weight"]
    assert same(made, tensors)


def test_integers_do_not_grow(tmp_path: Path) -> None:
    plan = plan_of(qweight=Entry((4,), (8,), {0: Axis(2, side="out")}))
    with pytest.raises(MupscaleError, match=r"'qweight' has dtype torch.int32: .*dequantise the model"):
        run(tmp_path, {"qweight": torch.arange(4, dtype=torch.int32)}, plan)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_is_refused(tmp_path: Path, bad: float, dtype: torch.dtype) -> None:
    tensors = llama_tensors(llama_config(), dtype)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = bad
    with pytest.raises(MupscaleError, match=r"'model.layers.1.mlp.up_proj.weight' holds NaN or infinite values. Load"):
        run(tmp_path, tensors, llama_plan(llama_config(), 2, tensors), threads=3)


def test_large_numbers_are_finite(tmp_path: Path) -> None:
    plan = plan_of(w=Entry((4,), (8,), {0: Axis(2, side="out")}))
    made = run(tmp_path, {"w": torch.full((4,), 3e38)}, plan)
    assert torch.equal(made["w"], torch.full((8,), 3e38))


def test_numbers_too_large_for_the_dtype(tmp_path: Path) -> None:
    plan = plan_of(w=Entry((4,), (8,), {0: Axis(2, side="out")}))
    with pytest.raises(MupscaleError, match=r"'w' holds values that are too large for torch.float16"):
        run(tmp_path, {"w": torch.full((4,), 1e5)}, plan, dtype=torch.float16)


def test_another_shape_than_the_config_says(tmp_path: Path) -> None:
    plan = plan_of(w=Entry((4,), (8,), {0: Axis(2, side="out")}))
    with pytest.raises(MupscaleError, match=r"'w' has shape \(5,\) in model.safetensors and \(4,\) by the config"):
        run(tmp_path, {"w": torch.ones(5)}, plan)


def test_shards_and_their_index(tmp_path: Path) -> None:
    tensors = llama_tensors(LLAMA)
    plan = llama_plan(LLAMA, 2, tensors)
    run(tmp_path, tensors, plan, shard_size="400KB")
    out = tmp_path / "wide"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    count = len(files)
    assert files == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert {p.name for p in out.glob("*.safetensors")} == {*files}
    total = sum(math.prod(e.wide) for e in plan.parameters.values())
    assert index["metadata"] == {"total_parameters": total, "total_size": 4 * total}
    assert open_source_like(out, index) == {*tensors}
    for path in out.glob("*.safetensors"):
        held = [n for n, f in index["weight_map"].items() if f == path.name]
        assert path.stat().st_size <= 400_000 + 10_000 or len(held) == 1
    assert 3 < count < len(tensors)


def open_source_like(folder: Path, index: dict[str, Any]) -> set[str]:
    """What our own reader makes of it."""
    (folder / "config.json").write_text('{"model_type": "x"}')
    tensors = open_source(folder).tensors
    assert all(index["weight_map"][name] == stored.file.name for name, stored in tensors.items())
    return {*tensors}


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("1.5 gb", 15 * 10**8), ("2GiB", 2 << 30), (7, 7), ("12", 12)],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5 GBit", "-1", "0", 0, -3, "GB", "5,3GB", True, "nan"])
def test_no_sizes(text: Any) -> None:
    refuses(r"is not a shard size. Write it as 5GB or 500MB", parse_size, text)


def test_a_tensor_that_the_plan_lacks(tmp_path: Path) -> None:
    plan = Plan({"a": Entry((1,), (1,), names=("a", "tied"))})
    tensors = {name: torch.ones(1) for name in ("a", "tied")}
    assert same(run(tmp_path / "tied", tensors, plan), tensors)
    refuses(r"'b.w' is not in the plan", run, tmp_path / "other", {"a": torch.ones(1), "b.w": torch.ones(1)}, plan)
