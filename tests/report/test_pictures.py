"""What the pictures of a study show: loss against cost, training, the gain, tuning, transfer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import comparisons
from comparisons import ALL, comparison, system
from mupscale.plots import DARK_PAPER, PAPER, Gallery, drop_partial_point, figure, find_contrast, set_value_axis, styled
from mupscale.report import pictures, tuning
from mupscale.report.pictures import HALF, NARROW, WIDE, Look, Shape, find_looks
from mupscale.study import CONTENDERS, ContenderRuns, Curve, Sweep, SystemRuns, Tried, contender_named
from mupscale.system import words
from summaries import LRS, NOISES, all_runs, diverged, sweep_1, sweep_2, transfer_check, with_curves

pytest.importorskip("matplotlib")


def axes(draw: Callable[[Any], None]) -> Any:
    """Draws into axes of their own."""
    _, ax = figure()
    draw(ax)
    return ax


# ------------------------------------------------------------------------------------------- loss against cost


def sketched(runs: SystemRuns, shape: Shape = WIDE, answer: dict[str, Any] | None = None) -> tuple[Any, Any, list[Any]]:
    """Figure and axes of the picture, drawn, and its marks."""
    marks = pictures.find_marks(runs, answer or {})
    fig, ax = figure(*shape.size)
    pictures.sketch_system(ax, runs, "held-out loss", shape, marks)
    fig.draw_without_rendering()
    return fig, ax, marks


@pytest.mark.quick("shape5-diverged")
@pytest.mark.parametrize(
    ("shape", "case"),
    [(WIDE, "all"), (WIDE, "the same"), (HALF, "all"), (HALF, "diverged"), (NARROW, "the same"), (NARROW, "diverged")],
)
def test_labels_at_the_ends_do_not_overlap(shape: Shape, case: str) -> None:
    same = dict.fromkeys(ALL, (0.7, 0.6, 0.5))
    runs = {
        "all": lambda: system(names=ALL),
        "the same": lambda: system(names=ALL, finals=same),
        "diverged": lambda: system(names=ALL, seeds=3, lost={"copies": 1, "fresh": 3, "from-scratch": 3}),
    }[case]()
    with styled("test"):
        fig, ax, _ = sketched(runs, shape.with_room_for(len(ALL)))
        boxes = [text.get_window_extent() for text in ax.texts]
        assert len(boxes) == len(runs.contenders)
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        inside, whole = ax.get_window_extent(), fig.bbox
        assert all(box.x0 >= inside.x1 and box.x1 <= whole.x1 + 1 for box in boxes)
        assert all(box.y0 >= inside.y0 - 1 and box.y1 <= inside.y1 + 1 for box in boxes)


def test_lines_are_means_over_seeds_against_charged_costs() -> None:
    runs = system(names=ALL, seeds=5)
    _, ax, _ = sketched(runs)
    drawn = {line.get_color(): line for line in ax.lines if line.get_marker() == "o"}
    assert len(drawn) == len(ALL)
    for one in runs.contenders:
        contender = contender_named(one.name)
        line = drawn[find_looks([one])[one.name].color]
        before = runs.base_cost if contender.from_base else 0.0
        assert list(line.get_xdata()) == [before + point.cost for point in one.points]
        assert list(line.get_ydata()) == [point.mean for point in one.points]
        assert (line.get_linewidth() > 2) == contender.is_usual
    assert len(ax.collections) == len(ALL)
    _, ax, _ = sketched(system(seeds=1))
    assert not ax.collections  # one seed has no band


@pytest.mark.parametrize("shape", [WIDE, NARROW], ids=["wide", "narrow"])
def test_break_even_is_marked_where_lines_cross(shape: Shape) -> None:
    finals = {**comparisons.FINALS, "from-scratch": (0.58, 0.57, 0.545)}
    runs = system(finals=finals)
    answer = comparison(large=runs).answer
    assert {rival: ways["charged"]["kind"] for rival, ways in answer["break_even"].items()} == {
        "continued": "from",
        "from-scratch": "from",
    }
    with styled("test"):
        _, ax, marks = sketched(runs, shape, answer)
        assert sorted(mark.rival for mark in marks) == ["continuing", "starting over"]
        said = [text for text in ax.texts if text.get_text().startswith("break-even")]
        boxes = [text.get_window_extent() for text in said]
        assert len(boxes) == 2
        assert not boxes[0].overlaps(boxes[1])
        inside = ax.get_window_extent()
        lowest = min(ax.transData.transform((1e9, min(p.losses)))[1] for c in runs.contenders for p in c.points)
        for mark, text, box in zip(marks, said, boxes, strict=True):
            assert f"{mark.rival}: {mark.cost / 1e9:.3g} GFLOPs" in text.get_text()
            assert box.x0 >= inside.x0
            assert box.x1 <= inside.x1
            assert inside.y0 <= box.y0
            assert box.y1 < lowest  # below all lines
        ticks = [line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 1.8]
        at = [(ax.transScale + ax.transLimits).transform((mark.cost, mark.loss)) for mark in marks]
        assert [line.get_xdata()[0] for line in ticks] == pytest.approx([x for x, _ in at])
        assert [sum(line.get_ydata()) / 2 for line in ticks] == pytest.approx([y for _, y in at])


def test_a_loss_far_above_the_others_is_cut_off() -> None:
    _, ax, _ = sketched(system(finals={**comparisons.FINALS, "copies": (9.0, 3.0, 0.53)}))
    assert ax.get_yscale() == "linear"
    assert 0.79 < ax.get_ylim()[1] < 1
    _, ax, _ = sketched(system())
    assert ax.get_ylim()[1] > 0.78


def test_what_diverged_has_a_cross_and_no_point() -> None:
    _, ax, _ = sketched(system(seeds=3, lost={"copies": 1}))
    (cross,) = [line for line in ax.lines if line.get_marker() == "x"]
    assert len(cross.get_xdata()) == 2
    (label,) = [text for text in ax.texts if text.get_text() == "diverged: grown from copies"]
    assert label.get_color() == cross.get_color()


def test_colours_can_be_read_on_light_and_dark_pages() -> None:
    strangers = [ContenderRuns(f"at-{part}", 8, 0.1, 0.0, [], f"after {part} %") for part in (10, 25, 50)]
    looks = [*find_looks(strangers).values(), *(Look(one, one.short) for one in CONTENDERS)]
    assert len({look.color for look in looks[:3]}) == 3
    assert [look.short for look in looks[:3]] == ["after 10 %", "after 25 %", "after 50 %"]
    for look in looks:
        assert find_contrast(look.color, PAPER) >= 4.5
        assert find_contrast(look.dark_color, DARK_PAPER) >= 4.5


# ------------------------------------------------------------------------------------------------- training


BASE, WIDE = 1.51113e12, 8.057e8
"""FLOPs of the base model's training, and of a step at the wide width."""


