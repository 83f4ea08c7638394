"""What a coordinate check found: a power of the width for each layer, with its error, a verdict and a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mupscale.checks.failed_training import failure_at
from mupscale.checks.power_laws import Power, fit_power
from mupscale.plots import COLORS, GREY, figure, save_figure
from mupscale.system import html_table, text_table

FLAT = 0.2
"""A power of the width within ±this counts as none."""

LayerVerdict = Literal["flat", "grows", "vanishes", "too noisy", "no verdict"]
Outcome = Literal["flat", "not flat", "too noisy to tell", "learning rate too large"]


@dataclass(frozen=True)
class Measurement:
    """One measurement: root mean square of a module's output, and of its change since the start, on one batch.

    loss: the model's, on that batch at that step, where it was computed.
    """

    width: float
    seed: int
    step: int
    module: str
    size: float
    change: float
    loss: float | None = None


@dataclass(frozen=True)
class Layer:
    """How a module's output changes with width, as powers fitted at the last step, and what follows.

    Activations must not grow (they may shrink: a readout starts near zero), and their changes be Θ(1). A power beyond
    the threshold by less than its margin, half of a 95 % interval, may be chance: that is too noisy to tell. So is one
    within the threshold whose standard error is larger than the threshold.
    diverged: training failed at this learning rate, whatever the width, so that only what is flat has a verdict.

    >>> [Layer("h", Power(0.0), Power(0.5, error, freedom=4)).verdict for error in (0.0, 0.1, 0.2)]
    ['grows', 'grows', 'too noisy']
    """

    module: str
    size: Power
    change: Power
    diverged: bool = False

    @property
    def size_power(self) -> float:
        """The power of the width that the output is proportional to."""
        return self.size.exponent

    @property
    def change_power(self) -> float:
        """The power of the width that the output's change by training is proportional to."""
        return self.change.exponent

    @property
    def flat(self) -> bool:
        """Whether both powers are within the threshold; False where that is too noisy to tell."""
        return self.verdict == "flat"

    @property
    def verdict(self) -> LayerVerdict:
        """The verdict in words."""
        if (power := self.guilty) is not None:
            return "grows" if power.exponent > 0 else "vanishes"
        shrinks = self.size_power + self.size.margin <= FLAT
        is_flat = abs(self.change_power) <= FLAT and self.size_power <= FLAT
        if is_flat and self.change.error <= FLAT and (shrinks or self.size.error <= FLAT):
            return "flat"
        return "no verdict" if self.diverged else "too noisy"

    @property
    def guilty(self) -> Power | None:
        """The power that is beyond the threshold by more than its margin: of the change or, else, of the size."""
        if self.diverged:
            return None
        if abs(self.change_power) - FLAT > self.change.margin:
            return self.change
        return self.size if self.size_power - FLAT > self.size.margin else None


@dataclass(frozen=True)
class CoordCheck:
    """The table of measurements, a verdict per layer, and a picture.

    axis: the size that the models differ in, and whose powers are fitted.

    >>> rows = [Measurement(width, 0, 1, "hidden", size=1.0, change=width / 64) for width in (64, 128, 256)]
    >>> print(CoordCheck(rows, "standard parametrisation"))
    standard parametrisation: NOT flat over widths 64, 128, 256
    module  size ∝ width^  change ∝ width^  verdict
    hidden   +0.00 ± 0.00     +1.00 ± 0.00    grows
    flat: power of the size at most 0.2 (it may shrink), of the change within ±0.2; ±: one standard error
    """

    rows: list[Measurement]
    title: str
    axis: str = "width"

    @property
    def layers(self) -> list[Layer]:
        """One verdict for each module that all models have."""
        last, widths = max(row.step for row in self.rows), dict[str, set[float]]()
        for row in self.rows:
            widths.setdefault(row.module, set()).add(row.width)
        modules = [module for module, measured in widths.items() if len(measured) == len(self.widths)]
        failed = self.failure is not None
        return [Layer(m, self._power(m, last, "size"), self._power(m, last, "change"), failed) for m in modules]

    @property
    def failure(self) -> str | None:
        """Where training fails at this learning rate for another reason than the width, and how; None if it does not.

        That is, at the smallest width already, or at one of them and not at the largest.
        """
        failures = {width: failure_at(width, self.rows) for width in self.widths}
        first, *_, last = failures.values()
        if first is None and last is not None:
            return None
        return next((f"at {self.axis} {width:g} {how}" for width, how in failures.items() if how), None)

    @property
    def ok(self) -> bool:
        """Whether every layer is flat. False, too, where that cannot be told: `outcome` tells the two apart."""
        return self.outcome == "flat"

    @property
    def outcome(self) -> Outcome:
        """Not flat if that is sure of one layer; too noisy to tell if a layer may be flat or not by chance.

        The learning rate is too large to tell where layers are not flat, and training fails at the smallest width.
        """
        verdicts = {layer.verdict for layer in self.layers}
        if "no verdict" in verdicts:
            return "learning rate too large"
        if verdicts & {"grows", "vanishes"}:
            return "not flat"
        return "too noisy to tell" if "too noisy" in verdicts else "flat"

    def mean(self, module: str, width: float, step: int, what: Literal["size", "change"]) -> float:
        """Mean over seeds."""
        values = self._values(module, width, step, what)
        return sum(values) / len(values)

    def _values(self, module: str, width: float, step: int, what: Literal["size", "change"]) -> list[float]:
        return [float(getattr(r, what)) for r in self.rows if (r.module, r.width, r.step) == (module, width, step)]

    @property
    def widths(self) -> list[float]:
        """The widths, in increasing order."""
        return sorted({row.width for row in self.rows})

    def _power(self, module: str, step: int, what: Literal["size", "change"]) -> Power:
        return fit_power({width: self._values(module, width, step, what) for width in self.widths})

    @property
    def verdict(self) -> str:
        """Whether all layers are flat, in a line."""
        values = ", ".join(str(int(w) if w == int(w) else w) for w in self.widths)
        what = "widths" if self.axis == "width" else self.axis
        if (outcome := self.outcome) == "learning rate too large":
            return f"{self.title}: {outcome} to tell over {what} {values}: {self.failure}; take a smaller one"
        line = f"{self.title}: {outcome.replace('not', 'NOT')} over {what} {values}"
        if outcome != "too noisy to tell":
            return line
        apart = f"{what if what == 'widths' else f'values of {what}'} further apart"
        return f"{line}: take {apart}, more seeds, or a smaller learning rate"

    @property
    def _header(self) -> tuple[str, ...]:
        return "module", f"size ∝ {self.axis}^", f"change ∝ {self.axis}^", "verdict"

    def __str__(self) -> str:
        return f"{self.verdict}\n{text_table(self._header, self._table_rows())}\n{_LEGEND}"

    def _repr_html_(self) -> str:
        """For a notebook."""
        return html_table(self._header, self._table_rows(), f"{self.verdict} ({_LEGEND})")

    def _table_rows(self) -> list[tuple[str, ...]]:
        return [(x.module, str(x.size), str(x.change), x.verdict) for x in self.layers]

    def plot(self, path: str | Path, *, narrow: bool = False) -> Path:
        """Change of each layer's activations against width at the last step; layers that are not flat in colour.

        Layers of which that cannot be told are dashed.

        narrow: a picture for a column or a phone, with the layers' names below.
        """
        return _plot(self, Path(path), narrow)


