"""The models of a run, where they train: a fresh μP initialisation or somebody's checkpoint, upscaled; and growth.

And what is looked at before the first step: there are examples, the model takes them and can grow, memory is enough.
"""

from __future__ import annotations

import inspect
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale import checkpoint
from mupscale.core import Plan, WholeWidth, Width, WidthLike, copy_into, naming, without_ddp
from mupscale.data import Data
from mupscale.family import Family
from mupscale.growth import Grow, is_replica, materialize, measure_statistics, split_operators, what_is_foreign
from mupscale.models import count_flops
from mupscale.optim import MuonAdamW, make_optimizer, muon_groups
from mupscale.system import (
    MupscaleError,
    appearing,
    available_memory,
    derive,
    describe_shortage,
    fingerprint_files,
    is_dcp_folder,
    load_torch,
    make_folder,
    open_tensors,
    replacing,
)
from mupscale.train.dcp import load_dcp_model
from mupscale.train.objective import cast_input, find_logits
from mupscale.train.processes import Processes, divide_by_size
from mupscale.train.recipe import Recipe, check_growing_sizes, few_examples
from mupscale.train.run_folder import Snapshot, find_checkpoint, read_snapshot
from mupscale.train.stored_recipes import StoredRecipe

_ROUNDS = 4  # in which a sharded model is made: in each, a process holds a fourth of its share beside its shards
_BATCHES = 8  # on which statistics of new channels are measured


def load_trained(folder: str | Path, trust: Collection[str] = ()) -> tuple[nn.Module, Recipe]:
    """The model that a run ended with, at the size that it grew to and in eval mode, and the run's recipe.

    trust: packages of one's own that the recipe names. Of a run that this user has made on this machine, all are.

    Example:
        >>> import tempfile
        >>> from contextlib import redirect_stdout
        >>> from mupscale.train import Growth, Spec, run_recipe
        >>> mlp, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
        >>> sgd, grow = Spec("torch.optim.SGD", {"lr": 0.1}), [Growth(at=1, width=12)]
        >>> with tempfile.TemporaryDirectory() as folder, redirect_stdout(None):  # without the lines of progress
        ...     _ = run_recipe(Recipe(mlp, data, sgd, width=8, base=8, steps=2, batch=4, grow=grow, out=folder))
        ...     model, recipe = load_trained(folder)
        >>> recipe.width, model(torch.zeros(1, 54)).shape, next(model.parameters()).shape[0]
        (8, torch.Size([1, 7]), 12)
    """
    stored = StoredRecipe.read(Path(folder) / "recipe.json")
    recipe = stored.load([*trust, *stored.packages_if_own()])
    saved = read_snapshot(find_checkpoint(folder))
    model = recipe.family().build(_width_of(saved, recipe))
    saved.restore_model(model)
    return model.eval(), recipe


def place_member(family: Family, width: WholeWidth, processes: Processes, dtype: torch.dtype) -> nn.Module:
    """The model of this width where it trains, for parameters that are read from somewhere; its buffers have values."""
    if not (processes.sharded and family.can_draw_parts):
        return processes.place(family.build(width).to(dtype))
    model = processes.place(family.sketch(width).to(dtype))
    materialize(model, processes.device)
    _fill_buffers(model, family.drawn_part(width, 0, ()))
    return model


def init_member(family: Family, width: WholeWidth, seed: int, processes: Processes, dtype: torch.dtype) -> nn.Module:
    """The freshly initialised model of this width where it trains; the same for any number of processes."""
    if not (processes.sharded and family.can_draw_parts):
        return processes.place(family.init_untried(width, seed=seed).to(dtype))
    sketch = family.sketch(width)
    sizes = {name: p.numel() * p.element_size() for name, p in naming.parameters(sketch).items()}
    shapes = {name: (p.shape, p.dtype) for name, p in naming.parameters(sketch).items()}
    model = processes.place(sketch.to(dtype))
    materialize(model, processes.device)
    targets, parts = naming.parameters(model), divide_by_size(sizes, _ROUNDS * processes.world)
    for number in range(0, len(parts), processes.world):
        ours = parts[number + processes.rank]
        member = family.init_part(width, seed, ours)
        _fill_buffers(model, member)
        made = {name: naming.parameters(member)[name].detach() for name in ours}
        del member  # and with it the memory that all others share
        for owner, part in enumerate(parts[number : number + processes.world]):
            for name in part:
                shape, kind = shapes[name]
                whole = made.pop(name) if owner == processes.rank else torch.empty(shape, dtype=kind)
                whole = whole.to(processes.device)
                dist.broadcast(whole, owner)
                copy_into(targets[name], whole)
                del whole
    return model


