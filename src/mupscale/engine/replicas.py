"""What a stack is made of: parameters, optimizer state and buffers of its runs, as matrices with a row for each run.

And their updates; a step as one CUDA graph, since launching its kernels one by one takes longer than small models
compute; and the model and its loss as functions of parameters, vmapped over the runs, with flash attention that has the
runs folded into its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Adam, AdamW, Optimizer

from mupscale.core import Plan, naming
from mupscale.system import MupscaleError
from mupscale.train import Recipe, cast_input, count_correct

T = TypeVar("T")
PER_RUN = ("lr", "weight_decay", "eps")
"""Hyperparameters of which each run may have its own."""


class NotStackable(MupscaleError):
    """These runs cannot be trained as one program; they can still be trained one at a time."""


Rows = dict[str, Tensor]
"""State tensors by their torch names, each a matrix like the parameters."""


@dataclass(frozen=True)
class Segment:
    """Columns whose hyperparameters are the model's own times these factors; norm: their weight in the clipped norm.

    A factor may also be one for each column.
    """

    columns: slice
    lr: float | Tensor
    weight_decay: float | Tensor
    eps: float | Tensor
    norm: float | Tensor


def merge_segments(segments: Sequence[Segment], like: Tensor) -> list[Segment]:
    """All columns as one segment with a factor for each column: one pass over memory where a compiler fuses it."""

    def columns(name: str) -> Tensor:
        factors = like.new_empty(like.shape[1])
        for segment in segments:
            factors[segment.columns] = getattr(segment, name)
        return factors

    return [Segment(slice(None), *(columns(name) for name in ("lr", "weight_decay", "eps", "norm")))]


@dataclass(frozen=True)
class Hyperparameters:
    """Each model's hyperparameters at factor 1, as columns of numbers, and those that all models share."""

    lr: Tensor
    weight_decay: Tensor
    eps: Tensor
    shared: Mapping[str, Any]

    def rows(self, rows: slice | list[int]) -> Hyperparameters:
        """Those of some models; a slice shares their memory."""
        return Hyperparameters(self.lr[rows], self.weight_decay[rows], self.eps[rows], self.shared)


Update = Callable[[Tensor, Tensor, Rows, Tensor, Hyperparameters, Sequence[Segment]], None]
"""From parameters, gradients (which it may overwrite), state, steps taken so far (a number for each run, or for each
of its columns) and hyperparameters; in place."""


def adam_update(
    p: Tensor, g: Tensor, state: Rows, step: Tensor, hyper: Hyperparameters, segments: Sequence[Segment]
) -> None:
    beta1, beta2 = hyper.shared["betas"]
    corrections = (1 - beta1**step).to(p.dtype), (1 - beta2**step).sqrt().to(p.dtype)
    for segment in segments:
        at = (slice(None), segment.columns)
        correction1, correction2 = (_columns(each, at) for each in corrections)
        weights, gradient = p[at], g[at]
        lr, decay = hyper.lr * segment.lr, hyper.weight_decay * segment.weight_decay
        if hyper.shared["decoupled"]:
            weights.mul_(1 - lr * decay)
        elif hyper.shared["decays"]:
            gradient.addcmul_(weights, decay)
        mean, square = state["exp_avg"][at], state["exp_avg_sq"][at]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if hyper.shared["amsgrad"]:
            square = state["max_exp_avg_sq"][at]
            torch.maximum(square, state["exp_avg_sq"][at], out=square)
        size = square.sqrt().add_(hyper.eps * segment.eps * correction2)
        weights.addcmul_(torch.div(mean, size, out=size), -lr * correction2 / correction1)


def _columns(numbers: Tensor, at: tuple[slice, slice]) -> Tensor:
    """Those of a segment, where there is one number for each column; the one number of each run otherwise."""
    return numbers if numbers.shape[1] == 1 else numbers[at]


