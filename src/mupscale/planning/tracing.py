"""A model run on a batch: in float64, as a list of operations that can be run again, and with what its modules give.

Runs of two models are made comparable where one copies a tensor in memory and the other has no need to.
"""

from __future__ import annotations

import inspect
import random
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from mupscale.core import Plan, check_dtype, copy_model, naming
from mupscale.system import MupscaleError, ways_out

_LESS = frozenset((torch.float32, torch.bfloat16, torch.float16))
_NAMED = frozenset(f"torch.{device}{kind}Tensor" for device in ("", "cuda.") for kind in ("Float", "BFloat16", "Half"))
_LOWER = frozenset((Tensor.float, Tensor.bfloat16, Tensor.half))
_LIKE_ANOTHER = frozenset((Tensor.to, Tensor.type_as))
_MADE = frozenset((torch.full, torch.tensor, torch.arange, torch.linspace))
_PRODUCTS = frozenset(
    (
        *(torch.matmul, torch.mm, torch.bmm, torch.einsum, nn.functional.linear),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm),
    )
)
_GROUPED = frozenset(f for f in (getattr(torch, "_grouped_mm", None), getattr(nn.functional, "grouped_mm", None)) if f)


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor, **others: Any) -> Tensor:
    """What torch's own gives for the experts of a mixture, which it does not in float64."""
    rows = a.tensor_split(offs[:-1].cpu().long())
    return torch.cat([part @ matrix for part, matrix in zip(rows, b, strict=True)])


def in_double(values: Any) -> Any:
    """A batch, or any nesting of tensors, with those of floating point in float64."""
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, values)


class KeepDouble(TorchFunctionMode):
    """While it is entered, no operation turns a float64 tensor into one of less precision.

    What was less before (rotary frequencies, positions as floats) stays as it is: it does not depend on the width.
    In a product with float64 it becomes that. Numbers that are made of none, which may (ALiBi's slopes), are float64.
    Autocast leaves float64 alone by itself.

    >>> x = torch.ones(2, dtype=torch.float64)
    >>> with KeepDouble():
    ...     x.float().dtype, x.to(torch.bfloat16).dtype, (torch.ones(2) @ x.float()).dtype
    (torch.float64, torch.float64, torch.float64)
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        lowers = function in _LOWER
        if len(args) + len(kwargs) < 2 and not lowers:  # an attribute of a tensor, as most of the many calls are
            return function(*args, **kwargs)
        if function in _PRODUCTS and any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args):
            return function(*in_double(args), **kwargs)  # torch refuses two precisions in one product
        if function in _GROUPED and len(args) > 1 and args[0].dtype == torch.float64 and args[1].dim() == 3:
            return _grouped_product(*in_double(args), **kwargs)
        if function in _MADE and kwargs.get("dtype") in _LESS:
            return function(*args, **{**kwargs, "dtype": torch.float64})
        tensor = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float64 or function is Tensor.view:
            return function(*args, **kwargs)
        if lowers:
            return tensor
        if function in _LIKE_ANOTHER:  # whose dtype it takes over
            others = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
            if others and others[0].dtype in _LESS:
                return tensor.to(others[0].device)

        def double(value: Any) -> Any:
            kind = type(value)
            is_less = (kind is torch.dtype and value in _LESS) or (kind is str and value in _NAMED)
            return torch.float64 if is_less else value

        return function(*map(double, args), **{name: double(value) for name, value in kwargs.items()})


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called on a batch: a tuple is its positional arguments, a dict its keywords."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def run_on_batch(model: nn.Module, inputs: Any, *, in_double: bool = False) -> Any:
    """What the model returns for a batch; what it raises is passed on in a sentence, as the cause of a MupscaleError.

    in_double: the model and the batch are in float64, and everything stays so.
    """
    args, kwargs = call_arguments(inputs)
    try:
        with KeepDouble() if in_double else nullcontext():
            return model(*args, **kwargs)
    except Exception as error:
        check_takes(model, inputs)
        kind, said = type(naming.unwrap(model)).__name__, " ".join(f"{type(error).__name__}: {error}".split())
        runs_in_float32 = False
        if in_double:
            with suppress(Exception), torch.no_grad():  # whatever it is that fails in float32, too
                single = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, inputs)
                args, kwargs = call_arguments(single)
                copy_model(model).float()(*args, **kwargs)
                runs_in_float32 = True
        if runs_in_float32:
            raise MupscaleError(
                f"{kind} does not run on the batch in float64 ({said}), but a plan by running needs "
                f"float64{ways_out(double='let nothing in the model ask for float32', no_inputs='leave out inputs=')}"
            ) from error
        raise MupscaleError(
            f"{kind} does not run on the batch ({said}): pass what the model is called with: a tensor, a tuple of "
            "arguments or a dict of keywords"
        ) from error


def check_takes(model: nn.Module, inputs: Any) -> None:
    """An error that names the arguments of the model's `forward` where these are not what it can be called with."""
    args, kwargs = call_arguments(inputs)
    plain = naming.unwrap(model)
    try:
        signature = inspect.signature(plain.forward)
        signature.bind(*args, **kwargs)
    except ValueError:
        return  # what has no signature cannot be looked at
    except TypeError:
        given = ", ".join(f"{name}=" for name in kwargs) or f"{len(args)} argument{'s' * (len(args) != 1)}"
        raise MupscaleError(
            f"the batch gives {given}, and {type(plain).__name__}.forward takes ({', '.join(signature.parameters)}): "
            "pass what the model is called with: a tensor, a tuple of arguments or a dict of keywords, without labels "
            "that only the loss needs"
        ) from None


