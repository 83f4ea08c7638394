"""A checkpoint is a family over its config: what becomes of its config, and the plan of its tensors, at every width.

A plan is by the model's own names, and by those in files: a tensor there may be a parameter under another name, a part
of one, or several in a row. What a run of a model cannot show a user may say.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from mupscale.core import Axis, Constants, Entry, Initial, Plan, Role, Shape, naming
from mupscale.growth import obstacles, without_gains
from mupscale.hf.building import Config, sketch_model
from mupscale.hf.config_fields import (
    FIELDS,
    HEAD_DIM,
    Times,
    ffn_that_follows_hidden,
    grown,
    parts_of,
    sizes_of,
    wide_config,
)
from mupscale.hf.miniatures import LAYER, LAYERS, initial_laws, moves_outputs, plan_by_miniatures
from mupscale.planning import with_laws
from mupscale.system import MupscaleError, checks_arguments, not_advising, setting, show_short

GIVEN: dict[str, dict[str, Role]] = {}
"""By model_type, and by name pattern."""


@checks_arguments
def register(model_type: str, roles: Mapping[str, Role]) -> None:
    """Say what tensors of an architecture are, by name pattern, where no run of it can show that.

    Those are tensors that the files hold and the model of transformers lacks. Patterns given here go before those that
    were given earlier.

    >>> from mupscale import Role
    >>> register("llama", {"probe.weight": Role(in_=1)})  # it reads hidden units
    >>> GIVEN.pop("llama")["probe.weight"].in_
    (1,)
    """
    GIVEN[model_type] = {**roles, **{p: r for p, r in GIVEN.get(model_type, {}).items() if p not in roles}}


def entry_given(model_type: str, name: str, shape: Shape, grown: Mapping[int, int]) -> Entry | None:
    """The entry of a tensor in a file by the role that was given for it, if one was; grown: what sizes become."""
    role = next((role for p, role in GIVEN.get(model_type, {}).items() if fnmatchcase(name, p)), None)
    if role is None:
        return None
    out, in_ = role.dims(len(shape))
    if unknown := [shape[d] for d in (*out, *in_) if shape[d] not in grown]:
        raise MupscaleError(
            f"'{name}' has shape {shape}, and {unknown[0]} is not a size of the model that grows: correct the role "
            f"that was given for it (mupscale.hf.register)"
        )
    blocks = {d: (role.out_axis if d in out else role.in_axis).block for d in (*out, *in_)}
    times = {d: grown[shape[d]] // shape[d] for d in sorted(blocks)}
    axes = {d: Axis(k, blocks[d], side="out" if d in out else "in") for d, k in times.items()}
    wide = tuple(grown[n] if d in axes else n for d, n in enumerate(shape))
    return Entry(shape, wide, axes, Constants(offset=role.offset), (name,))


_OLD = r"(^|\.)(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$"  # that older versions saved


@dataclass(frozen=True)
class InModel:
    """The parameters that a tensor in a file is made into.

    in_a_row: whether, of several, each is a part of the tensor along its first dimension, in this order.
    """

    names: tuple[str, ...]
    in_a_row: bool = True


def names_in_model(model: nn.Module, names: Collection[str]) -> dict[str, InModel]:
    """By transformers' own table of what is called otherwise in files, or split."""
    try:
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading

        table = conversion_mapping.get_model_conversion_mapping(model)
        renamed = [change for change in table if isinstance(change, loading.WeightRenaming)]
        converted = [change for change in table if isinstance(change, loading.WeightConverter)]
        prefix, own = getattr(model, "base_model_prefix", None), model.state_dict()
        found = {n: loading.rename_source_key(n, renamed, converted, prefix, own) for n in names}
        held = {name: InModel((first,)) for name, (first, _) in found.items()}
        for change in (change for change in reversed(converted) if len(change.target_patterns) > 1):
            plain = [type(each).__name__ in ("Chunk", "Split") and each.dim == 0 for each in change.operations]
            for name, (first, pattern) in found.items():  # the first of several that the tensor is split into
                if pattern in change.source_patterns:
                    parts = (first.replace(change.target_patterns[0], each, 1) for each in change.target_patterns)
                    held[name] = InModel(tuple(parts), plain == [True])
        return held
    except (ImportError, AttributeError, TypeError):  # another version of transformers
        return {name: InModel((name,)) for name in names}


