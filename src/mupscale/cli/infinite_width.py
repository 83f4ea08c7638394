"""The commands `mupscale limit …`: examples, mlp, sweep, grow. Each prints tables, and writes pictures and results."""

from __future__ import annotations

import itertools
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mupscale.cli.arguments import UsageError
from mupscale.cli.command_lines import CommandLine, Option, Options, at_least
from mupscale.cli.recipe_options import folder_to_write, print_place
from mupscale.system import (
    NOT_EMPTY,
    Display,
    Diverged,
    MupscaleError,
    Must,
    NotNegative,
    Positive,
    is_out_of_memory,
    show,
    text_table,
    wrap_text,
)

if TYPE_CHECKING:
    from mupscale.study import Space, Sweep
    from mupscale.theory import Draws, Estimate, Experiment, LimitComparison, WayToGrow, WorkedExample


_LEVELS = Annotated[list[NotNegative], NOT_EMPTY]
_RATES = Annotated[list[Positive], NOT_EMPTY]
_FOUR = Annotated[list[NotNegative], Must("four numbers, for the weights A B C D", lambda values: len(values) == 4)]
_FACTORS = Annotated[list[int], Must("whole numbers of 1 or more", lambda k: bool(k) and min(k) > 0)]
_DISTINCT = Annotated[
    list[int], Must("distinct numbers of 2 or more", lambda k: bool(k) and min(k) > 1 and len({*k}) == len(k))
]
_MORE = Annotated[float, Must("more than 1", lambda value: value > 1)]


def _network_options(lr: float = 0.5, after: int = 0) -> tuple[Option, ...]:
    return (
        Option("--activation", str, "linear, relu, tanh or gelu", "tanh"),
        Option("--layers", int, "number of weight layers, including input and output", 3),
        Option("--sigma", _LEVELS, "σ̄ of the initial weights: one number, or one per layer", [1.0]),
        Option("--frozen", list[int], "layers that do not learn; 1 is the input layer", []),
        Option("--optimizer", Literal["sgd", "sign", "adam"], "sign and adam need few --samples", "sgd"),
        Option("--momentum", float, "momentum of sgd and sign", 0.0),
        Option("--inputs", int, "inputs in the synthetic batch", 4),
        Option("--features", int, "features of an input", 8),
        Option("--seed", int, "seed of the batch", 0),
        Option("--lr", NotNegative, "learning rate before upscaling", lr),
        Option("--steps", at_least(0), "steps before upscaling", 5),
        Option("--after", at_least(after), "steps after it", 5),
    )


def _finite_options(networks: int, widths: list[int]) -> tuple[Option, ...]:
    meaning = "sample the finite networks without storing their matrices: same distribution, cost linear in n"
    return (
        Option("--widths", list[int], "widths n of the finite networks", widths),
        Option("--networks", at_least(2), "number of finite networks per width", networks),
        Option("--revealed", bool, meaning),
    )


def _limit_options(samples: int, seeds: int) -> tuple[Option, ...]:
    return (
        Option("--samples", at_least(2), "Monte Carlo samples of the limit", samples),
        Option("--seeds", at_least(2), "number of seeds of the limit, for its standard error", seeds),
        Option("--device", str, "cpu or cuda (default: a GPU if there is one)"),
    )


def _out_option(folder: str) -> Option:
    return Option("--out", str, "folder for pictures and results.json", folder)


EXAMPLES = CommandLine(
    "limit examples",
    "the paper's worked examples, at infinite and finite width",
    "[--option VALUE …]",
    """\
The paper's two worked examples: linear MLPs whose input and output layers are frozen. The command compares closed
forms, the infinite-width limit and finite networks, and shows when noise leaves the limit unchanged.

  mupscale limit examples                                                40 seconds of one core
  mupscale limit examples --times 3 --noise 0.7 0.3 0.4 0.55 --widths 256 512 1024 2048 4096 --revealed""",
    (
        Option("--lr", NotNegative, "learning rate before the upscaling, γ", 0.06),
        Option("--upscaled-lr", NotNegative, "learning rate after it, γ↑", 0.06),
        Option("--steps", at_least(0), "updates before the upscaling", 8),
        Option("--after", at_least(1), "updates after it", 8),
        Option("--times", at_least(1), "k: how many times wider", 2),
        Option("--noise", _FOUR, "noise σ̄_Δ of the weights A B C D; A is the output layer", [0.8, 0.5, 0.4, 0.3]),
        Option("--sigma", NotNegative, "σ̄ of the initial weights", 1.0),
        Option("--x", float, "the one input", 1.0),
        Option("--target", float, "the loss is (y − target)²/2", 1.0),
        *_finite_options(networks=48, widths=[256, 512, 1024]),
        _out_option("limit/examples"),
    ),
    main="lr upscaled-lr steps after times noise sigma widths networks revealed out",
    needs=("matplotlib",),
)

