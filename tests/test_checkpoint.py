"""Checkpoints: everything comes back bit for bit, a failed save leaves the old file, and no code is ever loaded."""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import mupscale as mu
from hostile_folders import Harmful
from mupscale import checkpoint
from mupscale.models import GPT2, MLP, ResNet18
from mupscale.optim import load_schedule
from mupscale.system import MupscaleError
from refusals import refuses
from weights import identical, unchanged

_O = torch.optim
FAMILY = mu.Family(lambda width: MLP(6, width, 5, depth=3), base=8)


def train(model: nn.Module, opt: Optimizer, steps: int, start: int = 0) -> None:
    for i in range(start, start + steps):
        g = torch.Generator().manual_seed(i)
        opt.zero_grad()
        x = torch.randn(8, 6, generator=g).to(next(model.parameters()).dtype)
        F.cross_entropy(model(x).float(), torch.randint(5, (8,), generator=g)).backward()
        opt.step()


def names_in(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


# round trips


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("optimizer", "hyper"),
    [
        (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "betas": (0.8, 0.9)}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adafactor, {"lr": 1e-2}),
        (torch.optim.NAdam, {"lr": 1e-2}),  # whose mu_product is no step
    ],
)
def test_model_optimizer_and_plan_come_back_bit_for_bit(
    tmp_path: Path, optimizer: type[Optimizer], hyper: dict[str, Any], dtype: torch.dtype
) -> None:
    model = FAMILY.init(16).to(dtype)
    opt = FAMILY.optimizer(model, optimizer, **hyper)
    train(model, opt, 3)
    path = mu.save(tmp_path / "deep" / "er" / "x.ckpt", model, opt, FAMILY.plan(16), step=3)
    fresh = FAMILY.init(16, seed=9).to(dtype)
    fresh_opt = FAMILY.optimizer(fresh, optimizer, **{**hyper, "lr": 7.0})  # whose groups get the saved rate
    loaded = mu.load(path, fresh, fresh_opt)
    assert identical(fresh, model)
    assert identical(fresh_opt, opt)
    assert identical(loaded.model, dict(model.state_dict()))
    assert identical(loaded.optimizer, opt.state_dict())
    assert loaded.plan == FAMILY.plan(16)
    assert loaded.extra == {"step": 3}
    for each, its_opt in ((model, opt), (fresh, fresh_opt)):  # each parameter's step is a tensor of its own
        train(each, its_opt, 2, start=3)
    assert identical((dict(fresh.state_dict()), fresh_opt.state_dict()), (dict(model.state_dict()), opt.state_dict()))


def test_with_a_plan_alone_and_with_nothing_else(tmp_path: Path) -> None:
    """A plan with fractions, blocks and fresh units."""
    family = mu.Family(lambda heads: GPT2(11, 8, layers=1, heads=heads, head_dim=4), base=3)
    for plan in (family.plan(4), family.widening(4, 8), None):
        loaded = mu.load(mu.save(tmp_path / "x.ckpt", family.init(4), plan=plan))
        assert (loaded.optimizer, loaded.plan, loaded.extra) == (None, plan, {})


EXTRA: dict[str, Any] = {
    "scalars": [None, True, False, 1, -(2**70), 0.1, 1e-300, float("inf"), float("nan"), "text ∝ μ", ""],
    "tuple": (1, (2.0, "x"), [3, (4,)]),
    "keys": {1: "int", "1": "str", None: "none", (1, 2): "tuple", 0.5: "float"},
    "empty": [{}, [], ()],
    "tagged": {"$tensor": "no tensor", "$tuple": [1], "$items": []},
    "history": {"loss": [1.0, 0.5], "best": {"lr": 1e-3}},
}


def tensors() -> dict[str, Any]:
    """In every layout; and names that would collide if they were joined with dots."""
    return {
        "rng": torch.get_rng_state(),
        "nested": [{"a": torch.arange(6).view(2, 3)}, (torch.tensor(3.5), torch.empty(0, 4), torch.tensor([True]))],
        "transposed": torch.randn(3, 5).T,
        "expanded": torch.randn(3, 1).expand(3, 4),
        "strided": torch.randn(10)[::3],
        "a.b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0)},
        "c": {1: torch.ones(2), "1": torch.zeros(2)},
    }


