"""Miniatures: small models that are run in place of large ones, and models at sizes between two others.

Nobody says how a model is built, but two of them show it: a whole number that a module keeps, or a dimension of a
tensor, is a size if it differs, and follows from the width by the power that the pair shows; so do other numbers
(1/√width). What is alike in both stays. No weights are copied, so a miniature of a large model costs no memory. This is
a guess, like a module's name: a closure may hold a size, a buffer may be computed from one. Whatever is learnt on such
a model is checked on the pair itself.
"""

from __future__ import annotations

import copy
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mupscale.core import Axis, Entry, Plan, Role, check_same_names, copy_model, naming, plain_type
from mupscale.planning import tracing
from mupscale.planning.comparing import is_large, tied_parameters
from mupscale.planning.from_modules import ONE_DEPTH, count_staying, find_role, most_common_ratio, paired_sizes
from mupscale.system import MupscaleError

_FEW = 3  # blocks that are not worth leaving out
_KEPT = 2  # of each kind of block, the first and the last
_OWN = ("_parameters", "_buffers", "_modules")
_COUNT = re.compile(r"layer|depth|block")


@dataclass(frozen=True)
class Thinned:
    """Blocks that a miniature leaves out: by the path of each block of a list, the path of one that is like it.

    kept: by the path of a list, the names of the blocks that stay.

    >>> Thinned({"h.5": "h.0"}, {"h": ("0", "7")}).name_in_miniature("h.5.weight")
    'h.0.weight'
    >>> Thinned({"h.6": "h.7"}, {"h": ("0", "7")}).name_in_miniature("h.6.weight")
    'h.1.weight'
    """

    like: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def name_in_miniature(self, name: str) -> str:
        """What the tensor that is like this one is called where blocks are left out."""
        parts, made = name.split("."), ""
        for end in range(1, len(parts)):
            path = ".".join(parts[:end])
            if path in self.like:
                parts[:end] = self.like[path].split(".")
        for end, part in enumerate(parts):
            names = self.kept.get(".".join(parts[:end]), ())
            made += f".{names.index(part) if part in names else part}"
        return made[1:]