MLP = CommandLine(
    "limit mlp",
    "upscale an MLP: do finite widths approach the infinite one?",
    "[--option VALUE …]",
    """\
Train an MLP, upscale it and continue training: in the limit of infinite width, with error bars, and on real networks
of several widths n. The networks approach the limit as n^(-1/2).

  mupscale limit mlp                                                      half a minute of one core
  mupscale limit mlp --activation relu --layers 4 --widths 256 512 1024 2048 --times 3 --noise 0.5
  mupscale limit mlp --lr 0.5 --upscaled-lr 0.3 --noise 0 1 0 --frozen 1 3 --out limit/hidden-alone
  mupscale limit mlp --times 2 2 --after 4                                 upscaled twice, 4 steps after each

The batch is synthetic: random directions of length 1, and targets drawn from N(0, 1). Noise is the paper's
σ̄_Δ and learning rates follow μP, so both mean the same at every width.""",
    (
        *_network_options(),
        Option("--times", _FACTORS, "factors by which to grow, one after another", [2]),
        Option("--noise", _LEVELS, "noise σ̄_Δ: one number, or one per layer, input layer first", [0.5]),
        Option("--upscaled-lr", NotNegative, "learning rate after upscaling (default: --lr)"),
        *_finite_options(networks=16, widths=[256, 512, 1024, 2048]),
        *_limit_options(samples=20_000, seeds=4),
        _out_option("limit/mlp"),
    ),
    main="activation layers times noise lr upscaled-lr steps after widths networks out",
    needs=("matplotlib",),
)

SWEEP = CommandLine(
    "limit sweep",
    "tune noise and learning rate at infinite width",
    "[--option VALUE …]",
    """\
Find the noise and learning rate with the lowest final loss at infinite width. This is the paper's Sweep 2 (after
growing), but no network is trained.

  mupscale limit sweep                                                   40 seconds of one core
  mupscale limit sweep --noises 1 2 4 8 --lrs 0.25 0.5 1 2 --times 2
  mupscale limit sweep --times 2 4 --activation relu --after 10 --out limit/relu      one sweep for each k

Zero noise is always tried: it is the same as continuing without upscaling.""",
    (
        *_network_options(after=1),
        Option("--times", _DISTINCT, "factors by which to grow, one sweep each", [2]),
        Option("--noises", list[float], "noise levels σ̄_Δ to try, in addition to 0", [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]),
        Option("--lrs", list[float], "learning rates to try after upscaling", [0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0]),
        *_limit_options(samples=4000, seeds=2),
        _out_option("limit/sweep"),
    ),
    main="activation layers times noises lrs lr steps after samples seeds out",
    needs=("matplotlib",),
)

GROW = CommandLine(
    "limit grow",
    "compare copies and fresh units at infinite and finite width",
    "[--option VALUE …]",
    """\
Compare noisy copies with fresh units, each at several learning rates. Which has the lower final loss in the limit of
infinite width, and on real networks? A picture shows the best of each.

  mupscale limit grow                                                      a minute of one core
  mupscale limit grow --times 4 --steps 20 --noises 1 2 4 --outgoing 0 1
  mupscale limit grow --times 1.5 --rates 0.5 1 --widths 64 256 1024 --revealed     not a multiple: only fresh units

Learning rates are multiples of --lr, the base model's. The amplitude a (--outgoing) is the scale of the weights from
new units into old ones. Zero noise is always tried: it is the same as continuing without growing.""",
    (
        *_network_options(lr=1.0, after=1),  # the best for the base model that goes on without growth
        Option("--times", _MORE, "r: how many times wider; copies need a whole number", 2.0),
        Option("--noises", list[float], "noise levels σ̄_Δ of copies to try, in addition to 0", [0.5, 1.0, 2.0]),
        Option("--outgoing", list[float], "amplitudes of fresh units to try", [0.0, 0.5, 1.0]),
        Option("--rates", _RATES, "learning rates after the growth, as multiples of --lr", [0.25, 0.5, 1.0, 2.0]),
        *_finite_options(networks=16, widths=[64, 128, 256, 512]),
        *_limit_options(samples=4000, seeds=2),
        _out_option("limit/grow"),
    ),
    main="times noises outgoing rates lr steps after widths networks revealed out",
)


