"""The report: what the page says, what its pictures show, and what it makes of runs that went wrong."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import summaries
from mupscale import MupscaleError
from mupscale.method.contenders import SCRATCH_DROP, UPSCALED, UPSCALED_OWN
from mupscale.method.summary import Curve, Runs, Summary
from mupscale.plots import words
from mupscale.plots.figures import figure
from mupscale.plots.gallery import INK, Gallery, drop_partial_point, recolour_for_dark
from mupscale.report import facts, gain, load_summary, loss_curves, sweeps, transfer
from mupscale.report.writing import write_report
from mupscale.sweep.space import Space, Sweep, Trial
from slow_cases import with_slow
from summaries import LRS, NOISES, diverged, example, sweep_1, sweep_2, transfer_check, write

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the example, transfer check and all."""
    return write_report([write(tmp_path_factory.mktemp("runs") / "run", check=True)])


class Seen(HTMLParser):
    """What a page holds: its text, its pictures, and every address in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.alts: list[str] = []
        self._skip = False
        self.feed(page.read_text(encoding="utf-8"))
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._skip = tag == "style"
        self.addresses += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]
        self.alts += [value or "" for name, value in attrs if name == "alt"]

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self.texts.append(data)


def small(**changes: Any) -> Summary:
    """The example with less to draw."""
    whole = example()
    kept = [runs for runs in whole.runs if runs.name in ("base", "scratch", "upscaled")]
    return replace(whole, **{"runs": kept, "sweeps": [], "coords": None, "gain": {}, **changes})


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (words.format_loss(0.41234), "0.412"),
        (words.format_loss(0.01234), "0.0123"),
        (words.format_loss(4.2e-7), "4.2e-7"),
        (words.format_loss(1234.5), "1,234.5"),
        (words.format_loss(None), "–"),
        (words.format_loss(math.nan), "–"),
        (words.format_loss(math.inf), "∞"),
        (words.format_factor(1.3333), "1.3×"),
        (words.format_factor(23.64), "23.6×"),
        (words.format_factor(1250), "1,250×"),
        (words.format_flops(598e12), "598 TFLOPs"),
        (words.format_flops(37_929_809e12), "37,929,809 TFLOPs"),
        (words.format_flops(8.3e11), "0.83 TFLOPs"),
        (words.format_flops(2e9), "2 GFLOPs"),
        (words.format_setting(0.0040000001), "0.004"),
        (words.format_setting(1e-5), "1e-5"),
        (words.format_duration(0.84), "0.8 s"),
        (words.format_duration(59.7), "1 min"),
        (words.format_duration(123), "2 min 3 s"),
        (words.format_duration(3840), "1 h 4 min"),
        (words.format_duration(3 * 86400 + 7200), "3 d 2 h"),
        (words.format_duration(3599.9), "1 h"),
        (facts.format_width(1024), "1,024"),
        (facts.format_width({"head_dim": 32, "heads": 4}), "head_dim 32, heads 4"),
        (words.format_spread([0.4, 0.5, 0.6]), "0.500 (0.400 to 0.600)"),
        (words.format_spread([0.4]), "0.400"),
        (words.format_spread([]), "–"),
        (words.safe_file_name("../../etc/passwd"), "etc-passwd"),
        (words.safe_file_name("…"), "unnamed"),
    ],
)
def test_numbers_for_people(shown: str, expected: str) -> None:
    assert shown == expected


# ------------------------------------------------------------------------------------------- the page


def test_the_answer_comes_first_then_the_numbers(written: Path) -> None:
    text = Seen(written).text
    wanted = [
        "Growing pays here: it reaches the from-scratch model's lowest loss 3.3× cheaper",
        "Speed-up to the from-scratch model's lowest loss 1.7× base model charged; "
        "3.3× if it is there already, 0.23× with tuning charged, too",
        "Final loss, upscaled 0.357 0.356 to 0.358 over 3 seeds",
        "Chosen noise 1",
        "Chosen learning rate 0.004 after upscaling; 0.016 before",
        "All of this took 5 min 4 s 37.1 TFLOPs",
        "chosen with one seed a trial",
        "final training loss",
        "learning rate −0.026, head start +0.035, noise −0.070",
        "Speed-up with the base model and tuning charged 0.23×",
        "sweep 2 at width 64 → 128 9.6 TFLOPs 1 min 3 s",
        "sweep-2-width-64 32 2 2 0.004 1 0.400",
        "it transfers",
        "Coordinate check",
        "mupscale run recipes/mlp-covtype-tiny.yaml --seeds.init 0",
        "class_path: mupscale.models.MLP",
    ]
    places = [text.find(piece) for piece in wanted]
    assert -1 not in places, wanted[places.index(-1)]
    assert places == sorted(places)


def test_the_page_needs_nothing_else(written: Path) -> None:
    page = written.read_text(encoding="utf-8")
    seen = Seen(written)
    assert len(page) < 3e6
    assert "script" not in seen.tags
    assert len(seen.alts) == 13
    assert all(len(alt) > 20 for alt in seen.alts)
    assert len(seen.addresses) == 26  # light and dark
    for address in seen.addresses:
        head, _, data = address.partition(",")
        assert head == "data:image/svg+xml;base64"
        ElementTree.fromstring(base64.b64decode(data, validate=True))
    assert not re.search(r"url\(|@import|https?:", re.sub(r"base64,[A-Za-z0-9+/=]+", "", page))


def test_pictures_lie_beside_it_as_png_and_svg(written: Path) -> None:
    names = {path.stem for path in written.parent.glob("*.svg")}
    assert names == {path.stem for path in written.parent.glob("*.png")}
    assert {"training-step", "training-flops-zoom", "held-out", "accuracy", "gain", "coordinates"} < names
    assert {"sweep-1-width-64", "sweep-2-width-64", "sweep-2-width-64-by-noise", "transfer-lr"} < names
    for path in written.parent.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    pages = [write_report([write(tmp_path / name, small())]).read_bytes() for name in "ab"]
    assert pages[0] == pages[1]


@pytest.mark.usefixtures("pictures_without_pixels")
def test_texts_from_files_stay_texts(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script> $\\frac$ & "q"'
    runs = [replace(runs, name=evil, label=evil, width={evil: 3}) for runs in example().runs[:2]]
    stage = replace(example().stages[0], name=evil)
    recipe, method = {evil: evil}, {"widths": [evil]}
    more = {"verdict": [evil], "warnings": [evil], "stages": [stage], "sweeps": [sweep_2(name=f"../../{evil}")]}
    folder = write(
        tmp_path / "deep" / "run", small(name=evil, command=evil, recipe=recipe, method=method, runs=runs, **more)
    )
    check = {**transfer_check(), "verdict": [evil]}
    for line in check["lr"]:
        line["width"] = {evil: 4}
    (folder / "transfer-check.json").write_text(json.dumps(check))
    page = write_report([folder])
    seen = Seen(page)
    assert "script" not in seen.tags
    assert "<script" not in page.read_text(encoding="utf-8")
    assert seen.text.count("<script>alert") > 8
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and folder not in path.parents]
    assert outside == []


def test_dark_pictures_have_no_dark_ink(written: Path) -> None:
    svg = (written.parent / "training-step.svg").read_text()
    assert INK in svg
    assert "#ffffff" in svg
    dark = recolour_for_dark(svg)
    assert INK not in dark
    assert "#ffffff" not in dark


# ----------------------------------------------------------------------- runs that are not as they should be


def _no_held_out(summary: Summary) -> Summary:
    bare = {"held_out_steps": [], "held_out_losses": [], "accuracy": []}
    return replace(summary, runs=[replace(r, curves=[replace(c, **bare) for c in r.curves]) for r in summary.runs])


ODD: dict[str, tuple[Callable[[], Summary], list[str], list[str]]] = {
    "everything diverged": (
        lambda: small(
            runs=[diverged(runs) for runs in small().runs],
            sweeps=[sweep_1("diverged"), sweep_2(status="diverged")],
            costs={**example().costs, "upscaled_to_scratch_loss": None, "speedup_base_charged": None},
        ),
        ["lowest loss not reached Final", "Final loss, upscaled diverged", "width 256 (3 of 3 diverged)"],
        ["training-step", "sweep-1-width-64", "sweep-2-width-64"],
    ),
    "one seed": (
        lambda: small(runs=[replace(runs, curves=runs.curves[:1]) for runs in small().runs]),
        ["0.356 one seed"],
        ["training-step", "held-out"],
    ),
    "no sweeps, no costs": (lambda: small(costs={}, stages=[], verdict=[]), ["no verdict"], ["training-step"]),
    "no held-out data": (lambda: _no_held_out(small()), [], ["training-step", "training-flops"]),
    "costs unknown": (
        lambda: small(
            runs=[replace(runs, flops_per_step=None) for runs in small().runs],
            costs=dict.fromkeys(example().costs),
            stages=[replace(stage, flops=None) for stage in example().stages],
        ),
        ["Costs of these models are not known", "Speed-up if the base model is there already unknown"],
        ["training-step", "held-out"],
    ),
    "named widths": (
        lambda: small(runs=[replace(runs, width={"head_dim": 32, "heads": 12}) for runs in small().runs]),
        ["head_dim 32, heads 12"],
        ["training-step"],
    ),
    "random search": (
        lambda: small(sweeps=[sweep_2("random"), sweep_2("tpe")]),
        ["at learning rates near the best"],
        ["sweep-2-width-64", "sweep-2-width-64-2", "sweep-2-width-64-by-noise"],
    ),
    "noise per parameter": (
        lambda: small(
            runs=[replace(runs, noise={"fc.weight": 0.1}) for runs in small().runs],
            choice=replace(example().choice, unit="signal", constants={"fc.weight": 0.1}, plain=(0.005, 0.7)),
        ),
        ["per parameter", "fc.weight 0.1", "plain transfer: 0.7", "plain transfer: 0.005"],
        [],
    ),
    "no runs at all": (lambda: small(runs=[]), ["There are no losses to draw"], []),
    "no numbers": (
        lambda: small(
            runs=[replace(r, curves=[replace(c, losses=[math.nan] * 60) for c in r.curves]) for r in small().runs],
            costs=dict.fromkeys(example().costs, math.nan),
            gain=dict.fromkeys(example().gain, math.nan),
        ),
        ["unknown"],
        ["held-out"],
    ),
}


@pytest.mark.usefixtures("pictures_without_pixels")
@pytest.mark.parametrize("case", with_slow(ODD, list(ODD)[::2]))
def test_odd_runs_give_a_page(case: str, tmp_path: Path) -> None:
    make, said, drawn = ODD[case]
    page = write_report([write(tmp_path / "run", make())])
    text = Seen(page).text
    for piece in said:
        assert piece in text
    names = {path.stem for path in page.parent.glob("*.svg")}
    assert set(drawn) <= names
    if case in ("no held-out data", "costs unknown"):
        assert not names & ({"held-out", "accuracy"} if case == "no held-out data" else {"training-flops"})
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", text)


# ------------------------------------------------------------------------------------------- pictures


def test_curves_are_means_and_ranges_over_the_seeds_that_finished() -> None:
    summary = example()
    upscaled = summary.get("upscaled")
    assert upscaled is not None
    lost = diverged(replace(upscaled, curves=upscaled.curves[:1])).curves[0]
    runs = replace(upscaled, curves=[lost, *upscaled.curves[1:]])
    (line,) = loss_curves.collect_lines(replace(summary, runs=[runs]), "training", "step")
    values = [curve.losses[7] for curve in upscaled.curves[1:]]
    assert line.mean[7] == pytest.approx(sum(values) / 2)
    assert (line.low[7], line.high[7]) == (min(values), max(values))
    assert [len(points) for points in line.diverged] == [6]  # the last is infinite
    assert "(1 of 3 diverged)" in line.label


def test_against_flops_what_starts_from_the_base_model_starts_where_that_ended() -> None:
    summary = replace(example(), costs={})
    by_name = {line.runs.name: line for line in loss_curves.collect_lines(summary, "training", "flops")}
    base, upscaled, scratch = by_name["base"], by_name["upscaled"], by_name["scratch"]
    assert base.xs[-1] == 2000 * 4.0e8
    assert upscaled.xs[0] == pytest.approx(base.xs[-1] + 33 * 1.365e9)
    assert scratch.xs[0] == pytest.approx(43 * 1.365e9)
    charged = loss_curves.collect_lines(replace(summary, costs={"base": 5e12}), "training", "flops")
    assert next(line for line in charged if line.runs.name == "upscaled").xs[0] > 5e12


def rising(summary: Summary, name: str, last: float) -> Summary:
    """The same, but one model's held-out loss climbs to this value."""

    def climb(curve: Curve) -> Curve:
        first, count = curve.held_out_losses[0], len(curve.held_out_losses)
        return replace(curve, held_out_losses=[first + (last - first) * i / (count - 1) for i in range(count)])

    return replace(
        summary,
        runs=[replace(r, curves=[climb(c) for c in r.curves]) if r.name == name else r for r in summary.runs],
    )


