"""Pictures of runs."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from mupscale import MupscaleError
from mupscale.plots import save_figure
from mupscale.train import draw_curves, run_curves
from mupscale.train.run_folder import RunFolder
from refusals import refuses

pytest.importorskip("matplotlib")


def run(folder: Path, *, flops: float | None = 1e9) -> str:
    folder.mkdir()
    records: list[dict[str, Any]] = [
        {"kind": "train", "step": 10, "loss": 2.0},
        {"kind": "grow", "step": 10, "width": {"heads": 4}},
        {"kind": "train", "step": 20, "loss": 1.0},
        {"kind": "end", "step": 20, "status": "finished"},
    ]
    for record in records:
        RunFolder(folder).write({"flops": flops and flops * record["step"], "seconds": record["step"], **record})
    return str(folder)


def keep_figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are written from now on."""
    figures: list[Any] = []
    monkeypatch.setattr(run_curves, "save_figure", lambda fig, path: figures.append(fig) or save_figure(fig, path))
    return figures


@pytest.mark.slow
def test_one_line_a_run_and_a_mark_a_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = keep_figures(monkeypatch)
    for against, last in (("step", 15), ("flops", 1.5e10), ("seconds", 15)):
        runs = [run(tmp_path / f"{against}-{name}") for name in "ab"]
        path = draw_curves(runs, str(tmp_path / against / "c.png"), against)  # type: ignore[arg-type]
        assert path.read_bytes().startswith(b"\x89PNG")
        ax = figures[-1].axes[0]
        lines = [line for line in ax.lines if line.get_label().startswith(against)]
        assert [list(line.get_ydata()) for line in lines] == [[2.0, 1.0]] * 2
        assert [line.get_xdata()[-1] for line in lines] == [last] * 2
        heights = [text.xy[1] for text in ax.texts if text.get_text() == "→ heads 4"]
        assert len(set(heights)) == 2, "the marks of two runs overlap"


def test_means_stand_midway_and_other_spacings_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a run that logs rarely looks like one that learns later."""
    figures = keep_figures(monkeypatch)
    for name, steps in (("often", (10, 20, 10, 20)), ("rarely", (40, 80))):  # the first goes back
        lines = [json.dumps({"kind": kind, "step": n, "loss": 1.0}) for n in steps for kind in ("train", "eval")]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    both, out = [str(tmp_path / "often"), str(tmp_path / "rarely")], str(tmp_path / "c.png")
    draw_curves(both, out)
    assert [list(line.get_xdata()) for line in figures[-1].axes[0].lines] == [[5, 15, 10, 15], [20, 60]]
    assert figures[-1].axes[0].get_ylabel() == "training loss, mean since the point before"
    assert "to compare, use --loss held-out" in capsys.readouterr().err
    draw_curves(both, out, loss="held-out")
    assert [list(line.get_xdata()) for line in figures[-1].axes[0].lines] == [[10, 20, 10, 20], [40, 80]]
    draw_curves(both[:1], out)
    assert not capsys.readouterr().err


def test_losses_that_lie_close_have_numbers_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = keep_figures(monkeypatch)
    path = run(tmp_path / "run")
    RunFolder(path).write({"kind": "eval", "step": 10, "loss": 1.03})
    RunFolder(path).write({"kind": "eval", "step": 20, "loss": 0.94})
    draw_curves([path], str(tmp_path / "c.png"), loss="held-out")
    ax = figures[-1].axes[0]
    low, high = ax.get_ylim()
    assert len([tick for tick in ax.get_yticks() if low <= tick <= high]) > 2


def test_nothing_to_draw(tmp_path: Path) -> None:
    unknown = run(tmp_path / "unknown", flops=None)
    refuses("no training loss against flops", draw_curves, [unknown], str(tmp_path / "c.png"), "flops")
    refuses("no held-out loss", draw_curves, [unknown], str(tmp_path / "c.png"), loss="held-out")
    refuses("nowhere has no training loss", draw_curves, [str(tmp_path / "nowhere")], str(tmp_path / "c.png"))


def test_a_full_disk_names_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fill)
    with pytest.raises(MupscaleError, match=r"the picture .*/c\.svg cannot be written: No space left on device"):
        draw_curves([run(tmp_path / "run")], str(tmp_path / "c.svg"))


def test_a_line_of_very_many_points_keeps_its_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = keep_figures(monkeypatch)
    losses = [2.0] * 20_000
    losses[7_777], losses[15_001] = 77.0, 0.25
    lines = [json.dumps({"kind": "train", "step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    draw_curves([str(tmp_path)], str(tmp_path / "c.png"))
    (line,) = figures[-1].axes[0].lines
    assert len(line.get_ydata()) <= 2000
    assert (max(line.get_ydata()), min(line.get_ydata())) == (77.0, 0.25)


GOOD = {"kind": "train", "step": 1, "loss": 0.5, "lr": 0.1, "width": 8}
BAD = {
    "a step below 0": {"step": -1},
    "a step too large": {"step": 1 << 63},
    "a step that is true": {"step": True},
    "no step at all": {"step": None},
    "a loss of 400 digits": {"loss": 10**400},
    "a width of 0": {"width": 0},
    "widths below 0": {"width": {"heads": -1}},
    "a kind that is a list": {"kind": []},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_lines_like_those_before_are_looked_at_all_the_same(tmp_path: Path, change: dict[str, Any]) -> None:
    lines = [GOOD, {**GOOD, "loss": None}, {**GOOD, "width": {"heads": 2}}, GOOD, {**GOOD, "step": 0}]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert RunFolder(tmp_path).records() == lines
    metrics.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {**GOOD, **change}]))
    with pytest.raises(MupscaleError, match=f"line 6: '{next(iter(change))}'"):
        RunFolder(tmp_path).records()


def test_lines_with_blanks_count_and_those_cut_short_do_not(tmp_path: Path) -> None:
    good = json.dumps(GOOD)
    text = f"{good}\n  {good} \r\n\n{good}{good}\n{good} x\nnothing\n{'[' * 9000}\n{good[:-1]}\n{good}"
    (tmp_path / "metrics.jsonl").write_text(text)
    assert RunFolder(tmp_path).records() == [GOOD, GOOD]
