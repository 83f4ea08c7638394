"""Tables and sentences that fit 80 columns without breaking a word."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mupscale as mu
from mupscale.models import GPT2
from mupscale.system import html_table, name_of_group, text_table, wrap_text
from mupscale.system.terminal import shorten_middle


def test_names_of_groups() -> None:
    assert name_of_group(["a.weight"]) == "a.weight"
    assert name_of_group([f"h.{i}.e.{j}.w1" for i in range(4) for j in range(2)]) == "h.0–3.e.0–1.w1"
    assert name_of_group(["h.0.e.1.w", "h.1.e.0.w"]) == "h.*.e.*.w"  # not all of them: no range would be true
    assert name_of_group([f"h.{i}.w" for i in (0, 2, 4, 6, 8)]) == "h.*.w"
    assert name_of_group(["0.weight", "1.weight"]) == "0–1.weight"


@pytest.mark.parametrize("width", [1, 2, 7, 16, 17])
def test_shortened_names_have_the_width(width: int) -> None:
    text = "model.layers.0–11.weight"
    short = shorten_middle(text, width)
    assert len(short) == width
    assert text.startswith(short.partition("…")[0])
    assert text.endswith(short.partition("…")[2])


def test_tables_fit_and_words_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("model.layers.0–11.block_sparse_moe.experts.0–63.w1.weight", "1024×4096 → 2048×8192", "2", "0.25")]
    header = ("parameter", "shape", "out", "lr × (Adam)")
    assert rows[0][0] in text_table(header, rows)
    monkeypatch.setenv("COLUMNS", "60")
    table = text_table(header, rows, left=2)
    assert max(map(len, table.splitlines())) == 60
    assert "1024×4096 → 2048×8192" in table
    sentence = "equivalent: largest relative output difference 1.1e-15 over twenty steps of training-with-a-long-word"
    assert max(map(len, wrap_text(sentence).splitlines())) <= 60
    assert wrap_text(sentence).split() == sentence.split()


def test_html_is_escaped() -> None:
    assert "<script>" not in html_table(("name",), [("<script>",)], "<script>")


def plan_of_gpt2() -> mu.Plan:
    narrow, wide = (GPT2(32, 8, layers=3, heads=heads, head_dim=4, width=None) for heads in (2, 4))
    return mu.plan(narrow, wide)


def test_a_plan_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan = plan_of_gpt2()
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(".0–2." in line for line in lines) >= 8  # a row for each kind of tensor in the blocks
    assert len(lines) < len(plan.parameters)
    page = plan._repr_html_()
    assert page.startswith("<table>")
    assert "0–2" in page


def test_reports_are_tables() -> None:
    torch.manual_seed(0)
    narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1)).double() for n in (4, 8))
    plan = mu.plan(narrow, wide)
    mu.widen(narrow, wide, plan)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(model(batch)).square().mean()

    batch = torch.randn(5, 3, dtype=torch.float64)
    report = mu.verify(narrow, wide, plan, [batch], loss, optimizer=torch.optim.SGD, lr=0.1, steps=20)
    lines = str(report).splitlines()
    assert lines[0].split()[:3] == ["step", "difference", "allowed"]
    assert [int(line.split()[0]) for line in lines[1:-1]] == [0, 3, 6, 9, 11, 14, 17, 20]
    assert lines[-1] == report.verdict
    assert report._repr_html_().count("<tr>") == 9
    family = mu.Family(lambda width: nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1)), base=16)
    check = mu.coord_check(family, [16, 32], [torch.randn(4, 3)], loss, torch.optim.SGD, lr=0.1, steps=1, seeds=1)
    assert str(check).splitlines()[0] == check.verdict
    assert check.verdict in check._repr_html_()


def test_a_plan_fits_80_columns_without_a_terminal_and_names_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    matrix = mu.Entry((1024, 4096), (2048, 8192), {0: mu.Axis(2, side="out"), 1: mu.Axis(2, side="in")})
    ends = [f"{part}.{kind}" for part in ("query", "key", "value") for kind in ("weight", "bias")]
    plan = mu.Plan({f"model.encoder.layers.{i}.self_attention.{end}": matrix for i in range(2) for end in ends})
    shapes, factors, _ = str(plan).split("\n\n")
    assert max(map(len, str(plan).splitlines())) <= 80
    for table in (shapes, factors):
        assert all(f"{end} " in table for end in ends)
        assert table.count("layers.0–1") == len(ends)
