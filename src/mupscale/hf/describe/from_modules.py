"""Architectures that nobody described: config fields by their usual names, and the core's plan of two sketches.

Such a plan is a proposal. It counts only when the widened model has been verified, over training steps, too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mupscale.core import Axis, Entry, Plan, Role, Shape, naming
from mupscale.growth import Copies, Fresh, without_gains
from mupscale.hf.describe import memory
from mupscale.hf.describe.architecture import Config
from mupscale.hf.describe.batches import make_batches
from mupscale.hf.describe.building import build_model, built_in_float64, sketch_model
from mupscale.hf.describe.config_family import roles_from_miniatures
from mupscale.hf.describe.config_fields import parts_of, sizes_of, wide_config
from mupscale.hf.describe.file_names import InModel, names_in_model
from mupscale.hf.describe.multipliers import Times, grown
from mupscale.hf.describe.planned import Evidence, PlannedArchitecture
from mupscale.planning import How, build_plan, with_initial_of
from mupscale.planning import plan as plan_of_models
from mupscale.system import MupscaleError, UncheckedPlan, not_advising, warn

_FEW = 1 << 24  # numbers in a model that is built to be run
_MOST = 64  # GB of float32 would take minutes to initialise


class FromModules(PlannedArchitecture):
    """Plans made by running a narrow and a wide model, or of their modules; the wide model has to be verified."""

    described = False
    origin = "not described"
    evidence = Evidence(required=True, training_steps=5, dtypes=("float64", "float32"))

    def origin_of(self, plan: Plan) -> str:
        """Whether models could be run."""
        small = "miniatures of it" if plan.tried_by == "small members" else "a small and a wide model"
        how = f"planned by running {small}" if plan.checked else "read off its modules"
        return f"{self.origin}: {how}, to be verified"

    def wide_config(self, config: Config, times: Times) -> dict[str, Any]:
        """By the usual names of fields."""
        return wide_config(config, times)

    def sizes(self, config: Config) -> dict[str, Any]:
        """Every field with a usual name."""
        return sizes_of(config)

    def parts(self, config: Config) -> dict[str, int]:
        """By the first field with a usual name; where there are more, they grow in proportion."""
        return parts_of(config)

    def how_to_tell_the_initialisation(self, config: Config) -> str:
        """It is measured."""
        return (
            f"a freshly built '{self.model_type}' model would show it, but there is too little memory. Use a larger "
            "machine, or describe the architecture (mupscale.hf.register)"
        )

    def obstacles(self, config: Config, times: Times) -> list[str]:
        """Norms without gains over what grows; a comparison tells the rest."""
        wide = wide_config(config, times)
        widths = {n for name, n in sizes_of(config).items() if isinstance(n, int) and wide.get(name) != n}
        return without_gains(naming.modules(sketch_model(config)), widths)

    def is_tied(self, config: Config) -> None:
        """Only the model itself can tell."""

    def wires_of(self, name: str, dimensions: int) -> dict[int, str]:
        """Wires have no names here."""
        return {}

    def plan_to_record(self, config: Config, times: Times, *, fresh: bool) -> Plan:
        """Another version of transformers may have other modules, so the plan is kept."""
        return plan_by_modules(config, times, fresh=fresh)

    def plan_files(
        self,
        config: Config,
        times: Times,
        shapes: Mapping[str, Shape],
        *,
        recorded: Plan | None = None,
        fresh: bool = True,
    ) -> Plan:
        """The model's plan by the names in the files."""
        by_model = plan_by_modules(config, times, fresh=fresh) if recorded is None else recorded
        return plan_for_files(config, by_model, shapes)

    def plan_parameters(self, config: Config, times: Times, shapes: Mapping[str, Shape], *, fresh: bool = True) -> Plan:
        """By the modules of the model that the config names."""
        return plan_by_modules(config, times, fresh=fresh)

    def plan_unchanged(self, config: Config, shapes: Mapping[str, Shape], *, means: bool) -> Plan:
        """As measured on models that are built for it."""
        model = sketch_model(config)
        own = {name: tuple(p.shape) for name, p in naming.parameters(model).items()}
        groups = naming.aliases(model.named_parameters(remove_duplicate=False))
        return _with_initial(Plan({n[0]: Entry(own[n[0]], own[n[0]], names=n) for n in groups}), config)

    def plan_wide_parameters(self, config: Config, times: Times, shapes: Mapping[str, Shape]) -> Plan:
        """Of layers alone; a growth in width without a plan on record was by a description, which is absent now."""
        if times == Times():
            return plan_by_modules(config, times, fresh=False)
        raise MupscaleError(
            f"the model was upscaled by a description of '{config.get('model_type')}' that is not known here. Register "
            "it again first"
        )

    def check_unverified(self) -> None:
        """Only a comparison shows that the plan is right."""
        raise MupscaleError(
            f"'{self.model_type}' is not described, so only verification shows whether it was widened correctly. Let "
            "it verify, or describe the architecture (mupscale.hf.register)"
        )

    def check_too_large_to_train(self, needed: str) -> None:
        """Only training shows that the plan is right."""
        raise MupscaleError(
            f"'{self.model_type}' is not described, so both models must be compared in training. That needs {needed} "
            "of memory. Use a larger machine, or describe the architecture (mupscale.hf.register)"
        )

    def check_without_record(self, folder: Path) -> None:
        """The usual fields may not be all that grew."""
        raise MupscaleError(
            f"there is no mupscale.json in {folder}, and '{self.model_type}' is not described, so it is unknown how "
            "the wide checkpoint grew. Copy the file that mupscale upscale wrote into the folder"
        )

    def check_constant_outputs(self, folder: Path) -> None:
        """They would be equal with a wrong plan, too."""
        raise MupscaleError(
            f"the outputs of {folder} are all alike, so comparing them shows nothing, and '{self.model_type}' is not "
            "described. Use a trained checkpoint"
        )

    def advice(self) -> str:
        """Describe it."""
        return how_to_describe(self.model_type)


