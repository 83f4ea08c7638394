"""Parameters collected into groups of equal hyperparameters, which are rescaled as each parameter's rule says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mupscale.core import Entry, decay_change
from mupscale.optim.optimizer_traits import Hyper, Traits
from mupscale.system import MupscaleError, warn

FROM_GROUP = "from_group"
"""Key of a widened group that says which of the narrow optimizer's groups it comes from."""

RATE_CHANGE = "lr_change"
"""Key of a widened group whose learning rate was replaced: by what it was multiplied beside its rule."""

NORM_FACTOR = "norm_factor"
"""Key of a group that says with which weight the squares of its gradients enter a norm that no width changes.

Whatever optimizer it is, no group has parameters of different weights: it is what SGD's learning rate is multiplied by,
and the ratio of Adam's factors for rate and eps."""

DECAY_RULE = "decay_rule"
"""Key of a group whose decay follows the width otherwise than copies need: the rule's name, by which it grows on."""

DECAY_CHANGE = "weight_decay_change"
"""Key of such a group: by what its decay differs so far from the one with which copies are exact."""

FOLLOW_LR = ("initial_lr", "max_lr", "min_lr", "swa_lr")
"""Keys of a group that torch's schedulers leave there: learning rates, too."""


def scale(value: Any, factor: Any) -> Any:
    """A hyperparameter times its factor, never in place; tuples entry by entry, None stays None.

    >>> scale(0.5, 4.0), scale((0.9, 0.5), (1.0, 4.0)), scale(None, 4.0)
    (2.0, (0.9, 2.0), None)
    """
    if value is None:
        return None
    if isinstance(value, tuple | list):
        factors = factor if isinstance(factor, tuple) else (factor,) * len(value)
        return type(value)(scale(v, f) for v, f in zip(value, factors, strict=True))
    if isinstance(value, Tensor):
        return value.detach().clone() * factor if factor != 1 else value.detach().clone()
    return value if factor == 1 else value * factor


class GroupBuilder:
    """Collects parameters into groups with equal hyperparameters."""

    _FACTORS = ("lr", "weight_decay", "eps")  # whose factors a group shows

    def __init__(self, traits: Traits, embeddings: Mapping[str, float] | None = None) -> None:
        """embeddings: by name, factors of rates that no rule knows."""
        self.traits, self.rates = traits, embeddings or {}
        self.by_key: dict[Any, dict[str, Any]] = {}
        self.changes: dict[tuple[str, float], list[str]] = {}

    def add(self, name: str, p: nn.Parameter, entry: Entry, shown: Hyper, complete: Hyper) -> None:
        """Put the parameter into its group.

        shown: the hyperparameters that the group states. complete: these and the optimizer's defaults, which may decide
        how they scale.
        """
        self._check(name, entry, complete)
        complete = self.traits.implicit(complete, p)
        factors = {n: factor(entry, complete) for n, factor in self.traits.hyper.items() if n in complete}
        total = {}
        if shown.get(DECAY_RULE) and "weight_decay" in factors:
            change = change_of_decay(name, entry, complete, self.traits)
            if complete.get("weight_decay"):
                self.changes.setdefault((complete[DECAY_RULE], change), []).append(name)
            factors["weight_decay"] = factors["weight_decay"] * change
            total[DECAY_CHANGE] = shown.get(DECAY_CHANGE, 1.0) * change
        if name in self.rates:
            factors["lr"] = factors["lr"] * self.rates[name]
        follow = {n: factors["lr"] for n in FOLLOW_LR if n in shown}
        shown_factors = {NORM_FACTOR, DECAY_CHANGE, *(f"{n}_factor" for n in self._FACTORS)}
        before = {n: v for n, v in shown.items() if n not in shown_factors}
        if "eps" in before:
            before["eps"] = complete["eps"]
        values = tuple((n, v if _is_hashable(v) else id(v)) for n, v in sorted(before.items()))
        earlier = {n: shown.get(f"{n}_factor", 1.0) for n in self._FACTORS if n in factors}
        total |= {f"{n}_factor": scale(factors[n], factor) for n, factor in earlier.items()}
        total[NORM_FACTOR] = shown.get(NORM_FACTOR, 1.0) * entry.rule.norm(2.0)
        key = (values, tuple(sorted(factors.items())), tuple(total.items()))
        if key not in self.by_key:
            scaled = {n: scale(v, {**factors, **follow}.get(n, 1.0)) for n, v in before.items()}
            self.by_key[key] = {"params": [], **scaled, **total}
        self.by_key[key]["params"].append((name, p))

    def _check(self, name: str, entry: Entry, complete: Hyper) -> None:
        """Refuse a parameter that this optimizer cannot train at another width as it does at this one."""
        if self.traits.matrices_only and len(entry.narrow) != 2:
            raise MupscaleError(
                f"Muon is for matrices, and '{name}' has shape {entry.wide}; give it a different optimizer (groups=), "
                "or use mupscale.optim.MuonAdamW, which uses AdamW for the rest"
            )
        if entry.shift and complete.get("weight_decay"):
            raise MupscaleError(
                f"'{name}' is stored without the {entry.offset} that the model adds to it, so weight decay pulls it to "
                "different values in the two models. Give it a group with weight_decay=0 (groups=; "
                "mupscale.hf.decay_groups makes such groups of a Hugging Face model)"
            )
        if entry.shift and self.traits.by_size:
            raise MupscaleError(
                f"'{name}' is stored without the {entry.offset} that the model adds to it, and this optimizer's step "
                "depends on the size of the stored values, which differs in the wide model. Use AdamW"
            )

    def warn_of_inexact_decay(self) -> None:
        """Where copies of what was added do not go on exactly, since its decay follows another rule."""
        if told := inexact_in_words(self.changes):
            warn(told)

    def groups(self) -> list[dict[str, Any]]:
        """The groups, in the order in which their first parameters were added."""
        return list(self.by_key.values())


def change_of_decay(name: str, entry: Entry, hyper: Hyper, traits: Traits) -> float:
    """By what a decay differs from the one with which copies are exact, as the rule among the hyperparameters says."""
    if not traits.decoupled(hyper):
        if not hyper.get("weight_decay"):
            return 1.0
        raise MupscaleError(
            f"decay={hyper[DECAY_RULE]} is a rule for decoupled weight decay, and this optimizer adds the decay of "
            f"'{name}' to its gradient. Use AdamW, or decay=invariant"
        )
    constants = entry.constants
    in_width = entry.with_constants(fold=constants.fold / constants.residual, depth=1)
    return decay_change(hyper[DECAY_RULE], float(traits.hyper["lr"](in_width, hyper)), entry.rule.in_)


def inexact_in_words(changes: Mapping[tuple[str, float], Sequence[str]]) -> str:
    """What rules for weight decay do to copies; changes: the names of parameters, by rule and by what decay changes."""
    told = [
        f"{change:.4g} times what that needs for '{names[0]}'" + f" and {len(names) - 1} more" * (len(names) > 1)
        for (_, change), names in changes.items()
        if not math.isclose(change, 1.0)
    ]
    rules = "/".join(dict.fromkeys(rule for rule, _ in changes))
    needs = f"with decay={rules} copies do not go on exactly as the narrow model: weight decay is {', '.join(told)}"
    return f"{needs}. For exact copies use decay=invariant" if told else ""


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return not isinstance(value, Tensor)
