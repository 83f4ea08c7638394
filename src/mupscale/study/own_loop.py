"""A study in a training loop of one's own: a function of the user's trains every stretch of its tree.

The presets are those of recipes, and so are the tree, the folder and the page. What a recipe names by class paths is
given as objects here: `_LoopRecipe` hands out the user's family, and `_LoopTrainer` calls the user's functions.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from mupscale import checkpoint
from mupscale.core import WholeWidth, Width, naming
from mupscale.family import Family
from mupscale.growth import GrowthSettings
from mupscale.study.contenders import contenders_named
from mupscale.study.family_run import FamilySettings, run_family
from mupscale.study.pay import run_pay
from mupscale.study.results import StudySummary
from mupscale.study.systems import StudySettings
from mupscale.study.training import Ground, Note, Trainer
from mupscale.study.tree import Stretch, hash_values
from mupscale.system import MupscaleError, clear_leftovers, derive, print_at_once, read_json, seeded, write_json
from mupscale.train import (
    Growth,
    Processes,
    Recipe,
    RunFolder,
    RunState,
    Schedule,
    Spec,
    count_flops,
    find_checkpoint,
    grow_model,
    sizes_like,
)

Train = Callable[[nn.Module, Optimizer, int, Callable[[int], float]], object]
"""Trains a model for so many steps; at each step its learning rates are to be multiplied by schedule(step)."""
Trained = tuple[nn.Module, Optimizer]
_END = "end.json"
_GROWTH = GrowthSettings().growth_settings.keys()
_UNDERSTOOD = {"width", "steps", "lr", "schedule", "seed", "order", "parent", "start", *_GROWTH}
"""The fields of a stretch that a loop of one's own can follow; one with others is refused, and not trained without."""