def sgd_update(
    p: Tensor, g: Tensor, state: Rows, step: Tensor, hyper: Hyperparameters, segments: Sequence[Segment]
) -> None:
    momentum, dampening = hyper.shared["momentum"], hyper.shared["dampening"]
    for segment in segments:
        at = (slice(None), segment.columns)
        weights, gradient = p[at], g[at]
        if hyper.shared["decays"]:
            gradient.addcmul_(weights, hyper.weight_decay * segment.weight_decay)
        if momentum:
            buffer = state["momentum_buffer"][at]
            first = (_columns(step, at) == 1).to(p.dtype)  # torch takes the first gradient whole
            buffer.mul_(momentum).add_(gradient * (1 - dampening * (1 - first)) if dampening else gradient)
            gradient = gradient.add_(buffer, alpha=momentum) if hyper.shared["nesterov"] else buffer
        weights.addcmul_(gradient, -hyper.lr * segment.lr)


@dataclass(frozen=True)
class StackOptimizer:
    """An optimizer that can train a stack: its update, the names of its state, and what all models share."""

    update: Update
    state: tuple[str, ...]
    shared: Mapping[str, Any]


def find_stack_optimizer(cls: type[Optimizer], group: Mapping[str, Any]) -> StackOptimizer:
    """The same optimizer for a stack, with the hyperparameters of such a parameter group."""
    for option in ("maximize", "differentiable"):
        if group.get(option):
            raise NotStackable(f"{option} is not among what can train as one program")
    decays = bool(group.get("weight_decay"))
    if cls is SGD:
        shared = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
        return StackOptimizer(
            sgd_update, ("momentum_buffer",) if group["momentum"] else (), {**shared, "decays": decays}
        )
    if cls in (Adam, AdamW):
        decoupled = decays and bool(group.get("decoupled_weight_decay", cls is AdamW))
        state = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        shared = {"betas": tuple(map(float, group["betas"])), "amsgrad": group["amsgrad"]}
        return StackOptimizer(adam_update, state, {**shared, "decays": decays, "decoupled": decoupled})
    raise NotStackable(f"{cls.__name__} is not (SGD, Adam and AdamW are) among what can train as one program")


def clip_rows(g: Tensor, largest: float, segments: Sequence[Segment]) -> Tensor:
    """Scale rows of gradients down to the largest width-invariant norm, as optim.clip_grad_norm_ does; the norms."""
    parts = [torch.linalg.vector_norm(g[:, s.columns], dim=1, keepdim=True).square() * s.norm for s in segments]
    norm = torch.stack(parts).sum(0).sqrt()
    g.mul_((largest / (norm + 1e-6)).clamp(max=1.0))
    return norm[:, 0]


_ALIGNED = 64  # columns at which a parameter may begin: matrix units want addresses that are multiples of 16 bytes