class Study:
    """One of these commands at work: its options, its pictures, and what it writes into results.json."""

    def __init__(self, options: Options, folder: Path) -> None:
        from mupscale.theory import limit_pictures

        self.options, self.gallery = options, limit_pictures.open_gallery(folder)

    def experiment(self, *later: Any) -> Experiment:
        """The MLP, its synthetic batch, and the stages that it trains through: the first, and later ones."""
        from mupscale.theory import Adam, Experiment, MLPSetup, Sign, Stage, gaussian_batch

        asked = self.options
        if wrong := [layer for layer in asked.frozen if not 1 <= layer <= asked.layers]:
            raise UsageError(f"--frozen names layer {wrong[0]}, but layers are numbered from 1 to {asked.layers}")
        trained = [layer + 1 not in asked.frozen for layer in range(asked.layers)]
        entrywise = {"sgd": None, "sign": Sign(), "adam": Adam()}[asked.optimizer]
        sigma = _one_or_each(asked.sigma)
        mlp = MLPSetup(asked.layers, asked.activation, sigma, trained, asked.momentum, entrywise=entrywise)
        batch = gaussian_batch(asked.inputs, asked.features, asked.seed)
        return Experiment(mlp, *batch, [Stage(asked.steps, asked.lr), *later])

    def draws(self, tick: Callable[[], None], **fixed: int) -> Draws:
        """How much is drawn for the limit, and of finite networks; fixed: what has no option."""
        import torch

        from mupscale.theory import Draws

        asked, device = self.options, vars(self.options).get("device")
        if device not in (None, "cpu") and not re.fullmatch(r"cuda(:\d+)?", device):
            raise UsageError(f"--device is {device}, but must be cpu or cuda")
        if device not in (None, "cpu") and not torch.cuda.is_available():
            raise UsageError(f"--device is {device}, but there is no GPU that torch can use here: leave it out")
        numbers = {name: vars(asked)[name] for name in ("samples", "seeds", "networks") if name in vars(asked)} | fixed
        return Draws(**numbers, device=device, dense=not vars(asked).get("revealed"), tick=tick)

    def save(self, **results: Any) -> None:
        """Write results.json, with the options that led to it."""
        from mupscale.theory import limit_study

        settings = {name: value for name, value in vars(self.options).items() if name != "out"}
        limit_study.save_results(self.gallery.folder / "results.json", {"settings": settings, **results})


def _one_or_each(values: Sequence[float]) -> Any:
    return values[0] if len(values) == 1 else values


def _command(line: CommandLine) -> Callable[[Callable[[Study], None]], Callable[[list[str]], int]]:
    """For a function that computes, saves, draws and prints: the command that it makes of such a line."""

    def decorate(run: Callable[[Study], None]) -> Callable[[list[str]], int]:
        @line.command
        @wraps(run)
        def command(words: list[str]) -> int:
            options = line.read(words)[1]
            from mupscale.theory import FewSamples

            with folder_to_write(options.out) as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore", FewSamples)  # said as a note below the tables
                try:
                    run(Study(options, folder))
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    raise MupscaleError(
                        "this does not fit into memory: take smaller --widths or fewer --samples, or --revealed for "
                        "wide networks"
                    ) from None
                print_place("Results and pictures", folder)
            return 0

        return command

    return decorate


@_command(EXAMPLES)
def limit_examples_command(study: Study) -> None:
    from mupscale.theory import Settings, limit_pictures, limit_study, measure_conditions

    asked = study.options
    settings = Settings(
        slope=lambda y: y - asked.target,
        lr=asked.lr,
        upscaled_lr=asked.upscaled_lr,
        before=asked.steps,
        after=asked.after,
        x=asked.x,
        sigma=asked.sigma,
        times=asked.times,
        noise=tuple(zip("ABCD", asked.noise, strict=True)),
    )
    with _bar(2 * (2 + asked.networks * len(asked.widths)), "networks") as tick:
        draws = study.draws(tick, samples=1000, seeds=2)
        examples = [limit_study.worked_example(n, settings, asked.target, asked.widths, draws) for n in (1, 2)]
    checks = measure_conditions(settings)
    study.save(
        examples={str(example.number): example.to_json() for example in examples},
        conditions=[check._asdict() for check in checks],
    )
    for example in examples:
        limit_pictures.draw_outputs(example, study.gallery)
    comparisons = {f"example {example.number}": example.comparison for example in examples}
    limit_pictures.draw_errors(comparisons, study.gallery)
    for example in examples:
        print_example(example)
    lines = (f"  {check.choice}: {check.what} by {check.change:.2g}" for check in checks)
    moved = "How far each choice moves the run that is never upscaled"
    show(moved, *(wrap_text(line, hanging="    ") for line in lines), "")


