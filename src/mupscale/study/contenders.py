"""The contenders of all comparisons, in one table: how each begins, what it is called, how it is drawn.

Another contender is another entry of CONTENDERS; settings, training, forecast, sentences and pictures read it here.
An operator that no entry has takes part under its own word, where it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mupscale.growth import DEPTH_OPERATORS, OPERATORS
from mupscale.system import MupscaleError
from mupscale.train import Filling

Rate = Literal["tuned", "base", "own", "plain"]
"""A learning rate in the paper's comparison: what tuning chose for the upscaled model, the base model's, the one that
is best without noise, and what one small width alone would transfer."""
Kind = Literal["base", "baseline", "ablation", "grown", "beside"]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to spend the budget.

    Args:
        name: in settings, JSON and folders
        label: at its line, and in tables
        phrase: in a sentence of "does growing pay", which it takes part in if it has one
        advice: how a sentence begins that recommends it; of a grown one the phrase says it
        color: of its line
        dashes: of its line, as matplotlib takes them
        is_wide: whether it has the wide model's width
        from_base: whether it begins with the base model, whose cost then belongs to it
        how: how new units are filled, as in a growth event
        tunes_noise: whether a noise level is tuned for it
        tuned_as: the contender whose tuned values it takes; its own where none
        full_steps: whether it has all the steps of base model and growth, whatever they cost
        keeps_rates: whether it trains with the narrow model's rates, decay and eps, as if its width were the same
        is_usual: whether it takes part unless asked otherwise; the others are thin lines
        kind: in the paper's comparison: base; baseline (the verdict takes the best of them); ablation (takes the gain
            apart); grown (what the verdict is about); beside (mentioned beside it); none where it takes no part
        letter: there, before its label
        subject: there, at the beginning of a sentence
        rate: there, its learning rate; change: the rate it changes to on the way
        remark: there, what to add where a sentence speaks of 'the upscaled model'
        on_request: there, whether it takes part only where it is asked for
        own_sweep: there, whether its noise and rate do not transfer, and are tuned at the wide width
        sets_zoom: whether a zoomed picture makes room for its curve
    """

    name: str
    label: str
    phrase: str = ""
    advice: str = ""
    color: str
    dashes: str | tuple[int, tuple[int, ...]] = "-"
    is_wide: bool = True
    from_base: bool = True
    how: str = "copies"
    tunes_noise: bool = False
    tuned_as: str | None = None
    full_steps: bool = False
    keeps_rates: bool = False
    is_usual: bool = True
    kind: Kind | None = None
    letter: str = ""
    subject: str = ""
    rate: Rate = "tuned"
    change: Rate | None = None
    remark: str = ""
    on_request: bool = False
    own_sweep: bool = False
    sets_zoom: bool = True

    def __post_init__(self) -> None:
        if not self.advice and self.phrase.startswith("growing "):
            object.__setattr__(self, "advice", f"Grow it, {self.phrase.removeprefix('growing ')}")

    @property
    def is_grown(self) -> bool:
        """Whether it is the base model made wider."""
        return self.is_wide and self.from_base

    @property
    def adds_blocks(self) -> bool:
        """Whether it is about new blocks, for models that grow in depth alone; else about new units."""
        return self.how in DEPTH_OPERATORS

    @property
    def needs_multiples(self) -> bool:
        """Whether it grows by whole factors alone."""
        return self.is_grown and Filling(how=self.how).build_operator().needs_multiples

    @property
    def short(self) -> str:
        """In a legend."""
        return f"{self.letter} {self.label}".strip()

    @property
    def brief_phrase(self) -> str:
        """In a sentence that has spoken of the base model, and in pictures."""
        return self.phrase.removesuffix(" the base model")

    @property
    def has_own_rate(self) -> bool:
        """Whether it has the learning rate that is best without noise, so that it is left out where none is."""
        return "own" in (self.rate, self.change)


