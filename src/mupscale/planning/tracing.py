"""A model's run as a list of tensor operations, so that each can be run again with other weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from mupscale.core import Plan, check_dtype, copy_model, naming
from mupscale.planning.model_calls import call_arguments, drawing, run_on_batch
from mupscale.planning.precision import in_double
from mupscale.system import MupscaleError, ways_out

_NORMS = re.compile(r"norm|rsqrt|sqrt|^var|^std")
_QUIET = 1e-3  # a LayerScale starts at 1e-6: what it multiplies would change nothing that rounding does not


@dataclass(frozen=True)
class Ref:
    """A tensor of a run, by its number."""

    number: int


@dataclass(frozen=True)
class Operation:
    """One tensor operation: its arguments, with a Ref for every tensor, the numbers of its results, and its module."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    module: str

    @cached_property
    def name(self) -> str:
        """As torch calls it, without its namespace and variant."""
        return str(self.function).split(".")[1]

    @cached_property
    def refs(self) -> list[int]:
        """The numbers of its tensor arguments."""
        flat, _ = tree_flatten((self.args, self.kwargs), is_leaf=lambda x: isinstance(x, Ref))
        return [x.number for x in flat if isinstance(x, Ref)]

    @property
    def changes_arguments(self) -> bool:
        """Whether it writes into one of its arguments."""
        return bool(self.function._schema.is_mutable)

    @property
    def is_view(self) -> bool:
        """Whether its result is a view of an argument."""
        return bool(self.function.is_view)

    @property
    def depends_on_values(self) -> bool:
        """Whether values decide on what is run next, or on how large its result is."""
        return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(self.function.tags))

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers; attention does so for dropout alone, which is off."""
        return torch.Tag.nondeterministic_seeded in self.function.tags and "attention" not in self.name

    def run(self, tensors: Mapping[int, Tensor]) -> list[Any]:
        """Its results, as a flat list, for these tensors in place of the arguments; of random ones always the same."""

        def value(x: Any) -> Any:
            if isinstance(x, Ref):
                return tensors[x.number]
            return type(x)(map(value, x)) if isinstance(x, list | tuple) else x

        given = [tensors[number] for number in self.refs] if self.is_random else []
        with drawing(self.results[0] or 0, given) if self.is_random else nullcontext():
            result = self.function(*map(value, self.args), **{name: value(x) for name, x in self.kwargs.items()})
        return [result] if isinstance(result, Tensor) else tree_flatten(result)[0]


@dataclass
class RecordedRun:
    """What a model did with one batch. leaves: tensors that no operation made, `names` of parameters and buffers."""

    operations: list[Operation] = field(default_factory=list)
    leaves: dict[int, Tensor] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    outputs: list[int] = field(default_factory=list)


def record_run(model: nn.Module, inputs: Any) -> RecordedRun:
    """Run the model on a batch and note every tensor operation.

    >>> run = record_run(nn.Linear(2, 3), torch.ones(1, 2))
    >>> [operation.name for operation in run.operations], run.names
    (['t', 'addmm'], {0: 'weight', 2: 'bias'})
    """
    recorder = OperationRecorder(model, call_arguments(inputs))
    with module_paths(model, recorder.path), recorder:
        output = run_in_float64(model, inputs)
    recorder.run.outputs = [recorder.number(t) for t in tensors_in(output)]
    return recorder.run


def runs_norms(model: nn.Module, inputs: Any) -> bool:
    """Whether a model divides by the size of something on a batch, as norms do, whatever they are called.

    >>> [runs_norms(layer, torch.ones(1, 2)) for layer in (nn.RMSNorm(2), nn.Linear(2, 2))]
    [True, False]
    """
    return any(_NORMS.search(operation.name) for operation in record_run(*in_float64(model, inputs)).operations)


def run_in_float64(model: nn.Module, inputs: Any, seed: int = 0) -> Any:
    """What the model returns for a batch, float64 throughout: rounding to float32 would look like a wrong plan.

    seed: of what it draws, which is the same at every width as long as that has the same shapes.

    >>> run_in_float64(nn.Conv1d(1, 2, 1), torch.ones(1, 1, 1, dtype=torch.float64))
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: Conv1d does not run on the batch in float64 (RuntimeError: Input type ...
    """
    with drawing(seed, model.parameters()):
        return run_on_batch(model, inputs, in_double=True)


def why_random(model: nn.Module, batch: Any) -> str:
    """In words, that what a model computes on a batch depends on a seed; nothing where it does not.

    >>> why_random(nn.Linear(1, 1).double(), torch.ones(1, 1, dtype=torch.float64))
    ''
    """
    with torch.no_grad():
        first, second = (tensors_in(run_in_float64(model, batch, seed)) for seed in (0, 1))
    if all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=False)):
        return ""
    kind = type(naming.unwrap(model)).__name__
    return f"{kind} draws random numbers, which differ at a different width where they are drawn for units that grow"


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in what a model is given or returns: tuples, lists, dicts, and what behaves like a dict.

    >>> len(tensors_in({"logits": torch.ones(1), "states": (torch.ones(1), None)}))
    2
    """
    return [x for x in tree_flatten(_plain(tree))[0] if isinstance(x, Tensor)]


def in_float64(
    model: nn.Module, inputs: Any, *, generic: int | None = None, like: nn.Module | None = None
) -> tuple[nn.Module, Any]:
    """A copy of the model without dropout, and the batch, both in float64.

    generic: a seed for weights to put in place of the model's, so that no two units are alike; of the same size, but
    none so small that what it does could not be seen.
    like: the model that the copy is compared with, whose train or eval mode it takes, part by part.

    >>> model, batch = in_float64(nn.Linear(1, 2), torch.ones(1, 1), generic=0)
    >>> batch.dtype, bool(model.bias[0] != model.bias[1])
    (torch.float64, True)
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(t.is_meta for t in tensors):
        raise MupscaleError(
            "a model on the meta device cannot be run"
            + ways_out(build="build it with memory to plan by running", no_inputs="leave out inputs=")
        )
    for name, p in naming.parameters(model).items():
        if p.is_complex():
            check_dtype(name, p)
    memo = {id(t): _copied_in_double(t) for t in tensors if type(t) in (nn.Parameter, Tensor)}  # read once
    copied = copy_model(naming.unwrap(model), {**memo, **computed_tensors(model)}).double()
    if like is not None:
        take_modes(copied, like)
    silence_dropout(copied)
    if generic is not None:
        generator = torch.Generator().manual_seed(generic)
        for p in copied.parameters():
            size = float(p.detach().square().mean().sqrt()) if p.numel() else 0.0
            draw = torch.randn(p.shape, generator=generator, dtype=torch.float32)  # several times as fast as in float64
            p.data = draw.to(p.device, torch.float64).mul_(size if size >= _QUIET else 0.1)
        parameters = naming.parameters(copied)
        for buffer in (tensor for name, tensor in saved_tensors(copied).items() if name not in parameters):
            buffer.mul_(0.5 + torch.rand(buffer.shape, generator=generator, dtype=torch.float64).to(buffer.device))
    return copied, in_double(inputs)


def take_modes(model: nn.Module, like: nn.Module, plan: Plan | None = None) -> None:
    """Put every module into the train or eval mode that the module of its path has in the other model.

    plan: from the other model to this one, where what a module comes from may have another path.

    >>> model = nn.Linear(2, 2)
    >>> take_modes(model, nn.Linear(4, 4).eval())
    >>> model.training
    False
    """
    modes = naming.modules(like)
    for path, module in naming.modules(model).items():
        if (origin := path if plan is None else plan.old_path(path)) in modes:
            module.training = modes[origin].training


def computed_tensors(model: nn.Module) -> dict[int, Tensor]:
    """For deepcopy's memo: tensors that modules keep of their last computation, without the graph that it refuses.

    Old-style weight_norm and prune leave one, which they compute anew before every forward pass.

    >>> model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))  # the new style keeps none
    >>> computed_tensors(model)
    {}
    """
    kept = (value for module in model.modules() for value in vars(module).values())
    return {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and t.grad_fn is not None}


def _copied_in_double(tensor: Tensor) -> Tensor:
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    copied = tensor.detach().to(dtype, copy=True)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def silence_dropout(model: nn.Module) -> bool:
    """Dropout draws other masks at another width, so it is switched off; everything else trains. Was there any?

    >>> model = nn.Sequential(nn.Dropout(0.5))
    >>> silence_dropout(model), model[0].p
    (True, 0.0)
    """
    was_on = False
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            was_on |= module.training and module.p > 0
            module.eval()
            module.p = 0.0  # attention layers hand it on to scaled_dot_product_attention
        for name, value in list(vars(module).items()):  # attention and recurrent layers keep a rate of their own
            if "drop" in name.lower() and isinstance(value, float):
                was_on |= module.training and value > 0
                setattr(module, name, 0.0)
    return was_on


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and the floating-point buffers that a state dict holds; one that is shared, under its first name.

    >>> list(saved_tensors(nn.BatchNorm1d(2)))
    ['weight', 'bias', 'running_mean', 'running_var']
    """
    tensors: dict[str, Tensor] = {name: p.detach() for name, p in naming.parameters(model).items()}
    seen = set[int]()
    for path, module in naming.modules(model).items():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            if buffer.is_floating_point() and id(buffer) not in seen:
                seen.add(id(buffer))
                tensors[f"{path}.{name}" if path else name] = buffer
    return tensors