def held_out(summary: Summary, what: str = "held-out") -> Any:
    """Axes with the picture as the report draws it, and its words as their title."""
    found: dict[str, Any] = {}

    class Kept(Gallery):
        def draw(self, name: str, alt: str, caption: str, sketch: Callable[[Any], None], **_: Any) -> Any:
            if name == what:
                found[name] = axes(sketch)
                found[name].set_title(caption)

    list(loss_curves.draw_loss_curves(summary, Kept(Path())))
    return found[what]


@pytest.mark.parametrize("what", ["held-out", "accuracy"])
def test_held_out_scores_are_drawn_against_cost_where_all_costs_are_known(what: str) -> None:
    """Against steps, a small model's many steps leave no room for the comparison."""
    summary = example()
    ax = held_out(summary, what)
    assert ax.get_xlabel() == "training cost, TFLOPs"
    assert ax.get_title() == f"{loss_curves._AXIS[what].capitalize()} against total cost"
    ends = {line.get_label(): line.get_xdata()[[0, -1]] for line in ax.lines}
    assert list(ends["(e) upscaled"]) == pytest.approx([0.8 + 0.1 * 2.73, 0.8 + 2.73])
    assert ends["base model"][-1] == pytest.approx(0.8)
    unknown = [replace(r, flops_per_step=None) if r.name == "continued" else r for r in summary.runs]
    steps = held_out(replace(summary, runs=unknown), what)
    assert steps.get_xlabel() == "steps of its own training"
    assert steps.get_title().endswith("against steps")
    assert len(steps.lines) == len(ax.lines)  # none is left out


