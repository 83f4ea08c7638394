"""A plan for a mixture of experts: of every expert, the feed-forward part or the expert that it is a copy of.

First which tensors are experts, which part of the smaller model each is, and what the router is, by shapes and modules;
then, by running both models, whether outputs and gradients are what copies must give. docs/experts.md derives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, permutations, product, takewhile
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mupscale.core import Axis, Constants, Entry, Initial, Plan, Shape, TensorSource, is_sharded, naming
from mupscale.growth.copies import Copies
from mupscale.growth.writing import SAME, distance, grown_in_float64
from mupscale.planning import in_float64, run_in_float64, tensors_in
from mupscale.system import MupscaleError, Must, checks_arguments, pattern_of_name

_WAYS = 36  # to match tensors of one shape, that are tried
_SIDES: tuple[Literal["out", "in"], ...] = ("out", "in")  # of a router's buffers
_BALANCES = tuple(2 ** (exponent / 2) for exponent in range(-28, 5))  # in steps smaller than a softmax divides by
_NEEDED = (
    "The weights of the active experts must sum to 1 for every token (top-k renormalised), no token may be "
    "dropped, and where each expert is copied r times, r times as many must be active"
)
Shapes = Mapping[str, Shape]
Share = Annotated[float, Must("a number from 0 to below 1", lambda value: 0 <= value < 1)]


@checks_arguments
@dataclass(frozen=True)
class Experts:
    """What the experts of a mixture start as: copies of the feed-forward part, or, if there are experts, of those.

    router: 'drawn' keeps the values that the mixture was built with; 'silent' starts at zero. With the first, experts
    come to differ by the tokens that they are sent. With the second and equal experts, the mixture stays a replica of
    the dense model. fresh: the share of every expert's entries that keep the values that it was built with; `noise=`
    of `upscale` makes experts differ instead.

    >>> Experts(router="silent")
    Experts(router='silent', fresh=0.0)
    """

    router: Literal["drawn", "silent"] = "drawn"
    fresh: Share = 0.0


class ExpertLayer(NamedTuple):
    """A layer with experts, of which every old tensor becomes `times` copies.

    copies: by name in the larger model, the smaller one's tensor; where several have one shape and other names, each
    way that may be meant. routers: new ones, each with a tensor whose group it joins. rows: routers and stacked experts
    of a smaller model that has experts, whose first dimension grows.
    """

    path: str
    times: int
    copies: tuple[dict[str, str], ...] = ({},)
    routers: Mapping[str, str] = {}
    rows: tuple[str, ...] = ()


@checks_arguments
def plan_experts(
    dense: nn.Module, sparse: nn.Module, *, inputs: Any = None, grow: Experts | None = None, tried: Plan | None = None
) -> Plan:
    """How `dense` grows into `sparse`, which has experts in place of feed-forward parts, or more experts.

    The experts of the sparse model are the members of a ModuleList, or are stacked in the first dimension of tensors;
    its router is what else has a row for each. Nothing else may differ.
    inputs: a small batch, as the models are called. Both are run on it in float64: outputs must be the same, and the
    gradients of all copies of a tensor must sum to that of the tensor. A silent router needs it, since the number of
    active experts shows in the gradients.
    tried: the plan of smaller models of the same kind, which have been run instead; these may be without memory.

    >>> import torch
    >>> class Mixture(nn.Module):
    ...     def __init__(self, experts):
    ...         super().__init__()
    ...         self.router = nn.Linear(4, experts)
    ...         self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))
    ...     def forward(self, x):
    ...         weights = self.router(x).softmax(-1)
    ...         return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
    >>> plan = plan_experts(nn.Linear(4, 4), Mixture(2), inputs=torch.ones(3, 4))
    >>> plan["experts.1.weight"].source, plan["experts.1.weight"].rule.lr(m=1)
    (TensorSource(name='weight', kind='expert', value=0.0), 2.0)
    """
    operator, layers = Experts() if grow is None else grow, find_experts(dense, sparse)
    if not layers:
        raise MupscaleError("the larger model has no experts that the smaller one lacks. Build it with more")
    if operator.router == "silent" and inputs is None and tried is None:
        raise MupscaleError("the batch shows how many experts are active with a silent router. Pass inputs=")
    ways = range(min(_WAYS, *(len(layer.copies) for layer in layers), _WAYS))
    balanced = any(entry.axes for entry in _plan(dense, sparse, layers, operator, 0).buffers.values())
    sides = _SIDES if balanced else _SIDES[:1]
    plans = (_plan(dense, sparse, layers, operator, way, side) for way in ways for side in sides)
    if tried is not None:
        return _as_tried(plans, tried)
    if inputs is None or any(t.is_meta or is_sharded(t) for t in (*dense.parameters(), *sparse.parameters())):
        return next(plans)
    reasons, balances = [], None
    for plan in plans:
        if balances is None:
            balances = _telling_balances(dense, plan, inputs) if balanced else [0.0]
        for balance in balances:
            why, active = _try(dense, sparse, plan, inputs, balance)
            if why:
                break
        else:
            is_silent = any(source.kind == "silent" for source in plan.sources.values())
            shared = {n: plan[n].with_constants(depth=number) for n, number in active.items() if is_silent}
            return replace(plan, parameters={**plan.parameters, **shared}, tried_by="copies")
        reasons.append(why)
    raise MupscaleError(reasons[0])


def _as_tried(plans: Iterator[Plan], tried: Plan) -> Plan:
    """The plan that makes every tensor of what it is made of in another plan, by the same numbers, in any layer."""

    def made_of(plan: Plan) -> dict[str, tuple[Any, ...]]:
        return {
            pattern_of_name(n): (pattern_of_name(source.name), source.kind, plan[n].out, plan[n].in_)
            for n, source in plan.sources.items()
        }

    constants = {pattern_of_name(n): e.constants.depth for n, e in tried.parameters.items()}
    for plan in plans:
        if made_of(plan) == made_of(tried):
            shared = {n: e.with_constants(depth=constants[pattern_of_name(n)]) for n, e in plan.parameters.items()}
            return replace(plan, parameters=shared, tried_by="small members" if tried.checked else None)
    raise MupscaleError("the models that were run have other tensors, or other experts, than those of this size")


def find_experts(dense: nn.Module, sparse: nn.Module) -> list[ExpertLayer]:
    """The layers in which the larger model has experts in place of a feed-forward part, or more experts; or none.

    An error where there are new experts, and something else differs, too.
    """
    ours, theirs = ({n: tuple(p.shape) for n, p in naming.parameters(m).items()} for m in (dense, sparse))
    lists = {n: len(m) for n, m in naming.modules(sparse).items() if isinstance(m, nn.ModuleList) and len(m) > 1}
    layers = _more_experts(ours, theirs, lists) or _first_experts(ours, theirs, lists)
    told = {n for layer in layers for n in (*layer.copies[0], *layer.routers, *layer.rows)}
    if layers and (odd := [n for n, shape in theirs.items() if n not in told and ours.get(n) != shape]):
        raise MupscaleError(
            f"'{odd[0]}' has shape {theirs[odd[0]]} in the larger model and {ours.get(odd[0], 'is not')} in the "
            f"smaller one, beside the experts of '{layers[0].path}'. Add experts to a model of the same sizes, and "
            "grow it before or after that: the plans compose (plan.then)"
        )
    return layers


def _more_experts(ours: Shapes, theirs: Shapes, lists: Mapping[str, int]) -> list[ExpertLayer]:
    """Lists or stacks of experts that are longer in the larger model, as its routers are."""
    rows = {n: (ours[n][0], theirs[n][0]) for n in ours if n in theirs and _differ_in_rows(ours[n], theirs[n])}
    layers = []
    for path, many in lists.items():
        few = len({n.removeprefix(f"{path}.").partition(".")[0] for n in ours if _is_in(n, path)})
        routers = [n for n, sizes in rows.items() if sizes == (few, many) and _is_in(n, path.rpartition(".")[0])]
        if 0 < few < many and any(len(theirs[n]) == 2 for n in routers):
            times = _whole_times(path, few, many)
            parts = [n.removeprefix(f"{path}.0.") for n in ours if _is_in(n, f"{path}.0")]
            copies = {f"{path}.{i}.{n}": f"{path}.{i // times}.{n}" for i in range(many) for n in parts}
            layers.append(ExpertLayer(path, times, (copies,), rows=tuple(routers)))
    changed = {n for n in ours if ours[n] != theirs.get(n)}
    in_rows = ours.keys() == theirs.keys() and changed == rows.keys() and len({*rows.values()}) == 1
    if not layers and in_rows and {2, 3} <= {len(ours[n]) for n in rows}:
        path = next(n for n in rows if len(ours[n]) == 3)
        layers.append(ExpertLayer(path, _whole_times(path, *rows[path]), rows=tuple(rows)))
    return layers


def _is_in(name: str, path: str) -> bool:
    return not path or name.startswith(f"{path}.")


def _differ_in_rows(before: Shape, after: Shape) -> bool:
    return len(before) == len(after) and before[1:] == after[1:] and before[:1] < after[:1]


def _whole_times(path: str, few: int, many: int) -> int:
    if many % few:
        raise MupscaleError(
            f"'{path}' has {few} experts in the smaller model and {many} in the larger one: every expert is copied "
            f"equally often, so build {few * (many // few + 1)}, or another multiple"
        )
    return many // few


def _first_experts(ours: Shapes, theirs: Shapes, lists: Mapping[str, int]) -> list[ExpertLayer]:
    """Experts where the smaller model has a feed-forward part: by the innermost module that both are in."""
    gone = [n for n in ours if ours[n] != theirs.get(n)]
    homes: dict[str, list[str]] = {}
    for name in [n for n in theirs if theirs[n] != ours.get(n)] if gone else ():
        parts = name.split(".")
        paths = (".".join(parts[:length]) for length in reversed(range(len(parts))))
        homes.setdefault(next(path for path in paths if any(_is_in(n, path) for n in gone)), []).append(name)
    layers = []
    for home in sorted(homes, key=len, reverse=True):
        dense = {n: ours[n] for n in gone if _is_in(n, home)}
        gone = [n for n in gone if n not in dense]
        if dense and (layer := _layer(home, {n: theirs[n] for n in homes[home]}, dense, lists)):
            layers.append(layer)
    return layers


def _layer(home: str, new: Shapes, dense: Shapes, lists: Mapping[str, int]) -> ExpertLayer | None:
    """The experts among new tensors, and what each is a copy of; None where none of them are experts."""
    path = next((path for path in lists if _is_in(f"{path}.", home) and any(_is_in(n, path) for n in new)), None)
    if path is not None:
        members: dict[str, dict[str, Shape]] = {}
        for name in (n for n in new if _is_in(n, path)):
            number, _, local = name.removeprefix(f"{path}.").partition(".")
            members.setdefault(number, {})[local] = new[name]
        count, expert, starts = lists[path], next(iter(members.values())), [f"{path}.{number}." for number in members]
        if len(members) != count or any(one != expert for one in members.values()):
            return None
    else:
        rank = max(map(len, dense.values())) + 1
        first = next((n for n in new if len(new[n]) == rank), None)
        if first is None:
            return None
        count, path, starts, held = new[first][0], first.rpartition(".")[0], [""], [*dense.values()]
        expert = {n: s[1:] for n, s in new.items() if s[:1] == (count,) and s[1:] in held}
        many = {s for s in expert.values() if [*expert.values()].count(s) > held.count(s)}  # a router, or a bias
        expert = {n: s for n, s in expert.items() if s not in many or n.rpartition(".")[0] == path}
    routers = [n for n in new if new[n][:1] == (count,) and n not in {f"{p}{n}" for p in starts for n in expert}]
    if not any(len(new[n]) == 2 for n in routers):
        return None
    if sorted(expert.values()) != sorted(dense.values()):
        shapes = expert or {n: s[1:] for n, s in new.items() if len(s) == rank}
        raise MupscaleError(
            f"each of the {count} experts of '{path}' has tensors of the shapes {[*shapes.values()]}, but the "
            f"feed-forward part that they are to be copies of has {[*dense.values()]}. Build experts of the same size, "
            "with the same tensors, each stored alike: not transposed, and no two in one"
        )
    ways = [{f"{p}{n}": name for p in starts for n, name in way.items()} for way in _matches(expert, dense)]
    return ExpertLayer(path, count, tuple(ways), dict.fromkeys(routers, next(iter(dense))))


def _matches(expert: Shapes, dense: Shapes) -> Iterator[dict[str, str]]:
    """Which tensor of the feed-forward part each of an expert's is: by its name, else by its shape, in each way."""
    paths = zip(*(n.split(".")[:-1] for n in dense), strict=False)
    path = "".join(f"{parts[0]}." for parts in takewhile(lambda parts: len({*parts}) == 1, paths))
    for prefix in (path, path[: path[:-1].rfind(".") + 1]):
        if {n.removeprefix(prefix): shape for n, shape in dense.items()} == expert:
            yield {n.removeprefix(prefix): n for n in dense}
            return
    shapes = [*dict.fromkeys(dense.values())]
    wanted = [n for shape in shapes for n in expert if expert[n] == shape]
    for way in product(*(permutations(n for n in dense if dense[n] == shape) for shape in shapes)):
        yield dict(zip(wanted, chain(*way), strict=True))


