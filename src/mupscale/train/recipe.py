"""A recipe: everything that defines a training run, as plain values that JSON and YAML can hold.

Classes by their import path, with the arguments they are made with; growth of the model, and how new units are filled,
and what new blocks are; and the recipe itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import DepthRule, RuleSet, WholeWidth, Width
from mupscale.data import Data, as_data
from mupscale.family import Family
from mupscale.growth import (
    GrowthSettings,
    usual_how,
)
from mupscale.optim import Schedule, default_hyper
from mupscale.system import (
    MupscaleError,
    Must,
    NotNegative,
    PlanError,
    check_argument,
    parse_record,
    show_short,
    told_fields,
)

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Spec:
    """A class by its import path, and the arguments it is made with.

    Args:
        class_path: import path of the class, e.g. mupscale.models.MLP
        init_args: arguments by name

    Example:
        >>> import torch
        >>> Spec("torch.nn.Linear", {"in_features": 3}).make(torch.nn.Module, out_features=2)
        Linear(in_features=3, out_features=2, bias=True)
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "init_args", _plain(self.init_args))

    def load(self) -> Any:
        return import_path(self.class_path)

    def make(self, kind: type[_Kind], /, **more: Any) -> _Kind:
        """An instance of this kind; `more` goes before init_args of the same name. What is of another is not called."""
        instance = self.call(load_of_kind(self.class_path, kind), **more)
        if not isinstance(instance, kind):
            raise MupscaleError(f"{self.class_path} gave a {type(instance).__name__}, which is not a {kind_name(kind)}")
        return instance

    def call(self, target: Callable[..., Any], /, **more: Any) -> Any:
        """What the class or function gives for init_args and `more`, which goes before arguments of the same name."""
        arguments = {**self.init_args, **more}
        try:
            inspect.signature(target).bind(**arguments)
        except TypeError as error:
            raise MupscaleError(f"{self.class_path} cannot be made: {error}") from None
        return target(**arguments)

    def check_plain(self) -> None:
        for name, value in self.init_args.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise MupscaleError(
                    f"{self.class_path}: {name} is a {type(value).__name__}, which a run's files cannot hold: "
                    f"give plain values, or no folder (out)"
                ) from None


def import_path(path: str) -> Any:
    """The class or function that a dotted path names."""
    module, _, name = path.rpartition(".")
    if "" in (*module.split("."), name):
        raise MupscaleError(f"{path!r} is not an import path: give module.name")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise MupscaleError(f"{path!r} cannot be imported: {error}") from None


def load_of_kind(path: str, kind: type[_Kind]) -> Callable[..., _Kind]:
    """A class of this kind by its import path, or a function that may give one; nothing is called."""
    target = import_path(path)
    others: tuple[type, ...] = getattr(kind, "sources", ())  # what can be made into one, as torch's Dataset into Data
    if isinstance(target, type):
        if issubclass(target, (kind, *others)):
            return target  # type: ignore[return-value]
        raise MupscaleError(f"{path} is no {kind_name(kind)}")
    function = target.func if isinstance(target, functools.partial) else target
    if not inspect.isfunction(function) or not (others or _may_give(function, kind)):
        raise MupscaleError(f"{path} is neither a {kind_name(kind)} nor a function that returns one")
    return target  # type: ignore[no-any-return]


def load_loss(path: str) -> Callable[[Any, Tensor], Tensor]:
    """The loss that an import path names, a function of outputs and targets; it is not called."""
    loss: Callable[[Any, Tensor], Tensor] = import_path(path)
    if not callable(loss) or isinstance(loss, type) or not _takes_two(loss):
        raise MupscaleError(f"the loss {path} is not a function of outputs and targets")
    return loss


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # written in C: it does not tell
        return True
    return True


def kind_name(kind: type) -> str:
    parts = kind.__module__.split(".")
    return ".".join([*parts[: 1 if parts[0] == "builtins" else 2], kind.__name__])