def test_a_zoomed_picture_shows_where_every_compared_model_ends() -> None:
    flat = held_out(example())
    ax = held_out(rising(example(), "continued", 0.7))
    assert ax.get_yscale() == flat.get_yscale() == "linear"
    assert flat.get_ylim()[1] < 0.7 < ax.get_ylim()[1] < 0.75
    far = held_out(rising(example(), "continued", 9.0))
    assert far.get_yscale() == "log"
    assert 9 < far.get_ylim()[1] < 15
    assert 0.25 < far.get_ylim()[0] < 0.38
    naive = replace(example().runs[-1], name="naive")  # there to be worse
    worse = rising(example(runs=[*example().runs, naive]), "naive", 9.0)
    assert held_out(worse).get_ylim() == flat.get_ylim()


def test_a_zoomed_axis_ends_where_values_do() -> None:
    assert loss_curves._with_room(0.01, 0.5, log=False, most=math.inf) == (0.0, pytest.approx(0.5392))
    assert loss_curves._with_room(-0.01, 0.5, log=False, most=math.inf)[0] < -0.01
    assert loss_curves._with_room(0.5, 0.99, log=False, most=1.0) == (pytest.approx(0.4608), 1.0)
    assert loss_curves._with_room(0.01, 1.0, log=True, most=math.inf)[0] > 0


