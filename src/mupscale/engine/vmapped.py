"""A model and its loss as functions of parameters, vmapped over the runs of a stack; flash attention with the runs
folded into its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mupscale.engine.replicas import NotStackable, ParameterLayout
from mupscale.system import MupscaleError
from mupscale.train import Recipe, cast_input, count_correct

_LOW = (torch.bfloat16, torch.float16)
_plain_attention = F.scaled_dot_product_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What F.scaled_dot_product_attention computes, by the flash kernel where it can."""
    if torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(low), key.to(low), value.to(low)
    if attn_mask is None and not dropout_p and flash_can_answer(query, key, value, is_causal):
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )[0]
        return out
    more: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
    return _plain_attention(query, key, value, **more, scale=scale, enable_gqa=enable_gqa)


def flash_can_answer(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Whether the flash kernel takes these as they are, and masks as torch does."""
    heads = query.dim() == 4 and query.shape[1] == key.shape[1] == value.shape[1]
    sizes = query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    square = query.shape[-2] == key.shape[-2] or not is_causal  # the kernel aligns the mask at the other end
    dtypes = query.dtype == key.dtype == value.dtype and query.dtype in _LOW
    return query.is_cuda and heads and sizes and square and dtypes


Named = Mapping[str, Tensor]
_PLAIN = (SDPBackend.MATH,)
_FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, *_PLAIN)


@dataclass(frozen=True)
class AttentionKernels:
    """How attention is computed: by which of torch's kernels, and whether runs are folded into the batch of flash."""

    kernels: tuple[SDPBackend, ...]
    folds: bool = False


# to try in this order: vmap has rules that work for some kernels alone
_ATTENTION = (AttentionKernels(_PLAIN, folds=True), AttentionKernels(_FUSED), AttentionKernels(_PLAIN))
# of loss and gradient, by the recipe's precision; those of bf16 are compared without its rounding
_TOLERANCE = {"fp64": (1e-9, 1e-9), "fp32": (1e-3, 1e-2), "tf32": (5e-3, 2e-2), "bf16": (5e-3, 2e-2)}


class VmappedModel:
    """One step's losses, and held-out scores, of every run at once."""

    def __init__(self, template: nn.Module, layout: ParameterLayout, recipe: Recipe, device: torch.device) -> None:
        self.template, self.layout, self.recipe, self.device = template, layout, recipe, device
        self.loss = recipe.loss_function()
        self._rounds_less = False
        low = recipe.precision == "bf16" and device.type == "cuda"  # the flash kernel knows nothing else
        self.attention = _ATTENTION[-1] if device.type == "cpu" else _ATTENTION[0 if low else 1]

    @contextmanager
    def folded(self) -> Iterator[None]:
        """While this is in force, around all calls and outside of what is compiled, flash answers where it can."""
        before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = _attention if self.attention.folds else before
        try:
            yield
        finally:
            F.scaled_dot_product_attention = before

    def losses(self, flat: Tensor, buffers: Named, x: Tensor, y: Tensor, shared: bool) -> Tensor:
        """Every run's loss; its buffers are updated. shared: the batch is one for all, and not one for each."""
        over = (0, 0, None, None) if shared else (0, 0, 0, 0)
        losses, held = vmap(self._objective, in_dims=over)(self.layout.cut(flat), dict(buffers), x, y)
        if losses.dim() != 1:
            raise MupscaleError(f"the loss {self.recipe.loss} gives shape {tuple(losses.shape[1:])}, not one number")
        for name, buffer in held.items():
            if buffer is not buffers[name]:
                with torch.no_grad():
                    buffers[name].copy_(buffer)
        return losses

    def bytes_for_backward(self, row: Tensor, buffers: Named, x: Tensor, y: Tensor) -> int:
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor) -> None:  # not the tensor: an operation that holds its own result is never freed
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()

        flat = row.detach().unsqueeze(0).clone().requires_grad_()
        held = {name: buffer.unsqueeze(0).clone() for name, buffer in buffers.items()}
        with self.folded(), torch.autograd.graph.saved_tensors_hooks(keep, lambda nothing: nothing):
            self.losses(flat, held, x, y, shared=True)
        return sum(storage.nbytes() for storage in kept.values())

    def scores(self, flat: Tensor, buffers: Named, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Every run's mean loss on some examples, and how many targets it gets right; -1 where they are no classes."""

        def score(parameters: Named, held: Named) -> tuple[Tensor, Tensor]:
            with self._kernels():
                outputs, _ = self._outputs(parameters, held, x)
                loss = self.loss(outputs, y)
            right = count_correct(outputs, y)
            return loss.double(), torch.full_like(loss, -1.0).double() if right is None else right.double()

        with self.folded():
            scores: tuple[Tensor, Tensor] = vmap(score)(self.layout.cut(flat), dict(buffers))
        return scores

    def _objective(self, parameters: Named, buffers: Named, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with self._kernels():
            outputs, held = self._outputs(parameters, buffers, x)
            return self.loss(outputs, y), held

    def _outputs(self, parameters: Named, buffers: Named, x: Tensor) -> tuple[Any, dict[str, Tensor]]:
        """One run's outputs, and its buffers after them, whether the model changes them in place or replaces them."""
        held = {**parameters, **buffers}
        outputs = functional_call(self.template, held, (cast_input(x, self.recipe),))
        return outputs, {name: held[name] for name in buffers}

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """The recipe's precision, and attention that works under vmap."""
        bf16 = self.recipe.precision == "bf16" and not self._rounds_less
        with (
            sdpa_kernel(list(self.attention.kernels)),
            torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16),
        ):
            yield

    # ------------------------------------------------------------------------------------------- checks

    def check_training(self, row: Tensor, buffers: Named, x: Tensor, y: Tensor) -> None:
        """Check that the model can be vmapped, and has the same loss and gradients as it has alone.

        row, buffers: of one run.
        """
        self.template.train()
        self._with_attention(lambda: self._under_vmap(row, buffers, x, y))
        with self._in_fp32():  # bf16 may round a gradient by a tenth of its size, which says nothing of vmap
            self._compare_with_alone(row, buffers, x, y)

    def _compare_with_alone(self, row: Tensor, buffers: Named, x: Tensor, y: Tensor) -> None:
        vmapped, gradient = self._with_attention(lambda: self._under_vmap(row, buffers, x, y))
        alone = {name: p.detach().clone().requires_grad_() for name, p in self.layout.cut(row).items()}
        loss, _ = self._objective(alone, {name: buffer.clone() for name, buffer in buffers.items()}, x, y)
        gradients = dict(zip(alone, torch.autograd.grad(loss, list(alone.values()), allow_unused=True), strict=True))
        unused = [name for name, grad in gradients.items() if grad is None]
        if unused:
            raise NotStackable(f"'{unused[0]}' has no part in the loss, and a stack trains every parameter")
        expected = float(loss.detach())
        if not math.isfinite(expected):
            return
        of_loss, of_gradient = _TOLERANCE[self.recipe.precision]
        if not abs(vmapped - expected) <= of_loss * max(1.0, abs(expected)):
            raise NotStackable(
                f"{self.recipe.model.class_path} gives another loss under torch.vmap ({vmapped:.6g}) than alone "
                f"({expected:.6g})"
            )
        size = max(float(grad.abs().max()) for grad in gradients.values() if grad is not None)
        for name, grad in self.layout.cut(gradient).items():
            theirs = gradients[name]
            if theirs is not None and not float((grad - theirs).abs().max()) <= of_gradient * size:
                raise NotStackable(f"{self.recipe.model.class_path} gives '{name}' another gradient under torch.vmap")

    @contextmanager
    def _in_fp32(self) -> Iterator[None]:
        """No autocast; whichever attention works then, training keeps the one that works in its own precision."""
        attention, self._rounds_less = self.attention, True
        try:
            yield
        finally:
            self.attention, self._rounds_less = attention, False

    def check_evaluation(self, row: Tensor, buffers: Named, x: Tensor, y: Tensor) -> None:
        self.template.eval()
        try:
            held = {name: buffer.unsqueeze(0).clone() for name, buffer in buffers.items()}
            self._call_vmapped(lambda: self.scores(row.unsqueeze(0), held, x, y))
        finally:
            self.template.train()

    def _with_attention(self, step: Callable[[], tuple[float, Tensor]]) -> tuple[float, Tensor]:
        """A step with the fastest attention that works; if the plainest fails, too, it is not attention that fails."""
        for kernels in _ATTENTION[_ATTENTION.index(self.attention) : -1]:
            self.attention = kernels
            try:
                return step()
            except NotStackable:
                continue
        self.attention = _ATTENTION[-1]
        return step()

    def _under_vmap(self, row: Tensor, buffers: Named, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
        def step() -> tuple[float, Tensor]:
            flat = row.detach().unsqueeze(0).clone().requires_grad_()
            held = {name: buffer.unsqueeze(0).clone() for name, buffer in buffers.items()}
            # with a batch of its own: a model that looks at its inputs' values can be vmapped over parameters alone
            losses = self.losses(flat, held, x.unsqueeze(0), y.unsqueeze(0), shared=False)
            (gradient,) = torch.autograd.grad(losses.sum(), flat)
            return float(losses[0].detach()), gradient[0]

        result: tuple[float, Tensor] = self._call_vmapped(step)
        return result

    def _call_vmapped(self, function: Callable[[], Any]) -> Any:
        try:
            with self.folded():
                return function()
        except (MupscaleError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model may fail in any way
            reason = " ".join(str(error).split()) or type(error).__name__
            if "randomness error mode" in reason:
                reason = "it draws random numbers, as dropout does; nothing is lost but time"
            reason = reason if len(reason) <= 160 else f"{reason[:160]} …"
            raise NotStackable(f"torch.vmap cannot run {self.recipe.model.class_path}: {reason}") from error
