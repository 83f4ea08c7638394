"""A checkpoint is a family over its config: what becomes of its config, and the plan of its tensors, at every width."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from mupscale.core import Entry, Plan, Shape, naming
from mupscale.growth import obstacles, without_gains
from mupscale.hf.describe import memory
from mupscale.hf.describe.building import Config, build_model, sketch_model
from mupscale.hf.describe.config_fields import ffn_that_follows_hidden, parts_of, sizes_of, wide_config
from mupscale.hf.describe.file_names import class_with, names_beside, plan_for_files
from mupscale.hf.describe.given_roles import GIVEN
from mupscale.hf.describe.initial import initial_law
from mupscale.hf.describe.miniatures import NotRun, moves_outputs, plan_by_miniatures
from mupscale.hf.describe.multipliers import PartTimes, Times
from mupscale.planning import How, build_plan, with_initial, with_initial_of
from mupscale.system import MupscaleError, not_advising, setting

_MOST = 64  # GB of float32 would take minutes to initialise


class ConfigFamily:
    """The models of one config.json at every width. Plans are by names, and nothing of the model itself is built."""

    def __init__(self, config: Config) -> None:
        self.config, self.model_type = config, str(config.get("model_type"))

    def wide_config(self, times: Times) -> dict[str, Any]:
        """config.json of the wide model."""
        return wide_config(self.config, times)

    def sizes(self) -> dict[str, Any]:
        """Every size that can grow, and head_dim, by the names of their fields."""
        return sizes_of(self.config)

    def parts(self) -> dict[str, int]:
        """The sizes that can be asked for: hidden, ffn, heads and kv, as far as the config has them."""
        return parts_of(self.config)

    def is_tied(self) -> bool:
        """Whether the model has a readout that is its embedding."""
        model: Any = sketch_model(self.config)
        try:
            ours, theirs = model.get_input_embeddings(), model.get_output_embeddings()
        except (AttributeError, NotImplementedError):  # of a model without tokens
            return False
        return theirs is not None and getattr(theirs, "weight", 0) is getattr(ours, "weight", 1)

    def obstacles(self, times: Times, plan: Plan) -> list[str]:
        """Why a growth by this plan that is to keep the function cannot; empty where it can, or nothing is known."""
        wide = self.wide_config(times)
        widths = {n for name, n in self.sizes().items() if isinstance(n, int) and wide.get(name) != n}
        reasons = [*obstacles(nn.Module(), plan), *without_gains(naming.modules(sketch_model(self.config)), widths)]
        with suppress(MupscaleError):  # no miniature grows so, and a comparison may tell
            if not reasons and plan.norms and moves_outputs(self.config, times):
                reasons.append("a norm comes after a sum or at the embedding, where new units cannot be silent")
        return reasons

    @not_advising("roles", "register", "inputs", "no_inputs")  # which no function or command for checkpoints takes
    def plan(self, times: Times, *, initial: bool = True) -> Plan:
        """The plan by the model's own names. initial: with what new units start with, which copies do not need."""
        if times == Times():
            return self.plan_unchanged() if initial else self._unchanged()
        try:
            planned = plan_by_miniatures(self.config, times)
        except NotRun:  # the modules are asked, and the wide model has to be compared
            how: How = "fresh" if times.takes_any_ratio else "copies"
            small, large = sketch_model(self.config), sketch_model(self.wide_config(times))
            names = [name for name, _ in small.named_parameters(remove_duplicate=False)]
            given = GIVEN.get(self.model_type, {}).items()
            roles = {pattern: role for pattern, role in given if any(fnmatchcase(n, pattern) for n in names)}
            planned = build_plan(small, large, roles=roles, how=how)
        return self._with_initial(planned) if initial else planned

    def plan_unchanged(self) -> Plan:
        """A plan by which nothing grows, with what the model's parameters start with."""
        return self._with_initial(self._unchanged())

    def _unchanged(self) -> Plan:
        model = sketch_model(self.config)
        shapes = {name: tuple(p.shape) for name, p in naming.parameters(model).items()}
        groups = naming.aliases(model.named_parameters(remove_duplicate=False))
        return Plan({n[0]: Entry(shapes[n[0]], shapes[n[0]], names=n) for n in groups}, tried_by="copies")

    def _with_initial(self, planned: Plan) -> Plan:
        """By the law that miniatures show, or, where there are none, as a freshly built model has it."""
        try:
            stds, means = initial_law(self.config)
            return with_initial(planned, planned.parameters, stds, means)
        except NotRun:
            size = 4 * sum(p.numel() for p in sketch_model(self.config).parameters())
            if not memory.fits(2 * size) or size > _MOST << 30:
                return planned
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return with_initial_of(planned, lambda: build_model(self.config))

    def plan_files(
        self, times: Times, shapes: Mapping[str, Shape], *, recorded: Plan | None = None, initial: bool = True
    ) -> Plan:
        """The plan for the tensors of the files, which have these narrow shapes. recorded: by the model's names."""
        by_model = self.plan(times, initial=initial) if recorded is None else recorded
        now, then = (
            self.parts(),
            family_of_config(self.wide_config(times)).parts() if times != Times() else self.parts(),
        )
        sizes = {size: then[part] for part, size in reversed(now.items())}
        strangers = names_beside(self.config, by_model, shapes)
        if strangers and (other := class_with(self.config, strangers)):
            beside = ConfigFamily({**self.config, "architectures": [other]}).plan(times, initial=initial)
            by_model = _joined(by_model, beside, strangers)
        return plan_for_files(self.config, by_model, shapes, sizes)

    def check_grown(self, plan: Plan, times: Times) -> None:
        """An error where nothing grows, or only a part, since other sizes follow from one that does."""
        growing = sum(entry.narrow != entry.wide for entry in plan.parameters.values())
        if growing == 0 and times != Times():
            raise MupscaleError(
                f"nothing of '{self.model_type}' would grow: the sizes in its config have other names than usual"
            )
        whole = times.hidden != 1 and not isinstance(times, PartTimes)
        if not whole or 2 * growing >= len(plan.parameters):
            return
        few = f"only {growing} of {len(plan.parameters)} tensors of '{self.model_type}' would grow"
        if times.ffn == 1 and (size := ffn_that_follows_hidden(self.config, times)) is not None:
            raise MupscaleError(
                f"{few}, since its config makes the size of its feed-forward layers of the hidden size: let ffn grow "
                f"as hidden does, {times.hidden} times ({setting('ffn', size)})"
            )
        if not plan.checked:
            raise MupscaleError(f"{few}: the other sizes in its config have other names than usual")

    def origin_of(self, plan: Plan) -> str:
        """Where a plan comes from, in words."""
        return "planned by running miniatures of it" if plan.checked else "read off its modules, to be verified"


def _joined(plan: Plan, beside: Plan, names: Collection[str]) -> Plan:
    """The plan, and of another these tensors, which the first model lacks."""
    more = {beside.names[name] for name in names if name in beside.names}
    initial = {**plan.initial, **{name: one for name, one in beside.initial.items() if name in more}}
    return replace(plan, parameters={**plan.parameters, **{name: beside[name] for name in more}}, initial=initial)


def family_of_config(config: Config) -> ConfigFamily:
    """The family of a config.json."""
    return ConfigFamily(config)