def lines_of(*contenders: ContenderRuns, against: pictures.Against = "step") -> list[pictures.CurveLine]:
    return pictures.collect_lines(whole(contenders), "training", against)


def test_curves_are_means_and_ranges_over_the_seeds_that_finished() -> None:
    upscaled = all_runs()[-1]
    lost = diverged(upscaled).curves[0]
    (line,) = lines_of(replace(upscaled, curves=[lost, *upscaled.curves[1:]]))
    values = [curve.losses[0] for curve in upscaled.curves[1:]]
    assert line.mean[0] == pytest.approx(sum(values) / 2)
    assert (line.low[0], line.high[0]) == (min(values), max(values))
    assert [points.shape for points in line.diverged] == [(2, 6)]  # the last is infinite
    assert line.label == "(e) grown from copies (1 of 3 diverged)"


def test_against_flops_what_starts_from_the_base_model_starts_where_that_ended() -> None:
    by_name = {line.runs.name: line for line in lines_of(*all_runs(), against="flops")}
    base, upscaled, scratch = by_name["base"], by_name["copies"], by_name["from-scratch"]
    assert base.xs[-1] == BASE
    assert upscaled.xs[0] == pytest.approx(BASE + 25 * WIDE)
    assert scratch.xs[0] == pytest.approx(23 * WIDE)


