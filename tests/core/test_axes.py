"""Copying along width axes, against an index_select reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mupscale import Axis, MupscaleError, expand
from mupscale.core import axes, is_new, places
from mupscale.core.axes import multiplier

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def source_units(n: int, k: int, b: int) -> Tensor:
    """The formula of DESIGN §1: wide unit j is narrow unit (j // (k·b))·b + j % b."""
    return torch.tensor([(j // (k * b)) * b + j % b for j in range(k * n)], dtype=torch.long)


def reference(narrow: Tensor, widths: dict[int, Axis], scale: float = 1.0) -> Tensor:
    wide = narrow if scale == 1 else narrow * scale
    for dim, axis in widths.items():
        units, start = [], 0
        for length, block in axis.sections or ((narrow.shape[dim], axis.block),):
            units.append(start + source_units(length, axis.copies, block))
            start += length
        wide = wide.index_select(dim, torch.cat(units))
    return wide


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and ours.device == theirs.device and torch.equal(ours, theirs)


def strided(shape: tuple[int, ...], dtype: torch.dtype, layout: str, fill: float | None = None) -> Tensor:
    """A tensor of this shape whose memory is contiguous, transposed, or every second entry of a larger one."""
    if layout == "transposed":
        tensor = torch.randn(shape[::-1]).to(dtype).permute(tuple(reversed(range(len(shape)))))
    elif layout == "sliced":
        tensor = torch.randn([2 * n + 1 for n in shape]).to(dtype)[tuple(slice(1, None, 2) for _ in shape)]
    else:
        tensor = torch.randn(shape).to(dtype)
    return tensor if fill is None else tensor.fill_(fill)


@st.composite
def expansions(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[int, Axis]]:
    """A shape of up to four dimensions, any of which grow, in blocks that divide them."""
    shape, widths = [], {}
    for dim in range(draw(st.integers(0, 4))):
        blocks, block = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        shape.append(blocks * block)
        if draw(st.booleans()):
            widths[dim] = Axis(draw(st.integers(1, 4)), block)
    return tuple(shape), widths


@settings(max_examples=60)
@given(
    expansions(),
    st.sampled_from(DTYPES),
    st.sampled_from([1.0, 0.5, 1 / 3]),
    st.sampled_from(["plain", "transposed", "sliced"]),
    st.sampled_from(["plain", "transposed", "sliced"]),
)
def test_expand_is_index_select(
    expansion: tuple[tuple[int, ...], dict[int, Axis]], dtype: torch.dtype, scale: float, ours: str, theirs: str
) -> None:
    shape, widths = expansion
    narrow = strided(shape, dtype, ours)
    before = narrow.clone()
    expected = reference(narrow, widths, scale)
    out = strided(tuple(expected.shape), dtype, theirs, fill=math.nan)
    assert expand(narrow, widths, out, scale) is out
    assert same_bits(out, expected)
    assert same_bits(narrow, before)


@pytest.mark.parametrize("times", [1, 2, 3, 40])
def test_expand_keeps_every_bit_at_scale_one(times: int) -> None:
    """Negative zero, subnormals, infinities and NaN payloads come through as they are."""
    words = torch.tensor([-(2**31), 1, 0x7FC01234, 0x3F800001, -1, 0x7F800000], dtype=torch.int32)
    out = torch.empty(6 * times)
    expand(words.view(torch.float32), {0: Axis(times)}, out)
    assert torch.equal(out.view(torch.int32), words.repeat_interleave(times))


@pytest.mark.parametrize(("dtype", "shift"), [(torch.float64, 8), (torch.float64, 0), (torch.float32, 4)])
def test_expand_writes_where_pairs_are_not_aligned(dtype: torch.dtype, shift: int) -> None:
    """As in a file of safetensors, which begins at any multiple of 8: some x86 CPUs died of it in float64."""
    narrow = torch.randn(64, 32, dtype=dtype)
    memory = bytearray(2 * narrow.numel() * narrow.element_size() + 32)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 16 + shift
    out = torch.frombuffer(memory, dtype=dtype, count=2 * narrow.numel(), offset=start).view(64, 64)
    assert (out.data_ptr() % 16, out.storage_offset()) == (shift, 0)
    assert torch.equal(expand(narrow, {1: Axis(2)}, out=out), narrow.repeat_interleave(2, 1))


def test_expand_writes_nothing_around_a_strided_out() -> None:
    memory = torch.full((8, 9), 7.0)
    narrow = torch.randn(2, 2)
    expand(narrow, {0: Axis(2), 1: Axis(2)}, memory[::2, 1:9:2])
    assert torch.equal(memory[::2, 1:9:2], reference(narrow, {0: Axis(2), 1: Axis(2)}))
    assert (memory[1::2] == 7).all()
    assert (memory[:, ::2] == 7).all()


@pytest.mark.parametrize("shape", [(5, 3), (3, 5, 2), (2, 3, 4, 2)])
def test_expand_in_chunks_is_expand(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are copied some rows at a time; where the rows are cut does not show."""
    narrow = torch.randn(shape)
    for grown in ({0: Axis(2)}, {1: Axis(3)}, {d: Axis(2) for d in range(len(shape))}):
        expected = reference(narrow, grown, 0.25)
        for chunk in (1, 7, 12, 50):
            monkeypatch.setattr(axes, "_CHUNK", chunk)
            assert same_bits(expand(narrow, grown, torch.full_like(expected, math.nan), 0.25), expected)


@pytest.mark.parametrize("inner", [1, 15, 16, 40])
@pytest.mark.parametrize("grown", [(0,), (1,), (0, 1), (0, 1, 2), (0, 2), (0, 1, 2, 3)])
def test_short_and_long_runs_agree(inner: int, grown: tuple[int, ...]) -> None:
    narrow = torch.randn(2, 3, 2, inner)
    widths = {d: Axis(d + 2) for d in grown}
    expected = reference(narrow, widths)
    assert same_bits(expand(narrow, widths, torch.full_like(expected, math.nan)), expected)


def test_sections_of_a_packed_axis_are_expanded_one_by_one() -> None:
    """Fused q|k|v of 4 query heads on 2 key/value heads, head_dim 2: groups of queries stay whole."""
    packed = torch.arange(16)
    axis = Axis(2, sections=((8, 4), (4, 2), (4, 2)))
    query, key, value = packed.split([8, 4, 4])
    expected = [
        *query.view(2, 1, 4).expand(2, 2, 4).reshape(-1),
        *key.view(2, 1, 2).expand(2, 2, 2).reshape(-1),
        *value.view(2, 1, 2).expand(2, 2, 2).reshape(-1),
    ]
    assert axis.source(16).tolist() == [int(unit) for unit in expected]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([{}, {0: Axis(2)}, {2: Axis(3, 2)}, {0: Axis(3), 2: Axis(2)}]),
    st.sampled_from(["plain", "transposed", "sliced"]),
)
def test_sections_are_index_select(parts: list[tuple[int, int]], k: int, more: dict[int, Axis], layout: str) -> None:
    sections = tuple((blocks * block, block) for blocks, block in parts)
    narrow = torch.randn(2, sum(length for length, _ in sections), 4)
    widths = {**more, 1: Axis(k, sections=sections)}
    expected = reference(narrow, widths, 0.5)
    out = strided(tuple(expected.shape), torch.float32, layout, fill=math.nan)
    assert same_bits(expand(narrow, widths, out, 0.5), expected)


def test_integers_and_booleans_are_copied() -> None:
    """Buffers need not be floating-point."""
    mask = torch.tensor([True, False])
    assert expand(mask, {0: Axis(2)}, torch.empty(4, dtype=torch.bool)).tolist() == [True, True, False, False]


def test_meta_tensors_keep_their_device() -> None:
    out = expand(torch.empty(2, 3, device="meta"), {0: Axis(2)}, torch.empty(4, 3, device="meta"), 0.5)
    assert out.is_meta


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4))
def test_product_of_axes_is_expanding_twice(first: int, second: int, block: int, blocks: int) -> None:
    n = blocks * block
    once, twice = Axis(first, block), Axis(second, block)
    narrow = torch.randn(n, 2)
    middle = expand(narrow, {0: once}, torch.empty(n * first, 2))
    expected = expand(middle, {0: twice}, torch.empty(n * first * second, 2))
    assert (once * twice).times == first * second
    assert same_bits(expand(narrow, {0: once * twice}, torch.empty_like(expected)), expected)


def test_product_of_packed_axes_is_expanding_twice() -> None:
    """The second axis starts where the first ends: its sections are the first one's, grown."""
    once, twice = Axis(2, sections=((8, 4), (4, 2))), Axis(3, sections=((16, 4), (8, 2)))
    narrow = torch.randn(12)
    middle = expand(narrow, {0: once}, torch.empty(24))
    expected = expand(middle, {0: twice}, torch.empty(72))
    assert once * twice == Axis(6, sections=((8, 4), (4, 2)))
    assert same_bits(expand(narrow, {0: once * twice}, torch.empty(72)), expected)


def test_product_with_an_axis_that_does_not_grow_is_the_other() -> None:
    packed = Axis(3, sections=((8, 4), (4, 2)))
    assert Axis(1) * Axis(3, 4) == Axis(3, 4) == Axis(3, 4) * Axis(1)
    assert Axis() * packed == packed == packed * Axis()


def test_product_with_a_real_multiplier_is_exact() -> None:
    assert Axis(Fraction(3, 2)) * Axis(2) == Axis(3)
    assert (Axis(Fraction(1, 3)) * Axis(2)).times == Fraction(2, 3)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Axis(2, 2), Axis(2, 4)),
        (Axis(2, 2), Axis(2, sections=((8, 4),))),
        (Axis(2, sections=((8, 4), (4, 2))), Axis(2, sections=((8, 4), (4, 2)))),
    ],
)
def test_axes_that_no_axis_equals_do_not_compose(first: Axis, second: Axis) -> None:
    with pytest.raises(MupscaleError, match=r"do not compose. Widen in one step"):
        first * second


@pytest.mark.parametrize(
    ("narrow", "wide", "expected"), [(4, 8, 2), (4, 6, Fraction(3, 2)), (4, 2, Fraction(1, 2)), (4, 4, 1), (0, 0, 1)]
)
def test_multiplier_is_exact(narrow: int, wide: int, expected: int | Fraction) -> None:
    found = multiplier(narrow, wide)
    assert found == expected
    assert isinstance(found, type(expected))


@pytest.mark.parametrize(
    ("widths", "shape"),
    [
        ({0: Axis(2)}, (4, 4)),
        ({0: Axis(2)}, (8, 8)),
        ({0: Axis(2)}, (8, 4, 1)),
        ({0: Axis(2), 1: Axis(3)}, (8, 8)),
        ({}, (8, 4)),
        ({0: Axis(2, sections=((2, 1), (2, 1)))}, (9, 4)),
        ({0: Axis(2, sections=((2, 1), (2, 1)))}, (7, 4)),
    ],
)
def test_an_out_of_another_shape_is_refused_and_not_touched(widths: dict[int, Axis], shape: tuple[int, ...]) -> None:
    out = torch.full(shape, 7.0)
    with pytest.raises(MupscaleError, match=r"shape \(4, 4\) widens to \(\d+, \d+\), not to"):
        expand(torch.randn(4, 4), widths, out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("widths", "told"),
    [
        (lambda: {0: Axis(2, 3)}, "axis of 4 units does not divide into blocks of 3"),
        (lambda: {0: Axis(2, 0)}, "a block has at least one unit"),
        (lambda: {0: Axis(2, sections=((4, 2), (4, -1)))}, "a block has at least one unit"),
        (lambda: {0: Axis(2, sections=((4, 0),))}, "a block has at least one unit"),
        (lambda: {0: Axis(2, sections=((2, 1), (1, 1)))}, "do not add up to an axis of 4 units"),
        (lambda: {-1: Axis(2)}, "no dimension -1"),
        (lambda: {1: Axis(2)}, "no dimension 1"),
        (lambda: {0: Axis(Fraction(3, 2))}, r"grows 3/2 times cannot be copied. Choose a whole multiple"),
        (lambda: {0: Axis(1.5)}, r"grows 1\.5 times cannot be copied. Choose a whole multiple"),
    ],
)
def test_what_cannot_be_copied_is_refused(widths: Callable[[], dict[int, Axis]], told: str) -> None:
    with pytest.raises(MupscaleError, match=told):
        expand(torch.randn(4), widths(), torch.empty(8))


@pytest.mark.parametrize("sections", [((4, 1), (2, 0)), ((2, 0), (4, 2)), ((1, 0), (2, 1), (1, 0), (4, 2), (3, 0))])
def test_a_part_with_a_block_of_0_stays(sections: tuple[tuple[int, int], ...]) -> None:
    axis, n = Axis(2, sections=sections), sum(length for length, _ in sections)
    wide = expand(torch.arange(n), {0: axis})
    stays = torch.cat([torch.full((length,), block == 0) for length, block in sections])
    assert len(wide) == axis.wide(n)
    assert torch.equal(wide.bincount(), 2 - stays.long())
    assert torch.equal(wide[places(axis, n)], torch.arange(n))
    assert torch.equal(wide[is_new(axis, n)].unique(), torch.arange(n)[~stays])
    halved = expand(torch.ones(n), {0: axis}, scale=0.5, shared=[0])
    assert torch.equal(halved, torch.where(stays, 1.0, 0.5)[wide])
    again = Axis(3, sections=axis.at(axis.wide(n)).sections)
    assert torch.equal((axis * again).source(n), wide[again.source(len(wide))])
