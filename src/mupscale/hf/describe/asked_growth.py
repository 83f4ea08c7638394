"""What is asked of an upscaling, settled before anything is read: by which operator, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mupscale.core import Plan
from mupscale.growth import Fresh, Noise, Operator, choose_operator, is_replica
from mupscale.hf.describe.building import Config
from mupscale.hf.describe.config_fields import part_names, parts_of
from mupscale.hf.describe.multipliers import PartTimes, Ratios, Times
from mupscale.hf.describe.sizes import check_groups, sizes_by_part, times_to_parts
from mupscale.system import MupscaleError, as_asked, setting

Size = int | str | Mapping[str, int]
"""Of the wide model; of a model of several parts, by their names, as in {"text": 1024} or "text=1024,vision=768"."""

Sizes = Mapping[str, Size | None]
"""By hidden, ffn, heads and kv; None for what is not asked for."""


@dataclass(frozen=True)
class AskedGrowth:
    """By how much a model grows, and how."""

    times: Times
    operator: Operator

    @property
    def fresh(self) -> Fresh | None:
        """How it grows by fresh units; None if it does not."""
        return self.operator if isinstance(self.operator, Fresh) else None

    @property
    def is_replica(self) -> bool:
        """Whether the wide model would be copies without noise."""
        return self.times != Times() and is_replica(self.operator)

    @property
    def needs_initial(self) -> bool:
        """Whether anything is drawn, for which initial values have to be known."""
        return not is_replica(self.operator)


def settle_growth(
    config: Config,
    *,
    times: int | str | Mapping[str, int] | Times | None = None,
    sizes: Sizes | None = None,
    grow: Operator | None = None,
    noise: Noise | None = None,
    exact: bool = False,
) -> AskedGrowth:
    """The growth that is meant by multipliers or sizes, an operator or noise; twice as wide if nothing is said.

    exact: by copies without noise.
    """
    operator, wanted = choose_operator(grow, noise, exact=exact), sizes_by_part(sizes or {})
    if wanted and times is not None:
        raise MupscaleError("give either how much it grows (times) or its new sizes (hidden, ffn, heads, kv)")
    by_how_much = Times.of(2 if times is None else times, part_names(config))
    if isinstance(by_how_much, PartTimes) and not part_names(config):
        raise MupscaleError(
            f"{setting('times', str(by_how_much))}: a {config.get('model_type')} model has no parts; hidden, ffn, "
            f"heads and kv grow"
        )
    if wanted:
        by_how_much = times_to_parts(wanted, parts_of(config), fresh=not operator.needs_multiples)
    elif not operator.needs_multiples:
        by_how_much = check_groups(by_how_much.as_ratios(), parts_of(config))
    elif isinstance(by_how_much, Ratios):
        by_how_much = Times(**asdict(by_how_much))
    return AskedGrowth(by_how_much, operator)


def check_drawn(plan: Plan, operator: Operator) -> None:
    """Refuse a plan by which new units cannot be drawn, and what the operator itself refuses."""
    if not operator.needs_multiples and plan.fresh is None:
        copies = as_asked("grow=mupscale.Copies(noise=1.0)", "--how copies --noise 1")
        raise MupscaleError(
            f"the initialisation that fresh units are drawn from is unknown: a freshly built model shows it, but "
            f"memory is too small for one. Use a larger machine, or copy units ({copies})"
        )
    operator.check(plan)
