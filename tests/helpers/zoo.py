"""The architectures and optimizers of the equivalence matrix: small, in float64, and hard where it matters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

import mupscale as mu
from mupscale.models import GPT2, MLP, ResNet18

CLASSES, VOCAB, CONTEXT = 3, 11, 8


class TiedByProduct(nn.Module):
    """A table that is read out by a functional product: copies fold 1/k into the norm, beside fresh units nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.n = nn.Parameter(torch.randn(7, width)), nn.LayerNorm(width)
        self.c = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table[tokens]
        return self.n(x + torch.tanh(self.c(x))) @ self.table.t()


class ConvNet(nn.Module):
    """Convolutions flattened to C·H·W, so that the readout's input is copied in blocks of H·W."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3)
        self.second = nn.Conv2d(channels, 2 * channels, 3)
        self.head = nn.Linear(2 * channels * 4 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.second(F.gelu(self.first(x))))
        return self.head(x.flatten(1))


class Depthwise(nn.Module):
    """A separable convolution: groups grow with the channels, one channel each."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3)
        self.depthwise = nn.Conv2d(channels, channels, 3, groups=channels)
        self.norm = nn.GroupNorm(2, channels)
        self.pointwise = nn.Conv2d(channels, 2 * channels, 1)
        self.slope = nn.PReLU(2 * channels)
        self.head = nn.Linear(2 * channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.depthwise(torch.tanh(self.stem(x))))
        return self.head(self.slope(self.pointwise(x)).mean((2, 3)))


class Encoder(nn.Module):
    """nn.TransformerEncoder: packed projections, post-norm, a learned table of shape (1, T, d)."""

    def __init__(self, heads: int, head_dim: int = 4) -> None:
        super().__init__()
        d = heads * head_dim
        self.embed = nn.Embedding(VOCAB, d)
        self.position = nn.Parameter(0.1 * torch.randn(1, CONTEXT, d))
        layer = nn.TransformerEncoderLayer(d, heads, 2 * d, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens) + self.position))