@contextmanager
def drawing(seed: int, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, the CPU and the devices of these tensors draw from a seed; afterwards they go on where they were.

    So do Python's own generator and NumPy's, with which transformers masks sound.
    """
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    before = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)):
                generator.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])


_NORMS = re.compile(r"norm|rsqrt|sqrt|^var|^std")
_SAMPLE = 1 << 14
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
    def is_differentiable(self) -> bool:
        """Whether torch differentiates it: not where a dtype turns numbers into whole ones, nor what is told out=."""
        dtype = self.kwargs.get("dtype")
        counts = isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex)
        writes_into_given_memory = any(argument.is_out for argument in self.function._schema.arguments)
        return not (counts or writes_into_given_memory)

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers; attention does so for dropout alone, which is off."""
        return torch.Tag.nondeterministic_seeded in self.function.tags and "attention" not in self.name

    def run(self, tensors: Mapping[int, Tensor], *, in_place: bool = False) -> list[Any]:
        """Its results, as a flat list, for these tensors in place of the arguments, which stay as they are.

        Random ones are always the same, and those without values are zeros. in_place: arguments that the operation
        writes into do change; but never the statistics of a batch norm.
        """
        is_kept = "batch_norm" in self.name or (self.changes_arguments and not in_place)
        given = {number: tensors[number].clone() if is_kept else tensors[number] for number in self.refs}

        def value(x: Any) -> Any:
            if isinstance(x, Ref):
                return given[x.number]
            return type(x)(map(value, x)) if isinstance(x, list | tuple) else x

        draws = drawing(self.results[0] or 0, given.values()) if self.is_random else nullcontext()
        with draws, torch.set_grad_enabled(torch.is_grad_enabled() and self.is_differentiable):
            result = self.function(*map(value, self.args), **{name: value(x) for name, x in self.kwargs.items()})
        flat = [result] if isinstance(result, Tensor) else tree_flatten(result)[0]
        return [torch.zeros_like(x) for x in flat] if "empty" in self.name else flat


@dataclass
class Call:
    """A module's part of a run: tensors by number, and the stretch of operations in between.

    given: the floating-point tensors that it is called with. returned: the tensors that it gives back. first, last:
    where its operations begin and end in the run.
    """

    path: str
    given: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0


@dataclass
class RecordedRun:
    """What a model did with one batch. leaves: tensors that no operation made, `names` of parameters and buffers."""

    operations: list[Operation] = field(default_factory=list)
    leaves: dict[int, Tensor] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    outputs: list[int] = field(default_factory=list)

    @cached_property
    def _makers(self) -> dict[int, list[int]]:
        makers: dict[int, list[int]] = {}
        for position, operation in enumerate(self.operations):
            for number in operation.results:
                if number is not None:
                    makers.setdefault(number, []).append(position)
        return makers

    def maker(self, number: int, before: int) -> int | None:
        """The operation that last returned a tensor, or wrote into it, ahead of another operation."""
        return next((position for position in reversed(self._makers.get(number, ())) if position < before), None)


def record_run(model: nn.Module, inputs: Any, noted: Collection[str] = ()) -> OperationRecorder:
    """Run the model on a batch and note every tensor operation. noted: the paths of modules whose calls are, too."""
    recorder = OperationRecorder(model, call_arguments(inputs), noted)
    with hooked(model, recorder.end_call, recorder.begin_call), recorder:
        output = run_in_float64(model, inputs)
    recorder.run.outputs = [recorder.number(t) for t in tensors_in(output)]
    return recorder


def runs_norms(model: nn.Module, inputs: Any) -> bool:
    """Whether a model divides by the size of something on a batch, as norms do, whatever they are called."""
    return any(_NORMS.search(operation.name) for operation in record_run(*in_float64(model, inputs)).run.operations)


def run_in_float64(model: nn.Module, inputs: Any, seed: int = 0) -> Any:
    """What the model returns for a batch, float64 throughout: rounding to float32 would look like a wrong plan.

    seed: of what it draws, which is the same at every width as long as that has the same shapes.
    """
    with drawing(seed, model.parameters()):
        return run_on_batch(model, inputs, in_double=True)


def why_random(model: nn.Module, batch: Any) -> str:
    """In words, that what a model computes on a batch depends on a seed; nothing where it does not."""
    with torch.no_grad():
        first, second = (tensors_in(run_in_float64(model, batch, seed)) for seed in (0, 1))
    if all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=False)):
        return ""
    kind = type(naming.unwrap(model)).__name__
    return f"{kind} draws random numbers, which differ at a different width where they are drawn for units that grow"


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in what a model is given or returns: tuples, lists, dicts, and what behaves like a dict."""
    return [x for x in tree_flatten(_plain(tree))[0] if isinstance(x, Tensor)]


def in_float64(
    model: nn.Module, inputs: Any, *, generic: int | None = None, like: nn.Module | None = None
) -> tuple[nn.Module, Any]:
    """A copy of the model without dropout, and the batch, both in float64.

    generic: a seed for weights to put in place of the model's, so that no two units are alike; of the same size, but
    none so small that what it does could not be seen.
    like: the model that the copy is compared with, whose train or eval mode it takes, part by part; and the whole
    numbers in buffers that do not grow, since growth copies them.
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
    _check_not_compiled(model)
    memo: dict[int, Tensor] = {}
    for t in tensors:
        if type(t) in (nn.Parameter, Tensor):
            doubled = t.detach().to(_double_dtype(t), copy=True)  # read once
            memo[id(t)] = nn.Parameter(doubled, t.requires_grad) if isinstance(t, nn.Parameter) else doubled
    copied = copy_model(naming.unwrap(model), {**memo, **computed_tensors(model)}).double()
    if like is not None:
        take_modes(copied, like)
        take_whole_numbers(copied, like)
    silence_dropout(copied)
    use_plain_kernels(copied)
    if generic is not None:
        parameters = naming.parameters(copied)
        for name, p in parameters.items():
            p.data = generic_numbers(p, name, generic).double()
        for name, buffer in saved_tensors(copied).items():
            if name not in parameters:
                buffer.mul_(generic_numbers(buffer, name, generic, size=0.3).add_(1))
    return copied, in_double(inputs)


