"""MLPs as tensor programs: trained under μP, upscaled in the middle, at any width or at infinity.

h¹ = U ξ, hˡ⁺¹ = Wˡ φ(hˡ), y = ⟨A φ(hᴸ)⟩; every weight is its initial value, the noise of upscalings, and its updates.
The whole run is lifted to n·k units from the start, as in the paper: until an upscaling the copies of a unit are equal.
Fresh units are another population, which is there from its growth on (docs/theory-fresh.md).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mupscale.system import Diverged, MupscaleError
from mupscale.theory.backends import DenseMatrix, Rows
from mupscale.theory.program import Matrix, Program

State = dict[str, Tensor]
"""What an optimizer remembers of a weight, of its shape."""


class Entrywise(ABC):
    """From a gradient, and what was remembered of earlier ones, to what is subtracted, times the learning rate."""

    def __call__(self, gradient: Tensor, state: State, step: int) -> Tensor:
        """The update, if it is one for every entry."""
        update = self.update(gradient, state, step)
        if update.shape != gradient.shape:
            raise MupscaleError(
                f"the optimizer returned shape {tuple(update.shape)} for a gradient of {tuple(gradient.shape)}; it "
                f"must act entry by entry"
            )
        return update

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


@dataclass(frozen=True)
class Sign:
    """g / (|g| + ε), the sign made Lipschitz."""

    eps: float = 0.1

    def __post_init__(self) -> None:
        _check_positive(self.eps)

    def __call__(self, gradient: Tensor) -> Tensor:
        """The function itself."""
        return gradient / (gradient.abs() + self.eps)


@dataclass(frozen=True)
class Adam(Entrywise):
    """Adam, running averages and bias correction included; ε, in units of n · gradient, keeps it Lipschitz."""

    degrees: ClassVar = {"first": 1, "second": 2}
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 0.1

    def __post_init__(self) -> None:
        _check_positive(self.eps)

    def update(self, gradient: Tensor, state: State, step: int) -> Tensor:
        """As torch.optim.Adam."""
        first, second = state.get("first"), state.get("second")
        new, square = (1 - self.beta1) * gradient, (1 - self.beta2) * gradient * gradient
        state["first"] = first = new if first is None else new.add_(first, alpha=self.beta1)
        state["second"] = second = square if second is None else square.add_(second, alpha=self.beta2)
        size = (second / (1 - self.beta2**step)).sqrt_().add_(self.eps)
        return first / size / (1 - self.beta1**step)


def _check_positive(eps: float) -> None:
    if not eps > 0:
        raise MupscaleError(f"ε must be above 0, not {eps}: without it the update is no pseudo-Lipschitz function")


_ENTRIES = 1 << 28  # of a matrix of all pairs of entries, at most


class Updates(ABC):
    """The sum of a matrix's updates, in units of 1/(nk)."""

    @abstractmethod
    def times(self, x: Tensor, transposed: bool) -> Tensor:
        """It, or its transpose, times a batch."""

    @abstractmethod
    def step(self, left: Tensor, right: Tensor, lr: float) -> None:
        """One update; nk times the gradient is the sum of leftᵢ rightᵢᵀ over the batch."""

    @abstractmethod
    def grow(self, times: float) -> None:
        """Follow a program that has grown: old entries stay, so they are `times` as many units of 1/(nk); new are 0."""

    @abstractmethod
    def full(self) -> Tensor:
        """All nk × nk entries."""


class OuterProductUpdates(Updates):
    """Under SGD with momentum: Σ cₛ leftₛ rightₛᵀ, memory for two vectors a step and input.

    The velocity is made of the same vectors, with coefficients of its own.
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
        """Coefficients change; what is new is kept."""
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

    def full(self) -> Tensor:
        """The sum of the outer products."""
        return self.left.rows.T * self.weight @ self.right.rows / self.left.rows.shape[1]


class EntrywiseUpdates(Updates):
    """Under any entrywise optimizer: OuterNonlin with r = 1 of all vectors of the past, ψ kept for every pair (α, β).

    Time and memory are of order (samples·k)², for each step and not for each product.
    """

    def __init__(self, program: Program, optimizer: Entrywise) -> None:
        size = _affordable_size(program)
        self.program, self.optimizer, self.state, self.count = program, optimizer, State(), 0
        self.entries = torch.zeros(size, size, device=program.device, dtype=program.dtype)

    def times(self, x: Tensor, transposed: bool) -> Tensor:
        """⟨ψ_αβ x_β⟩ over β."""
        flat = self.program.weigh(x).reshape(len(x), -1)
        return (flat @ (self.entries if transposed else self.entries.T)).reshape(x.shape)

    def step(self, left: Tensor, right: Tensor, lr: float) -> None:
        """The optimizer sees every pair's gradient."""
        self.count += 1
        gradient = left.reshape(len(left), -1).T @ right.reshape(len(right), -1)
        self.entries.sub_(self.optimizer(gradient, self.state, self.count), alpha=lr)

    def grow(self, times: float) -> None:
        """Old pairs keep what they have; pairs with a new unit start at zero, and so does their optimizer state."""
        new = _affordable_size(self.program) - len(self.entries)
        self.entries = pad(times * self.entries, (0, new, 0, new))
        self.state = self.optimizer.grow(self.state, times, (0, new, 0, new))

    def full(self) -> Tensor:
        """As a matrix of the network."""
        return self.entries / len(self.entries)


