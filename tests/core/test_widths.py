"""Widths: one number or several by name, their arithmetic, and what they are called in files and to people."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mupscale.core import Width, WidthLike
from mupscale.core.widths import Size
from mupscale.system import MupscaleError
from refusals import refuses

sizes = st.integers(1, 10_000)
names = st.lists(st.sampled_from(["d_model", "heads", "head_dim", "first"]), min_size=1, unique=True)


@st.composite
def named(draw: st.DrawFn) -> dict[str, int]:
    return {name: draw(sizes) for name in draw(names)}


widths = st.one_of(sizes, named())


@given(widths)
def test_a_width_is_what_it_was_made_from(width: int | dict[str, Size]) -> None:
    made = Width.of(width)
    assert made.plain == width
    assert Width.of(made) == made
    assert made.is_plain == isinstance(width, int)
    assert Width.of(json.loads(json.dumps(made.plain))) == made
    assert made.whole == width


@given(named())
def test_the_order_of_names_does_not_matter(width: dict[str, int]) -> None:
    turned = dict(reversed(width.items()))
    assert Width.of(turned) == Width.of(width)
    assert hash(Width.of(turned)) == hash(Width.of(width))
    assert Width.of(turned).label == "-".join(f"{name}{size}" for name, size in turned.items())


def test_a_plain_width_is_not_a_named_one() -> None:
    assert Width.of(64) != Width.of({"width": 64})
    assert Width.of(64) == Width.of(64.0)
    assert len({Width.of(64), Width.of(64.0), Width.of(128)}) == 2


@given(widths, st.integers(1, 8))
def test_times_and_ratio_are_inverse(width: int | dict[str, Size], factor: int) -> None:
    narrow = Width.of(width)
    wide = narrow.times(factor)
    assert set(wide.ratio_to(narrow).values()) == {factor}
    assert wide.size == factor * narrow.size
    assert narrow.scaled_as(narrow, wide) == wide
    wide.check_multiple_of(narrow, "growth")
    assert narrow.growing(wide) == (list(narrow.sizes) if factor > 1 else [])


@given(sizes, sizes, sizes)
def test_scaling_as_others_do_is_exact(width: int, narrow: int, wide: int) -> None:
    scaled = Width.of(width * narrow).scaled_as(Width.of(narrow), Width.of(wide))
    assert scaled.plain == width * wide
    assert scaled.is_whole


def test_some_sizes_grow() -> None:
    base, wide = Width.of({"first": 8, "second": 8}), Width.of({"first": 32, "second": 8})
    assert wide.ratio_to(base) == {"first": 4, "second": 1}
    assert base.growing(wide) == ["first"]
    assert base.times(3, base.growing(wide)).plain == {"first": 24, "second": 8}
    assert Width.of({"second": 5, "first": 2}).scaled_as(base, wide).plain == {"second": 5, "first": 8}


def test_real_widths() -> None:
    quarter = Width.of(0.25)
    assert quarter.times(2).plain == 0.5
    assert Width.of(1.0).ratio_to(quarter) == {"width": 4.0}
    assert quarter.label == "0.25"
    assert not quarter.is_whole
    with pytest.raises(MupscaleError, match=r"0\.25 is not a whole number of units"):
        _ = quarter.whole
    assert Width.of(3).times(0.5).plain == 1.5


def test_numbers_of_numpy() -> None:
    width = Width.of(np.int64(64))
    assert width == Width.of(64)
    assert width.is_whole
    assert type(width.whole) is int


def test_shown() -> None:
    width = Width.of({"d_model": 4096, "heads": 32})
    assert str(width) == "d_model 4096, heads 32"
    assert width.shown("{:,}".format) == "d_model 4,096, heads 32"
    assert (str(Width.of(512)), Width.of(512).label) == ("512", "512")
    assert width.label == "d_model4096-heads32"
    assert width.size == 4096


@pytest.mark.parametrize("bad", [0, -3, "64", None, {}, {"a": 0}, [64], True, float("nan"), float("inf")])
def test_what_is_no_width(bad: WidthLike) -> None:
    refuses(re.escape(f"base is a positive width or a dict of them, not {bad!r}"), Width.of, bad, "base")
    refuses(re.escape(f"base is {bad}, but widths are positive whole numbers"), Width.of, bad, "base", whole=True)


def test_whole_widths() -> None:
    with pytest.raises(MupscaleError, match=r"the width is 0\.5, but widths are positive whole numbers"):
        Width.of(Width.of(0.5), "the width", whole=True)


def test_forms_that_differ() -> None:
    plain, heads, blocks = Width.of(4), Width.of({"heads": 4}), Width.of({"blocks": 4})
    with pytest.raises(MupscaleError, match="the small width 4 must be of the same form as the recipe's width"):
        plain.check_form(heads, "the small width", "the recipe's width")
    refuses(r"the width .* does not name the same arguments as .*blocks", heads.check_form, blocks)
    refuses("same form", plain.ratio_to, heads)
    refuses("same arguments", heads.scaled_as, blocks, blocks)
    refuses(r"growth: width 4 does not name the same arguments as .*heads", plain.check_multiple_of, heads, "growth")


@pytest.mark.parametrize(("wide", "near"), [(500, "384 or 512"), (64, "128")])
def test_no_multiple(wide: int, near: str) -> None:
    with pytest.raises(MupscaleError, match=f"growth: width {wide} is not a multiple of 128. Choose {near}"):
        Width.of(wide).check_multiple_of(Width.of(128), "growth")
    with pytest.raises(MupscaleError, match=f"growth: heads {wide} is not a multiple of 128"):
        Width.of({"heads": wide}).check_multiple_of(Width.of({"heads": 128}), "growth")