def test_both_of_two_lines_that_coincide_are_seen() -> None:
    """Where the learning rate does not change, (b) is (a)."""
    summary = example()
    scratch = summary.get("scratch")
    assert scratch is not None
    same = replace(scratch, name="scratch-drop")
    ax = held_out(replace(summary, runs=[scratch, same]))
    below, above = ax.lines
    assert (below.is_dashed(), above.is_dashed()) == (False, True)
    assert isinstance(SCRATCH_DROP.dashes, tuple)
    _, (on, off) = SCRATCH_DROP.dashes
    assert off >= on
    assert above.get_color() != below.get_color()


def test_long_curves_are_thinned_to_their_ends() -> None:
    points = loss_curves._thinned([(step, float(step)) for step in range(10_000)])
    assert len(points) <= 300
    assert (points[0][0], points[-1][0]) == (0, 9999)


def axes(draw: Callable[[Any], None]) -> Any:
    """Draws into axes of their own."""
    _, ax = figure()
    draw(ax)
    return ax


def test_heatmap_stars_the_optimum_and_leaves_diverged_cells_empty() -> None:
    from matplotlib.colors import to_hex

    sweep = sweep_2()
    ax = axes(lambda ax: sweeps.heatmap(ax, sweep, 0.016))
    star = next(line for line in ax.lines if line.get_label() == "optimum")
    assert (star.get_xdata()[0], round(star.get_ydata()[0])) == (LRS.index(0.004), NOISES.index(1.0))
    cells = {(round(p.get_x() + 0.5), round(p.get_y() + 0.5)): p for p in ax.patches}
    crosses = {
        (line.get_xdata()[0], line.get_ydata()[0])
        for line in ax.lines
        if line.get_marker() == "x" and len(line.get_xdata())
    }
    states = {"finished": set(), "pruned": set(), "diverged": set()}  # type: dict[str, set[tuple[int, int]]]
    for trial in sweep.trials:
        states[trial.status].add((LRS.index(trial.lr), NOISES.index(trial.noise)))
    assert crosses == states["diverged"]
    assert set(cells) == states["finished"] | states["pruned"]
    assert {at for at, cell in cells.items() if cell.get_hatch()} == states["pruned"]
    best, worst = cells[2, 3], max((t for t in sweep.trials if t.loss is not None), key=lambda t: t.loss or 0)
    assert to_hex(best.get_facecolor()) == "#fde725"  # viridis at its bright end
    assert to_hex(cells[LRS.index(worst.lr), NOISES.index(worst.noise)].get_facecolor()) == "#440154"
    assert len(ax.texts) == len(states["finished"])
    assert [label.get_text() for label in ax.get_xticklabels()][:2] == ["0.001\n÷16", "0.002\n÷8"]
    assert ax.figure.legends[0].get_texts()[-1].get_text() == "stopped early (pruned)"