def names_in_files(model: nn.Module) -> dict[str, str]:
    """By tensor of the model, what transformers calls it in files, where it is a tensor of its own there."""
    try:
        from transformers.core_model_loading import revert_weight_conversion

        held = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}  # names alone are asked for
        written = revert_weight_conversion(model, dict(held))
    except (ImportError, AttributeError, TypeError):  # another version of transformers
        return {}
    names = {id(tensor): name for name, tensor in held.items()}
    return {names[id(tensor)]: name for name, tensor in written.items() if id(tensor) in names}


def plan_for_files(
    config: Config, plan: Plan, shapes: Mapping[str, Shape], grown_sizes: Mapping[int, int] | None = None
) -> Plan:
    """The plan by the names in the files, which transformers may load under others, or stack (one tensor per expert).

    shapes: of the narrow checkpoint's tensors. grown_sizes: what sizes of the model become, for tensors that it lacks.
    """
    model = sketch_model(config)
    names = names_in_model(model, shapes)
    ignored = _ignored(model)
    entries: dict[str, Entry] = {}
    whole: dict[str, str] = {}
    for name, shape in shapes.items():
        planned = plan.names.get(names[name].names[0])
        entry = None if planned is None else _entry_in_file(plan, names[name], shape)
        if planned is None and ignored(name):
            entry = Entry(shape, shape)
        if planned is None and entry is None:
            entry = entry_given(str(config.get("model_type")), name, shape, grown_sizes or {})
        if entry is None:
            raise _cannot_tell(model, name, shape, names[name], None if planned is None else plan[planned].narrow)
        if planned is not None and shape == plan[planned].narrow:
            first = whole.setdefault(planned, name)  # of tied ones, which draw the same noise
            if first != name:
                entries[first] = replace(entries[first], names=(*entries[first].names, name))
                continue
        entries[name] = replace(entry, names=(name,))
    by_model = {name: plan.names.get(first, first) for name in entries for first in names[name].names[:1]}
    initial, buffers = dict[str, Initial](), {name for name, _ in model.named_buffers()}
    norms = {path for path, module in naming.modules(model).items() if hasattr(module, "running_var")}
    for name, entry in entries.items():
        own, (path, _, local) = plan.initial.get(by_model[name], Initial()), by_model[name].rpartition(".")
        if plan.fresh is not None:
            means = own.means
            if means is None and by_model[name] in buffers and path not in norms:
                means = ()  # the model computes it, as decays of heads: nothing is drawn
            elif means is None:
                # a BatchNorm's running variance divides, and a frozen one's gain is a buffer, too
                is_one = by_model[name] in buffers and local in ("running_var", "weight")
                means = (float(is_one),)
            own = replace(own, std=own.std or 0.0, means=means)
        if own.past_norms:  # a tensor may be a part of a parameter that has one dimension more
            ahead = len(plan[by_model[name]].narrow) - len(entry.narrow)
            own = replace(own, past_norms=tuple(d - ahead for d in own.past_norms if d >= ahead))
        initial[name] = own
    return Plan(entries, {}, initial, plan.mup, plan.tried_by)


def _names_beside(config: Config, plan: Plan, shapes: Mapping[str, Shape]) -> list[str]:
    """Names in files of which the plan of the model tells nothing, nor anybody else."""
    names, ignored = names_in_model(sketch_model(config), shapes), _ignored(sketch_model(config))
    beside = [name for name in shapes if plan.names.keys().isdisjoint(names[name].names) and not ignored(name)]
    given = GIVEN.get(str(config.get("model_type")), {})
    return [name for name in beside if not any(fnmatchcase(name, pattern) for pattern in given)]


def _ignored(model: nn.Module, kind: str = "unexpected") -> Callable[[str], bool]:
    """Whether it does not matter that a tensor is in the files, or is missing there."""
    patterns = [*(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())]
    patterns += [_OLD] if kind == "unexpected" else []
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _class_with(config: Config, names: Collection[str]) -> str | None:
    """Another class of the model's kind that has these parameters, as one with all heads; None where there is none."""
    module = importlib.import_module(type(sketch_model(config)).__module__)
    classes = {name: one for name, one in vars(module).items() if isinstance(one, type)}
    for name in sorted(name for name, one in classes.items() if one.__module__ == module.__name__):
        with suppress(MupscaleError, TypeError):
            made = sketch_model({**config, "architectures": [name]})
            if {*names} <= {n for n, _ in made.named_parameters(remove_duplicate=False)}:
                return name
    return None