def _may_give(function: Callable[..., Any], kind: type) -> bool:
    """Whether what a function says of its result allows this kind; one that says nothing may give anything."""
    try:
        result = get_type_hints(function).get("return", kind)
    except Exception:  # an annotation may be any expression
        return True
    return not isinstance(result, type) or issubclass(result, kind)


def _plain(value: Any) -> Any:
    """As JSON gives it back: lists for tuples, text for paths."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, PurePath) else value


DEPTH_SIZES = ("depth", "layers", "n_layer", "n_layers", "num_layers", "num_hidden_layers")
"""What a model's argument may be called that is its number of blocks, for a growth event to say `depth`."""


def sizes_like(width: WholeWidth, other: WholeWidth) -> WholeWidth:
    """A width with the names of another: a number is its one size that is no depth, and the depth stays."""
    names = [name for name in other if name not in DEPTH_SIZES] if isinstance(other, dict) else []
    return width if isinstance(width, dict) or len(names) != 1 else {**other, names[0]: width}  # type: ignore[dict-item]


@dataclass(frozen=True)
class Growth(GrowthSettings):
    """One growth of the model in the middle of the run; beside these fields it has those of `GrowthSettings`.

    Args:
        at: grow after this many steps
        width: the new width; copies need a multiple of the old one, fresh units take any larger one
        lr: learning rate from here on, for the base width (default: unchanged)
        depth: the new number of residual blocks (default: unchanged); the model's width must name a depth

    Example:
        >>> Growth(at=2000, width=512, noise=0.3).lr is None
        True
        >>> Growth(at=2000, width=640).build_operator()
        Fresh(outgoing=1.0, lossless=False, spread='initial')
    """

    at: int
    width: WholeWidth = 0
    _: KW_ONLY
    lr: float | None = None
    depth: int | None = None

    def resolved(self, before: WholeWidth) -> Growth:
        """The event with its whole width, and with how it grows if it leaves that out; before: the model's so far."""
        width = sizes_like(self.width, before) if self.width != 0 else before
        if self.depth is None and self.width != 0:
            how = "copies" if width == before else usual_how(self.noise)  # of a new rate alone nothing is filled
            return replace(self, width=width, how=self.how or how)
        if self.depth is None:
            raise MupscaleError(f"growth at step {self.at}: give the new width, the new depth, or both")
        name = next((n for n in DEPTH_SIZES if isinstance(before, dict) and n in before), None)
        if name is None:
            raise MupscaleError(
                f"growth at step {self.at}: to grow the depth, the recipe's width must name it, such as width: "
                f"{{width: 64, layers: 4}}, not {before}"
            )
        assert isinstance(before, dict)
        if not isinstance(width, dict):
            others = ", ".join(n for n in before if n != name)
            raise MupscaleError(f"growth at step {self.at}: width {width} must name {others}")
        how = self.how or usual_how(self.noise)
        return replace(self, width={**before, **width, name: self.depth}, depth=None, how=how)

    def record(self, lr: float) -> dict[str, Any]:
        """What the metrics say of it; lr: the learning rate from here on."""
        return {"width": self.width, **self.growth_settings, "lr": lr}


_AT_LEAST_0 = Annotated[int, Must("at least 0", lambda value: value >= 0)]
_AT_LEAST_1 = Annotated[int, Must("at least 1", lambda value: value >= 1)]


def _check_words(part: Any, where: str = "") -> None:
    """Fields that are one of a few words are: on the command line the parser checks that, in Python and JSON nobody."""
    kind: type = type(part)
    for name, hint in _fields_of_words(kind).items():
        check_argument(hint, getattr(part, name), f"{where}{name}")


@cache
def _fields_of_words(part: type) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(part).items() if "Literal[" in str(hint)}