def drawn(system: SystemRuns, what: str = "held-out", answer: dict[str, Any] | None = None) -> Any:
    """Axes with a picture as the report draws it, and its words as their title."""
    found: dict[str, Any] = {}

    class Kept(Gallery):
        def draw(self, name: str, alt: str, caption: str, sketch: Callable[[Any], None], **_: Any) -> Any:
            if name == what:
                found[name] = axes(sketch)
                found[name].set_title(caption)

    list(pictures.draw_loss_curves(system, Kept(Path()), answer or {}))
    return found[what]


def whole(contenders: Sequence[ContenderRuns] = ()) -> SystemRuns:
    return SystemRuns(32, 64, BASE, "FLOPs", list(contenders) or all_runs())


def rising(system: SystemRuns, name: str, last: float) -> SystemRuns:
    """The same, but one model's held-out loss climbs to this value."""

    def climb(curve: Curve) -> Curve:
        first, count = curve.held_out_losses[0], len(curve.held_out_losses)
        return replace(curve, held_out_losses=[first + (last - first) * i / (count - 1) for i in range(count)])

    changed = [replace(r, curves=list(map(climb, r.curves))) if r.name == name else r for r in system.contenders]
    return replace(system, contenders=changed)


@pytest.mark.parametrize("what", ["held-out", "accuracy"])
def test_held_out_scores_are_drawn_against_cost_where_all_costs_are_known(what: str) -> None:
    """Against steps, a small model's many steps leave no room for the comparison."""
    ax = drawn(whole(), what)
    assert ax.get_xlabel() == "training cost, TFLOPs"
    assert ax.get_title() == f"{pictures.AXES[what].capitalize()} against total cost"  # type: ignore[index]
    ends = {line.get_label(): line.get_xdata()[[0, -1]] for line in ax.lines}
    assert 1e12 * ends["(e) grown from copies"] == pytest.approx([BASE + 500 * WIDE, BASE + 3000 * WIDE])
    assert 1e12 * ends["base model, width 32"][-1] == pytest.approx(BASE)
    unknown = [replace(r, cost_per_step=None) if r.name == "continued" else r for r in all_runs()]
    steps = drawn(whole(unknown), what)
    assert steps.get_xlabel() == "steps of its own training"
    assert steps.get_title().endswith("against steps")
    assert len(steps.lines) == len(ax.lines)  # none is left out


def test_a_zoomed_picture_shows_where_every_compared_model_ends() -> None:
    flat = drawn(whole())
    ax = drawn(rising(whole(), "continued", 2.5))
    assert ax.get_yscale() == flat.get_yscale() == "linear"
    assert flat.get_ylim()[1] < 2.5 < ax.get_ylim()[1] < 2.6
    far = drawn(rising(whole(), "continued", 29.0))
    assert far.get_yscale() == "log"
    assert 29 < far.get_ylim()[1] < 48
    assert 1.2 < far.get_ylim()[0] < 1.83
    naive = replace(all_runs()[-1], name="naive-widening")  # there to be worse
    assert drawn(rising(whole([*all_runs(), naive]), "naive-widening", 29.0)).get_ylim() == flat.get_ylim()
    zoomed = drawn(whole(), "training-flops-zoom", {"reference": {"loss": 0.5, "label": "the lowest"}})
    assert zoomed.lines[-1].get_label() == "the lowest"