@torch.no_grad()
def _fill_buffers(model: nn.Module, built: nn.Module) -> None:
    theirs: Mapping[str, Tensor] = naming.buffers(built)
    for name, buffer in naming.buffers(model).items():
        buffer.copy_(theirs[name])


def grow_model(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    before: WholeWidth,
    width: WholeWidth,
    grow: Grow,
    seed: int,
    family: Family,
    processes: Processes,
    data: Data | None,
    batches: Iterable[Tensor] = (),
) -> tuple[nn.Module, Optimizer]:
    """The model and its optimizer at the new width, which may say a depth; `before` is the one that it has.

    data: on which copies are tried, unless that has been done. They show where units lie, for fresh ones as well.
    batches: inputs on which the running statistics of new channels and blocks are measured; copies have the old ones'.
    """
    wider, _ = split_operators(grow)
    if data is not None:
        # sizes that grow by fresh units alone have no copies to try; then the growth warns that it is not tried
        with nullcontext() if wider.needs_multiples else suppress(MupscaleError):
            check_copies(family, data, before, width)
    exact = is_replica(wider)  # the line about the growth tells of it
    wide, grown = family.upscale(
        model, optimizer, width=width, grow=grow, exact=exact, seed=seed, place=processes.place
    )
    assert grown is not None
    if any(isinstance(m, nn.modules.batchnorm._NormBase) for m in wide.modules()):
        plan = family.growth_plan(before, width, grow)
        if not wider.needs_multiples or plan.has_new_parts:
            measure_statistics(wide, batches, plan)
            processes.reshard(wide)
    return wide, grown


def check_copies(family: Family, data: Data, narrow: WidthLike, wide: WidthLike) -> None:
    """Try once, on small members of the family and a few examples, whether copies are exact; an error where not.

    narrow, wide: from which width to which a model is to grow, since only some of its sizes may.
    """
    growing = Width.of(narrow).growing(Width.of(wide))
    if growing and not family.has_tried(narrow, wide):
        family.check(few_examples(data), growing)


def coming_batches(recipe: Recipe, data: Data, step: int) -> Iterable[Tensor]:
    """The inputs of the next steps, all of them in every process, as the model takes them."""
    for number in range(step, step + _BATCHES):
        x, _ = data.batch(recipe.seeds.data, number * recipe.batch, recipe.batch)
        yield cast_input(x, recipe)


def recipe_groups(
    model: nn.Module, plan: Plan, optimizer: type[Optimizer], no_decay: Sequence[str]
) -> list[dict[str, Any]] | None:
    """Groups by parameter names, for `make_optimizer`; None where all parameters are one.

    no_decay: bias, norm (everything in a module that normalises), or patterns of names, such as *.wte.weight.
    """
    groups: list[dict[str, Any]] = [{"params": list(plan.parameters)}]
    if issubclass(optimizer, MuonAdamW):
        groups = muon_groups(plan)
    elif not no_decay:
        return None
    spared = names_without_decay(model, plan, no_decay)
    parts = []
    for group in groups:
        decayed = [name for name in group["params"] if name not in spared]
        rest = [name for name in group["params"] if name in spared]
        parts += [{**group, "params": decayed}, {**group, "params": rest, "weight_decay": 0.0}]
    return [part for part in parts if part["params"]]


def names_without_decay(model: nn.Module, plan: Plan, words: Sequence[str]) -> set[str]:
    """The parameters that words like bias, norm or *.wte.weight mean; a word that means none is an error."""
    norms = {path for path, module in naming.modules(model).items() if "norm" in type(module).__name__.lower()}
    spared = set[str]()
    for word in words:
        matching = {name for name in plan.parameters if fnmatchcase(name, word)}
        if word == "bias":
            matching = {n for n in plan.parameters if n.endswith("bias") or n.rpartition(".")[2].startswith("bias")}
        elif word == "norm":
            matching = {name for name in plan.parameters if name.rpartition(".")[0] in norms}
        if not matching:
            raise MupscaleError(f"no_decay: {word} matches no parameter: give bias, norm, or a pattern such as *.bias")
        spared |= matching
    return spared