def _cannot_tell(model: nn.Module, name: str, shape: Shape, held: InModel, expected: Shape | None) -> MupscaleError:
    if len(held.names) > 1:
        return MupscaleError(
            f"'{name}' of shape {shape} holds {len(held.names)} parameters of the model ('{held.names[0]}', …) in an "
            f"order in which they cannot grow: load the model with transformers, and save it under its own names with "
            f"model.save_pretrained(folder, save_original_format=False)"
        )
    if expected is not None and len(expected) == len(shape):
        return MupscaleError(
            f"'{name}' has shape {shape}, and {expected} by the config: the checkpoint and its config.json do not "
            f"belong together"
        )
    own, layer = filter(None, map(LAYER.fullmatch, naming.parameters(model))), LAYER.fullmatch(held.names[0])
    there = {each["number"] for each in own if layer and each["list"] == layer["list"]}
    if layer and there and layer["number"] not in there:
        return MupscaleError(
            f"'{name}' is in the files, and by config.json '{layer['list']}' has {len(there)} layers: the files and "
            f"config.json do not belong together"
        )
    return MupscaleError(
        f"'{name}' of shape {shape} is not a parameter of the model that config.json names, nor a part of one "
        f"that could be widened alone: say what it is with mupscale.hf.register, or leave it out of the files"
    )


def _entry_in_file(plan: Plan, held: InModel, shape: Shape) -> Entry | None:
    """The entry of a tensor in a file: of one parameter, of a part of it, or of several in a row."""
    if len(held.names) == 1:
        return _entry_of_part(plan[plan.names[held.names[0]]], shape)
    if not held.in_a_row or any(name not in plan.names for name in held.names):
        return None
    entries = [plan[plan.names[name]] for name in held.names]
    first, growths = entries[0], [entry.axes.get(0, Axis()) for entry in entries]
    alike = {(e.narrow[1:], e.out, e.in_, e.constants, e.axes.get(1)) for e in entries}
    stds = [(plan.fresh or {}).get(plan.names[name], 0.0) for name in held.names]  # as measured, so of some spread
    whole = sum(entry.narrow[0] for entry in entries) == shape[0]
    if len(alike) > 1 or len({axis.times for axis in growths}) > 1 or max(stds) > 1.5 * min(stds) or not whole:
        return None
    parts = zip((entry.narrow[0] for entry in entries), growths, strict=True)
    sections = tuple(part for n, axis in parts for part in axis.sections or ((n, axis.block),))
    wide = (sum(entry.wide[0] for entry in entries), *first.wide[1:])
    joined = {0: Axis(growths[0].times, 1, sections, side=growths[0].side)} if 0 in first.axes else {}
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
    return replace(entry, narrow=shape, wide=wide, axes=axes)


_COUNTED = ["vocab_size", "type_vocab_size", "num_experts", "num_local_experts", "n_routed_experts", "num_labels"]
_COUNTED += ["num_channels", *HEAD_DIM, *(name for names in FIELDS.values() for name in names)]
_LONG = ("max_position_embeddings", "n_positions", "n_ctx", "image_size", "patch_size")
_LONGEST = 1 << 24
_DEEPEST = 4


def check_sizes(config: Mapping[str, Any], shapes: Mapping[str, Shape], said_by: str, depth: int = 0) -> None:
    """Refuse sizes that the tensors of the files cannot have; those of a part (text_config) are looked at, too.

    said_by: what gives the sizes, for the message.
    """
    tensors, numbers = len(shapes), sum(map(math.prod, shapes.values()))
    limits = {
        **dict.fromkeys(_COUNTED, (numbers, f"{numbers:,} numbers in all")),
        **dict.fromkeys(LAYERS, (tensors, f"{tensors:,} tensors in all")),
        **dict.fromkeys(_LONG, (max(_LONGEST, numbers), f"at most {max(_LONGEST, numbers):,} would be taken")),
    }
    for name, value in config.items():
        if isinstance(value, dict) and depth < _DEEPEST:
            check_sizes(value, shapes, said_by, depth + 1)
        elif name in limits and isinstance(value, int) and value > limits[name][0]:
            raise MupscaleError(
                f"{said_by} says {name} is {show_short(value)}, and the files hold {limits[name][1]}: "
                f"they do not belong together"
            )