class Resizing:
    """Two models of one class and depth, and the ratio of their widths."""

    def __init__(self, narrow: nn.Module, wide: nn.Module) -> None:
        self.narrow, self.wide = naming.unwrap(narrow), naming.unwrap(wide)
        ours, theirs = (dict(model.named_modules(remove_duplicate=False)) for model in (self.narrow, self.wide))
        check_same_names("the narrow model", ours, "the wide model", theirs, ONE_DEPTH, what="module")
        self.modules = {path: (module, theirs[path]) for path, module in ours.items()}
        small, large = (dict(model.named_parameters()) for model in (self.narrow, self.wide))
        check_same_names("the narrow model", small, "the wide model", large, ONE_DEPTH, what="parameter")
        self.ratio = most_common_ratio(paired_sizes(self.narrow, self.wide))

    def copy(
        self,
        model: nn.Module,
        factor: Fraction,
        thinned: Thinned | None = None,
        instead: Mapping[int, int] | None = None,
    ) -> nn.Module:
        """One of the two models with sizes that are so many times its own, and with weights drawn as large as its own.

        thinned: blocks to leave out. instead: by sizes that are the same in both, other ones. An error where a size
        would be no whole number.
        """
        original, others, seen = naming.unwrap(model), instead or {}, set[int]()
        generator, kept = torch.Generator().manual_seed(0), {} if thinned is None else thinned.kept
        counts = {len(self.modules[path][0]): len(names) for path, names in kept.items()}
        memo: dict[int, Any] = dict(tracing.computed_tensors(original))
        for path, names in kept.items():
            blocks = dict(original.named_modules(remove_duplicate=False)).get(path)
            for name, block in blocks._modules.items() if blocks is not None else ():
                if name not in names:
                    memo[id(block)] = nn.Identity()
        which = 0 if original is self.narrow else 1
        for modules in self.modules.values():  # the tensors first, then the numbers that modules keep
            for tensors in zip(*map(_own_tensors, modules), strict=False):
                if type(tensors[which]) in (nn.Parameter, Tensor) and id(tensors[which]) not in memo:
                    memo[id(tensors[which])] = self._tensor(tensors, tensors[which], factor, others, generator)
        # where blocks are left out, the attributes of parameters cannot be put in order
        copied = copy.deepcopy(original, memo) if kept else copy_model(original, memo)

        def number(name: Any, small: Any, large: Any, own: Any) -> Any:
            """What a number that modules keep becomes."""
            if type(own) is float:
                return own if small == large else self.constant((small, large), own, factor)
            size = others.get(own, own) if small == large else self.scaled((small, large), own, factor)
            return counts.get(size, size) if _COUNT.search(str(name)) else size

        made = dict(copied.named_modules(remove_duplicate=False))
        for path, (small, large) in self.modules.items():
            if path in made and type(made[path]) is type(small):
                _changed(vars(small), vars(large), vars(made[path]), number, seen)
        for path in sorted(kept, key=len, reverse=True):
            if path in made:
                remaining = [made[path]._modules[name] for name in kept[path]]
                made[path]._modules.clear()
                made[path]._modules.update({str(place): block for place, block in enumerate(remaining)})
        return copied

    def _tensor(
        self,
        pair: tuple[Tensor, Tensor],
        own: Tensor,
        factor: Fraction,
        instead: Mapping[int, int],
        generator: torch.Generator,
    ) -> Tensor:
        """One of another size; of the same kind and about as large."""
        shape = [
            instead.get(n, n) if ours == theirs else self.scaled((ours, theirs), n, factor)
            for ours, theirs, n in zip(pair[0].shape, pair[1].shape, own.shape, strict=True)
        ]
        device = torch.device("cpu") if own.is_meta else own.device
        if isinstance(own, nn.Parameter):
            size = 0.02 if own.is_meta else tracing.size_of(own)
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32) * size
            return nn.Parameter(drawn.to(device, own.dtype), own.requires_grad)
        if own.is_meta:
            return torch.ones(shape, dtype=own.dtype)
        values = own.detach().clone()
        is_told = own.is_floating_point() and not any(t.is_meta for t in pair)
        if is_told and pair[0].numel() == pair[1].numel() == 1 and float(pair[0]) != float(pair[1]):  # such as √width
            return values.fill_(self.constant((float(pair[0]), float(pair[1])), float(own), factor))
        for dim, n in enumerate(shape):
            if n != values.shape[dim]:
                index = torch.arange(n, device=device) % max(1, values.shape[dim])
                values = values.index_select(dim, index)
        return values

    def shorter_tables(self, least: int) -> dict[int, int]:
        """By the length of a long table of tokens or positions, which is the same in both, one that is enough.

        least: how many rows have to be left. What is padded with the last row goes on so.
        """
        tables = [pair for pair in self.modules.values() if isinstance(pair[0], nn.Embedding)]
        lengths = {int(a.num_embeddings) for a, b in tables if a.num_embeddings == b.num_embeddings}
        short = {length: least for length in lengths if length > 4 * least}
        return short | {length - 1: least - 1 for length in short}

    def scaled(self, pair: tuple[int, int], own: int, factor: Fraction) -> int:
        """A size that is `own` in one of the models, and so large in the two.

        One that follows no power of the width may join a part that does with a part that stays.
        """
        power = self._power(*pair)
        is_power = bool(round(power)) and math.isclose(power, round(power), rel_tol=1e-6)
        staying = 0 if is_power else count_staying(*pair, self.ratio)
        size = (own - staying) * factor ** (round(power) if is_power else 1) + staying
        if size.denominator != 1 or size < 1:
            raise MupscaleError(f"a size of {own} cannot become {factor} times as large")
        return int(size)

    def constant(self, pair: tuple[float, float], own: float, factor: Fraction) -> float:
        """The same of a number that follows from the width, such as 1/√width."""
        return float(own * float(factor) ** (round(4 * self._power(*pair), 6) / 4))

    def _power(self, before: float, after: float) -> float:
        if before * after <= 0 or self.ratio == 1:
            raise MupscaleError(f"a number of {before:.6g} → {after:.6g} follows no power of the width")
        return math.log(after / before) / math.log(self.ratio)

    def divisors(self) -> list[int]:
        """By how much all sizes that differ can be divided and keep at least two units, most first; without 1."""
        sizes = [n for pair in self._sizes() for n in pair if n > 1]
        common = math.gcd(*sizes) if sizes else 1
        most = min(sizes, default=1) // 2
        return [d for d in range(min(common, most), 1, -1) if common % d == 0]

    def _sizes(self) -> list[tuple[int, int]]:
        """The whole numbers that differ, and dimensions of tensors."""
        sizes = list[tuple[int, int]]()

        def noted(name: Any, small: Any, large: Any, own: Any) -> Any:
            if type(own) is int and small != large:
                sizes.append((small, large))
            return own

        for small, large in self.modules.values():
            _changed(vars(small), vars(large), vars(small), noted, set())
            for ours, theirs in zip(_own_tensors(small), _own_tensors(large), strict=False):
                sizes += [pair for pair in zip(ours.shape, theirs.shape, strict=False) if pair[0] != pair[1]]
        return sizes

    @property
    def is_uniform(self) -> bool:
        """Whether every size that differs is so many times as large in the wide model, or a power of that."""
        with suppress(MupscaleError):
            powers = [self._power(*pair) for pair in self._sizes()]
            return all(round(power) and math.isclose(power, round(power), rel_tol=1e-9) for power in powers)
        return False

    def thinned(self, *, inner: bool = True) -> Thinned:
        """Which blocks of long lists can be left out, since others are of the same kind.

        inner: also in lists that lie in blocks. Lists of one length are thinned alike, since a model may go through
        them together.
        """
        lists = {
            path: small
            for path, (small, _) in self.modules.items()
            if isinstance(small, nn.ModuleList | nn.Sequential) and len(small) > _FEW
        }
        if not inner:
            lists = {p: module for p, module in lists.items() if not any(p.startswith(f"{o}.") for o in lists if o)}
        tied = tied_parameters(self.narrow)
        kinds: dict[int, list[Any]] = {}
        for path, module in lists.items():
            own = self._kinds(path, module, tied)
            before = kinds.setdefault(len(module), [()] * len(module))
            kinds[len(module)] = [(*some, kind) for some, kind in zip(before, own, strict=True)]
        like, kept = dict[str, str](), dict[str, tuple[str, ...]]()
        for path, module in lists.items():
            names, numbers = list(module._modules), dict[Any, list[int]]()
            for number, kind in enumerate(kinds[len(module)]):
                numbers.setdefault(kind, []).append(number)
            stay = sorted({n for alike in numbers.values() for n in (alike[0], alike[-1])[:_KEPT]})
            if len(stay) == len(names):
                continue
            kept[path] = tuple(names[n] for n in stay)
            for alike in numbers.values():
                like |= {f"{path}.{names[n]}".lstrip("."): f"{path}.{names[alike[0]]}".lstrip(".") for n in alike[1:-1]}
        return Thinned(like, kept)

    def _kinds(self, path: str, blocks: Any, tied: Collection[int]) -> list[str]:
        """What tells the blocks of a list apart, in both models; whole numbers that are their position do not."""
        described = []
        for number, name in enumerate(blocks._modules):
            block = f"{path}.{name}".lstrip(".")
            told: dict[Any, Any] = {"tied": any(id(p) in tied for p in blocks[number].parameters()) and str(number)}
            for inner, pair in self.modules.items():
                if inner == block or inner.startswith(f"{block}."):
                    for which, module in enumerate(pair):
                        local = inner.removeprefix(block), which
                        shapes = [(tuple(t.shape), t.dtype, t.requires_grad) for t in _own_tensors(module)]
                        told[local] = plain_type(module), shapes
                        for key, value in vars(module).items():
                            if isinstance(value, int | str | tuple) or (isinstance(value, float) and "drop" not in key):
                                told[*local, key] = value
            described.append(told)
        first = described[0]
        places = {
            key
            for key in first
            if all(type(told.get(key)) is int and told[key] - n == first[key] for n, told in enumerate(described))
        }
        return [repr([(key, told[key]) for key in told if key not in places]) for told in described]


