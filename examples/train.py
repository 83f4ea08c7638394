"""Train a small GPT on text in a plain PyTorch loop, and let it grow on the way: python examples/train.py

A complete script in the style of nanoGPT: model, data, schedule, clipping, evaluation, checkpoints, resume. The lines
that make it grow are marked with `# grow`; there are ten of them. Stop it at any time, and the same command goes on.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import mupscale as mu  # grow
from mupscale.data import tinyshakespeare

HEAD_DIM = 16


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after this block."""
        q, k, v = (
            part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        x = x + self.mix(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(gelu(self.up(self.norm_2(x))))
        return out


class GPT(nn.Module):
    """A GPT whose heads have a fixed size, so that a wider one has more of them."""

    def __init__(self, width: int, vocabulary: int, context: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.readout = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, at every position."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.readout(self.norm(self.blocks(x)))
        return logits


class Text:
    """Characters as numbers; the last tenth is held out. A batch depends on its step alone."""

    def __init__(self, characters: str, batch: int, context: int, device: str) -> None:
        self.vocabulary = sorted(set(characters))
        number = {character: place for place, character in enumerate(self.vocabulary)}
        ids = torch.tensor([number[character] for character in characters])
        self.train, self.held_out = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
        self.batch, self.context, self.device = batch, context, device

    def draw(self, step: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        ids = self.held_out if held_out else self.train
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(ids) - self.context - 1, (self.batch,), generator=generator)
        rows = torch.stack([ids[start : start + self.context + 1] for start in starts.tolist()]).to(self.device)
        return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the next token."""
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Text) -> float:
    """The loss on eight held-out batches."""
    model.eval()
    losses = [loss_of(model, text.draw(step, held_out=True)).item() for step in range(8)]
    model.train()
    return sum(losses) / len(losses)


def make_scheduler(optimizer: Optimizer, warmup: int, steps: int) -> LRScheduler:
    """Warm-up, then a cosine to a tenth of the rate."""

    def multiple(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    return LambdaLR(optimizer, multiple)


def train(options: argparse.Namespace) -> tuple[nn.Module, float]:
    """The whole run; the model at its end, and its held-out loss."""
    path, device, width = options.out / "checkpoint.safetensors", options.device, options.width
    text = Text(options.text.read_text() if options.text else tinyshakespeare(), options.batch, options.context, device)

    def build(width: int) -> GPT:
        return GPT(width, len(text.vocabulary), options.context, options.layers)

    family = mu.Family(build, base=options.width, inputs=text.draw(0)[0][:2].cpu())  # grow
    step, saved = 0, mu.load(path) if path.exists() else None
    if saved is not None:
        step, width = saved.extra["step"], saved.extra["width"]
    model = family.init(width, seed=options.seed).to(device)  # grow
    optimizer = family.optimizer(model, AdamW, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)  # grow
    scheduler = make_scheduler(optimizer, options.steps // 20, options.steps)
    if saved is not None:
        mu.load(path, model, optimizer, scheduler)
        print(f"goes on at step {step}, width {width}")
    plan, began = family.plan(model), time.perf_counter()  # grow

    while step < options.steps:
        if step == options.grow_at and width < options.grow_to:  # grow
            width, before = options.grow_to, sum(p.numel() for p in model.parameters())
            model, optimizer, scheduler = family.upscale(  # grow
                model, optimizer, scheduler=scheduler, width=width, grow=mu.Fresh(), seed=options.seed
            )
            plan = family.plan(model)  # grow
            print(f"step {step}: grown from {before:,} to {sum(p.numel() for p in model.parameters()):,} parameters")
        optimizer.zero_grad()
        loss = loss_of(model, text.draw(step))
        loss.backward()
        mu.clip_grad_norm_(model, 1.0, plan)  # grow: a norm that does not depend on the width
        optimizer.step()
        scheduler.step()
        step += 1
        if step % options.every == 0 or step == options.steps:
            rate = options.every / (time.perf_counter() - began)
            print(f"step {step}: loss {loss.item():.3f}, held out {evaluate(model, text):.3f}, {rate:.1f} steps/s")
            mu.save(path, model, optimizer, plan, step=step, width=width, scheduler=scheduler.state_dict())
            began = time.perf_counter()
    return model, evaluate(model, text)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python examples/train.py", description=__doc__)
    for name, value in (
        ("width", 64), ("grow-to", 128), ("grow-at", 300), ("layers", 4), ("context", 64), ("batch", 16),
        ("steps", 600), ("every", 100), ("seed", 0), ("lr", 3e-3), ("device", "cpu"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"(default: {value})")
    parser.add_argument("--text", type=Path, help="a text file (default: a part of Tiny Shakespeare that comes along)")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder of the checkpoint")
    return parser.parse_args(words)


if __name__ == "__main__":
    train(parse())
