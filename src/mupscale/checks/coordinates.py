"""The coordinate check: how large activations, and their changes by training, are at each width.

Under μP they do not depend on the width (the paper's 'all hidden activations and their updates stay Θ(1)'); under
the standard parametrisation they grow or vanish. One look tells whether a family is set up right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.checks.equivalence import Loss
from mupscale.core import Plan, Width, WidthLike, naming
from mupscale.growth import Identity, find_block_lists
from mupscale.planning import Recorder, silence_dropout
from mupscale.plots import COLORS, GREY, figure, save_figure
from mupscale.system import MupscaleError, checks_arguments, html_table, seeded, text_table

NOTHING = 1e-12  # below this a measurement counts as zero


@dataclass(frozen=True)
class Power:
    """An exponent and its standard error, infinite where one seed at two sizes leaves nothing to tell it from.

    An infinite exponent: finite at small sizes and not at large ones. NaN: not finite, and not by the size.
    freedom: the degrees of freedom that the error was estimated with.
    """

    exponent: float
    error: float = 0.0
    freedom: int = 0

    @property
    def margin(self) -> float:
        """Half of a 95 % interval: the standard error times Student's factor, which is large for few measurements."""
        return self.error and self.error * (_FACTORS.get(self.freedom) or 1.96 + 2.7 / max(self.freedom, 1))

    def __str__(self) -> str:
        if not math.isfinite(self.exponent):
            return f"{self.exponent:+}" if math.isinf(self.exponent) else "not finite"
        return f"{self.exponent:+.2f} ± {'?' if math.isinf(self.error) else f'{self.error:.2f}'}"


_FACTORS = {1: 12.71, 2: 4.3, 3: 3.18, 4: 2.78}  # Student's 97.5 % quantiles, where the formula is off


def fit_power(values: Mapping[float, Sequence[float]]) -> Power:
    """The least-squares slope of log mean against log size; values: by size, in increasing order, one for each seed.

    Its standard error counts how far seeds are from the line, and so how far the means are from it, too.
    What is zero at all sizes has power 0.
    """
    means = [fmean(several) for several in values.values()]
    if not all(math.isfinite(mean) for mean in means):
        return Power(math.inf if math.isfinite(means[0]) and not math.isfinite(means[-1]) else math.nan)
    if min(means) < NOTHING:
        return Power(0.0 if max(means) < NOTHING else -math.inf)
    xs = [math.log(size) for size in values]
    slope, start = linear_regression(xs, [math.log(mean) for mean in means])
    points = [(x, math.log(max(v, NOTHING))) for x, several in zip(xs, values.values(), strict=True) for v in several]
    if (freedom := len(points) - 2) < 1:
        return Power(slope, math.inf)
    off = fsum((y - start - slope * x) ** 2 for x, y in points)
    spread = fsum((x - fmean(xs)) ** 2 for x, _ in points)
    return Power(slope, math.sqrt(off / freedom / spread), freedom)


_RISE = 1.0  # of the loss at the start: so much more, and a rate is called too large


def failure_at(width: float, rows: Sequence[Measurement]) -> str | None:
    """How training fails at this width, in words: None where it does not, or where it was not sound at the start.

    Means over seeds count. A loss that is twice that of the start at any step has failed, even if it falls later.
    """
    here = [row for row in rows if row.width == width]
    last = max((row.step for row in here), default=0)
    steps = f"{last} step{'s' * (last != 1)}"
    by_step = [[row.loss for row in here if row.step == step and row.loss is not None] for step in range(last + 1)]
    losses = [fmean(known) for known in by_step if known]
    if len(losses) > 1 and math.isfinite(losses[0]):
        start, *later = losses
        highest = next((loss for loss in later if not math.isfinite(loss)), max(later))
        if not highest - start <= _RISE * abs(start):  # true of NaN, too
            return f"the loss goes from {start:.3g} to {highest:.3g} within {steps}"
    lost = min((row.step for row in here if not math.isfinite(row.size)), default=0)
    return f"activations are not finite after {steps}" if lost and min(row.step for row in here) == 0 else None