def _double_dtype(tensor: Tensor) -> torch.dtype:
    if tensor.is_complex():
        return torch.complex128
    return torch.float64 if tensor.is_floating_point() else tensor.dtype


def _check_not_compiled(model: nn.Module) -> None:
    """An error that names the first module that torch.jit has compiled: it takes no hooks and gives no operations."""
    for path, module in naming.modules(model).items():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"'{path}'" if path else "the model"
            build = "build both models without torch.jit, and compile the wide one after growth"
            roles = "leave out inputs= and pass roles= for its parameters"
            raise MupscaleError(
                f"{where} is compiled by torch.jit ({type(module).__name__}), so a run does not show what it computes"
                f"{ways_out(build=build, no_inputs=roles)}"
            )


@torch.no_grad()
def take_whole_numbers(model: nn.Module, like: nn.Module) -> None:
    """Give whole numbers and flags in buffers the values that growth copies, such as a permutation drawn when built.

    Buffers of floating point are known by their values in a run, and are widened like weights.
    """
    theirs = naming.buffers(like)
    for name, buffer in naming.buffers(model).items():
        is_number = buffer.is_floating_point() or buffer.is_complex() or buffer.numel() == 1
        if not is_number and name in theirs and theirs[name].shape == buffer.shape:
            buffer.copy_(theirs[name])