def starting_point(
    recipe: Recipe, family: Family, processes: Processes, data: Data | None = None
) -> tuple[nn.Module, Optimizer]:
    """The model at the recipe's width and its optimizer: a fresh μP initialisation, or a checkpoint that is upscaled.

    data: where a checkpoint grows, on which copies are tried, or the statistics of new channels are measured.
    """
    if recipe.start is None:
        model = init_member(family, recipe.width, recipe.seeds.init, processes, recipe.dtype())
        return model, _optimizer(recipe, family.plan(recipe.width), model, processes)
    saved = _open(find_checkpoint(recipe.start))
    width = _width_of(saved, recipe)
    wider, deeper = recipe.build_operators()
    check_growing_sizes(recipe.width, width, wider.needs_multiples, f"starting from {saved.path}")
    model = place_member(family, width, processes, recipe.dtype())
    saved.restore_model(model)
    optimizer = _optimizer(recipe, family.plan(width), model, processes)
    _load_optimizer_state(optimizer, saved, recipe, model, processes.device)
    if width == recipe.width and not recipe.noise:
        return model, optimizer
    return grow_model(
        model,
        optimizer,
        before=width,
        width=recipe.width,
        grow=(wider, deeper),
        seed=derive(recipe.seeds.noise, "start"),
        family=family,
        processes=processes,
        data=data,
        batches=() if data is None else coming_batches(recipe, data, 0),
    )


@dataclass(frozen=True)
class StartingModel:
    """What a checkpoint says of its model. steps: that it has trained; None where it does not say.

    is_decayed: whether its learning rate had fallen already, as far as its recipe tells.
    """

    width: WholeWidth
    steps: int | None
    has_optimizer: bool
    is_decayed: bool


def describe_start(recipe: Recipe) -> StartingModel:
    """The model that a recipe starts from (`start`), without its weights; refused where it is not the recipe's."""
    assert recipe.start is not None
    saved = _open(find_checkpoint(recipe.start))
    width = _width_of(saved, recipe)
    saved.check_model(recipe.family().sketch(width))
    state = saved.run
    schedule = ((state.recipe if state is not None else None) or {}).get("schedule") or {}
    decayed = isinstance(schedule, dict) and schedule.get("kind", "constant") != "constant"
    steps = None if state is None else state.step
    return StartingModel(width, steps, saved.content.optimizer is not None, decayed)


def fingerprint_checkpoint(start: str) -> str:
    """Eight digits that change with any byte of the checkpoint that `start` means, see `find_checkpoint`."""
    path = find_checkpoint(start)
    return fingerprint_files([path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()))


def copy_checkpoint(start: str, folder: Path) -> Path:
    """The checkpoint that `start` means (see `find_checkpoint`), copied into a folder that is for it alone, once."""
    path = find_checkpoint(start)
    copy = folder / path.name
    try:
        make_folder(folder)
        if made := [one for one in folder.iterdir() if not one.name.startswith(".")]:
            return made[0]
        if path.is_dir():
            with appearing(copy) as hidden:
                shutil.copytree(path, hidden, dirs_exist_ok=True)
        else:
            with replacing(copy) as temporary:
                shutil.copyfile(path, temporary)
    except OSError as error:
        raise MupscaleError(f"{copy} cannot be written: {error.strerror or error}") from None
    return copy


