"""The drawing kit: style, numbers in words, pictures as files; it knows no model and no run.

contrast    colours that can be read on a page
end_labels  words at the ends of lines
figures     a figure in the house style, and writing it
gallery     a folder of pictures as PNG and SVG, for light and dark pages
heat_map    numbers over two lists of values
scales      axes for numbers that lie far apart, and room above and below the lines
thinning    lines of very many points
words       numbers as people read them
"""

from mupscale.plots import words
from mupscale.plots.contrast import with_contrast
from mupscale.plots.end_labels import EndLabel, add_end_labels
from mupscale.plots.figures import COLORS, GREY, figure, save_figure
from mupscale.plots.gallery import (
    BAD,
    DARK_PAPER,
    GOOD,
    INK,
    MUTED,
    PAPER,
    Gallery,
    Picture,
    Point,
    add_legend_below,
    drop_partial_point,
    escape_text,
    level_colors,
    recolour_for_dark,
    set_count_axis,
    set_log_axis_if_wide,
    styled,
)
from mupscale.plots.heat_map import STAR, HeatMap, add_color_bar, draw_heat_map, number_colors
from mupscale.plots.scales import add_crosses, round_numbers, set_value_axis
from mupscale.plots.thinning import keep_extremes
from mupscale.plots.words import UNKNOWN

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
    "UNKNOWN",
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
    "words",
]
