"""Parameters with one width axis that no registered module type explains: which of them certainly are outputs.

A bias, a gain and a table of positions have their units along that axis. A vector that is multiplied with the hidden
units and summed (`h @ q`, a GCN's own linear layer, a low-rank factor) has the same shape and is an input. So what is
not certain is refused, unless the plan is tried on a batch before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mupscale.core import Entry, copy_model, shapes_in_words
from mupscale.system import PlanError, name_of_group, pattern_of_name, ways_out

_SHOWN = 3  # groups of parameters that a message names
_GAINS = {"gain", "gains", "gamma", "layerscale", "scale"}
_ADDED = re.compile(
    r"pos(itions?)?|(abs(olute)?_?)?"
    r"(pos(ition(al|s)?)?|temporal|time|patch|cls|class|dist|mask|reg(ister)?s?|bos|sep|pad|segment)"
    r"_?(emb(ed(ding)?)?s?|encodings?|tokens?)(_?table)?"
)


def is_certain_output(module: nn.Module, name: str, tensor: Tensor, dim: int) -> bool:
    """Whether the axis of a module's parameter holds the parameter's units, by its name or by what the module does.

    >>> [is_certain_output(nn.Module(), name, torch.zeros(8), 0) for name in ("bias", "q")]
    [True, False]
    >>> class Scale(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.by = nn.Parameter(torch.ones(width))
    ...     def forward(self, x):
    ...         return x * self.by
    >>> is_certain_output(Scale(8), "by", torch.ones(8), 0)
    True
    """
    plain = name.lower()
    if "bias" in plain.split("_"):
        return True
    if dim == tensor.dim() - 1 and tensor.dim() > 1 and _ADDED.fullmatch(plain):
        return True
    if tensor.squeeze().dim() > 1:
        return False
    is_gain = plain.replace("_", "") in _GAINS or "norm" in type(module).__name__.lower()
    return is_gain or (tensor.dim() == 1 and acts_unit_by_unit(module, name))


def acts_unit_by_unit(module: nn.Module, name: str) -> bool:
    """Whether each entry of a leaf module's vector changes its own unit of the module's output and no other.

    >>> acts_unit_by_unit(nn.RMSNorm(4), "weight")
    True
    """
    vector = module._parameters.get(name)
    if next(module.children(), None) is not None or vector is None:
        return False
    n = vector.numel()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            alone = _with_generic_weights(module)
            changed = copy_model(alone)
            changed.get_parameter(name)[0] += 1.0
        except Exception:  # it cannot be copied, or keeps its weights elsewhere
            return False
        for shape, dim in (((3, n), 1), ((2, 3, n), 2), ((2, n, 3, 3), 1), ((2, n, 3), 1)):
            x = torch.randn(shape, dtype=torch.float64)
            try:
                y, other = alone(x.clone()), changed(x.clone())
            except Exception:  # it takes other arguments
                continue
            if isinstance(y, Tensor) and y.shape == x.shape:
                differ = (y != other).transpose(0, dim).flatten(1).any(1)
                return bool(differ[0]) and not bool(differ[1:].any())
    return False


def _with_generic_weights(module: nn.Module) -> nn.Module:
    """A copy in float64 and with memory, its vectors drawn."""
    alone = copy_model(module).to_empty(device="cpu").double().eval()
    torch.manual_seed(0)
    for tensor in (*alone.parameters(), *alone.buffers()):
        if tensor.is_floating_point():
            tensor.copy_(0.5 + torch.rand(tensor.shape))
        else:
            tensor.zero_()
    return alone


class Uncertain(NamedTuple):
    """A parameter that may be read along its width or give it: of which kind of module, and how it grows."""

    kind: str
    narrow: tuple[int, ...]
    wide: tuple[int, ...]
    dim: int

    @property
    def is_multiple(self) -> bool:
        """Whether copies of its units would fit, so that a run of the models could show what it is."""
        return self.narrow[self.dim] > 0 and self.wide[self.dim] % self.narrow[self.dim] == 0


def check_certain(uncertain: Mapping[str, Uncertain]) -> None:
    """Refuse parameters of which nobody can tell whether they are read along their width or give it, all at once.

    >>> check_certain({f"blocks.{i}.alpha": Uncertain("Block", (16,), (32,), 0) for i in range(2)})
    Traceback (most recent call last):
    mupscale.system.errors.PlanError: 'blocks.0–1.alpha' (in Block, 16 → 32) may be added to (or multiplied ...
    """
    if not uncertain:
        return
    groups: dict[tuple[str, Uncertain], list[str]] = {}
    for name, each in uncertain.items():
        groups.setdefault((pattern_of_name(name), each), []).append(name)
    shown = [
        f"'{name_of_group(names)}' (in {each.kind}, {shapes_in_words(each.narrow, each.wide)})"
        for (_, each), names in list(groups.items())[:_SHOWN]
    ]
    more = f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
    (_, first), names = next(iter(groups.items()))
    local = names[0].rpartition(".")[2]
    pattern = f"*.{local}" if len(names) > 1 and not local.isdigit() else names[0]
    parts = "; a weight_norm's gain wants a fold of in_^-1/2, too" if first.kind == "ParametrizationList" else ""
    multiples = all(each.is_multiple for each in uncertain.values())
    batch = "Pass a batch, inputs=, to mupscale.plan, upscale or Family, and a run of the model shows it"
    between = (
        "A run of the model may show it at a whole multiple of the width. Choose one, with inputs=, or use "
        "mupscale.Family(…, inputs=…), which learns it for every width"
    )
    say_it = (
        f"give its role, roles={{'{pattern}': mupscale.Role(out={first.dim})}} where given and Role(in_={first.dim}) "
        f"where summed over, to mupscale.Family or to mupscale.plan, whose result upscale takes as plan={parts}"
    )
    ways = {"inputs": batch} if multiples else {"no_inputs": between}  # a batch that was given is not enough there
    raise PlanError(
        f"{', '.join(shown)}{more} may be added to (or multiplied with) hidden units, or summed over them. The modules "
        f"do not show which{ways_out('. ', **ways, roles=say_it)}"
    )


def check_tables_are_read(
    modules: Mapping[str, nn.Module], entries: Mapping[str, Entry], told: Collection[str]
) -> None:
    """Refuse tables whose units no weight reads: then their products are summed over the width (word2vec).

    modules: the narrow model's, by path. told: parameters whose roles the user gave.

    >>> from mupscale.core import Axis
    >>> tables = nn.ModuleDict({"words": nn.Embedding(9, 4), "contexts": nn.Embedding(9, 4)})
    >>> entry = Entry(narrow=(9, 4), wide=(9, 8), axes={1: Axis(2, side="out")})
    >>> check_tables_are_read(dict(tables.named_modules()), {"words.weight": entry, "contexts.weight": entry}, told=())
    Traceback (most recent call last):
    mupscale.system.errors.PlanError: no weight of the model reads the units of 'words.weight' and ...
    """
    tables = [
        name
        for name, entry in entries.items()
        if isinstance(modules.get(name.rpartition(".")[0]), nn.Embedding | nn.EmbeddingBag) and entry.out
    ]
    if len(tables) < 2 or any(entry.in_ for entry in entries.values()) or any(name in told for name in tables):
        return
    batch = "pass a batch, inputs=, and the model itself shows it"
    role = f"pass roles={{'{tables[1]}': mupscale.Role(in_=1)}} where they are summed over, and Role(out=1) where not"
    raise PlanError(
        f"no weight of the model reads the units of '{tables[0]}' and '{tables[1]}', so their products may be summed "
        f"over the width. The sum then grows with the width{ways_out(inputs=batch, roles=role)}"
    )