def test_a_zoomed_axis_ends_where_values_do() -> None:
    assert pictures._with_room(0.01, 0.5, log=False, most=math.inf) == (0.0, pytest.approx(0.5392))
    assert pictures._with_room(-0.01, 0.5, log=False, most=math.inf)[0] < -0.01
    assert pictures._with_room(0.5, 0.99, log=False, most=1.0) == (pytest.approx(0.4608), 1.0)
    assert pictures._with_room(0.01, 1.0, log=True, most=math.inf)[0] > 0


def test_both_of_two_lines_that_coincide_are_seen() -> None:
    """Where the learning rate does not change, (b) is (a)."""
    scratch = all_runs()[1]
    ax = drawn(whole([scratch, replace(scratch, name="from-scratch-changed")]))
    below, above = ax.lines
    assert (below.is_dashed(), above.is_dashed()) == (False, True)
    dashes = contender_named("from-scratch-changed").dashes
    assert isinstance(dashes, tuple)
    _, (on, off) = dashes
    assert off >= on
    assert above.get_color() != below.get_color()


def test_a_last_point_of_few_steps_is_left_out() -> None:
    """It is the mean of fewer losses than the others, and would jump; where a run diverged it is where it ended."""
    curve = [(100.0, 1.0), (200.0, 0.9), (300.0, 0.8)]
    assert drop_partial_point(curve, "finished") == curve
    assert drop_partial_point([*curve, (316, 1.2)], "finished") == curve
    assert drop_partial_point([*curve, (380, 0.7)], "finished") == [*curve, (380, 0.7)]
    assert drop_partial_point([*curve, (316, 1.2)], "diverged") == [*curve, (316, 1.2)]
    assert drop_partial_point(curve[:2], "finished") == curve[:2]
    steps, losses = [100, 200, 300, 316], [1.0, 0.9, 0.8, 4.0]
    both = [Curve(seed, status, steps, losses) for seed, status in enumerate(("finished", "diverged"))]
    (line,) = lines_of(with_curves(all_runs()[0], both))
    assert (line.xs[-1], *line.diverged[0][:, -1]) == (300, 316, 4.0)


def test_a_curve_of_a_million_steps_is_drawn_with_few_points_and_its_extremes() -> None:
    steps = list(range(1, 1_000_001))
    losses = [2.0] * len(steps)
    losses[333_333], losses[777_777] = 77.0, 0.25
    (line,) = lines_of(with_curves(all_runs()[0], [Curve(0, "finished", steps, losses)]))
    assert len(line.xs) <= 300
    assert (max(line.highest), min(line.lowest)) == (77.0, 0.25)
    assert (line.xs[0], line.xs[-1]) == (1, 1_000_000)
    assert line.xs.tolist() == sorted(line.xs)


