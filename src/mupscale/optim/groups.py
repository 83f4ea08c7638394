"""Parameter groups that carry μP and widening.

No optimizer is subclassed: everything is expressed in ordinary torch parameter groups.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Entry, Plan, RuleSet, decay_change, is_sharded, naming
from mupscale.optim.optimizer_traits import Hyper, Traits, default_hyper, scale
from mupscale.optim.registration import traits_of
from mupscale.system import MupscaleError, NotNegative, check_argument, checks_arguments, warn

FROM_GROUP = "from_group"
"""Key of a widened group that says which of the narrow optimizer's groups it comes from."""

RATE_CHANGE = "lr_change"
"""Key of a widened group whose learning rate was replaced: by what it was multiplied beside its rule."""

NORM_FACTOR = "norm_factor"
"""Key of a group that says with which weight the squares of its gradients enter a norm that no width changes.

Whatever optimizer it is, no group has parameters of different weights: it is what SGD's learning rate is multiplied by,
and the ratio of Adam's factors for rate and eps."""

DECAY_RULE = "decay_rule"
"""Key of a group whose decay follows the width otherwise than copies need: the rule's name, by which it grows on."""

DECAY_CHANGE = "weight_decay_change"
"""Key of such a group: by what its decay differs so far from the one with which copies are exact."""

FOLLOW_LR = ("initial_lr", "max_lr", "min_lr", "swa_lr")
"""Keys of a group that torch's schedulers leave there: learning rates, too."""


class GroupBuilder:
    """Collects parameters into groups with equal hyperparameters."""

    def __init__(self, traits: Traits, embeddings: Mapping[str, float] | None = None) -> None:
        """embeddings: by name, factors of rates that no rule knows."""
        self.traits, self.rates = traits, embeddings or {}
        self._shown_factors = ("lr", traits.decay, "eps")
        self.by_key: dict[Any, dict[str, Any]] = {}
        self.changes: dict[tuple[str, float], list[str]] = {}

    def add(self, name: str, p: nn.Parameter, entry: Entry, shown: Hyper, complete: Hyper) -> None:
        """Put the parameter into its group.

        shown: the hyperparameters that the group states. complete: these and the optimizer's defaults, which may decide
        how they scale.
        """
        self._check(name, entry, complete)
        complete = self.traits.implicit(complete, p)
        factors = {n: factor(entry, complete) for n, factor in self.traits.hyper.items() if n in complete}
        total = {}
        decay = self.traits.decay
        if shown.get(DECAY_RULE) and decay in factors:
            change = change_of_decay(name, entry, complete, self.traits)
            if complete.get(decay):
                self.changes.setdefault((complete[DECAY_RULE], change), []).append(name)
            factors[decay] = factors[decay] * change
            total[DECAY_CHANGE] = shown.get(DECAY_CHANGE, 1.0) * change
        if name in self.rates:
            factors["lr"] = factors["lr"] * self.rates[name]
        follow = {n: factors["lr"] for n in FOLLOW_LR if n in shown}
        shown_factors = {NORM_FACTOR, DECAY_CHANGE, *(f"{n}_factor" for n in self._shown_factors)}
        before = {n: v for n, v in shown.items() if n not in shown_factors}
        if "eps" in before:
            before["eps"] = complete["eps"]
        values = tuple((n, v if _is_hashable(v) else id(v)) for n, v in sorted(before.items()))
        earlier = {n: shown.get(f"{n}_factor", 1.0) for n in self._shown_factors if n in factors}
        total |= {f"{n}_factor": scale(factors[n], factor) for n, factor in earlier.items()}
        total[NORM_FACTOR] = shown.get(NORM_FACTOR, 1.0) * entry.rule.norm(2.0)
        key = (values, tuple(sorted(factors.items())), tuple(total.items()))
        if key not in self.by_key:
            scaled = {n: scale(v, {**factors, **follow}.get(n, 1.0)) for n, v in before.items()}
            self.by_key[key] = {"params": [], **scaled, **total}
        self.by_key[key]["params"].append((name, p))

    def _check(self, name: str, entry: Entry, complete: Hyper) -> None:
        """Refuse a parameter that this optimizer cannot train at another width as it does at this one."""
        if self.traits.matrices_only and len(entry.narrow) != 2:
            raise MupscaleError(
                f"Muon is for matrices, and '{name}' has shape {entry.wide}; give it a different optimizer (groups=), "
                "or use mupscale.optim.MuonAdamW, which uses AdamW for the rest"
            )
        if entry.shift and complete.get(self.traits.decay):
            raise MupscaleError(
                f"'{name}' is stored without the {entry.offset} that the model adds to it, so weight decay pulls it to "
                "different values in the two models. Give it a group with weight_decay=0 (groups=; "
                "mupscale.hf.decay_groups makes such groups of a Hugging Face model)"
            )
        if entry.shift and self.traits.by_size:
            raise MupscaleError(
                f"'{name}' is stored without the {entry.offset} that the model adds to it, and this optimizer's step "
                "depends on the size of the stored values, which differs in the wide model. Use AdamW"
            )

    def warn_of_inexact_decay(self) -> None:
        """Where copies of what was added do not go on exactly, since its decay follows another rule."""
        if told := inexact_in_words(self.changes):
            warn(told)

    def groups(self) -> list[dict[str, Any]]:
        """The groups, in the order in which their first parameters were added."""
        return list(self.by_key.values())


