"""The contenders of all comparisons, in one table: how each begins, what it is called, how it is drawn.

Another contender is another entry of CONTENDERS; settings, training, forecast, sentences and pictures read it here.
An operator that no entry has takes part under its own word, where it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mupscale.growth import OPERATORS, GrowthSettings
from mupscale.system import MupscaleError

Rate = Literal["tuned", "base", "own", "plain"]
"""A learning rate in the paper's comparison: what tuning chose for the upscaled model, the base model's, the one that
is best without noise, and what one small width alone would transfer."""
Kind = Literal["base", "baseline", "ablation", "grown", "beside"]


class InPaper(NamedTuple):
    """What a contender is in the paper's own comparison.

    kind: base; baseline (the verdict takes the best of them); ablation (takes the gain apart); grown (what the verdict
    is about); beside (mentioned beside it); none where it takes no part. letter: before its label. subject: at the
    beginning of a sentence. rate: its learning rate; change: the one it changes to on the way. on_request: whether it
    takes part only where it is asked for. own_sweep: whether its noise and rate do not transfer, and are tuned at the
    wide width.
    """

    kind: Kind | None = None
    letter: str = ""
    subject: str = ""
    rate: Rate = "tuned"
    change: Rate | None = None
    on_request: bool = False
    own_sweep: bool = False


_NOT_IN_PAPER = InPaper()


@dataclass(frozen=True)
class Contender:
    """A way to spend the budget.

    Args:
        name: in settings, JSON and folders
        label: at its line, and in tables
        color: of its line
        phrase: in a sentence of "does growing pay", which it takes part in if it has one
        advice: how a sentence begins that recommends it; of a grown one the phrase says it
        dashes: of its line, as matplotlib takes them
        is_wide: whether it has the wide model's width
        from_base: whether it begins with the base model, whose cost then belongs to it
        how: how new units are filled, as in a growth event
        settings: the operator's other settings, as in a growth event; noise is tuned, or stands there
        tunes_noise: whether a noise level is tuned for it
        full_steps: whether it has all the steps of base model and growth, whatever they cost
        keeps_rates: whether it trains with the narrow model's rates, decay and eps, as if its width were the same
        is_usual: whether it takes part unless asked otherwise; the others are thin lines
        paper: what it is in the paper's comparison
    """

    name: str
    label: str
    color: str
    phrase: str = ""
    advice: str = ""
    dashes: str | tuple[int, tuple[int, ...]] = "-"
    is_wide: bool = True
    from_base: bool = True
    how: str = "copies"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    tunes_noise: bool = False
    full_steps: bool = False
    keeps_rates: bool = False
    is_usual: bool = True
    paper: InPaper = _NOT_IN_PAPER

    def __post_init__(self) -> None:
        if not self.advice and self.phrase.startswith("growing "):
            object.__setattr__(self, "advice", f"Grow it, {self.phrase.removeprefix('growing ')}")

    @property
    def kind(self) -> Kind | None:
        return self.paper.kind

    @property
    def is_grown(self) -> bool:
        """Whether it is the base model made wider."""
        return self.is_wide and self.from_base

    @property
    def needs_multiples(self) -> bool:
        """Whether it grows by whole factors alone."""
        return self.is_grown and GrowthSettings(how=self.how).build_operator().needs_multiples

    @property
    def tuned_as(self) -> str | None:
        """The contender whose tuned values it takes; none: its own."""
        return "from-scratch" if self.full_steps else None

    @property
    def short(self) -> str:
        """In a legend."""
        return f"{self.paper.letter} {self.label}".strip()

    @property
    def brief_phrase(self) -> str:
        """In a sentence that has spoken of the base model, and in pictures."""
        return self.phrase.removesuffix(" the base model")


_OWN = "the learning rate that is best without noise"
_CHANGED = "training from scratch with the same change of the learning rate"
# fmt: off
CONTENDERS = (
    Contender("base", "base model", "#9aa5b1", is_wide=False, from_base=False,
              paper=InPaper("base", "", "the base model", "base")),
    Contender("from-scratch", "from scratch", "#4c566a", "starting over", "Start over", from_base=False,
              paper=InPaper("baseline", "(a)", "training from scratch", "base")),
    # gaps as long as the dashes: from-scratch, which it often lies upon, is seen through them
    Contender("from-scratch-changed", "from scratch, lr changed", "#2a7fb8", dashes=(0, (5, 5)), from_base=False,
              paper=InPaper("baseline", "(b)", _CHANGED, "base", "tuned")),
    Contender("from-scratch-own", "from scratch, own lr", "#6a5acd", dashes=(0, (2, 3)), from_base=False,
              paper=InPaper("baseline", "(b′)", f"training from scratch, changed to {_OWN}", "base", "own")),
    Contender("continued", "continued", "#c98a1b", "continuing the base model", "Continue the base model",
              is_wide=False,
              paper=InPaper("baseline", "(c)", "simply continuing the base model with the new learning rate")),
    Contender("continued-own", "continued, own lr", "#8c6d46", dashes=(0, (4, 1, 1, 1, 1, 1)), is_wide=False,
              paper=InPaper("baseline", "(c′)", f"simply continuing the base model with {_OWN}", "own")),
    Contender("continued-late", "continued, own lr late", "#4f3a17", dashes=(0, (6, 1, 1, 1)), is_wide=False,
              paper=InPaper("baseline", "(c″)", f"continuing the base model, changed halfway to {_OWN}",
                            change="own")),
    Contender("copies-without-noise", "copies without noise", "#e3a6a8", "growing from copies without noise",
              dashes=":", is_usual=False, paper=InPaper("ablation", "(d)", "the upscaled model without noise")),
    Contender("copies", "grown from copies", "#c44e52", "growing from copies", tunes_noise=True,
              paper=InPaper("grown", "(e)", "the upscaled model")),
    Contender("copies-own", "grown from copies, own lr", "#8c1c2e", dashes=(0, (4, 2)),
              paper=InPaper("grown", "(e′)", f"the upscaled model, changed halfway to {_OWN},", "tuned", "own")),
    Contender("copies-plain", "plain transfer", "#8e5ea2",
              paper=InPaper("beside", "(e″)", "plain transfer, not extrapolated", "plain")),
    Contender("fresh", "grown with fresh units", "#2a7fb8", "growing with fresh units", how="fresh"),
    Contender("fresh-trained", "fresh, as trained", "#1f9e9a",
              "growing with fresh units as large as trained ones", how="fresh", settings={"spread": "trained"},
              is_usual=False),
    Contender("copies-shrunk", "shrunk copies", "#d98b5f", "growing from shrunk copies",
              settings={"shrink": 0.7}, tunes_noise=True, is_usual=False),
    Contender("identity-blocks", "grown with identity blocks", "#3a9d6e",
              "growing with blocks that change nothing at first", how="identity", is_usual=False),
    Contender("copied-blocks", "grown with copied blocks", "#7a5aa6", "growing with a copy behind every block",
              how="interleaved", is_usual=False),
    Contender("paired-noise", "copies with paired noise", "#8b3a62", "growing from copies with paired noise",
              how="paired", tunes_noise=True, is_usual=False),
    Contender("net2net", "Net2Net", "#6f9a3e", "growing by Net2Net", how="net2net", tunes_noise=True, is_usual=False,
              paper=InPaper("beside", "", "Net2Net", on_request=True, own_sweep=True)),
    Contender("naive-widening", "naive widening", "#a07a5a", "growing naively", how="naive", tunes_noise=True,
              keeps_rates=True, is_usual=False, paper=InPaper("beside", "", "naive widening", on_request=True)),
    Contender("from-scratch-all-steps", "from scratch, all steps (the ceiling)", "#8f96a3",
              "starting over for all the steps", "Start over, for all the steps", from_base=False, full_steps=True,
              is_usual=False),
)
# fmt: on
"""All of them, in the order in which they are shown."""


def contender_named(name: str) -> Contender:
    """The contender of a name, or of an operator's word that no other one has."""
    for one in CONTENDERS:
        if one.name == name:
            return one
    if _is_word_alone(name):
        noise, told = "noise" in OPERATORS[name].takes, f"by {name} units"
        label, phrase = f"grown {told}", f"growing {told}"
        return Contender(name, label, "#b0713a", phrase, how=name, tunes_noise=noise, is_usual=False)
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
USUAL_IN_PAPER = tuple(one.name for one in CONTENDERS if one.kind is not None and not one.paper.on_request)


def usual_contenders(*, paper: bool) -> list[str]:
    """Who takes part in a comparison unless asked otherwise. paper: in the paper's own."""
    return list(USUAL_IN_PAPER if paper else USUAL_IN_PAY)


def contender_or_stranger(name: str) -> Contender:
    """The contender of a name; a stranger to the table is called by its name, and no base model is charged to it."""
    if name in OPERATORS or any(one.name == name for one in CONTENDERS):
        return contender_named(name)
    return Contender(name, name, BASE.color, name, from_base=False)


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