def test_lines_are_smoothed_and_fainter_extremes_show_what_was_measured() -> None:
    steps = list(range(1, 401))
    losses = [400.0 / step + (step % 2) for step in steps]
    (line,) = lines_of(with_curves(all_runs()[0], [Curve(0, "finished", steps, losses)]))
    assert (line.mean[0], line.mean[-1]) == pytest.approx((losses[0], losses[-1]))  # ends are what they are
    middle = line.mean[len(line.xs) // 2 : -20]
    assert abs(middle[1:] - middle[:-1]).max() < 0.2 < abs(line.highest - line.mean)[len(line.xs) // 2 :].max()


def test_what_has_one_point_is_no_picture() -> None:
    bare = Curve(0, "finished", [10], [2.0], held_out_steps=[10], held_out_losses=[2.0])
    runs = SystemRuns(4, 8, 1.0, "FLOPs", [with_curves(all_runs()[0], [bare])])
    assert list(pictures.draw_loss_curves(runs, Gallery(Path()), {})) == []
    one = Sweep("sweep-1", [Tried(0.1, 0.0, [1.0])])
    assert list(tuning.draw_tuning([one], Gallery(Path()), 0.1)) == []


def test_extremes_of_what_points_are_the_means_of_are_drawn() -> None:
    """Those of a last point that is left out, too: it is the mean of far fewer steps than the others."""
    curves = [
        Curve(0, "finished", [10, 20, 30, 32], [2.0, 1.5, 1.0, 3.0], lowest=[1.9, 0.1, 0.9, 0.8], highest=[2, 9, 2, 5]),
        Curve(1, "finished", [10, 20, 30, 32], [2.2, 1.3, 1.2, 3.0], lowest=[2.1, 1.0, 0.9, 2.0], highest=[3, 2, 2, 4]),
    ]
    (line,) = lines_of(with_curves(all_runs()[0], curves))
    assert (line.xs.tolist(), line.mean) == ([10, 20, 30], pytest.approx([2.1, 1.4, 1.1]))
    assert (line.low.tolist(), line.high.tolist()) == ([2.0, 1.3, 1.0], [2.2, 1.5, 1.2])
    assert (line.lowest.tolist(), line.highest.tolist()) == ([1.9, 0.1, 0.8], [3, 9, 5])
    assert line.has_extremes
    lost = Curve(0, "diverged", [10, 20, 30], [2.0, 1.5, 3.0], lowest=[1.9, 0.1, 2.0], highest=[2.1, 2.0, 77.0])
    (line,) = lines_of(with_curves(all_runs()[0], [lost]))
    assert line.diverged[0].T.tolist() == [[10, 2.0], [20, 0.1], [30, 77.0]]  # its peak is kept


# -------------------------------------------------------------------------------------------------- the gain


GAIN = {"from-scratch": 0.412, "from-scratch-changed": 0.386, "copies-without-noise": 0.421, "copies": 0.351}
GAIN |= {"continued": 0.417, "learning_rate": 0.026, "head_start": -0.035, "noise": 0.070}


def test_waterfall_leads_from_one_loss_to_the_other() -> None:
    ax = axes(lambda ax: pictures._waterfall(ax, GAIN))
    ends = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in ax.patches]
    tops = [(0.412, 0.386), (0.386, 0.421), (0.421, 0.351)]
    assert [tuple(sorted(end)) for end in ends] == [pytest.approx(sorted(pair)) for pair in tops]
    assert [text.get_text() for text in ax.texts] == ["−0.026", "+0.035", "−0.070", "0.412", "0.351"]
    small = {"from-scratch": 0.5, "learning_rate": -8e-5, "head_start": 0.0103, "noise": -0.001}
    assert "learning rate ±0.000, head start −0.010, noise +0.001." in pictures.describe_gain(small)
    assert "noise −0.00008." in pictures.describe_gain({"from-scratch": 0.004, "noise": 8e-5})


@pytest.mark.usefixtures("pictures_without_pixels")
def test_waterfall_goes_on_to_the_upscaled_model_with_its_own_rate(tmp_path: Path) -> None:
    """The verdict is about the better of the two, so the picture has both."""
    given = {**GAIN, "copies-own": 0.29, "from-scratch-own": 0.33}
    ax = axes(lambda ax: pictures._waterfall(ax, given))
    assert [text.get_text() for text in ax.texts][-3:] == ["0.412", "0.351", "0.290"]
    assert [label.get_text() for label in ax.get_xticklabels()][-2:] == ["upscaled", "upscaled\n(e′)"]
    assert ax.get_ylim()[0] < 0.29
    (picture,) = pictures.draw_gain(given, Gallery(tmp_path))
    assert "Grown from copies, own lr: 0.290." in picture.alt
    assert "and to that grown from copies, own lr" in picture.caption


@pytest.mark.usefixtures("pictures_without_pixels")
def test_waterfall_shows_the_best_of_the_alternatives_without_a_bar(tmp_path: Path) -> None:
    """It is what widening has to beat, and the others would hide it."""
    both = {**GAIN, "continued": 0.417, "continued-own": 0.34}
    for given, value, label in (
        (both, 0.34, "continued, own lr"),
        ({**both, "continued-own": None}, 0.417, "continued"),
        ({**both, "from-scratch-own": 0.33}, 0.33, "from scratch, own lr"),
        ({**both, "continued-late": 0.3}, 0.3, "continued, own lr late"),
    ):
        ax = axes(lambda ax, given=given: pictures._waterfall(ax, given))  # type: ignore[misc]
        (line,) = [line for line in ax.lines if not str(line.get_label()).startswith("_")]
        assert (line.get_ydata()[0], line.get_label()) == (value, label)
        assert ax.get_ylim()[0] < value
    (picture,) = pictures.draw_gain(both, Gallery(tmp_path))
    assert picture.alt.endswith(" Continued, own lr: 0.340.")
    assert picture.caption.endswith("; the line: continued, own lr")
    assert list(pictures.draw_gain({"from-scratch": 0.5}, Gallery(tmp_path))) == []
    low = axes(lambda ax: pictures._waterfall(ax, {"from-scratch": 0.045, "copies": 0.015, "continued": 0.001}))
    assert low.get_ylim()[0] == 0  # no loss is below


# -------------------------------------------------------------------------------------------------- tuning


def test_heat_map_stars_the_optimum_and_leaves_diverged_cells_empty() -> None:
    from matplotlib.colors import to_hex

    sweep = sweep_2()
    ax = axes(lambda ax: tuning.sketch_heat_map(ax, sweep, 0.016))
    star = next(line for line in ax.lines if line.get_label() == "optimum")
    assert (star.get_xdata()[0], round(star.get_ydata()[0])) == (LRS.index(0.004), NOISES.index(1.0))
    cells = {(round(p.get_x() + 0.5), round(p.get_y() + 0.5)): p for p in ax.patches}
    crosses = {
        (line.get_xdata()[0], line.get_ydata()[0])
        for line in ax.lines
        if line.get_marker() == "x" and len(line.get_xdata())
    }
    states: dict[str, set[tuple[int, int]]] = {"finished": set(), "stopped": set(), "diverged": set()}
    for trial in sweep.trials:
        states[trial.status].add((LRS.index(trial.lr), NOISES.index(trial.noise)))
    assert crosses == states["diverged"]
    assert set(cells) == states["finished"] | states["stopped"]
    assert {at for at, cell in cells.items() if cell.get_hatch()} == states["stopped"]
    worst = max((t for t in sweep.trials if t.loss is not None), key=lambda t: t.loss or 0)
    assert to_hex(cells[2, 3].get_facecolor()) == "#fde725"  # viridis at its bright end
    assert to_hex(cells[LRS.index(worst.lr), NOISES.index(worst.noise)].get_facecolor()) == "#440154"
    assert len(ax.texts) == len(states["finished"])
    assert [label.get_text() for label in ax.get_xticklabels()][:2] == ["0.001\n÷16", "0.002\n÷8"]
    assert ax.figure.legends[0].get_texts()[-1].get_text() == "stopped early, far behind"


@pytest.mark.quick("4.324-0.02")
@pytest.mark.parametrize(("first", "apart"), [(4.324, 0.02), (0.1, 0.013), (2.3, 1e-4), (0.4, 0.0), (7000.0, 90.0)])
def test_numbers_beside_the_colours_are_distinct_and_even(first: float, apart: float) -> None:
    sweep = sweep_2()
    done = [trial for trial in sweep.trials if trial.loss is not None]
    trials = [replace(trial, losses=[first + apart * number / 4]) for number, trial in enumerate(done)]
    ax = axes(lambda ax: tuning.sketch_heat_map(ax, replace(sweep, trials=trials), 0.016))
    bar = ax.figure.axes[-1]
    ax.figure.canvas.draw()
    texts = [label.get_text() for label in bar.get_yticklabels()]
    if not apart:
        assert texts == ["0.400"]
        return
    values = [float(text.replace(",", "")) for text in texts]
    gaps = [b - a for a, b in itertools.pairwise(values)]
    assert len(texts) > 3
    assert len({len(text.partition(".")[2]) for text in texts}) == 1
    assert gaps == pytest.approx([gaps[0]] * len(gaps), rel=0.01)


def test_rates_of_several_searches_share_a_picture() -> None:
    searches = [comparisons.tuned(name) for name in ("base", "continued", "copies", "fresh")]
    looks = find_looks(searches)
    ax = axes(lambda ax: tuning.sketch_rates(ax, searches, looks))
    rings = [line for line in ax.lines if line.get_markersize() == 9]
    assert [list(ring.get_xdata()) for ring in rings] == [[0.008]] * 4
    crosses = [line for line in ax.lines if line.get_marker() == "x"]
    assert len({float(cross.get_ydata()[0]) for cross in crosses}) == len(crosses) == 4
    assert [text.get_text() for text in ax.texts] == [
        "base model",
        "continued",
        "grown\nfrom copies",
        "grown\nwith fresh units",
    ]
    alone = axes(lambda ax: tuning.sketch_rates(ax, [sweep_1()], find_looks([sweep_1()])))
    assert len(alone.collections) == 1  # the band of its seeds
    assert not alone.texts


def test_the_cross_of_a_trial_that_diverged_lies_where_it_ended() -> None:
    points = [(100, 1.0), (200, 0.9), (300, 0.8), (316, 4.0)]
    trials = [Tried(0.1, 0.0, [None], curve=points), Tried(0.1, 1.0, [0.8], curve=points)]
    ax = axes(lambda ax: tuning.sketch_by_noise(ax, trials, Sweep("sweep-2", trials)))
    assert [line.get_xdata()[-1] for line in ax.lines] == [316, 316, 300]
    assert ax.lines[1].get_marker() == "x"


@pytest.mark.parametrize(("highest", "scale"), [(0.2, "linear"), (4.0, "log")])
def test_losses_that_lie_far_apart_get_a_logarithmic_axis(highest: float, scale: str) -> None:
    """Else the best curves, which are what the picture is for, lie on top of each other."""
    trials = [
        Tried(0.1, noise, [top / 2], curve=[(500 * k, top / (1 + k / 40)) for k in range(1, 41)])
        for noise, top in ((0.0, 0.2), (1.0, 0.1), (8.0, highest))
    ]
    ax = axes(lambda ax: tuning.sketch_by_noise(ax, trials, Sweep("sweep-2", trials)))
    assert ax.get_yscale() == scale
    shown = [tick for tick in ax.get_xticks() if 0 <= tick <= 20_000]
    assert 3 <= len(shown) <= 6


def test_curves_by_noise_are_those_of_the_best_learning_rate() -> None:
    sweep = sweep_2()
    chosen = tuning.list_by_noise(sweep)
    assert {trial.lr for trial in chosen} == {0.004}
    ax = axes(lambda ax: tuning.sketch_by_noise(ax, chosen, sweep))
    assert [line.get_linestyle() for line in ax.lines] == ["--", "-", "-", "-", "-", "-"]
    assert len({line.get_color() for line in ax.lines}) == len(ax.lines)
    assert [label.get_text() for label in ax.figure.axes[-1].get_yticklabels()] == ["0.1", "0.3", "1", "3", "10"]
    without = [trial for trial in sweep.trials if trial.noise == 0]
    assert tuning.list_by_noise(replace(sweep, trials=without)) == []


# ------------------------------------------------------------------------------------------------- transfer


@pytest.mark.slow
def test_transfer_panels_mark_each_width_s_optimum(tmp_path: Path) -> None:
    values = transfer_check()
    ax = axes(lambda ax: tuning._panel(ax, values, "noise"))
    stars = [line for line in ax.lines if line.get_marker() == "*"]
    assert [star.get_xdata()[0] for star in stars] == [1.0] * 4
    assert len(ax.collections) == 4  # bands
    assert tuning.save_transfer_picture(values, tmp_path / "new") == tmp_path / "new" / "transfer-check.png"
    assert (tmp_path / "new" / "transfer-check.svg").exists()
    assert tuning.save_transfer_picture(values, tmp_path / "t.svg").read_text().startswith("<?xml")


@pytest.mark.usefixtures("pictures_without_pixels")
def test_transfer_panels_mark_what_diverged(tmp_path: Path) -> None:
    """Else a value that diverged looks like one that was not tried."""
    values = transfer_check()
    for number, line in enumerate(values["lr"]):
        line["points"][-1]["losses"] = [None, None, None]
        if number in (1, 3):
            line["points"][-2]["losses"] = [None, None, None]
    values["lr"][2]["points"][2]["losses"][0] = None  # a seed of the best value
    ax = axes(lambda ax: tuning._panel(ax, values, "lr"))
    crosses = [line for line in ax.lines if line.get_marker() == "x" and len(line.get_xdata())]
    marks = [(x, y) for line in crosses for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]
    assert sorted(x for x, _ in marks) == [0.004, 0.016, 0.016, 0.032, 0.032, 0.032, 0.032]
    assert len(set(marks)) == 7  # none above another
    assert len({line.get_color() for line in crosses}) == 4
    assert min(y for _, y in marks) > 0.75
    drawn = max(line.get_ydata().max() for line in ax.lines if line.get_marker() == "o")
    bottom, top = ax.get_ylim()
    assert (drawn - bottom) / (top - bottom) < min(y for _, y in marks)  # the curves stay below
    assert ax.get_xlim()[1] > 0.032
    stars = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "*"]
    assert (stars[0], stars[2] != 0.004) == (0.004, True)  # as the check itself sees it
    alts = {picture.name: picture.alt for picture in tuning.draw_transfer(values, Gallery(tmp_path))}
    assert "Diverged: 0.032 at width 128, 0.016 and 0.032 at width 256, 0.004 and 0.032" in alts["transfer-lr"]
    assert "Diverged" not in alts["transfer-noise"]
    tuning._legend(ax.figure)
    assert [text.get_text() for text in ax.figure.legends[0].get_texts()][-2:] == ["1,024", "diverged"]


