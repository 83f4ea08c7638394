"""The options of `mupscale limit …`: what each command takes, and what is made of it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mupscale.cli.arguments import UsageError, make_parser, parse_arguments

if TYPE_CHECKING:
    from mupscale.theory import MLPSetup

EXAMPLES = """\
The paper's two worked examples: linear MLPs whose input and output layers are frozen. The command compares closed
forms, the infinite-width limit and finite networks, and shows when noise leaves the limit unchanged.

  mupscale limit examples                                                40 seconds of one core
  mupscale limit examples --times 3 --noise 0.7 0.3 0.4 0.55 --widths 256 512 1024 2048 4096 --revealed"""

MLP = """\
Train an MLP, upscale it and continue training: in the limit of infinite width, with error bars, and on real networks
of several widths n. The networks approach the limit as n^(-1/2).

  mupscale limit mlp                                                      half a minute of one core
  mupscale limit mlp --activation relu --layers 4 --widths 256 512 1024 2048 --times 3 --noise 0.5
  mupscale limit mlp --lr 0.5 --upscaled-lr 0.3 --noise 0 1 0 --frozen 1 3 --out limit/hidden-alone
  mupscale limit mlp --times 2 2 --after 4                                 upscaled twice, 4 steps after each

The batch is synthetic: random directions of length 1, and targets drawn from N(0, 1). Noise is the paper's
σ̄_Δ and learning rates follow μP, so both mean the same at every width."""

SWEEP = """\
Find the noise and learning rate with the lowest final loss at infinite width. This is the paper's Sweep 2 (after
growing), but no network is trained.

  mupscale limit sweep                                                   40 seconds of one core
  mupscale limit sweep --noises 1 2 4 8 --lrs 0.25 0.5 1 2 --times 2
  mupscale limit sweep --times 2 4 --activation relu --after 10 --out limit/relu      one sweep for each k

Zero noise is always tried: it is the same as continuing without upscaling."""

GROW = """\
Compare noisy copies with fresh units, each at several learning rates. Which has the lower final loss in the limit of
infinite width, and on real networks? A picture shows the best of each.

  mupscale limit grow                                                      a minute of one core
  mupscale limit grow --times 4 --steps 20 --noises 1 2 4 --outgoing 0 1
  mupscale limit grow --times 1.5 --rates 0.5 1 --widths 64 256 1024 --revealed     not a multiple: only fresh units

