"""Initial values of a model that grows once more: under μP they count from the first model, as learning rates do.

config.json of a grown model gives the spread that the first one started with, or one that follows from the sizes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mupscale.core import Axis, Entry, Plan, Shape
from mupscale.hf.describe import Config, Times, architecture_of
from mupscale.hf.files.record import RECORD_FILE, Record
from mupscale.planning import with_initial
from mupscale.system import MupscaleError


def count_from_first(record: Record, plan: Plan) -> Plan:
    """The plan with the initial values that one growth from the first model to its wide width would have.

    record: of the model that grows, before this growth. plan: of this growth, by the names in the model or, where the
    architecture is described, in the files. A plan that knows no initial values stays as it is.

    >>> from mupscale.hf.files.record import GrowthStep
    >>> config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> record = Record({**config, "initializer_range": 0.02}, (GrowthStep(Times.of(4)),))
    >>> wide, name = GrowthStep(Times.of(4)).config_after(record.config), "model.layers.0.mlp.up_proj.weight"
    >>> plan = architecture_of(wide).plan_parameters(wide, Times.of(4), {name: (32, 32)})
    >>> plan.fresh[name], count_from_first(record, plan).fresh[name]
    (0.01, 0.005)
    """
    if plan.fresh is None or not record.widenings:
        return plan
    shapes = {name: entry.narrow for key, entry in plan.parameters.items() for name in (key, *entry.names)}
    config = record.first_config
    so_far = _growth_so_far(record, config, shapes)
    small = {name: entry.narrow for name, entry in so_far.items()}
    architecture = architecture_of(config)
    first = architecture.plan_unchanged(config, small, means=plan.means is not None)
    if first.fresh is None:
        raise MupscaleError(
            "the first model's initialisation is unknown, and the scale of fresh units is counted from it: "
            f"{architecture.how_to_tell_the_initialisation(config)}, and into 'config' in {RECORD_FILE}"
        )
    entries = {name: so_far[name].then(_in_no_blocks(entry)) for name, entry in plan.parameters.items()}
    owners = {name: first.names.get(name, name) for name in entries}
    stds = {name: first.fresh[owner] for name, owner in owners.items()}
    means = {name: first.means[owner] for name, owner in owners.items() if first.means and owner in first.means}
    counted = with_initial(plan, entries, stds, means)
    return counted if plan.means is not None else replace(counted, means=None)


def plan_growth(
    record: Record | None,
    config: Config,
    times: Times,
    shapes: Mapping[str, Shape],
    *,
    recorded: Plan | None = None,
    fresh: bool = True,
) -> tuple[Plan, Plan | None]:
    """The plan of a checkpoint's growth for the tensors of its files, and the one that mupscale.json must hold.

    record: from whose first model initial values are counted; None to count from the checkpoint itself. recorded and
    fresh: as in `PlannedArchitecture.plan_files`.

    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "initializer_range": 0.02}
    >>> plan, recorded = plan_growth(None, config, Times.of(2), {"wte.weight": (11, 8)})
    >>> plan["wte.weight"].wide, recorded
    ((11, 16), None)
    """
    architecture = architecture_of(config)
    if architecture.described:
        plan = architecture.plan_files(config, times, shapes, recorded=recorded, fresh=fresh)
        return (plan if record is None else count_from_first(record, plan)), None
    by_model = architecture.plan_to_record(config, times, fresh=fresh) if recorded is None else recorded
    if record is not None and by_model is not None:
        by_model = count_from_first(record, by_model)
    return architecture.plan_files(config, times, shapes, recorded=by_model, fresh=fresh), by_model


def _growth_so_far(record: Record, config: Config, shapes: Mapping[str, Shape]) -> dict[str, Entry]:
    """From the first model to this one, by name. config: the first one's, with today's layers. shapes: of today."""
    if record.plan is not None and not architecture_of(config).described:
        names = record.plan.names
        return {name: _in_no_blocks(record.plan[names.get(name, name)]) for name in shapes}
    configs = [config]
    for growth in record.widenings:
        configs.append(growth.config_after(configs[-1]))
    so_far: dict[str, Entry] = {}
    for narrow, growth in reversed(list(zip(configs, record.widenings, strict=False))):
        plan = architecture_of(narrow).plan_wide_parameters(narrow, growth.times, shapes)
        entries = {name: _in_no_blocks(plan[plan.names[name]]) for name in shapes}
        so_far = {name: entry.then(so_far[name]) if so_far else entry for name, entry in entries.items()}
        shapes = {name: entry.narrow for name, entry in entries.items()}
    return so_far


def _in_no_blocks(entry: Entry) -> Entry:
    """By how much it grows, without where copies lie, so that growths compose whatever blocks each was copied in."""
    return replace(entry, axes={d: Axis(axis.times) for d, axis in entry.axes.items()})