@pytest.mark.usefixtures("pictures_without_pixels")
def test_transfer_check_where_all_seeds_of_a_point_diverged(tmp_path: Path) -> None:
    values = transfer_check()
    for point in (*values["lr"][0]["points"], *values["noise"][0]["points"]):
        point["losses"] = [None, None, None]
    lost = [{**values["noise"][0]}]
    (alone,) = [p for p in tuning.draw_transfer({**values, "noise": lost}, Gallery(tmp_path)) if "noise" in p.name]
    assert alone.alt.endswith("Diverged: 0 and 0.1 and 0.3 and 1 and 3 and 10 at width 128.")
    values["noise"] = []
    assert tuning.save_transfer_picture(values, tmp_path / "t.png").exists()
    assert [picture.name for picture in tuning.draw_transfer(values, Gallery(tmp_path))] == ["transfer-lr"]


@pytest.mark.parametrize(
    ("xs", "all_fit"),
    [
        ([0, 0.125, 0.25, 0.5, 1, 1.5, 2, 3], True),
        ([0.001 * 1.5**k for k in range(20)], False),
        ([0.1, 0.101, 0.102, 0.8], False),
        ([0.5], True),
    ],
)
def test_values_along_the_axis_are_labelled_where_there_is_room(xs: list[float], all_fit: bool) -> None:
    fig, (ax, _) = figure(9.2, 3.8, columns=2)
    ax.plot(xs, [1.0 + x for x in xs])
    set_value_axis(ax, xs)
    fig.canvas.draw()
    assert list(ax.get_xticks()) == xs
    labels = [label for label in ax.get_xticklabels() if label.get_text()]
    assert (len(labels) == len(xs)) == all_fit
    assert [labels[0].get_text(), labels[-1].get_text()] == [words.format_setting(xs[0]), words.format_setting(xs[-1])]
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