CONTENDERS = (
    Contender(
        name="base",
        label="base model",
        subject="the base model",
        color="#9aa5b1",
        is_wide=False,
        from_base=False,
        kind="base",
        rate="base",
        sets_zoom=False,
    ),
    Contender(
        name="from-scratch",
        label="from scratch",
        phrase="starting over",
        advice="Start over",
        color="#4c566a",
        from_base=False,
        kind="baseline",
        letter="(a)",
        subject="training from scratch",
        rate="base",
    ),
    Contender(
        name="from-scratch-changed",
        label="from scratch, lr changed",
        color="#2a7fb8",
        dashes=(0, (5, 5)),  # gaps as long as the dashes: (a), which it often lies upon, is seen through them
        from_base=False,
        kind="baseline",
        letter="(b)",
        subject="training from scratch with the same change of the learning rate",
        rate="base",
        change="tuned",
    ),
    Contender(
        name="from-scratch-own",
        label="from scratch, own lr",
        color="#6a5acd",
        dashes=(0, (2, 3)),
        from_base=False,
        kind="baseline",
        letter="(b′)",
        subject="training from scratch, changed to the learning rate that is best without noise",
        rate="base",
        change="own",
    ),
    Contender(
        name="continued",
        label="continued",
        phrase="continuing the base model",
        advice="Continue the base model",
        color="#c98a1b",
        is_wide=False,
        kind="baseline",
        letter="(c)",
        subject="simply continuing the base model with the new learning rate",
    ),
    Contender(
        name="continued-own",
        label="continued, own lr",
        color="#8c6d46",
        dashes=(0, (4, 1, 1, 1, 1, 1)),
        is_wide=False,
        kind="baseline",
        letter="(c′)",
        subject="simply continuing the base model with the learning rate that is best without noise",
        rate="own",
    ),
    Contender(
        name="continued-late",
        label="continued, own lr late",
        color="#4f3a17",
        dashes=(0, (6, 1, 1, 1)),
        is_wide=False,
        kind="baseline",
        letter="(c″)",
        subject="continuing the base model, changed halfway to the learning rate that is best without noise",
        change="own",
    ),
    Contender(
        name="copies-without-noise",
        label="copies without noise",
        phrase="growing from copies without noise",
        color="#e3a6a8",
        dashes=":",
        is_usual=False,
        kind="ablation",
        letter="(d)",
        subject="the upscaled model without noise",
    ),
    Contender(
        name="copies",
        label="grown from copies",
        phrase="growing from copies",
        color="#c44e52",
        tunes_noise=True,
        kind="grown",
        letter="(e)",
        subject="the upscaled model",
    ),
    Contender(
        name="copies-own",
        label="grown from copies, own lr",
        color="#8c1c2e",
        dashes=(0, (4, 2)),
        kind="grown",
        letter="(e′)",
        subject="the upscaled model, changed halfway to the learning rate that is best without noise,",
        change="own",
        remark=" (changed halfway)",
    ),
    Contender(
        name="copies-plain",
        label="plain transfer",
        color="#8e5ea2",
        kind="beside",
        letter="(e″)",
        subject="plain transfer, not extrapolated",
        rate="plain",
    ),
    Contender(
        name="fresh",
        label="grown with fresh units",
        phrase="growing with fresh units",
        color="#2a7fb8",
        how="fresh",
    ),
    Contender(
        name="identity-blocks",
        label="grown with identity blocks",
        phrase="growing with blocks that change nothing at first",
        color="#3a9d6e",
        how="identity",
        is_usual=False,
    ),
    Contender(
        name="copied-blocks",
        label="grown with copied blocks",
        phrase="growing with a copy behind every block",
        color="#7a5aa6",
        how="interleaved",
        is_usual=False,
    ),
    Contender(
        name="paired-noise",
        label="copies with paired noise",
        phrase="growing from copies with paired noise",
        color="#8b3a62",
        how="paired",
        tunes_noise=True,
        is_usual=False,
    ),
    Contender(
        name="net2net",
        label="Net2Net",
        phrase="growing by Net2Net",
        color="#6f9a3e",
        how="net2net",
        tunes_noise=True,
        is_usual=False,
        kind="beside",
        subject="Net2Net",
        on_request=True,
        own_sweep=True,
    ),
    Contender(
        name="naive-widening",
        label="naive widening",
        phrase="growing naively",
        color="#a07a5a",
        how="naive",
        tunes_noise=True,
        keeps_rates=True,
        is_usual=False,
        kind="beside",
        subject="naive widening",
        on_request=True,
        sets_zoom=False,
    ),
    Contender(
        name="from-scratch-all-steps",
        label="from scratch, all steps (the ceiling)",
        phrase="starting over for all the steps",
        advice="Start over, for all the steps",
        color="#8f96a3",
        from_base=False,
        tuned_as="from-scratch",
        full_steps=True,
        is_usual=False,
    ),
)
"""All of them, in the order in which they are shown."""