def _affordable_size(program: Program) -> int:
    """The entries of a vector, if a matrix of all their pairs can be kept."""
    size = program.units * program.k
    if size**2 > _ENTRIES:
        raise MupscaleError(
            f"an entrywise optimizer keeps a number for every pair of {size} entries (units or samples × copies), "
            f"and {math.isqrt(_ENTRIES)} entries are the most; take fewer of them, and more seeds"
        )
    return size


class HiddenWeight:
    """A hidden matrix."""

    def __init__(self, program: Program, sigma: float, updates: Updates | None) -> None:
        self.program, self.updates = program, updates
        self.parts: list[tuple[float, Matrix]] = []
        self.perturb(sigma, program.k)

    def perturb(self, std: float, copies: int, out: range | None = None, in_: range | None = None) -> None:
        """Entries N(0, std²/N) more, N the width so far, duplicated for upscalings to come: the start, and noise."""
        if std:
            scale = std / (copies * math.sqrt(self.program.distinct(copies)))
            self.parts.append((scale, self.program.matrix(copies, out, in_)))

    def grow(self, times: float, std: float, copies: int, new: range, outgoing: float) -> None:
        """Draw three of the four blocks at the wide width; from old to old units nothing changes."""
        if self.updates is not None:
            self.updates.grow(times)
        self.perturb(std, copies, out=new)
        self.perturb(outgoing * std, copies, out=range(new.start), in_=new)

    def times(self, x: Tensor, *, transposed: bool = False) -> Tensor:
        """It, or its transpose, times a batch."""
        total = torch.zeros_like(x) if self.updates is None else self.updates.times(x, transposed)
        for scale, matrix in self.parts:
            total = total + scale * matrix.times(x, transposed=transposed)
        return total

    def full(self) -> Tensor:
        """All entries, where its matrices have them."""
        size = self.program.units * self.program.k
        total = torch.zeros(size, size, device=self.program.device, dtype=self.program.dtype)
        for scale, matrix in self.parts:
            if not isinstance(matrix, DenseMatrix):
                raise MupscaleError("only networks with real matrices have weights to show: take Finite(n, k) as it is")
            total += scale * matrix.full()
        return total if self.updates is None else total + self.updates.full()


Loss = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets, both inputs × outputs, to one number."""

Function = Callable[[Tensor], Tensor]

PerLayer = float | Sequence[float] | Tensor
"""One number for all layers, or one for each, from the input to the readout; arrays will do."""


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error, averaged over inputs."""
    return 0.5 * (outputs - targets).square().sum(-1).mean()


@dataclass(frozen=True)
class Activation:
    """A nonlinearity and its derivative, which is found by autograd where it is not given; they may work in place."""

    value: Function
    slope: Function | None = None

    def __call__(self, h: Tensor) -> Tensor:
        """φ(h)."""
        return self.value(h.clone())

    def derivative(self, h: Tensor) -> Tensor:
        """φ′(h)."""
        if self.slope is not None:
            return self.slope(h.clone())
        at = h.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self(at).sum(), at)[0]


def _gelu_slope(h: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(h / math.sqrt(2))) + h * torch.exp(-h.square() / 2) / math.sqrt(2 * math.pi)