def change_of_decay(name: str, entry: Entry, hyper: Hyper, traits: Traits) -> float:
    """By what a decay differs from the one with which copies are exact, as the rule among the hyperparameters says."""
    if not traits.decoupled(hyper):
        if not hyper.get(traits.decay):
            return 1.0
        raise MupscaleError(
            f"decay={hyper[DECAY_RULE]} is a rule for decoupled weight decay, and this optimizer adds the decay of "
            f"'{name}' to its gradient. Use AdamW, or decay=invariant"
        )
    constants = entry.constants
    in_width = entry.with_constants(fold=constants.fold / constants.residual, depth=1)
    return decay_change(hyper[DECAY_RULE], float(traits.hyper["lr"](in_width, hyper)), entry.rule.in_)


def inexact_in_words(changes: Mapping[tuple[str, float], Sequence[str]]) -> str:
    """What rules for weight decay do to copies; changes: the names of parameters, by rule and by what decay changes."""
    told = [
        f"{change:.4g} times what that needs for '{names[0]}'" + f" and {len(names) - 1} more" * (len(names) > 1)
        for (_, change), names in changes.items()
        if not math.isclose(change, 1.0)
    ]
    rules = "/".join(dict.fromkeys(rule for rule, _ in changes))
    needs = f"with decay={rules} copies do not go on exactly as the narrow model: weight decay is {', '.join(told)}"
    return f"{needs}. For exact copies use decay=invariant" if told else ""


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return not isinstance(value, Tensor)