@pytest.mark.parametrize(("first", "apart"), [(4.324, 0.02), (0.1, 0.013), (2.3, 1e-4), (0.4, 0.0), (7000.0, 90.0)])
def test_numbers_beside_the_colours_are_distinct_and_even(first: float, apart: float) -> None:
    sweep = sweep_2()
    finished = [trial for trial in sweep.trials if trial.status == "finished"]
    trials = [replace(trial, loss=first + apart * number / 4) for number, trial in enumerate(finished)]
    ax = axes(lambda ax: sweeps.heatmap(ax, replace(sweep, trials=trials), 0.016))
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


def test_waterfall_leads_from_one_loss_to_the_other() -> None:
    ax = axes(lambda ax: gain._waterfall(ax, example().gain))
    ends = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in ax.patches]
    tops = [(0.412, 0.386), (0.386, 0.421), (0.421, 0.351)]
    assert [tuple(sorted(end)) for end in ends] == [pytest.approx(sorted(pair)) for pair in tops]
    assert [text.get_text() for text in ax.texts] == ["−0.026", "+0.035", "−0.070", "0.412", "0.351"]
    assert "learning rate ±0.000, head start −0.010, noise +0.001." in gain.describe_gain(
        small(gain={"scratch": 0.5, "learning_rate": -8e-5, "head_start": 0.0103, "noise": -0.001})
    )
    tiny = small(gain={"scratch": 0.004, "noise": 8e-5})
    assert "noise −0.00008." in gain.describe_gain(tiny)


def test_waterfall_goes_on_to_the_upscaled_model_with_its_own_rate(tmp_path: Path) -> None:
    """The verdict is about the better of the two, so the picture has both."""
    given = {**example().gain, "upscaled_own": 0.29, "scratch_own": 0.33}
    ax = axes(lambda ax: gain._waterfall(ax, given))
    assert [text.get_text() for text in ax.texts][-3:] == ["0.412", "0.351", "0.290"]
    assert [label.get_text() for label in ax.get_xticklabels()][-2:] == ["upscaled", "upscaled,\nown lr"]
    assert ax.get_ylim()[0] < 0.29
    points = [line.get_color() for line in ax.lines if line.get_marker() == "D"]
    assert points[1:] == [UPSCALED.color, UPSCALED_OWN.color]
    (picture,) = gain.draw_gain(small(gain=given), Gallery(tmp_path))
    assert "Upscaled, own lr from halfway on: 0.290." in picture.alt
    assert "and to that of the same with its own lr from halfway on" in picture.caption


@pytest.mark.usefixtures("pictures_without_pixels")
def test_waterfall_shows_the_best_of_the_alternatives_without_a_bar(tmp_path: Path) -> None:
    """It is what widening has to beat, and the others would hide it."""
    both = {**example().gain, "continued": 0.417, "continued_own": 0.34}
    for given, value, label in (
        (both, 0.34, "base model continued, own lr"),
        ({**both, "continued_own": 0.42}, 0.417, "base model continued"),
        ({**both, "continued_own": None}, 0.417, "base model continued"),
        ({**both, "continued": None}, 0.34, "base model continued, own lr"),
        ({**both, "scratch_own": 0.33}, 0.33, "from scratch, own lr"),
        ({**both, "continued_late": 0.3}, 0.3, "base model continued, own lr from halfway"),
    ):
        ax = axes(lambda ax, given=given: gain._waterfall(ax, given))  # type: ignore[misc]
        (line,) = [line for line in ax.lines if not str(line.get_label()).startswith("_")]
        assert (line.get_ydata()[0], line.get_label()) == (value, label)
        assert ax.get_ylim()[0] < value
        (picture,) = gain.draw_gain(small(gain=given), Gallery(tmp_path))
        assert picture.alt.endswith(f" {label.capitalize()}: {value:.3f}.")
        assert picture.caption.endswith(f"; the line: {label}")
    (picture,) = gain.draw_gain(small(gain={"scratch": 0.5, "upscaled": 0.4}), Gallery(tmp_path))
    assert "continued" not in picture.alt + picture.caption
    low = axes(lambda ax: gain._waterfall(ax, {"scratch": 0.045, "upscaled": 0.015, "continued": 0.001}))
    assert low.get_ylim()[0] == 0  # no loss is below


def test_a_last_point_of_few_steps_is_left_out() -> None:
    """It is the mean of fewer losses than the others, and would jump; where a run diverged it is where it ended."""
    curve = [(100.0, 1.0), (200.0, 0.9), (300.0, 0.8)]
    assert drop_partial_point(curve, "finished") == curve
    assert drop_partial_point([*curve, (316, 1.2)], "finished") == curve
    assert drop_partial_point([*curve, (380, 0.7)], "finished") == [*curve, (380, 0.7)]
    assert drop_partial_point([*curve, (316, 1.2)], "diverged") == [*curve, (316, 1.2)]
    assert drop_partial_point(curve[:2], "finished") == curve[:2]


