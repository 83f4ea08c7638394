"""The page of a comparison: what it says, what its picture shows, and what it makes of summaries that are damaged."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import comparisons
import summaries
from comparisons import ALL, comparison, forecast_only, system, write
from mupscale import MupscaleError
from mupscale.plots import DARK_PAPER, PAPER, Gallery, Picture, figure, find_contrast, styled
from mupscale.report import comparison_picture, load_summary, write_report
from mupscale.report.comparison_picture import HALF, NARROW, WIDE, Shape
from mupscale.study import CONTENDERS, StudySummary, SystemRuns

pytest.importorskip("matplotlib")
LOSS = "held-out loss"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are asked for, and not drawn."""

    def draw(self: Gallery, name: str, alt: str, caption: str, sketch: Any, **_: Any) -> Picture:
        return Picture(f"{self.prefix}{name}", alt, caption, "<svg/>")

    monkeypatch.setattr(Gallery, "draw", draw)


def page_of(folder: Path, summary: StudySummary) -> str:
    """The HTML of its page."""
    return write_report([write(folder / "run", summary)]).read_text(encoding="utf-8")


def text_of(page: str) -> str:
    """What a reader sees, and what is folded away."""
    body = page[page.index("<body>") :]
    body = re.sub(r"data:image[^\"]*", "", body)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


def sketched(runs: SystemRuns, shape: Shape = WIDE, answer: dict[str, Any] | None = None) -> tuple[Any, Any, list[Any]]:
    """Figure and axes of the picture, drawn, and its marks."""
    marks = comparison_picture.find_marks(runs, answer or {})
    fig, ax = figure(*shape.size)
    comparison_picture.sketch_system(ax, runs, LOSS, shape, marks)
    fig.draw_without_rendering()
    return fig, ax, marks


# ------------------------------------------------------------------------------------------ what it says


@pytest.mark.usefixtures("undrawn")
def test_sentence_then_numbers_then_the_rest(tmp_path: Path) -> None:
    summary = comparison(2)
    text = text_of(page_of(tmp_path, summary))
    wanted = [
        summary.answer["sentence"],
        "Cost over starting over, to the same loss, base model charged 0.63×",
        "growing with fresh units; forecast 0.58× (0.51× to 0.65×)",
        "Cost over starting over, to the same loss, base model already there 0.57×",
        "Loss against continuing the base model, at the same cost 5.5 % lower",
        "mean and range over 2 seeds",
        "Growing with fresh units is lower than continuing from 58.2 GFLOPs on, base model charged.",
        "Growing with fresh units is lower than starting over at every budget.",
        "Tuned at width 32 → 128",
        "Seeds: 2.",
        "whole held-out set",
        "Of 8 forecasts 8 held.",
        "grown with fresh units, cost over starting over, base model charged 0.58× (0.51× to 0.65×) 0.63× yes",
        "grown with fresh units 1,024 0.008 none 2,000 134 GFLOPs 0.518 (0.517 to 0.518)",
        "What was tuned",
        "is the highest tried",
        "Tuning took 2 % of all cost, the forecast 3 %.",
        "mupscale run recipes/mlp-covtype.yaml",
        "class_path: mupscale.models.MLP",
    ]
    places = [text.find(piece) for piece in wanted]
    assert -1 not in places, wanted[places.index(-1)]
    assert places == sorted(places)


@pytest.mark.usefixtures("undrawn")
def test_sentence_and_numbers_are_the_summary_s_own(tmp_path: Path) -> None:
    changed = {
        **comparison().answer,
        "sentence": "Nobody knows.",
        "cost_charged": {"value": 0.1234, "bound": "at most"},
        "cost_there": None,
        "above_continued": 0.25,
    }
    text = text_of(page_of(tmp_path, comparison(answer=changed)))
    assert "mlp-covtype Nobody knows." in text
    assert "base model charged at most 0.12×" in text
    assert "base model already there unknown starting over diverged, or took no part" in text
    assert "at the same cost 25 % higher" in text


@pytest.mark.usefixtures("undrawn")
def test_plain_words_in_short_sentences(tmp_path: Path) -> None:
    for number, summary in enumerate((comparison(3, ALL), forecast_only(comparison()))):
        page = page_of(tmp_path / str(number), summary)
        assert "upscaled" not in text_of(page)
        for paragraph in re.findall(r"<(?:p|li)\b[^>]*>(.*?)</(?:p|li)>", page, flags=re.S):
            for sentence in re.split(r"(?<=[.:;]) ", unescape(paragraph)):
                assert len(sentence.split()) <= 30, sentence


