"""Saved optimizers, widened on disk: what the core gives in memory, and training that goes on exactly."""

from __future__ import annotations

import copy
import errno
import itertools
import math
import os
import pickle
import resource
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer

import hf_models as models
import mupscale as mu
from hf_trainer_runs import arguments, decayed, examples
from mupscale import hf
from mupscale.hf import groups as training
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.config_fields import Times
from mupscale.hf.groups import grow_optimizer_file, match_plan
from mupscale.hf.record import GrowthStep, Record, plan_growths
from mupscale.hf.source import Source, open_source
from mupscale.hf.trainer import Clip
from mupscale.optim import SavedOptimizer, decay_groups, read_optimizer
from refusals import refuses
from slow_cases import with_slow

TWICE = Times.of(2)
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "foreach": False}),
}


LR, DECAY, EPS, CLIP, STEPS = 1e-2, 0.3, 1e-3, 0.3, 20


def json_of(name: str, head: str | None = None, **more: Any) -> dict[str, Any]:
    layers = {n: 1 for n in ("num_hidden_layers", "n_layer") if n in models.CONFIGS[name][2]}
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0} if name == "gpt2" else {}
    config = models.tiny(name, head, **{**layers, **no_dropout, **more})[0]
    return {**config.to_dict(), "architectures": config.architectures}


def pair(name: str = "llama", times: int | str = 2, **more: Any) -> tuple[nn.Module, nn.Module, Record]:
    """A model whose parameters are all of some size, the same one upscaled, and the record of that."""
    config, growth = json_of(name, **more), Times.of(times)
    family = ConfigFamily(config)
    small, wide = models.build(config), models.build(family.wide_config(growth))
    for p in small.parameters():
        p.data.add_(torch.randn_like(p), alpha=0.1)
    mu.widen(small, wide, match_plan(small, family.plan(growth, initial=False)))
    return small, wide, Record(config, (GrowthStep(growth),))


def recorded(folder: Path, *kind: Any, **more: Any) -> tuple[nn.Module, nn.Module]:
    """Such models, with the record in the folder."""
    small, wide, record = pair(*kind, **more)
    record.save(folder)
    return small, wide


class Case:
    """A small model saved in a folder, its source, and the same model upscaled."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.small, self.wide, self.record = pair(**more)
        self.folder, self.path, self.out = folder, folder / "optimizer.pt", folder / "wide.pt"
        self.small.save_pretrained(folder)  # type: ignore[operator]
        self.source: Source = open_source(folder)
        self.plan = match_plan(self.small, ConfigFamily(self.source.config).plan(TWICE))

    def grow(self) -> None:
        mu.widen(self.small, self.wide, self.plan)

    def save(self, optimizer: Optimizer) -> None:
        torch.save(optimizer.state_dict(), self.path)

    def trained(self, cls: Any = torch.optim.AdamW, steps: int = 1, groups: Any = None, **hyper: Any) -> Optimizer:
        """An optimizer of the small model, saved after some steps; the wide model is grown from what it is then."""
        optimizer: Optimizer = cls(groups or self.small.parameters(), **{"lr": 1e-2, **hyper})
        train(self.small, optimizer, batches(steps))
        self.save(optimizer)
        self.grow()
        return optimizer

    def widened(self, plan: mu.Plan | None = None, **more: Any) -> dict[str, Any]:
        steps = plan_growths([GrowthStep(TWICE)], self.source.config, self.source.shapes, recorded=plan)
        grow_optimizer_file(self.path, self.out, self.source, steps, **more)
        return torch.load(self.out, weights_only=True)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def tokens(count: int = STEPS, rows: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(1, 29, (count * rows, 12), generator=torch.Generator().manual_seed(seed))


def batches(steps: int, seed: int = 0) -> Tensor:
    return tokens(steps, seed=seed).view(steps, 2, 12)


def train(
    model: nn.Module, optimizer: Optimizer, data: Tensor, scheduler: Any = None, clip: Callable[[], object] = int
) -> list[float]:
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        clip()
        optimizer.step()
        losses.append(loss.item())
        if scheduler is not None:
            scheduler.step()
    return losses


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy of the logits; of a model without a readout, a function of the mean over its wide states."""
    if model.main_input_name == "pixel_values":
        drawn = torch.Generator().manual_seed(int(batch.sum()))
        pixels = torch.randn(len(batch), model.config.num_channels, 8, 8, generator=drawn)  # type: ignore[union-attr]
        return nn.functional.cross_entropy(model(pixel_values=pixels).logits, batch[:, 0] % 2)
    out = model(input_ids=batch)
    logits = out.get("prediction_logits", out.get("logits"))
    if logits is None:
        states = out.last_hidden_state.unflatten(-1, (16, -1)).mean(-1)
        return (states - batch[..., None] / 29).square().mean()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.roll(-1, 1).flatten())


def close(small: list[float], wide: list[float], tolerance: float = 1e-10) -> bool:
    assert len({*small}) == len(small) == len(wide) >= 10
    assert max(small) - min(small) > 1e-3
    return torch.allclose(torch.tensor(small), torch.tensor(wide), rtol=tolerance, atol=0)