def generic_numbers(like: Tensor, name: str, seed: int, size: float | None = None) -> Tensor:
    """Numbers in float32 by a name, of which no two are alike, as large as a tensor's or of this size.

    But not so small that what they do could not be seen. Uniform ones, drawn sooner than normal ones.
    """
    if size is None:
        size = size_of(like)
        size = size if size >= _QUIET else 0.1
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}{name}".encode()))
    drawn = torch.rand(like.shape, generator=generator, dtype=torch.float32)
    return drawn.sub_(0.5).mul_(12**0.5 * size).to(like.device)


def size_of(values: Tensor) -> float:
    """The root mean square, of a part of very many numbers."""
    flat = values.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() // _SAMPLE)].double()
    return float(few.square().mean().sqrt()) if few.numel() else 0.0


def take_modes(model: nn.Module, like: nn.Module, plan: Plan | None = None) -> None:
    """Put every module into the train or eval mode that the module of its path has in the other model.

    plan: from the other model to this one, where what a module comes from may have another path.
    """
    modes = naming.modules(like)
    for path, module in naming.modules(model).items():
        if (origin := path if plan is None else plan.old_path(path)) in modes:
            module.training = modes[origin].training


def computed_tensors(model: nn.Module) -> dict[int, Tensor]:
    """For deepcopy's memo: tensors that modules keep of their last computation, without the graph that it refuses.

    Old-style weight_norm and prune leave one, which they compute anew before every forward pass.
    """
    kept = (value for module in model.modules() for value in vars(module).values())
    return {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and t.grad_fn is not None}


def silence_dropout(model: nn.Module) -> bool:
    """Dropout draws other masks at another width, so it is switched off; everything else trains. Was there any?"""
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


_RUNS_IN_FLOAT64 = ("eager", "sdpa")