@pytest.mark.parametrize("make", [lambda: EXTRA, tensors], ids=["values", "tensors"])
def test_extra_keeps_types_keys_and_tensors(make: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    extra = make()
    assert identical(mu.load(mu.save(tmp_path / "x.ckpt", FAMILY.init(8), **extra)).extra, extra)


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    def build() -> GPT2:
        return GPT2(11, 8, layers=1, heads=2, head_dim=4)

    model, other = build(), build()
    path = mu.save(tmp_path / "x.ckpt", model)
    names = names_in(path)
    assert "model.wte.weight" in names
    assert "model.lm_head.weight" not in names
    assert sorted(mu.load(path, other).model) == sorted(model.state_dict())
    assert other.lm_head.weight is other.wte.weight
    assert identical(other, model)


class Slices(nn.Module):
    """Two parameters, and a buffer that overlaps with both, in one storage."""

    def __init__(self) -> None:
        super().__init__()
        storage = torch.randn(20)
        self.a, self.b = nn.Parameter(storage[:10]), nn.Parameter(storage[10:].view(2, 5))
        self.register_buffer("c", storage[5:15])
        self.register_buffer("whole", storage)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "slices": Slices,
    "batchnorm": lambda: ResNet18(2, classes=3),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "transposed": lambda: _with_transposed_weight(nn.Linear(3, 4)),
    "0-d and empty": lambda: nn.ParameterList([torch.tensor(2.0), torch.empty(0, 3)]),
}


def _with_transposed_weight(linear: nn.Linear) -> nn.Linear:
    linear.weight.data = torch.randn(3, 4).T
    assert not linear.weight.is_contiguous()
    return linear


@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_tensors_in_every_layout(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    model = build()
    expected = copy.deepcopy(dict(model.state_dict()))
    loaded = mu.load(mu.save(tmp_path / "x.ckpt", model))
    assert identical(loaded.model, expected)
    other = build()
    mu.load(tmp_path / "x.ckpt", other)
    assert identical(other.state_dict(), expected)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["dp", "compile"])
def test_wrapped_models_save_and_load_under_plain_names(tmp_path: Path, wrap: Callable[..., nn.Module]) -> None:
    model, other = FAMILY.init(8), FAMILY.init(8, seed=1)
    path = mu.save(tmp_path / "x.ckpt", wrap(model))
    assert list(mu.load(path).model) == list(model.state_dict())
    mu.load(path, wrap(other))
    assert identical(other, model)


def grown_to_the_base() -> tuple[nn.Module, Optimizer]:
    """A model whose optimizer has several groups of equal factors; a new one has one group."""
    model = FAMILY.init(4)
    model, opt = FAMILY.upscale(model, FAMILY.optimizer(model, torch.optim.AdamW, lr=1e-2), width=8)
    return model, opt


@pytest.mark.parametrize("inside", [False, True])
def test_a_schedule_of_steps_resumes_where_a_new_optimizer_has_fewer_groups(inside: bool, tmp_path: Path) -> None:
    def make(opt: Optimizer) -> Any:
        one = _O.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        return _O.lr_scheduler.SequentialLR(opt, [one, _O.lr_scheduler.StepLR(opt, 2)], [6]) if inside else one

    (model, opt), resumed = grown_to_the_base(), FAMILY.init(8)
    resumed_opt = FAMILY.optimizer(resumed, torch.optim.AdamW, lr=1e-2)
    schedule, resumed_schedule = make(opt), make(resumed_opt)
    assert len(opt.param_groups) > len(resumed_opt.param_groups) == 1
    for i in range(9):
        if i == 3:
            path = mu.save(tmp_path / "x.ckpt", model, opt, scheduler=schedule.state_dict())
            mu.load(path, resumed, resumed_opt, resumed_schedule)
        for m, o, s in ((model, opt, schedule), *([(resumed, resumed_opt, resumed_schedule)] if i >= 3 else [])):
            train(m, o, 1, i)
            s.step()
    assert identical(resumed_opt, opt)