def _plan(
    dense: nn.Module,
    sparse: nn.Module,
    layers: Sequence[ExpertLayer],
    operator: Experts,
    way: int,
    side: Literal["out", "in"] = "out",
) -> Plan:
    """The plan of these layers; every entry is made here.

    side: of a buffer that balances experts: copied, or divided among the copies, as a softmax divides their scores.
    """
    ours, router = {**naming.buffers(dense), **naming.parameters(dense)}, operator.router
    sources, shared = dict[str, TensorSource](), dict[str, int]()
    for layer in layers:
        old = set() if layer.routers else {*layer.copies[way].values()}  # of experts that there were, one is no copy
        for name, source in layer.copies[way].items():
            sources[name] = TensorSource(source) if source in old else TensorSource(source, "expert", operator.fresh)
            old.discard(source)
            shared[name] = layer.times
        sources |= {name: TensorSource(like, router) for name, like in layer.routers.items()}
    parameters, buffers = naming.parameters(sparse), naming.buffers(sparse)
    tied = {group[0]: group for group in naming.aliases(naming.unwrap(sparse).named_parameters(remove_duplicate=False))}

    def entries(tensors: Mapping[str, Tensor], side: Literal["out", "in"] = "out") -> dict[str, Entry]:
        made = {}
        for name, tensor in tensors.items():
            source = sources.get(name, TensorSource(name))
            if source.name in ours:  # a buffer of the router's own is not
                narrow, wide = tuple(ours[source.name].shape), tuple(tensor.shape)
                more = source.is_taken and _differ_in_rows(narrow, wide)  # of routers, stacks, and a router's buffers
                axes = {0: Axis(_whole_times(name, narrow[0], wide[0]), side=side)} if more else {}
                constants, names = Constants(depth=shared.get(name, 1)), tied.get(name, (name,))
                made[name] = Entry(narrow, wide, axes, constants, names, source)
        return made

    made = entries(parameters)
    noisy = {n for n, e in made.items() if e.source.kind == "expert" or (e.axes and len(e.wide) > 2)}
    spread = {
        n: Initial(None if p.is_meta else float(p.detach().std(correction=0)) if n in noisy else 0.0)
        for n, p in parameters.items()
    }
    return Plan(made, entries(buffers, side), spread)