@checks_arguments
def param_groups(
    model: nn.Module,
    plan: Plan,
    optimizer: type[Optimizer],
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    rules: RuleSet | None = None,
    **hyper: Any,
) -> list[dict[str, Any]]:
    """Parameter groups for `optimizer` at the plan's wide width; hyperparameters are those of the narrow one.

    groups: the user's own groups, as for torch (`[{"params": decay, "weight_decay": 0.1}, {"params": rest}]`), where
    a parameter may also be given by name. Every group comes back with `lr_factor`, `weight_decay_factor` and
    `eps_factor`, for code that sets absolute values, and with `norm_factor`, by which `clip_grad_norm_` goes.
    rules: other choices for weight decay and the embeddings' rate than those with which copies are exact. Groups
    remember them, and grow by them.

    >>> import mupscale as mu
    >>> narrow, wide = nn.Linear(8, 8, bias=False), nn.Linear(32, 32, bias=False)
    >>> plan = mu.plan(narrow, wide)
    >>> (group,) = mu.param_groups(wide, plan, torch.optim.AdamW, lr=0.1, weight_decay=0.01)
    >>> group["lr"], group["weight_decay"], group["lr_factor"]
    (0.025, 0.04, 0.25)
    """
    traits = traits_of(optimizer).at(plan)
    parameters = plan.check(model)
    defaults = default_hyper(optimizer, hyper)
    chosen = rules or RuleSet()
    if chosen.decay != "invariant":
        hyper = {DECAY_RULE: chosen.decay, **hyper}
    names: list[str] = []
    if chosen.embeddings != 1:
        tables = [m.weight for m in naming.unwrap(model).modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        held = {id(weight) for weight in tables}
        names = [name for name, p in naming.parameters(model).items() if id(p) in held]
        if not names:
            raise MupscaleError(
                "rules: embeddings is a factor for the rate of nn.Embedding, of which this model has none. Leave it "
                "out, or give your own groups (groups=)"
            )
    builder = GroupBuilder(traits, dict.fromkeys(names, chosen.embeddings))
    for group in groups if groups is not None else [{"params": list(parameters)}]:
        stated = {**hyper, **{k: v for k, v in group.items() if k not in ("params", "param_names")}}
        complete = {**defaults, **stated}
        for name in traits.hyper.keys() & stated.keys():  # torch looks at its defaults alone
            for number in stated[name] if isinstance(stated[name], tuple | list) else (stated[name],):
                check_argument(NotNegative | None, number, f"{optimizer.__name__}: {name}=")
        traits.check(complete)
        missing = [n for n in traits.hyper if n in defaults and complete[n] is inspect.Parameter.empty]
        if missing:
            raise MupscaleError(f"{optimizer.__name__} needs {', '.join(missing)}: pass {missing[0]}=…")
        shown = {k: complete[k] for k in complete if k in stated or k in traits.hyper}
        for name in _names_of(group["params"], plan, parameters):
            builder.add(name, parameters[name], plan.parameters[name], shown, complete)
    return builder.groups()


@checks_arguments
def make_optimizer(
    model: nn.Module,
    plan: Plan,
    optimizer: type[Optimizer],
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    rules: RuleSet | None = None,
    **hyper: Any,
) -> Optimizer:
    """The optimizer itself, built from param_groups.

    >>> import mupscale as mu
    >>> narrow, wide = nn.Linear(8, 8, bias=False), nn.Linear(32, 32, bias=False)
    >>> plan = mu.plan(narrow, wide)
    >>> mu.make_optimizer(wide, plan, torch.optim.Adam, lr=0.1).param_groups[0]["lr"]
    0.025
    """
    made = param_groups(model, plan, optimizer, groups=groups, rules=rules, **hyper)
    try:
        return optimizer(made, **hyper)
    except (TypeError, ValueError) as error:
        raise MupscaleError(f"{optimizer.__name__} does not take these hyperparameters: {error}") from error


def grown_groups(
    optimizer: Optimizer,
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan,
    lr: float | None = None,
    *,
    copies: bool = False,
) -> list[dict[str, Any]]:
    """The narrow optimizer's groups as they are now, for the wide model; `lr` (at lr_factor 1) replaces today's rate.

    Groups that have learning rates of their own keep their ratio to the first one's (`rate_shares`).

    copies: whether the wide model is made of copies, which a rule for weight decay may keep from going on exactly: then
    there is a warning.

    Every parameter is in the group of the one that it is made of. Where one parameter becomes several, as with more
    blocks, a group has them in the wide model's order, as one who builds an optimizer for it would: a saved state that
    goes by numbers fits.
    """
    names: dict[int, list[str]] = {}
    for name, p in plan.check(narrow, "narrow").items():
        names.setdefault(id(p), []).append(name)
    parameters, builder = plan.check(wide), GroupBuilder(traits_of(type(optimizer)).at(plan))
    for number, group in enumerate(optimizer.param_groups):
        hyper = {k: v for k, v in group.items() if k not in ("params", "param_names", RATE_CHANGE)}
        hyper[FROM_GROUP] = number
        for p in group["params"]:
            if id(p) not in names:
                whole = [n for n, q in naming.parameters(narrow).items() if q.shape == p.shape and not is_sharded(q)]
                if is_sharded(p) and whole:
                    raise MupscaleError(
                        f"the optimizer holds sharded parameters, and '{whole[0]}' of the model that is to grow is not "
                        "sharded now. FSDP2 leaves parameters of the outermost module so after a forward pass without "
                        "a backward pass. Call model.reshard() on that model, and then grow the optimizer"
                    )
                raise MupscaleError(
                    f"the optimizer holds a parameter of shape {tuple(p.shape)} that is not the narrow model's. Pass "
                    "the model that the optimizer was built for"
                )
            for name in names[id(p)]:
                builder.add(name, parameters[name], plan.parameters[name], hyper, hyper)
    if copies:
        builder.warn_of_inexact_decay()
    grown, order = builder.groups(), {name: number for number, name in enumerate(parameters)}
    shares = rate_shares(optimizer.param_groups)
    for group in grown:
        if len(names) < len(parameters):
            group["params"].sort(key=lambda named: order[named[0]])
        if lr is not None:
            before, group["lr"] = float(group["lr"]), scale(lr * shares[group[FROM_GROUP]], group["lr_factor"])
            group[RATE_CHANGE] = float(group["lr"]) / before if before else math.inf if group["lr"] else 1.0
            group.pop("initial_lr", None)  # a new scheduler begins at today's rate
            group |= {key: scale(group[key], group[RATE_CHANGE]) for key in FOLLOW_LR if key in group}
    return grown


@contextmanager
def following_rules(optimizer: Optimizer | None, rules: RuleSet) -> Iterator[None]:
    """Inside, an optimizer's groups grow by these rules; afterwards they are as they were.

    Groups that have rules keep them where these are the usual ones, and others are an error.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    added = groups_by_rules(groups, rules)
    for group, more in zip(groups, added, strict=True):
        group |= more
    try:
        yield
    finally:
        for group, more in zip(groups, added, strict=True):
            for key in more:
                group.pop(key, None)


def groups_by_rules(groups: Sequence[Hyper], rules: RuleSet) -> list[dict[str, Any]]:
    """What each of an optimizer's groups needs beside its own values to grow by these rules.

    Groups that follow another rule for decay are an error. The embeddings' rate is set when an optimizer is made, and
    a growth keeps it: one that was made without rules is told so.

    >>> groups_by_rules([{"lr": 0.1}, {"lr": 0.1, "decay_rule": "fixed"}], RuleSet(decay="fixed"))
    [{'decay_rule': 'fixed'}, {}]
    """
    if rules.embeddings != 1 and any("lr_factor" not in group for group in groups):
        warn(
            f"rules: embeddings={rules.embeddings:g} counts when an optimizer is made, and this one was made without "
            "it: its embeddings keep the rate that they have. Make it with family.optimizer or "
            "mupscale.make_optimizer(…, rules=…), or give the embeddings a group of their own"
        )
    if rules.decay == "invariant":
        return [{} for _ in groups]
    for group in groups:
        if group.get(DECAY_RULE, rules.decay) != rules.decay:
            raise MupscaleError(
                f"this optimizer's groups grow by decay={group[DECAY_RULE]}, and the rules given now say "
                f"decay={rules.decay}: give the rules that it was made with, or make another optimizer"
            )
    return [{} if DECAY_RULE in group else {DECAY_RULE: rules.decay} for group in groups]


@checks_arguments
def per_group(optimizer: Optimizer, lr: NotNegative) -> list[float]:
    """A learning rate at lr_factor 1 as one absolute rate per group, for schedulers that take lists of rates.

    Groups that have learning rates of their own keep their ratio to the first one's.

    >>> import mupscale as mu
    >>> narrow, wide = nn.Linear(3, 8), nn.Linear(3, 32)
    >>> optimizer = mu.make_optimizer(wide, mu.plan(narrow, wide), torch.optim.SGD, lr=0.1)
    >>> mu.per_group(optimizer, 0.5)  # for OneCycleLR(optimizer, max_lr=...)
    [2.0]
    """
    groups = optimizer.param_groups
    return [lr * share * group.get("lr_factor", 1.0) for share, group in zip(rate_shares(groups), groups, strict=True)]


def rate_shares(groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """Each group's learning rate at lr_factor 1, as a multiple of the first one's that is not 0.

    Where a schedule has brought all of them to 0, the rates that it began with tell.
    """
    for key in ("lr", "initial_lr"):
        rates = [float(group.get(key, 0.0)) / group.get("lr_factor", 1.0) for group in groups]
        if first := next((rate for rate in rates if rate), 0.0):
            return [1.0 if math.isclose(rate, first) else rate / first for rate in rates]
    return [1.0] * len(groups)


def _names_of(params: Any, plan: Plan, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    by_identity = {id(p): name for name, p in parameters.items()}
    names = []
    for item in [params] if isinstance(params, Tensor | str) else params:
        tensor = item[1] if isinstance(item, tuple) else item
        name = plan.names.get(naming.canonical(tensor)) if isinstance(tensor, str) else by_identity.get(id(tensor))
        if name is None or name not in parameters:
            raise MupscaleError(
                f"groups: {tensor if isinstance(tensor, str) else 'a tensor'} is not a parameter of the model"
            )
        names.append(name)
    return names


def recognise_optimizer(state: Set[str], hyper: Mapping[str, Any], where: object) -> type[Optimizer]:
    """The optimizer of torch that keeps such state and has such hyperparameters; Adam and AdamW differ in a flag.

    where: what they were read from, for the error.
    """
    names = hyper.keys() - _LEFT_BY_OTHERS
    every = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, Optimizer)]
    first = sorted({*every} - {Optimizer}, key=lambda cls: (cls is not torch.optim.AdamW, cls.__name__))  # of several
    own = {cls: default_hyper(cls, {}).keys() for cls in first if _may_keep(cls, state)}
    own = {cls: known for cls, known in own.items() if len(names - known) <= _STRANGE}
    nearest = min(own, key=lambda cls: (len(names - own[cls]), len(own[cls] - names)), default=None)
    if nearest is None:
        raise MupscaleError(
            f"the library cannot tell which optimizer wrote {where} from its state "
            f"({', '.join(sorted(state)) or 'there is none'}) and hyperparameters ({', '.join(sorted(names))}): "
            "only those of torch.optim that follow the width are known, and AdamW is the usual one"
        )
    if nearest is torch.optim.AdamW and not hyper.get("decoupled_weight_decay", True):
        return torch.optim.Adam
    return nearest


_LEFT_BY_OTHERS = {"initial_lr", "lr_factor", "weight_decay_factor", "eps_factor", "norm_factor", "from_group"}
_LEFT_BY_OTHERS |= {"decay_rule", "weight_decay_change"}
_KEPT_BY_OTHERS = {"step", "exp_avg", "exp_avg_sq", "func_evals", "n_iter", "d", "t", "old_dirs", "old_stps", "ro"}
_KEPT_BY_OTHERS |= {"H_diag", "prev_flat_grad", "prev_loss", "al"}  # by RAdam and LBFGS
_STRANGE = 2  # hyperparameters that another version may have and this one lacks


def _may_keep(cls: type[Optimizer], state: Set[str]) -> bool:
    """Whether the class has such state; one that cannot follow the width may be it, too, and says why it cannot."""
    try:
        own = traits_of(cls)
    except MupscaleError:
        return bool(state) and state <= _KEPT_BY_OTHERS
    return bool(state) and state <= {*own.state, *own.as_is}
