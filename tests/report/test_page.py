"""The page of a study, whatever its preset: what stands where, what it needs, and what it makes of odd runs."""

from __future__ import annotations

import base64
import copy
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import comparisons
from comparisons import ALL, comparison, forecast_only
from mupscale import MupscaleError
from mupscale.plots import INK, Gallery, Picture, recolour_for_dark
from mupscale.report import write_report
from mupscale.study import ContenderRuns, StudySummary, SystemRuns, load_summary
from mupscale.study.results import Card, PageTable
from slow_cases import with_slow
from summaries import all_runs, diverged, example, sweep_2, transfer_check, write

pytest.importorskip("matplotlib")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are asked for, and not drawn."""

    def draw(self: Gallery, name: str, alt: str, caption: str, sketch: Any, **_: Any) -> Picture:
        return Picture(f"{self.prefix}{name}", alt, caption, "<svg/>")

    monkeypatch.setattr(Gallery, "draw", draw)


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


def small(**changes: Any) -> StudySummary:
    """The example with less to draw."""
    kept = [runs for runs in all_runs() if runs.name in ("base", "from-scratch", "copies")]
    return example(**{"runs": kept, "tuned": [], "coords": None, "gain": {}, **changes})


def assert_in_order(text: str, wanted: list[str]) -> None:
    places = [text.find(piece) for piece in wanted]
    assert -1 not in places, wanted[places.index(-1)]
    assert places == sorted(places)


# ---------------------------------------------------------------------------------------------- what stands where


def test_the_answer_comes_first_then_the_numbers(paper_page: Path) -> None:
    wanted = [
        "gpt2-shakespeare Growing does not pay here: at equal FLOPs the upscaled model",
        "That reaches the upscaled model's final loss",
        "GPT2 · Shakespeare · AdamW · width 32 → 64",
        "Speed-up to the from-scratch model's lowest loss 1× base model's cost included",
        "Chosen noise 4",
        "Training",
        "How this was measured",
        "To keep in mind",
        "learning rate +0.015, head start +0.027, noise −0.094",
        "The models contender",
        "final training loss",
        "Costs and speed-ups",
        "What was tuned",
        "sweep-2-width-64 0.004 1 0.400 36 2 2",
        "Transfer check",
        "Widths are those of the grown models",
        "Losses are training losses",
        "it transfers",
        "Coordinate check",
        "sweep-2-width-16 18.9 TFLOPs 19 % 18 min 23 s",
        "Total 97.7 TFLOPs 100 % 1 h 18 min",
        "mupscale run results/gpt2-shakespeare/recipe.yaml",
        "class_path: mupscale.models.GPT2",
        "study: widths: - 16",
    ]
    assert_in_order(Seen(paper_page).text, wanted)


@pytest.mark.usefixtures("undrawn")
def test_the_same_page_for_another_preset(tmp_path: Path) -> None:
    summary = comparison(2)
    wanted = [
        summary.answer["sentence"],
        "growing with fresh units ends lower than continuing",
        "width 256 → 512",
        "Cost of growing, compared with training from scratch to the same loss 0.63×",
        "Loss against cost",
        "mean and range over 2 seeds",
        "Seeds: 2.",
        "is the highest tried",
        "Forecast and outcome",
        "The contenders (ways to train) at the full budget",
        "What was tuned",
        "grown from copies 0.008 2 0.624 20 0 3",
        "Small models behind the forecast",
        "Full-size contenders 400 TFLOPs 90 %",
        "study: widths: - 32 - 64 lrs: - 0.0",  # which the settings leave empty
    ]
    assert_in_order(Seen(write_report([write(tmp_path / "run", summary)])).text, wanted)
    text = Seen(write_report([write(tmp_path / "forecast", forecast_only(summary))])).text
    assert_in_order(text, ["the large models were not trained", "width 256", "Loss against cost", "The forecast"])
    assert "made from" not in text


@pytest.mark.usefixtures("pictures_without_pixels")
def test_a_preset_that_nobody_knows_yet(tmp_path: Path) -> None:
    """Contenders that are strangers to the table, and nothing but sentences, cards and tables."""
    points = comparisons.system().contenders[0].points
    runs = [ContenderRuns(f"at-{part}", 64, 0.1, 0.0, points, f"grown after {part} %") for part in (10, 25)]
    summary = StudySummary(
        "when", "mupscale run", "when", {}, {}, ["Grow early."], [Card("When", "10 %")], ["Once."],
        [PageTable("All", ["a", "b"], [["c", "d"]], ["e"], "f"), PageTable("More", ["g"], [["h"]], folded=True)],
        large=SystemRuns(16, 64, None, "FLOPs", runs), answer={"more": [1]},
    )  # fmt: skip
    page = write_report([write(tmp_path / "run", summary)])
    wanted = ["Grow early.", "When 10 %", "Loss against cost", "Once.", "All e a b c d f", "More g h"]
    assert_in_order(Seen(page).text, wanted)
    assert "grown after 25 % 0.54" in Seen(page).alts[0]


@pytest.mark.usefixtures("pictures_without_pixels")
@pytest.mark.slow
def test_several_runs_side_by_side_whatever_their_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = small(costs={"speedup_base_charged": None, "scratch_total": 1e12}, sentences=["It does not pay."])
    pay = comparison()
    folders = [write(tmp_path / "first", small()), write(tmp_path / "second", other)]
    folders.append(write(tmp_path / "third", replace(pay, small=[], tuned=[])))
    page = write_report(folders)
    assert page == Path("report/index.html")
    text = Seen(page).text
    assert "3 runs side by side" in text
    assert "gpt2-shakespeare (first) gpt2-shakespeare (second) mlp-covtype (third)" in text
    assert "lowest loss 1× (base model's cost included;" in text
    assert "as well) not reached –" in text
    assert_in_order(text, ["It does not pay.", pay.answer["sentence"], "Loss against cost", "Training", "The recipe"])
    names = {path.stem for path in page.parent.glob("*.svg")}
    assert {"1-gpt2-shakespeare-first-training-step", "2-gpt2-shakespeare-second-training-step"} < names
    assert "3-mlp-covtype-third-loss-against-cost" in names


# ---------------------------------------------------------------------------------------------- what it needs


def test_the_page_needs_nothing_else(paper_page: Path) -> None:
    page = paper_page.read_text(encoding="utf-8")
    seen = Seen(paper_page)
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


def test_pictures_lie_beside_it_as_png_and_svg(paper_page: Path) -> None:
    names = {path.stem for path in paper_page.parent.glob("*.svg")}
    assert names == {path.stem for path in paper_page.parent.glob("*.png")}
    assert {"training-step", "training-flops-zoom", "held-out", "accuracy", "gain", "coordinates"} < names
    assert {"sweep-1-width-64", "sweep-2-width-64", "sweep-2-width-64-by-noise", "transfer-lr"} < names
    for path in paper_page.parent.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.usefixtures("pictures_without_pixels")
def test_pictures_of_a_comparison(tmp_path: Path) -> None:
    summary = comparison(2)
    run = write(tmp_path / "run", replace(summary, small=summary.small[:1], tuned=summary.tuned[3:4]))
    page = write_report([run])
    drawn = {"loss-against-cost", "loss-against-cost-small-1"}
    drawn |= {f"{name}-narrow" for name in drawn} | {"tuned-rates", "tuned-copies"}
    assert {path.stem for path in page.parent.glob("*.svg")} == drawn
    assert page.read_text(encoding="utf-8").count('media="(max-width: 640px)"') == 2


@pytest.mark.slow
def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    bare = [replace(curve, held_out_steps=[], held_out_losses=[], accuracy=[]) for curve in all_runs()[0].curves]
    run = small(runs=[replace(all_runs()[0], cost_per_step=None, curves=bare)])
    pages = [write_report([write(tmp_path / name, run)]).read_bytes() for name in "ab"]
    assert pages[0] == pages[1]


def test_dark_pictures_have_no_dark_ink(paper_page: Path) -> None:
    svg = (paper_page.parent / "training-step.svg").read_text()
    assert INK in svg
    assert "#ffffff" in svg
    dark = recolour_for_dark(svg)
    assert INK not in dark
    assert "#ffffff" not in dark


@pytest.mark.usefixtures("pictures_without_pixels")
def test_texts_from_files_stay_texts(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script> $\\frac$ & "q"'
    runs = [
        replace(runs, name=f"{number}{evil}", label=evil, width={evil: 3}) for number, runs in enumerate(all_runs())
    ]
    summary = small(name=evil, command=evil, sentences=[evil], notes=[evil], tuned=[sweep_2(name=f"../../{evil}")])
    summary = replace(
        summary,
        recipe={evil: evil},
        settings={evil: evil},
        stages=[replace(summary.stages[0], label=evil)],
        measured=[evil],
        cards=[Card(evil, evil, evil)],
        tables=[PageTable(evil, [evil], [[evil]], [evil], evil)],
        small=[SystemRuns({evil: 4}, 8, None, evil, [replace(one, curves=[]) for one in runs[:2]])],
        large=SystemRuns(8, 16, 1e9, "FLOPs", runs[:2]),
        answer={"reference": {"loss": 0.4, "label": evil}},
    )
    folder = write(tmp_path / "deep" / "run", summary)
    check = {**transfer_check(), "verdict": [evil]}
    for line in check["lr"]:
        line["width"] = {evil: 4}
    (folder / "transfer-check.json").write_text(json.dumps(check))
    page = write_report([folder])
    seen = Seen(page)
    assert "script" not in seen.tags
    assert "<script" not in page.read_text(encoding="utf-8")
    assert seen.text.count("<script>alert") > 14
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and folder not in path.parents]
    assert outside == []


# ----------------------------------------------------------------------- runs that are not as they should be


BOTH = all_runs()[:2]


def _no_held_out() -> StudySummary:
    bare = {"held_out_steps": [], "held_out_losses": [], "accuracy": []}
    runs = [replace(r, curves=[replace(c, **bare) for c in r.curves]) for r in BOTH]
    return small(runs=runs)


ODD: dict[str, tuple[Callable[[], StudySummary], list[str], list[str], list[str]]] = {
    "everything diverged": (
        lambda: small(runs=[diverged(one) for one in all_runs()]),
        ["Final loss, upscaled diverged"],
        ["training-step"],
        ["training-step-zoom", "held-out"],
    ),
    "one seed, no costs, no sweeps": (
        lambda: small(runs=[replace(one, curves=one.curves[:1]) for one in BOTH], costs={}, stages=[], sentences=[]),
        ["This run gives no answer."],
        ["training-step", "held-out"],
        ["gain"],
    ),
    "no held-out data": (_no_held_out, [], ["training-step", "training-flops"], ["held-out", "accuracy"]),
    "costs unknown": (
        lambda: replace(
            small(stages=[replace(stage, cost=None) for stage in example().stages]),
            large=SystemRuns(8, 16, None, "steps", [replace(one, cost_per_step=None) for one in BOTH]),
        ),
        ["sweep-1-width-16 unknown – 3 min 6 s"],
        ["training-step", "held-out"],
        ["training-flops"],
    ),
    "random search": (
        lambda: small(tuned=[sweep_2("random"), sweep_2("tpe", name="sweep-2-width-32")]),
        ["at learning rates near the best"],
        ["sweep-2-width-64", "sweep-2-width-32", "sweep-2-width-64-by-noise"],
        [],
    ),
    "no numbers": (
        lambda: small(
            runs=[replace(r, curves=[replace(c, losses=[math.nan] * len(c.losses)) for c in r.curves]) for r in BOTH],
            gain=dict.fromkeys(example().answer["gain"], math.nan),
        ),
        [],
        ["held-out"],
        ["training-step", "gain"],
    ),
    "nothing at all": (
        lambda: StudySummary("empty", "", "pay", {}, {}),
        ["empty This run gives no answer."],
        [],
        ["loss-against-cost"],
    ),
}


@pytest.mark.quick("everything diverged")
@pytest.mark.usefixtures("pictures_without_pixels")
@pytest.mark.parametrize("case", with_slow(ODD, list(ODD)[::2]))
def test_odd_runs_give_a_page(case: str, tmp_path: Path) -> None:
    make, said, drawn, not_drawn = ODD[case]
    page = write_report([write(tmp_path / "run", make())])
    text = Seen(page).text
    for piece in said:
        assert piece in text
    names = {path.stem for path in page.parent.glob("*.svg")}
    assert set(drawn) <= names
    assert not names & set(not_drawn)
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", text)


@pytest.mark.usefixtures("pictures_without_pixels")
def test_what_cannot_be_reported_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match="at least one run"):
        write_report([])
    run = write(tmp_path / "run", StudySummary("empty", "", "pay", {}, {}))
    (tmp_path / "file").write_text("")
    with pytest.raises(MupscaleError, match=r"cannot be written to .*file"):
        write_report([run], tmp_path / "file")
    (run / "transfer-check.json").write_text('{"lr": [{"width": 8}]}')
    with pytest.raises(MupscaleError, match=r"transfer-check.json is damaged"):
        write_report([run])


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MupscaleError, match=r"pip install 'mupscale\[plots\]'"):
        write_report([write(tmp_path / "run", small())])


@pytest.mark.slow
def test_a_page_of_a_million_steps_is_small(tmp_path: Path) -> None:
    """All of it, written out in summary.json (a run writes 400 points): the page is hardly larger than any other."""
    steps, losses = list(range(1, 1_000_001)), [2.0 + step % 7 / 100 for step in range(1_000_000)]
    first, *others = all_runs()
    long = replace(first, curves=[replace(first.curves[0], steps=steps, losses=losses)])
    sizes = [
        sum(path.stat().st_size for path in write_report([folder]).parent.rglob("*") if path.is_file())
        for folder in (write(tmp_path / "long", example(runs=[long, *others])), write(tmp_path / "usual"))
    ]
    assert sizes[0] < min(5_000_000, 1.2 * sizes[1])


# ---------------------------------------------------------------------------------------------- what is read from disk


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    for number, summary in enumerate((comparison(3, ALL), forecast_only(comparison()), example())):
        assert load_summary(write(tmp_path / str(number), summary)) == summary


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = to

    return change


DAMAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another version": (_set("format", to=7), "'format' is 7, but must be 3"),
    "a loss that is a text": (
        _set("large", "contenders", 1, "points", 0, "losses", 0, to="low"),
        r"large.contenders\[1\].points\[0\].losses\[0\]' is 'low'",
    ),
    "a loss that is none": (
        _set("small", 0, "contenders", 0, "points", 2, "losses", 0, to=float("nan")),
        r"small\[0\].contenders\[0\].points\[2\].losses\[0\]' is nan",
    ),
    "no points": (_set("large", "contenders", 0, "points", to=[]), r"large.contenders\[0\].points' is \[\]"),
    "a cost of nothing": (_set("large", "contenders", 0, "points", 0, "cost", to=0), "must be a number above 0"),
    "no learning rate": (_set("tuned", 0, "trials", 0, "lr", to=-1.0), r"tuned\[0\].trials\[0\].lr' is -1.0"),
    "costs that fall": (
        _set("large", "contenders", 0, "points", 2, "cost", to=1.0),
        "the costs of the contender from-scratch do not rise",
    ),
    "somebody twice": (_set("large", "contenders", 0, "name", to="fresh"), "the contender fresh is there twice"),
    "an answer about nobody": (_set("answer", "grown", to="paired-noise"), "not among large.contenders"),
    "an answer without a cost": (
        _set("answer", "break_even", "continued", "charged", to={"kind": "from", "cost": None}),
        "break_even.continued.charged has no cost",
    ),
    "a break-even of no kind": (_set("answer", "break_even", "continued", to={"charged": 3}), "charged' is 3"),
    "a gain that is a text": (_set("answer", "gain", to={"copies": "much"}), "'answer.gain.copies' is 'much'"),
    "a row too short": (_set("tables", 0, "rows", 0, to=["x"]), "has 4 columns, but a row of 1"),
    "half a coordinate check": (
        _set("coords", to={"title": "x", "rows": [{"width": 1}]}),
        r"'coords.rows\[0\].seed' is missing",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_summaries_are_named_in_a_sentence(case: str, tmp_path: Path) -> None:
    change, wanted = DAMAGES[case]
    values = copy.deepcopy(json.loads(json.dumps(asdict(comparison()))))
    change(values)
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(values))
    with pytest.raises(MupscaleError, match=wanted) as caught:
        write_report([tmp_path])
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("text", ["", "{", "[1]", '"comparison"', "[" * 100_000], ids=len)
def test_files_that_are_no_summary(text: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(MupscaleError, match=r"summary\.json"):
        load_summary(tmp_path)
    with pytest.raises(MupscaleError, match=r"nowhere holds no study: cannot read its summary\.json"):
        load_summary(tmp_path / "nowhere")
    with pytest.raises(MupscaleError, match=r"sizes/8 holds no study: .*It is a part of the study in "):
        load_summary(tmp_path / "sizes" / "8")
    (tmp_path / "a" / "run").mkdir(parents=True)
    (tmp_path / "summary.json").rename(tmp_path / "a" / "run" / "metrics.jsonl")
    with pytest.raises(MupscaleError, match="It is a single run: mupscale curves"):
        load_summary(tmp_path / "a" / "run")
    (tmp_path / "summary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(MupscaleError, match="is damaged"):
        load_summary(tmp_path)


@pytest.mark.parametrize("field", ["losses", "lowest", "highest"])
def test_a_curve_whose_columns_differ_in_length_is_refused(field: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run") / "summary.json"
    values = json.loads(path.read_text())
    values["large"]["contenders"][0]["curves"][0][field] = [1.0, 2.0]
    path.write_text(json.dumps(values))
    with pytest.raises(MupscaleError, match=f"2 values in '{field}'"):
        load_summary(path.parent)
