"""Initial values of a model that grows once more: under μP they count from the first model, as learning rates do."""

from __future__ import annotations

from collections.abc import Mapping

from mupscale.core import Plan, Shape
from mupscale.hf.describe import Config, Times, family_of_config
from mupscale.hf.files.record import Record, in_no_blocks
from mupscale.planning import with_initial


def count_from_first(record: Record, plan: Plan) -> Plan:
    """The plan with the initial values that one growth from the first model to its wide width would have.

    record: of the model that grows, before this growth. plan: of this growth, by the model's own names. A plan that
    knows no initial values stays as it is.
    """
    if plan.fresh is None or not record.widenings:
        return plan
    first, so_far = family_of_config(record.first_config).plan_unchanged(), in_no_blocks(record.whole_plan())
    if first.fresh is None or first.means is None:
        return plan.with_initial("std", None).with_initial("means", None)
    now = in_no_blocks(plan).parameters
    entries = {name: so_far[so_far.names[name]].then(entry) for name, entry in now.items()}
    owners = {name: first.names[name] for name in entries}
    stds = {name: first.fresh[owner] for name, owner in owners.items()}
    means = {name: first.means[owner] for name, owner in owners.items() if owner in first.means}
    return with_initial(plan, entries, stds, means)


def plan_growth(
    record: Record | None,
    config: Config,
    times: Times,
    shapes: Mapping[str, Shape],
    *,
    recorded: Plan | None = None,
    initial: bool = True,
) -> tuple[Plan, Plan]:
    """The plan of a checkpoint's growth for the tensors of its files, and the one that mupscale.json holds.

    record: from whose first model initial values are counted; None to count from the checkpoint itself. recorded and
    initial: as in `ConfigFamily.plan_files`.
    """
    family = family_of_config(config)
    by_model = family.plan(times, initial=initial) if recorded is None else recorded
    if record is not None:
        by_model = count_from_first(record, by_model)
    return family.plan_files(times, shapes, recorded=by_model), by_model