def check_nothing_missing(config: Mapping[str, Any], names: Collection[str], folder: object) -> None:
    """Refuse files that lack a parameter of the model that transformers builds from the config."""
    model = sketch_model(config)
    given = {name for tensor in names_in_model(model, names).values() for name in tensor.names}
    groups = naming.aliases(model.named_parameters(remove_duplicate=False))  # tied ones are in the files once
    ignored = _ignored(model, "missing")
    missing = [names[0] for names in groups if given.isdisjoint(names) and not ignored(names[0])]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MupscaleError(f"{folder} lacks '{min(missing)}'{more}: the files and config.json do not belong together")


class ConfigFamily:
    """The models of one config.json at every width. Plans are by names, and nothing of the model itself is built."""

    def __init__(self, config: Config) -> None:
        self.config, self.model_type = config, str(config.get("model_type"))

    def wide_config(self, times: Times) -> dict[str, Any]:
        """config.json of the wide model."""
        return wide_config(self.config, times)

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
        widths = {n for name, n in sizes_of(self.config).items() if isinstance(n, int) and wide.get(name) != n}
        reasons = [*obstacles(nn.Module(), plan), *without_gains(naming.modules(sketch_model(self.config)), widths)]
        with suppress(MupscaleError):  # no miniature grows so, and a comparison may tell
            if not reasons and plan.norms and moves_outputs(self.config, times):
                reasons.append("a norm comes after a sum or at the embedding, where new units cannot be silent")
        return reasons

    @not_advising("roles", "register", "inputs", "no_inputs")  # which no function or command for checkpoints takes
    def plan(self, times: Times, *, initial: bool = True) -> Plan:
        """The plan by the model's own names. initial: with what new units start with, which copies do not need."""
        planned = self._unchanged() if times == Times() else plan_by_miniatures(self.config, times)
        return with_laws(planned, planned.parameters, initial_laws(self.config)) if initial else planned

    def _unchanged(self) -> Plan:
        model = sketch_model(self.config)
        shapes = {name: tuple(p.shape) for name, p in naming.parameters(model).items()}
        groups = naming.aliases(model.named_parameters(remove_duplicate=False))
        kept = model.state_dict().keys()
        buffers = {n: Entry(tuple(b.shape), tuple(b.shape), names=(n,)) for n, b in model.named_buffers() if n in kept}
        return Plan({n[0]: Entry(shapes[n[0]], shapes[n[0]], names=n) for n in groups}, buffers, tried_by="copies")

    def plan_files(
        self, times: Times, shapes: Mapping[str, Shape], *, recorded: Plan | None = None, initial: bool = True
    ) -> Plan:
        """The plan for the tensors of the files, which have these narrow shapes. recorded: by the model's names."""
        by_model = self.plan(times, initial=initial) if recorded is None else recorded
        now, then = (parts_of(each) for each in (self.config, self.wide_config(times)))
        sizes = {size: then[part] for part, size in reversed(now.items())}
        strangers = _names_beside(self.config, by_model, shapes)
        if strangers and (other := _class_with(self.config, strangers)):
            beside = ConfigFamily({**self.config, "architectures": [other]}).plan(times, initial=initial)
            more = {beside.names[name]: beside[name] for name in strangers if name in beside.names}
            fresh = {name: one for name, one in beside.initial.items() if name in more}
            parameters, values = {**by_model.parameters, **more}, {**by_model.initial, **fresh}
            by_model = replace(by_model, parameters=parameters, initial=values)
        return plan_for_files(self.config, by_model, shapes, sizes)

    def check_grown(self, plan: Plan, times: Times) -> None:
        """An error where nothing grows, or only a part, since other sizes follow from one that does."""
        growing = sum(entry.narrow != entry.wide for entry in plan.parameters.values())
        if growing == 0 and times != Times():
            raise MupscaleError(
                f"nothing of '{self.model_type}' would grow: the sizes in its config have other names than usual"
            )
        whole = times.hidden != 1 and not times.parts
        if not whole or 2 * growing >= len(plan.parameters):
            return
        few = f"only {growing} of {len(plan.parameters)} tensors of '{self.model_type}' would grow"
        if times.ffn == 1 and (size := ffn_that_follows_hidden(self.config, times)) is not None:
            raise MupscaleError(
                f"{few}, since its config derives the size of its feed-forward layers from the hidden size: let ffn "
                f"grow as hidden does, {times.hidden} times ({setting('ffn', size)})"
            )