@dataclass(frozen=True)
class ParameterLayout:
    """Where each parameter lies in a row of the stack, and the segments of equal factors."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    starts: tuple[int, ...]
    total: int
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer, plan: Plan) -> ParameterLayout:
        """Parameters with equal factors side by side, each at an aligned column."""
        parameters, norms = naming.parameters(model), plan.norm_weights(2.0)
        by_identity = {id(p): name for name, p in parameters.items()}
        grouped: dict[tuple[float, ...], list[str]] = {}
        for group in optimizer.param_groups:
            factors = tuple(float(group.get(f"{name}_factor", 1.0)) for name in PER_RUN)
            for p in group["params"]:
                name = by_identity[id(p)]
                grouped.setdefault((*factors, norms[name]), []).append(name)
        names, starts, segments, column = list[str](), list[int](), list[Segment](), 0
        for factors, members in grouped.items():
            first = column
            for name in members:
                names.append(name)
                starts.append(column)
                column += math.ceil(parameters[name].numel() / _ALIGNED) * _ALIGNED
            segments.append(Segment(slice(first, column), *factors))
        shapes = tuple(parameters[name].shape for name in names)
        return cls(tuple(names), shapes, tuple(starts), column, tuple(segments))

    def cut(self, rows: Tensor) -> dict[str, Tensor]:
        """The parameters in a stack of rows (or in one row), by name; views."""
        parts = rows.split([b - a for a, b in pairwise((*self.starts, self.total))], dim=-1)
        lead = rows.shape[:-1]
        return {
            name: part[..., : shape.numel()].unflatten(-1, tuple(shape)) if shape else part[..., 0].view(lead)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }


class Replicas:
    """The runs' parameters (`flat`), optimizer state, steps it has taken and buffers; dimension 0 is the run.

    Steps taken are one number for a run, or one for each of its columns where some parameters have come in later.
    """

    def __init__(
        self, layout: ParameterLayout, model: nn.Module, state: Sequence[str], rows: int, dtype: torch.dtype
    ) -> None:
        device = next(model.parameters()).device
        self.layout = layout
        self.flat = torch.zeros(rows, layout.total, dtype=dtype, device=device)
        self.state: Rows = {name: torch.zeros_like(self.flat) for name in state}
        self.steps_taken = torch.zeros(rows, 1, dtype=torch.float64, device=device)
        self.buffers = {
            name: buffer.detach().expand(rows, *buffer.shape).clone() for name, buffer in naming.buffers(model).items()
        }
        self.flat.requires_grad_()

    def __len__(self) -> int:
        return len(self.flat)

    @torch.no_grad()
    def copy_in(self, row: int, model: nn.Module, optimizer: Optimizer) -> None:
        parameters = naming.parameters(model)
        for name, view in self.layout.cut(self.flat.detach()[row]).items():
            view.copy_(parameters[name])
        for name, buffer in naming.buffers(model).items():
            self.buffers[name][row].copy_(buffer)
        held = [optimizer.state.get(parameters[name], {}) for name in self.layout.names]
        steps = [float(state.get("step", 1.0)) if self.state.keys() <= state.keys() else 0.0 for state in held]
        if len(set(steps)) > 1 and self.steps_taken.shape[1] == 1:  # those of new blocks fewer than the others
            self.steps_taken = self.steps_taken.expand(-1, self.layout.total).contiguous()
        if self.steps_taken.shape[1] == 1:
            self.steps_taken[row] = steps[0]
        else:
            for taken, view in zip(steps, self.layout.cut(self.steps_taken[row]).values(), strict=True):
                view.fill_(taken)
        for kind, matrix in self.state.items():
            for state, taken, view in zip(held, steps, self.layout.cut(matrix[row]).values(), strict=True):
                if taken:
                    view.copy_(state[kind])

    @torch.no_grad()
    def copy_out(self, row: int, model: nn.Module, optimizer: Optimizer) -> None:
        parameters = naming.parameters(model)
        for name, view in self.layout.cut(self.flat.detach()[row]).items():
            parameters[name].copy_(view)
        for name, buffer in naming.buffers(model).items():
            buffer.copy_(self.buffers[name][row])
        names = {id(p): name for name, p in parameters.items()}
        states = {kind: self.layout.cut(matrix[row]) for kind, matrix in self.state.items()}
        taken = self.layout.cut(self.steps_taken[row].expand(self.layout.total))
        for group in optimizer.param_groups if states else ():
            for p in group["params"]:
                steps = float(taken[names[id(p)]].flatten()[0])
                if not steps:
                    continue
                held: dict[str, Any] = {kind: views[names[id(p)]].clone() for kind, views in states.items()}
                if "exp_avg" in held:
                    on = p.device if group.get("fused") or group.get("capturable") else None
                    held["step"] = torch.tensor(steps, dtype=torch.float32, device=on)
                optimizer.state[p] = held

    @torch.no_grad()
    def keep_rows(self, rows: Sequence[int]) -> None:
        self.__dict__.update(vars(self.view(torch.tensor(list(rows), device=self.flat.device))))

    def view(self, rows: slice | Tensor) -> Replicas:
        """Some of the runs; a slice in the same memory."""
        view = copy(self)
        view.flat = self.flat.detach()[rows].requires_grad_()
        view.state = {name: matrix[rows] for name, matrix in self.state.items()}
        view.steps_taken = self.steps_taken[rows]
        view.buffers = {name: buffer[rows] for name, buffer in self.buffers.items()}
        return view

    def row(self, row: int) -> tuple[Tensor, dict[str, Tensor]]:
        """One run's parameters and buffers, in the same memory."""
        return self.flat.detach()[row], {name: buffer[row] for name, buffer in self.buffers.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All of these tensors by name, in the same memory."""
        tensors = {"flat": self.flat.detach(), "taken": self.steps_taken}
        tensors |= {f"state/{name}": matrix for name, matrix in self.state.items()}
        return tensors | {f"buffer/{name}": buffer for name, buffer in self.buffers.items()}

    def put_back(self, before: Mapping[str, Tensor], sound: Tensor) -> None:
        """Give the runs that are not sound all that they had before a step; `before`: copies of `tensors`."""
        for name, tensor in self.tensors().items():
            mask = sound.reshape(-1, *(1 for _ in tensor.shape[1:]))
            tensor.copy_(torch.where(mask, tensor, before[name]))

    def finite_rows(self) -> list[bool]:
        """Whether each run's parameters and state are finite; what lies between them for alignment does not matter."""
        matrices = [self.flat.detach(), *self.state.values()]
        parts = [part for matrix in matrices for part in self.layout.cut(matrix).values()]
        finite: list[bool] = torch.stack([p.reshape(len(p), -1).isfinite().all(1) for p in parts]).all(0).tolist()
        return finite


StepResult = tuple[Tensor, Tensor | None]
"""The loss of every run, and the norms of their gradients where those are clipped."""


class NotCapturable(Exception):
    """The model or its loss does something that a CUDA graph cannot record; its steps still work without one."""


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace for every stream that has multiplied matrices."""
    return torch.cuda.Stream(device)


class StepGraph:
    """A captured step: inputs are copied to a fixed place, everything else stays where it is."""

    def __init__(self, step: Callable[[Tensor, Tensor], StepResult], replicas: Replicas, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.clone(), y.clone()
        self._warm_up(step, replicas)
        self.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph):
                self.losses = step(self.x, self.y)
        except RuntimeError as error:  # what ends a capture that ran out of memory may hide that it did
            if isinstance(error, torch.OutOfMemoryError):
                raise
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise NotCapturable(str(error)) from error

    def _warm_up(self, step: Callable[[Tensor, Tensor], StepResult], replicas: Replicas) -> None:
        """Take a few steps on a stream of their own, as capturing needs, and put the runs back to where they stood."""
        before = {name: tensor.clone() for name, tensor in replicas.tensors().items()}
        here, side = torch.cuda.current_stream(self.x.device), _side_stream(self.x.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(3):
                step(self.x, self.y)
        here.wait_stream(side)
        with torch.no_grad():
            for name, tensor in replicas.tensors().items():
                tensor.copy_(before[name])

    def replay(self, x: Tensor, y: Tensor) -> StepResult:
        """Take the step with this batch; its result is valid until the next."""
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.losses


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
        self._under_vmap(row, buffers, x, y)
        with self._in_fp32():  # bf16 may round a gradient by a tenth of its size, which says nothing of vmap
            self._compare_with_alone(row, buffers, x, y)

    def _compare_with_alone(self, row: Tensor, buffers: Named, x: Tensor, y: Tensor) -> None:
        vmapped, gradient = self._under_vmap(row, buffers, x, y)
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

    def _under_vmap(self, row: Tensor, buffers: Named, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
        """A run's loss and gradient with the fastest attention that works; if the plainest fails, it is not that."""

        def step() -> tuple[float, Tensor]:
            flat = row.detach().unsqueeze(0).clone().requires_grad_()
            held = {name: buffer.unsqueeze(0).clone() for name, buffer in buffers.items()}
            # with a batch of its own: a model that looks at its inputs' values can be vmapped over parameters alone
            losses = self.losses(flat, held, x.unsqueeze(0), y.unsqueeze(0), shared=False)
            (gradient,) = torch.autograd.grad(losses.sum(), flat)
            return float(losses[0].detach()), gradient[0]

        for kernels in _ATTENTION[_ATTENTION.index(self.attention) : -1]:
            self.attention = kernels
            with suppress(NotStackable):
                return self._call_vmapped(step)
        self.attention = _ATTENTION[-1]
        return self._call_vmapped(step)

    def _call_vmapped(self, function: Callable[[], T]) -> T:
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
