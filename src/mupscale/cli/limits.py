"""The commands `mupscale limit …`: examples, mlp, sweep. Each prints a table, and writes pictures and results.json."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mupscale.cli.arguments import UsageError, installed, make_parser, parse
from mupscale.system import MupscaleError, open_display

EXAMPLES = """\
The paper's two worked examples, linear MLPs with frozen input and readout: closed forms, limit and finite networks
side by side, and when noise leaves the limit unchanged.

  mupscale limit examples
  mupscale limit examples --times 3 --noise 0.7 0.3 0.4 0.55 --widths 256 512 1024 2048 4096 --revealed"""

MLP = """\
Train an MLP, upscale it in the middle and train on: in the limit of infinite width, with error bars, and on real
networks of several widths, which come closer to it as n^(-1/2).

  mupscale limit mlp                                                      15 seconds on two cores
  mupscale limit mlp --activation relu --layers 4 --widths 256 512 1024 2048 --times 3 --noise 0.5
  mupscale limit mlp --lr 0.5 --upscaled-lr 0.3 --noise 0 1 0 --frozen 1 3 --out limit/hidden-alone
  mupscale limit mlp --times 2 2 --after 4                                 upscaled twice, 4 steps after each

The batch is synthetic: random directions of length 1, and targets drawn from N(0, 1). Noise is σ̄_Δ of the paper, and
rates are μP's, so both mean the same at every width."""

SWEEP = """\
Noise × learning rate at infinite width: which cell ends with the lowest loss on the batch, as in the method's Sweep 2,
but with no network trained.

  mupscale limit sweep                                                   15 seconds on two cores
  mupscale limit sweep --noises 1 2 4 8 --lrs 0.25 0.5 1 2 --times 2
  mupscale limit sweep --times 2 4 --activation relu --after 10 --out limit/relu      one sweep for each k

Zero noise is always in the grid: it is training on without upscaling."""

_LISTS = ("--widths", "--noise", "--noises", "--lrs", "--times", "--frozen", "--sigma")


def limit_command(which: str, words: list[str]) -> int:
    """mupscale limit WHICH."""
    return {"examples": examples_command, "mlp": mlp_command, "sweep": sweep_command}[which](words)


def examples_command(words: list[str]) -> int:
    """mupscale limit examples."""
    from mupscale.theory import Settings, conditions, pictures, study

    parser = make_parser("limit examples", "[--option VALUE …]", EXAMPLES)
    parser.add_argument("--lr", type=float, default=0.06, help="learning rate before the upscaling, γ")
    parser.add_argument("--upscaled-lr", type=float, default=0.06, help="learning rate after it, γ↑")
    parser.add_argument("--steps", type=int, default=8, help="updates before the upscaling")
    parser.add_argument("--after", type=int, default=8, help="updates after it")
    parser.add_argument("--times", type=int, default=2, help="k: how many times wider")
    parser.add_argument(
        "--noise",
        type=list[float],
        default=[0.8, 0.5, 0.4, 0.3],
        help="σ̄_Δ of the weights A B C D, A being the readout",
    )
    parser.add_argument("--sigma", type=float, default=1.0, help="σ̄ of the initial weights")
    parser.add_argument("--x", type=float, default=1.0, help="the one input")
    parser.add_argument("--target", type=float, default=1.0, help="the loss is (y − target)²/2")
    _add_finite(parser, networks=48, widths=[256, 512, 1024])
    _add_out(parser, "limit/examples")
    chosen = _parsed(parser, words, scalars=("--times", "--sigma"))
    if len(chosen.noise) != 4:
        raise UsageError(f"--noise takes four numbers, for the weights A B C D, not {len(chosen.noise)}")
    _at_least(chosen, steps=0, after=1, times=1, networks=2)
    _not_negative(chosen, "noise", "sigma")
    settings = Settings(
        slope=lambda y: y - chosen.target,
        lr=chosen.lr,
        upscaled_lr=chosen.upscaled_lr,
        before=chosen.steps,
        after=chosen.after,
        x=chosen.x,
        sigma=chosen.sigma,
        times=chosen.times,
        noise=tuple(zip("ABCD", chosen.noise, strict=True)),
    )
    gallery = _gallery(chosen)
    with _bar(2 * (2 + chosen.networks * len(chosen.widths)), "networks") as tick, _fits():
        found = [
            study.worked_example(
                number,
                settings,
                chosen.target,
                chosen.widths,
                networks=chosen.networks,
                dense=not chosen.revealed,
                tick=tick,
            )
            for number in (1, 2)
        ]
    unchanged = conditions(settings)
    for each in found:
        pictures.outputs(each, gallery)
    pictures.errors({f"example {each.number}": each.meeting for each in found}, gallery)
    results = {
        "settings": _settings(chosen),
        "examples": {str(each.number): each.to_json() for each in found},
        "conditions": [finding._asdict() for finding in unchanged],
    }
    for each in found:
        _show(
            f"Example {each.number}: the output",
            ["step", "closed form", "limit − it", *(f"n = {n}" for n in each.meeting.widths)],
            _output_rows(each),
        )
        print(f"The limit backend is within {each.difference:.1e} of the closed form.{_slope(each.meeting)}\n")
    _show(
        "How far from the run that is never upscaled",
        ["with", "of", "changes by"],
        [(finding.choice, finding.what, f"{finding.change:.2g}") for finding in unchanged],
    )
    return _written(gallery.folder, results)


