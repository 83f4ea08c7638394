"""Third-party models with twice as many blocks: what comes of new ones that start as identity, model by model.

python tests/zoo/deeper.py      # prints a row for each model, and how many are exact, refused or wrong
"""

from __future__ import annotations

import collections
import warnings
from importlib.util import find_spec

import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.planning import in_double, run_in_float64, tensors_in
from table import LIBRARIES, MODELS
from third_party import Model

NOT_RESIDUAL = r"no residual connection|transformed before|post-norm|where it ends cannot be told"
SHAPES = r"cannot come from .* Depth grows by blocks of one shape"
FLOAT32 = "does not run on the batch in float64"
SKIPS = "its up blocks read what the down blocks have kept, one block for each"

REFUSED: dict[str, tuple[str, str]] = {
    **{
        f"torch_geometric: {name}": (NOT_RESIDUAL, "no residual connections") for name in ("GCN", "GIN", "GAT", "GATv2")
    },
    **{f"torch_geometric: {name}": (NOT_RESIDUAL, "no residual connections") for name in ("GraphSAGE", "EdgeCNN")},
    "torch_geometric: GraphSAGE, max of neighbours": (NOT_RESIDUAL, "no residual connections"),
    "torch_geometric: GCN, batch norm, jumping knowledge": ("differ in more than", "the readout reads every layer"),
    **{
        f"diffusers: UNet2D{name}": (NOT_RESIDUAL, SKIPS)
        for name in (
            *("", ", Fourier features of time", ", learned table of times", ", time scales and shifts"),
            *("Condition", "Condition, Fourier features of time"),
        )
    },
    "peft: DoRA on Llama": ("divides by the norm of a weight", "divides by the norm of a weight that is zero"),
    "peft: FourierFT": (FLOAT32, "asks for float32 inside"),
    "timm: XCiT": (NOT_RESIDUAL, "normalises the class token's stream"),
    "timm: Swin": (SHAPES, "the new block of its second stage is shifted, and no old one there is"),
    "timm: Swin V2": (SHAPES, "the new block of its second stage is shifted, and no old one there is"),
    "timm: CoAtNet": (SHAPES, "blocks that change the shape have other modules"),
    "timm: TinyViT": ("not just its input plus branches", "a GELU behind the sum"),
    "timm: ConvMixer": ("post-norm", "normalises the stream"),
    "timm: RepViT": (NOT_RESIDUAL, "half of a block has no residual connection"),
    "timm: DenseNet": ("only widths may differ", "concatenates instead of adding"),
    "timm: NF-ResNet": ("depends on the number of blocks", "a constant of each block depends on those before it"),
    "timm: EfficientFormer": ("at least one to begin with", "the kind of a block depends on its place"),
    "vit-pytorch: patch merger": (NOT_RESIDUAL, "merges patches in the middle"),
    "vit-pytorch: nViT": ("differ in more than", "normalises the stream"),
    "vit-pytorch: CrossViT": ("where it ends cannot be told", "two streams, which the model adds to by itself"),
    "vit-pytorch: MaxViT": (SHAPES, "blocks that change the shape have other modules"),
    "x-transformers: residual attention": (
        "what a block computes besides its output",
        "a block reads the attention of the one before",
    ),
    "x-transformers: post-norm": (NOT_RESIDUAL, "normalises the stream"),
    "x-transformers: gated residuals": (NOT_RESIDUAL, "a gate in place of the sum"),
}
"""By library and name, what the message of a refusal says as a regular expression, and why in a few words."""

NEVER_LEARN = {"peft: AdaLoRA", "peft: LoHa", "peft: LoHa, in evaluation mode"}
"""Models whose new blocks stay without effect: of a product that writes into the stream, another factor starts at 0."""
ONE_DEPTH = {"timm: VGG", "timm: RegNet", "timm: DLA"} | {
    f"torch_geometric: {name}Conv"
    for name in (
        *("Transformer", "Graph", "Cheb", "TAG", "SG", "ARMA"),
        *("ResGatedGraph", "GatedGraph", "LE", "SuperGAT", "FiLM", "General"),
    )
}
"""Models whose constructors take no number of blocks."""


def title(model: Model) -> str:
    """Its library and name."""
    return f"{model.library}: {model.name}"


def deepened(model: Model) -> tuple[nn.Module, nn.Module, mu.Plan] | None:
    """The model and one of twice its depth that was written from it, in float64; None without a depth to double."""
    torch.manual_seed(0)
    shallow, deep, inputs = model.build(1).double(), model.deeper(), in_double(model.inputs())
    if deep is None:
        return None
    for p in shallow.parameters():  # as after training: nothing is at zero any more, such as readouts of some models
        p.data += 0.02 * torch.randn_like(p)
    mu.upscale(shallow, deep.double(), inputs=inputs)
    return shallow.eval(), deep.eval(), mu.plan_depth(shallow, deep, inputs=inputs)


def outputs(model: nn.Module, batch: object) -> list[Tensor]:
    """The floating-point tensors that a model gives."""
    return [t for t in tensors_in(run_in_float64(model, batch)) if t.is_floating_point()]


def difference(shallow: nn.Module, deep: nn.Module, batch: object) -> float:
    """By how much the outputs differ, by their size."""
    pairs = zip(outputs(shallow, batch)[:1], outputs(deep, batch)[:1], strict=True)
    return max(float((a - b).abs().max()) / (1 + float(a.abs().max())) for a, b in pairs)


def sentence() -> str:
    """What the docs say of all of them."""
    refused, without = len(REFUSED), len(ONE_DEPTH)
    exact = len(MODELS) - refused - without
    return (
        f"Of the {len(MODELS)} [models of other libraries](third-party-models.md), {exact} keep their function to 1e-12"
        f" at twice their depth, {refused} are refused, {without} have no number of blocks, and none is off"
    )


def outcome(model: Model) -> str:
    """Exact, refused with the reason, wrong, or without a depth."""
    try:
        pair = deepened(model)
    except mu.MupscaleError as error:
        return f"refused: {error}"
    if pair is None:
        return "has no number of blocks"
    far = difference(*pair[:2], in_double(model.inputs()))
    return "equal to 1e-12" if far < 1e-12 else f"WRONG by {far:.1g}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    for each in MODELS:
        if all(find_spec(package) for package in LIBRARIES[each.library]):
            row = outcome(each)
            counts[row.split()[0].strip(":")] += 1
            print(f"{title(each)} | {row}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
