"""The coordinate check: how large activations, and their changes by training, are at each width.

Under μP they do not depend on the width (the paper's 'all hidden activations and their updates stay Θ(1)'); under
the standard parametrisation they grow or vanish. One look tells whether a family is set up right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.checks.equivalence import Loss
from mupscale.checks.same_depth import names_in_shallow
from mupscale.core import Plan, Width, WidthLike, naming
from mupscale.planning import Recorder, silence_dropout
from mupscale.plots import COLORS, GREY, figure, save_figure
from mupscale.system import MupscaleError, html_table, seeded, text_table

FLAT = 0.2
"""A power of the width within ±this counts as none."""


@dataclass(frozen=True)
class Measurement:
    """One measurement: root mean square of a module's output, and of its change since the start, on one batch."""

    width: float
    seed: int
    step: int
    module: str
    size: float
    change: float


@dataclass(frozen=True)
class Layer:
    """How a module's output changes with width, as powers fitted at the last step, and what follows."""

    module: str
    size_power: float
    change_power: float

    @property
    def flat(self) -> bool:
        """Activations must not grow (they may shrink: a readout starts near zero), and their changes be Θ(1)."""
        return self.size_power <= FLAT and abs(self.change_power) <= FLAT

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if self.flat:
            return "flat"
        power = self.change_power if abs(self.change_power) > FLAT else self.size_power
        return "grows" if power > 0 else "vanishes"


@dataclass(frozen=True)
class CoordCheck:
    """The table of measurements, a verdict per layer, and a picture.

    axis: the size that the models differ in, and whose powers are fitted.

    >>> rows = [Measurement(width, 0, 1, "hidden", size=1.0, change=width / 64) for width in (64, 128, 256)]
    >>> print(CoordCheck(rows, "standard parametrisation"))
    standard parametrisation: NOT flat over widths 64, 128, 256
    module  size ∝ width^  change ∝ width^  verdict
    hidden          +0.00            +1.00    grows
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
        return [Layer(m, self._power(m, last, "size"), self._power(m, last, "change")) for m in modules]

    @property
    def ok(self) -> bool:
        """Whether every layer is flat."""
        return all(layer.flat for layer in self.layers)

    def mean(self, module: str, width: float, step: int, what: Literal["size", "change"]) -> float:
        """Mean over seeds."""
        values = [getattr(r, what) for r in self.rows if (r.module, r.width, r.step) == (module, width, step)]
        return float(sum(values) / len(values))

    @property
    def widths(self) -> list[float]:
        """The widths, in increasing order."""
        return sorted({row.width for row in self.rows})

    def _power(self, module: str, step: int, what: Literal["size", "change"]) -> float:
        """Least-squares slope of log size against log width; a layer that does not change at all has power 0."""
        sizes = [self.mean(module, w, step, what) for w in self.widths]
        if not all(math.isfinite(s) for s in sizes):
            return math.inf
        if min(sizes) < 1e-12:
            return 0.0 if max(sizes) < 1e-12 else -math.inf
        xs, ys = [math.log(w) for w in self.widths], [math.log(s) for s in sizes]
        mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
        return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)

    @property
    def verdict(self) -> str:
        """Whether all layers are flat, in a line."""
        values = ", ".join(str(int(w) if w == int(w) else w) for w in self.widths)
        what = "widths" if self.axis == "width" else self.axis
        return f"{self.title}: {'flat' if self.ok else 'NOT flat'} over {what} {values}"

    @property
    def _header(self) -> tuple[str, ...]:
        return "module", f"size ∝ {self.axis}^", f"change ∝ {self.axis}^", "verdict"

    def __str__(self) -> str:
        return f"{self.verdict}\n{text_table(self._header, self._table_rows())}"

    def _repr_html_(self) -> str:
        """For a notebook."""
        return html_table(self._header, self._table_rows(), self.verdict)

    def _table_rows(self) -> list[tuple[str, ...]]:
        return [(x.module, f"{x.size_power:+.2f}", f"{x.change_power:+.2f}", x.verdict) for x in self.layers]

    def plot(self, path: str | Path, *, narrow: bool = False) -> Path:
        """Change of each layer's activations against width at the last step; layers that are not flat in colour.

        narrow: a picture for a column or a phone, with the layers' names below.
        """
        return _plot(self, Path(path), narrow)


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

    parametrization="standard" trains the author's own initialisation with one learning rate, for comparison.
    Of models of several depths, blocks are compared that lie at the same part of the way, under the shallowest's names.

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
            model = _member(family, width, seed, parametrization).to(dtype=dtype)
            silence_dropout(model)  # another mask at every look would count as change
            if parametrization == "mup":
                opt = family.optimizer(model, optimizer, **hyper)
            else:
                opt = optimizer(model.parameters(), **hyper)
            folds = _folds(family.plan(model)) if parametrization == "mup" else {}
            first = model if first is None else first
            names = {path or OUTPUT: name or OUTPUT for path, name in names_in_shallow(first, model).items()}
            measured = _measure(model, opt, data, loss, steps, size, seed, folds)
            rows += [replace(row, module=names[row.module]) for row in measured if row.module in names]
    title = {"mup": "μP", "standard": "standard parametrisation"}[parametrization]
    return CoordCheck(rows, f"{title}, {optimizer.__name__}", axis)


def _differing_size(widths: Sequence[Width]) -> tuple[str, list[float]]:
    """The name of the one size in which these widths differ, such as a depth, and its values; else the width's own."""
    for width in widths[1:]:
        width.check_form(widths[0])
    names = [name for name in widths[0].sizes if len({width.sizes[name] for width in widths}) > 1]
    axis, sizes = "width", [float(width.size) for width in widths]
    if len(names) == 1:
        axis, sizes = names[0], [float(width.sizes[names[0]]) for width in widths]
    if len(set(sizes)) < len(sizes):
        raise MupscaleError(
            f"coord_check compares models of different sizes, and {axis} is {', '.join(f'{s:g}' for s in sizes)}; let "
            f"one size alone differ, or all of them grow"
        )
    return axis, sizes