@dataclass(frozen=True)
class Seeds:
    """Seeds kept apart, so that two runs can share one and differ in another.

    Args:
        init: initial weights
        data: order of the data and its augmentation
        noise: noise that makes copies differ
        dropout: dropout, and other random numbers that modules draw in training
    """

    init: int = 0
    data: int = 0
    noise: int = 0
    dropout: int = 0


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written, and how many are kept.

    Args:
        every: write one every N steps; 0 writes only the last
        minutes: also write one if this many minutes have passed since the last
        keep: how many of the latest to keep
    """

    every: int = 1000
    minutes: float | None = None
    keep: int = 2


@dataclass(frozen=True)
class Evaluation:
    """When the model is evaluated on the held-out data.

    Args:
        every: evaluate every N steps; 0 evaluates only at the end
        batch: batch size of the evaluation (default: the training batch)
    """

    every: int = 0
    batch: int | None = None


@dataclass(frozen=True)
class TunedAt:
    """The run that hyperparameters were tuned for, where this one has another batch or duration.

    Args:
        batch: its examples per step
        steps: its number of steps
    """

    batch: int
    steps: int

    def __post_init__(self) -> None:
        for name in ("batch", "steps"):
            check_argument(_AT_LEAST_1, getattr(self, name), f"tuned_at.{name}")


@dataclass(frozen=True)
class Recipe(GrowthSettings):
    """A training run: what is trained, on what, for how long, and when it grows.

    The fields of `GrowthSettings` (how, noise and the others) say how a checkpoint that it starts from grows.

    Args:
        model: the model's class and its arguments, all but the width
        data: the data's class and its arguments
        optimizer: the optimizer's class and its hyperparameters, which are those at the base width
        no_decay: parameters without weight decay: bias, norm, or name patterns such as *.wte.weight
        width: the model's width: one number (its argument `width`), or arguments by name, such as {channels: 64}. If
            only one is named (beside a depth), base, grow and family.sizes may be plain numbers
        base: the base width, at which lr, weight decay and eps mean the same as in plain PyTorch
        init_at: the width at which the model keeps its own initialisation (default: base, at least 64)
        steps: total number of optimizer steps
        batch: examples per step, over all processes
        accumulate: split each batch into this many parts, to save memory
        grow: when and how to grow, e.g. [{at: 2000, width: 640}] for fresh units; add noise: 0.3 for noisy copies
        schedule: how the learning rate changes over the run
        clip: largest gradient norm; the norm is scaled so that it does not depend on the width
        loss: import path of a function that takes outputs and targets and returns the mean loss
        precision: fp32; tf32 or bf16 (autocast) if the device supports them; fp64 to check exactness
        compile: use torch.compile: true (the same as default), reduce-overhead (CUDA graphs; fast for small models) or
            max-autotune. false compiles only on CUDA, and only where it saves time when many models train together.
            never turns it off everywhere
        seeds: seeds of initial weights, data order, noise and dropout
        evaluation: when to evaluate on held-out data
        checkpoints: when to write checkpoints
        on_nonfinite: what to do if a loss or gradient is not finite: stop; skip the step; or rewind to the last good
            checkpoint and skip the data since then
        log_every: log metrics every N steps, the loss as its mean over these steps
        tensorboard: also write metrics for TensorBoard
        callbacks: class paths of callbacks (mupscale.train.Callback), such as mupscale.train.WeightsAndBiases, or
            mappings of class_path and init_args
        device: auto, cpu, cuda or cuda:1
        parallel: with several processes (torchrun): ddp, or fsdp to shard the model
        out: folder of the run; none writes no files
        start: (in files and on the command line: from) start from this checkpoint, a run's folder or a file of
            mupscale's, safetensors or torch weights, and upscale it to `width`
        start_width: (from_width) the width of the model in that checkpoint, if it does not record it
        state: whether to keep or reset the checkpoint's optimizer state
        rules: what weight decay and rates do over width, depth, batch and duration, by name
        tuned_at: batch and steps for which the hyperparameters are right, if the recipe's are others: the learning
            rate, weight decay and Adam's β2 are rescaled for those of the recipe, as the rules say

    Example:
        >>> recipe = Recipe(
        ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
        ...     data=Spec("mupscale.data.CoverTypeSample"),
        ...     optimizer=Spec("torch.optim.AdamW", {"lr": 1e-3}),
        ...     width=128,
        ...     base=64,
        ...     steps=3000,
        ...     batch=256,
        ...     grow=[Growth(at=2000, width=512)],
        ... )
        >>> recipe.width_after(1000), recipe.width_after(2500)
        (128, 512)
        >>> Recipe.from_json(recipe.to_json()) == recipe
        True
    """

    model: Spec
    data: Spec
    optimizer: Spec
    width: WholeWidth
    base: WholeWidth
    steps: int
    batch: int
    init_at: WholeWidth | None = None
    accumulate: int = 1
    grow: list[Growth] = field(default_factory=list)
    schedule: Schedule = field(default_factory=Schedule)
    clip: float | None = None
    loss: str = "mupscale.train.cross_entropy"
    precision: Literal["fp32", "tf32", "bf16", "fp64"] = "fp32"
    compile: bool | Literal["default", "reduce-overhead", "max-autotune", "never"] = False
    seeds: Seeds = field(default_factory=Seeds)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    log_every: int = 10
    tensorboard: bool = False
    device: str = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    out: str | None = None
    start: str | None = field(default=None, metadata={"in_files": "from"})  # `from` is no name in Python
    start_width: WholeWidth | None = field(default=None, metadata={"in_files": "from_width"})
    state: Literal["keep", "reset"] = "keep"
    rules: RuleSet = field(default_factory=RuleSet)
    tuned_at: TunedAt | None = None
    no_decay: list[str] = field(default_factory=list)
    callbacks: list[str | dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.start is None and self.how == "copies":  # nothing is filled
            object.__setattr__(self, "how", None)
        elif self.start is not None and self.how is None:
            object.__setattr__(self, "how", usual_how(self.noise))
        # where the width or the base names the model's argument, a plain number in the others means that, too
        named = self.width if isinstance(self.width, dict) else self.base
        for name in ("width", "base", "init_at", "start_width"):
            if (size := getattr(self, name)) is not None:
                object.__setattr__(self, name, sizes_like(size, named))
        width, events = self.width, []
        for growth in self.grow:
            events.append(growth.resolved(width))
            width = events[-1].width
        if events != self.grow:
            object.__setattr__(self, "grow", events)
        if self.out == "":  # which would be the current folder
            raise MupscaleError("'out' is '', but must be the name of a folder: give . for the current one")
        _check_words(self)
        _check_words(self.schedule, "schedule.")
        self._check_widths()
        self._check_numbers()
        self._check_growth()
        if self.tuned_at is not None:
            self._take_over(self.tuned_at)

    def _take_over(self, tuned: TunedAt) -> None:
        """Rescale the hyperparameters, which are for another batch and duration, once and for all."""
        batch = self.batch / tuned.batch
        duration = batch * self.steps / tuned.steps
        given = self.optimizer.init_args
        usual = default_hyper(self.optimizer_class(), given)
        if "betas" not in usual:
            raise MupscaleError(
                f"tuned_at has rules for Adam and its variants only, and {self.optimizer.class_path} is not one of "
                "them. Leave it out, and give the learning rate for this batch and these steps"
            )
        told = {name: given.get(name, usual[name]) for name in ("lr", "weight_decay", "betas")}
        scaled = self.rules.at(told, batch=batch, duration=duration)
        scaled["betas"] = list(scaled["betas"])
        object.__setattr__(self, "optimizer", replace(self.optimizer, init_args={**given, **scaled}))
        rate = scaled["lr"] / told["lr"] if told["lr"] else 1.0
        grow = [one if one.lr is None else replace(one, lr=one.lr * rate) for one in self.grow]
        object.__setattr__(self, "grow", grow)
        object.__setattr__(self, "tuned_at", None)

    def _check_widths(self) -> None:
        widths = {"width": self.width, "base": self.base, "init_at": self.init_at}
        for what, width in {**widths, "from_width": self.start_width}.items():
            if width is not None:
                Width.of(width, what, whole=True)
        if any(not Width.of(self.width).has_form_of(Width.of(other)) for other in widths.values() if other is not None):
            raise MupscaleError(
                f"width {self.width}, base {self.base} and init_at {self.init_at} must name the same arguments"
            )

    def _check_numbers(self) -> None:
        for name, hint in _NUMBERS.items():
            if (value := attrgetter(name)(self)) is not None:
                check_argument(hint, value, name)
        if "\0" in (self.start or ""):
            raise MupscaleError("from contains a NUL character, which no path can have")
        told = {"noise": self.noise, "from_width": self.start_width, "how": self.how is not None}
        if self.start is None and any(told.values()):
            raise MupscaleError(
                f"{next(name for name, value in told.items() if value)} is for a run that starts from a checkpoint "
                f"(from); to set how the model grows in the middle of a run, use grow"
            )
        self.build_operator()
        if "lr" not in self.optimizer.init_args:
            raise MupscaleError("the optimizer's init_args need lr, the learning rate at the base width")
        check_argument(NotNegative, self.optimizer.init_args["lr"], "the optimizer's lr")
        if self.batch % self.accumulate:
            raise MupscaleError(
                f"a batch of {self.batch} cannot be split into {self.accumulate} equal parts (accumulate)"
            )
        if self.schedule.warmup + self.schedule.decay > self.schedule.before + self.steps + self.schedule.after:
            raise MupscaleError(
                f"the schedule's warm-up ({self.schedule.warmup}) and decay ({self.schedule.decay}) are longer than "
                f"the run's {self.steps} steps"
            )

    def _check_growth(self) -> None:
        step, width = 0, self.width
        for growth in self.grow:
            where = f"growth at step {growth.at}"
            if not step < growth.at < self.steps:
                before = f"the one at {step}" if step else "the first step"
                raise MupscaleError(
                    f"{where}: it must come after {before} and before the end at {self.steps}. Give more steps than "
                    f"{growth.at}, or an earlier step (at) in grow"
                )
            _check_words(growth, f"{where}: ")
            check_argument(_NUMBERS["noise"], growth.noise, f"{where}: noise")
            check_argument(NotNegative | None, growth.lr, f"{where}: lr")
            try:
                operator = growth.build_operator()
            except MupscaleError as error:
                raise MupscaleError(f"{where}: {error}") from None
            check_growing_sizes(growth.width, width, operator.needs_multiples, where)
            step, width = growth.at, growth.width

    def width_after(self, step: int) -> WholeWidth:
        """The width after `step` steps; a growth at `step` itself is not yet done."""
        return next((g.width for g in reversed(self.grow) if g.at < step), self.width)

    def growth_at(self, step: int) -> Growth | None:
        return next((growth for growth in self.grow if growth.at == step), None)

    def family(self) -> Family:
        """The family of the model: one architecture at every width; the same one for all runs in a process."""
        return family_of(self.model, self.data, self.base, self.init_at, self.rules.depth)

    def make_data(self) -> Data:
        return make_data(self.data)

    def optimizer_class(self) -> type[Optimizer]:
        optimizer = load_of_kind(self.optimizer.class_path, Optimizer)
        if not isinstance(optimizer, type):
            raise MupscaleError(f"{self.optimizer.class_path} is a function, but must be a torch.optim.Optimizer")
        return optimizer

    def loss_function(self) -> Callable[[Any, Tensor], Tensor]:
        return load_loss(self.loss)

    def dtype(self) -> torch.dtype:
        """The dtype of weights and continuous inputs; autocast computes in another."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    def compile_mode(self) -> str | None:
        """The mode for torch.compile where the recipe asks for it; None where it does not."""
        if self.compile in (False, "never"):
            return None
        return "default" if self.compile is True else str(self.compile)

    def to_json(self) -> dict[str, Any]:
        """Plain values as a YAML recipe has them, of which `from_json` makes the same recipe; not what is as usual."""
        for spec in (self.model, self.data, self.optimizer):
            spec.check_plain()
        return {_IN_FILES.get(name, name): value for name, value in told_fields(self).items()}

    @classmethod
    def from_json(cls, values: Any, where: object = "", *, parse: Callable[..., Recipe] = parse_record) -> Recipe:
        """A recipe from nested plain values, as `to_json` gives them; where: the file that an error names."""
        if not isinstance(values, Mapping):
            raise MupscaleError(f"{f'{where}: ' if str(where) else ''}{show_short(values)} is not a recipe")
        names = {shown: name for name, shown in _IN_FILES.items()}
        by_field = {names.get(name, name): value for name, value in values.items()}
        if by_field.get("grow", ()) is None:
            del by_field["grow"]
        return parse(cls, by_field, where)

    def describe_difference(self, other: Recipe, step: int, *, same_start: bool = False) -> str | None:
        """What in the other recipe would have led to another model after `step` steps, as a sentence; None if nothing.

        How often something is logged or saved, the device and the like may change, and so may what comes later.
        same_start: both are known to start from the same checkpoint, wherever it lies.
        """
        for name in (f.name for f in fields(self) if f.name not in MAY_CHANGE):
            ours, theirs = getattr(self, name), getattr(other, name)
            if name == "grow":
                ours, theirs = ([growth for growth in events if growth.at < step] for events in (ours, theirs))
            elif name == "start" and ours is not None and theirs is not None:
                same_start = same_start or os.path.realpath(ours) == os.path.realpath(theirs)
                ours = theirs if same_start else ours
            if ours != theirs:
                return f"{_IN_FILES.get(name, name)} is {_shown(ours)} there and {_shown(theirs)} here"
        return None


