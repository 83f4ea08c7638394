"""A study in a training loop of one's own: a function of the user's trains every stretch of its tree.

The presets are those of recipes, and so are the tree, the folder and the page. What a recipe names by class paths is
given as objects here: `_LoopRecipe` hands out the user's family, and `_LoopTrainer` calls the user's functions.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from mupscale import checkpoint
from mupscale.core import WholeWidth, Width, naming
from mupscale.family import Family
from mupscale.growth import GrowthSettings
from mupscale.study.code_identity import CodeIdentity, FirstSteps, StepsTaken, hash_states
from mupscale.study.contenders import contenders_named
from mupscale.study.family_run import FamilySettings, run_family
from mupscale.study.pay import run_pay
from mupscale.study.results import StudySummary
from mupscale.study.systems import StudySettings
from mupscale.study.training import Ground, Note, Trainer
from mupscale.study.tree import Stretch, hash_values, list_stretches
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
        version: your own word for the version of your code and data; another one trains everything again
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
    version: str | int | None = None
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
        return _LoopRecipe(
            model=Spec(_name(type(sketch)), {}),
            data=Spec(_name(self.train), {}),
            optimizer=Spec(_name(self.optimizer_class), {"lr": self.lr}),
            width=width,
            base=Width.of(self.family.base).whole,
            steps=steps,
            batch=self.batch or self.rows or 1,
            schedule=Schedule(warmup=self.warmup),
            loop=self,
        )

    def _make_identity(self) -> CodeIdentity:
        """What tells this version of the user's functions and of the family from others."""
        shapes = {name: list(p.shape) for name, p in naming.parameters(self.family.sketch(self.family.base)).items()}
        family = hash_values([shapes, repr(self.family), str(self.family.rules)])
        version = None if self.version is None else str(self.version)
        return CodeIdentity(self._take_first_steps, family, version, self.device)

    def _take_first_steps(self, first: FirstSteps) -> StepsTaken:
        """The user's functions, from a seeded start and under a rate that falls, to show what they do."""
        model = self.family.init(first.width, seed=0).to(self.device)
        initial = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        optimizer = self.make_optimizer(model, first.lr)
        with _calling(derive(0, "first steps"), "train"):
            self.train(model.train(), optimizer, first.steps, lambda step: 1 - step / (2 * first.steps))
        return StepsTaken(initial, model, optimizer, self._evaluate(model))

    def _evaluate(self, model: nn.Module) -> float | None:
        """The held-out loss; None: it is not finite."""
        with _calling(0, "held_out"), torch.no_grad():
            value = self.held_out(model.eval())
        try:
            loss = float(value)
        except (TypeError, ValueError):
            raise MupscaleError(
                f"held_out returned {type(value).__name__}, but must return the loss on held-out data, a number"
            ) from None
        return loss if math.isfinite(loss) else None

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
        path = Path(self.folder) / "base" / f"{hash_states(model.state_dict(), optimizer.state_dict())}.safetensors"
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

    def epochs(self, leaves: Iterable[Stretch]) -> float | None:
        return None

    @cached_property
    def code(self) -> list[str]:
        """The id of the user's code, once its first steps have been taken."""
        return []

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Without the names of classes and functions: what they do tells them apart."""
        named = ("model", "data", "optimizer")
        return {name: value for name, value in super().identity.items() if name not in named}

    def identify(self, stretch: Stretch) -> str:
        assert self.code, "the first steps of the user's code come before any stretch"
        return hash_values([super().identify(stretch), *self.code])

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

    def train(self, leaves: Sequence[Stretch], *, keep: bool = True) -> list[float | None]:
        if not self.loop_ground.code:
            self._identify_code(leaves)
        return super().train(leaves, keep=keep)

    def _identify_code(self, leaves: Sequence[Stretch]) -> None:
        """By its first steps at the smallest size that is trained here."""
        first = min((one for one in list_stretches(leaves) if one.start is None), key=self._cost_per_step)
        trained = max(sum(one.steps for one in leaf.path if one.width == first.width) for leaf in leaves)
        steps = FirstSteps.of(first.width, trained, self.own.lr)
        code, lines = self.own._make_identity().find(self.folder, steps)
        self.loop_ground.code.append(code)
        for line in lines:
            self.note(line)

    def _cost_per_step(self, stretch: Stretch) -> float:
        return self.ground.cost_per_step(stretch.width)

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
    def loop_ground(self) -> _LoopGround:
        assert isinstance(self.ground, _LoopGround)
        return self.ground

    @property
    def own(self) -> OwnLoop:
        return self.loop_ground.own

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
        loss = own._evaluate(model)
        parent, (code,) = None if stretch.parent is None else stretch.parent.key, self.loop_ground.code
        write_json(run.path / _END, {"loss": loss, "steps": done, "key": stretch.key, "parent": parent, "code": code})
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


def _save(path: Path, model: nn.Module, optimizer: Optimizer, run: RunState) -> None:
    """Both in one file, with the names of each group's parameters."""
    names = {p: name for name, p in naming.parameters(model).items()}
    held = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    checkpoint.save(path, model, optimizer, run=run.to_json(), names=held)


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


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