def contender_named(name: str) -> Contender:
    """The contender of a name, or of an operator's word that no other one has."""
    for one in CONTENDERS:
        if one.name == name:
            return one
    if _is_word_alone(name):
        noise, told = "noise" in OPERATORS[name].takes, f"by {name} units"
        return Contender(
            name=name,
            label=f"grown {told}",
            phrase=f"growing {told}",
            color="#b0713a",
            how=name,
            tunes_noise=noise,
            is_usual=False,
        )
    raise MupscaleError(f"{name!r} is not a contender: choose from {', '.join(one.name for one in CONTENDERS)}")


def _is_word_alone(name: str) -> bool:
    return name in OPERATORS and not any(name in (one.name, one.how) for one in CONTENDERS)


BASE, FROM_SCRATCH, FROM_SCRATCH_CHANGED = map(contender_named, ("base", "from-scratch", "from-scratch-changed"))
CONTINUED, COPIES_WITHOUT_NOISE = map(contender_named, ("continued", "copies-without-noise"))
COPIES, COPIES_OWN, FRESH = map(contender_named, ("copies", "copies-own", "fresh"))
"""Those that the presets treat in a way of their own."""
IN_PAY = tuple(one.name for one in CONTENDERS if one.advice)
IN_PAPER = tuple(one.name for one in CONTENDERS if one.kind is not None)
USUAL_IN_PAY = tuple(one.name for one in CONTENDERS if one.advice and one.is_usual)
USUAL_IN_DEPTH = ("from-scratch", "continued", "identity-blocks", "copied-blocks")
USUAL_IN_PAPER = tuple(one.name for one in CONTENDERS if one.kind is not None and not one.on_request)


def usual_contenders(*, paper: bool) -> list[str]:
    """Who takes part in a comparison unless asked otherwise. paper: in the paper's own."""
    return list(USUAL_IN_PAPER if paper else USUAL_IN_PAY)


def contender_or_stranger(name: str) -> Contender:
    """The contender of a name; a stranger to the table is called by its name, and no base model is charged to it."""
    if name in OPERATORS or any(one.name == name for one in CONTENDERS):
        return contender_named(name)
    return Contender(name=name, label=name, phrase=name, color=BASE.color, from_base=False)


def contenders_named(names: Sequence[str]) -> list[Contender]:
    """These contenders, in the table's order; operators that it lacks come last."""
    return [one for one in CONTENDERS if one.name in names] + [contender_named(n) for n in names if _is_word_alone(n)]


def check_contenders(names: Sequence[str], setting: str, allowed: Sequence[str] = IN_PAY) -> None:
    """Refuse names that are none, and a choice in which nothing can be compared. setting: what the user calls it."""
    for name in names:
        if name not in allowed and not (allowed is IN_PAY and _is_word_alone(name)):
            raise MupscaleError(f"{name!r} is not a contender here: choose from {', '.join(allowed)}")
        tuned_as = contender_named(name).tuned_as
        if tuned_as is not None and tuned_as not in names:
            raise MupscaleError(f"{setting} has {name}, which uses the learning rate of {tuned_as}: add {tuned_as}")
    if allowed is IN_PAY and (CONTINUED.name not in names or not any(contender_named(name).is_grown for name in names)):
        raise MupscaleError(
            f"{setting} needs `continued` and at least one grown model to compare it with: "
            f"choose from {', '.join(allowed)}"
        )