def use_plain_kernels(model: nn.Module) -> None:
    """Let the modules of transformers compute by formulas that float64 has, and that can be differentiated in parts.

    In place: for copies. A model keeps the choice in its config, of which a deep copy has its own.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        # The default for experts is one product for all of them (grouped_mm), which torch has in bfloat16 and float32.
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"
        # Flash attention has half precision alone. Torch's own attention runs in float64, and is kept.
        attention = getattr(config, "_attn_implementation", None)
        if attention is not None and attention not in _RUNS_IN_FLOAT64:
            config._attn_implementation = "eager"


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and buffers of real or complex numbers that a state dict holds; a shared one by its first name."""
    unsaved = {id(m._buffers[name]) for m in naming.modules(model).values() for name in m._non_persistent_buffers_set}
    tensors: dict[str, Tensor] = {name: p.detach() for name, p in naming.parameters(model).items()}
    buffers = naming.buffers(model).items()
    return tensors | {
        name: b for name, b in buffers if (b.is_floating_point() or b.is_complex()) and id(b) not in unsaved
    }


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under all their names, and buffers."""
    model = naming.unwrap(model)
    pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {naming.canonical(name): tensor for name, tensor in pairs}


class OperationRecorder(TorchDispatchMode):
    """Notes operations; keeps every tensor alive, so that an id stands for one tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch would load its compiler for seconds to make sure

    def __init__(self, model: nn.Module, arguments: Any, noted: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = RecordedRun()
        self.calls: list[Call] = []
        self.open: list[Call] = [Call("")]
        self.noted = noted
        self.numbers: dict[int, int] = {}
        self.alive: list[Tensor] = []
        self.named = {id(t): n for n, t in {**naming.buffers(model), **naming.parameters(model)}.items()}
        self.stored = {_memory(t): n for n, t in naming.parameters(model).items()}
        self.given = {id(t) for t in tensors_in(arguments)}

    def begin_call(self, path: str, arguments: Any) -> None:
        """A module is called."""
        call = Call(path, first=len(self.run.operations))
        if path in self.noted:
            call.given = self._numbers_in(arguments)
            self.calls.append(call)
        self.open.append(call)

    def end_call(self, path: str, output: Any) -> None:
        """A module's call is over, or failed."""
        call = self.open.pop()
        call.last = len(self.run.operations)
        if path in self.noted:
            call.returned = self._numbers_in(output)

    def _numbers_in(self, values: Any) -> list[int]:
        return [self.number(t) for t in tensors_in(values) if t.is_floating_point()]

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
        self.run.operations.append(Operation(func, numbered[0], numbered[1], tuple(results), self.open[-1].path))
        return output


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


OnCall = Callable[[str, Any], None]


@contextmanager
def hooked(model: nn.Module, after: OnCall, before: OnCall | None = None) -> Iterator[None]:
    """Inside, every module's path and output are told after it is called, and its path and arguments before that."""
    handles: list[Any] = []
    for path, module in naming.modules(model).items():
        end = partial(lambda path, module, arguments, output: after(path, output), path)
        handles.append(module.register_forward_hook(end, always_call=True))
        if before is not None:
            begin = partial(lambda path, module, *arguments: before(path, arguments), path)
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _plain(output: Any) -> Any:
    """Dataclass-like outputs of transformers, and dataclasses, as a dict, for the tree to look into."""
    if is_dataclass(output) and not isinstance(output, dict | type):
        readable = {}
        for each in fields(output):
            with suppress(Exception):  # a config may refuse to read a field that differs by layer
                readable[each.name] = getattr(output, each.name)
        output = readable
    if isinstance(output, dict):
        return {key: _plain(value) for key, value in output.items()}
    if isinstance(output, tuple | list):
        return [_plain(value) for value in output]
    return output


class Recorder(ExitStack):
    """Outputs of every module of a model, in the order in which they were computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.outputs: dict[str, Tensor] = {}

    def __enter__(self) -> Recorder:
        def note(path: str, output: Any) -> None:
            tensor = next((t for t in tensors_in(output) if t.is_floating_point()), None)
            if tensor is not None:
                self.outputs.setdefault(path, tensor.detach())

        self.enter_context(hooked(self.model, note))
        return self


_SHAPES = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def without_copies(run: RecordedRun) -> RecordedRun:
    """The run without copies of tensors that nothing is written into; numbers in the order in which tensors occur."""
    changed = _changed(run)
    same: dict[int, int] = {}  # the number of a copy: that of what it is a copy of
    numbers: dict[int, int] = {}

    def new(number: int) -> int:
        return numbers.setdefault(same.get(number, number), len(numbers))

    def ref(x: Any) -> Any:
        return Ref(new(x.number)) if isinstance(x, Ref) else x

    operations = []
    for op in run.operations:
        is_plain, function = not changed & {*op.refs, *op.results}, op.function
        if is_plain and function is torch.ops.aten.clone.default:
            same |= {number: same.get(op.refs[0], op.refs[0]) for number in op.results if number is not None}
            continue
        if is_plain and function in _SHAPES:
            function = torch.ops.aten.reshape.default
        args, kwargs = tree_map(ref, (op.args, op.kwargs), is_leaf=lambda x: isinstance(x, Ref))
        results = tuple(None if number is None else new(number) for number in op.results)
        operations.append(Operation(function, args, kwargs, results, op.module))
    return RecordedRun(
        operations,
        {new(number): leaf for number, leaf in run.leaves.items()},
        {new(number): name for number, name in run.names.items()},
        {new(number) for number in run.inputs},
        [new(number) for number in run.outputs],
    )


def _changed(run: RecordedRun) -> set[int | None]:
    """Tensors that some operation writes into, themselves or through a view."""
    groups: dict[int, set[int | None]] = {}
    written: list[int] = []
    for op in run.operations:
        if op.changes_arguments:
            written += [number for number in op.refs if number in op.results]
        if op.is_view or op.changes_arguments:
            members = set[int | None]().union(*(groups.get(n, {n}) for n in (*op.refs, *op.results) if n is not None))
            groups |= {number: members for number in members if number is not None}
    return set[int | None]().union(*(groups.get(number, {number}) for number in written))


Shapes = Sequence[tuple[int, ...]]
_UNIT = 1e-6
_Found = TypeVar("_Found")


def differentiated(attempt: Callable[[], _Found], models: Sequence[nn.Module]) -> _Found:
    """What an attempt finds that runs models and differentiates: in training mode where that fails in theirs.

    In eval mode some write a state in place that the gradient needs, as RWKV does.
    """
    try:
        return attempt()
    except RuntimeError as error:
        for model in models:
            model.zero_grad()
            model.train()
        try:
            return attempt()
        except (RuntimeError, MupscaleError):
            raise MupscaleError(
                f"{type(models[0]).__name__} runs on the batch but gives no gradients "
                f"({' '.join(str(error).split())}). Call it as in training, without a cache that is written in place"
            ) from error


def outputs_in_float64(model: nn.Module, batch: Any) -> list[Tensor]:
    """Of what a model returns for a batch, the tensors of floating point."""
    return [t for t in tensors_in(run_in_float64(model, batch)) if t.is_floating_point()]


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """By name, of the parameters that a loss depends on."""
    if loss.requires_grad:
        loss.backward()
    return {name: p.grad for name, p in naming.parameters(model).items() if p.grad is not None}


def gradient_loss(outputs: Sequence[Tensor], narrow: Shapes | None = None, wide: Shapes | None = None) -> Tensor:
    """A generic loss of outputs; of one of two models, which have these shapes in the two."""
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros((), dtype=torch.float64)
    same = [tuple(output.shape) for output in outputs]
    for output, before, after in zip(outputs, narrow or same, wide or same, strict=True):
        grown = [d for d, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
        shape = [1 if d in grown else n for d, n in enumerate(output.shape)]
        push = torch.randn(shape, generator=generator, dtype=output.dtype).to(output.device)
        if output.requires_grad:
            if len(grown) == 1 and has_length_one(output, grown[0]):  # the copies are shorter the more there are
                push = push * output.shape[grown[0]] ** 0.5
            loss = loss + ((output.mean(grown, keepdim=True) if grown else output) * push).sum().cpu()
    return loss


def has_length_one(vectors: Tensor, dim: int = -1, slack: float = _UNIT) -> bool:
    """Whether all of them are divided by their own length, as embeddings that are compared by angle."""
    lengths = vectors.detach().norm(dim=dim)
    return vectors.numel() > 0 and bool((lengths - 1).abs().max() <= slack)
