"""MLPs as tensor programs: trained under μP, upscaled in the middle, at any width or at infinity.

h¹ = U ξ, hˡ⁺¹ = Wˡ φ(hˡ), y = ⟨A φ(hᴸ)⟩; every weight is its initial value, the noise of upscalings, and its updates.
The whole run is lifted to n·k units from the start, as in the paper: until an upscaling the copies of a unit are equal.
Fresh units are another population, which is there from its growth on (docs/theory-fresh.md).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mupscale.system import Diverged, MupscaleError, Must, NotNegative, Positive, checks_arguments
from mupscale.theory.program import Matrix, Program, Rows

State = dict[str, Tensor]
"""What an optimizer remembers of a weight, of its shape."""


class Entrywise(ABC):
    """From a gradient, and what was remembered of earlier ones, to what is subtracted, times the learning rate."""

    def __call__(self, gradient: Tensor, state: State, step: int) -> Tensor:
        return _check_shape(self.update(gradient, state, step), gradient, "the optimizer")

    @abstractmethod
    def update(self, gradient: Tensor, state: State, step: int) -> Tensor:
        """Entry by entry; `state` is empty at step 1 and may be written to."""

    degrees: ClassVar[Mapping[str, int]] = {}
    """With which power of the gradient each part of the state goes."""

    def grow(self, state: State, times: float, zeros: tuple[int, ...]) -> State:
        """The state beside fresh units: that of old entries stays what it is in a gradient's own units, others are 0.

        times: by how much more the gradient is multiplied from now on. zeros: as for torch's pad.
        """
        if unknown := state.keys() - self.degrees.keys():
            raise MupscaleError(
                f"'{min(unknown)}' of {type(self).__name__} cannot be grown: say in its class variable `degrees` with "
                f"which power of the gradient it goes"
            )
        return {key: pad(times ** self.degrees[key] * value, zeros) for key, value in state.items()}


@dataclass(frozen=True)
class Momentum(Entrywise):
    """v ← momentum · v + g, and the update is `of` v: itself (SGD), or any function of one number."""

    degrees: ClassVar = {"velocity": 1}
    momentum: float = 0.0
    of: Callable[[Tensor], Tensor] | None = None

    def update(self, gradient: Tensor, state: State, step: int) -> Tensor:
        """SGD as torch has it, without dampening."""
        if self.momentum:
            gradient = state["velocity"] = gradient + self.momentum * state["velocity"] if state else gradient
        if self.of is None:
            return gradient
        return self.of(gradient.clone() if self.momentum else gradient)  # which may work in place


@checks_arguments
@dataclass(frozen=True)
class Sign:
    """g / (|g| + ε), the sign made Lipschitz."""

    eps: Positive = 0.1

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient / (gradient.abs() + self.eps)


@checks_arguments
@dataclass(frozen=True)
class Adam(Entrywise):
    """Adam, running averages and bias correction included; ε, in units of n · gradient, keeps it Lipschitz."""

    degrees: ClassVar = {"first": 1, "second": 2}
    beta1: float = 0.9
    beta2: float = 0.999
    eps: Positive = 0.1

    def update(self, gradient: Tensor, state: State, step: int) -> Tensor:
        """As torch.optim.Adam."""
        first, second = state.get("first"), state.get("second")
        new, square = (1 - self.beta1) * gradient, (1 - self.beta2) * gradient * gradient
        state["first"] = first = new if first is None else new.add_(first, alpha=self.beta1)
        state["second"] = second = square if second is None else square.add_(second, alpha=self.beta2)
        size = (second / (1 - self.beta2**step)).sqrt_().add_(self.eps)
        return first / size / (1 - self.beta1**step)


def _check_shape(result: Tensor, given: Tensor, what: str) -> Tensor:
    if result.shape != given.shape:
        raise MupscaleError(
            f"{what} returned shape {tuple(result.shape)} for {tuple(given.shape)}; it must act entry by entry"
        )
    return result


# ---------------------------------------------------------------------------------------- weights

_ENTRIES = 1 << 28  # of a matrix of all pairs of entries, at most


class OuterProducts:
    """The sum of a matrix's updates under SGD with momentum: Σ cₛ leftₛ rightₛᵀ, two vectors a step and input.

    In units of 1/(nk). The velocity is made of the same vectors, with coefficients of its own.
    """

    def __init__(self, program: Program, momentum: float) -> None:
        self.program, self.momentum = program, momentum
        size = program.units * program.k
        self.left, self.right = Rows(size, program), Rows(size, program)
        self.weight = self.velocity = torch.zeros(0, device=program.device, dtype=program.dtype)

    def times(self, x: Tensor, transposed: bool) -> Tensor:
        """Avg and OuterNonlin with r = 0: rank by rank."""
        left, right = (self.right.rows, self.left.rows) if transposed else (self.left.rows, self.right.rows)
        met = self.program.weigh(x).reshape(len(x), -1) @ right.T
        return (met * self.weight @ left).reshape(x.shape)

    def step(self, left: Tensor, right: Tensor, lr: float) -> None:
        """One update: coefficients change, and what is new is kept. nk times the gradient is Σ leftᵢ rightᵢᵀ."""
        new = self.weight.new_ones(len(left))
        self.velocity = torch.cat([self.momentum * self.velocity, new])
        self.weight = torch.cat([self.weight, 0 * new]) - lr * self.velocity
        self.left.add(left.reshape(len(left), -1))
        self.right.add(right.reshape(len(right), -1))

    def grow(self, times: float) -> None:
        """Vectors of the past have no new units; those of the left side, which are gradients, are in units of 1/n."""
        size = self.program.units * self.program.k
        self.left.lengthen(size, times)
        self.right.lengthen(size)


class Entries:
    """Numbers that an entrywise optimizer trains, with what it remembers of each."""

    def __init__(self, values: Tensor, optimizer: Entrywise) -> None:
        self.values, self.optimizer = values, optimizer
        self.state, self.steps = State(), 0

    def update(self, gradient: Tensor, lr: float) -> None:
        self.steps += 1
        self.values.sub_(self.optimizer(gradient, self.state, self.steps), alpha=lr)

    def extend(self, zeros: tuple[int, ...], kept: float, gradient: float) -> None:
        """Add entries of 0 (as for torch's pad), and multiply the old ones, and gradients from now on, by these."""
        self.values = pad(kept * self.values, zeros)
        self.state = self.optimizer.grow(self.state, gradient, zeros)


class Pairs(Entries):
    """The sum of a matrix's updates under any entrywise optimizer: OuterNonlin with r = 1 of all vectors of the past.

    ψ, in units of 1/(nk), is kept for every pair (α, β). Time and memory are of order (samples·k)², for each step and
    not for each product.
    """

    def __init__(self, program: Program, optimizer: Entrywise) -> None:
        size = _affordable_size(program)
        super().__init__(torch.zeros(size, size, device=program.device, dtype=program.dtype), optimizer)
        self.program = program

    def times(self, x: Tensor, transposed: bool) -> Tensor:
        """⟨ψ_αβ x_β⟩ over β."""
        flat = self.program.weigh(x).reshape(len(x), -1)
        return (flat @ (self.values if transposed else self.values.T)).reshape(x.shape)

    def step(self, left: Tensor, right: Tensor, lr: float) -> None:
        self.update(left.reshape(len(left), -1).T @ right.reshape(len(right), -1), lr)

    def grow(self, times: float) -> None:
        """Old pairs keep what they have; pairs with a new unit start at zero, and so does their optimizer state."""
        new = _affordable_size(self.program) - len(self.values)
        self.extend((0, new, 0, new), times, times)


def _affordable_size(program: Program) -> int:
    """The entries of a vector, if a matrix of all their pairs can be kept."""
    size = program.units * program.k
    if size**2 > _ENTRIES:
        raise MupscaleError(
            f"an entrywise optimizer keeps a number for every pair of {size} entries (units or samples × copies), "
            f"and {math.isqrt(_ENTRIES)} entries are the most; take fewer of them, and more seeds"
        )
    return size


class OuterLayer(Entries):
    """The input or the readout: a vector of the width for each feature or output."""

    def __init__(self, program: Program, sigma: float, count: int, optimizer: Entrywise, *, is_readout: bool) -> None:
        super().__init__(sigma * program.vector(program.k, count), optimizer)
        self.program, self.sigma, self.is_readout = program, sigma, is_readout

    def perturb(self, std: float, copies: int) -> None:
        """Add entries N(0, std²), duplicated for upscalings to come."""
        if std:
            self.values = self.values + std * self.program.vector(copies, len(self.values))

    def grow(self, times: float, copies: int, new: range, outgoing: float) -> None:
        """Draw entries of new units. A readout is in units of 1/N, and so is every gradient but the readout's own."""
        scale, kept, gradient = (outgoing, times, 1.0) if self.is_readout else (1.0, 1.0, times)
        self.extend((0, 0, 0, len(new)), kept, gradient)
        drawn = scale * self.sigma * self.program.vector(copies, len(self.values), of=new)
        self.values[:, new.start : new.stop] = drawn


class HiddenLayer:
    """A hidden matrix: Gaussian matrices, and the sum of its updates."""

    def __init__(self, program: Program, sigma: float, updates: OuterProducts | Pairs | None) -> None:
        self.program, self.sigma, self.updates = program, sigma, updates
        self.parts: list[tuple[float, Matrix]] = []
        self.perturb(sigma, program.k)

    def perturb(self, std: float, copies: int, out: range | None = None, in_: range | None = None) -> None:
        """Entries N(0, std²/N) more, N the width so far, duplicated for upscalings to come: the start, and noise."""
        if std:
            scale = std / (copies * math.sqrt(self.program.distinct(copies)))
            self.parts.append((scale, self.program.matrix(copies, out, in_)))

    def grow(self, times: float, copies: int, new: range, outgoing: float) -> None:
        """Draw three of the four blocks at the wide width; from old to old units nothing changes."""
        if self.updates is not None:
            self.updates.grow(times)
        self.perturb(self.sigma, copies, out=new)
        self.perturb(outgoing * self.sigma, copies, out=range(new.start), in_=new)

    def times(self, x: Tensor, *, transposed: bool = False) -> Tensor:
        total = torch.zeros_like(x) if self.updates is None else self.updates.times(x, transposed)
        for scale, matrix in self.parts:
            total = total + scale * matrix.times(x, transposed=transposed)
        return total


# ---------------------------------------------------------------------------------------- what is trained, and how

Loss = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets, both inputs × outputs, to one number."""

Function = Annotated[
    Callable[[Tensor], Tensor],
    Must("a function of a tensor, such as Sign()", lambda value: not isinstance(value, type)),
]


def _are_levels(value: float | Sequence[float] | Tensor) -> bool:
    levels = torch.as_tensor(value, dtype=torch.float64)
    return bool((levels.isfinite() & (levels >= 0)).all())


PerLayer = Annotated[
    float | Sequence[float] | Tensor,
    Must("standard deviations, 0 or more and finite, one or one per layer", _are_levels),
]
"""One number for all layers, or one for each, from the input to the readout; arrays will do."""


def per_layer(value: PerLayer, layers: int, what: str) -> list[float]:
    levels = torch.as_tensor(value, dtype=torch.float64)
    if levels.dim() and levels.shape != (layers,):
        shape = str(len(levels)) if levels.dim() == 1 else f"an array of shape {tuple(levels.shape)}"
        raise MupscaleError(f"{what} is one number or {layers}, one for each layer, not {shape}")
    return [float(level) for level in levels.expand(layers)]


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(-1).mean()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda h: h,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
}


@checks_arguments
@dataclass(frozen=True)
class Stage:
    """`steps` updates at one learning rate, and the upscaling that comes before them.

    times: how many copies of each unit the upscaling makes. noise: σ̄_Δ, one number for all layers or one for each, from
    the input to the readout. The paper's 'upscale at step T' is a first stage of T − 1 updates.
    how: "copies", or "fresh" for units drawn beside the old ones, with `outgoing` as in `mupscale.Fresh`; `times` may
    then be any number.

    >>> Stage(5, 0.5, times=1.5, how="fresh", outgoing=0.5).copies
    1
    """

    steps: Annotated[int, Must("a whole number, 0 or more", lambda value: value >= 0)]
    lr: NotNegative
    times: Annotated[float, Must("1 or more, and finite", lambda value: 1 <= value < math.inf)] = 1
    noise: PerLayer = 0.0
    how: Literal["copies", "fresh"] = "copies"
    outgoing: Annotated[float, Must("a number between 0 and 1", lambda value: 0 <= value <= 1)] = 1.0

    def __post_init__(self) -> None:
        if self.how == "copies" and self.times != int(self.times):
            raise MupscaleError(
                f"copies make a network a whole number of times wider, not {self.times}: how='fresh' can"
            )
        if self.how == "fresh" and self.has_noise:
            raise MupscaleError(f"noise is for copies: fresh units take none, and noise={self.noise} was given")

    @property
    def has_noise(self) -> bool:
        """Whether any layer gets noise."""
        return bool(torch.as_tensor(self.noise).any())

    @property
    def copies(self) -> int:
        """How many copies of each unit it makes."""
        return int(self.times) if self.how == "copies" else 1


def count_copies(stages: Sequence[Stage]) -> int:
    """k: how many copies of a unit there are in the end."""
    return math.prod(stage.copies for stage in stages)


def mask_separated_copies(stages: Sequence[Stage]) -> Tensor:
    """A k × k mask of the pairs of copies that the first upscaling separates; later ones separate those between."""
    k, first = count_copies(stages), next((stage.copies for stage in stages if stage.copies > 1), 1)
    group = torch.arange(k) // (k // first)
    return group[:, None] != group


@checks_arguments
@dataclass(frozen=True)
class MLPSetup:
    """An MLP of `layers` weight layers, and how it is trained.

    activation: one of ACTIVATIONS, or any function of a tensor. sigma: std of the initial weights (σ̄), one number or
    one for each layer. trained: which layers learn, all by default. momentum: of SGD, carried through upscalings.
    entrywise: an optimizer that acts on every entry of n·gradient; None is SGD. It is a function such as Sign (of the
    velocity where there is momentum) or an object such as Adam. A step then costs of order (samples·k)².

    >>> MLPSetup(layers=4, activation="relu", trained=[False, True, True, False]).momentum
    0.0
    """

    layers: Annotated[
        int, Must("a whole number, 2 or more: an input, a readout, and what is between", lambda value: value > 1)
    ] = 3
    activation: str | Function = "tanh"
    sigma: PerLayer = 1.0
    trained: Sequence[bool] | None = None
    momentum: float = 0.0
    loss: Loss = squared_error
    entrywise: Entrywise | Function | None = None

    def __post_init__(self) -> None:
        if isinstance(self.activation, str) and self.activation not in ACTIVATIONS:
            raise MupscaleError(f"'{self.activation}' is no activation known here: {', '.join(ACTIVATIONS)} are")
        if self.trained is not None and len(self.trained) != self.layers:
            raise MupscaleError(
                f"trained says of {len(self.trained)} layers whether they learn, and there are {self.layers}"
            )
        if isinstance(self.entrywise, Entrywise) and self.momentum:
            raise MupscaleError(f"{type(self.entrywise).__name__} has its own memory: leave momentum out")
        per_layer(self.sigma, self.layers, "sigma")

    def activate(self, h: Tensor) -> Tensor:
        phi = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        return _check_shape(phi(h.clone()), h, "the activation")

    def slope(self, h: Tensor) -> Tensor:
        at = h.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.activate(at).sum(), at)[0]

    @property
    def optimizer(self) -> Entrywise:
        return self.entrywise if isinstance(self.entrywise, Entrywise) else Momentum(self.momentum, self.entrywise)


@dataclass(frozen=True)
class Run:
    """What was measured in a run: before every step and after the last.

    outputs: times × inputs × outputs; losses; kernels: of the last hidden layer's preactivations, inputs × k × k;
    hidden: the last hidden layer's preactivations at the end, inputs × units × k; shares: of these units of the width.
    upscaled: the times of upscalings.
    """

    outputs: Tensor
    losses: Tensor
    kernels: Tensor
    hidden: Tensor
    shares: Tensor
    upscaled: tuple[int, ...]


@torch.no_grad()
def run(program: Program, mlp: MLPSetup, inputs: Tensor, targets: Tensor, stages: Sequence[Stage]) -> Run:
    """Train an MLP on these inputs (batch × features) and targets (batch × outputs) through all stages.

    >>> from mupscale.theory import Limit
    >>> x, y = torch.eye(2), torch.ones(2, 1)
    >>> stages = [Stage(steps=2, lr=0.5), Stage(steps=1, lr=0.5, times=2, noise=0.5)]
    >>> result = run(Limit(500, k=2), MLPSetup(3, "tanh"), x, y, stages)
    >>> result.outputs.shape, result.upscaled, bool(result.losses[-1] < result.losses[0])
    (torch.Size([4, 2, 1]), (2,), True)
    """
    inputs, targets = (t.to(program.device, program.dtype) for t in (inputs, targets))
    if inputs.dim() != 2 or targets.dim() != 2 or len(inputs) != len(targets):
        raise MupscaleError(
            f"inputs and targets are batch × features and batch × outputs, not {tuple(inputs.shape)} and "
            f"{tuple(targets.shape)}"
        )
    if (k := count_copies(stages)) != program.k:
        raise MupscaleError(f"the upscalings make {k} copies of a unit, and the program has {program.k}: give it k={k}")
    net = Network(program, mlp, inputs.shape[1], targets.shape[1])
    outputs, losses, kernels, upscaled = list[Tensor](), list[Tensor](), list[Tensor](), list[int]()

    def evaluate() -> Tensor:
        outputs.append(net.forward(inputs))
        slope, loss = _loss(mlp, outputs[-1], targets)
        if not torch.isfinite(loss):
            raise Diverged(
                f"training has diverged: the loss is not finite after {len(losses)} updates; take a smaller learning "
                f"rate"
            )
        losses.append(loss)
        kernels.append(program.kernel(net.h[-1]))
        return slope

    for stage in stages:
        if stage.times != 1 or stage.has_noise:
            upscaled.append(len(outputs))
            if stage.how == "fresh":
                net.grow(stage.times, stage.outgoing)
            else:
                net.upscale(stage.copies, stage.noise)
        for _ in range(stage.steps):
            net.step(evaluate(), stage.lr)
    evaluate()
    y, loss, kernel = map(torch.stack, (outputs, losses, kernels))
    return Run(y, loss, kernel, net.h[-1], program.shares.flatten(), tuple(upscaled))


def _loss(mlp: MLPSetup, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    y = outputs.detach().requires_grad_()
    with torch.enable_grad():
        loss = mlp.loss(y, targets)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise MupscaleError(f"the loss is one number for the batch that depends on the outputs, not {kind}")
        (slope,) = torch.autograd.grad(loss, y)
    return slope, loss.detach()


class Network:
    """An MLP in the middle of its training; each layer has its power of n (μP) built in."""

    def __init__(self, program: Program, mlp: MLPSetup, features: int, outputs: int) -> None:
        self.program, self.mlp = program, mlp
        self.equal = program.k  # copies of a unit that are still equal
        self.trained = list(mlp.trained or [True] * mlp.layers)
        sigma = per_layer(mlp.sigma, mlp.layers, "sigma")
        self.input = OuterLayer(program, sigma[0], features, mlp.optimizer, is_readout=False)
        self.readout = OuterLayer(program, sigma[-1], outputs, mlp.optimizer, is_readout=True)
        self.hidden = list[HiddenLayer]()
        for i in range(1, mlp.layers - 1):
            updates: OuterProducts | Pairs | None = None
            if self.trained[i]:
                is_sgd = mlp.entrywise is None
                updates = OuterProducts(program, mlp.momentum) if is_sgd else Pairs(program, mlp.optimizer)
            self.hidden.append(HiddenLayer(program, sigma[i], updates))

    def upscale(self, times: int, noise: PerLayer) -> None:
        """Step 2 of Meta-algorithm 'Upscaling procedure': noise on every weight; the copies are there already."""
        if self.equal % times:
            raise MupscaleError(f"{self.equal} equal copies of a unit cannot be told apart {times} ways")
        self.equal //= times
        first, *middle, last = per_layer(noise, self.mlp.layers, "noise")
        for layer, std in zip(self._layers(), (first, last, *middle), strict=True):
            layer.perturb(std, self.equal)

    def grow(self, times: float, outgoing: float) -> None:
        """Growth by fresh units as `mupscale.Fresh` does it: what leads from old to old units stays, the rest is drawn.

        The readout and all gradients are in units of 1/N, and N is `times` what it was: old ones are `times` theirs.
        """
        new = self.program.grow(times)
        for layer in self._layers():
            layer.grow(times, self.equal, new, outgoing)

    def _layers(self) -> Iterator[OuterLayer | HiddenLayer]:
        """In the order in which random numbers are drawn for them."""
        yield from (self.input, self.readout)
        yield from self.hidden

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs, batch × outputs; preactivations h and activations x are kept."""
        self.inputs, self.h = inputs, [torch.einsum("bf,fuk->buk", inputs, self.input.values)]
        self.x = [self.mlp.activate(self.h[0])]
        for layer in self.hidden:
            self.h.append(layer.times(self.x[-1]))
            self.x.append(self.mlp.activate(self.h[-1]))
        return self.program.inner(self.x[-1], self.readout.values)

    def step(self, slope: Tensor, lr: float) -> None:
        """Backpropagation of dL/dy from the last forward pass, and one update of every trained layer."""
        lowest = self.trained.index(True) if any(self.trained) else self.mlp.layers
        back = torch.einsum("bo,ouk->buk", slope, self.readout.values)
        deltas: dict[int, Tensor] = {}
        for number in range(len(self.hidden), lowest - 1, -1):
            deltas[number] = back * self.mlp.slope(self.h[number])
            if number > lowest:
                back = self.hidden[number - 1].times(deltas[number], transposed=True)
        if self.trained[0]:
            self.input.update(torch.einsum("bf,buk->fuk", self.inputs, deltas[0]), lr)
        if self.trained[-1]:
            self.readout.update(torch.einsum("bo,buk->ouk", slope, self.x[-1]), lr)
        for number, layer in enumerate(self.hidden, start=1):
            if layer.updates is not None:
                layer.updates.step(deltas[number], self.x[number - 1], lr)