ACTIVATIONS = {
    "linear": Activation(lambda h: h, torch.ones_like),
    "relu": Activation(torch.relu, lambda h: (h > 0).to(h.dtype)),
    "tanh": Activation(torch.tanh, lambda h: 1 - torch.tanh(h).square()),
    "gelu": Activation(torch.nn.functional.gelu, _gelu_slope),
}


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

    steps: int
    lr: float
    times: float = 1
    noise: PerLayer = 0.0
    how: Literal["copies", "fresh"] = "copies"
    outgoing: float = 1.0

    def __post_init__(self) -> None:
        if self.how not in ("copies", "fresh"):
            raise MupscaleError(f"a stage grows by 'copies' or by 'fresh' units, not by {self.how!r}")
        fresh = self.how == "fresh"
        whole = isinstance(self.steps, Integral) and (fresh or isinstance(self.times, Integral))
        if not whole or self.steps < 0 or not 1 <= self.times < math.inf:
            raise MupscaleError(
                f"a stage has 0 steps or more and widens 1 time or more, in whole numbers, not {self.steps} and "
                f"{self.times}" + (" (fresh units: any finite number of times)" if fresh else "")
            )
        if not 0 <= self.outgoing <= 1:
            raise MupscaleError(f"outgoing is a number between 0 and 1, not {self.outgoing}")
        if not 0 <= self.lr < math.inf:
            raise MupscaleError(f"a learning rate is 0 or more, and finite, not {self.lr}")
        _check_not_negative(self.noise, "noise")
        if fresh and self.noise:
            raise MupscaleError(f"noise is for copies: fresh units take none, and noise={self.noise} was given")

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

    layers: int = 3
    activation: str | Activation | Function = "tanh"
    sigma: PerLayer = 1.0
    trained: Sequence[bool] | None = None
    momentum: float = 0.0
    loss: Loss = squared_error
    entrywise: Entrywise | Function | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Integral) or self.layers < 2:
            raise MupscaleError(
                f"an MLP has an input and a readout layer and more between them, not {self.layers} layers"
            )
        if isinstance(self.activation, str) and self.activation not in ACTIVATIONS:
            raise MupscaleError(f"'{self.activation}' is no activation known here: {', '.join(ACTIVATIONS)} are")
        if self.trained is not None and len(self.trained) != self.layers:
            raise MupscaleError(
                f"trained says of {len(self.trained)} layers whether they learn, and there are {self.layers}"
            )
        if isinstance(self.entrywise, type) or not (self.entrywise is None or callable(self.entrywise)):
            name = self.entrywise.__name__ if isinstance(self.entrywise, type) else repr(self.entrywise)
            raise MupscaleError(
                f"entrywise is a function of a gradient's entries or an object, such as mupscale.theory.Sign() and "
                f"mupscale.theory.Adam(), and None is SGD; {name} is neither"
            )
        if isinstance(self.entrywise, Entrywise) and self.momentum:
            raise MupscaleError(f"{type(self.entrywise).__name__} has its own memory: leave momentum out")
        _per_layer(self.sigma, self.layers, "sigma")
        _check_not_negative(self.sigma, "sigma")

    @property
    def phi(self) -> Activation:
        """The activation with its derivative."""
        if isinstance(self.activation, str):
            return ACTIVATIONS[self.activation]
        return self.activation if isinstance(self.activation, Activation) else Activation(self.activation)

    @property
    def optimizer(self) -> Entrywise:
        """What acts on every entry."""
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
        if stage.times != 1 or any(_per_layer(stage.noise, mlp.layers, "noise")):
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
    """dL/dy and L."""
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
        self.program, self.mlp, self.phi = program, mlp, mlp.phi
        self.equal = program.k  # copies of a unit that are still equal
        self.trained = list(mlp.trained or [True] * mlp.layers)
        self.sigma = sigma = _per_layer(mlp.sigma, mlp.layers, "sigma")
        self.input = sigma[0] * program.vector(program.k, features)
        self.readout = sigma[-1] * program.vector(program.k, outputs)
        self.hidden = [self._make_weight(layer, sigma[layer]) for layer in range(1, mlp.layers - 1)]
        self._state: tuple[State, State] = ({}, {})
        self._steps = 0

    def _make_weight(self, layer: int, sigma: float) -> HiddenWeight:
        if not self.trained[layer]:
            return HiddenWeight(self.program, sigma, None)
        sgd = self.mlp.entrywise is None
        updates = (
            OuterProductUpdates(self.program, self.mlp.momentum)
            if sgd
            else EntrywiseUpdates(self.program, self.mlp.optimizer)
        )
        return HiddenWeight(self.program, sigma, updates)

    def upscale(self, times: int, noise: PerLayer) -> None:
        """Step 2 of Meta-algorithm 'Upscaling procedure': noise on every weight; the copies are there already."""
        if self.equal % times:
            raise MupscaleError(f"{self.equal} equal copies of a unit cannot be told apart {times} ways")
        self.equal //= times
        std = _per_layer(noise, self.mlp.layers, "noise")
        if std[0]:
            self.input = self.input + std[0] * self.program.vector(self.equal, len(self.input))
        if std[-1]:
            self.readout = self.readout + std[-1] * self.program.vector(self.equal, len(self.readout))
        for weight, level in zip(self.hidden, std[1:-1], strict=True):
            weight.perturb(level, self.equal)

    def grow(self, times: float, outgoing: float) -> None:
        """Growth by fresh units as `mupscale.Fresh` does it: what leads from old to old units stays, the rest is drawn.

        The readout and all gradients are in units of 1/N, and N is `times` what it was: old ones are `times` theirs.
        """
        new = self.program.grow(times)
        fresh = self.sigma[0] * self.program.vector(self.equal, len(self.input), of=new)
        self.input = torch.cat([self.input, fresh], 1)
        fresh = outgoing * self.sigma[-1] * self.program.vector(self.equal, len(self.readout), of=new)
        self.readout = torch.cat([times * self.readout, fresh], 1)
        for weight, std in zip(self.hidden, self.sigma[1:-1], strict=True):
            weight.grow(times, std, self.equal, new, outgoing)
        grown, zeros = self.mlp.optimizer.grow, (0, 0, 0, len(new))
        self._state = (
            grown(self._state[0], times, zeros),
            grown(self._state[1], 1, zeros),
        )  # the readout's gradient is its own

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs, batch × outputs; preactivations h and activations x are kept."""
        self.inputs, self.h = inputs, [torch.einsum("bf,fuk->buk", inputs, self.input)]
        self.x = [self._activated(self.h[0])]
        for weight in self.hidden:
            self.h.append(weight.times(self.x[-1]))
            self.x.append(self._activated(self.h[-1]))
        return self.program.inner(self.x[-1], self.readout)

    def step(self, slope: Tensor, lr: float) -> None:
        """Backpropagation of dL/dy from the last forward pass, and one update of every trained layer."""
        self._steps += 1
        lowest = self.trained.index(True) if any(self.trained) else self.mlp.layers
        back = torch.einsum("bo,ouk->buk", slope, self.readout)
        deltas: dict[int, Tensor] = {}
        for layer in range(len(self.hidden), lowest - 1, -1):
            deltas[layer] = back * self.phi.derivative(self.h[layer])
            if layer > lowest:
                back = self.hidden[layer - 1].times(deltas[layer], transposed=True)
        if self.trained[0]:
            self.input = self.input - lr * self._update(0, torch.einsum("bf,buk->fuk", self.inputs, deltas[0]))
        if self.trained[-1]:
            self.readout = self.readout - lr * self._update(1, torch.einsum("bo,buk->ouk", slope, self.x[-1]))
        for layer, weight in enumerate(self.hidden, start=1):
            if weight.updates is not None:
                weight.updates.step(deltas[layer], self.x[layer - 1], lr)

    def weights(self) -> list[Tensor]:
        """The weights of the nn.Linear layers that this is, the readout's with its 1/(nk); for real matrices alone."""
        size = self.program.units * self.program.k
        readout = self.readout.reshape(len(self.readout), -1) / size
        return [self.input.reshape(len(self.input), -1).T, *(weight.full() for weight in self.hidden), readout]

    def _update(self, which: int, gradient: Tensor) -> Tensor:
        return self.mlp.optimizer(gradient, self._state[which], self._steps)

    def _activated(self, h: Tensor) -> Tensor:
        x = self.phi(h)
        if x.shape != h.shape:
            raise MupscaleError(
                f"the activation returned shape {tuple(x.shape)} for {tuple(h.shape)}; it must act entry by entry"
            )
        return x


def _check_not_negative(value: PerLayer, what: str) -> None:
    """Refuse standard deviations that are none; what is no number at all is refused where the layers are counted."""
    try:
        levels = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return
    if not bool((levels.isfinite() & (levels >= 0)).all()):
        raise MupscaleError(f"{what} is a standard deviation, 0 or more and finite, not {value}")


def _per_layer(value: PerLayer, layers: int, what: str) -> list[float]:
    """One number for each layer."""
    try:
        levels = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise MupscaleError(f"{what} is one number or {layers}, one for each layer, not {value!r}") from None
    if levels.dim() == 0:
        levels = levels.expand(layers)
    if levels.shape != (layers,):
        shape = str(len(levels)) if levels.dim() == 1 else f"an array of shape {tuple(levels.shape)}"
        raise MupscaleError(f"{what} is one number or {layers}, one for each layer, not {shape}")
    return [float(level) for level in levels]