class GroupedQueryAttention(nn.Module):
    """Four query heads on two key/value heads (times the multiplier), with separate projections."""

    def __init__(self, d: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(d, num_heads * head_dim)
        self.k_proj = nn.Linear(d, num_kv_heads * head_dim)
        self.v_proj = nn.Linear(d, num_kv_heads * head_dim)
        self.o_proj = nn.Linear(num_heads * head_dim, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class GroupedQueries(nn.Module):
    """Two pre-norm blocks of grouped-query attention and a gated MLP."""

    def __init__(self, times: int) -> None:
        super().__init__()
        d, heads, kv_heads, head_dim = 12 * times, 4 * times, 2 * times, 3
        self.embed = nn.Embedding(VOCAB, d)
        self.norms = nn.ModuleList(nn.RMSNorm(d, eps=1e-3) for _ in range(4))
        self.attentions = nn.ModuleList(GroupedQueryAttention(d, heads, kv_heads, head_dim) for _ in range(2))
        self.gate_up = nn.ModuleList(nn.Linear(d, 2 * 2 * d, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2 * d, d, bias=False) for _ in range(2))
        self.norm = nn.RMSNorm(d)
        self.head = nn.Linear(d, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i in range(2):
            x = x + self.attentions[i](self.norms[2 * i](x))
            gate, up = self.gate_up[i](self.norms[2 * i + 1](x)).chunk(2, -1)
            x = x + self.down[i](F.silu(gate) * up)
        return self.head(self.norm(x))


class SqrtAttention(nn.Module):
    """Separate projections under 1/√head_dim: where head_dim grows, 1/√k is folded into the query."""

    def __init__(self, head_dim: int, num_heads: int = 2) -> None:
        super().__init__()
        d = num_heads * head_dim
        self.num_heads, self.head_dim, self.scale = num_heads, head_dim, head_dim**-0.5
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Folded(nn.Module):
    """One block around SqrtAttention."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 2 * head_dim)
        self.attention = SqrtAttention(head_dim)
        self.norm = nn.LayerNorm(2 * head_dim)
        self.head = nn.Linear(2 * head_dim, VOCAB)
        with torch.no_grad():  # attention must matter
            self.attention.query.weight.mul_(4)
            self.attention.key.weight.mul_(4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(x + self.attention(x)))


class Recurrent(nn.Module):
    """Two LSTM layers with a projection."""

    def __init__(self, hidden: int, projection: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.lstm = nn.LSTM(hidden, hidden, 2, batch_first=True, proj_size=projection)
        self.head = nn.Linear(projection, VOCAB)
        with torch.no_grad():  # thirty steps must get somewhere
            for p in self.lstm.parameters():
                p.mul_(4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


@dataclass(frozen=True)
class Architecture:
    """A narrow and a wide model, batches with something to learn, and a factor for the learning rates it bears."""

    narrow: Callable[[], nn.Module]
    wide: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    roles: dict[str, mu.Role] = field(default_factory=dict)
    lr: float = 1.0

    def batches(self, count: int = 2) -> list[tuple[Tensor, Tensor]]:
        """Tokens are followed by a function of themselves; vectors and images have a linear teacher."""
        inputs = [self.inputs() for _ in range(count)]
        if inputs[0].dtype == torch.long:
            return [(x, (3 * x + 1) % VOCAB) for x in inputs]
        teacher = torch.randn(inputs[0][0].numel(), CLASSES)
        return [(x, (x.flatten(1) @ teacher).argmax(1)) for x in inputs]


def _images(size: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(8, 1, size, size)


def _tokens() -> Tensor:
    return torch.randint(0, VOCAB, (4, CONTEXT))


def _gpt2(heads: int, head_dim: int, **more: Any) -> Callable[[], nn.Module]:
    return lambda: GPT2(VOCAB, CONTEXT, layers=2, heads=heads, head_dim=head_dim, **more)


ARCHITECTURES: dict[str, Architecture] = {
    "mlp": Architecture(
        lambda: MLP(5, [4, 6, 5], CLASSES, activation="gelu"),
        lambda: MLP(5, [8, 18, 20], CLASSES, activation="gelu"),
        lambda: 2 * torch.randn(16, 5),
    ),
    "conv-flatten": Architecture(
        lambda: ConvNet(3), lambda: ConvNet(6), _images(8), {"head.weight": mu.Role(out=0, in_=1, in_block=16)}
    ),
    "depthwise": Architecture(lambda: Depthwise(4), lambda: Depthwise(12), _images(8), lr=1.5),
    "resnet18": Architecture(
        lambda: ResNet18(2, CLASSES, 1), lambda: ResNet18(4, CLASSES, 1), lambda: torch.randn(8, 1, 16, 16), lr=0.1
    ),
    "gpt2-head-dim": Architecture(
        _gpt2(2, 4, attention_multiplier=2.0), _gpt2(2, 8, attention_multiplier=2.0), _tokens
    ),
    "gpt2-heads": Architecture(_gpt2(2, 4), _gpt2(6, 4), _tokens),
    "gpt2-untied": Architecture(_gpt2(2, 4, tied=False), _gpt2(4, 4, tied=False), _tokens),
    "encoder": Architecture(lambda: Encoder(2), lambda: Encoder(4), _tokens),
    "grouped-queries": Architecture(lambda: GroupedQueries(1), lambda: GroupedQueries(2), _tokens),
    "sqrt-attention": Architecture(lambda: Folded(4), lambda: Folded(12), _tokens),
    "lstm": Architecture(lambda: Recurrent(10, 8), lambda: Recurrent(30, 16), _tokens, lr=3.0),
}


class Unrounded(TorchFunctionMode):
    """Casts to bfloat16 are copies: torch.optim.Muon's own code, with its Newton–Schulz iteration in float64.

    Rounded, the iteration goes other ways on other CPUs, by more than a wrong exponent would show.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cast = function is Tensor.to and torch.bfloat16 in (*args[1:], kwargs.get("dtype"))  # torch 2.15 says it so
        return args[0].clone() if function is Tensor.bfloat16 or cast else function(*args, **kwargs)


@dataclass(frozen=True)
class Training:
    """An optimizer with hyperparameters that matter: decay and eps are large. Matrices may have one of their own."""

    optimizer: type[Optimizer]
    hyper: dict[str, Any]
    matrices: tuple[type[Optimizer], dict[str, Any]] | None = None

    def split(self, model: nn.Module, lr: float = 1.0) -> list[tuple[type[Optimizer], dict[str, Any], list[str]]]:
        """Which optimizer trains which parameters, by name; learning rates times a factor."""
        shapes = {n: p.shape for n, p in model.named_parameters()}
        matrices = [n for n in shapes if self.matrices and len(shapes[n]) == 2 and not n.startswith(("embed", "wte"))]
        parts = [(*self.matrices, matrices)] if self.matrices else []
        parts.append((self.optimizer, self.hyper, [n for n in shapes if n not in matrices]))
        return [(cls, {**hyper, "lr": hyper["lr"] * lr}, names) for cls, hyper, names in parts]


_ADAM = {"lr": 3e-2, "eps": 1e-2, "weight_decay": 0.03}
_ADAMW = {"lr": 3e-2, "eps": 1e-2, "weight_decay": 0.5}
_MUON = {"lr": 0.02, "weight_decay": 0.3, "eps": 1e-2}
_O = torch.optim
TRAININGS: dict[str, Training] = {
    "SGD": Training(_O.SGD, {"lr": 0.3, "weight_decay": 0.02}),
    "SGD-momentum": Training(_O.SGD, {"lr": 0.2, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.02}),
    "SGD-nesterov": Training(_O.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.02}),
    "Adam": Training(_O.Adam, _ADAM),
    "AMSGrad": Training(_O.Adam, {**_ADAM, "amsgrad": True}),
    "AdamW": Training(_O.AdamW, _ADAMW),
    "NAdam": Training(_O.NAdam, _ADAM),
    "NAdam-decoupled": Training(_O.NAdam, {**_ADAMW, "decoupled_weight_decay": True}),
    "RMSprop": Training(_O.RMSprop, {"lr": 5e-3, "eps": 1e-2, "weight_decay": 0.03, "momentum": 0.5, "centered": True}),
    "Adagrad": Training(_O.Adagrad, {"lr": 5e-2, "eps": 1e-2, "weight_decay": 0.05, "lr_decay": 0.01}),
    "Adamax": Training(_O.Adamax, _ADAM),
    # eps1 floors the mean of the rows' second moments (it binds), and its square floors single ones (it must not)
    "Adafactor": Training(_O.Adafactor, {"lr": 0.1, "eps": (1e-7, 0.2), "weight_decay": 0.2}),
    "Adadelta": Training(_O.Adadelta, {"lr": 1.0, "eps": 1e-3, "weight_decay": 0.02}),
    "Rprop": Training(_O.Rprop, {"lr": 2e-3, "step_sizes": (1e-3, 5e-3)}),
    "ASGD": Training(_O.ASGD, {"lr": 0.3, "lambd": 0.02, "alpha": 0.5, "t0": 5, "weight_decay": 0.02}),
    "Muon": Training(_O.AdamW, _ADAMW, (_O.Muon, _MUON)),
    "Muon-rms": Training(_O.AdamW, _ADAMW, (_O.Muon, {**_MUON, "adjust_lr_fn": "match_rms_adamw"})),
}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and cross-entropy."""
    output = model(batch[0])
    return output, F.cross_entropy(output.flatten(0, -2), batch[1].flatten())


@dataclass(frozen=True)
class Outcome:
    """What a pair of runs came to."""

    difference: float
    losses: list[float]
    clipped: bool


def train_pair(
    architecture: Architecture,
    training: Training,
    *,
    before: int = 10,
    after: int = 20,
    clip: float | None = None,
    schedule: Callable[[int], float] | None = None,
    tamper: Callable[[dict[str, Any]], None] = lambda group: None,
) -> Outcome:
    """Train the narrow model, widen it with its optimizers, train both on, and compare outputs at every step.

    tamper: what to do to every parameter group of the wide model, to see that it matters.
    """
    torch.manual_seed(0)
    narrow, wide, batches = architecture.narrow(), architecture.wide(), architecture.batches()
    parameters = dict(narrow.named_parameters())
    parts = training.split(narrow, architecture.lr)
    small = [cls([parameters[n] for n in names], **hyper) for cls, hyper, names in parts]
    losses, clipped = [], False
    plan = mu.plan(narrow, wide, roles=architecture.roles)

    def step(model: nn.Module, optimizers: list[Optimizer], t: int) -> Tensor:
        nonlocal clipped
        if schedule is not None:
            for o in optimizers:
                for group in o.param_groups:
                    group.setdefault("first_lr", group["lr"])
                    group["lr"] = group["first_lr"] * schedule(t)
        output, loss = loss_of(model, batches[t % len(batches)])
        for o in optimizers:
            o.zero_grad()
        loss.backward()
        if clip is not None:
            if model is wide:
                norm = mu.clip_grad_norm_(model, clip, plan)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            clipped |= bool(norm > clip)
        for o in optimizers:
            with Unrounded() if isinstance(o, torch.optim.Muon) else nullcontext():
                o.step()
        if model is narrow:
            losses.append(loss.item())
        return output.detach()

    for t in range(before):
        step(narrow, small, t)
    mu.widen(narrow, wide, plan)
    large = []
    for (cls, hyper, names), optimizer in zip(parts, small, strict=True):
        groups = mu.param_groups(wide, plan, cls, groups=[{"params": names}], **hyper)
        for group in groups:
            tamper(group)
        large.append(mu.widen_optimizer(optimizer, cls(groups), plan, narrow=narrow))
    difference = 0.0
    for t in range(before, before + after):
        ours, theirs = step(narrow, small, t), step(wide, large, t)
        relative = float((ours - theirs).norm() / ours.norm())
        difference = max(difference, relative if relative == relative else float("inf"))
    return Outcome(difference, losses, clipped)