def names_in_shallow(shallow: nn.Module, deep: nn.Module) -> dict[str, str]:
    """What modules of the deep model are called in the shallow one; those that it has no counterpart of are left out.

    Block i of n corresponds to block ⌊i·N/n⌋ of N, which reads the stream at the same part of the way.

    >>> shallow, deep = (nn.ModuleDict({"h": nn.ModuleList(nn.Linear(2, 2) for _ in range(n))}) for n in (2, 6))
    >>> names_in_shallow(shallow, deep)
    {'': '', 'h': 'h', 'h.0': 'h.0', 'h.3': 'h.1'}
    """
    ours, theirs = naming.modules(shallow), naming.modules(deep)
    prefixes: dict[str, str | None] = {}
    if ours.keys() != theirs.keys():
        try:
            lists = find_block_lists(shallow, deep)
        except MupscaleError:  # what has the same name has to do
            lists = []
        for one in lists:
            for path, place in zip(one.deep, Identity().places(len(one.shallow), len(one.deep)), strict=True):
                prefixes[path] = None if place.is_new else one.shallow[place.block]
            prefixes |= one.moved
    names: dict[str, str] = {}
    for path in theirs:
        inside = next((prefix for prefix in prefixes if path == prefix or path.startswith(f"{prefix}.")), None)
        start = "" if inside is None else prefixes[inside]
        if start is not None and (name := start + path.removeprefix(inside or "")) in ours:
            names[path] = name
    return names


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
    def verdict(self) -> LayerVerdict:
        """The verdict in words."""
        if (power := self.guilty) is not None:
            return "grows" if power.exponent > 0 else "vanishes"
        shrinks = self.size.exponent + self.size.margin <= FLAT
        is_flat = abs(self.change.exponent) <= FLAT and self.size.exponent <= FLAT
        if is_flat and self.change.error <= FLAT and (shrinks or self.size.error <= FLAT):
            return "flat"
        return "no verdict" if self.diverged else "too noisy"

    @property
    def guilty(self) -> Power | None:
        """The power that is beyond the threshold by more than its margin: of the change or, else, of the size."""
        if self.diverged:
            return None
        if abs(self.change.exponent) - FLAT > self.change.margin:
            return self.change
        return self.size if self.size.exponent - FLAT > self.size.margin else None


@dataclass(frozen=True)
class CoordCheck:
    """The table of measurements, a verdict per layer, and a picture.

    axis: the size that the models differ in, and whose powers are fitted.
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
        return fmean(self._values(module, width, step, what))

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
        return html_table(self._header, self._table_rows(), f"{self.verdict} ({_LEGEND})")

    def _table_rows(self) -> list[tuple[str, ...]]:
        return [(x.module, str(x.size), str(x.change), x.verdict) for x in self.layers]

    def plot(self, path: str | Path, *, narrow: bool = False) -> Path:
        """Draw `sketch` into a file. narrow: for a column or a phone, with the layers' names below."""
        fig, ax = figure(*((4.8, 4.4) if narrow else (7.5, 4.2)))
        self.sketch(ax, narrow=narrow)
        return save_figure(fig, Path(path))

    def sketch(self, ax: Any, *, narrow: bool = False) -> None:
        """Change of each layer's output against width at the last step; what is not flat in colour, with its power.

        Layers of which that cannot be told are dashed.
        """
        last = max(row.step for row in self.rows)
        layers = self.layers
        odd = sorted((x for x in layers if x.guilty is not None), key=lambda x: -abs(x.change.exponent))
        named = {layer.module: COLORS[1 + i] for i, layer in enumerate(odd[: len(COLORS) - 1])}
        drawn = list[float]()
        for layer in layers:
            values = [self.mean(layer.module, w, last, "change") for w in self.widths]
            values = [v if math.isfinite(v) and v > 0 else math.nan for v in values]
            drawn += [v for v in values if v == v]
            style: dict[str, Any] = {"lw": 0.9, "color": GREY if layer.guilty is None else _ODD}
            style["ls"] = "--" if layer.verdict in ("too noisy", "no verdict") else "-"
            if layer.module in named:
                style |= {"lw": 1.6, "color": named[layer.module], "label": _label(layer, self.axis), "zorder": 3}
            ax.plot(self.widths, values, marker="o", ms=3, **style)
        flat, more = sum(layer.verdict == "flat" for layer in layers), len(odd) - len(named)
        noisy = len(layers) - len(odd) - flat
        unknown = "too noisy to tell" if self.failure is None else "without a verdict"
        rest = ((more, _ODD, "-", "more not flat"), (noisy, GREY, "--", unknown), (flat, GREY, "-", "flat"))
        for count, color, line, text in rest:
            if count:
                ax.plot([], [], f"o{line}", ms=3, lw=0.9, color=color, label=f"{count} {text}")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(self.widths, [f"{w:g}" for w in self.widths])
        ax.minorticks_off()
        low, high = (min(drawn), max(drawn)) if drawn else (1.0, 1.0)
        middle, half = math.sqrt(low * high), max(10.0, 1.3 * math.sqrt(high / low))
        ax.set_ylim(middle / half, middle * half)  # at least two decades, so that what is flat looks flat
        ax.set_xlabel(self.axis)
        ax.set_ylabel(f"rms change of the layer's output after {last} steps")
        ax.set_title(f"Coordinate check, {self.title}: {self.outcome}", loc="left", fontsize=9.5 if narrow else 11)
        names: dict[str, Any] = {"title": "layers", "fontsize": 8, "title_fontsize": 8}
        names |= {"alignment": "left", "frameon": False}
        if narrow:
            ax.figure.legend(loc="outside lower center", ncols=2, **names)
        else:
            ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), **names)