@_command(MLP)
def limit_mlp_command(study: Study) -> None:
    from mupscale.theory import Stage, limit_pictures, limit_study

    asked, noise = study.options, _one_or_each(study.options.noise)
    rate = asked.lr if asked.upscaled_lr is None else asked.upscaled_lr
    experiment = study.experiment(*(Stage(asked.after, rate, times, noise) for times in asked.times))
    with _bar(asked.seeds + asked.networks * len(asked.widths), "networks") as tick:
        comparison = limit_study.compare_with_limit(experiment, asked.widths, study.draws(tick))
    study.save(meeting=comparison.to_json())
    limit_pictures.draw_losses({"": comparison}, study.gallery)
    limit_pictures.draw_copies(comparison, study.gallery)
    limit_pictures.draw_preactivations(comparison, study.gallery)
    limit_pictures.draw_errors({"": comparison}, study.gallery)
    print_comparison(comparison)


@_command(SWEEP)
def limit_sweep_command(study: Study) -> None:
    from mupscale.study import Space
    from mupscale.theory import limit_pictures, limit_study, sweep_limit

    asked, experiment = study.options, study.experiment()
    space = Space(tuple(asked.lrs), tuple(asked.noises))
    sweeps: list[Sweep] = []
    tables: list[list[WayToGrow]] = []
    with _bar(len(space.cells) * len(asked.times) * asked.seeds, "runs") as tick:
        draws = study.draws(tick)
        for times in asked.times:
            start = time.monotonic()
            cells = sweep_limit(experiment, space.lrs, space.noises, times=times, after=asked.after, draws=draws)
            tables.append(cells)
            sweeps.append(_stored_sweep(tables[-1], times, space, asked.seeds, time.monotonic() - start))
    study.save(sweeps=[asdict(sweep) for sweep in sweeps])
    if not any(trial.loss is not None for sweep in sweeps for trial in sweep.trials):
        _ = sweeps[0].best  # raises: all diverged
    for sweep, cells in zip(sweeps, tables, strict=True):
        limit_pictures.draw_sweep(cells, study.gallery, asked.lr, sweep.name, f"{sweep.start} → {sweep.width}")
    print_best(sweeps)
    _print_notes(map(limit_study.note_of, tables))


def _stored_sweep(cells: Sequence[WayToGrow], times: int, space: Space, seeds: int, seconds: float) -> Sweep:
    """A sweep as results.json has it."""
    from mupscale.study import Sweep, Tried

    trials = []
    for (lr, noise), cell in zip(space.cells, cells, strict=True):
        if cell.limit is None:
            trials.append(Tried(lr, noise, [None] * seeds))
            continue
        curve = list(enumerate(cell.limit.mean.tolist()))
        trials.append(Tried(lr, noise, cell.limit.values[:, -1].tolist(), curve=curve, steps=cell.stage.steps))
    return Sweep(f"limit-times-{times}", trials, f"{times}n", "n", space, measure="train", seconds=seconds)


@_command(GROW)
def limit_grow_command(study: Study) -> None:
    from mupscale.theory import best_way, compare_ways_to_grow, limit_pictures, limit_study, list_ways

    asked, base = study.options, study.experiment()
    stages = list_ways(asked.times, asked.after, asked.lr, asked.rates, [0.0, *asked.noises], asked.outgoing)
    widest = max(asked.widths, default=None)
    runs = len(stages) * (asked.seeds + (0 if widest is None else asked.networks))
    with _bar(runs + 2 * (asked.seeds + asked.networks * len(asked.widths)), "runs") as tick:
        draws = study.draws(tick)
        ways = compare_ways_to_grow(base, stages, draws, widest)
        comparisons = {
            f"{way.name}, {way.stage.lr / asked.lr:g} × the rate": limit_study.compare_with_limit(
                base.then(way.stage), asked.widths, draws
            )
            for way in (best_way(ways, how) for how in ("copies", "fresh"))
            if way is not None
        }
    study.save(
        ways=[way.to_json() for way in ways],
        pictured={name: comparison.to_json() for name, comparison in comparisons.items()},
    )
    if not comparisons:
        raise Diverged(f"all {len(ways)} ways to grow have diverged; take smaller --rates, or a smaller --lr")
    limit_pictures.draw_losses(comparisons, study.gallery, "grow")
    limit_pictures.draw_errors(comparisons, study.gallery)
    print_ways(ways, asked.lr, widest, comparisons)
    _print_notes([limit_study.note_of(ways)])


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    show(title, text_table(columns, rows, left=0), "")