Learning rates are multiples of --lr, the base model's. The amplitude a (--outgoing) is the scale of the weights from
new units into old ones. Zero noise is always tried: it is the same as continuing without growing."""

_LISTS = ("--widths", "--noise", "--noises", "--lrs", "--times", "--frozen", "--sigma", "--outgoing", "--rates")
"""Options that take several numbers."""


def read_examples_options(words: Sequence[str]) -> Any:
    """The options of `mupscale limit examples`."""
    parser = make_parser("limit examples", "[--option VALUE …]", EXAMPLES)
    parser.add_argument("--lr", type=float, default=0.06, help="learning rate before the upscaling, γ")
    parser.add_argument("--upscaled-lr", type=float, default=0.06, help="learning rate after it, γ↑")
    parser.add_argument("--steps", type=int, default=8, help="updates before the upscaling")
    parser.add_argument("--after", type=int, default=8, help="updates after it")
    parser.add_argument("--times", type=int, default=2, help="k: how many times wider")
    parser.add_argument(
        "--noise",
        type=list[float],
        metavar="X …",
        default=[0.8, 0.5, 0.4, 0.3],
        help="noise σ̄_Δ of the weights A B C D; A is the output layer",
    )
    parser.add_argument("--sigma", type=float, default=1.0, help="σ̄ of the initial weights")
    parser.add_argument("--x", type=float, default=1.0, help="the one input")
    parser.add_argument("--target", type=float, default=1.0, help="the loss is (y − target)²/2")
    _add_finite_options(parser, networks=48, widths=[256, 512, 1024])
    _add_out_option(parser, "limit/examples")
    options = _parse(parser, words, scalars=("--times", "--sigma"))
    if len(options.noise) != 4:
        raise UsageError(f"--noise takes four numbers, for the weights A B C D, not {len(options.noise)}")
    _check_at_least(options, steps=0, after=1, times=1, networks=2)
    _check_not_negative(options, "noise", "sigma", "lr", "upscaled_lr")
    return options


def read_mlp_options(words: Sequence[str]) -> Any:
    """The options of `mupscale limit mlp`."""
    parser = make_parser("limit mlp", "[--option VALUE …]", MLP)
    _add_network_options(parser)
    parser.add_argument(
        "--times", type=list[int], metavar="N …", default=[2], help="factors by which to grow, one after another"
    )
    parser.add_argument(
        "--noise",
        type=list[float],
        metavar="X …",
        default=[0.5],
        help="noise σ̄_Δ: one number, or one per layer, input layer first",
    )
    parser.add_argument("--upscaled-lr", type=float | None, help="learning rate after upscaling (default: --lr)")
    _add_finite_options(parser, networks=16, widths=[256, 512, 1024, 2048])
    _add_limit_options(parser, samples=20_000, seeds=4)
    _add_out_option(parser, "limit/mlp")
    options = _parse(parser, words)
    _check_at_least(options, steps=0, after=0, samples=2, seeds=2, networks=2)
    _check_not_negative(options, "noise", "sigma", "lr", "upscaled_lr")
    if not options.times or min(options.times) < 1:
        raise UsageError(f"--times takes whole numbers of 1 or more, not {_joined(options.times) or 'nothing'}")
    return options


def read_sweep_options(words: Sequence[str]) -> Any:
    """The options of `mupscale limit sweep`."""
    parser = make_parser("limit sweep", "[--option VALUE …]", SWEEP)
    _add_network_options(parser)
    parser.add_argument(
        "--times", type=list[int], metavar="N …", default=[2], help="factors by which to grow, one sweep each"
    )
    parser.add_argument(
        "--noises",
        type=list[float],
        metavar="X …",
        default=[0.5, 1.0, 2.0, 4.0, 8.0, 16.0],
        help="noise levels σ̄_Δ to try, in addition to 0",
    )
    parser.add_argument(
        "--lrs",
        type=list[float],
        metavar="X …",
        default=[0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0],
        help="learning rates to try after upscaling",
    )
    _add_limit_options(parser, samples=4000, seeds=2)
    _add_out_option(parser, "limit/sweep")
    options = _parse(parser, words)
    _check_at_least(options, steps=0, after=1, samples=2, seeds=2)
    _check_not_negative(options, "sigma", "lr")
    if not options.times or min(options.times) < 2 or len(set(options.times)) < len(options.times):
        raise UsageError(f"--times takes distinct numbers of 2 or more, not {_joined(options.times) or 'nothing'}")
    return options


def read_grow_options(words: Sequence[str]) -> Any:
    """The options of `mupscale limit grow`."""
    parser = make_parser("limit grow", "[--option VALUE …]", GROW)
    _add_network_options(parser, lr=1.0)  # the best for the base model that goes on without growth
    parser.add_argument("--times", type=float, default=2.0, help="r: how many times wider; copies need a whole number")
    parser.add_argument(
        "--noises",
        type=list[float],
        metavar="X …",
        default=[0.5, 1.0, 2.0],
        help="noise levels σ̄_Δ of copies to try, in addition to 0",
    )
    parser.add_argument(
        "--outgoing", type=list[float], metavar="X …", default=[0.0, 0.5, 1.0], help="amplitudes of fresh units to try"
    )
    parser.add_argument(
        "--rates",
        type=list[float],
        metavar="X …",
        default=[0.25, 0.5, 1.0, 2.0],
        help="learning rates after the growth, as multiples of --lr",
    )
    _add_finite_options(parser, networks=16, widths=[64, 128, 256, 512])
    _add_limit_options(parser, samples=4000, seeds=2)
    _add_out_option(parser, "limit/grow")
    options = _parse(parser, words, scalars=("--times",))
    _check_at_least(options, steps=0, after=1, samples=2, seeds=2, networks=2)
    _check_not_negative(options, "sigma", "lr")
    if not options.times > 1:
        raise UsageError(f"--times is {options.times:g}, but must be more than 1")
    if not options.rates or min(options.rates) <= 0:
        raise UsageError(f"--rates takes numbers above 0, not {_joined(options.rates) or 'nothing'}")
    return options


def _add_network_options(parser: Any, lr: float = 0.5) -> None:
    parser.add_argument("--activation", type=str, default="tanh", help="linear, relu, tanh or gelu")
    parser.add_argument("--layers", type=int, default=3, help="number of weight layers, including input and output")
    parser.add_argument(
        "--sigma",
        type=list[float],
        metavar="X …",
        default=[1.0],
        help="σ̄ of the initial weights: one number, or one per layer",
    )
    parser.add_argument(
        "--frozen", type=list[int], metavar="N …", default=[], help="layers that do not learn; 1 is the input layer"
    )
    parser.add_argument("--optimizer", type=str, default="sgd", help="sgd, sign or adam (those two need few --samples)")
    parser.add_argument("--momentum", type=float, default=0.0, help="momentum of sgd and sign")
    parser.add_argument("--inputs", type=int, default=4, help="inputs in the synthetic batch")
    parser.add_argument("--features", type=int, default=8, help="features of an input")
    parser.add_argument("--seed", type=int, default=0, help="seed of the batch")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate before upscaling")
    parser.add_argument("--steps", type=int, default=5, help="steps before upscaling")
    parser.add_argument("--after", type=int, default=5, help="steps after it")


def _add_finite_options(parser: Any, networks: int, widths: list[int]) -> None:
    parser.add_argument(
        "--widths", type=list[int], metavar="N …", default=widths, help="widths n of the finite networks"
    )
    parser.add_argument("--networks", type=int, default=networks, help="number of finite networks per width")
    meaning = "sample the finite networks without storing their matrices: same distribution, cost linear in n"
    parser.add_argument("--revealed", action="store_true", help=meaning)


def _add_limit_options(parser: Any, samples: int, seeds: int) -> None:
    parser.add_argument("--samples", type=int, default=samples, help="Monte Carlo samples of the limit")
    parser.add_argument("--seeds", type=int, default=seeds, help="number of seeds of the limit, for its standard error")
    parser.add_argument("--device", type=str | None, help="cpu or cuda (default: a GPU if there is one)")


def _add_out_option(parser: Any, folder: str) -> None:
    parser.add_argument("--out", type=str, default=folder, help="folder for pictures and results.json")


def _parse(parser: Any, words: Sequence[str], scalars: tuple[str, ...] = ()) -> Any:
    return parse_arguments(parser, gather_lists(words, [name for name in _LISTS if name not in scalars]))


def gather_lists(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """`--widths 256 512` as `--widths [256, 512]`, which the parser takes as well."""
    gathered: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        gathered.append(word)
        if name not in names:
            continue
        values = [value] if equals else []
        while rest and (not rest[0].startswith("-") or re.match(r"-[\d.]", rest[0])):
            values.append(rest.pop(0))
        gathered[-1] = name
        if values:
            gathered.append(values[0] if len(values) == 1 and values[0].startswith("[") else f"[{', '.join(values)}]")
    return gathered


def make_network(options: Any) -> MLPSetup:
    """The MLP and how it is trained."""
    from mupscale.theory import Adam, MLPSetup, Sign

    wrong = [layer for layer in options.frozen if not 1 <= layer <= options.layers]
    if wrong:
        raise UsageError(f"--frozen names layer {wrong[0]}, but layers are numbered from 1 to {options.layers}")
    trained = [layer + 1 not in options.frozen for layer in range(options.layers)]
    sigma = options.sigma[0] if len(options.sigma) == 1 else options.sigma
    optimizers = {"sgd": None, "sign": Sign(), "adam": Adam()}
    if options.optimizer not in optimizers:
        raise UsageError(f"--optimizer is {options.optimizer}, but must be one of {', '.join(optimizers)}")
    entrywise = optimizers[options.optimizer]
    return MLPSetup(options.layers, options.activation, sigma, trained, options.momentum, entrywise=entrywise)


def make_batch(options: Any) -> tuple[Any, Any]:
    """The synthetic inputs and targets."""
    from mupscale.theory import gaussian_batch

    return gaussian_batch(options.inputs, options.features, options.seed)


def choose_device(options: Any) -> str | None:
    """The device that was named, if there is such a one here; None: a GPU if there is one."""
    import torch

    if options.device not in (None, "cpu") and not re.fullmatch(r"cuda(:\d+)?", options.device):
        raise UsageError(f"--device is {options.device}, but must be cpu or cuda")
    if options.device not in (None, "cpu") and not torch.cuda.is_available():
        raise UsageError(f"--device is {options.device}, but there is no GPU that torch can use here: leave it out")
    return None if options.device is None else str(options.device)


def settings_of(options: Any) -> dict[str, Any]:
    """What results.json says about how they came about."""
    return {name: value for name, value in options.as_dict().items() if name not in ("out", "config")}


def _check_at_least(options: Any, **least: int) -> None:
    for name, value in least.items():
        if options[name] < value:
            raise UsageError(f"--{name} is {options[name]}, but must be {value} or more")


def _check_not_negative(options: Any, *names: str) -> None:
    for name in names:
        values = options[name] if isinstance(options[name], list) else [options[name]]
        if not values or not all(value is None or 0 <= value < math.inf for value in values):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} takes numbers of 0 or more, not {_joined(values) or 'nothing'}")


def _joined(values: Sequence[Any]) -> str:
    return " ".join(map(str, values))