_LEGEND = (
    f"flat: power of the size at most {FLAT:g} (it may shrink), of the change within ±{FLAT:g}; ±: one standard error"
)
_ODD = "#d8a48f"  # layers that are not flat and have no colour left


def _label(layer: Layer, axis: str) -> str:
    """The power that makes the layer not flat: of its change or, where that is flat, of its size."""
    power, by_change = layer.guilty or layer.change, layer.guilty is layer.change
    if math.isinf(power.exponent):
        return f"{layer.module} {'diverges' if power.exponent > 0 else 'vanishes'}"
    return f"{layer.module} {'∝' if by_change else 'size ∝'} {axis}$^{{{power.exponent:+.2f}}}$"


OUTPUT = "(output)"
_TITLES = {"mup": "μP", "standard": "standard parametrisation"}


@runtime_checkable
class Members(Protocol):
    """What the check asks of a family: a model and an optimizer at every width, and the plan between them."""

    def build(self, width: WidthLike) -> nn.Module:
        """A model with its author's own initialisation."""
        ...

    def init(self, width: WidthLike, seed: int = 0) -> nn.Module:
        """A model with the initialisation of μP."""

    def optimizer(self, model: nn.Module, optimizer: type[Optimizer], **hyper: Any) -> Optimizer:
        """Its optimizer, with the rates of its width."""

    def plan(self, width: nn.Module) -> Plan:
        """From the base to this model."""


@checks_arguments
def coord_check(
    family: Members,
    widths: Sequence[WidthLike],
    batches: Iterable[Any],
    loss: Loss,
    optimizer: type[Optimizer],
    *,
    steps: int = 4,
    seeds: int = 2,
    parametrization: Literal["mup", "standard"] = "mup",
    dtype: torch.dtype | None = None,
    **hyper: Any,
) -> CoordCheck:
    """Train members of the family for a few steps and measure their modules' outputs on the first batch.

    A power of the width is fitted to what the seeds gave, with a standard error. A layer is flat if its output has a
    power of at most 0.2, and the output's change by training one within ±0.2. A power beyond that, but not with its
    95 % interval, is too noisy to tell (`ok` is False, `outcome` says so), and so is one whose standard error is above
    0.2: take widths further apart, more seeds, or a smaller learning rate.
    Where layers are not flat, and the loss doubles or is not finite at the smallest width already, `outcome` is
    "learning rate too large": take one at which that model trains. At large widths alone that is "not flat".
    parametrization="standard" trains the author's own initialisation with one learning rate, for comparison.
    Of models of several depths, blocks are compared that lie at the same part of the way, under the shallowest's names.
    One size may differ, or several that grow by the same factors; a depth differs alone.

    >>> import mupscale as mu
    >>> from mupscale.models import MLP
    >>> x, y = torch.randn(16, 3), torch.randn(16, 1)
    >>> family = mu.Family(lambda width: MLP(3, width, 1), base=64)
    >>> loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    >>> check = mu.coord_check(family, [16, 32], [(x, y)], loss, torch.optim.Adam, lr=0.01, steps=1, seeds=1)
    >>> check.widths, [layer.module for layer in check.layers]
    ([16.0, 32.0], ['layers.0', 'layers.1', 'layers.2', 'layers.3'])
    """
    data = list(batches)
    if len(widths) < 2 or not data:
        raise MupscaleError("coord_check needs at least two widths and one batch")
    members = [Width.of(width) for width in widths]
    axis, sizes = _differing_size(members)
    rows: list[Measurement] = []
    first: nn.Module | None = None
    for size, width in sorted(zip(sizes, members, strict=True), key=lambda pair: pair[0]):
        for seed in range(seeds):
            with seeded(seed):
                model = family.init(width, seed) if parametrization == "mup" else family.build(width)
            silence_dropout(model)  # another mask at every look would count as change
            model = model.to(dtype=dtype)
            folds = dict[str, float]()
            if parametrization == "mup":
                opt, folds = family.optimizer(model, optimizer, **hyper), _folds(family.plan(model))
            else:
                opt = optimizer(model.parameters(), **hyper)
            first = model if first is None else first
            if (
                len(_differing_names(members)) > 1
                and naming.parameters(first).keys() != naming.parameters(model).keys()
            ):
                raise _several_sizes(members, "and one of them is a number of layers,")
            names = {path or OUTPUT: name or OUTPUT for path, name in names_in_shallow(first, model).items()}
            measured = _measure(model, opt, data, loss, steps, size, seed, folds)
            rows += [replace(row, module=names[row.module]) for row in measured if row.module in names]
    return CoordCheck(rows, f"{_TITLES[parametrization]}, {optimizer.__name__}", axis)