def _own_tensors(module: nn.Module) -> list[Tensor]:
    """Of a module itself: parameters, buffers and plain tensors, in order."""
    own = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
    return [t for t in own if isinstance(t, Tensor)]


def _changed(small: Any, large: Any, own: Any, change: Callable[..., Any], seen: set[int], name: Any = "") -> Any:
    """A value with other numbers, as two models have them; in dictionaries and objects they change in place.

    change: gets the number's name, and its values in the three.
    """
    kind = type(own)
    if kind is not type(small) or kind is not type(large) or isinstance(own, nn.Module | Tensor | type):
        return own
    if kind in (int, float):
        return change(name, small, large, own)
    if kind in (list, tuple, torch.Size) and len(small) == len(large) == len(own):
        made = [_changed(*values, change, seen) for values in zip(small, large, own, strict=True)]
        return own if all(map(operator.is_, made, own)) else kind(made)
    if id(own) not in seen and (isinstance(own, dict) or (hasattr(own, "__dict__") and not callable(own))):
        seen.add(id(own))
        ours, theirs, mine = (each if isinstance(each, dict) else vars(each) for each in (small, large, own))
        for key in mine.keys() & ours.keys() & theirs.keys() - {*_OWN}:
            if (value := _changed(ours[key], theirs[key], mine[key], change, seen, key)) is not mine[key]:
                mine[key] = value
    return own