def test_the_file_is_the_same_whatever_process_writes_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.trained()
    case.widened()
    first = case.out.read_bytes()
    monkeypatch.setattr(os, "getpid", lambda: 4_194_000)
    case.widened()
    assert case.out.read_bytes() == first


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_file_holds_what_the_core_makes_in_memory(name: str, case: Case) -> None:
    """Its state tells which optimizer it is of."""
    cls, hyper = OPTIMIZERS[name]
    optimizer = case.trained(cls, 3, **hyper)
    assert read_optimizer(case.path, case.small).optimizer_class() is cls
    grown = mu.upscale(case.small, case.wide, case.plan, optimizer, exact=True)[1]
    expected, found = grown.state_dict(), case.widened()
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert found["state"][number].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found["state"][number][key]), torch.as_tensor(value)), key
    for ours, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert ours == {k: v for k, v in theirs.items() if k != "from_group"}
    assert not list(case.folder.glob(".*"))


def test_another_rule_for_decay_goes_along_and_is_told(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In the file, in groups made anew, and by `inspect`."""
    rules = mu.RuleSet(decay="sqrt")
    case.trained(weight_decay=0.3)
    with pytest.warns(UserWarning, match="with decay=sqrt copies do not go on exactly .* is 0.7071 times what"):
        groups = case.widened(rules=rules)["param_groups"]
    decays = {name: group["weight_decay"] for group in groups for name in group["param_names"]}
    assert {round(value, 12) for value in decays.values()} == {0.3, round(0.3 * 2**0.5, 12)}
    fresh = mu.param_groups(case.wide, case.plan, torch.optim.AdamW, lr=0.01, weight_decay=0.3, rules=rules)
    assert {name: pytest.approx(group["weight_decay"]) for group in fresh for name, _ in group["params"]} == decays
    overview = hf.inspect(case.folder, times=2, grow=mu.Copies(), rules=rules)
    assert {row.name: row.factors["weight_decay"] for row in overview.rows}["model.layers.*.mlp.up_proj.weight"] == (
        pytest.approx(2**0.5)
    )
    assert overview.summary()[-1].startswith("with decay=sqrt copies do not go on exactly")
    with_fresh_units = hf.inspect(case.folder, times=2, rules=rules).summary()
    assert not any("decay=" in line for line in with_fresh_units)
    assert any("weight decay follows the rule 'sqrt'" in line for line in with_fresh_units)
    saved = {"optimizer": case.folder / "optimizer.pt", "verify": False, "progress": False}
    with pytest.warns(UserWarning, match="decay=sqrt"):
        wide = hf.upscale(
            case.folder, tmp_path_factory.mktemp("rule") / "wide", times=2, exact=True, rules=rules, **saved
        )
    again = hf.param_groups(wide.path, case.wide, torch.optim.AdamW, lr=0.01, weight_decay=0.3)
    assert {name: pytest.approx(group["weight_decay"]) for group in again for name, _ in group["params"]} == decays
    assert "by the rule `sqrt`" in (wide.path / "README.md").read_text()
    refuses(r"give the saved optimizer, too \(optimizer=\)", hf.upscale, case.folder, case.folder / "out", rules=rules)
    with pytest.raises(mu.MupscaleError, match="growth to 4 layers keeps the learning rates of blocks"):
        hf.GrowTrainerCallback(at=1, layers=4, rules=mu.RuleSet(depth="sqrt"))


TRAINED = [n for n in OPTIMIZERS if n not in ("adafactor", "tensor lr")]


@pytest.mark.quick("adamw")
@pytest.mark.parametrize("name", with_slow(TRAINED, ("adamw", "momentum", "amsgrad", "rprop")))
def test_training_goes_on_exactly(name: str, tmp_path: Path, double: None) -> None:
    case, (cls, hyper) = Case(tmp_path), OPTIMIZERS[name]
    optimizer, data = case.trained(cls, 8, **hyper), batches(20, seed=1)
    case.widened()
    resumed = training.resume_optimizer(case.out, case.wide, cls)
    assert close(train(case.small, optimizer, data), train(case.wide, resumed, data))


@pytest.mark.quick("True")
@pytest.mark.filterwarnings("ignore:.* was saved with a learning rate of 0")  # whose schedule is made anew here
@pytest.mark.parametrize("tied", [False, True])
def test_the_trainers_own_file_goes_on_exactly(tied: bool, tmp_path: Path, double: None) -> None:
    """Two groups without names; a schedule in the middle, made anew for the wide model with last_epoch."""
    pytest.importorskip("accelerate")
    case = Case(tmp_path, tie_word_embeddings=tied)

    usual = {"per_device_train_batch_size": 2, "max_steps": 8, "learning_rate": 1e-2, "lr_scheduler_type": "cosine"}
    saves = {"save_strategy": "steps", "save_steps": 8}
    args = arguments(tmp_path / "run", **usual, **saves, weight_decay=0.2, adam_epsilon=1e-4)
    trainer = transformers.Trainer(case.small, args, train_dataset=examples(batches(8).view(16, 12)))
    trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-8"
    case.path = checkpoint / "optimizer.pt"
    content = torch.load(case.path, weights_only=True)
    assert [len(group["params"]) for group in content["param_groups"]] == [8 + (not tied), 3]
    assert not any("param_names" in group for group in content["param_groups"])
    case.grow()
    case.source = open_source(checkpoint)
    wide = case.folder / "wide"
    wide.mkdir()
    case.out = wide / "optimizer.pt"
    case.widened()
    case.record.save(wide)

    optimizer = torch.optim.AdamW(decayed(case.small, 0.2), lr=1e-2)
    optimizer.load_state_dict(content)
    resumed = training.resume_optimizer(wide, case.wide, torch.optim.AdamW)
    schedulers = []
    for made in (optimizer, resumed):
        for group in made.param_groups:
            assert group["initial_lr"] == pytest.approx(1e-2 * group.get("lr_factor", 1.0))
        shape = lambda step: 0.5 + 0.5 * math.cos(step / 10)  # noqa: E731
        schedulers.append(torch.optim.lr_scheduler.LambdaLR(made, shape, last_epoch=8))
    data = batches(20, seed=1)
    assert close(train(case.small, optimizer, data, schedulers[0]), train(case.wide, resumed, data, schedulers[1]))


def test_a_plain_optimizer_with_param_groups_takes_the_file(case: Case) -> None:
    """Groups made in the same way have the same order, so torch's own load_state_dict will do."""
    case.trained(steps=3, groups=decayed(case.small, 0.1), eps=1e-6)
    found = case.widened()
    case.record.save(case.folder)
    decay = decay_groups(case.wide, 0.1)
    made = training.param_groups(case.folder, case.wide, torch.optim.AdamW, lr=1e-2, eps=1e-6, groups=decay)
    plain = torch.optim.AdamW(made)
    before = plain.state_dict()["param_groups"]
    plain.load_state_dict(found)
    assert plain.state_dict()["param_groups"] == before
    for name, p in case.wide.named_parameters():
        assert plain.state[p]["exp_avg"].shape == p.shape, name


def _renamed(case: Case, how: str) -> Optimizer:
    named = list(case.small.named_parameters())
    if how == "names":
        return torch.optim.AdamW([{"params": named[3:]}, {"params": named[:3], "weight_decay": 0.0}], lr=1e-2)
    if how == "names of DDP":
        return torch.optim.AdamW([("module." + n, p) for n, p in reversed(named)], lr=1e-2)
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


@pytest.mark.parametrize("how", ["names", "names of DDP", "names as keys", "order"])
def test_which_parameter_is_which(how: str, case: Case) -> None:
    optimizer = _renamed(case, how)
    train(case.small, optimizer, batches(2))
    content = optimizer.state_dict()
    if how == "names as keys":
        names = [n for n, _ in case.small.named_parameters()]
        content["state"] = {names[i]: state for i, state in content["state"].items()}
        content["param_groups"][0]["params"] = names
    torch.save(content, case.path)
    found = case.widened()
    names = [n for group in found["param_groups"] for n in group["param_names"]]
    assert sorted(names) == sorted(n for n, _ in case.small.named_parameters())
    for number, name in enumerate(names):
        narrow = optimizer.state[case.small.get_parameter(name)]["exp_avg"]
        entry = case.plan.parameters[name]
        expected = mu.expand(narrow, entry.axes, torch.empty(entry.wide), entry.rule.gradient())
        assert torch.equal(found["state"][number]["exp_avg"], expected)


def test_what_cannot_be_told_is_refused(case: Case) -> None:
    def refused(optimizer: Optimizer, match: str) -> None:
        train(case.small, optimizer, batches(1))
        case.save(optimizer)
        refuses(match, case.widened)
        assert not case.out.exists()

    parameters = list(case.small.parameters())
    refused(torch.optim.AdamW(parameters[1:]), r"holds 11 parameters, which are neither the model's 12 in order nor")
    refused(torch.optim.AdamW(parameters[::-1]), "or their shapes differ")
    refused(torch.optim.AdamW([{"params": parameters[:4]}, {"params": parameters[4:]}]), r"holds 4 \+ 8 parameters")
    refused(torch.optim.AdamW([("other", parameters[0])]), "holds 'other', which the model does not have")
    refused(torch.optim.SGD(parameters, lr=0.1), "cannot tell which optimizer wrote .* from its state .there is none")
    refused(torch.optim.RAdam(parameters), "RAdam cannot follow the width")


def test_an_older_torch_says_less_and_means_adamw(case: Case) -> None:
    content = case.trained(weight_decay=0.1).state_dict()
    kept = ("lr", "betas", "eps", "weight_decay", "amsgrad", "params")
    content["param_groups"] = [{key: content["param_groups"][0][key] for key in kept}]
    torch.save(content, case.path)
    assert read_optimizer(case.path, case.small).optimizer_class() is torch.optim.AdamW
    assert {g["weight_decay"] for g in case.widened()["param_groups"]} == {0.1, 0.2}


def test_a_plan_that_the_record_holds(case: Case) -> None:
    case.trained()
    expected = case.widened()
    found = case.widened(plan=mu.plan(case.small, case.wide))
    assert found["param_groups"] == expected["param_groups"]
    assert all(torch.equal(found["state"][n]["exp_avg"], s["exp_avg"]) for n, s in expected["state"].items())


def test_a_second_growth_goes_on_from_the_first(case: Case) -> None:
    """Groups that mupscale made before keep their factors: together they are one growth."""
    case.trained()
    case.widened()
    grown = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    second = Case(case.folder / "second", **{k: getattr(case.wide.config, k) for k in grown})
    second.path = case.out
    factors = {n: g["lr_factor"] for g in second.widened()["param_groups"] for n in g["param_names"]}
    assert factors["model.embed_tokens.weight"] == 1
    assert factors["lm_head.weight"] == factors["model.layers.0.mlp.up_proj.weight"] == 0.25


def test_resuming_something_else_is_refused(case: Case) -> None:
    case.trained()
    case.widened()
    refuses("'exp_avg', which is not a state of SGD", training.resume_optimizer, case.out, case.wide, torch.optim.SGD)
    refuses("it belongs to a different model", training.resume_optimizer, case.path, case.wide, torch.optim.AdamW)
    with pytest.raises(mu.MupscaleError, match="there is no saved optimizer at"):
        training.resume_optimizer(case.folder / "nowhere", case.wide, torch.optim.AdamW)
    resumed = training.resume_optimizer(case.out, case.wide, torch.optim.AdamW)
    case.out.write_bytes(b"")  # the state does not hang on the file
    assert all(bool(state["exp_avg"].isfinite().all()) for state in resumed.state.values())


def test_bad_files(case: Case) -> None:
    def refused(match: str) -> None:
        assert "\n" not in refuses(match, case.widened)
        assert not case.out.exists()
        assert not list(case.folder.glob(".*"))

    refused("there is no saved optimizer at")
    case.path.write_text('{"log_history": []}')
    refused(r"optimizer.pt was not written by torch.save. Give the optimizer.pt")
    case.path.write_bytes(pickle.dumps({"state": os.system}))
    refused("cannot be loaded safely")
    torch.save({"state": {}, "param_groups": [{"params": [], "hook": os.system}]}, case.path)
    refused("cannot be loaded safely")
    none = [[1, 2], {"state": {}}, {"state": {}, "param_groups": []}, {"state": 3, "param_groups": [1]}]
    none += [{"state": {0: 5}, "param_groups": [{"params": [0]}]}, {"state": {}, "param_groups": [{"params": [[0]]}]}]
    for content in none:
        torch.save(content, case.path)
        refused(r"is not an optimizer's state_dict\(\)")
    optimizer = case.trained()
    whole, content = case.path.read_bytes(), optimizer.state_dict()
    content["param_groups"][0]["param_names"] = ["lm_head.weight"] * len(content["param_groups"][0]["params"])
    torch.save(content, case.path)
    refused("it belongs to a different model")
    case.path.write_bytes(whole[: len(whole) // 2])
    refused("cannot be loaded safely")
    optimizer.state[case.small.lm_head.weight]["exp_avg"][0, 0] = math.nan
    case.save(optimizer)
    refused("'lm_head.weight/exp_avg' holds NaN")


def test_a_disk_that_is_full_leaves_nothing(case: Case) -> None:
    case.trained()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        refuses(r"wide.pt cannot be written .*; is there room for it on the disk", case.widened)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not case.out.exists()
    assert not list(case.folder.glob(".*"))


def test_room_is_taken_before_the_file_is_mapped(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map of a sparse file on a full disk kills the process; room that is missing must show before that."""
    sparse = case.folder / "sparse"
    sparse.touch()
    os.truncate(sparse, 1 << 20)
    assert sparse.stat().st_blocks * 512 < 1 << 20
    training._reserve(sparse)
    assert sparse.stat().st_blocks * 512 >= 1 << 20
    case.trained()

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(training, "_reserve", full)
    refuses(r"No space left on device.*; is there room for it on the disk", case.widened)
    assert not case.out.exists()
    assert not list(case.folder.glob(".*"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_stays_flat(tmp_path: Path) -> None:
    """The output is 16 times the largest tensor; no more than a few of those are ever in memory of our own."""
    size, count = 768, 16
    names = [f"{i}" for i in range(count)]
    entry = mu.Entry((size, size), (2 * size, 2 * size), {0: mu.Axis(2, side="out"), 1: mu.Axis(2, side="in")})
    halves = partial(entry.widened, torch.ones(size, size), factor=0.5)
    states = {n: {"exp_avg": training.StateTensor(entry.wide, torch.float32, halves)} for n in names}
    saved = SavedOptimizer(tmp_path, [(names, {"lr": 0.1})], states)
    before, peak, done = _anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    training.write_optimizer(tmp_path / "out.pt", saved)
    done.set()
    watcher.join()
    written = (tmp_path / "out.pt").stat().st_size
    assert written > count * 4 * 4 * size**2
    assert peak[0] - before < written / 2  # mostly one of them; now and then the system counts four or five
    found = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert all(bool((found["state"][i]["exp_avg"] == 0.5).all()) for i in range(count))


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_a_schedule_that_has_ended_at_no_rate_is_told(case: Case) -> None:
    """As the Trainer's linear one does: with a rate of 0 nothing would be learnt."""
    optimizer = torch.optim.AdamW(case.small.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step)
    train(case.small, optimizer, batches(1), schedule)
    case.save(optimizer)
    case.widened()
    with pytest.warns(UserWarning, match=r"a learning rate of 0, at the end of its schedule.*\(lr=0\.01\)") as met:
        training.resume_optimizer(case.out, case.wide, torch.optim.AdamW)
    assert met[0].filename == __file__
    resumed = training.resume_optimizer(case.out, torch.compile(case.wide), torch.optim.AdamW, lr=1e-3)
    assert {(g["lr"], g["lr_factor"]) for g in resumed.param_groups} == {(1e-3, 1.0), (5e-4, 0.5)}


# --- An upscaled model trained on with transformers' Trainer, with accelerate and in a plain loop, as documented.
ARCHITECTURES = {
    **{name: (name, None) for name in models.FIRST},
    "llama-Model": ("llama", "Model"),
    "bert-ForPreTraining": ("bert", "ForPreTraining"),
}


def settings(folder: Path, **more: Any) -> Any:
    given = {"per_device_train_batch_size": 2, "max_steps": STEPS, "learning_rate": LR, "weight_decay": DECAY}
    given |= {"adam_epsilon": EPS, "max_grad_norm": CLIP, "warmup_steps": 3, "optim": "adamw_torch"}
    return arguments(folder / "run", **{**given, **more})


class Recording(transformers.Trainer):
    """The Trainer itself, which logs losses with four digits, with all of them."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(model, inputs, *args, **kwargs)
        self.__dict__.setdefault("losses", []).append((result[0] if isinstance(result, tuple) else result).item())
        return result


def trained(model: nn.Module, args: Any, **more: Any) -> list[float]:
    """The losses of a Trainer's run."""
    trainer = Recording(model, args, train_dataset=examples(tokens()), **more)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.losses


def ours(folder: Path, model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    decay = decay_groups(model, DECAY)
    groups = training.param_groups(folder, model, torch.optim.AdamW, lr=LR, eps=EPS, groups=decay, **more)
    return torch.optim.AdamW(groups)


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The Trainer's groups for a model that did not grow."""
    return torch.optim.AdamW(decayed(model, DECAY), lr=LR, eps=EPS)


@pytest.mark.parametrize("name", with_slow(("llama", "gemma", "gpt2"), ("llama",)))
def test_the_trainer_goes_on_as_with_the_small_model(name: str, tmp_path: Path, double: None) -> None:
    small, wide = recorded(tmp_path, name)
    losses = trained(small, settings(tmp_path))  # its own AdamW, decay and clipping
    args = settings(tmp_path, weight_decay=123.0, adam_epsilon=123.0)  # which the optimizer given overrules
    clip = Clip(tmp_path)
    assert close(losses, trained(wide, args, optimizers=(ours(tmp_path, wide), None), callbacks=[clip]))
    assert clip.norm > CLIP  # so it did clip


@pytest.mark.quick("no clip")
@pytest.mark.parametrize(
    "wrong", with_slow(["no clip", "uniform lr", "uniform decay", "plain eps"], ("no clip", "uniform lr"))
)
def test_the_trainer_differs_without_any_of_it(wrong: str, tmp_path: Path) -> None:
    small, wide = recorded(tmp_path)
    losses = trained(small, settings(tmp_path))
    optimizer = ours(tmp_path, wide)
    for group in optimizer.param_groups:
        group["lr"] = LR if wrong == "uniform lr" else group["lr"]
        group["weight_decay"] = min(group["weight_decay"], DECAY) if wrong == "uniform decay" else group["weight_decay"]
        group["eps"] = EPS if wrong == "plain eps" else group["eps"]
    callbacks = [] if wrong == "no clip" else [Clip(tmp_path)]
    assert not close(losses, trained(wide, settings(tmp_path), optimizers=(optimizer, None), callbacks=callbacks), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "tolerance"),
    [
        ({"gradient_accumulation_steps": 2, "max_steps": 10, "gradient_checkpointing": True}, 1e-4),
        ({"bf16": True}, 1e-2),
    ],
)
def test_the_trainers_own_ways(more: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    small, wide = recorded(tmp_path)
    losses = trained(small, settings(tmp_path, **more))
    given = {"optimizers": (ours(tmp_path, wide), None), "callbacks": [Clip(tmp_path)]}
    assert close(losses, trained(wide, settings(tmp_path, **more), **given), tolerance)


def test_clip_takes_over_and_gives_back(tmp_path: Path) -> None:
    _, wide = recorded(tmp_path)
    args, clip = settings(tmp_path, max_steps=2), Clip(tmp_path)
    trainer = transformers.Trainer(wide, args, train_dataset=examples(tokens()), callbacks=[clip])
    for _ in range(2):  # the second time, too
        trainer.train()
        assert (args.max_grad_norm, clip.max_norm) == (CLIP, CLIP)
    noted = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert noted[-1]["invariant_grad_norm"] == clip.norm.item()
    before, own = copy.deepcopy(wide), Clip(tmp_path, max_norm=1e-9)
    plain = torch.optim.SGD(wide.parameters(), lr=1.0)
    args.lr_scheduler_type = "constant"
    transformers.Trainer(
        wide, args, train_dataset=examples(tokens()), callbacks=[own], optimizers=(plain, None)
    ).train()
    moved = max(
        (p - q).detach().abs().max().item() for p, q in zip(wide.parameters(), before.parameters(), strict=True)
    )
    assert moved < 1e-7  # as float32 can show


def test_clip_puts_the_record_beside_what_the_trainer_saves(tmp_path: Path) -> None:
    _, wide = recorded(tmp_path)
    args = settings(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    transformers.Trainer(wide, args, train_dataset=examples(tokens()), callbacks=[Clip(tmp_path)]).train()
    assert Record.load(tmp_path / "run" / "checkpoint-2") == Record.load(tmp_path)


def test_clip_knows_the_norm_after_an_interrupted_run(tmp_path: Path) -> None:
    """As in a notebook: the arguments stay, and Trainer and Clip are made anew."""
    _, wide = recorded(tmp_path)
    args = settings(tmp_path)
    Clip(tmp_path).on_train_begin(args, None, None, model=wide)
    assert args.max_grad_norm == 0.0
    again = Clip(tmp_path)
    again.on_train_begin(args, None, None, model=wide)
    assert again.max_norm == CLIP
    again.on_train_end(args, None, None)
    assert args.max_grad_norm == CLIP
    assert args.to_dict().keys() == settings(tmp_path).to_dict().keys()


def test_clip_refuses_scaled_gradients(tmp_path: Path) -> None:
    _, wide = recorded(tmp_path)
    args = settings(tmp_path)
    for field, reason in (("fp16", "bf16"), ("deepspeed", "DeepSpeed")):
        other = copy.copy(args)
        setattr(other, field, True)
        refuses(reason, Clip(tmp_path).on_train_begin, other, None, None, model=wide)


def test_accelerate(tmp_path: Path, double: None) -> None:
    from accelerate import Accelerator

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[nn.Module], Any]) -> list[float]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader = torch.utils.data.DataLoader(examples(tokens(2 * STEPS)), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    clip(model)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    small, wide = recorded(tmp_path)
    plan = training.plan(tmp_path, wide)
    losses = run(small, plain_adamw(small), lambda model: nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    assert close(losses, run(wide, ours(tmp_path, wide), lambda model: mu.clip_grad_norm_(model, CLIP, plan)))


@pytest.mark.quick("bert-ForPreTraining")
@pytest.mark.parametrize("case", with_slow(ARCHITECTURES, ("gpt2", "bert-ForPreTraining")))
def test_a_plain_loop_with_every_architecture(case: str, tmp_path: Path, double: None) -> None:
    """Names, ties and decay groups of the real models: a few exact steps of each."""
    name, head = ARCHITECTURES[case]
    small, wide = recorded(tmp_path, name, head=head)
    small.eval()
    wide.eval()
    plan = training.plan(tmp_path, wide)
    plain = lambda: nn.utils.clip_grad_norm_(small.parameters(), CLIP)  # noqa: E731
    losses = train(small, plain_adamw(small), batches(10), clip=plain)
    invariant = lambda: mu.clip_grad_norm_(wide, CLIP, plan)  # noqa: E731
    assert close(losses, train(wide, ours(tmp_path, wide), batches(10), clip=invariant))


@pytest.mark.parametrize("name", with_slow(models.CONFIGS, ("llama", "gemma")))
def test_decay_groups_are_the_trainers(name: str) -> None:
    model = models.build(json_of(name))
    decayed = transformers.Trainer.get_decay_parameter_names(None, model)
    every = [n for n, p in model.named_parameters() if p.requires_grad]  # Whisper's positions are frozen
    with_decay, without = decay_groups(model, 0.1)
    assert with_decay == {"params": [n for n in every if n in decayed], "weight_decay": 0.1}
    assert without == {"params": [n for n in every if n not in decayed], "weight_decay": 0.0}
    assert with_decay["params"]
    assert without["params"]


def test_decay_groups_leave_frozen_parameters_out() -> None:
    model: Any = models.build(json_of("llama"))
    model.model.embed_tokens.requires_grad_(False)
    named = [name for group in decay_groups(model, 0.1) for name in group["params"]]
    assert named == [n for n in named if n != "model.embed_tokens.weight"]
    assert len(named) == len(list(model.named_parameters())) - 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tied_parameters_have_all_their_names(name: str, tmp_path: Path) -> None:
    _, wide = recorded(tmp_path, name, tie_word_embeddings=True)
    plan = training.plan(tmp_path, wide)
    embedding = next(iter(plan.parameters))
    assert plan.parameters[embedding].names == (embedding, "lm_head.weight")
    assert plan.parameters.keys() == dict(wide.named_parameters()).keys()
    norm = "model.norm.weight" if name == "llama" else "transformer.ln_f.weight"
    assert float(plan.parameters[norm].fold) == 0.5


TIED = ("llama", "gpt2", "phi", "gpt_neox", "opt", "gemma")


@pytest.mark.slow
@pytest.mark.quick("gpt2")
@pytest.mark.parametrize("name", with_slow(TIED, ("gpt2", "gemma")))
def test_a_tied_model_with_a_classifier_in_place_of_its_readout(name: str, tmp_path: Path, double: None) -> None:
    """The norm before it has the readout's 1/k, so that the classifier's rates are those of one that takes it back."""
    tied = {} if name == "gemma" else {"tie_word_embeddings": True}
    small, wide = recorded(tmp_path, name, **tied)
    kind = models.CONFIGS[name][0] + "ForSequenceClassification"
    few, many = (getattr(transformers, kind)(copy.deepcopy(model.config)).eval() for model in (small, wide))
    few.load_state_dict(small.state_dict(), strict=False)
    many.load_state_dict(wide.state_dict(), strict=False)
    plan = training.plan(tmp_path, many)
    assert plan.parameters["score.weight"].fold == (2 if tied else pytest.approx(2**0.5))
    mu.widen(few, many, plan)

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[float]:
        for batch in tokens(10).view(-1, 1, 12):
            loss = nn.functional.cross_entropy(model(input_ids=batch).logits, batch[:, 0] % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    assert close(list(losses(few, plain_adamw(few))), list(losses(many, ours(tmp_path, many))))


def test_ties_other_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    recorded(tmp_path, tie_word_embeddings=True)
    record = Record.load(tmp_path)
    wide = ConfigFamily(record.config).wide_config(record.times)
    with pytest.raises(mu.MupscaleError, match="are two tensors in this model, but were one"):
        training.plan(tmp_path, models.build({**wide, "tie_word_embeddings": False}))
    recorded(tmp_path, tie_word_embeddings=False)
    with pytest.raises(mu.MupscaleError, match="are one tensor in this model, but were two"):
        training.plan(tmp_path, models.build({**wide, "tie_word_embeddings": True}))


@pytest.mark.quick("llama-*")
@pytest.mark.parametrize(
    ("name", "small", "head"),
    [
        ("bert", "BertForSequenceClassification", "BertForMaskedLM"),
        ("bert", "BertModel", "BertForMaskedLM"),
        ("llama", "LlamaModel", "LlamaForCausalLM"),
    ],
)
def test_a_tied_readout_that_was_not_upscaled_is_refused(tmp_path: Path, name: str, small: str, head: str) -> None:
    """Nothing has its 1/k, so that its logits are k times as large; both remedies are open."""
    config = {**json_of(name, tie_word_embeddings=True), "architectures": [small]}
    models.build(config).save_pretrained(tmp_path / "small")  # type: ignore[operator]
    models.grow(tmp_path / "small", tmp_path / "wide")
    kind = getattr(transformers, head)
    with pytest.raises(mu.MupscaleError) as refused:
        _groups(tmp_path / "wide", kind.from_pretrained(tmp_path / "wide"))
    assert f"the {small} that was upscaled had no such readout" in str(refused.value)
    assert f"Load the small model as {head}, save it, and upscale that" in str(refused.value)
    assert _groups(tmp_path / "wide", kind.from_pretrained(tmp_path / "wide", tie_word_embeddings=False))
    kind.from_pretrained(tmp_path / "small").save_pretrained(tmp_path / "with head")
    models.grow(tmp_path / "with head", tmp_path / "wide with head")
    assert _groups(tmp_path / "wide with head", kind.from_pretrained(tmp_path / "wide with head"))


def test_a_model_that_is_not_described_brings_its_plan(tmp_path: Path) -> None:
    small, wide = recorded(tmp_path)
    expected = [{**g, "params": [n for n, _ in g["params"]]} for g in _groups(tmp_path, wide)]
    record = Record.load(tmp_path)
    Record({**record.config, "model_type": "nobody knows"}, record.growths, mu.plan(small, wide)).save(tmp_path)
    assert [{**g, "params": [n for n, _ in g["params"]]} for g in _groups(tmp_path, wide)] == expected
    for other in (small, small.model, models.build(json_of("gpt2"))):
        refuses("is a different one: ", training.plan, tmp_path, other)


def _groups(folder: Path, model: nn.Module) -> list[dict[str, Any]]:
    return training.param_groups(folder, model, torch.optim.AdamW, lr=LR)


def test_another_model_is_refused(tmp_path: Path) -> None:
    small, wide = recorded(tmp_path)
    said = r"grew by 2 in width, and this Llama\w+ is a different one: .* has shape \(29, 16\) but .* \(29, 32\)"
    refuses(said, training.plan, tmp_path, small)
    wide.extra = nn.Linear(3, 3)
    refuses(r"the parameter 'extra.weight', which the upscaled", training.plan, tmp_path, wide)
    refuses(r"there is no mupscale.json at", training.plan, tmp_path / "nowhere", wide)


def test_wrapped_models_get_the_same_groups(tmp_path: Path) -> None:
    """torch.compile's and DDP's names, and bfloat16."""
    _, wide = recorded(tmp_path)
    plain = ours(tmp_path, wide).param_groups
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = [torch.compile(wide), nn.parallel.DistributedDataParallel(wide), nn.DataParallel(wide)]
    finally:
        torch.distributed.destroy_process_group()
    for model in (*wrapped, wide.bfloat16()):
        groups = ours(tmp_path, model).param_groups
        assert [g["param_names"] for g in groups] == [g["param_names"] for g in plain]
        assert [g["lr"] for g in groups] == [g["lr"] for g in plain]
        assert training.plan(tmp_path, model) == training.plan(tmp_path, wide)


def test_two_growths_are_one(tmp_path: Path) -> None:
    """Rates are those of the first small model, however often it grew."""
    _, wide = recorded(tmp_path, times=4)
    once = training.param_groups(tmp_path, wide, torch.optim.AdamW, lr=LR)
    record = Record.load(tmp_path)
    Record(record.config, (GrowthStep(Times.of(2)), GrowthStep(Times.of(2), mu.Copies(0.3), 1))).save(tmp_path)
    twice = training.param_groups(tmp_path, wide, torch.optim.AdamW, lr=LR)
    assert [{**g, "params": [n for n, _ in g["params"]]} for g in once] == [
        {**g, "params": [n for n, _ in g["params"]]} for g in twice
    ]
    assert {g["lr_factor"] for g in once} == {1.0, 0.25}


def test_decay_of_a_norm_with_an_offset_leads_to_decay_groups(tmp_path: Path) -> None:
    _, wide = recorded(tmp_path, "gemma")
    with pytest.raises(mu.MupscaleError, match=r"model.norm.weight.*mupscale.hf.decay_groups"):
        training.param_groups(tmp_path, wide, torch.optim.AdamW, lr=LR, weight_decay=0.1)
    assert training.param_groups(
        tmp_path, wide, torch.optim.AdamW, lr=LR, groups=decay_groups(wide, 0.1), weight_decay=0.1
    )


def test_adapters_and_quantised_models_are_refused(tmp_path: Path) -> None:
    _, wide = recorded(tmp_path)
    quantised = copy.deepcopy(wide)
    quantised.lm_head.weight = nn.Parameter(torch.zeros(29, 32, dtype=torch.int8), requires_grad=False)
    marked = copy.deepcopy(wide)
    marked.is_quantized = True
    adapted = copy.deepcopy(wide)
    adapted.model.layers[0].mlp.up_proj.lora_A = nn.Linear(32, 2, bias=False)
    for model, reason in ((quantised, "quantised"), (marked, "quantised"), (adapted, "PEFT adapter")):
        for refused in (
            lambda m: training.plan(tmp_path, m),
            lambda m: training.param_groups(tmp_path, m, torch.optim.AdamW, lr=LR),
            lambda m: training.resume_optimizer(tmp_path, m, torch.optim.AdamW),
        ):
            refuses(reason, refused, model)
    Wrapper = type("PeftModel", (nn.Module,), {"__module__": "peft.peft_model"})
    wrapper = Wrapper()
    wrapper.base_model = wide
    refuses(r"PEFT adapter.*merge_and_unload", training.plan, tmp_path, wrapper)


def test_a_folder_that_grew_twice_gives_its_optimizer_and_its_groups(tmp_path: Path) -> None:
    """One call each, with no plan composed by hand and no names matched: training goes on as the small model's."""
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11, **no_dropout)
    torch.manual_seed(0)
    small = transformers.GPT2LMHeadModel(config).double()
    optimizer = torch.optim.AdamW(decayed(small, 0.2), lr=1e-2, eps=1e-4)
    data = batches(14) % 11
    train(small, optimizer, data[:3])
    folders = [tmp_path / "small", tmp_path / "wide", tmp_path / "wider"]
    small.save_pretrained(folders[0])
    torch.save(optimizer.state_dict(), folders[0] / "optimizer.pt")
    for before, after in itertools.pairwise(folders):
        state = before / "optimizer.pt"
        hf.upscale(before, after, exact=True, optimizer=state, verify=False, progress=False)
    wider = transformers.GPT2LMHeadModel.from_pretrained(folders[2], dtype=torch.float64)
    resumed = mu.load_optimizer(folders[2], wider)
    assert type(resumed) is torch.optim.AdamW
    assert wider.config.n_embd == 32
    assert close(train(small, optimizer, data[3:]), train(wider, resumed, data[3:]))
    made = hf.param_groups(folders[2], wider, torch.optim.AdamW, lr=1e-2, eps=1e-4, groups=decay_groups(wider, 0.2))
    rates = [[(g["lr"], g["weight_decay"], g["eps"]) for g in groups] for groups in (made, resumed.param_groups)]
    assert sorted(rates[0]) == sorted(rates[1])