_ROWS = 4  # on which small models are compared


_KEPT: dict[Any, Family] = {}  # those of the last eight asked for


def family_of(
    model: Spec, data: Spec, base: WholeWidth, init_at: WholeWidth | None, depth: DepthRule = "none"
) -> Family:
    """The family of a model that is trained on these data; depth: its rule for that, `RuleSet.depth`.

    Where its modules do not tell what a parameter is, small models are run on a few examples, which show it. What has
    been found out about it (plans, initial values, whether copies are exact on these data) holds for all runs.
    """
    try:
        plain = json.dumps([model.init_args, data.init_args, base, init_at, depth], sort_keys=True)
    except (TypeError, ValueError):  # arguments that are more than plain values
        return _make(model, data, base, init_at, RuleSet(depth=depth))
    key = (model.load(), data.load(), plain, torch.get_default_dtype())
    family = _KEPT.pop(key) if key in _KEPT else _make(model, data, base, init_at, RuleSet(depth=depth))
    _KEPT[key] = family
    while len(_KEPT) > 8:
        del _KEPT[next(iter(_KEPT))]
    return family


def _make(model: Spec, data: Spec, base: WholeWidth, init_at: WholeWidth | None, rules: RuleSet) -> Family:
    def build(*width: int | float, **widths: int | float) -> nn.Module:
        takes = inspect.signature(model.load()).parameters if width else {}
        if width and not any(one.name == "width" or one.kind is one.VAR_KEYWORD for one in takes.values()):
            names = list(takes) or ["ARGUMENT"]
            raise MupscaleError(
                f"{model.class_path} has no argument called width; it has {', '.join(names)}. Name the one that is its "
                f"width, in width or in base, such as width: {{{names[0]}: {width[0]}}}. Plain numbers in grow, "
                f"family.sizes and study.widths then mean it"
            )
        return model.make(nn.Module, **({"width": width[0]} if width else widths))

    family = Family(build, base, init_at=init_at, rules=rules)
    try:
        if family.depth_size is None:
            family.plan(base)
            return family
    except PlanError:
        pass
    except MupscaleError:  # it is said where the plan is needed
        return family
    # of modules that do not tell, and of what writes into the residual stream, it is found by running small models
    return Family(build, base, init_at=init_at, rules=rules, inputs=few_examples(make_data(data)))