def _open(path: Path) -> Snapshot:
    """A checkpoint of ours, or a state dict in safetensors, from torch.save or of torch.distributed."""
    if is_dcp_folder(path):
        weights = load_dcp_model(path)
    elif path.is_dir() or checkpoint.is_checkpoint(path):
        return read_snapshot(path)
    else:
        weights = _read_weights(path)
    return Snapshot(path, checkpoint.Checkpoint(weights))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with open_tensors(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The model's tensors in what people save: a state dict, or one under 'model' or 'state_dict'."""
    if not path.is_file():
        raise MupscaleError(f"{path} is not a regular file, so no weights are read from it")
    try:
        loaded: Any = _read_safetensors(path) if path.suffix == ".safetensors" else load_torch(path)
    except (SafetensorError, OSError) as error:
        raise MupscaleError(f"{path} is not a whole safetensors file ({error}); it may be truncated") from None
    for key in ("model", "state_dict"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise MupscaleError(f"{path} holds no state dict of a model")
    return {canonical: loaded[name] for canonical, name in without_ddp(loaded, ()).items()}


def _width_of(saved: Snapshot, recipe: Recipe) -> WholeWidth:
    if saved.run is not None and saved.run.width is not None:
        return saved.run.width
    if recipe.start_width is None:
        raise MupscaleError(f"{saved.path} does not record the width of its model: give from_width")
    return recipe.start_width


def _load_optimizer_state(
    optimizer: Optimizer, saved: Snapshot, recipe: Recipe, model: nn.Module, device: torch.device
) -> None:
    """The moments of the checkpoint's optimizer, if it is one of this class and kept all that this one needs.

    Hyperparameters stay this recipe's.
    """
    if recipe.state == "reset" or saved.content.optimizer is None:
        return
    theirs = saved.run.optimizer_class if saved.run is not None else None
    named = all("param_names" in group for group in saved.content.optimizer["param_groups"])
    if not named or (theirs and theirs.rpartition(".")[2] != type(optimizer).__name__):
        return
    restored = saved.restore_optimizer(type(optimizer), hyperparameters(recipe, device), model)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {number: restored.state.get(p, {}) for number, p in enumerate(parameters)}
    groups = optimizer.state_dict()["param_groups"]
    if not what_is_foreign({"param_groups": groups, "state": state}, optimizer):  # AMSGrad needs more than Adam keeps
        optimizer.state.update(restored.state)


def hyperparameters(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """The optimizer's arguments; on CUDA torch's fused step is taken where nothing speaks against it."""
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in recipe.optimizer.init_args.items()}
    accepted = inspect.signature(recipe.optimizer_class()).parameters
    rivals = ("fused", "foreach", "capturable", "differentiable")
    if device.type == "cuda" and "fused" in accepted and not any(arguments.get(name) for name in rivals):
        arguments["fused"] = True
    return arguments


def _optimizer(recipe: Recipe, plan: Plan, model: nn.Module, processes: Processes) -> Optimizer:
    cls = recipe.optimizer_class()
    groups = recipe_groups(model, plan, cls, recipe.no_decay)
    hyper = hyperparameters(recipe, processes.device)
    return make_optimizer(model, plan, cls, groups=groups, rules=recipe.rules, **hyper)


_FINGERPRINTED = 256  # examples that the fingerprint of the data looks at

_Counted = tuple[float, int | None]
"""The FLOPs of an example, and the number of logits, where there are any."""
_COUNTED: WeakKeyDictionary[Family, dict[Any, _Counted | None]] = WeakKeyDictionary()


def check_data(data: Data) -> None:
    if data.size < 1:
        raise MupscaleError("there is nothing to train on: the data's training part is empty")
    if next(iter(data.evaluation(1)), None) is None:
        raise MupscaleError("there is nothing to evaluate on: the data's held-out part is empty")


def data_fingerprint(data: Data) -> str:
    """Eight digits that change with the number of examples and with what some of them hold, spread over all."""
    count = min(data.size, _FINGERPRINTED)
    rows = torch.arange(count, device=data.rows_on or data.device) * data.size // count
    total = zlib.crc32(f"{data.size} {data.per_example}".encode())
    for part in data.examples(rows):
        values = part.detach().cpu().contiguous()
        total = zlib.crc32(str(tuple(values.shape)).encode(), total)
        total = zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def cost_per_example(family: Family, width: WholeWidth, data: Data, recipe: Recipe) -> float | None:
    """Training FLOPs of one example, counted on a model without memory; its outputs are checked on the way.

    All runs of a process share a family, so that they are counted once for each width. A model that looks at values
    (transformers' masks do) is built for it, where there is room. None where they cannot be counted.
    """
    x = cast_input(_first_example(data), recipe)
    known = _COUNTED.setdefault(family, {})
    key = Width.of(width).label, tuple(x.shape), x.dtype, recipe.dtype()
    if key not in known:
        known[key] = _count_any_way(family, width, x, recipe)
    if (counted := known[key]) is None:
        return None
    cost, outputs = counted
    if data.classes is not None and outputs is not None and outputs < data.classes:
        raise MupscaleError(
            f"the model has {outputs} outputs, but the data has {data.classes} classes: set the model's number of "
            f"outputs (vocab, classes, d_out) to at least that, or, for text, take the model's own tokenizer "
            f"(bytes have 257 classes: one ends a document)"
        )
    return cost


def _count_any_way(family: Family, width: WholeWidth, x: Tensor, recipe: Recipe) -> _Counted | None:
    """On a model without memory; on one that is built where it needs values, unless it takes more than half of memory.

    An error where the model cannot take the example at all: it is no matter of counting then.
    """
    with suppress(Exception):  # a model that needs values
        return _count(family.sketch(width).to("meta", recipe.dtype()), x.to("meta"))
    model = None
    try:
        if 2 * _count_parameters(family, width) * recipe.dtype().itemsize > (available_memory() or 0):
            return None
        with torch.random.fork_rng(devices=[]):
            model = family.build(width).to(recipe.dtype())
            return _count(model, x.cpu())
    except Exception:  # its cost is not known, and its outputs are not checked
        if x.device.type == "cpu" and model is not None:  # where the model is to run
            _run_on_example(model, x, recipe, width)
        return None


def _count_parameters(family: Family, width: WholeWidth) -> int:
    return sum(p.numel() for p in family.sketch(width).parameters())


def _count(model: nn.Module, x: Tensor) -> _Counted:
    """FLOPs, and the number of logits on the way."""
    outputs: list[Any] = []
    model.register_forward_hook(lambda module, given, output: outputs.append(output))
    cost = float(count_flops(model, x))
    logits = find_logits(outputs[-1])
    return cost, None if logits is None else logits.shape[-1]


def check_memory(recipe: Recipe, family: Family, processes: Processes) -> None:
    """Refuse a model whose weights and gradients alone are more than the machine has left: it would end the process.

    A CUDA device says so by itself.
    """
    left = available_memory()
    if left is None or processes.device.type != "cpu" or processes.world > 1:
        return
    for width in (recipe.width, *(growth.width for growth in recipe.grow)):
        count = _count_parameters(family, width)
        needed = 2 * count * recipe.dtype().itemsize
        if needed > left:
            raise MupscaleError(
                f"there is not enough memory for {Width.of(width).phrase}: {count:,} parameters and their gradients "
                f"take {describe_shortage(needed, left)}; take a smaller width"
            )


def check_growth(recipe: Recipe, family: Family, data: Data) -> None:
    """Plan every growth of the run, so that one which cannot be done is refused before the first step.

    Copies are tried, too: small members of the family are run on a few examples.
    """
    width = recipe.width
    for growth in recipe.grow:
        family.check_growth(width, growth.width, growth.build_operators())
        if growth.build_operator().needs_multiples:
            check_copies(family, data, width, growth.width)
        width = growth.width


@torch.no_grad()
def check_model_takes_data(
    model: nn.Module, width: WholeWidth, data: Data, recipe: Recipe, processes: Processes
) -> None:
    """Run the model on one example, so that one which cannot take it is refused before the first step."""
    try:
        _run_on_example(model.eval(), cast_input(_first_example(data), recipe), recipe, width)
    finally:
        model.train()
        processes.reshard(model)


@torch.no_grad()
def _run_on_example(model: nn.Module, x: Tensor, recipe: Recipe, width: WholeWidth) -> None:
    try:
        model(x)
    except Exception as error:
        remedy = "set its number of inputs (d_in, …) to what the data has"
        if not x.is_floating_point():
            remedy = f"give it a vocabulary for tokens up to {int(x.max())}, or the data its tokenizer"
        raise MupscaleError(
            f"{recipe.model.class_path} at {Width.of(width).phrase} cannot take the data's examples of shape "
            f"{tuple(x.shape[1:])}: {str(error).splitlines()[0] if str(error) else type(error).__name__}; choose a "
            f"width that it can have, or {remedy}"
        ) from error


def _first_example(data: Data) -> Tensor:
    x, _ = data.examples(torch.zeros(1, dtype=torch.int64, device=data.rows_on or data.device))
    return x