def test_the_cross_of_what_diverged_lies_where_it_ended() -> None:
    """Also where that is soon after the last whole point, in curves by noise and in those of the large models."""
    points = [(100, 1.0), (200, 0.9), (300, 0.8), (316, 4.0)]
    trials = [Trial(0.1, 0.0, "diverged", None, curve=points), Trial(0.1, 1.0, "finished", 0.8, curve=points)]
    space = Space((0.1,), (0.0, 1.0))
    ax = axes(lambda ax: sweeps._noise_curves(ax, trials, Sweep("sweep-2-width-16", 64, 16, space, trials)))
    assert [line.get_xdata()[-1] for line in ax.lines] == [316, 316, 300]
    assert ax.lines[1].get_marker() == "x"
    steps, losses = [list(column) for column in zip(*points, strict=True)]
    both = [Curve(seed, status, steps, losses) for seed, status in enumerate(("finished", "diverged"))]  # type: ignore[arg-type]
    runs = replace(example().runs[0], curves=both)
    (line,) = loss_curves.collect_lines(small(runs=[runs]), "training", "step")
    assert (line.xs[-1], line.diverged[0][-1]) == (300, (316, 4.0))


@pytest.mark.parametrize(("highest", "scale"), [(0.2, "linear"), (4.0, "log")])
def test_losses_that_lie_far_apart_get_a_logarithmic_axis(highest: float, scale: str) -> None:
    """Else the best curves, which are what the picture is for, lie on top of each other."""
    space = Space((0.1,), (0.0, 1.0, 8.0))
    trials = [
        Trial(0.1, noise, "finished", top / 2, curve=[(500 * k, top / (1 + k / 40)) for k in range(1, 41)])
        for noise, top in ((0.0, 0.2), (1.0, 0.1), (8.0, highest))
    ]
    ax = axes(lambda ax: sweeps._noise_curves(ax, trials, Sweep("sweep-2-width-16", 64, 16, space, trials)))
    assert ax.get_yscale() == scale
    shown = [tick for tick in ax.get_xticks() if 0 <= tick <= 20_000]
    assert 3 <= len(shown) <= 6


def test_curves_by_noise_are_those_of_the_best_learning_rate() -> None:
    sweep = sweep_2()
    chosen = sweeps._by_noise(sweep)
    assert {trial.lr for trial in chosen} == {0.004}
    ax = axes(lambda ax: sweeps._noise_curves(ax, chosen, sweep))
    assert [line.get_linestyle() for line in ax.lines] == ["--", "-", "-", "-", "-", "-"]
    assert len({line.get_color() for line in ax.lines}) == len(ax.lines)
    assert [label.get_text() for label in ax.figure.axes[-1].get_yticklabels()] == ["0.1", "0.3", "1", "3", "10"]


def test_transfer_panels_mark_each_width_s_optimum(tmp_path: Path) -> None:
    values = transfer_check()
    ax = axes(lambda ax: transfer._panel(ax, values, "noise"))
    stars = [line for line in ax.lines if line.get_marker() == "*"]
    assert [star.get_xdata()[0] for star in stars] == [1.0] * 4
    assert len(ax.collections) == 4  # bands
    assert transfer.save_transfer_picture(values, tmp_path / "new") == tmp_path / "new" / "transfer-check.png"
    assert (tmp_path / "new" / "transfer-check.svg").exists()
    assert transfer.save_transfer_picture(values, tmp_path / "t.svg").read_text().startswith("<?xml")


def crosses(ax: Any) -> dict[tuple[float, float], str]:
    """Colours of the × in a panel, by place."""
    from matplotlib.colors import to_hex

    marks = [line for line in ax.lines if line.get_marker() == "x" and len(line.get_xdata())]
    return {(m.get_xdata()[0], round(float(m.get_ydata()[0]), 3)): to_hex(m.get_color()) for m in marks}


