"""The contenders: every model that a run of the method trains at full size and compares, in one registry.

A contender is one entry of `CONTENDERS`, and another one is a change of this file alone. All read it here: training,
costs, the verdict, the dry run, the settings' words, the order of stages, legends, colours and tables.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Literal

from mupscale.method.contender_types import ComparisonSetup, GainMark, PaperContender, Training
from mupscale.method.other_widenings import check_random_copies, write_naive_start, write_net2net_start
from mupscale.train import Recipe

Baseline = Literal["scratch", "scratch-drop", "continued", "net2net", "naive"]
"""The words of `method.baselines`: each asks for the contenders that name it in `asked_by`."""

STAGES = ("base", "scratch", "continued", "exact", "upscaled", "naive", "net2net")
"""The stages in which contenders are trained, one after the other; those of one stage are trained as one program."""


# ------------------------------------------------------------------------------------------------ how they are trained


def _plan_scratch_with_change(setup: ComparisonSetup, name: str, lr: float) -> Training:
    """The rate changes after the same part of the run as the upscaled model's; where it stays, this is (a)."""
    base, after, steps = setup.protocol.base_steps, setup.protocol.wide_steps, setup.scratch_steps
    change = (max(1, min(steps - 1, round(steps * base / (base + after)))), lr)
    same = lr == setup.choice.base_lr and SCRATCH.is_asked_for(setup.baselines)
    return replace(setup.train_fresh(name, setup.wide, steps, change), shares=SCRATCH.name if same else None)


def _plan_continued_own(setup: ComparisonSetup) -> Training:
    lr = setup.lr_without_noise
    return setup.train_from_base("continued-own", setup.narrow, setup.continued_steps, lr=lr)


def _plan_continued_late(setup: ComparisonSetup) -> Training | None:
    if setup.continued_steps < 2:
        return None
    return setup.change_halfway(setup.train_from_base("continued-late", setup.narrow, setup.continued_steps))


def _plan_exact(setup: ComparisonSetup) -> Training:
    """Without noise the wide model computes what the narrow one does, step by step, so that one is trained instead.

    Its steps are the first of (c), unless a schedule makes these other ones.
    """
    training = replace(setup.train_from_base("exact", setup.narrow, setup.protocol.wide_steps), width=setup.wide)
    return replace(training, shares=CONTINUED.name if setup.protocol.exact_is_a_beginning else None)


def _plan_upscaled(setup: ComparisonSetup) -> Training:
    """Meta-algorithm 'Upscaling procedure'; where no noise is best, it is (d), if that is there."""
    training = setup.train_from_base("upscaled", setup.wide, setup.protocol.wide_steps, noise=setup.noise)
    same = setup.choice.noise == 0 and EXACT.is_asked_for(setup.baselines)
    return replace(training, shares=EXACT.name if same else None)


def _plan_upscaled_own(setup: ComparisonSetup) -> Training | None:
    """What (b′) is to (a), it is to (e): noise may want a large rate, which is not the one to end with."""
    steps = setup.protocol.wide_steps
    if setup.choice.noise == 0 or steps < 2:
        return None
    return setup.change_halfway(setup.train_from_base("upscaled-own", setup.wide, steps, noise=setup.noise))


def _plan_upscaled_plain(setup: ComparisonSetup) -> Training | None:
    """Signal-normalised noise transfers as constants, which are proportional to it."""
    constants, plain = setup.choice.constants, setup.choice.plain
    if plain is None or plain[0] == 0:
        return None
    noise, lr = plain
    level = noise if constants is None else {name: c * noise / setup.choice.noise for name, c in constants.items()}
    return setup.train_from_base("upscaled-plain", setup.wide, setup.protocol.wide_steps, lr=lr, noise=level)


def _plan_net2net(setup: ComparisonSetup) -> Training:
    """The noise is added when training starts, to the copies that are in the file."""
    training = setup.train_from_base("net2net", setup.wide, setup.protocol.wide_steps, noise=setup.noise)

    def make_recipe(seed: int) -> Recipe:
        return replace(training.make_recipe(seed), start=str(setup.start_file("net2net", seed)))

    return replace(training, make_recipe=make_recipe)


