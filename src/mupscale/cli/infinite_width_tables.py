"""What `mupscale limit …` prints: tables, and the sentences below them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mupscale.cli.arguments import installed
from mupscale.system import show, show_table, terminal_width, wrap_text

if TYPE_CHECKING:
    from mupscale.sweep import Sweep
    from mupscale.theory import ConditionCheck, Estimate, LimitComparison, WayToGrow, WorkedExample


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table; the first of three columns holds sentences.

    On a narrow terminal sentences are broken and numbers never are: the table is rather wider than the terminal.
    """
    table = installed("rich.table").Table(title=title, title_justify="left")
    cells, least = [tuple(row) for row in rows], 1
    for number, name in enumerate(columns):
        sentences = number == 0 and len(columns) == 3
        texts = [name, *(row[number] for row in cells)]
        least += 3 + max(len(piece) for text in texts for piece in (text.split() if sentences else [text]))
        table.add_column(name, justify="left" if sentences else "right", no_wrap=not sentences)
    for row in cells:
        table.add_row(*row)
    show_table(table, max(terminal_width() or 160, least))


def print_example(example: WorkedExample) -> None:
    """A worked example: closed form, limit and networks, step by step."""
    comparison = example.comparison
    columns = ["step", "closed form", "limit − it", *(f"n = {n}" for n in comparison.widths)]
    print_table(f"Example {example.number}: the output", columns, _output_rows(example))
    slope = f" {_slope(comparison)}" if comparison.slope is not None else ""
    show(wrap_text(f"The limit backend is within {example.difference:.1e} of the closed form.{slope}") + "\n")


def print_conditions(checks: Sequence[ConditionCheck]) -> None:
    """How far conditions leave the limit unchanged."""
    rows = [(check.choice, check.what, f"{check.change:.2g}") for check in checks]
    print_table("How far from the run that is never upscaled", ["with", "of", "changes by"], rows)


def print_comparison(comparison: LimitComparison) -> None:
    """An MLP in the limit and at finite widths."""
    title = "The loss at the end, and how far outputs are from the limit (rms)"
    columns = ["n", "k·n", "loss", "one network", "their mean", "std. error"]
    print_table(title, columns, _comparison_rows(comparison))
    if comparison.times > 1:
        correlation = comparison.limit.correlation
        least = f"{float(correlation.min()):.3f} at its lowest, {float(correlation[-1]):.3f} at the end"
        which = "copies of a unit that part first" if len(comparison.upscaled) > 1 else "copies of a unit"
        show(wrap_text(f"Correlation between {which}, in the limit: {least}."))
    if comparison.slope is not None:
        show(wrap_text(_slope(comparison)))
    if comparison.limit.outputs.note:
        show(wrap_text(f"Note: {comparison.limit.outputs.note}."))


def print_ways(
    ways: Sequence[WayToGrow], lr: float, width: int | None, comparisons: Mapping[str, LimitComparison]
) -> None:
    """Ways to grow by rate: in the limit, and of networks of one width; and how fast networks come closer."""
    from mupscale.theory import best_way

    _print_losses("The loss at infinite width", [(way, way.limit) for way in ways], lr)
    if width is not None:
        _print_losses(f"Networks of n = {width:,}", [(way, way.networks) for way in ways], lr)
    for how in ("copies", "fresh"):
        best = best_way(ways, how)
        if best is not None and best.limit is not None:
            ends = f"{_last_value(best.limit)} in the limit"
            ends += f", {_last_value(best.networks)} of networks" if best.networks is not None else ""
            show(wrap_text(f"Best {best.name} at {best.stage.lr / lr:g} times the base model's rate: {ends}."))
    for name, comparison in comparisons.items():
        if comparison.slope is not None:
            show(wrap_text(f"{name[0].upper()}{name[1:]}: {_slope(comparison)}"))


def _print_losses(title: str, ways: Sequence[tuple[WayToGrow, Estimate | None]], lr: float) -> None:
    """A row for each way; the loss just after the growth, and at the end by rate."""
    rates = sorted({way.stage.lr for way, _ in ways})
    rows: dict[str, dict[float, Estimate | None]] = {}
    for way, losses in ways:
        rows.setdefault(way.name, {})[way.stage.lr] = losses
    cells = []
    for name, found in rows.items():
        at_once = next((f"{float(losses.mean[0]):.3g}" for losses in found.values() if losses is not None), "")
        ends = [found[rate] for rate in rates]
        cells.append((name, at_once, *("diverged" if e is None else f"{float(e.mean[-1]):.3g}" for e in ends)))
    print_table(title, ["grown by", "at once", *(f"{rate / lr:g} × the rate" for rate in rates)], cells)


def print_best(sweeps: Sequence[Sweep]) -> None:
    """The best cell of each sweep, and what else a sweep shows."""
    from mupscale.sweep import sweep_remarks

    columns = ["upscaled to", "noise", "learning rate", "loss", "best without noise"]
    print_table("The best cell at infinite width", columns, map(_best_row, sweeps))
    for sweep in sweeps:
        for sentence in sweep_remarks(sweep):
            show(wrap_text(f"{sweep.start} → {sweep.width}: {sentence}."))


def _comparison_rows(comparison: LimitComparison) -> Iterator[tuple[str, ...]]:
    for networks, error, (gap, doubt) in zip(comparison.finite, comparison.errors, comparison.gaps, strict=True):
        n, loss = networks.width or 0, _last_value(networks.losses)
        yield f"{n:,}", f"{n * comparison.times:,}", loss, f"{error:.2g}", f"{gap:.2g}", f"{doubt:.1g}"
    doubt = float(comparison.limit.outputs.standard_error.square().mean().sqrt())
    yield "∞", "", _last_value(comparison.limit.losses), "", "", f"{doubt:.1g}"


def _output_rows(example: WorkedExample) -> Iterator[tuple[str, ...]]:
    limit = example.comparison.limit.outputs.mean.flatten().tolist()
    networks = [measured.outputs for measured in example.comparison.finite]
    for step, closed in enumerate(example.closed):
        cells = [f"{float(e.mean[step]):.3f} ± {float(e.standard_error[step]):.3f}" for e in networks]
        yield str(step), f"{closed:.6f}", f"{limit[step] - closed:.1e}", *cells


def _best_row(sweep: Sweep) -> tuple[str, ...]:
    losses = [trial.loss for trial in sweep.trials if trial.noise == 0 and trial.loss is not None]
    zero = f"{min(losses):.4g}" if losses else "diverged"
    if all(trial.loss is None for trial in sweep.trials):
        return str(sweep.width), "", "", "all diverged", zero
    best = sweep.best
    loss = f"{best.loss:.4g} ± {_standard_error(best.finite):.1g}"
    return str(sweep.width), f"{best.noise:g}", f"{best.lr:g}", loss, zero


def _last_value(estimate: Estimate) -> str:
    mean, error = float(estimate.mean[-1]), float(estimate.standard_error[-1])
    return f"{mean:.4g} ± {error:.1g}"


def _slope(comparison: LimitComparison) -> str:
    slope, doubt = comparison.slope or 0.0, comparison.slope_error or 0.0
    power = f"n^{slope:.2f}, give or take {doubt:.2f}"
    if slope + 2 * doubt >= 0:
        return (
            f"These networks do not tell how fast they come closer as n grows ({power}; the Master theorem says "
            f"n^-0.5): take more networks, or widths that are farther apart."
        )
    return f"Networks come closer as {power}; the Master theorem says n^-0.5."


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
