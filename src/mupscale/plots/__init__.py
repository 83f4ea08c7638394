"""The drawing kit: style, numbers in words, pictures as files; it knows no model and no run."""

from mupscale.plots import words
from mupscale.plots.figures import COLORS, GREY, figure, save
from mupscale.plots.gallery import (
    BAD,
    GOOD,
    INK,
    MUTED,
    PAPER,
    Gallery,
    Picture,
    Point,
    count_along,
    legend_below,
    levels,
    log_if_wide,
    plain,
    styled,
    whole,
)
from mupscale.plots.words import UNKNOWN

__all__ = [
    "BAD",
    "COLORS",
    "GOOD",
    "GREY",
    "INK",
    "MUTED",
    "PAPER",
    "UNKNOWN",
    "Gallery",
    "Picture",
    "Point",
    "count_along",
    "figure",
    "legend_below",
    "levels",
    "log_if_wide",
    "plain",
    "save",
    "styled",
    "whole",
    "words",
]