@not_advising("roles", "register", "inputs", "no_inputs")  # which no function or command for checkpoints takes
def plan_by_modules(config: Config, times: Times, *, fresh: bool = True) -> Plan:
    """The plan by the model's own names.

    fresh: measure the initial stds, which only noise needs, on narrow models built for it where memory allows.
    """
    try:
        small, large = sketch_model(config), sketch_model(wide_config(config, times))
        how = _how(times)
        if sum(p.numel() for p in large.parameters()) <= _FEW and (ran := _plan_by_running(config, times)):
            return _with_initial(ran, config) if fresh else ran
        roles = _learnt_roles(config, times)
        size = 4 * sum(p.numel() for p in small.parameters())
        fits = memory.fits((2 if how == "copies" else 3) * size) and size <= _MOST << 30
        if not fresh or not fits:
            return _plan_of_sketches(small, large, roles, how)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = small if how == "copies" else build_model(config)  # what its norms do shows when they are called
            widening = _plan_of_sketches(small, large, roles, how)
            return with_initial_of(widening, lambda: build_model(config))
    except MupscaleError as error:
        advice = how_to_describe(config.get("model_type"))
        raise MupscaleError(f"{str(error).rstrip('.')}. {advice}") from None


def _learnt_roles(config: Config, times: Times) -> dict[str, Role]:
    """What miniatures of the model show; nothing where none can be built or run, and the modules have to be asked."""
    with suppress(MupscaleError):
        return roles_from_miniatures(config, times)
    return {}


def _plan_of_sketches(small: nn.Module, large: nn.Module, roles: Mapping[str, Role], how: How) -> Plan:
    planned = build_plan(small, large, roles=roles, how=how, assume=True)
    return replace(planned, checked=bool(roles), tried_by="small members")


def _how(times: Times) -> How:
    return "fresh" if times.takes_any_ratio else "copies"


def _with_initial(widening: Plan, config: Config) -> Plan:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return with_initial_of(widening, lambda: build_model(config))


def _plan_by_running(config: Config, times: Times) -> Plan | None:
    """The plan that a run of both models shows; None where it shows none, and the modules have to be asked."""
    operator = Fresh() if _how(times) == "fresh" else Copies()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            with built_in_float64():
                small, large = build_model(config), build_model(wide_config(config, times))
            batch = make_batches(small, size=8)[0]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UncheckedPlan)
                plan = plan_of_models(small, large, inputs=batch, grow=operator)
        except MupscaleError:
            return None
    for one in caught:
        if issubclass(one.category, UncheckedPlan):  # no batch can be passed here
            fact = str(one.message).partition(". Pass inputs=")[0]
            warn(f"{fact}. {how_to_describe(config.get('model_type'))}", UncheckedPlan)
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return plan


def how_to_describe(model_type: object) -> str:
    """What to do about an architecture that its modules alone do not explain."""
    return (
        f"The architecture '{model_type}' is not described, so the plan comes from its modules. A description "
        "(mupscale.hf.register) gives what they do not show: see 'Adding an architecture' in docs/huggingface.md"
    )


