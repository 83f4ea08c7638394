"""The report: what the page says, what its pictures show, and what it makes of runs that went wrong."""

from __future__ import annotations

import base64
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
from mupscale.method.summary import Summary
from mupscale.report import curves, facts, gain, report, sweeps, transfer, words
from mupscale.report.drawing import INK, Gallery, recoloured
from mupscale.sweep.space import Space, Sweep, Trial
from summaries import LRS, NOISES, diverged, example, sweep_1, sweep_2, transfer_check, write

plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the example, transfer check and all."""
    return report([write(tmp_path_factory.mktemp("runs") / "run", check=True)])


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
        (words.loss(0.41234), "0.412"),
        (words.loss(0.01234), "0.0123"),
        (words.loss(4.2e-7), "4.2e-7"),
        (words.loss(1234.5), "1,234.5"),
        (words.loss(None), "–"),
        (words.loss(math.nan), "–"),
        (words.loss(math.inf), "∞"),
        (words.times(1.3333), "1.3×"),
        (words.times(23.64), "23.6×"),
        (words.times(1250), "1,250×"),
        (words.flops(598e12), "598 TFLOPs"),
        (words.flops(37_929_809e12), "37,929,809 TFLOPs"),
        (words.flops(8.3e11), "0.83 TFLOPs"),
        (words.flops(2e9), "2 GFLOPs"),
        (words.setting(0.0040000001), "0.004"),
        (words.setting(1e-5), "1e-5"),
        (words.duration(0.84), "0.8 s"),
        (words.duration(59.7), "1 min"),
        (words.duration(123), "2 min 3 s"),
        (words.duration(3840), "1 h 4 min"),
        (words.duration(3 * 86400 + 7200), "3 d 2 h"),
        (words.duration(3599.9), "1 h"),
        (words.width(1024), "1,024"),
        (words.width({"head_dim": 32, "heads": 4}), "head_dim 32, heads 4"),
        (words.spread([0.4, 0.5, 0.6]), "0.500 (0.400 to 0.600)"),
        (words.spread([0.4]), "0.400"),
        (words.spread([]), "–"),
        (words.file_name("../../etc/passwd"), "etc-passwd"),
        (words.file_name("…"), "unnamed"),
    ],
)
def test_numbers_for_people(shown: str, expected: str) -> None:
    assert shown == expected


# ------------------------------------------------------------------------------------------- the page


def test_the_answer_comes_first_then_the_numbers(written: Path) -> None:
    text = Seen(written).text
    wanted = [
        "Widening pays here: it reaches the from-scratch model's lowest loss 3.3× cheaper",
        "Speed-up to the from-scratch model's lowest loss 3.3× 1.7× with the base model's training charged, "
        "0.23× with tuning charged, too",
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
    assert not plt.get_fignums(), "a figure was not freed"


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    pages = [report([write(tmp_path / name, small())]).read_bytes() for name in "ab"]
    assert pages[0] == pages[1]


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
    page = report([folder])
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
    dark = recoloured(svg)
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
            costs={**example().costs, "upscaled_to_scratch_loss": None, "speedup_sunk": None},
        ),
        ["not reached", "Final loss, upscaled diverged", "width 256 (3 of 3 diverged)"],
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


@pytest.mark.parametrize("case", ODD)
def test_odd_runs_give_a_page(case: str, tmp_path: Path) -> None:
    make, said, drawn = ODD[case]
    page = report([write(tmp_path / "run", make())])
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
    (line,) = curves.lines(replace(summary, runs=[runs]), "training", "step")
    values = [curve.losses[7] for curve in upscaled.curves[1:]]
    assert line.mean[7] == pytest.approx(sum(values) / 2)
    assert (line.low[7], line.high[7]) == (min(values), max(values))
    assert [len(points) for points in line.diverged] == [6]  # the last is infinite
    assert "(1 of 3 diverged)" in line.label


def test_against_flops_what_starts_from_the_base_model_starts_where_that_ended() -> None:
    summary = replace(example(), costs={})
    by_name = {line.runs.name: line for line in curves.lines(summary, "training", "flops")}
    base, upscaled, scratch = by_name["base"], by_name["upscaled"], by_name["scratch"]
    assert base.xs[-1] == 2000 * 4.0e8
    assert upscaled.xs[0] == pytest.approx(base.xs[-1] + 33 * 1.365e9)
    assert scratch.xs[0] == pytest.approx(43 * 1.365e9)
    charged = curves.lines(replace(summary, costs={"base": 5e12}), "training", "flops")
    assert next(line for line in charged if line.runs.name == "upscaled").xs[0] > 5e12


def test_long_curves_are_thinned_to_their_ends() -> None:
    points = curves._thinned(list(range(10_000)))
    assert (len(points), points[0], points[-1]) == (300, 0, 9999)


def axes(draw: Callable[[Any], None]) -> Any:
    """Draws into axes of their own."""
    _, ax = plt.subplots(layout="constrained")
    draw(ax)
    return ax


@pytest.fixture
def _close() -> Any:
    yield
    plt.close("all")


@pytest.mark.usefixtures("_close")
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


@pytest.mark.usefixtures("_close")
def test_waterfall_leads_from_one_loss_to_the_other() -> None:
    ax = axes(lambda ax: gain._waterfall(ax, example().gain))
    ends = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in ax.patches]
    tops = [(0.412, 0.386), (0.386, 0.421), (0.421, 0.351)]
    assert [tuple(sorted(end)) for end in ends] == [pytest.approx(sorted(pair)) for pair in tops]
    assert [text.get_text() for text in ax.texts] == ["−0.026", "+0.035", "−0.070", "0.412", "0.351"]
    assert "learning rate ±0.000, head start −0.010, noise +0.001." in gain.in_words(
        small(gain={"scratch": 0.5, "learning_rate": -8e-5, "head_start": 0.0103, "noise": -0.001})
    )
    tiny = small(gain={"scratch": 0.004, "noise": 8e-5})
    assert "noise −0.00008." in gain.in_words(tiny)


def test_a_last_point_of_few_steps_is_left_out() -> None:
    """It is the mean of fewer losses than the others, and would jump."""
    curve = [(100, 1.0), (200, 0.9), (300, 0.8)]
    assert sweeps._whole(curve) == curve
    assert sweeps._whole([*curve, (316, 1.2)]) == curve
    assert sweeps._whole([*curve, (380, 0.7)]) == [*curve, (380, 0.7)]


@pytest.mark.usefixtures("_close")
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


@pytest.mark.usefixtures("_close")
def test_curves_by_noise_are_those_of_the_best_learning_rate() -> None:
    sweep = sweep_2()
    chosen = sweeps._by_noise(sweep)
    assert {trial.lr for trial in chosen} == {0.004}
    ax = axes(lambda ax: sweeps._noise_curves(ax, chosen, sweep))
    assert [line.get_linestyle() for line in ax.lines] == ["--", "-", "-", "-", "-", "-"]
    assert len({line.get_color() for line in ax.lines}) == len(ax.lines)
    assert [label.get_text() for label in ax.figure.axes[-1].get_yticklabels()] == ["0.1", "0.3", "1", "3", "10"]


@pytest.mark.usefixtures("_close")
def test_transfer_panels_mark_each_width_s_optimum(tmp_path: Path) -> None:
    values = transfer_check()
    ax = axes(lambda ax: transfer._panel(ax, values, "noise"))
    stars = [line for line in ax.lines if line.get_marker() == "*"]
    assert [star.get_xdata()[0] for star in stars] == [1.0] * 4
    assert len(ax.collections) == 4  # bands
    assert transfer.transfer_picture(values, tmp_path / "new") == tmp_path / "new" / "transfer-check.png"
    assert (tmp_path / "new" / "transfer-check.svg").exists()
    assert transfer.transfer_picture(values, tmp_path / "t.svg").read_text().startswith("<?xml")


def test_transfer_check_where_all_seeds_of_a_point_diverged(tmp_path: Path) -> None:
    values = transfer_check()
    for point in values["lr"][0]["points"]:
        point["losses"] = [None, None, None]
    values["noise"] = []
    assert transfer.transfer_picture(values, tmp_path / "t.png").exists()
    assert [picture.name for picture in transfer.pictures(values, Gallery(tmp_path))] == ["transfer-lr"]


# ----------------------------------------------------------------------------------------- several runs


def test_several_runs_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = small(costs={"speedup_sunk": None, "scratch_total": 1e12}, verdict=["It does not pay."])
    page = report([write(tmp_path / "first", small()), write(tmp_path / "second", other)])
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


def test_what_cannot_be_reported_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match="at least one run"):
        report([])
    with pytest.raises(MupscaleError, match="holds no finished run of the method"):
        report([tmp_path / "nowhere"])
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(MupscaleError, match="this is no summary"):
        report([tmp_path])
    run = write(tmp_path / "run", small())
    (tmp_path / "file").write_text("")
    with pytest.raises(MupscaleError, match=r"cannot be written to .*file"):
        report([run], tmp_path / "file")
    (run / "transfer-check.json").write_text('{"lr": [{"width": 8}]}')
    with pytest.raises(MupscaleError, match=r"transfer-check.json is damaged"):
        report([run])
    damaged = small(coords={"title": "x", "rows": [{"width": 1}]})
    with pytest.raises(MupscaleError, match=r"coordinate check in summary.json is damaged"):
        report([write(tmp_path / "coords", damaged)])


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MupscaleError, match=r"pip install 'mupscale\[plots\]'"):
        report([write(tmp_path / "run", small())])


def test_recipe_is_shown_with_its_method() -> None:
    yaml = pytest.importorskip("yaml")
    shown = yaml.safe_load(facts.recipe(example()))
    assert shown["method"] == example().method
    assert {name: value for name, value in shown.items() if name != "method"} == example().recipe


def test_summary_survives_its_file(tmp_path: Path) -> None:
    assert Summary.load(write(tmp_path / "run")) == summaries.example()


def test_plain_transfer_stands_under_what_it_is(tmp_path: Path) -> None:
    made = example()
    choice = replace(made.choice, noise=3.0, lr=0.004, plain=(7.77, 0.00123))
    replace(made, choice=choice).save(tmp_path)
    text = Seen(report([tmp_path])).text
    noise, rate = text.index("Chosen noise"), text.index("Chosen learning rate")
    assert noise < text.index("7.77") < rate < text.index("0.00123")
