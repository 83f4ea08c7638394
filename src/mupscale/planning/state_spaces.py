"""Roles of state-space mixers with heads, as Mamba 2's: what their modules' own attributes tell.

Such a mixer has one projection in, which gives the gate, the heads' inputs, the states' inputs B and outputs C, and a
time step for each head, one after another; a convolution over all but the gate and the time steps; and a decay, a time
step's bias and a skip for each head. The heads of one group share its B and C, as the queries of a group share a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mupscale.core import Role

_COUNTS = ("num_heads", "head_dim", "n_groups", "ssm_state_size")
_PER_HEAD = ("A_log", "D", "dt_bias")


@dataclass(frozen=True)
class _Mixer:
    """The sizes of a mixer: so many heads of head_dim units, in groups that share so many states' inputs and outputs.

    conv: the units of its convolution. projected: those that its projection gives.
    """

    heads: int
    head_dim: int
    groups: int
    states: int
    conv: int
    projected: int

    @classmethod
    def of(cls, module: nn.Module) -> _Mixer | None:
        """The sizes, where the module is such a mixer; None for anything else."""
        counts: list[Any] = [getattr(module, name, None) for name in _COUNTS]
        if not all(isinstance(count, int) and count > 0 for count in counts):
            return None
        projection, convolution = getattr(module, "in_proj", None), getattr(module, "conv1d", None)
        if not isinstance(projection, nn.Linear) or not isinstance(convolution, nn.Conv1d):
            return None
        heads, head_dim, groups, states = counts
        mixer = cls(heads, head_dim, groups, states, convolution.out_channels, projection.out_features)
        return mixer if mixer.is_packed_as_usual else None

    @property
    def inner(self) -> int:
        """The units of all heads."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """The inputs of all groups' states; their outputs are as many."""
        return self.groups * self.states

    @property
    def is_packed_as_usual(self) -> bool:
        """Whether the sizes of the projection and the convolution are the sums of those parts, and nothing more."""
        convolved = self.inner + 2 * self.shared
        return (
            self.heads % self.groups == 0
            and self.conv == convolved
            and self.projected == self.inner + convolved + self.heads
        )


def state_space_roles(narrow: nn.Module, wide: nn.Module) -> Mapping[str, Role]:
    """Roles of the tensors of a mixer whose heads grow in number, by their names in it; empty for anything else.

    Groups grow as heads do, and the heads of a group are copied together: heads that are copied each on their own
    would read the states of another group.
    """
    small, large = _Mixer.of(narrow), _Mixer.of(wide)
    if small is None or large is None or small.heads == large.heads:
        return {}
    same_parts = (small.head_dim, small.states) == (large.head_dim, large.states)
    same_heads_of_a_group = small.heads * large.groups == large.heads * small.groups
    if not same_parts or not same_heads_of_a_group:
        return {}

    # what is copied together: the heads of a group, and the units of which these consist
    heads_together = small.heads // small.groups
    units_together = heads_together * small.head_dim
    heads = (small.heads, heads_together)
    units = (small.inner, units_together)
    states = (small.shared, small.states)

    convolved = Role(out=0, out_block=(units, states, states))
    per_head = Role(out=0, out_block=heads_together)
    return {
        "in_proj.weight": Role(out=0, in_=1, out_block=(units, units, states, states, heads)),
        "in_proj.bias": Role(out=0, out_block=(units, units, states, states, heads)),
        "conv1d.weight": convolved,
        "conv1d.bias": convolved,
        "norm.weight": Role(out=0, out_block=units_together),
        "out_proj.weight": Role(out=0, in_=1, in_block=units_together),
        **dict.fromkeys(_PER_HEAD, per_head),
    }