@torch.no_grad()
def _telling_balances(dense: nn.Module, plan: Plan, inputs: Any) -> list[float]:
    """How large the buffers of routers are on both sides of every change in which experts the batch chooses; and 0."""
    model, batch = in_float64(dense, inputs, generic=0)
    found = {0.0}
    for sign in (1, -1):
        last = None
        for before, balance in pairwise((0.0, *_BALANCES)):
            _set_balance(model, plan, sign * balance)
            output = next(filter(Tensor.is_floating_point, tensors_in(run_in_float64(model, batch))))
            if last is not None and not distance(last, output) <= SAME:
                found |= {sign * before, sign * balance}
            last = output
    return sorted(found)


def _set_balance(model: nn.Module, plan: Plan, balance: float) -> None:
    """Make the buffers of routers that grow as large as this, other for each expert."""
    for name, entry in plan.buffers.items():
        if entry.axes and balance:
            buffer = naming.buffers(model)[plan.sources[name].name]
            buffer.copy_(torch.linspace(-balance, balance, buffer.numel()).reshape(buffer.shape))


def _try(
    dense: nn.Module, sparse: nn.Module, plan: Plan, inputs: Any, balance: float = 0.0
) -> tuple[str, dict[str, int]]:
    """Why copies by this plan do not compute what the dense model does, in words; of each copy, how many are active.

    On copies of both models, with generic weights in the dense one. balance: how large the buffers of routers are.
    """
    generic, batch = in_float64(dense, inputs, generic=0)
    _set_balance(generic, plan, balance)
    whole = {n: replace(e, source=replace(e.source, value=0.0)) for n, e in plan.parameters.items()}
    small, large, batch = grown_in_float64(generic, sparse, replace(plan, parameters=whole), batch, Copies())
    outputs = [next(filter(Tensor.is_floating_point, tensors_in(run_in_float64(m, batch)))) for m in (small, large)]
    far = distance(*outputs)
    if not far <= SAME:
        return f"the larger model with copies differs in its outputs by {far:.1g} of their size. {_NEEDED}", {}
    weights = torch.linspace(-1, 1, outputs[0].numel(), dtype=torch.float64).reshape(outputs[0].shape)
    for output in outputs:
        (output * weights.to(output.device)).sum().backward()
    before, after = naming.parameters(small), naming.parameters(large)
    more = all(source.is_taken for source in plan.sources.values())
    sums, active = {n: torch.zeros_like(p) for n, p in before.items()}, dict.fromkeys(before, 0)
    for name, entry in plan.parameters.items():
        gradient, source = after[name].grad, plan.sources[name]
        if source.is_taken and gradient is not None and (own := before[source.name].grad) is not None:
            if more and not (far := distance(entry.widened(own, factor=entry.rule.gradient()), gradient)) <= SAME:
                return f"copies of '{source.name}' do not share its gradient equally (by {far:.1g}). {_NEEDED}", {}
            copies = gradient.unflatten(0, (-1, entry.axes[0].copies)).sum(1) if 0 in entry.axes else gradient
            each = copies.reshape(-1, *before[source.name].shape)
            sums[source.name] += each.sum(0)
            active[source.name] += int((each.flatten(1).abs().amax(1) > SAME * each.abs().max()).sum())
    for name, p in before.items():
        if p.grad is not None and not (far := distance(p.grad, sums[name])) <= SAME:
            return f"the gradients of the copies of '{name}' sum to another than its own, by {far:.1g} of its size", {}
    return "", {n: max(1, active[s.name]) for n, s in plan.sources.items() if s.kind == "expert"}