@dataclass(frozen=True)
class OwnLoop:
    """A training loop of one's own, in which a study trains: `compare` (does growing pay?) and `train_family`.

    Everything is kept in the folder. What is killed goes on with the same lines; what has been trained is not trained
    again. `mupscale report FOLDER` draws the page.

    Args:
        family: of the model
        train: takes a model, its optimizer, a number of steps and a schedule (step -> multiple of the learning rate,
            as LambdaLR takes it), and trains. Before each call the generators of torch, numpy and Python are seeded, so
            that batches drawn from them are the same whenever the stretch is trained
        held_out: the loss that counts, of a model, on data that `train` does not see
        make_optimizer: of a model and a learning rate at the family's base width, through `family.optimizer`
        lr: the learning rate at the base width; of a model that is brought along, the one that its optimizer has now
        folder: of the study
        batch: examples in a step, for costs and tokens; the family's `inputs` are one step's if it is not given
        flops: of a training step, by width; counted on the family's `inputs` if it is not given
        warmup: steps of a linear warm-up, with which every run begins
        save_every: steps after which the state is written, so that a kill loses no more; stretches are then trained in
            calls of so many steps, each with seeds of its own. None: at the end of every stretch
        device: where models are trained
        note: is told what is trained next

    Example:
        >>> import tempfile
        >>> import mupscale as mu
        >>> from torch.optim.lr_scheduler import LambdaLR
        >>> x, y = torch.randn(64, 4), torch.randn(64, 1)
        >>> def train(model, optimizer, steps, schedule):
        ...     scheduler = LambdaLR(optimizer, schedule)
        ...     for _ in range(steps):
        ...         rows = torch.randint(48, (16,))
        ...         optimizer.zero_grad()
        ...         nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        ...         optimizer.step()
        ...         scheduler.step()
        >>> held_out = lambda model: nn.functional.mse_loss(model(x[48:]), y[48:])
        >>> build = lambda width: nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        >>> family = mu.Family(build, base=8, inputs=x[:16])
        >>> make = lambda model, lr: family.optimizer(model, torch.optim.AdamW, lr=lr)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loop = OwnLoop(family, train, held_out, make, lr=0.01, folder=folder, note=lambda text: None)
        ...     summary = loop.train_family(FamilySettings(sizes=[8, 12, 16], budget=40))
        >>> summary.sentences[0]
        'Three sizes for 0.59 of the FLOPs of training each.'
    """

    family: Family
    train: Train
    held_out: Callable[[nn.Module], Any]
    make_optimizer: Callable[[nn.Module, float], Optimizer]
    lr: float
    folder: str | Path
    batch: int | None = None
    flops: Callable[[WholeWidth], float] | None = None
    warmup: int = 0
    save_every: int | None = None
    device: str | torch.device = "cpu"
    note: Note = print_at_once

    def train_family(
        self, settings: FamilySettings, start: Trained | None = None, *, width: WholeWidth = 0, trained: int = 0
    ) -> StudySummary:
        """A finished model of every size, out of one growing run, in FOLDER/sizes; settings: as `mupscale family` has.

        start: a model with its optimizer, for the trunk to begin with; width: its own; trained: its steps so far.
        """
        if not settings.sizes or settings.budget is None:
            raise MupscaleError("give the sizes and the budget of each: FamilySettings(sizes=[32, 48, 64], budget=500)")
        recipe = self._recipe(settings.sizes[0], max(1, self.warmup))
        if start is not None:
            recipe = self._starting(recipe, start, width, trained)
        command = f"OwnLoop.train_family({settings.sizes})"
        return run_family(recipe, settings, self.folder, command=command, note=self.note, make_ground=_LoopGround)

    def compare(
        self,
        narrow: WholeWidth,
        wide: WholeWidth,
        *,
        trained: int,
        steps: int,
        start: Trained | None = None,
        settings: StudySettings | None = None,
    ) -> StudySummary:
        """Does growing from one width to the other pay? Every contender is tuned small and has the same FLOPs.

        trained: steps of the base model; steps: of the grown one. start: the base model with its optimizer, where you
        have one; it is not changed. Without one base models are trained here. settings: as `mupscale run` has them.
        """
        settings = settings or StudySettings()
        for one in contenders_named(settings.contenders):
            if one.keeps_rates:
                raise MupscaleError(f"{one.name} works only with a recipe: leave it out")
        if start is None:
            growth = Growth(at=trained, width=wide, how="fresh")
            recipe = replace(self._recipe(narrow, trained + steps), grow=[growth])
        else:
            recipe = self._starting(self._recipe(wide, steps), start, narrow, trained)
        command = f"OwnLoop.compare({narrow}, {wide}, trained={trained}, steps={steps})"
        base = "" if start is None else "the model that was brought along"
        return run_pay(
            recipe, settings, self.folder, command=command, note=self.note, base_name=base, make_ground=_LoopGround
        )

    def load_size(self, size: WholeWidth, seed: int | None = None) -> nn.Module:
        """A finished model of `train_family`, in eval mode. seed: which, where settings.seeds is above 1."""
        size = sizes_like(size, Width.of(self.family.base).whole)
        place = Path(self.folder) / "sizes" / Width.of(size).label
        model = self.family.build(size).to(self.device)
        checkpoint.load(find_checkpoint(place if not seed else place.with_name(f"{place.name}-seed-{seed}")), model)
        return model.eval()

    # ------------------------------------------------------------------------------------------- what is studied

    @cached_property
    def optimizer_class(self) -> type[Optimizer]:
        """The class of the user's optimizer, which is to have the family's groups."""
        optimizer = self.make_optimizer(self.family.sketch(self.family.base), self.lr)
        if not all("lr_factor" in group for group in optimizer.param_groups):
            kind = type(optimizer).__name__
            raise MupscaleError(
                f"make_optimizer returns a plain {kind}, which would train every size at the same learning rates. "
                f"Build it through the family: lambda model, lr: family.optimizer(model, {kind}, lr=lr)"
            )
        return type(optimizer)

    def _recipe(self, width: WholeWidth, steps: int) -> _LoopRecipe:
        sketch = self.family.sketch(self.family.base)
        code = {"train": self.train, "held_out": self.held_out, "make_optimizer": self.make_optimizer}
        shapes = {name: list(p.shape) for name, p in naming.parameters(sketch).items()}
        build, rules = self.family.build_function, str(self.family.rules)
        return _LoopRecipe(
            model=Spec(_name(type(sketch)), {"code": fingerprint_code(build, shapes, repr(self.family), rules)}),
            data=Spec(_name(self.train), {name: fingerprint_code(each) for name, each in code.items()}),
            optimizer=Spec(_name(self.optimizer_class), {"lr": self.lr}),
            width=width,
            base=Width.of(self.family.base).whole,
            steps=steps,
            batch=self.batch or self.rows or 1,
            schedule=Schedule(warmup=self.warmup),
            loop=self,
        )

    @property
    def rows(self) -> int:
        tensors = [one for one in tree_leaves(self.family.inputs) if isinstance(one, Tensor) and one.dim()]
        return len(tensors[0]) if tensors else 0

    def _starting(self, recipe: _LoopRecipe, start: Trained, width: WholeWidth, trained: int) -> _LoopRecipe:
        """The recipe that begins with this model, which is written into the folder."""
        model, optimizer = start
        try:
            checkpoint.check_model_state(naming.unwrap(model).state_dict(), self.family.sketch(width))
        except MupscaleError as error:
            raise MupscaleError(
                f"the model is not the family's at {Width.of(width).phrase}: {error}; give the model's own width"
            ) from None
        rates = [group["lr"] / group.get("lr_factor", 1.0) for group in optimizer.param_groups]
        if not any(math.isclose(rate, self.lr, rel_tol=1e-6) for rate in rates):
            raise MupscaleError(
                f"OwnLoop has lr={self.lr:g}, and the optimizer that you bring is at {rates[0]:g}: give OwnLoop the "
                f"learning rate that it has now, lr={rates[0]:g}, or set its groups to the one that you want"
            )
        path = Path(self.folder) / "base" / f"{_hash_states(model, optimizer)}.safetensors"
        if not path.exists():
            _save(path, model, optimizer, RunState(step=trained, width=width, lr=self.lr))
        return replace(recipe, start=str(path), start_width=width)