def mlp_command(words: list[str]) -> int:
    """mupscale limit mlp."""
    from mupscale.theory import Stage, pictures, study

    parser = make_parser("limit mlp", "[--option VALUE …]", MLP)
    _add_network(parser)
    parser.add_argument(
        "--times", type=list[int], metavar="N …", default=[2], help="how many times wider; several: one after another"
    )
    parser.add_argument(
        "--noise",
        type=list[float],
        metavar="X …",
        default=[0.5],
        help="σ̄_Δ: one number, or one a layer from the input to the readout",
    )
    parser.add_argument("--upscaled-lr", type=float | None, help="learning rate after upscaling (default: --lr)")
    _add_finite(parser, networks=16, widths=[256, 512, 1024, 2048])
    _add_limit(parser, samples=20_000, seeds=4)
    _add_out(parser, "limit/mlp")
    chosen = _parsed(parser, words)
    _at_least(chosen, steps=0, after=0, samples=2, seeds=2, networks=2)
    _not_negative(chosen, "noise", "sigma")
    if not chosen.times or min(chosen.times) < 1:
        raise UsageError(f"--times takes whole numbers of 1 or more, not {_joined(chosen.times) or 'nothing'}")
    noise = chosen.noise[0] if len(chosen.noise) == 1 else chosen.noise
    rate = chosen.lr if chosen.upscaled_lr is None else chosen.upscaled_lr
    stages = [Stage(chosen.steps, chosen.lr), *(Stage(chosen.after, rate, times, noise) for times in chosen.times)]
    experiment = study.Experiment(_network(chosen), *_batch(chosen), stages)
    device = _device(chosen)
    gallery = _gallery(chosen)
    with _bar(chosen.seeds + chosen.networks * len(chosen.widths), "networks") as tick, _fits():
        found = study.meeting(
            experiment,
            chosen.widths,
            samples=chosen.samples,
            seeds=chosen.seeds,
            networks=chosen.networks,
            device=device,
            dense=not chosen.revealed,
            tick=tick,
        )
    pictures.losses(found, gallery)
    pictures.copies(found, gallery)
    pictures.preactivations(found, gallery)
    pictures.errors({"": found}, gallery)
    _show("The loss at the end, and how far outputs are from the limit (rms)", _MET, _meeting_rows(found))
    if found.times > 1:
        correlation = found.limit.correlation
        least = f"{float(correlation.min()):.3f} at its lowest, {float(correlation[-1]):.3f} at the end"
        which = "copies of a unit that part first" if len(found.upscaled) > 1 else "copies of a unit"
        print(f"Correlation between {which}, in the limit: {least}.")
    if found.slope is not None:
        print(_slope(found).strip())
    if found.limit.outputs.note:
        print(f"Note: {found.limit.outputs.note}.")
    return _written(gallery.folder, {"settings": _settings(chosen), "meeting": found.to_json()})