def make_data(spec: Spec) -> Data:
    """Load the data: a Data, or what `as_data` makes one of."""
    try:
        return as_data(spec.call(load_of_kind(spec.class_path, Data)))
    except MupscaleError as error:
        if spec.class_path.startswith("mupscale."):
            raise
        raise MupscaleError(f"data: {spec.class_path}: {error}") from error


def with_absent_data_replaced(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with a `StandIn` where its data's files are not there, for a dry run; and a sentence about that.

    Nothing is downloaded or packed. The sentence is empty where the recipe is as it was.
    """
    spec = recipe.data
    target: object = import_path(spec.class_path)
    if not isinstance(target, type) or not issubclass(target, Data):
        return recipe, ""
    shape = target.shape_without_files(spec.init_args)
    if shape is None:
        return recipe, ""
    stand_in = Spec("mupscale.data.StandIn", dict(shape))
    said = f"the files of {spec.class_path} are not there, so random examples of the same shape stand in for this plan"
    return replace(recipe, data=stand_in), said


def few_examples(data: Data) -> Tensor:
    rows = torch.arange(_ROWS, device=data.rows_on or data.device) % data.size
    return data.examples(rows)[0].cpu()


def check_growing_sizes(wide: WholeWidth, narrow: WholeWidth, multiples: bool, what: str) -> None:
    """An error that begins with `what` unless the sizes grow: by whole multiples for copies, but for a depth."""
    Width.of(wide).check_wider_than(Width.of(narrow), what)
    if not multiples:
        return
    if isinstance(wide, dict) and isinstance(narrow, dict):
        wide, narrow = ({n: s for n, s in sizes.items() if n not in DEPTH_SIZES} for sizes in (wide, narrow))
    if wide:
        Width.of(wide).check_multiple_of(Width.of(narrow), what)


_SEED = Annotated[int, Must("from 0 to 2^63 - 1", lambda seed: 0 <= seed < 1 << 63)]
_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("steps", "accumulate", "log_every", "checkpoints.keep"), _AT_LEAST_1),
    **dict.fromkeys(
        ("batch", "evaluation.batch"),
        Annotated[_AT_LEAST_1, Must("at most 16,777,216", lambda batch: batch <= 1 << 24)],
    ),
    **dict.fromkeys(("checkpoints.every", "evaluation.every"), _AT_LEAST_0),
    **{f"schedule.{name}": _AT_LEAST_0 for name in ("warmup", "decay", "before", "after")},
    **{f"seeds.{each.name}": _SEED for each in fields(Seeds)},
    "clip": Annotated[float, Must("positive", lambda clip: clip > 0)],
    "noise": NotNegative | dict[str, NotNegative],
    "schedule.floor": Annotated[float, Must("from 0 to 1", lambda floor: 0 <= floor <= 1)],
    "checkpoints.minutes": NotNegative,
}
"""What numbers of a recipe must be, by their names."""
_IN_FILES = {each.name: each.metadata["in_files"] for each in fields(Recipe) if "in_files" in each.metadata}
MAY_CHANGE = frozenset(
    {"steps", "accumulate", "compile", "evaluation", "checkpoints", "on_nonfinite"}
    | {"log_every", "tensorboard", "callbacks", "device", "parallel", "out"}
)


def _shown(value: Any) -> str:
    if isinstance(value, Spec):
        return f"{value.class_path} with {value.init_args}"
    if isinstance(value, list):
        return str([{"at": one.at, **told_fields(one)} if isinstance(one, Growth) else one for one in value])
    return str(value)