def _differing_size(widths: Sequence[Width]) -> tuple[str, list[float]]:
    """The name of the one size in which these widths differ, such as a depth, and its values.

    "width" and the largest size where several grow by the same factors.
    """
    for width in widths[1:]:
        width.check_form(widths[0])
    names = _differing_names(widths)
    axis, sizes = "width", [float(width.size) for width in widths]
    if len(names) == 1:
        axis, sizes = names[0], [float(width.sizes[names[0]]) for width in widths]
    elif any(len({width.ratio_to(widths[0])[name] for name in names}) > 1 for width in widths):
        raise _several_sizes(widths, "by different factors")
    if len(set(sizes)) < len(sizes):
        raise MupscaleError(
            f"coord_check compares models of different sizes, and {axis} is {', '.join(f'{s:g}' for s in sizes)}; let "
            f"each differ from the others"
        )
    return axis, sizes


def _differing_names(widths: Sequence[Width]) -> list[str]:
    return [name for name in widths[0].sizes if len({width.sizes[name] for width in widths}) > 1]


def _several_sizes(widths: Sequence[Width], how: str) -> MupscaleError:
    names, values = _differing_names(widths), "; ".join(map(str, widths))
    return MupscaleError(
        f"coord_check fits powers of one size, and {' and '.join(names)} differ {how} here ({values}); vary one size "
        f"at a time, and keep the others as they are"
    )


def _folds(plan: Plan) -> dict[str, float]:
    """Constants that are folded into all of a module's parameters, and so into its output: the 1/k of a tied readout.

    A weight whose forward has a multiplier of its own (MuReadout: fold = in_) gives its output as it is.
    """
    own: dict[str, set[float]] = {}
    for name, entry in plan.parameters.items():
        undone = entry.rule.weight == 1
        own.setdefault(name.rpartition(".")[0], set()).add(1.0 if undone else float(entry.fold * entry.constants.undo))
    return {path: folds.pop() for path, folds in own.items() if len(folds) == 1}


def _measure(
    model: nn.Module,
    optimizer: Optimizer,
    data: list[Any],
    loss: Loss,
    steps: int,
    width: float,
    seed: int,
    folds: Mapping[str, float],
) -> list[Measurement]:
    rows, start = [], dict[str, Tensor]()
    measured = {
        path for path, module in naming.modules(model).items() if any(True for _ in module.parameters(recurse=False))
    }
    for step in range(steps + 1):
        with torch.no_grad(), Recorder(model) as recorder:
            value = float(loss(model, data[0]))
        if step == 0 and (own := recorder.outputs.get("")) is not None:
            of_layers = (o for path, o in recorder.outputs.items() if path in measured and o.numel() == own.numel())
            if not any(torch.equal(o.flatten(), own.flatten()) for o in of_layers):
                measured.add("")  # computed by no layer: a product of two of them, a functional readout
        for path, output in recorder.outputs.items():
            if path in measured:
                output = output / folds.get(path, 1.0)
                start.setdefault(path, output)
                name = path or OUTPUT
                size, change = (float(x.double().square().mean().sqrt()) for x in (output, output - start[path]))
                rows.append(Measurement(width, seed, step, name, size, change, value))
        if step == steps:
            break
        optimizer.zero_grad()
        loss(model, data[step % len(data)]).backward()
        optimizer.step()
    return rows