def sweep_command(words: list[str]) -> int:
    """mupscale limit sweep."""
    from mupscale.sweep import Space, findings
    from mupscale.theory import Experiment, Stage, pictures, save, sweep_limit

    parser = make_parser("limit sweep", "[--option VALUE …]", SWEEP)
    _add_network(parser)
    parser.add_argument(
        "--times", type=list[int], metavar="N …", default=[2], help="how many times wider; one sweep for each"
    )
    parser.add_argument(
        "--noises",
        type=list[float],
        metavar="X …",
        default=[0.5, 1.0, 2.0, 4.0, 8.0, 16.0],
        help="σ̄_Δ to try, beside 0",
    )
    parser.add_argument(
        "--lrs",
        type=list[float],
        metavar="X …",
        default=[0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0],
        help="rates after upscaling",
    )
    _add_limit(parser, samples=4000, seeds=2)
    _add_out(parser, "limit/sweep")
    chosen = _parsed(parser, words)
    _at_least(chosen, steps=0, after=1, samples=2, seeds=2)
    _not_negative(chosen, "sigma")
    if not chosen.times or min(chosen.times) < 2 or len(set(chosen.times)) < len(chosen.times):
        raise UsageError(f"--times takes different numbers of 2 or more, not {_joined(chosen.times) or 'nothing'}")
    space = Space(tuple(chosen.lrs), tuple(chosen.noises))
    experiment = Experiment(_network(chosen), *_batch(chosen), [Stage(chosen.steps, chosen.lr)])
    device = _device(chosen)
    gallery = _gallery(chosen)
    notes = list[str]()
    with _bar(len(space.cells) * len(chosen.times), "cells") as tick, _fits():
        sweeps = [
            sweep_limit(
                experiment,
                space,
                times=times,
                after=chosen.after,
                samples=chosen.samples,
                seeds=chosen.seeds,
                device=device,
                tick=tick,
                note=notes.append,
            )
            for times in chosen.times
        ]
    for found in sweeps:
        pictures.heat(found, gallery, chosen.lr)
    results = {"settings": _settings(chosen), "sweeps": [found.to_json() for found in sweeps]}
    if not any(trial.loss is not None for found in sweeps for trial in found.trials):
        save(gallery.folder / "results.json", results)
        _ = sweeps[0].best  # says why there is none
    columns = ["upscaled to", "noise", "learning rate", "loss", "best without noise"]
    _show("The best cell at infinite width", columns, map(_best_row, sweeps))
    for found in sweeps:
        for sentence in findings(found):
            print(f"{found.start} → {found.width}: {sentence}.")
    for note in notes:
        print(f"Note: {note}.")
    return _written(gallery.folder, results)


# ---------------------------------------------------------------------------------------- options


def _add_network(parser: Any) -> None:
    parser.add_argument("--activation", type=str, default="tanh", help="linear, relu, tanh or gelu")
    parser.add_argument("--layers", type=int, default=3, help="weight layers, input and readout among them")
    parser.add_argument(
        "--sigma",
        type=list[float],
        metavar="X …",
        default=[1.0],
        help="σ̄ of the initial weights: one number, or one a layer",
    )
    parser.add_argument(
        "--frozen", type=list[int], metavar="N …", default=[], help="layers that do not learn; 1 is the input layer"
    )
    parser.add_argument("--optimizer", type=str, default="sgd", help="sgd, sign or adam (those two need few --samples)")
    parser.add_argument("--momentum", type=float, default=0.0, help="of sgd and sign")
    parser.add_argument("--inputs", type=int, default=4, help="inputs in the synthetic batch")
    parser.add_argument("--features", type=int, default=8, help="features of an input")
    parser.add_argument("--seed", type=int, default=0, help="of the batch")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate before upscaling")
    parser.add_argument("--steps", type=int, default=5, help="steps before upscaling")
    parser.add_argument("--after", type=int, default=5, help="steps after it")