def _plan_naive(setup: ComparisonSetup) -> Training:
    """Copied and perturbed, but trained as if the width were the same: the narrow model's rates, decay and eps."""
    training = setup.train_from_base("naive", setup.wide, setup.protocol.wide_steps)
    base = setup.protocol.upscaled_width(setup.protocol.recipe.base)

    def make_recipe(seed: int) -> Recipe:
        start = str(setup.start_file("naive", seed))
        return replace(training.make_recipe(seed), base=base, init_at=None, start=start)

    return replace(training, make_recipe=make_recipe, noise=setup.noise)


# ------------------------------------------------------------------------------------------------ the registry


BASE = PaperContender(
    name="base",
    kind="base",
    label="base model, width {width}",
    short="base model",
    phrase="the base model",
    heading="base model",
    color="#9aa5b1",
    stage="base",
    plan=lambda setup: setup.train_fresh("base", setup.narrow, setup.protocol.base_steps),
    after_base=False,
    sets_zoom=False,
)
SCRATCH = PaperContender(
    name="scratch",
    kind="baseline",
    label="(a) from scratch, width {width}",
    short="(a) from scratch",
    phrase="training from scratch",
    heading="from scratch",
    color="#4c566a",
    stage="scratch",
    plan=lambda setup: setup.train_fresh("scratch", setup.wide, setup.scratch_steps),
    after_base=False,
    asked_by="scratch",
    on_card=True,
)
SCRATCH_DROP = PaperContender(
    name="scratch-drop",
    kind="baseline",
    label="(b) from scratch, with the same change of the learning rate",
    short="(b) from scratch, lr changed",
    phrase="training from scratch with the same change of the learning rate",
    heading="from scratch with the change",
    color="#2a7fb8",
    dashes=(0, (5, 5)),  # gaps as long as the dashes: (a), which it often lies upon, is seen through them
    stage="scratch",
    plan=lambda setup: _plan_scratch_with_change(setup, "scratch-drop", setup.choice.lr),
    after_base=False,
    asked_by="scratch-drop",
)
SCRATCH_OWN = PaperContender(
    name="scratch-own",
    kind="baseline",
    label="(b′) from scratch, changed to the learning rate that is best without noise",
    short="(b′) from scratch, own lr",
    phrase="training from scratch, changed to the learning rate that is best without noise",
    heading="from scratch with its own learning rate",
    color="#6a5acd",
    dashes=(0, (2, 3)),
    stage="scratch",
    plan=lambda setup: _plan_scratch_with_change(setup, "scratch-own", setup.lr_without_noise),
    after_base=False,
    asked_by="scratch-drop",
    own_rate=True,
    gain_mark=GainMark("from scratch, own lr"),
)
CONTINUED = PaperContender(
    name="continued",
    kind="baseline",
    label="(c) base model continued, width {width}",
    short="(c) base continued",
    phrase="simply continuing the base model with the new learning rate",
    heading="base model continued",
    color="#e0a030",
    dashes="-.",
    stage="continued",
    plan=lambda setup: setup.train_from_base("continued", setup.narrow, setup.continued_steps),
    after_base=True,
    asked_by="continued",
    gain_mark=GainMark("base model continued"),
)
CONTINUED_OWN = PaperContender(
    name="continued-own",
    kind="baseline",
    label="(c′) base model continued, with the learning rate that is best without noise",
    short="(c′) base continued, own lr",
    phrase="simply continuing the base model with the learning rate that is best without noise",
    heading="continued with its own learning rate",
    color="#8c6d46",
    dashes=(0, (4, 1, 1, 1, 1, 1)),
    stage="continued",
    plan=_plan_continued_own,
    after_base=True,
    asked_by="continued",
    own_rate=True,
    gain_mark=GainMark("base model continued, own lr"),
)
CONTINUED_LATE = PaperContender(
    name="continued-late",
    kind="baseline",
    label="(c″) base model continued, changed halfway to the learning rate that is best without noise",
    short="(c″) continued, own lr late",
    phrase="continuing the base model, changed halfway to the learning rate that is best without noise",
    heading="continued and changed halfway",
    color="#4f3a17",
    dashes=(0, (6, 1, 1, 1)),
    stage="continued",
    plan=_plan_continued_late,
    after_base=True,
    asked_by="continued",
    own_rate=True,
    gain_mark=GainMark("base model continued, own lr from halfway"),
)
EXACT = PaperContender(
    name="exact",
    kind="ablation",
    label="(d) upscaled without noise, width {width}",
    short="(d) upscaled, no noise",
    phrase="the upscaled model without noise",
    heading="",
    color="#3a9d6e",
    dashes=":",
    stage="exact",
    plan=_plan_exact,
    after_base=True,
    asked_by="continued",
)
UPSCALED = PaperContender(
    name="upscaled",
    kind="grown",
    label="(e) upscaled with noise, width {width}",
    label_without_noise="(e) upscaled, width {width}, for which the sweep chose no noise",
    short="(e) upscaled",
    phrase="the upscaled model",
    heading="upscaled",
    color="#d1495b",
    stage="upscaled",
    plan=_plan_upscaled,
    after_base=True,
    on_card=True,
)
UPSCALED_OWN = PaperContender(
    name="upscaled-own",
    kind="grown",
    label="(e′) upscaled with noise, changed halfway to the learning rate that is best without noise",
    short="(e′) upscaled, own lr",
    phrase="the upscaled model, changed halfway to the learning rate that is best without noise,",
    heading="upscaled and changed halfway",
    color="#8c1c2e",
    dashes=(0, (4, 2)),
    stage="upscaled",
    plan=_plan_upscaled_own,
    after_base=True,
    own_rate=True,
    remark=" (changed halfway)",
    without="Without the change halfway",
    gain_mark=GainMark(
        "upscaled, own lr from halfway on", "upscaled,\nown lr", "the same with its own lr from halfway on"
    ),
    on_card=True,
)
UPSCALED_PLAIN = PaperContender(
    name="upscaled-plain",
    kind="comparison",
    label="(e″) upscaled, plain transfer",
    short="(e″) plain transfer",
    phrase="plain transfer, not extrapolated",
    heading="upscaled with the plain transfer",
    color="#8e5ea2",
    stage="upscaled",
    plan=_plan_upscaled_plain,
    after_base=True,
)
NET2NET = PaperContender(
    name="net2net",
    kind="comparison",
    label="Net2Net, tuned at width {width}",
    short="Net2Net",
    phrase="Net2Net",
    heading="Net2Net",
    color="#17a2a2",
    stage="net2net",
    plan=_plan_net2net,
    after_base=True,
    asked_by="net2net",
    own_sweep=True,
    write_start=lambda setup, base, path: write_net2net_start(base, setup.wide, path),
    check=lambda protocol: check_random_copies(protocol.recipe, protocol.wide),
)
NAIVE = PaperContender(
    name="naive",
    kind="comparison",
    label="naive widening, width {width}",
    short="naive widening",
    phrase="naive widening",
    heading="naive widening",
    color="#b5538a",
    stage="naive",
    plan=_plan_naive,
    after_base=True,
    asked_by="naive",
    write_start=lambda setup, base, path: write_naive_start(base, setup.protocol, setup.noise, path),
    sets_zoom=False,
)