def _member(family: Members, width: Width, seed: int, parametrization: str) -> nn.Module:
    if parametrization == "mup":
        return family.init(width, seed)
    if parametrization != "standard":
        raise MupscaleError(f"parametrization is 'mup' or 'standard', not {parametrization!r}")
    with seeded(seed):
        return family.build(width)


def _folds(plan: Plan) -> dict[str, float]:
    """Constants that are folded into all of a module's parameters, and so into its output: the 1/k of a tied readout.

    A weight whose forward has a multiplier of its own (MuReadout: fold = in_) gives its output as it is.
    """
    own: dict[str, set[float]] = {}
    for name, entry in plan.parameters.items():
        undone = entry.rule.weight == 1
        own.setdefault(name.rpartition(".")[0], set()).add(1.0 if undone else float(entry.fold))
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
    measured = {path for path, module in naming.modules(model).items() if _is_layer(module)}
    for step in range(steps + 1):
        with torch.no_grad(), Recorder(model) as recorder:
            loss(model, data[0])
        if step == 0 and not _is_output_of(recorder.outputs, measured):
            measured.add("")  # computed by no layer: a product of two of them, a functional readout
        for path, output in recorder.outputs.items():
            if path in measured:
                output = output / folds.get(path, 1.0)
                start.setdefault(path, output)
                name = path or OUTPUT
                rows.append(Measurement(width, seed, step, name, _rms(output), _rms(output - start[path])))
        if step == steps:
            break
        optimizer.zero_grad()
        loss(model, data[step % len(data)]).backward()
        optimizer.step()
    return rows


def _is_output_of(outputs: Mapping[str, Tensor], layers: set[str]) -> bool:
    """Whether the model's own output, up to its shape, is that of one of the layers."""
    own = outputs.get("")
    same_size = (o for path, o in outputs.items() if path in layers and own is not None and o.numel() == own.numel())
    return own is None or any(torch.equal(o.flatten(), own.flatten()) for o in same_size)


def _is_layer(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


OUTPUT = "(output)"
_ODD = "#d8a48f"  # layers that are not flat and have no colour left


def _plot(check: CoordCheck, path: Path, narrow: bool) -> Path:
    """Change since initialisation against width, one line per layer; what is not flat in colour, with its power."""
    fig, ax = figure(*((4.8, 4.4) if narrow else (7.5, 4.2)))
    last = max(row.step for row in check.rows)
    odd = sorted((x for x in check.layers if not x.flat), key=lambda x: -abs(x.change_power))
    named = {layer.module: COLORS[1 + i] for i, layer in enumerate(odd[: len(COLORS) - 1])}
    drawn = list[float]()
    for layer in check.layers:
        values = [check.mean(layer.module, w, last, "change") for w in check.widths]
        values = [v if math.isfinite(v) and v > 0 else math.nan for v in values]
        drawn += [v for v in values if v == v]
        style: dict[str, Any] = {"lw": 0.9, "color": GREY if layer.flat else _ODD}
        if layer.module in named:
            style = {"lw": 1.6, "color": named[layer.module], "label": _label(layer, check.axis), "zorder": 3}
        ax.plot(check.widths, values, "o-", ms=3, **style)
    flat, more = len(check.layers) - len(odd), len(odd) - len(named)
    for count, color, text in ((more, _ODD, "more not flat"), (flat, GREY, "flat")):
        if count:
            ax.plot([], [], "o-", ms=3, lw=0.9, color=color, label=f"{count} {text}")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(check.widths, [f"{w:g}" for w in check.widths])
    ax.minorticks_off()
    low, high = (min(drawn), max(drawn)) if drawn else (1.0, 1.0)
    middle, half = math.sqrt(low * high), max(10.0, 1.3 * math.sqrt(high / low))
    ax.set_ylim(middle / half, middle * half)  # at least two decades, so that what is flat looks flat
    ax.set_xlabel(check.axis)
    ax.set_ylabel(f"rms change of the layer's output after {last} steps")
    verdict = "flat" if check.ok else "not flat"
    ax.set_title(f"Coordinate check, {check.title}: {verdict}", loc="left", fontsize=9.5 if narrow else 11)
    names: dict[str, Any] = {"title": "layers", "fontsize": 8, "title_fontsize": 8}
    names |= {"alignment": "left", "frameon": False}
    if narrow:
        fig.legend(loc="outside lower center", ncols=2, **names)
    else:
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), **names)
    return save_figure(fig, path)


def _label(layer: Layer, axis: str) -> str:
    """The power that makes the layer not flat: of its change or, where that is flat, of its size."""
    by_change = abs(layer.change_power) > FLAT
    power = layer.change_power if by_change else layer.size_power
    if math.isinf(power):
        return f"{layer.module} {'diverges' if power > 0 else 'vanishes'}"
    return f"{layer.module} {'∝' if by_change else 'size ∝'} {axis}$^{{{power:+.2f}}}$"