_ROWS = 64  # of a table, at least
_MOST = 2  # miniatures that are tried


@dataclass(frozen=True)
class Miniature:
    """Two small models that are to each other what two large ones are.

    inputs: a batch for them. originals: by the names of their tensors, the large models' that are like them.
    """

    narrow: nn.Module
    wide: nn.Module
    inputs: Any
    originals: Mapping[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, narrow: nn.Module, wide: nn.Module, inputs: Any) -> Miniature:
        """Two models as they are, or with fewer blocks and rows of tables if they are large."""
        made = next(find_miniatures(narrow, wide, inputs, narrower=False), None) if is_large(narrow, wide) else None
        return made or cls(narrow, wide, inputs, {name: [name] for name in tracing.all_tensors(narrow)})

    def given(self, roles: Mapping[str, Role]) -> dict[str, Role]:
        """The roles that were given for the large models, by name."""
        told = {name: find_role(roles, names[0]) for name, names in self.originals.items()}
        return {escape(name): role for name, role in told.items() if role is not None}

    def patterns(self, learnt: Mapping[str, Role], given: Mapping[str, Role]) -> dict[str, Role]:
        """By pattern, what was given for the large models, and else roles of the small ones."""
        found = {own: role for own in self.originals if (role := find_role(learnt, own)) is not None}
        by_name = {name: find_role(given, name) or role for name, role in self.by_original(found).items()}
        return {escape(name): role for name, role in by_name.items()} | dict(given)

    def by_original(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """By the names of the large models, what is known by the small ones'."""
        return {name: value for own, value in values.items() for name in self.originals.get(own, ())}


def find_miniatures(narrow: nn.Module, wide: nn.Module, inputs: Any, *, narrower: bool = True) -> Iterator[Miniature]:
    """Miniatures of two models that run on the batch, the smallest first; none where nothing can be made smaller.

    narrower: whether widths are smaller, too, and not only lists of blocks and tables.
    """
    with suppress(MupscaleError):
        sizes = Resizing(narrow, wide)
        thinned = [sizes.thinned(), sizes.thinned(inner=False), Thinned()]
        factors = [Fraction(1, d) for d in sizes.divisors()[: _MOST * narrower]] + [Fraction(1)]
        # so many rows of tables are enough for the batch, or a longer one of its kind, whatever its tokens are
        rows = max([_ROWS, *(4 * n for t in tracing.tensors_in(tracing.call_arguments(inputs)) for n in t.shape[1:])])
        short = sizes.shorter_tables(rows)

        def shortened(x: Any) -> Any:
            is_whole = isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool
            return x % rows if short and is_whole else x

        batch = tree_map(shortened, inputs)
        tried = 0
        for blocks in [each for i, each in enumerate(thinned) if each not in thinned[:i]]:
            for factor in factors if blocks.kept or short else factors[:-1]:
                if tried == _MOST:
                    return
                try:
                    small, large = (sizes.copy(model, factor, blocks, short) for model in (sizes.narrow, sizes.wide))
                    with torch.no_grad():
                        for model in (small, large):
                            tracing.run_in_float64(*tracing.in_float64(model, tracing.in_double(batch)))
                except Exception:  # whatever a model raises whose sizes do not go together
                    continue
                tried += 1
                originals: dict[str, list[str]] = {}
                for name in tracing.all_tensors(narrow):
                    originals.setdefault(blocks.name_in_miniature(name), []).append(name)
                yield Miniature(small, large, batch, originals)


def roles_of(plan: Plan) -> dict[str, Role]:
    """What a plan says of every parameter and buffer, under all its names."""
    entries = {**plan.buffers, **plan.parameters}
    return {alias: _role(name, entry) for name, entry in entries.items() for alias in entry.names or (name,)}


def _role(name: str, entry: Entry) -> Role:
    growing = {d: axis for d, axis in entry.axes.items() if axis.times != 1}
    out, in_ = ({growing[d].layout for d in side if d in growing} or {Axis()} for side in (entry.out, entry.in_))
    if len(out) > 1 or len(in_) > 1:
        raise MupscaleError(f"'{name}' is copied in several orders, which no role can tell")
    return Role(
        out=entry.out,
        in_=entry.in_,
        out_block=out.pop(),
        in_block=in_.pop(),
        fold=entry.fold,
        offset=entry.offset,
        keep=None if entry.fold == 1 and entry.keep == 1 else entry.keep,
    )