@pytest.mark.usefixtures("undrawn")
def test_texts_from_files_stay_texts(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script> $\\frac$ & "q"'
    summary = comparison(name=evil, command=evil, notes=[evil], recipe={evil: evil}, settings={evil: evil})
    summary = replace(
        summary,
        base={**summary.base, "from": evil},
        stages=[replace(summary.stages[0], name=evil)],
        answer={**summary.answer, "sentence": evil},
        forecast={**summary.forecast, "sentence": evil},
        small=[replace(summary.small[0], narrow={evil: 4})],
    )
    page = page_of(tmp_path / "deep", summary)
    assert "<script" not in page
    assert text_of(page).count("<script>alert") > 8


@pytest.mark.usefixtures("undrawn")
def test_forecast_alone(tmp_path: Path) -> None:
    summary = forecast_only(comparison())
    text = text_of(page_of(tmp_path, summary))
    assert f"mlp-covtype {summary.forecast['sentence']} The large models are not trained" in text
    assert "base model charged 0.58× growing with fresh units; 0.51× to 0.65×" in text
    assert "at the same cost 4.9 % lower" in text
    assert "width 256 → 1,024" in text
    assert "contender, 32 → 128" in text
    assert "Forecast and outcome" not in text


@pytest.mark.usefixtures("undrawn")
def test_forecast_without_a_rule(tmp_path: Path) -> None:
    summary = forecast_only(comparison())
    why = {"no_rule": "small widths contradict each other"}
    forecast = {
        **summary.forecast,
        "above_continued": dict.fromkeys(summary.forecast["above_continued"], why),
        "cost": {},
    }
    text = text_of(page_of(tmp_path, replace(summary, forecast=forecast)))
    assert "at the same cost no rule growing from copies; small widths contradict each other" in text
    assert "base model charged unknown growing from copies; starting over takes no part" in text


@pytest.mark.usefixtures("undrawn")
def test_diverged_contenders_are_named(tmp_path: Path) -> None:
    text = text_of(page_of(tmp_path, comparison(3, lost={"copies": 1, "from-scratch": 3})))
    assert "diverged (1 of 3 seeds)" in text
    rows = text[text.index("The contenders, at the full budget") :]
    assert rows.index("0.520") < rows.index("diverged")
    assert "Growing with fresh units and starting over have no cost in common" in text


@pytest.mark.usefixtures("undrawn")
def test_every_grown_model_diverged(tmp_path: Path) -> None:
    text = text_of(page_of(tmp_path, comparison(2, lost={"copies": 2, "fresh": 2})))
    assert "base model charged unknown every grown model diverged" in text
    assert "at the same cost unknown every grown model diverged" in text


@pytest.mark.usefixtures("undrawn")
def test_one_seed_and_a_base_model_of_unknown_cost(tmp_path: Path) -> None:
    runs = replace(system(seeds=1), base_cost=None, unit="steps")
    base = {"from": "gpt2.pt", "steps": None, "lr": 0.1, "width": 256}
    text = text_of(page_of(tmp_path, comparison(1, large=runs, base=base)))
    assert "Seeds: one, so nothing is known about chance." in text
    assert "base model charged unknown the base model's steps are not known" in text
    assert "The base model is gpt2.pt, trained for an unknown number of steps." in text


# ----------------------------------------------------------------------------------------- the picture


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
        fig, ax, _ = sketched(runs, shape)
        boxes = [text.get_window_extent() for text in ax.texts]
        assert len(boxes) == len(runs.contenders)
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        axes, whole = ax.get_window_extent(), fig.bbox
        assert all(box.x0 >= axes.x1 and box.x1 <= whole.x1 + 1 for box in boxes)
        assert all(box.y0 >= axes.y0 - 1 and box.y1 <= axes.y1 + 1 for box in boxes)


def test_lines_are_means_over_seeds_against_charged_costs() -> None:
    runs = system(names=ALL, seeds=5)
    _, ax, _ = sketched(runs)
    drawn = {line.get_color(): line for line in ax.lines if line.get_marker() == "o"}
    assert len(drawn) == len(ALL)
    for one in runs.contenders:
        contender = comparisons.contender_named(one.name)
        line = drawn[comparison_picture.line_color(contender)]
        before = runs.base_cost if contender.from_base else 0.0
        assert list(line.get_xdata()) == [before + point.cost for point in one.points]
        assert list(line.get_ydata()) == [point.mean for point in one.points]
        assert (line.get_linewidth() > 2) == contender.is_usual
    assert len(ax.collections) == len(ALL)


def test_one_seed_has_no_band() -> None:
    _, ax, _ = sketched(system(seeds=1))
    assert not ax.collections


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
        assert sorted(mark.rival for mark in marks) == ["continued", "from-scratch"]
        said = [text for text in ax.texts if text.get_text().startswith("break-even")]
        boxes = [text.get_window_extent() for text in said]
        assert len(boxes) == 2
        assert not boxes[0].overlaps(boxes[1])
        inside = ax.get_window_extent()
        lowest = min(ax.transData.transform((1e9, min(p.losses)))[1] for c in runs.contenders for p in c.points)
        for mark, text, box in zip(marks, said, boxes, strict=True):
            assert f"{comparison_picture.RIVALS[mark.rival]}: {mark.cost / 1e9:.3g} GFLOPs" in text.get_text()
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


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda one: one.name)
def test_colours_can_be_read_on_light_and_dark_pages(contender: Any) -> None:
    light = comparison_picture.line_color(contender)
    assert find_contrast(light, PAPER) >= 4.5
    assert find_contrast(comparison_picture.dark_colors([contender])[light], DARK_PAPER) >= 4.5