def test_a_scheduler_that_the_saved_groups_do_not_fit_is_told(tmp_path: Path) -> None:
    model, opt = grown_to_the_base()
    schedule = _O.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step)
    path = mu.save(tmp_path / "x.ckpt", model, opt, scheduler=schedule.state_dict())
    parameters = list(model.parameters())
    other = _O.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])
    functions = _O.lr_scheduler.LambdaLR(other, [lambda step: 0.9**step, lambda step: 1.0])
    with pytest.raises(MupscaleError, match="make the scheduler for the groups that the optimizer then has"):
        load_schedule(schedule.state_dict(), functions)
    new = FAMILY.optimizer(model, torch.optim.AdamW, lr=1e-2)
    mu.load(path, model, new)  # no scheduler was made for it
    new = FAMILY.optimizer(model, torch.optim.AdamW, lr=1e-2)
    _O.lr_scheduler.LambdaLR(new, lambda step: 0.9**step)
    with pytest.warns(UserWarning, match="scheduler was made, which no longer fits"):
        mu.load(path, model, new)


# what goes wrong


@pytest.mark.parametrize("where", ["write", "rename"])
def test_a_failed_save_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = mu.save(tmp_path / "x.ckpt", FAMILY.init(8), step=1)
    old = path.read_bytes()

    def half(path: Path, *tensors: Any) -> None:
        path.write_bytes(b"half a file")
        raise OSError("disk full")

    def refuse(*arguments: Any) -> None:
        raise OSError("disk full")

    if where == "write":
        monkeypatch.setattr(checkpoint, "write_tensors", half)
    else:
        monkeypatch.setattr(os, "replace", refuse)
    refuses("disk full", mu.save, path, FAMILY.init(8, seed=1), step=2)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["x.ckpt"]
    assert path.read_bytes() == old
    assert mu.load(path).extra == {"step": 1}


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.99, -1])
def test_a_truncated_file_is_refused_and_changes_nothing(tmp_path: Path, keep: float) -> None:
    model, other = FAMILY.init(8), FAMILY.init(8, seed=1)
    optimizers = [FAMILY.optimizer(each, torch.optim.AdamW, lr=1e-2) for each in (model, other)]
    path = mu.save(tmp_path / "x.ckpt", model, optimizers[0])
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with unchanged(other, optimizers[1]):
        refuses(r"x\.ckpt is not a whole checkpoint.*truncated", mu.load, path, other, optimizers[1])


