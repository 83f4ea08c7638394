"""A model that grew by fresh units: what moves its outputs, and that nothing else does.

New units change what a model computes unless the growth was lossless, and even then the eps of a norm leaves a trace.
That config and plan are right shows when new units are silenced, in memory, and each norm's eps goes with its width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from mupscale.core import Plan
from mupscale.growth import Fresh, upscale_untried
from mupscale.hf.verification.relation import Relation

_EPS = ("eps", "variance_epsilon", "layer_norm_eps")


@dataclass(frozen=True)
class FreshGrowth:
    """What is known of such a growth between a small and a wide model; `plan` is theirs."""

    relation: Relation
    fresh: Fresh
    plan: Plan

    @cached_property
    def obstacles(self) -> list[str]:
        """Why the function cannot be kept by any new units; empty where it can."""
        if len(self.relation.growths) > 1 and self.relation.deepened_after_fresh is None:
            return ["it grew several times"]
        growth = self.relation.growths[0]
        return self.relation.family.obstacles(growth.times, self.plan)

    @property
    def _why(self) -> str:
        more = f" (and {len(self.obstacles) - 1} more)" if len(self.obstacles) > 1 else ""
        return f"{self.obstacles[0]}{more}"

    @property
    def same_as_they_are(self) -> bool:
        """Whether the outputs are the same without further ado: no norm reads the new units, and they are silent."""
        silent = self.fresh.lossless or self.fresh.outgoing == 0
        return silent and not self.plan.norms and not self.obstacles

    @property
    def note(self) -> str:
        """What moves the outputs."""
        if self.same_as_they_are:
            return ""
        eps = self.fresh.lossless and not self.obstacles
        return "moved by the norms' eps" if eps else "moved by the new units"

    @property
    def condition(self) -> str:
        """Under which the outputs must be the same; empty where there is none."""
        if self.obstacles or self.same_as_they_are:
            return ""
        return ", eps scaled" if self.fresh.lossless else ", new units silent"

    def silence(self, small: nn.Module, wide: nn.Module) -> None:
        """Make the wide model compute what the small one does, as far as its config and plan are right."""
        if not self.fresh.lossless:
            upscale_untried(small, wide, self.plan, grow=Fresh(lossless=True))  # the outputs are compared next
        scale_eps(wide, self.plan)

    def as_recorded(self, what: str, moved: float) -> str:
        """In words."""
        gains = " (times √(n/N) for the norms, see inspect)" if self.fresh.lossless and self.plan.norms else ""
        kept = f"the old weights are unchanged to the bit{gains}, the new units as drawn at μP's scale"
        if self.same_as_they_are:
            return f"{kept}; {what} are the same ({moved:.1e})"
        if not self.fresh.lossless:
            return f"{kept}; they move {what} by {moved:.1%}"
        if self.obstacles:
            return f"{kept}; it is not lossless, since {self._why}: {what} move by {moved:.1%}"
        return f"{kept}, lossless: {what} move by {moved:.1e}, through the norms' eps"

    def notes(self, train: int, *, same: bool) -> list[str]:
        """What was not compared, and what may be wrong where the outputs should be the `same` and are not."""
        said = []
        if not same:
            said.append(
                "New units change the function even when they are switched off. Causes are norms after the residual "
                "sum, norms that were not recognised, or constants that depend on the width. Keep hidden as it is."
            )
        if any(name.endswith("running_var") for name in self.relation.small.shapes):
            fresh = "New channels of BatchNorm have the running mean 0 and variance 1 of a fresh one"
            until = ": outputs mean little until it has trained on, or mupscale.measure_statistics has run batches"
            said.append(f"{fresh}{'' if same and self.fresh.lossless else until}.")
        if self.obstacles and not self.fresh.lossless:
            said.append(f"Not compared with the new units switched off: {self._why}.")
        if self.relation.deepened_after_fresh is not None:
            said.append("New layers write nothing into the residual stream yet, so they change nothing at first.")
        if train:
            said.append("Training is not compared: new units learn what the small model cannot.")
        return said


def scale_eps(wide: nn.Module, plan: Plan) -> None:
    """Multiply the eps of each norm that has grown by n/N, as lossless growth divides what it is added to."""
    for name, kind in plan.norms.items():
        if kind == "bias":
            continue
        entry, module = plan.parameters[name], wide.get_submodule(name.rpartition(".")[0])
        for attribute in _EPS:
            if isinstance(eps := getattr(module, attribute, None), float):
                setattr(module, attribute, eps * entry.narrow[0] / entry.wide[0])
