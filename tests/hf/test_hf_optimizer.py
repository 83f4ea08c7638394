"""Saved optimizers, widened on disk: what the core gives in memory, and training that goes on exactly."""

from __future__ import annotations

import errno
import math
import os
import pickle
import resource
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale as mu
from mupscale import hf
from mupscale.hf import groups as training
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.groups import grow_optimizer_file, match_plan
from mupscale.hf.multipliers import Times
from mupscale.hf.record import GrowthStep, Record, plan_growths
from mupscale.hf.source import Source, open_source
from mupscale.optim import SavedOptimizer, decay_groups, read_optimizer
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


def config_of(**more: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    given = {**sizes, "num_key_value_heads": 2, "vocab_size": 29, "max_position_embeddings": 32, **more}
    made = transformers.LlamaConfig(**given)
    made._attn_implementation = "eager"
    return made


class Case:
    """A small model saved in a folder, its source, and the same model upscaled."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.small = transformers.LlamaForCausalLM(config_of(**more)).train()
        for p in self.small.parameters():
            p.data.add_(torch.randn_like(p), alpha=0.1)
        self.folder, self.path, self.out = folder, folder / "optimizer.pt", folder / "wide.pt"
        self.small.save_pretrained(folder)
        self.source: Source = open_source(folder)
        family = ConfigFamily(self.source.config)
        self.plan = match_plan(self.small, family.plan(TWICE))
        grown = {k: v for k, v in family.wide_config(TWICE).items() if k in config_of().to_dict()}
        self.wide = transformers.LlamaForCausalLM(config_of(**{k: v for k, v in grown.items() if k != "model_type"}))
        self.grow()

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


def batches(steps: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 29, (steps, 2, 12), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: Optimizer, data: Tensor, scheduler: Any = None) -> list[float]:
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if scheduler is not None:
            scheduler.step()
    return losses


def same(small: list[float], wide: list[float]) -> bool:
    assert len(set(small)) == len(small) >= 10
    return torch.allclose(torch.tensor(small), torch.tensor(wide), rtol=1e-10, atol=0)


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
    assert grown is not None
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
    with pytest.raises(mu.MupscaleError, match=r"give the saved optimizer, too \(optimizer=\)"):
        hf.upscale(case.folder, case.folder / "out", rules=rules)
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
    assert same(train(case.small, optimizer, data), train(case.wide, resumed, data))


@pytest.mark.quick("exp_avg_sq")
@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq", "lr"])
def test_training_differs_without_any_part_of_it(lost: str, tmp_path: Path, double: None) -> None:
    case = Case(tmp_path)
    optimizer, data = case.trained(steps=8), batches(20, seed=1)
    case.widened()
    resumed = training.resume_optimizer(case.out, case.wide, torch.optim.AdamW)
    for state in resumed.state.values():
        if lost in state:
            state[lost].mul_(2)
    for group in resumed.param_groups:
        group["lr"] = 1e-2 if lost == "lr" else group["lr"]
    assert not same(train(case.small, optimizer, data), train(case.wide, resumed, data))


@pytest.mark.quick("True")
@pytest.mark.filterwarnings("ignore:.* was saved with a learning rate of 0")  # whose schedule is made anew here
@pytest.mark.parametrize("tied", [False, True])
def test_the_trainers_own_file_goes_on_exactly(tied: bool, tmp_path: Path, double: None) -> None:
    """Two groups without names; a schedule in the middle, made anew for the wide model with last_epoch."""
    pytest.importorskip("accelerate")
    case = Case(tmp_path, tie_word_embeddings=tied)

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            row = batches(8).view(16, 12)[index]
            return {"input_ids": row, "labels": row}

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=2,
        max_steps=8,
        learning_rate=1e-2,
        weight_decay=0.2,
        adam_epsilon=1e-4,
        lr_scheduler_type="cosine",
        save_steps=8,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(case.small, args, train_dataset=Data())
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
    Record(case.source.config, (GrowthStep(TWICE),)).save(wide)

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
    assert same(train(case.small, optimizer, data, schedulers[0]), train(case.wide, resumed, data, schedulers[1]))


def decayed(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """The Trainer's groups."""
    return [{**g, "params": [model.get_parameter(n) for n in g["params"]]} for g in decay_groups(model, decay)]


def test_a_plain_optimizer_with_param_groups_takes_the_file(case: Case) -> None:
    """Groups made in the same way have the same order, so torch's own load_state_dict will do."""
    case.trained(steps=3, groups=decayed(case.small, 0.1), eps=1e-6)
    found = case.widened()
    Record(case.source.config, (GrowthStep(TWICE),)).save(case.folder)
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
        with pytest.raises(mu.MupscaleError, match=match):
            case.widened()
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


def test_another_optimizer_is_named(case: Case) -> None:
    class Lion(Optimizer):
        """Known here by its registration alone."""

        def __init__(self, params: Any, lr: float = 1e-3) -> None:
            super().__init__(params, {"lr": lr})

        def step(self, closure: Any = None) -> None:
            for p in (p for group in self.param_groups for p in group["params"]):
                self.state[p]["exp_avg"] = p.grad.clone()

    case.trained(Lion, lr=1e-3)
    mu.register_optimizer(Lion, state={"exp_avg": 1})
    found = case.widened(optimizer_class=Lion)
    assert {g["lr"] for g in found["param_groups"]} == {1e-3, 5e-4}
    resumed = training.resume_optimizer(case.out, case.wide, Lion)
    assert all(set(state) == {"exp_avg"} for state in resumed.state.values())


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
    with pytest.raises(mu.MupscaleError, match="'exp_avg', which is not a state of SGD"):
        training.resume_optimizer(case.out, case.wide, torch.optim.SGD)
    with pytest.raises(mu.MupscaleError, match="it belongs to a different model"):
        training.resume_optimizer(case.path, case.wide, torch.optim.AdamW)
    with pytest.raises(mu.MupscaleError, match="there is no saved optimizer at"):
        training.resume_optimizer(case.folder / "nowhere", case.wide, torch.optim.AdamW)
    resumed = training.resume_optimizer(case.out, case.wide, torch.optim.AdamW)
    case.out.write_bytes(b"")  # the state does not hang on the file
    assert all(bool(state["exp_avg"].isfinite().all()) for state in resumed.state.values())


def test_bad_files(case: Case) -> None:
    def refused(match: str) -> None:
        with pytest.raises(mu.MupscaleError, match=match) as caught:
            case.widened()
        assert "\n" not in str(caught.value)
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
        with pytest.raises(mu.MupscaleError, match=r"wide.pt cannot be written .*; is there room for it on the disk"):
            case.widened()
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
    with pytest.raises(mu.MupscaleError, match=r"No space left on device.*; is there room for it on the disk"):
        case.widened()
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
    assert peak[0] - before < written / 4
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