@dataclass(frozen=True)
class _LoopRecipe(Recipe):
    """What a study asks of a recipe, with the user's own family; it is never read from a file."""

    loop: OwnLoop = field(kw_only=True, compare=False, repr=False)

    def family(self) -> Family:
        return self.loop.family

    def to_json(self) -> dict[str, Any]:
        """What there is to say of it: the loop's device, precision and loss are the user's."""
        told = Recipe(**{each.name: getattr(self, each.name) for each in fields(Recipe)}).to_json()
        named = ("model", "data", "optimizer", "width", "base", "steps", "batch", "schedule", "grow", "from")
        return {name: told[name] for name in named if told.get(name) is not None}


@dataclass(frozen=True)
class _LoopGround(Ground):
    """Costs of the user's steps, and who trains them."""

    @property
    def own(self) -> OwnLoop:
        assert isinstance(self.recipe, _LoopRecipe)
        return self.recipe.loop

    @cached_property
    def example(self) -> tuple[int, str]:
        """How many tokens a row of the family's inputs has; all that is known of the user's data."""
        tensors = [one for one in tree_leaves(self.own.family.inputs) if isinstance(one, Tensor)]
        tokens = [one[0].numel() for one in tensors if one.dim() > 1 and not one.is_floating_point()]
        return (tokens[0], "tokens") if tokens else (1, "examples")

    @cached_property
    def _flops_by_width(self) -> dict[str, float]:
        return {}

    def flops_per_step(self, width: WholeWidth) -> float | None:
        costs, name = self._flops_by_width, Width.of(width).label
        if name not in costs:
            costs[name] = float(self.own.flops(width)) if self.own.flops is not None else self._count(width)
        return costs[name]

    def _count(self, width: WholeWidth) -> float:
        """On the family's inputs, without memory where the model can do that."""
        family, rows = self.own.family, self.own.rows
        if not rows:
            raise MupscaleError("a study counts FLOPs: give the family a batch (inputs=), or the loop flops=")
        for build, place in ((family.sketch, "meta"), (family.build, "cpu")):
            args, named = tree_map_only(Tensor, partial(torch.Tensor.to, device=place), family.call)
            with suppress(Exception), seeded(0):  # a model that needs values
                return count_flops(build(width), *args, **named) / rows * self.recipe.batch
        raise MupscaleError("the FLOPs of the model cannot be counted on the family's inputs: give the loop flops=")

    def make_trainer(self, *given: Any, **more: Any) -> Trainer:
        return _LoopTrainer(self, *given, **more)