def _add_finite(parser: Any, networks: int, widths: list[int]) -> None:
    parser.add_argument("--widths", type=list[int], metavar="N …", default=widths, help="n of the finite networks")
    parser.add_argument("--networks", type=int, default=networks, help="finite networks of each width")
    meaning = "never form their matrices: the same distribution at a cost linear in n, for very wide ones"
    parser.add_argument("--revealed", action="store_true", help=meaning)


def _add_limit(parser: Any, samples: int, seeds: int) -> None:
    parser.add_argument("--samples", type=int, default=samples, help="samples of every ket")
    parser.add_argument("--seeds", type=int, default=seeds, help="of the limit, for its standard error")
    parser.add_argument("--device", type=str | None, help="cpu or cuda (default: a GPU if there is one)")


def _add_out(parser: Any, folder: str) -> None:
    parser.add_argument("--out", type=str, default=folder, help="folder for pictures and results.json")


def _parsed(parser: Any, words: Sequence[str], scalars: tuple[str, ...] = ()) -> Any:
    return parse(parser, gathered(words, [name for name in _LISTS if name not in scalars]))


def gathered(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """`--widths 256 512` as `--widths [256, 512]`, which the parser takes as well."""
    found: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        found.append(word)
        if name not in names:
            continue
        values = [value] if equals else []
        while rest and (not rest[0].startswith("-") or re.match(r"-[\d.]", rest[0])):
            values.append(rest.pop(0))
        found[-1] = name
        if values:
            found.append(values[0] if len(values) == 1 and values[0].startswith("[") else f"[{', '.join(values)}]")
    return found


def _network(chosen: Any) -> Any:
    from mupscale.theory import MLP, Adam, Sign

    wrong = [layer for layer in chosen.frozen if not 1 <= layer <= chosen.layers]
    if wrong:
        raise UsageError(f"--frozen names layer {wrong[0]}, but layers are numbered from 1 to {chosen.layers}")
    trained = [layer + 1 not in chosen.frozen for layer in range(chosen.layers)]
    sigma = chosen.sigma[0] if len(chosen.sigma) == 1 else chosen.sigma
    optimizers = {"sgd": None, "sign": Sign(), "adam": Adam()}
    if chosen.optimizer not in optimizers:
        raise UsageError(f"--optimizer is {chosen.optimizer}, but must be one of {', '.join(optimizers)}")
    entrywise = optimizers[chosen.optimizer]
    return MLP(chosen.layers, chosen.activation, sigma, trained, chosen.momentum, entrywise=entrywise)


def _device(chosen: Any) -> str | None:
    import torch

    if chosen.device not in (None, "cpu") and not re.fullmatch(r"cuda(:\d+)?", chosen.device):
        raise UsageError(f"--device is {chosen.device}, but must be cpu or cuda")
    if chosen.device not in (None, "cpu") and not torch.cuda.is_available():
        raise UsageError(f"--device is {chosen.device}, but there is no GPU that torch can use here: leave it out")
    return None if chosen.device is None else str(chosen.device)


def _batch(chosen: Any) -> tuple[Any, Any]:
    from mupscale.theory import gaussian_batch

    return gaussian_batch(chosen.inputs, chosen.features, chosen.seed)


def _at_least(chosen: Any, **least: int) -> None:
    for name, value in least.items():
        if chosen[name] < value:
            raise UsageError(f"--{name} is {chosen[name]}, but must be {value} or more")


def _not_negative(chosen: Any, *names: str) -> None:
    for name in names:
        values = chosen[name] if isinstance(chosen[name], list) else [chosen[name]]
        if not values or not all(0 <= value < math.inf for value in values):
            raise UsageError(f"--{name} takes numbers of 0 or more, not {_joined(values) or 'nothing'}")


def _settings(chosen: Any) -> dict[str, Any]:
    return {name: value for name, value in chosen.as_dict().items() if name not in ("out", "config")}


# ---------------------------------------------------------------------------------------- what is printed

_MET = ["n", "k·n", "loss", "one network", "their mean", "std. error"]


def _meeting_rows(found: Any) -> Iterator[tuple[str, ...]]:
    for each, error, (gap, doubt) in zip(found.finite, found.errors, found.gaps, strict=True):
        loss = _value(each.losses)
        yield f"{each.width:,}", f"{each.width * found.times:,}", loss, f"{error:.2g}", f"{gap:.2g}", f"{doubt:.1g}"
    doubt = float(found.limit.outputs.standard_error.square().mean().sqrt())
    yield "∞", "", _value(found.limit.losses), "", "", f"{doubt:.1g}"


def _output_rows(worked: Any) -> Iterator[tuple[str, ...]]:
    limit = worked.meeting.limit.outputs.mean.flatten().tolist()
    nets = [each.outputs for each in worked.meeting.finite]
    for step, closed in enumerate(worked.closed):
        cells = [f"{float(e.mean[step]):.3f} ± {float(e.standard_error[step]):.3f}" for e in nets]
        yield str(step), f"{closed:.6f}", f"{limit[step] - closed:.1e}", *cells


def _best_row(sweep: Any) -> tuple[str, ...]:
    losses = [trial.loss for trial in sweep.trials if trial.noise == 0 and trial.loss is not None]
    zero = f"{min(losses):.4g}" if losses else "diverged"
    if all(trial.loss is None for trial in sweep.trials):
        return sweep.width, "", "", "all diverged", zero
    best = sweep.best
    return sweep.width, f"{best.noise:g}", f"{best.lr:g}", f"{best.loss:.4g} ± {_error(best.by_seed):.1g}", zero


def _value(estimate: Any) -> str:
    mean, error = float(estimate.mean[-1]), float(estimate.standard_error[-1])
    return f"{mean:.4g} ± {error:.1g}"


def _slope(found: Any) -> str:
    if found.slope is None:
        return ""
    return (
        f" Networks come closer as n^{found.slope:.2f}, give or take {found.slope_error:.2f}; the Master theorem says "
        f"n^-0.5."
    )


def _error(values: Sequence[float]) -> float:
    import statistics

    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _joined(values: Sequence[Any]) -> str:
    return " ".join(map(str, values))


def _show(title: str, columns: Sequence[str], rows: Any) -> None:
    """Sentences are broken where the terminal is narrow, numbers never: rather is the table wider than it."""
    table = installed("rich.table").Table(title=title, title_justify="left")
    cells, least = [tuple(row) for row in rows], 1
    for number, name in enumerate(columns):
        words = number == 0 and len(columns) == 3
        found = [name, *(row[number] for row in cells)]
        least += 3 + max(len(piece) for text in found for piece in (text.split() if words else [text]))
        table.add_column(name, justify="left" if words else "right", no_wrap=not words)
    for row in cells:
        table.add_row(*row)
    console = installed("rich.console").Console(width=None if sys.stdout.isatty() else 160)
    console.width = max(console.width, least)
    console.print(table)


def _written(folder: Path, results: dict[str, Any]) -> int:
    from mupscale.theory import save

    print(f"Results and pictures: {save(folder / 'results.json', results).parent}")
    return 0


def _gallery(chosen: Any) -> Any:
    """The folder for pictures; that it, or what draws them, is missing is said before the work and not after it."""
    from mupscale.plots import styled
    from mupscale.theory import gallery

    with styled("limit"):
        return gallery(Path(chosen.out))


@contextmanager
def _fits() -> Iterator[None]:
    """What is too large for memory in one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise MupscaleError(
            "this does not fit into memory: take smaller --widths or fewer --samples, or --revealed for wide networks"
        ) from None


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[[], None]]:
    """How much is done and how long it will take, where stderr is a terminal."""
    if sys.stderr.isatty():
        installed("rich.progress")
    display = open_display(("wide bar", "count", what, "time", "left", "time left"), total, transient=True)
    try:
        yield display.advance
    finally:
        display.close()
