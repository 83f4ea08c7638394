"""The drawing kit: style, pictures as files; it knows no model and no run.

gallery     a figure in the house style, colours that can be read; a folder of pictures, for light and dark pages
heat_map    numbers over two lists of values
lines       axes for numbers that lie far apart, words at the ends of lines, lines of very many points
"""

from mupscale.plots.gallery import (
    BAD,
    COLORS,
    DARK_PAPER,
    GOOD,
    GREY,
    INK,
    MUTED,
    PAPER,
    Gallery,
    Picture,
    Point,
    add_legend_below,
    drop_partial_point,
    escape_text,
    figure,
    level_colors,
    recolour_for_dark,
    save_figure,
    set_count_axis,
    set_log_axis_if_wide,
    styled,
    with_contrast,
)
from mupscale.plots.heat_map import STAR, HeatMap, add_color_bar, draw_heat_map, number_colors
from mupscale.plots.lines import EndLabel, add_crosses, add_end_labels, keep_extremes, round_numbers, set_value_axis

__all__ = [
    "BAD",
    "COLORS",
    "DARK_PAPER",
    "GOOD",
    "GREY",
    "INK",
    "MUTED",
    "PAPER",
    "STAR",
    "EndLabel",
    "Gallery",
    "HeatMap",
    "Picture",
    "Point",
    "add_color_bar",
    "add_crosses",
    "add_end_labels",
    "add_legend_below",
    "draw_heat_map",
    "drop_partial_point",
    "escape_text",
    "figure",
    "keep_extremes",
    "level_colors",
    "number_colors",
    "recolour_for_dark",
    "round_numbers",
    "save_figure",
    "set_count_axis",
    "set_log_axis_if_wide",
    "set_value_axis",
    "styled",
    "with_contrast",
]