@dataclass
class _LoopTrainer(Trainer):
    """Trains stretch by stretch with the user's function; every one starts from the files of the one before."""

    def _train_wave(self, wave: Sequence[Stretch], light: Mapping[str, str]) -> None:
        for stretch in wave:
            for each in fields(Stretch):
                if each.name not in _UNDERSTOOD and (value := getattr(stretch, each.name)) != each.default:
                    raise MupscaleError(f"your own loop cannot train what a recipe can: {each.name} {value!r}")
            is_first = self.number == 1 and not self.trained
            self.ended[stretch.key] = self._train_stretch(stretch)
            spent, cost = self.spent[self.name], self.ground.cost(stretch)
            self.spent[self.name] = replace(spent, cost=(spent.cost or 0.0) + cost)
            if is_first and self.trained and (far := self.describe_progress()):
                self.note(f"  the first run tells the time{far}")  # as the lines of later stages do

    @property
    def own(self) -> OwnLoop:
        assert isinstance(self.ground, _LoopGround)
        return self.ground.own

    def _train_stretch(self, stretch: Stretch) -> float | None:
        """Its held-out loss, None: diverged; from where a kill has left it."""
        run, began, own, done = self._run_of(stretch), time.monotonic(), self.own, 0
        if (run.path / _END).exists():
            loss = read_json(run.path / _END)["loss"]
            return None if loss is None else float(loss)
        for folder in (run.path, run.checkpoints):
            clear_leftovers(folder, alone=True)
        if (last := run.last()) is not None:
            model, optimizer, done = self._load(last, stretch.width)
        else:
            model, optimizer = self._begin(stretch)
        while done < stretch.steps:
            count = min(own.save_every or stretch.steps, stretch.steps - done)
            rates, asked = [group["lr"] for group in optimizer.param_groups], list[int]()

            def schedule(step: int, done: int = done, asked: list[int] = asked) -> float:
                asked.append(step)
                return stretch.schedule.at(done + step, stretch.steps)

            with _calling(derive(stretch.seed, "stretch", stretch.order, done), "train"):
                own.train(model.train(), optimizer, count, schedule)
            if not asked:
                own.note(
                    "  train has not called schedule: the learning rate does not fall as the study assumes. Use "
                    "LambdaLR(optimizer, schedule), and step it after every step"
                )
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate  # a scheduler has left its own there
            done += count
            path = run.checkpoint(done, sharded=False)
            _save(path, model, optimizer, RunState(step=done, width=stretch.width, lr=stretch.lr))
            run.forget(keep=1)
            model, optimizer, _ = self._load(path, stretch.width)  # as after a kill, to the bit
        loss = self._held_out(model)
        parent = None if stretch.parent is None else stretch.parent.key
        write_json(run.path / _END, {"loss": loss, "steps": done, "key": stretch.key, "parent": parent})
        self._keep_seconds(time.monotonic() - began)
        return loss

    def _run_of(self, stretch: Stretch) -> RunFolder:
        return RunFolder(str(self.recipe_of(stretch).out))

    def _begin(self, stretch: Stretch) -> Trained:
        """Where a stretch begins: at an initialisation, or at its parent's end, grown if it is larger."""
        own, before = self.own, stretch.parent
        if before is None:
            model = own.family.init(stretch.width, seed=stretch.seed).to(own.device)
            return model, own.make_optimizer(model, stretch.lr)
        is_brought = before.start is not None
        path = self.start_at or self.ground.recipe.start if is_brought else self._run_of(before).path
        model, optimizer, _ = self._load(find_checkpoint(str(path)), before.width)
        for group in optimizer.param_groups:
            group["lr"] *= stretch.lr / (own.lr if is_brought else before.lr)
        if not stretch.is_grown:
            return model, optimizer
        inputs = own.family.inputs
        return grow_model(
            model,
            optimizer,
            before=before.width,
            width=stretch.width,
            grow=stretch.build_operators(),
            seed=stretch.seed,
            family=own.family,
            processes=Processes(torch.device(own.device)),
            data=None,
            batches=[inputs.to(own.device)] if isinstance(inputs, Tensor) else (),
        )

    def _load(self, path: Path, width: WholeWidth) -> tuple[nn.Module, Optimizer, int]:
        """A model and its optimizer, with the groups that it had, and its steps."""
        own, saved = self.own, checkpoint.load(path)
        model = own.family.build(width).to(own.device)
        checkpoint.load_model_state(saved.model, model)
        assert saved.optimizer is not None
        parameters, groups = naming.parameters(model), []
        for group, names in zip(saved.optimizer["param_groups"], saved.extra["names"], strict=True):
            values = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            groups.append({"params": [(name, parameters[name]) for name in names], **values})
        optimizer = own.optimizer_class(groups)  # type: ignore[call-arg]
        checkpoint.load_optimizer_state(saved.optimizer, optimizer)
        for group in optimizer.param_groups:
            group.pop("initial_lr", None)  # from which the next scheduler would begin, instead of the rate
        return model, optimizer, saved.extra["run"]["step"]

    def _held_out(self, model: nn.Module) -> float | None:
        with _calling(0, "held_out"), torch.no_grad():
            value = self.own.held_out(model.eval())
        try:
            loss = float(value)
        except (TypeError, ValueError):
            raise MupscaleError(
                f"held_out returned {type(value).__name__}, but must return the loss on held-out data, a number"
            ) from None
        return loss if math.isfinite(loss) else None


def _save(path: Path, model: nn.Module, optimizer: Optimizer, run: RunState) -> None:
    """Both in one file, with the names of each group's parameters."""
    names = {p: name for name, p in naming.parameters(model).items()}
    held = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    checkpoint.save(path, model, optimizer, run=run.to_json(), names=held)


