"""A recipe: everything that defines a training run, as plain values that JSON and YAML can hold."""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from pathlib import PurePath
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.data import Data
from mupscale.family import Family
from mupscale.growth import GaussianNoise, Noise, SignalNoise
from mupscale.system import MupscaleError

Width = int | dict[str, int]
Level = float | dict[str, float]


@dataclass(frozen=True)
class Spec:
    """A class by its import path, and the arguments it is made with.

    Args:
        class_path: import path of the class, e.g. mupscale.models.MLP
        init_args: arguments by name
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "init_args", _plain(self.init_args))

    def load(self) -> Any:
        """The class (or function) itself."""
        return import_path(self.class_path)

    def make(self, **more: Any) -> Any:
        """An instance; `more` goes before init_args of the same name."""
        target, given = self.load(), {**self.init_args, **more}
        try:
            inspect.signature(target).bind(**given)
        except TypeError as error:
            raise MupscaleError(f"{self.class_path} cannot be made: {error}") from None
        return target(**given)

    def check_plain(self) -> None:
        """Arguments that a file can hold, or a sentence that names the one it cannot."""
        for name, value in self.init_args.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise MupscaleError(
                    f"{self.class_path}: {name} is a {type(value).__name__}, which a run's files cannot hold: "
                    f"give plain values, or no folder (out)"
                ) from None


@dataclass(frozen=True)
class Growth:
    """One growth of the model in the middle of the run.

    Args:
        at: after how many steps
        width: the new width, a multiple of the one before
        noise: how much symmetry-breaking noise; 0 goes on exactly as before; or constants by parameter name
        unit: what noise is measured in: a fresh initialisation ('init'), the paper's constants ('theory'),
            or the spectral norm of each weight ('signal')
        lr: learning rate from here on, at the base width; the same as before if not given
    """

    at: int
    width: Width
    noise: Level = 0.0
    unit: Literal["init", "theory", "signal"] = "init"
    lr: float | None = None

    def as_noise(self) -> Noise:
        """The noise as the core knows it."""
        return make_noise(self.noise, self.unit)


def make_noise(level: Level, unit: str) -> Noise:
    """Noise of this level; none at all for 0, whatever the unit. Constants by name are never relative to a signal."""
    if level == 0:
        return 0.0
    if isinstance(level, dict):
        return GaussianNoise(level, unit="theory" if unit == "signal" else unit)  # type: ignore[arg-type]
    return SignalNoise(level) if unit == "signal" else GaussianNoise(level, unit=unit)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Schedule:
    """How the learning rate goes over the run, as a multiple of the optimizer's lr.

    Args:
        kind: constant; cosine (after the warm-up down to floor); or wsd (stable after the warm-up, then a linear decay)
        warmup: steps of linear warm-up
        decay: wsd alone: steps of the decay at the end
        floor: what remains of the rate at the end of a cosine or of a decay
    """

    kind: Literal["constant", "cosine", "wsd"] = "constant"
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0

    def at(self, step: int, steps: int) -> float:
        """The multiple for the step after `step` ones, of `steps`; a function of these alone, so without a state."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "cosine":
            done = (step - self.warmup) / max(1, steps - self.warmup)
            return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        if self.kind == "wsd" and step >= steps - self.decay:
            return self.floor + (1 - self.floor) * max(0, steps - step) / (self.decay + 1)
        return 1.0


