"""Many small GPTs stacked by hand, as one would write it for a single experiment: what the engine is measured against.

Weights carry the run as their first dimension, products are batched ones, the runs are folded into the batch of fused
attention, AdamW is one pass over all parameters, and a step is one CUDA graph. What is not a product is fused by
torch.compile. It computes what `mupscale.models.GPT2` does, and nothing else: no schedule, no clipping, no data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True)
class Sizes:
    """Of a stack of GPTs, and of a step."""

    runs: int
    width: int
    vocab: int = 257
    layers: int = 4
    head_dim: int = 32
    batch: int = 32
    context: int = 256


def weights(sizes: Sizes, device: torch.device) -> dict[str, Tensor]:
    """Random weights; the table of tokens has rows to spare, so that its products have aligned addresses."""
    width, rows = sizes.width, -(-sizes.vocab // 8) * 8

    def normal(*shape: int) -> Tensor:
        return (0.02 * torch.randn(sizes.runs, *shape, device=device)).requires_grad_()

    shapes = {"tokens": (rows, width), "positions": (sizes.context, width), "gain": (width,), "bias": (width,)}
    for layer in range(sizes.layers):
        for name, inputs, outputs in (
            ("attn", width, 3 * width),
            ("attn_out", width, width),
            ("fc", width, 4 * width),
            ("fc_out", 4 * width, width),
        ):
            shapes[f"{layer}.{name}"] = (inputs, outputs)
            shapes[f"{layer}.{name}_bias"] = (outputs,)
        for norm in ("ln_1", "ln_2"):
            shapes[f"{layer}.{norm}_gain"] = shapes[f"{layer}.{norm}_bias"] = (width,)
    return {name: normal(*shape) for name, shape in shapes.items()}


def losses(p: dict[str, Tensor], sizes: Sizes, x: Tensor, y: Tensor) -> Tensor:
    """Every run's loss; x, y: (runs, batch, context)."""
    runs, width, heads = sizes.runs, sizes.width, sizes.width // sizes.head_dim
    q = {name: value.to(torch.bfloat16) for name, value in p.items()}

    def norm(stream: Tensor, name: str) -> Tensor:
        plain = F.layer_norm(stream, (width,))
        return (plain * p[f"{name}gain"].unsqueeze(1) + p[f"{name}bias"].unsqueeze(1)).to(torch.bfloat16)

    def linear(name: str, values: Tensor) -> Tensor:
        return torch.bmm(values, q[name]) + q[f"{name}_bias"].unsqueeze(1)  # baddbmm would copy the bias first

    rows = p["tokens"].shape[1]
    offsets = torch.arange(runs, device=x.device).view(-1, 1, 1) * rows
    table = p["tokens"].flatten(0, 1)
    stream = (F.embedding(x + offsets, table) + p["positions"].unsqueeze(1)).flatten(1, 2)
    for layer in range(sizes.layers):
        qkv = linear(f"{layer}.attn", norm(stream, f"{layer}.ln_1_"))
        qkv = qkv.view(runs * sizes.batch, sizes.context, 3, heads, sizes.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(runs, -1, width)
        stream = stream + linear(f"{layer}.attn_out", mixed)
        hidden = F.gelu(linear(f"{layer}.fc", norm(stream, f"{layer}.ln_2_")), approximate="tanh")
        stream = stream + linear(f"{layer}.fc_out", hidden)
    logits = torch.bmm(norm(stream, ""), q["tokens"].transpose(1, 2))[..., : sizes.vocab].float()
    each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    return each.view(runs, -1).mean(1)


def stacked_by_hand(sizes: Sizes, device: torch.device) -> Callable[[int], None]:
    """A function that takes so many steps of all runs."""
    p = weights(sizes, device)
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in p.items()}
    lr = torch.full((sizes.runs,), 1e-3, device=device)
    count = torch.zeros((), device=device)
    tokens = torch.randint(0, 256, (sizes.runs, sizes.batch, sizes.context + 1), device=device)
    x, y = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
    objective = torch.compile(lambda x, y: losses(p, sizes, x, y), dynamic=False)

    def adamw(gradients: list[Tensor]) -> None:
        count.add_(1)
        first, second = 1 - BETAS[0] ** count, (1 - BETAS[1] ** count).sqrt()
        for (name, value), gradient in zip(p.items(), gradients, strict=True):
            mean, square = moments[name]
            rate = lr.view(-1, *(1 for _ in value.shape[1:]))
            mean.lerp_(gradient, 1 - BETAS[0])
            square.lerp_(gradient * gradient, 1 - BETAS[1])
            value.mul_(1 - rate * DECAY)
            value.sub_(rate * (mean / first) / (square.sqrt() / second + EPS))

    update = torch.compile(adamw, dynamic=False)

    def step() -> None:
        gradients = torch.autograd.grad(objective(x, y).sum(), list(p.values()))
        with torch.no_grad():
            update(list(gradients))

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def steps(number: int) -> None:
        for _ in range(number):
            graph.replay()

    return steps
