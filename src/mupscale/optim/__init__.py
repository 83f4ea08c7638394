"""What each optimizer is, and so its parameter groups; clipping and schedules that do not depend on the width."""

from mupscale.optim import groups
from mupscale.optim.groups import (
    FROM_GROUP,
    Groups,
    clip_grad_norm_,
    default_hyper,
    make_optimizer,
    param_groups,
    per_group,
    scale,
    widened_groups,
)
from mupscale.optim.known import Traits, register_optimizer, traits
from mupscale.optim.schedulers import widen_scheduler

__all__ = [
    "FROM_GROUP",
    "Groups",
    "Traits",
    "clip_grad_norm_",
    "default_hyper",
    "groups",
    "make_optimizer",
    "param_groups",
    "per_group",
    "register_optimizer",
    "scale",
    "traits",
    "widen_scheduler",
    "widened_groups",
]
