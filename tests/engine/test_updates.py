"""One update of many models, held against torch.optim: a model and a parameter group at a time."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from mupscale.engine import NotStackable
from mupscale.engine.replicas import (
    Hyperparameters,
    Segment,
    StackOptimizer,
    clip_rows,
    find_stack_optimizer,
    merge_segments,
)

SIZES = (5, 1, 7)  # columns of three parameters
SEGMENTS = [
    Segment(slice(0, 5), lr=1.0, weight_decay=1.0, eps=1.0, norm=1.0),
    Segment(slice(5, 6), lr=0.25, weight_decay=4.0, eps=0.5, norm=3.0),
    Segment(slice(6, 13), lr=2.0, weight_decay=0.5, eps=0.125, norm=0.5),
]
PER_RUN = ("lr", "weight_decay", "eps")
TOLERANCE = 1e-13

positive = st.floats(1e-4, 0.5)
rows = st.lists(st.tuples(positive, st.sampled_from([0.0, 0.1, 0.7]), st.floats(1e-3, 0.5)), min_size=1, max_size=4)
momenta = st.fixed_dictionaries(
    {"momentum": st.sampled_from([0.0, 0.5, 0.9]), "dampening": st.sampled_from([0.0, 0.3]), "nesterov": st.booleans()}
).filter(lambda h: not h["nesterov"] or (h["momentum"] and not h["dampening"]))
adams = st.fixed_dictionaries(
    {"betas": st.tuples(st.floats(0.0, 0.95), st.floats(0.5, 0.999)), "amsgrad": st.booleans()}
)
optimizers = st.one_of(
    st.tuples(st.just(SGD), momenta),
    st.tuples(st.sampled_from([Adam, AdamW]), adams),
    st.tuples(st.just(Adam), adams.map(lambda h: {**h, "decoupled_weight_decay": True})),
)


def made_by_torch(cls: type[Optimizer], hyper: dict[str, Any], own: tuple[float, ...], start: Tensor) -> Any:
    """One model as torch trains it: a parameter group for each segment."""
    params = [nn.Parameter(part.clone()) for part in start.split(SIZES)]
    known = [name for name in PER_RUN if not (cls is SGD and name == "eps")]
    groups = [
        {"params": [p], **{name: own[PER_RUN.index(name)] * getattr(segment, name) for name in known}}
        for p, segment in zip(params, SEGMENTS, strict=True)
    ]
    return params, cls(groups, **hyper)


def stacked(
    kind: StackOptimizer, own: list[tuple[float, ...]], like: Tensor
) -> tuple[Hyperparameters, dict[str, Tensor], Tensor]:
    columns = [torch.tensor(values, dtype=torch.float64).unsqueeze(1) for values in zip(*own, strict=True)]
    state = {name: torch.zeros_like(like) for name in kind.state}
    return Hyperparameters(*columns, shared=kind.shared), state, torch.zeros(len(own), 1, dtype=torch.float64)


@settings(max_examples=60)
@given(chosen=optimizers, own=rows, seed=st.integers(0, 99), fused=st.booleans(), late=st.booleans())
def test_an_update_of_many_is_torchs_of_each(
    chosen: Any, own: list[tuple[float, ...]], seed: int, fused: bool, late: bool
) -> None:
    """Models with rates, decays and eps of their own, the same steps; parameters and all state agree.

    Every other one may begin later, as those do that start from a checkpoint: bias correction and the first momentum
    are each one's own.
    """
    cls, hyper = chosen
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(len(own), sum(SIZES), generator=generator, dtype=torch.float64)
    theirs = [made_by_torch(cls, hyper, values, start) for values, start in zip(own, p, strict=True)]
    kind = find_stack_optimizer(
        cls, {**theirs[0][1].param_groups[0], "weight_decay": any(decay for _, decay, _ in own)}
    )
    ours, state, step = stacked(kind, own, p)
    for number in range(6):
        gradient = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        active = [row for row in range(len(own)) if number >= 3 or not (late and row % 2)]
        for params, optimizer, each in ((*theirs[row], gradient[row]) for row in active):
            for param, part in zip(params, each.split(SIZES), strict=True):
                param.grad = part.clone()
            optimizer.step()
        step[active] += 1
        some, held = p[active], {name: matrix[active] for name, matrix in state.items()}
        segments = merge_segments(SEGMENTS, p) if fused else SEGMENTS
        kind.update(some, gradient[active], held, step[active], ours.rows(active), segments)
        p[active] = some
        for name, matrix in held.items():
            state[name][active] = matrix
    for row, (params, optimizer) in enumerate(theirs):
        assert (torch.cat([param.detach() for param in params]) - p[row]).abs().max() <= TOLERANCE
        for name, matrix in state.items():
            kept = torch.cat([optimizer.state[param][name] for param in params])
            assert (kept - matrix[row]).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, name) for cls in (Adam, AdamW, SGD) for name in PER_RUN if (cls, name) != (SGD, "eps")]
)
def test_a_wrong_factor_of_a_single_column_would_show(cls: type[Optimizer], name: str) -> None:
    own, start = [(0.1, 0.3, 0.2)], torch.linspace(-1, 1, sum(SIZES), dtype=torch.float64)
    kind = find_stack_optimizer(
        cls, {**cls([nn.Parameter(torch.zeros(1))], lr=0.1).param_groups[0], "weight_decay": True}
    )
    made = []
    for factor in (1.0, 1.0001):
        wrong = Segment(**{**vars(SEGMENTS[1]), name: getattr(SEGMENTS[1], name) * factor})
        p = start.clone().unsqueeze(0)
        hyper, state, step = stacked(kind, own, p)
        for _ in range(3):
            step += 1
            kind.update(p, torch.ones_like(p), state, step, hyper, [SEGMENTS[0], wrong, SEGMENTS[2]])
        made.append(p)
    assert (made[0] - made[1]).abs().max() > 1e6 * TOLERANCE


@settings(max_examples=30)
@given(largest=st.floats(0.01, 20), seed=st.integers(0, 99))
def test_clipping_is_torchs_row_by_row(largest: float, seed: int) -> None:
    """A segment's weight in the norm is as if its gradients were larger by its root."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(3, sum(SIZES), generator=generator, dtype=torch.float64) * torch.tensor([[0.1], [1.0], [9.0]])
    expected = []
    for row in g:
        params = [nn.Parameter(part.clone()) for part in row.split(SIZES)]
        for param, part, segment in zip(params, row.split(SIZES), SEGMENTS, strict=True):
            param.grad = part * segment.norm**0.5
        norm = nn.utils.clip_grad_norm_(params, largest)
        gradients = [p.grad / s.norm**0.5 for p, s in zip(params, SEGMENTS, strict=True) if p.grad is not None]
        expected.append((norm, torch.cat(gradients)))
    norms = clip_rows(g, largest, SEGMENTS)
    for row, (norm, gradient) in enumerate(expected):
        assert abs(norms[row] - norm) <= TOLERANCE * norm
        assert (g[row] - gradient).abs().max() <= TOLERANCE * max(1.0, norm)


@pytest.mark.parametrize(
    ("cls", "hyper", "said"),
    [
        (RMSprop, {}, "RMSprop is not (SGD, Adam and AdamW are)"),
        (SGD, {"maximize": True}, "maximize is not"),
        (Adam, {"differentiable": True}, "differentiable is not"),
        (type("Mine", (AdamW,), {}), {}, "Mine is not"),
    ],
)
def test_what_a_stack_cannot_take_is_said(cls: type[Optimizer], hyper: dict[str, Any], said: str) -> None:
    """A subclass may do anything, so it is not taken for what it is a subclass of."""
    group = cls([nn.Parameter(torch.zeros(1))], lr=0.1, **hyper).param_groups[0]
    with pytest.raises(NotStackable, match=rf"^{re.escape(said)}.* among what can train as one program$"):
        find_stack_optimizer(cls, group)