def test_transfer_panels_mark_what_diverged(tmp_path: Path) -> None:
    """Else a value that diverged looks like one that was not tried."""
    values = transfer_check()
    for number, line in enumerate(values["lr"]):
        line["points"][-1]["losses"] = [None, None, None]
        if number in (1, 3):
            line["points"][-2]["losses"] = [None, None, None]
    values["lr"][2]["points"][2]["losses"][0] = None  # a seed of the best value
    ax = axes(lambda ax: transfer._panel(ax, values, "lr"))
    marks = crosses(ax)
    colors = [line.get_color() for line in ax.lines if line.get_marker() == "o"]
    assert sorted(x for x, _ in marks) == [0.004, 0.016, 0.016, 0.032, 0.032, 0.032, 0.032]
    assert len(set(marks)) == 7  # none above another
    assert len({color for (x, _), color in marks.items() if x == 0.032}) == len(colors) == 4
    assert min(y for _, y in marks) > 0.75
    drawn = max(line.get_ydata().max() for line in ax.lines if line.get_marker() == "o")
    bottom, top = ax.get_ylim()
    assert (drawn - bottom) / (top - bottom) < min(y for _, y in marks)  # the curves stay below
    assert ax.get_xlim()[1] > 0.032
    stars = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "*"]
    assert (stars[0], stars[2] != 0.004) == (0.004, True)  # as the check itself sees it
    alts = {picture.name: picture.alt for picture in transfer.draw_transfer(values, Gallery(tmp_path))}
    assert "Diverged: 0.032 at width 128, 0.016 and 0.032 at width 256, 0.004 and 0.032" in alts["transfer-lr"]
    assert "Diverged" not in alts["transfer-noise"]
    transfer._legend(ax.figure)
    assert [text.get_text() for text in ax.figure.legends[0].get_texts()][-2:] == ["1,024", "diverged"]


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
    values = {**transfer_check(), "noise": [{"width": 64, "points": [{"x": x, "losses": [1.0 + x]} for x in xs]}]}
    fig, (ax, _) = figure(9.2, 3.8, columns=2)
    transfer._panel(ax, values, "noise")
    fig.canvas.draw()
    assert list(ax.get_xticks()) == xs
    labels = [label for label in ax.get_xticklabels() if label.get_text()]
    assert (len(labels) == len(xs)) == all_fit
    assert [labels[0].get_text(), labels[-1].get_text()] == [words.format_setting(xs[0]), words.format_setting(xs[-1])]
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_transfer_check_where_all_seeds_of_a_point_diverged(tmp_path: Path) -> None:
    values = transfer_check()
    for point in values["lr"][0]["points"]:
        point["losses"] = [None, None, None]
    for point in values["noise"][0]["points"]:
        point["losses"] = [None, None, None]
    lost = [{**values["noise"][0]}]
    (alone,) = [p for p in transfer.draw_transfer({**values, "noise": lost}, Gallery(tmp_path)) if "noise" in p.name]
    assert alone.alt.endswith("Diverged: 0 and 0.1 and 0.3 and 1 and 3 and 10 at width 128.")
    values["noise"] = []
    assert transfer.save_transfer_picture(values, tmp_path / "t.png").exists()
    assert [picture.name for picture in transfer.draw_transfer(values, Gallery(tmp_path))] == ["transfer-lr"]


# ----------------------------------------------------------------------------------------- several runs


@pytest.mark.usefixtures("pictures_without_pixels")
def test_several_runs_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = small(costs={"speedup_sunk": None, "scratch_total": 1e12}, verdict=["It does not pay."])
    page = write_report([write(tmp_path / "first", small()), write(tmp_path / "second", other)])
    assert page == Path("report/index.html")
    text = Seen(page).text
    assert "2 runs side by side" in text
    assert "mlp-covtype (first) mlp-covtype (second)" in text
    assert "Speed-up if the base model is there already 3.3× not reached" in text
    assert "The base model, one run 0.8 TFLOPs –" in text
    assert "It does not pay." in text
    names = sorted(path.stem for path in page.parent.glob("*.svg"))
    assert [name for name in names if name.endswith("training-step")] == [
        "1-mlp-covtype-first-training-step",
        "2-mlp-covtype-second-training-step",
    ]


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.usefixtures("pictures_without_pixels")
def test_what_cannot_be_reported_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match="at least one run"):
        write_report([])
    with pytest.raises(MupscaleError, match="holds no finished run of the method"):
        write_report([tmp_path / "nowhere"])
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(MupscaleError, match="this is no summary"):
        write_report([tmp_path])
    run = write(tmp_path / "run", small())
    (tmp_path / "file").write_text("")
    with pytest.raises(MupscaleError, match=r"cannot be written to .*file"):
        write_report([run], tmp_path / "file")
    (run / "transfer-check.json").write_text('{"lr": [{"width": 8}]}')
    with pytest.raises(MupscaleError, match=r"transfer-check.json is damaged"):
        write_report([run])
    damaged = small(coords={"title": "x", "rows": [{"width": 1}]})
    with pytest.raises(MupscaleError, match=r"coordinate check in summary.json is damaged"):
        write_report([write(tmp_path / "coords", damaged)])


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MupscaleError, match=r"pip install 'mupscale\[plots\]'"):
        write_report([write(tmp_path / "run", small())])