def plan_for_files(config: Config, plan: Plan, shapes: Mapping[str, Shape]) -> Plan:
    """The plan by the names in the files, which transformers may load under others, or stack (one tensor per expert).

    shapes: of the narrow checkpoint's tensors.
    """
    model = sketch_model(config)
    names = names_in_model(model, shapes) or {name: InModel((name,)) for name in shapes}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    entries: dict[str, Entry] = {}
    fresh: dict[str, float] = {}
    whole: dict[str, str] = {}
    for name, shape in shapes.items():
        planned = plan.names.get(names[name].names[0])
        entry = None if planned is None else _entry_in_file(plan, names[name], shape)
        if planned is None and any(re.search(pattern, name) for pattern in ignored):  # masks of older versions
            entry = Entry(shape, shape)
        if entry is None:
            raise _cannot_tell(name, shape, names[name], config)
        if planned is not None and shape == plan[planned].narrow:
            first = whole.setdefault(planned, name)  # of tied ones, which draw the same noise
            if first != name:
                entries[first] = replace(entries[first], names=(*entries[first].names, name))
                continue
        entries[name] = replace(entry, names=(name,))
        fresh[name] = 0.0 if plan.fresh is None or planned is None else plan.fresh.get(planned, 0.0)
    by_model = {name: plan.names.get(first, first) for name in entries for first in names[name].names[:1]}
    starts = {**_initial_statistics(model), **(plan.means or {})}
    means = None if plan.means is None else {n: starts.get(by_model[n], (0.0,)) for n in entries}
    norms = {n: plan.norms[by_model[n]] for n in entries if by_model[n] in plan.norms}
    return Plan(entries, {}, None if plan.fresh is None else fresh, plan.mup, means, norms)


def _initial_statistics(model: nn.Module) -> dict[str, tuple[float, ...]]:
    """Buffers that start at 1: the running variance of a BatchNorm, which divides, and the gain of a frozen one."""
    ones = ("running_var", "weight")
    norms = {path: module for path, module in naming.modules(model).items() if hasattr(module, "running_var")}
    return {
        f"{path}.{n}": (1.0,)
        for path, module in norms.items()
        for n, _ in module.named_buffers(recurse=False)
        if n in ones
    }


def _cannot_tell(name: str, shape: Shape, held: InModel, config: Config) -> MupscaleError:
    if len(held.names) > 1:
        return MupscaleError(
            f"'{name}' of shape {shape} holds {len(held.names)} parameters of the model ('{held.names[0]}', …) in an "
            "order in which they cannot grow. Load the model with transformers, and save it with "
            "model.save_pretrained(folder, save_original_format=False)"
        )
    return MupscaleError(
        f"'{name}' of shape {shape} is neither a parameter of the model that config.json names, nor a part of one that "
        f"can be widened alone. {how_to_describe(config.get('model_type'))}"
    )


def _entry_in_file(plan: Plan, held: InModel, shape: Shape) -> Entry | None:
    """The entry of a tensor in a file: of one parameter, of a part of it, or of several in a row."""
    if len(held.names) == 1:
        return _entry_of_part(plan[plan.names[held.names[0]]], shape)
    if not held.in_a_row or any(name not in plan.names for name in held.names):
        return None
    entries = [plan[plan.names[name]] for name in held.names]
    first, growths = entries[0], [entry.axes.get(0, Axis()) for entry in entries]
    alike = {(e.narrow[1:], e.out, e.in_, e.fold, e.keep, e.offset, e.axes.get(1)) for e in entries}
    stds = [(plan.fresh or {}).get(plan.names[name], 0.0) for name in held.names]  # as measured, so of some spread
    whole = sum(entry.narrow[0] for entry in entries) == shape[0]
    if len(alike) > 1 or len({axis.times for axis in growths}) > 1 or max(stds) > 1.5 * min(stds) or not whole:
        return None
    parts = zip((entry.narrow[0] for entry in entries), growths, strict=True)
    sections = tuple(part for n, axis in parts for part in axis.sections or ((n, axis.block),))
    wide = (sum(entry.wide[0] for entry in entries), *first.wide[1:])
    joined = {0: Axis(growths[0].times, 1, sections)} if 0 in first.axes else {}
    return replace(first, narrow=shape, wide=wide, axes={**first.axes, **joined})


def _entry_of_part(entry: Entry, shape: Shape) -> Entry | None:
    """The entry of a tensor in a file: the parameter itself, or one of those that are stacked and joined in it."""
    if shape == entry.narrow:
        return entry
    ahead = len(entry.narrow) - len(shape)
    axes = {d - ahead: axis for d, axis in entry.axes.items()}
    in_blocks = any(axis.block != 1 or axis.sections for axis in axes.values())
    if ahead not in (0, 1) or in_blocks or any(d < 0 for d in axes):
        return None
    if any(n % part for n, part in zip(entry.narrow[ahead:], shape, strict=True)):
        return None
    wide = tuple(grown(n, axes[d].times) if d in axes else n for d, n in enumerate(shape))
    out, in_ = (tuple(d - ahead for d in side) for side in (entry.out, entry.in_))
    return replace(entry, narrow=shape, wide=wide, axes=axes, out=out, in_=in_)
