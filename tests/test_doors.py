"""What the API is given at its doors: a wrong type is refused in a sentence, whichever function it is given to."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn, optim

import mupscale as mu
from mupscale.models import GPT2, MLP

pytest.importorskip("transformers")
from mupscale import hf
from refusals import refuses

X = torch.randn(4, 3)
CLASSES = (
    mu.Copies,
    mu.Family,
    mu.Fresh,
    mu.GaussianNoise,
    mu.Identity,
    mu.SignalNoise,
    mu.Stack,
    hf.Clip,
    hf.BranchTrainerCallback,
    hf.GrowTrainerCallback,
)


class Stranger:
    """No argument of anything."""


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every function of the two faces, and every constructor and public method of the classes that people make."""
    for face in (mu, hf):
        for name in face.__all__:
            if inspect.isfunction(getattr(face, name)):
                yield f"{face.__name__}.{name}", getattr(face, name)
    for cls in CLASSES:
        for name, method in vars(cls).items():
            if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
                yield f"{cls.__name__}.{name}", method


def is_checked(hint: Any) -> bool:
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return Any not in alternatives and object not in alternatives


PUBLIC = dict(public())


def sample(hint: Any) -> Any:
    """A value that its hint takes."""
    while get_origin(hint) in (Union, types.UnionType, Annotated, type):
        if get_origin(hint) is type:
            return get_args(hint)[0]
        hint = get_args(hint)[0]
    for kind, value in {Mapping: {}, Sequence: [], Iterable: [], Callable: print, tuple: ()}.items():
        if get_origin(hint) is kind:
            return value
    plain: dict[Any, Any] = {nn.Module: nn.Linear(1, 1), mu.Plan: mu.Plan({}), str: "x", int: 1, float: 1.0}
    plain |= {Tensor: torch.ones(1), optim.Optimizer: optim.SGD([torch.ones(1)])}
    return plain[hint] if hint in plain else object.__new__(hint) if isinstance(hint, type) else None


@pytest.mark.parametrize("label", PUBLIC)
def test_every_argument_of_a_public_function_is_checked(label: str) -> None:
    function, hints = PUBLIC[label], get_type_hints(PUBLIC[label], include_extras=True)
    parameters = inspect.signature(function).parameters
    for wrong in [name for name in parameters if name in hints and is_checked(hints[name])]:
        positional, named = [], {}
        for name, parameter in parameters.items():
            is_needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            value = Stranger() if name == wrong else sample(hints.get(name)) if is_needed else parameter.default
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            elif name == wrong or is_needed:
                named["more" if parameter.kind is parameter.VAR_KEYWORD else name] = value
        refuses(r"is a Stranger, but must be", function, *positional, **named)


FAMILY = mu.Family(lambda width: MLP(3, width, 5), 8)
SIZED = mu.Family(lambda width, layers: GPT2(11, 8, width=width, head_dim=4, layers=layers), {"width": 8, "layers": 1})


@pytest.fixture(scope="module")
def pair() -> tuple[MLP, MLP, optim.Optimizer]:
    narrow = MLP(3, 8, 5)
    return narrow, MLP(3, 16, 5), optim.AdamW(narrow.parameters(), lr=0.1)


MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "grow by a word": (
        lambda n, w, o: mu.upscale(n, w, grow="fresh"),
        r"grow= is 'fresh', but must be an operator of width \(mupscale.Copies\(\) or mupscale.Fresh\(\)\), an ",
    ),
    "an operator's class": (
        lambda n, w, o: mu.plan(n, w, grow=mu.Fresh),
        "is the class Fresh, but must be an operator",
    ),
    "an operator of depth": (lambda n, w, o: mu.upscale(n, w, grow=mu.Stack()), "only the width grows"),
    "one to a family": (
        lambda n, w, o: FAMILY.upscale(n, width=16, grow=mu.Stack()),
        r"only the width grows.*no new blocks for Stack",
    ),
    "one to a family that has a depth": (
        lambda n, w, o: SIZED.upscale(SIZED.init({"width": 8, "layers": 1}), width=16, grow=mu.Identity()),
        r"only the width grows.*no new blocks for Identity",
    ),
    "and for a plan": (lambda n, w, o: mu.plan(n, w, grow=mu.Stack()), "operator of width.*mupscale.upscale"),
    "an operator of width": (
        lambda n, w, o: mu.plan_depth(n, w, grow=mu.Fresh()),
        "operator of depth .*; say how new units are filled in mupscale.upscale",
    ),
    "no narrow model": (
        lambda n, w, o: mu.upscale(None, w, exact=True),
        r"narrow= is None, but must be a model \(an nn.Module\)",
    ),
    "no deep model": (lambda n, w, o: mu.plan_depth(n, None), "deep= is None, but must be a model"),
    "a state dict": (
        lambda n, w, o: mu.upscale(n.state_dict(), w, exact=True),
        "narrow= is an OrderedDict.*load_state_dict",
    ),
    "a number": (lambda n, w, o: mu.plan(n, 32), r"Net\(32\); to grow by a number alone.*width=32"),
    "a schedule's name": (
        lambda n, w, o: mu.upscale(n, w, None, o, scheduler="cosine", exact=True),
        r"scheduler= is 'cosine'.*CosineAnnealingLR\(optimizer, T_max=…\)",
    ),
    "a rate alone": (lambda n, w, o: mu.upscale(n, w, lr=0.1, exact=True), "lr= needs an optimizer"),
    "a family's": (lambda n, w, o: FAMILY.upscale(n, width=16, lr=0.1, exact=True), "lr= needs an optimizer"),
    "a rate in quotes": (
        lambda n, w, o: mu.upscale(n, w, None, o, lr="0.1", exact=True),
        "lr= is '0.1'.*without quotes",
    ),
    "an optimizer's class": (
        lambda n, w, o: mu.upscale(n, w, None, optim.SGD, exact=True),
        r"SGD\(model.parameters\(\), lr=…\)",
    ),
    "an optimizer for its class": (
        lambda n, w, o: mu.make_optimizer(w, mu.plan(n, w), o),
        "is an AdamW, but must be the class of an optimizer.*pass torch.optim.AdamW itself",
    ),
    "an optimizer's state": (
        lambda n, w, o: mu.upscale(n, w, None, o.state_dict(), exact=True),
        "load the state dict into",
    ),
    "a role's name": (lambda n, w, o: mu.plan(n, w, roles={"*": "out"}), r"roles\['\*'\] is 'out'.*a mupscale.Role"),
    "a model for a family": (lambda n, w, o: mu.Family(n, 8), "a function that builds a model; .*lambda width"),
    "a letter for a list": (
        lambda n, w, o: mu.register_optimizer(optim.SGD, eps="eps"),
        "eps= is 'eps', but must be a list",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_common_mistakes_are_told_with_the_remedy(mistake: str, pair: Any) -> None:
    call, said = MISTAKES[mistake]
    refuses(said, call, *pair)


@pytest.mark.parametrize(
    "lr", [math.nan, math.inf, -1, "0.1", True, torch.tensor([0.1, 0.2]), torch.tensor(-1.0)], ids=str
)
def test_a_rate_is_a_number_that_can_be_one(lr: Any, pair: Any) -> None:
    narrow, wide, optimizer = pair
    plan = mu.plan(narrow, wide)
    groups = [{"params": [name], "lr": lr} for name in plan.parameters]
    for call in (
        lambda: mu.upscale(narrow, wide, plan, optimizer, lr=lr, exact=True),
        lambda: FAMILY.upscale(narrow, optimizer, width=16, lr=lr, exact=True),
        lambda: FAMILY.optimizer(narrow, optim.AdamW, lr=lr),
        lambda: mu.param_groups(wide, plan, optim.AdamW, lr=lr),
        lambda: mu.param_groups(wide, plan, optim.AdamW, groups=groups, lr=0.1),
        lambda: mu.per_group(optimizer, lr),
    ):
        refuses(r"lr= is .* but must be a number that is finite and 0 or more", call)
    assert mu.upscale(narrow, wide, plan, optimizer, lr=torch.tensor(0.5), exact=True)[1].param_groups[0]["lr"] == 0.5


def test_what_an_optimizer_refuses_is_passed_on(pair: Any) -> None:
    narrow, wide, _ = pair
    with pytest.raises(mu.MupscaleError, match=r"AdamW does not take these hyperparameters: .*beta") as refused:
        mu.make_optimizer(wide, mu.plan(narrow, wide), optim.AdamW, lr=0.1, betas=(2.0, 2.0))
    assert isinstance(refused.value.__cause__, ValueError)
