"""The contenders of a comparison, in one table: how each begins, what it is called, how it is drawn.

Another contender is another entry of CONTENDERS; settings, training, forecast, sentences and pictures read it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mupscale.system import MupscaleError
from mupscale.train import How, build_operator


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to spend the budget.

    Args:
        name: in settings, JSON and folders
        label: at its line, and in tables
        phrase: in a sentence
        advice: how a sentence begins that recommends it
        color: of its line
        is_wide: whether it has the wide model's width
        from_base: whether it begins with the base model, whose cost then belongs to it
        how: how new units are filled, as in a growth event
        tunes_noise: whether a noise level is tuned for it
        tuned_as: the contender whose tuned values it takes; its own where none
        full_steps: whether it has all the steps of base model and growth, whatever they cost
        keeps_rates: whether it trains with the narrow model's rates, decay and eps, as if its width were the same
        is_usual: whether it takes part unless asked otherwise; the others are thin lines
    """

    name: str
    label: str
    phrase: str
    advice: str
    color: str
    is_wide: bool = True
    from_base: bool = True
    how: How = "copies"
    tunes_noise: bool = False
    tuned_as: str | None = None
    full_steps: bool = False
    keeps_rates: bool = False
    is_usual: bool = True

    @property
    def is_grown(self) -> bool:
        """Whether it is the base model made wider."""
        return self.is_wide and self.from_base

    @property
    def needs_multiples(self) -> bool:
        """Whether it grows by whole factors alone."""
        return self.is_grown and build_operator(self.how, 0.0, "init").needs_multiples


FROM_SCRATCH = Contender(
    name="from-scratch",
    label="from scratch",
    phrase="starting over",
    advice="Start over",
    color="#4c566a",
    from_base=False,
)
CONTINUED = Contender(
    name="continued",
    label="continued",
    phrase="continuing the base model",
    advice="Continue the base model",
    color="#c98a1b",
    is_wide=False,
)
COPIES = Contender(
    name="copies",
    label="grown from copies",
    phrase="growing from copies",
    advice="Grow it, from copies",
    color="#c44e52",
    tunes_noise=True,
)
FRESH = Contender(
    name="fresh",
    label="grown with fresh units",
    phrase="growing with fresh units",
    advice="Grow it, with fresh units",
    color="#2a7fb8",
    how="fresh",
)
COPIES_WITHOUT_NOISE = Contender(
    name="copies-without-noise",
    label="copies without noise",
    phrase="growing from copies without noise",
    advice="Grow it, from copies without noise",
    color="#e3a6a8",
    is_usual=False,
)
PAIRED_NOISE = Contender(
    name="paired-noise",
    label="copies with paired noise",
    phrase="growing from copies with paired noise",
    advice="Grow it, from copies with paired noise",
    color="#8b3a62",
    how="paired",
    tunes_noise=True,
    is_usual=False,
)
ALL_STEPS = Contender(
    name="from-scratch-all-steps",
    label="from scratch, all steps (the ceiling)",
    phrase="starting over for all the steps",
    advice="Start over, for all the steps",
    color="#8f96a3",
    from_base=False,
    tuned_as="from-scratch",
    full_steps=True,
    is_usual=False,
)
NET2NET = Contender(
    name="net2net",
    label="Net2Net",
    phrase="growing by Net2Net",
    advice="Grow it, by Net2Net",
    color="#6f9a3e",
    how="net2net",
    tunes_noise=True,
    is_usual=False,
)
NAIVE_WIDENING = Contender(
    name="naive-widening",
    label="naive widening",
    phrase="growing naively",
    advice="Grow it, naively",
    color="#a07a5a",
    how="naive",
    tunes_noise=True,
    keeps_rates=True,
    is_usual=False,
)

CONTENDERS = (
    FROM_SCRATCH,
    CONTINUED,
    COPIES,
    FRESH,
    COPIES_WITHOUT_NOISE,
    PAIRED_NOISE,
    NET2NET,
    NAIVE_WIDENING,
    ALL_STEPS,
)
DEFAULT_NAMES = tuple(one.name for one in CONTENDERS if one.is_usual)


def contender_named(name: str) -> Contender:
    """The contender of a name.

    >>> contender_named("fresh").label
    'grown with fresh units'
    """
    for one in CONTENDERS:
        if one.name == name:
            return one
    raise MupscaleError(f"{name!r} is no contender: take from {', '.join(one.name for one in CONTENDERS)}")


def contenders_named(names: Sequence[str]) -> list[Contender]:
    """These contenders, in the table's order.

    >>> [one.label for one in contenders_named(["fresh", "continued"])]
    ['continued', 'grown with fresh units']
    """
    return [one for one in CONTENDERS if one.name in names]


def check_contenders(names: Sequence[str], setting: str) -> None:
    """Refuse names that are none, and a choice in which nothing can be compared. setting: what the user calls it.

    >>> check_contenders(["continued", "copy"], "contenders")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: 'copy' is no contender: take from ...
    """
    for one in (contender_named(name) for name in names):
        if one.tuned_as is not None and one.tuned_as not in names:
            raise MupscaleError(f"{setting} has {one.name}, which takes the learning rate of {one.tuned_as}: add that")
    if CONTINUED.name not in names or not any(contender_named(name).is_grown for name in names):
        raise MupscaleError(
            f"{setting} needs the base model continued, and a grown model to compare with it: "
            f"take from {', '.join(one.name for one in CONTENDERS)}"
        )