@pytest.mark.parametrize("word", [b'"checksums"', b'"mupscale"', b"version"])
@pytest.mark.parametrize("version", [1, 2])
def test_no_flipped_bit_of_a_word_switches_the_checks_off(
    tmp_path: Path, word: bytes, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in files of version 1 that have checksums, and where a file that is none of ours is read as weights."""
    monkeypatch.setattr(checkpoint, "_VERSION", version)
    path = mu.save(tmp_path / "x.safetensors", nn.Linear(2, 2), step=3)
    monkeypatch.undo()
    assert mu.load(path).extra == {"step": 3}
    content = bytearray(path.read_bytes())
    for at in range(start := content.index(word), start + len(word)):
        for bit in (0, 5):  # another letter, and the same in capitals
            content[at] ^= 1 << bit
            path.write_bytes(content)
            with pytest.raises((mu.MupscaleError, SafetensorError)):
                _ = mu.load(path) if checkpoint.is_checkpoint(path) else load_file(path)
            content[at] ^= 1 << bit


def test_a_flipped_bit_of_a_value_is_noticed(tmp_path: Path) -> None:
    path = mu.save(tmp_path / "x.safetensors", nn.Linear(2, 2))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"checksum of 'model\.bias' is not that"):
        mu.load(path)


def test_a_header_without_checksums_is_refused_where_its_version_writes_them(tmp_path: Path) -> None:
    path = mu.save(tmp_path / "x", nn.Linear(2, 2), step=3)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()["mupscale"]
    tensors = load_file(path)
    save_file(tensors, path, metadata={"mupscale": header.replace('"version": 2', '"version": 1')})
    assert mu.load(path).extra == {"step": 3}  # written before there were any
    save_file(tensors, path, metadata={"mupscale": header})
    with pytest.raises(checkpoint.DamagedCheckpoint, match="x is damaged: its header has no checksums"):
        mu.load(path)


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "plain.safetensors")
    refuses("not a checkpoint written by mupscale", mu.load, tmp_path / "plain.safetensors")
    (tmp_path / "text").write_text("hello " * 100)
    refuses("not a whole checkpoint", mu.load, tmp_path / "text")
    refuses("there is no checkpoint at", mu.load, tmp_path / "nothing")
    with pytest.raises(mu.MupscaleError):
        mu.load(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "new", metadata={"mupscale": '{"version": 99}'})
    refuses("version 99", mu.load, tmp_path / "new")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: FAMILY.init(16), r"'layers\.0\.weight' has shape \(8, 6\) there and \(16, 6\) here"),
        (lambda: MLP(6, 8, 5, depth=4), r"'layers\.3\.\w+' is in one of the two only"),
        (lambda: MLP(6, 8, 5, depth=3, bias=False), r"'layers\.0\.bias' is in one of the two only"),
    ],
)
def test_a_checkpoint_of_another_model(tmp_path: Path, other: Callable[[], nn.Module], message: str) -> None:
    path = mu.save(tmp_path / "x.ckpt", FAMILY.init(8))
    model = other()
    with unchanged(model):
        refuses(message, mu.load, path, model)


def regrouped(opt: Optimizer, model: nn.Module, other: nn.Module) -> list[dict[str, Any]]:
    """The groups of one model's optimizer with the parameters of another of the same structure."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [{"params": [other.get_parameter(names[id(p)]) for p in group["params"]]} for group in opt.param_groups]


def test_optimizer_state_that_is_missing_or_of_another_model(tmp_path: Path) -> None:
    model = FAMILY.init(8, seed=1)
    opt = FAMILY.optimizer(model, torch.optim.AdamW, lr=1e-2)
    before = copy.deepcopy(model.state_dict())
    path = mu.save(tmp_path / "without.ckpt", FAMILY.init(8))
    refuses("holds no optimizer state", mu.load, path, model, opt)
    saved = FAMILY.init(8)
    path = mu.save(tmp_path / "few.ckpt", saved, torch.optim.AdamW([saved.layers[0].weight]))
    refuses("another optimizer", mu.load, path, model, torch.optim.AdamW(model.parameters()))
    large = FAMILY.init(16)
    large_opt = FAMILY.optimizer(large, torch.optim.AdamW, lr=1e-2)
    train(large, large_opt, 1)
    path = mu.save(tmp_path / "large.ckpt", large, large_opt)
    small_opt = torch.optim.AdamW([{"params": g["params"]} for g in regrouped(large_opt, large, model)])
    refuses(r"'exp_avg' number 0 has shape \(16, 6\) and the parameter \(8, 6\)", mu.load, path, optimizer=small_opt)
    assert not small_opt.state
    assert identical(model.state_dict(), before)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for value, name in (({1}, "set"), (object(), "object"), (b"x", "bytes"), (lambda: 0, "function"), (1j, "complex")):
        refuses(rf"'extra\.history\.1' is a {name}", mu.save, tmp_path / "x.ckpt", FAMILY.init(8), history=[0, value])
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(mu.MupscaleError, match=r"'extra\.odd' is a tensor which a checkpoint cannot store"):
            mu.save(tmp_path / "x.ckpt", FAMILY.init(8), odd=tensor)
    refuses(r"'model\.layers\.0\.weight'.*meta", mu.save, tmp_path / "x.ckpt", FAMILY.sketch(8))
    assert list(tmp_path.iterdir()) == []


# torch's own files


@pytest.mark.parametrize("how", ["torch", "legacy", "pickle"])
def test_load_torch_runs_no_code(tmp_path: Path, how: str) -> None:
    bomb, path = {"model": Harmful(tmp_path)}, tmp_path / "x.pt"
    if how == "pickle":
        path.write_bytes(pickle.dumps(bomb, protocol=2))
    else:
        torch.save(bomb, path, _use_new_zipfile_serialization=how == "torch")
    with pytest.raises(
        mu.MupscaleError, match=r"x\.pt cannot be loaded as weights only: it holds .*, which is"
    ) as error:
        mu.load_torch(path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_load_torch_refuses_whole_models_and_broken_files(tmp_path: Path) -> None:
    path, content = tmp_path / "x.pt", io.BytesIO()
    torch.save(FAMILY.init(8).state_dict(), content)
    whole = content.getvalue()
    torch.save(FAMILY.init(8), tmp_path / "model.pt")
    refuses(r"it holds mupscale\.models\.mlp\.MLP.*save a state_dict", mu.load_torch, tmp_path / "model.pt")
    for broken in (b"", whole[:10], whole[: len(whole) // 2], whole[: len(whole) * 99 // 100], b"hello world " * 20):
        path.write_bytes(broken)
        refuses(r"weights only: it is truncated, or not a file of torch\.save", mu.load_torch, path)
        assert path.read_bytes() == broken
    refuses("there is no file at", mu.load_torch, tmp_path / "nothing.pt")
    torch.save({"model": FAMILY.init(8).state_dict(), "epoch": 3}, path)
    loaded = mu.load_torch(path)
    assert loaded["epoch"] == 3
    assert identical(dict(loaded["model"]), dict(FAMILY.init(8).state_dict()))
    for legacy in (False, True):
        torch.save(nn.Linear(2, 2).state_dict(), path, _use_new_zipfile_serialization=not legacy)
        refuses(r"x\.pt is a file of torch\.save: read it with mupscale\.load_torch", mu.load, path)


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header and tensors are of one file, whichever: safetensors opens the path twice."""
    path, opened = tmp_path / "c", safetensors.safe_open

    def write(number: float, length: int) -> None:
        checkpoint.save_states(path, {"a": torch.full((length,), number)}, None, None, {"number": number})

    def replaced_meanwhile(*args: object, **named: object) -> object:
        file = opened(*args, **named)
        if len(calls) < 2:
            calls.append(1)
            write(float(len(calls)), 3)
        return file

    calls = list[int]()
    write(0.0, 3)
    monkeypatch.setattr(safetensors, "safe_open", replaced_meanwhile)
    found = checkpoint.load(path)
    assert found.extra["number"] == 2.0
    assert (found.model["a"] == 2.0).all()


def test_a_grown_optimizer_is_made_from_the_plan_beside_it(tmp_path: Path) -> None:
    build = lambda width: nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))  # noqa: E731
    narrow = build(4)
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=1e-3)
    narrow(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    plan = mu.plan(narrow, wide := build(8), fresh=lambda: build(4))
    mu.widen(narrow, wide, plan)
    grown = torch.optim.AdamW(mu.param_groups(wide, plan, torch.optim.AdamW, lr=1e-3))
    mu.widen_optimizer(optimizer, grown, plan, narrow=narrow)
    mu.save(tmp_path / "wide.safetensors", wide, grown, plan)
    with pytest.raises(MupscaleError, match=r"to another optimizer: .*mupscale\.param_groups"):
        mu.load(tmp_path / "wide.safetensors", wide, torch.optim.AdamW(wide.parameters()))
    saved = mu.load(tmp_path / "wide.safetensors")
    again = torch.optim.AdamW(mu.param_groups(wide, saved.plan, torch.optim.AdamW, lr=1e-3))
    mu.load(tmp_path / "wide.safetensors", wide, again)
    for ours, theirs in zip(again.param_groups, grown.param_groups, strict=True):
        for p, q in zip(ours["params"], theirs["params"], strict=True):
            assert torch.equal(again.state[p]["exp_avg"], grown.state[q]["exp_avg"])


# states of other optimizers

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: _O.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: _O.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: _O.AdamW(p, lr=0.1),
    "NAdam": lambda p: _O.NAdam(p, lr=0.1),
    "Adamax": lambda p: _O.Adamax(p, lr=0.1),
    "Adagrad": lambda p: _O.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: _O.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Adafactor": lambda p: _O.Adafactor(p, lr=0.1),
    "ASGD": lambda p: _O.ASGD(p, lr=0.1),
    "LBFGS": lambda p: _O.LBFGS(p, lr=0.1),
}
SAME_CLASS = {("SGD", "SGD with momentum"), ("SGD with momentum", "SGD")}  # whose hyperparameters come along


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[MLP, dict[str, Path]]:
    folder, model = tmp_path_factory.mktemp("optimizers"), MLP(6, 4, 5, depth=2)
    paths = {}
    for name, make in OPTIMIZERS.items():
        optimizer = make(model.parameters())
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step(lambda: model(torch.ones(2, 6)).sum())
        paths[name] = mu.save(folder / name, model, optimizer)
    return model, paths


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_goes_into_an_optimizer_of_its_own_class_alone(name: str, saved: Any) -> None:
    model, paths = saved
    for other, make in OPTIMIZERS.items():
        optimizer = make(model.parameters())
        if other == name or (name, other) in SAME_CLASS:
            mu.load(paths[name], model, optimizer)
        elif other != "LBFGS":  # which no step shows
            with unchanged(optimizer):
                said = r"to another optimizer: .* load the model alone|number of"
                refuses(said, mu.load, paths[name], model, optimizer)


@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq", "step"])
def test_a_state_that_lacks_something_is_refused(lost: str, saved: Any, tmp_path: Path) -> None:
    model, paths = saved
    optimizer = _O.AdamW(model.parameters())
    mu.load(paths["AdamW"], model, optimizer)
    del optimizer.state[model.layers[1].bias][lost]
    path = mu.save(tmp_path / "lost", model, optimizer)
    with pytest.raises(MupscaleError, match=rf"its state number 3 has no '{lost}', which AdamW keeps"):
        mu.load(path, model, _O.AdamW(model.parameters()))


def test_a_state_with_more_in_it_is_refused_where_the_optimizer_is_known(saved: Any) -> None:
    """Lion has AdamW's hyperparameters, and one of its two averages."""

    class Lion(Optimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)

    model, paths = saved
    mu.load(paths["AdamW"], model, Lion(model.parameters()))
    mu.register_optimizer(Lion, degree=0, eps=(), state={"exp_avg": 1})
    refuses("has 'exp_avg_sq', which Lion does not keep", mu.load, paths["AdamW"], model, Lion(model.parameters()))


def test_an_optimizer_comes_back_from_the_file_alone_after_two_growths(tmp_path: Path) -> None:
    """Its class, groups, rates and state, for a model that was built anew, with no plan."""
    torch.manual_seed(0)
    models, batch = [MLP(5, width, 3).double() for width in (8, 16, 48)], torch.randn(7, 5).double()
    optimizer = torch.optim.Adam(models[0].parameters(), lr=0.01, eps=1e-3)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for narrow, wide in itertools.pairwise(models):
        step(narrow, optimizer)
        _, optimizer = mu.upscale(narrow, wide, optimizer=optimizer, inputs=batch, exact=True)
    path = mu.save(tmp_path / "wide.safetensors", models[-1], optimizer)
    again = MLP(5, 48, 3).double()
    mu.load(path, again)
    resumed = mu.load_optimizer(path, again)
    assert type(resumed) is torch.optim.Adam
    assert [step(again, resumed) for _ in range(3)] == [step(models[-1], optimizer) for _ in range(3)]
    halved = mu.load_optimizer(path, again, torch.optim.Adam, lr=0.005)
    rates = [[group["lr"] for group in one.param_groups] for one in (halved, optimizer)]
    assert rates[0] == pytest.approx([rate / 2 for rate in rates[1]], rel=1e-12)
    refuses("which is not a state of SGD", mu.load_optimizer, path, again, torch.optim.SGD)
    refuses("belongs to a different model", mu.load_optimizer, path, MLP(5, 16, 3))
    refuses("there is no saved optimizer at", mu.load_optimizer, tmp_path / "absent", again)
    refuses("it was written without a saved optimizer", mu.load_optimizer, tmp_path, again)
    refuses("holds no optimizer state", mu.load_optimizer, mu.save(tmp_path / "alone", again), again)