def _hash_states(model: nn.Module, optimizer: Optimizer) -> str:
    """What tells a model that is brought along, with its optimizer, from any other."""
    digest = hashlib.sha256()
    for value in tree_leaves([dict(model.state_dict()), optimizer.state_dict()]):
        is_tensor = isinstance(value, Tensor)
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy() if is_tensor else repr(value).encode())
    return digest.hexdigest()[:16]


@contextmanager
def _calling(seed: int, name: str) -> Iterator[None]:
    """Inside, torch, numpy and Python draw from this seed; afterwards torch (on the CPU) and Python go on as before.

    name: of the user's function, whose missing files are not to be taken for the study's.
    """
    before = random.getstate()
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    try:
        with seeded(seed):
            yield
    except OSError as error:
        raise MupscaleError(f"{name} has failed: {type(error).__name__}: {error}") from error
    finally:
        random.setstate(before)


# ---------------------------------------------------------------------------------------------- whose code it is


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def fingerprint_code(function: Any, *more: Any) -> str:
    """What changes with a function's code, with the numbers and texts that it takes from outside, and with functions,
    classes and objects of the user's own modules that it uses; so that a changed loop is never taken for the one that
    was trained.
    """
    return hash_values([list(_tell(function, set())), *more])


_PLAIN = (bool, int, float, str, bytes, tuple, Tensor, type(None))
_PYTHON = Path(sysconfig.get_paths()["stdlib"]).resolve()


def _tell(value: Any, seen: set[int]) -> Iterator[Any]:
    """Plain values that stand for this one."""
    if isinstance(value, partial):
        yield from _tell(value.func, seen)
        for each in (*value.args, *value.keywords.values()):
            yield from _tell(each, seen)
    elif isinstance(value, bool | int | float | str | bytes | None):
        yield repr(value)
    elif isinstance(value, tuple | frozenset):
        inside = [list(_tell(each, seen)) for each in value]
        yield sorted(map(str, inside)) if isinstance(value, frozenset) else inside
    elif isinstance(value, Tensor):
        yield [str(value.dtype), *value.shape]
    elif isinstance(value, CodeType):
        yield [value.co_code.hex(), *value.co_names, *value.co_varnames]
        for each in value.co_consts:
            yield from _tell(each, seen)
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(function := getattr(value, "__func__", value), FunctionType):
            yield from _tell(function.__code__, seen)
            yield from _tell(function.__defaults__ or (), seen)
            for name, each in _outside(function):
                yield name
                yield from _tell(each, seen)
        else:  # a class, or an object
            kind = value if isinstance(value, type) else type(value)
            methods = [each for each in vars(kind).values() if isinstance(each, FunctionType)]
            for each in methods:
                yield from _tell(each, seen)
            used = [i for m in methods if m.__name__ != "__init__" for i in dis.get_instructions(m)]
            changing = {"training", *(i.argval for i in used if i.opname == "STORE_ATTR")}
            for name, each in sorted(getattr(value, "__dict__", {}).items()) if kind is not value else ():
                if isinstance(each, _PLAIN) and name not in changing:
                    yield name
                    yield from _tell(each, seen)


def _outside(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function finds around it and does not set itself: plain values, tensors, what the user's modules hold."""
    around = inspect.getclosurevars(function)
    counted = {each.argval for each in dis.get_instructions(function) if each.opname in ("STORE_GLOBAL", "STORE_DEREF")}
    for name, each in sorted({**around.globals, **around.nonlocals}.items()):
        used = {} if name in counted else {name: each}
        if used and isinstance(each, ModuleType) and _is_users(each.__name__):
            used = {n: vars(each)[n] for n in sorted({*function.__code__.co_names}) if n in vars(each)}
        for one, found in used.items():
            kind = found if isinstance(found, type) else type(found)
            home = getattr(found, "__module__", None) or kind.__module__
            is_own = home == function.__module__ or _is_users(home) or isinstance(found, nn.modules.loss._Loss)
            if isinstance(found, _PLAIN) or (is_own and not isinstance(found, ModuleType)):
                yield one, found


def _is_users(module: str | None) -> bool:
    """Whether somebody who writes a loop may edit it: not Python's, not installed, not ours."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if file is None or str(module).partition(".")[0] in ("mupscale", "torch"):
        return False
    path = Path(file).resolve()
    return not {"site-packages", "dist-packages"} & {*path.parts} and _PYTHON not in path.parents