def print_example(example: WorkedExample) -> None:
    """A worked example: closed form, limit and networks, step by step."""
    comparison = example.comparison
    columns = ["step", "closed form", "limit − it", *(f"n = {n}" for n in comparison.widths)]
    limit = comparison.limit.outputs.mean.flatten().tolist()
    networks, rows = [measured.outputs for measured in comparison.finite], []
    for step, closed in enumerate(example.closed):
        cells = [f"{float(e.mean[step]):.3f} ± {float(e.standard_error[step]):.3f}" for e in networks]
        rows.append((str(step), f"{closed:.6f}", f"{limit[step] - closed:.1e}", *cells))
    print_table(f"Example {example.number}: the output", columns, rows)
    slope = f" {_slope(comparison)}" if comparison.slope is not None else ""
    show(wrap_text(f"The limit backend is within {example.difference:.1e} of the closed form.{slope}") + "\n")


def print_comparison(comparison: LimitComparison) -> None:
    title = "The loss at the end, and how far outputs are from the limit (rms)"
    columns, rows = ["n", "k·n", "loss", "one network", "their mean", "std. error"], []
    for networks, error, (gap, doubt) in zip(comparison.finite, comparison.errors, comparison.gaps, strict=True):
        sizes = f"{networks.width or 0:,}", f"{(networks.width or 0) * comparison.times:,}"
        rows.append((*sizes, _last_value(networks.losses), f"{error:.2g}", f"{gap:.2g}", f"{doubt:.1g}"))
    doubt = float(comparison.limit.outputs.standard_error.square().mean().sqrt())
    rows.append(("∞", "", _last_value(comparison.limit.losses), "", "", f"{doubt:.1g}"))
    print_table(title, columns, rows)
    if comparison.times > 1:
        correlation = comparison.limit.correlation
        least = f"{float(correlation.min()):.3f} at its lowest, {float(correlation[-1]):.3f} at the end"
        which = "copies of a unit that part first" if len(comparison.upscaled) > 1 else "copies of a unit"
        show(wrap_text(f"Correlation between {which}, in the limit: {least}."))
    if comparison.slope is not None:
        show(wrap_text(_slope(comparison)))
    _print_notes([comparison.limit.outputs.note])


def _print_notes(notes: Iterable[str]) -> None:
    for note in filter(None, notes):
        show(wrap_text(f"Note: {note}."))


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
    from mupscale.study import sweep_remarks

    columns, rows = ["upscaled to", "noise", "learning rate", "loss", "best without noise"], []
    for sweep in sweeps:
        losses = [trial.loss for trial in sweep.trials if trial.noise == 0 and trial.loss is not None]
        zero = f"{min(losses):.4g}" if losses else "diverged"
        if all(trial.loss is None for trial in sweep.trials):
            rows.append((str(sweep.width), "", "", "all diverged", zero))
            continue
        best = sweep.best
        error = statistics.stdev(best.finite) / math.sqrt(len(best.finite)) if len(best.finite) > 1 else math.nan
        rows.append((str(sweep.width), f"{best.noise:g}", f"{best.lr:g}", f"{best.loss:.4g} ± {error:.1g}", zero))
    print_table("The best cell at infinite width", columns, rows)
    for sweep in sweeps:
        for sentence in sweep_remarks(sweep):
            show(wrap_text(f"{sweep.start} → {sweep.width}: {sentence}."))


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


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[[], None]]:
    """How much is done and how long it will take, where stderr is a terminal; elsewhere a line now and then."""
    done = itertools.count(1)
    with Display(
        ("wide bar", "count", what, "time", "left", "time left"), total, transient=True, lines="stderr"
    ) as bar:

        def tick() -> None:
            number = next(done)
            bar.update(number, f"{number} of {total} {what}")

        yield tick