_LEGEND = (
    f"flat: power of the size at most {FLAT:g} (it may shrink), of the change within ±{FLAT:g}; ±: one standard error"
)
_ODD = "#d8a48f"  # layers that are not flat and have no colour left


def _plot(check: CoordCheck, path: Path, narrow: bool) -> Path:
    """Change since initialisation against width, one line per layer; what is not flat in colour, with its power."""
    fig, ax = figure(*((4.8, 4.4) if narrow else (7.5, 4.2)))
    last = max(row.step for row in check.rows)
    layers = check.layers
    odd = sorted((x for x in layers if x.guilty is not None), key=lambda x: -abs(x.change_power))
    named = {layer.module: COLORS[1 + i] for i, layer in enumerate(odd[: len(COLORS) - 1])}
    drawn = list[float]()
    for layer in layers:
        values = [check.mean(layer.module, w, last, "change") for w in check.widths]
        values = [v if math.isfinite(v) and v > 0 else math.nan for v in values]
        drawn += [v for v in values if v == v]
        style: dict[str, Any] = {"lw": 0.9, "color": GREY if layer.guilty is None else _ODD}
        style["ls"] = "--" if layer.verdict in ("too noisy", "no verdict") else "-"
        if layer.module in named:
            style |= {"lw": 1.6, "color": named[layer.module], "label": _label(layer, check.axis), "zorder": 3}
        ax.plot(check.widths, values, marker="o", ms=3, **style)
    flat, more = sum(layer.flat for layer in layers), len(odd) - len(named)
    noisy = len(layers) - len(odd) - flat
    unknown = "too noisy to tell" if check.failure is None else "without a verdict"
    rest = ((more, _ODD, "-", "more not flat"), (noisy, GREY, "--", unknown), (flat, GREY, "-", "flat"))
    for count, color, line, text in rest:
        if count:
            ax.plot([], [], f"o{line}", ms=3, lw=0.9, color=color, label=f"{count} {text}")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(check.widths, [f"{w:g}" for w in check.widths])
    ax.minorticks_off()
    low, high = (min(drawn), max(drawn)) if drawn else (1.0, 1.0)
    middle, half = math.sqrt(low * high), max(10.0, 1.3 * math.sqrt(high / low))
    ax.set_ylim(middle / half, middle * half)  # at least two decades, so that what is flat looks flat
    ax.set_xlabel(check.axis)
    ax.set_ylabel(f"rms change of the layer's output after {last} steps")
    ax.set_title(f"Coordinate check, {check.title}: {check.outcome}", loc="left", fontsize=9.5 if narrow else 11)
    names: dict[str, Any] = {"title": "layers", "fontsize": 8, "title_fontsize": 8}
    names |= {"alignment": "left", "frameon": False}
    if narrow:
        fig.legend(loc="outside lower center", ncols=2, **names)
    else:
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), **names)
    return save_figure(fig, path)


def _label(layer: Layer, axis: str) -> str:
    """The power that makes the layer not flat: of its change or, where that is flat, of its size."""
    power, by_change = layer.guilty or layer.change, layer.guilty is layer.change
    if math.isinf(power.exponent):
        return f"{layer.module} {'diverges' if power.exponent > 0 else 'vanishes'}"
    return f"{layer.module} {'∝' if by_change else 'size ∝'} {axis}$^{{{power.exponent:+.2f}}}$"