class OperationRecorder(TorchDispatchMode):
    """Notes operations; keeps every tensor alive, so that an id stands for one tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch would load its compiler for seconds to make sure

    def __init__(self, model: nn.Module, arguments: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = RecordedRun()
        self.path = [""]
        self.numbers: dict[int, int] = {}
        self.alive: list[Tensor] = []
        self.named = {id(t): n for n, t in {**naming.buffers(model), **naming.parameters(model)}.items()}
        self.stored = {_memory(t): n for n, t in naming.parameters(model).items()}
        self.given = {id(t) for t in tensors_in(arguments)}

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor; a new one is a leaf."""
        if id(tensor) not in self.numbers:
            number = self._new(tensor)
            name = self.named.get(id(tensor)) or self.stored.get(_memory(tensor))
            if name is not None:
                earlier = next((n for n, other in self.run.names.items() if other == name), None)
                if earlier is not None:
                    self.numbers[id(tensor)] = earlier
                    return earlier
                self.run.names[number] = name
            elif id(tensor) in self.given:
                self.run.inputs.add(number)
            self.run.leaves[number] = tensor
        return self.numbers[id(tensor)]

    def _new(self, tensor: Tensor) -> int:
        self.alive.append(tensor)
        self.numbers[id(tensor)] = len(self.alive) - 1
        return self.numbers[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbered = tree_map(lambda x: Ref(self.number(x)) if isinstance(x, Tensor) else x, (args, dict(kwargs or {})))
        output = func(*args, **(kwargs or {}))
        results = []
        for x in tree_flatten(output)[0]:
            is_numbered = isinstance(x, Tensor) and id(x) in self.numbers
            results.append((self.numbers[id(x)] if is_numbered else self._new(x)) if isinstance(x, Tensor) else None)
        self.run.operations.append(Operation(func, numbered[0], numbered[1], tuple(results), self.path[-1]))
        return output


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


@contextmanager
def module_paths(model: nn.Module, path: list[str]) -> Iterator[None]:
    """Keep the path of the module that runs at the end of the list."""
    handles: list[Any] = []
    for name, module in naming.modules(model).items():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: path.append(name)))
        handles.append(module.register_forward_hook(lambda *_: (path.pop(), None)[1], always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _readable_fields(output: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass; a config may refuse to read one that differs by layer."""
    for each in fields(output):
        try:
            value = getattr(output, each.name)
        except Exception:
            continue
        yield each.name, value


def _plain(output: Any) -> Any:
    """Dataclass-like outputs of transformers, and dataclasses, as a dict, for the tree to look into."""
    if is_dataclass(output) and not isinstance(output, dict | type):
        output = dict(_readable_fields(output))
    if isinstance(output, dict):
        return {key: _plain(value) for key, value in output.items()}
    if isinstance(output, tuple | list):
        return [_plain(value) for value in output]
    return output