def test_recipe_is_shown_with_its_method() -> None:
    yaml = pytest.importorskip("yaml")
    shown = yaml.safe_load(facts.format_recipe(example()))
    assert shown["method"] == example().method
    assert {name: value for name, value in shown.items() if name != "method"} == example().recipe


def test_summary_survives_its_file(tmp_path: Path) -> None:
    assert Summary.load(write(tmp_path / "run")) == summaries.example()


@pytest.mark.usefixtures("pictures_without_pixels")
def test_plain_transfer_stands_under_what_it_is(tmp_path: Path) -> None:
    choice = replace(example().choice, noise=3.0, lr=0.004, plain=(7.77, 0.00123))
    small(choice=choice).save(tmp_path)
    text = Seen(write_report([tmp_path])).text
    noise, rate = text.index("Chosen noise"), text.index("Chosen learning rate")
    assert noise < text.index("7.77") < rate < text.index("0.00123")


# ------------------------------------------------------------------------------------------------ very long runs


@pytest.mark.slow
def test_a_page_of_a_million_steps_is_small(tmp_path: Path) -> None:
    """All of it, written out in summary.json (a run writes 400 points): the page is hardly larger than any other."""
    summary = example()
    steps, losses = list(range(1, 1_000_001)), [2.0 + step % 7 / 100 for step in range(1_000_000)]
    long = [replace(summary.runs[0].curves[0], steps=steps, losses=losses)]
    runs = [replace(summary.runs[0], steps=len(steps), curves=long), *summary.runs[1:]]
    replace(summary, runs=runs).save(tmp_path / "long")
    summary.save(tmp_path / "usual")
    sizes = [
        sum(path.stat().st_size for path in write_report([tmp_path / name]).parent.rglob("*") if path.is_file())
        for name in ("long", "usual")
    ]
    assert sizes[0] < min(5_000_000, 1.2 * sizes[1])


def test_a_curve_of_a_million_steps_is_drawn_with_few_points_and_its_extremes() -> None:
    steps = list(range(1, 1_000_001))
    losses = [2.0] * len(steps)
    losses[333_333], losses[777_777] = 77.0, 0.25
    summary = example()
    long = [replace(summary.runs[0].curves[0], steps=steps, losses=losses)]
    summary = replace(summary, runs=[replace(summary.runs[0], steps=len(steps), curves=long)])
    (line,) = loss_curves.collect_lines(summary, "training", "step")
    assert len(line.xs) <= 300
    assert (max(line.high), min(line.low)) == (77.0, 0.25)
    assert (line.xs[0], line.xs[-1]) == (1, 1_000_000)
    assert line.xs == sorted(line.xs)


def test_extremes_of_what_points_are_the_means_of_are_drawn() -> None:
    """Those of a last point that is left out, too: it is the mean of far fewer steps than the others."""
    curves = [
        Curve(0, "finished", [10, 20, 30, 32], [2.0, 1.5, 1.0, 3.0], lowest=[1.9, 0.1, 0.9, 0.8], highest=[2, 9, 2, 5]),
        Curve(1, "finished", [10, 20, 30, 32], [2.2, 1.3, 1.2, 3.0], lowest=[2.1, 1.0, 0.9, 2.0], highest=[3, 2, 2, 4]),
    ]
    runs = replace(example().runs[0], curves=curves)
    (line,) = loss_curves.collect_lines(small(runs=[runs]), "training", "step")
    assert (line.xs, line.mean) == ([10, 20, 30], pytest.approx([2.1, 1.4, 1.1]))
    assert (line.low, line.high) == ([2.0, 1.3, 1.0], [2.2, 1.5, 1.2])
    assert (line.lowest, line.highest) == ([1.9, 0.1, 0.8], [3, 9, 5])
    assert line.has_extremes


def test_a_run_that_diverged_keeps_its_peak() -> None:
    curve = Curve(0, "diverged", [10, 20, 30], [2.0, 1.5, 3.0], lowest=[1.9, 0.1, 2.0], highest=[2.1, 2.0, 77.0])
    runs = Runs("scratch", "", width=8, lr=0.1, steps=30, flops_per_step=1.0, curves=[curve])
    (line,) = loss_curves.collect_lines(replace(example(), runs=[runs]), "training", "step")
    assert line.diverged == [[(10, 2.0), (20, 0.1), (30, 77.0)]]


@pytest.mark.parametrize("field", ["losses", "lowest", "highest"])
def test_a_curve_whose_columns_differ_in_length_is_refused(field: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run") / "summary.json"
    values = json.loads(path.read_text())
    values["runs"][0]["curves"][0][field] = [1.0, 2.0]
    path.write_text(json.dumps(values))
    with pytest.raises(MupscaleError, match=f"2 values in '{field}'"):
        load_summary(path.parent)