@dataclass(frozen=True)
class Seeds:
    """Seeds kept apart, so that two runs can share one and differ in another.

    Args:
        init: initial weights
        data: order of the data and its augmentation
        noise: symmetry-breaking noise
        dropout: what modules draw while they train
    """

    init: int = 0
    data: int = 0
    noise: int = 0
    dropout: int = 0


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written, and how many are kept.

    Args:
        every: steps between two; 0 for none but the last
        minutes: and after so many minutes without one
        keep: how many of the last ones to keep
    """

    every: int = 1000
    minutes: float | None = None
    keep: int = 2


@dataclass(frozen=True)
class Evaluation:
    """When the model is evaluated on the held-out data.

    Args:
        every: steps between two; 0 for the end alone
        batch: examples at a time; the training batch if not given
    """

    every: int = 0
    batch: int | None = None


@dataclass(frozen=True)
class Recipe:
    """A training run: what is trained, on what, for how long, and when it grows.

    Args:
        model: the model's class and its arguments, all but the width
        data: the data's class and its arguments
        optimizer: the optimizer's class and its hyperparameters, which are those at the base width
        width: the model's width: one number (its argument `width`), or several arguments by name
        base: the width at which lr, weight decay and eps mean what they mean in plain PyTorch
        init_at: the width at which the model's own initialisation is taken as it is (default: base, at least 64)
        steps: optimizer steps in all
        batch: examples in a step, over all processes
        accumulate: into how many parts each step's batch is cut, to save memory
        grow: growth events, e.g. [{at: 2000, width: 512, noise: 0.3, lr: 0.002}]
        schedule: how the learning rate goes over the run
        clip: largest norm of the gradient, a norm that does not depend on the width
        loss: import path of a function of outputs and targets that gives their mean loss
        precision: fp32; tf32 or bf16 (autocast) where the device has them; fp64 to check exactness
        compile: compile the model and its loss with torch.compile: default, or reduce-overhead (CUDA graphs, for small
            models whose steps are launches more than work), or max-autotune; true means default
        seeds: seeds of initial weights, data order, noise and dropout
        evaluation: when to evaluate on held-out data
        checkpoints: when to write checkpoints
        log_every: steps between two lines of metrics
        tensorboard: whether to write metrics for TensorBoard, too
        device: auto, cpu, cuda or cuda:1
        parallel: with several processes (torchrun): ddp, or fsdp to shard the model over them
        out: folder of the run; none writes nothing
        start: (in files and on the command line: from) start from this checkpoint, a run's folder or a file of
            mupscale's, safetensors or torch weights, and upscale it to `width`
        start_width: (from_width) the width of the model in that checkpoint, where it does not tell itself
        noise: symmetry-breaking noise when upscaling from a checkpoint, or constants by parameter name
        noise_unit: what noise is measured in: init, theory or signal
    """

    model: Spec
    data: Spec
    optimizer: Spec
    width: Width
    base: Width
    steps: int
    batch: int
    init_at: Width | None = None
    accumulate: int = 1
    grow: list[Growth] = field(default_factory=list)
    schedule: Schedule = field(default_factory=Schedule)
    clip: float | None = None
    loss: str = "mupscale.train.cross_entropy"
    precision: Literal["fp32", "tf32", "bf16", "fp64"] = "fp32"
    compile: bool | Literal["default", "reduce-overhead", "max-autotune"] = False
    seeds: Seeds = field(default_factory=Seeds)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    log_every: int = 10
    tensorboard: bool = False
    device: str = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    out: str | None = None
    start: str | None = None
    start_width: Width | None = None
    noise: Level = 0.0
    noise_unit: Literal["init", "theory", "signal"] = "init"

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_choices(self.schedule, "schedule.")
        self._check_widths()
        self._check_numbers()
        self._check_growth()

    def _check_widths(self) -> None:
        given = {"width": self.width, "base": self.base, "init_at": self.init_at}
        for what, width in {**given, "from_width": self.start_width}.items():
            sizes = width.values() if isinstance(width, dict) else [1 if width is None else width]
            if not all(isinstance(size, int) and size > 0 for size in sizes):
                raise MupscaleError(f"{what} is {width}, but widths are positive whole numbers")
        names = [sorted(width) if isinstance(width, dict) else None for width in given.values() if width is not None]
        if any(other != names[0] for other in names):
            raise MupscaleError(
                f"width {self.width}, base {self.base} and init_at {self.init_at} must name the same arguments"
            )

    def _check_numbers(self) -> None:
        for name, least in _LEAST.items():
            value = attrgetter(name)(self)
            if value is not None and value < least:
                raise MupscaleError(f"{name} is {value}, but must be at least {least}")
        if self.clip is not None and not self.clip > 0:
            raise MupscaleError(f"clip is {self.clip}, but must be positive")
        _check_positive("noise", self.noise)
        if self.start is None and (self.noise or self.start_width is not None):
            raise MupscaleError(
                "noise and from_width are for a run that starts from a checkpoint (from); the noise of a growth "
                "belongs in grow"
            )
        if not 0 <= self.schedule.floor <= 1:
            raise MupscaleError(f"schedule.floor is {self.schedule.floor}, but must be from 0 to 1")
        for name, seed in asdict(self.seeds).items():
            if not 0 <= seed < 1 << 63:
                raise MupscaleError(f"seeds.{name} is {seed}, but must be from 0 to 2^63 - 1")
        _check_positive("checkpoints.minutes", self.checkpoints.minutes)
        if self.batch % self.accumulate:
            raise MupscaleError(
                f"a batch of {self.batch} cannot be cut into {self.accumulate} equal parts (accumulate)"
            )
        if "lr" not in self.optimizer.init_args:
            raise MupscaleError("the optimizer's init_args need lr, the learning rate at the base width")
        if self.schedule.warmup + self.schedule.decay > self.steps:
            raise MupscaleError(
                f"the schedule's warm-up ({self.schedule.warmup}) and decay ({self.schedule.decay}) are longer than "
                f"the run's {self.steps} steps"
            )

    def _check_growth(self) -> None:
        step, width = 0, self.width
        for growth in self.grow:
            if not step < growth.at < self.steps:
                before = f"the one at {step}" if step else "the first step"
                raise MupscaleError(
                    f"growth at step {growth.at}: it must come after {before} and before the end at {self.steps}"
                )
            _check_choices(growth, f"growth at step {growth.at}: ")
            _check_positive(f"growth at step {growth.at}: noise", growth.noise)
            _check_positive(f"growth at step {growth.at}: lr", growth.lr)
            check_multiple(width, growth.width, f"growth at step {growth.at}")
            step, width = growth.at, growth.width

    def width_after(self, step: int) -> Width:
        """The width with which the step after `step` ones begins, growth at `step` itself not yet done."""
        return next((g.width for g in reversed(self.grow) if g.at < step), self.width)

    def growth_at(self, step: int) -> Growth | None:
        """The growth event after `step` steps, if there is one."""
        return next((growth for growth in self.grow if growth.at == step), None)

    def family(self) -> Family:
        """The model at every width."""
        if isinstance(self.base, dict):
            return Family(lambda **widths: self._build(widths), self.base, init_at=self.init_at)
        return Family(lambda width: self._build({"width": width}), self.base, init_at=self.init_at)

    def _build(self, widths: Mapping[str, int | float]) -> nn.Module:
        model = self.model.make(**widths)
        if not isinstance(model, nn.Module):
            raise MupscaleError(f"{self.model.class_path} is no nn.Module")
        return model

    def make_data(self) -> Data:
        """The data."""
        data = self.data.make()
        if not isinstance(data, Data):
            raise MupscaleError(f"{self.data.class_path} is no subclass of mupscale.data.Data")
        return data

    def optimizer_class(self) -> type[Optimizer]:
        """The optimizer's class."""
        made = self.optimizer.load()
        if not (isinstance(made, type) and issubclass(made, Optimizer)):
            raise MupscaleError(f"{self.optimizer.class_path} is no torch optimizer")
        return made

    def loss_function(self) -> Callable[[Any, Tensor], Tensor]:
        """The loss."""
        made: Callable[[Any, Tensor], Tensor] = import_path(self.loss)
        if not callable(made):
            raise MupscaleError(f"the loss {self.loss} is no function of outputs and targets")
        return made

    def dtype(self) -> torch.dtype:
        """Of weights and continuous inputs; autocast computes in another."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    def to_json(self) -> dict[str, Any]:
        """Plain values as a YAML recipe has them, from which `from_json` makes the same recipe."""
        for spec in (self.model, self.data, self.optimizer):
            spec.check_plain()
        return {_IN_FILES.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Recipe:
        """A recipe from nested plain values, as `to_json` gives them."""
        parts: dict[str, Any] = {
            "model": Spec,
            "data": Spec,
            "optimizer": Spec,
            "schedule": Schedule,
            "seeds": Seeds,
            "evaluation": Evaluation,
            "checkpoints": Checkpoints,
        }
        names = {shown: name for name, shown in _IN_FILES.items()}
        try:
            made = {names.get(n, n): parts[n](**value) if n in parts else value for n, value in values.items()}
            made["grow"] = [Growth(**growth) for growth in values.get("grow") or []]
            return cls(**made)
        except TypeError as error:
            raise MupscaleError(f"these values are no recipe: {error}") from None

    def differs_from(self, other: Recipe, step: int) -> str | None:
        """What in the other recipe would have led to another model after `step` steps, as a sentence; None if nothing.

        How often something is logged or saved, the device and the like may change, and so may what comes later.
        """
        for name in (f.name for f in fields(self) if f.name not in MAY_CHANGE):
            ours, theirs = getattr(self, name), getattr(other, name)
            if name == "grow":
                ours, theirs = ([growth for growth in events if growth.at < step] for events in (ours, theirs))
            if ours != theirs:
                return f"{_IN_FILES.get(name, name)} is {_shown(ours)} there and {_shown(theirs)} here"
        return None


_LEAST = {
    "steps": 1,
    "batch": 1,
    "accumulate": 1,
    "log_every": 1,
    "schedule.warmup": 0,
    "schedule.decay": 0,
    "checkpoints.every": 0,
    "checkpoints.keep": 1,
    "evaluation.every": 0,
    "evaluation.batch": 1,
}
_IN_FILES = {"start": "from", "start_width": "from_width"}  # `from` is no name in Python
MAY_CHANGE = frozenset(
    [
        "steps",
        "accumulate",
        "compile",
        "evaluation",
        "checkpoints",
        "log_every",
        "tensorboard",
        "device",
        "parallel",
        "out",
    ]
)


def _check_choices(part: Any, where: str = "") -> None:
    """Fields that are one of a few words are: on the command line the parser checks that, in Python and JSON nobody."""
    for name, hint in get_type_hints(type(part)).items():
        value, choices = getattr(part, name), _choices(hint)
        if choices and value not in choices and not (isinstance(value, bool) and bool in get_args(hint)):
            allowed = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise MupscaleError(f"{where}{name} is {value!r}, but must be {allowed}")


def _choices(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) for choice in _choices(part)]


def _check_positive(what: str, value: Level | None) -> None:
    for number in value.values() if isinstance(value, dict) else [value]:
        if number is not None and not 0 <= number < math.inf:
            raise MupscaleError(f"{what} is {number}, but must be 0 or more and finite")


def check_multiple(narrow: Width, wide: Width, what: str) -> None:
    """Every width must be a whole multiple of the one before; names must be the same."""
    ours, theirs = (w if isinstance(w, dict) else {"width": w} for w in (narrow, wide))
    if ours.keys() != theirs.keys():
        raise MupscaleError(f"{what}: width {wide} does not name the same arguments as {narrow}")
    for name, size in ours.items():
        if theirs[name] < size or theirs[name] % size:
            below, above = theirs[name] // size * size, (theirs[name] // size + 1) * size
            near = f"{above}" if below == 0 else f"{below} or {above}"
            raise MupscaleError(f"{what}: {name} {theirs[name]} is not a multiple of {size}; take {near}")


def import_path(path: str) -> Any:
    """What a dotted path names."""
    module, _, name = path.rpartition(".")
    if not module:
        raise MupscaleError(f"{path!r} is no import path: give module.name")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise MupscaleError(f"{path!r} cannot be imported: {error}") from None


def _plain(value: Any) -> Any:
    """As JSON gives it back: lists for tuples, text for paths."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, PurePath) else value


def _shown(value: Any) -> str:
    if isinstance(value, Spec):
        return f"{value.class_path} with {value.init_args}"
    if isinstance(value, list):
        return str([asdict(growth) for growth in value])
    return str(value)