@pytest.mark.usefixtures("pictures_without_pixels")
def test_pictures_lie_beside_the_page(tmp_path: Path) -> None:
    summary = comparison(2)
    page = write_report([write(tmp_path / "run", replace(summary, small=summary.small[:1], tuned=summary.tuned[3:4]))])
    names = {path.stem for path in page.parent.glob("*.svg")}
    assert names == {path.stem for path in page.parent.glob("*.png")}
    small = {"loss-against-cost-small-1", "loss-against-cost-small-1-narrow"}
    assert names == {"loss-against-cost", "loss-against-cost-narrow", "tuned-rates", "tuned-copies", *small}
    text = page.read_text(encoding="utf-8")
    assert text.count('media="(max-width: 640px)"') == 2
    assert not re.search(r"url\(|@import|https?:", re.sub(r"base64,[A-Za-z0-9+/=]+", "", text))


# -------------------------------------------------------------------------------- several, and damaged ones


@pytest.mark.usefixtures("undrawn")
def test_several_comparisons_stand_on_one_page(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, comparison()) for name in ("first", "second")]
    text = text_of(write_report(runs, tmp_path / "both").read_text(encoding="utf-8"))
    assert text.index("mlp-covtype (first)") < text.index("mlp-covtype (second)")
    assert text.count("The contenders, at the full budget") == 2
    other = summaries.write(tmp_path / "method")
    with pytest.raises(MupscaleError, match=r"first is a comparison and .*method a run of the paper's method"):
        write_report([runs[0], other], tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = to

    return change


DAMAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a field is missing": (lambda values: values.pop("forecast"), "'forecast' is missing"),
    "a list instead": (_set("recipe", to=[]), r"'recipe' is \[\], but must be a mapping"),
    "another version": (_set("format", to=7), "is of format 7"),
    "another kind": (_set("kind", to="party"), "is of the kind 'party'"),
    "no text": (_set("name", to=3), "'name' is 3, but must be text"),
    "a loss that is a text": (
        _set("large", "contenders", 1, "points", 0, "losses", 0, to="low"),
        r"large.contenders\[1\].points\[0\].losses\[0\]' is 'low'",
    ),
    "a loss that is none": (
        _set("small", 0, "contenders", 0, "points", 2, "losses", 0, to=float("nan")),
        r"small\[0\].contenders\[0\].points\[2\].losses\[0\]' is nan",
    ),
    "no points": (_set("large", "contenders", 0, "points", to=[]), r"large.contenders\[0\].points' is \[\]"),
    "another unit": (_set("large", "unit", to="$x$"), r"'large.unit' is '\$x\$', but must be FLOPs or steps"),
    "a stranger": (
        _set("large", "contenders", 0, "name", to="magic"),
        "name' is 'magic', but must be one of continued",
    ),
    "costs that fall": (_set("large", "contenders", 0, "points", 2, "cost", to=1.0), "costs do not rise"),
    "an answer about nobody": (_set("answer", "grown", to="paired-noise"), "not among large.contenders"),
    "an answer without a cost": (
        _set("answer", "break_even", "continued", "charged", to={"kind": "from", "cost": None}),
        "break_even.continued.charged has no cost",
    ),
    "no answer": (_set("answer", to={}), "'answer.sentence' is missing"),
    "an unknown field": (_set("large", "more", to=1), "there is no field 'large.more'"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_summaries_are_named_in_a_sentence(case: str, tmp_path: Path) -> None:
    change, wanted = DAMAGES[case]
    values = copy.deepcopy(json.loads(json.dumps(comparison().to_json())))
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
    with pytest.raises(MupscaleError, match=r"no comparison: cannot read its summary\.json"):
        load_summary(tmp_path / "nowhere")
    (tmp_path / "summary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(MupscaleError, match="is damaged"):
        load_summary(tmp_path)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    for number, summary in enumerate((comparison(3, ALL), forecast_only(comparison()))):
        assert load_summary(write(tmp_path / str(number), summary)) == summary