CONTENDERS = (
    BASE,
    SCRATCH,
    SCRATCH_DROP,
    SCRATCH_OWN,
    CONTINUED,
    CONTINUED_OWN,
    CONTINUED_LATE,
    EXACT,
    UPSCALED,
    UPSCALED_OWN,
    UPSCALED_PLAIN,
    NET2NET,
    NAIVE,
)
"""All of them, in the order in which they are shown."""

DEFAULT_BASELINES: tuple[Baseline, ...] = ("scratch", "scratch-drop", "continued")
"""What `method.baselines` is where a recipe does not say it."""

RANKED = tuple(sorted(CONTENDERS, key=lambda one: (one.stage != UPSCALED.stage, one is BASE)))
"""The upscaled models first and the base model last, as in tables and cards of final losses."""


def find_contender(name: str) -> PaperContender | None:
    """The contender of a name; None for one that an older or a newer version trained.

    >>> find_contender("scratch").short
    '(a) from scratch'
    >>> find_contender("an old one") is None
    True
    """
    return next((one for one in CONTENDERS if one.name == name), None)


def has_own_rates(baselines: Container[str]) -> bool:
    """Whether a baseline, and so the upscaled model, is also trained with the rate that is best without noise.

    >>> has_own_rates(["scratch", "continued"]), has_own_rates(["scratch"])
    (True, False)
    """
    return any(one.own_rate and one.asked_by in baselines for one in CONTENDERS)
