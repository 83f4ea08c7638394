"""Folders of torch.distributed.checkpoint: read and written as torch does, nothing that is code; and grown."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import mupscale as mu
from commands import refused, told
from hostile_folders import Harmful
from mupscale.cli import main
from mupscale.family import BuiltMembers
from mupscale.growth import GrowthSettings
from mupscale.models import MLP
from mupscale.system import MupscaleError
from mupscale.train import (
    DcpFolder,
    Spec,
    compare_dcp,
    load_dcp,
    load_dcp_model,
    run_recipe,
    save_dcp,
    upscale_dcp,
)
from mupscale.train.dcp import _IndexReader
from refusals import refuses
from small_runs import FEATURES, copies, recipe
from weights import identical, take_step


def an_mlp() -> tuple[MLP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MLP(54, 16, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 54)).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("nested", [True, False])
def test_what_torch_wrote(tmp_path: Path, nested: bool) -> None:
    """With the model under `model`, and at the top as torchtitan has it."""
    model, optimizer = an_mlp()
    weights = model.state_dict()
    state = {"model": weights} if nested else dict(weights)
    dcp.save({**state, "optimizer": optimizer.state_dict()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert identical(load_dcp_model(tmp_path / "dcp"), dict(weights))
    assert any(name.startswith("optimizer.") for name in load_dcp(tmp_path / "dcp"))


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    model, optimizer = an_mlp()
    save_dcp(tmp_path / "dcp", model, optimizer)
    other = MLP(54, 16, 7)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert identical(state["model"], model.state_dict())
    assert "optimizer.state.layers.0.weight.exp_avg" in load_dcp(tmp_path / "dcp")


def test_a_run_starts_from_a_dcp_folder(tmp_path: Path) -> None:
    still = Spec("torch.optim.SGD", {"lr": 0.0})
    what = recipe(start=str(tmp_path / "dcp"), start_width=16, width=32, how="copies", steps=1, optimizer=still)
    model, x = what.family().init(16).double(), torch.randn(5, FEATURES, dtype=torch.float64)
    save_dcp(tmp_path / "dcp", model)
    torch.testing.assert_close(run_recipe(what).model(x), model(x), rtol=1e-10, atol=1e-10)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A model's folder, of which no code is run."""
    yield save_dcp(tmp_path / "dcp", nn.Linear(2, 1))
    assert not (tmp_path / "ran").exists()


def index_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def write_index(folder: Path, index: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def test_an_index_that_holds_code_is_not_read(folder: Path) -> None:
    """A pickle may set attributes of a class that it names, too: of pathlib's, for one, what every path has."""
    code, touching = pickle.dumps(Harmful(folder.parent)), b"cpathlib\nPosixPath\n(N(dVtouched\nI1\nstb."
    for content, said in ((code, r"holds posix\.mkdir"), (b"", "damaged"), (touching, "damaged")):
        (folder / ".metadata").write_bytes(content)
        refuses(said, load_dcp, folder)
    assert not hasattr(PosixPath, "touched")
    refuses(r"it has no \.metadata", load_dcp, folder.parent / "nowhere")


@pytest.mark.parametrize("field", ["storage_meta", "planner_data", "storage_data", "state_dict_metadata", "all"])
def test_torch_unpickles_nothing_of_the_folder(folder: Path, field: str) -> None:
    """An index that passes and that torch's own reader fails on, beside code in the file that it reads instead."""
    index = index_of(folder)
    if field != "all":
        setattr(index, field, 5)
    write_index(folder, 5 if field == "all" else index)
    (folder / "__0.metadata").write_bytes(pickle.dumps(Harmful(folder.parent)))
    if field in ("storage_meta", "planner_data"):
        assert load_dcp_model(folder).keys() == {"weight", "bias"}
    else:
        refuses(r"\.metadata is damaged", load_dcp, folder)


def test_the_index_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever exchanges the file after the check exchanges nothing."""
    read = _IndexReader.load

    def exchange(reader: Any) -> Any:
        found = read(reader)
        write_index(folder, Harmful(folder.parent))
        return found

    monkeypatch.setattr(_IndexReader, "load", exchange)
    assert load_dcp_model(folder).keys() == {"weight", "bias"}


def test_objects_beside_tensors_are_left_alone(folder: Path) -> None:
    """Torch loads what an index calls bytes as a pickle without restriction."""
    state = {"model": nn.Linear(2, 1).state_dict(), "train_state": {"code": Harmful(folder.parent)}}
    dcp.save(state, checkpoint_id=str(folder.parent / "more"), no_dist=True)
    assert set(load_dcp(folder.parent / "more")) == {"model.weight", "model.bias"}


@pytest.mark.parametrize("file", ["../elsewhere", "/etc/hostname", "pipe", "nested/file", "missing"])
def test_shards_elsewhere_are_not_read(folder: Path, file: str) -> None:
    index = index_of(folder)
    (folder / "nested").mkdir()
    for place in (folder.parent / "elsewhere", folder / "nested" / "file"):
        shutil.copy(folder / "__0_0.distcp", place)
    os.mkfifo(folder / "pipe")
    for info in index.storage_data.values():
        info.relative_path = file
    write_index(folder, index)
    refuses(f"it has no file '{file}'", load_dcp, folder)


def test_a_tensor_of_which_a_part_is_missing(folder: Path) -> None:
    """Torch would leave that part as it finds the memory."""
    index = index_of(folder)
    index.state_dict_metadata["model.weight"].chunks.clear()
    write_index(folder, index)
    refuses(r"a part of 'model\.weight' is missing", load_dcp, folder)


def feed_forward(width: int, bias: bool = True) -> nn.Sequential:
    up, down = nn.Linear(width, 2 * width, bias=bias), nn.Linear(2 * width, width, bias=bias)
    return nn.Sequential(OrderedDict(up=up, tanh=nn.Tanh(), down=down))


class Fused(nn.Module):
    """Two projections in one parameter, saved as two, as torchtitan's attention does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = nn.Linear(3, 2 * width, bias=False)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.both(x).unflatten(-1, (-1, 2)).unbind(-1)
        return one * other

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        both = state.pop(f"{prefix}both.weight").unflatten(0, (-1, 2))
        state[f"{prefix}one"], state[f"{prefix}other"] = both[:, 0].contiguous(), both[:, 1].contiguous()

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        parts = [state.pop(f"{prefix}{name}") for name in ("one", "other")]
        state[f"{prefix}both.weight"] = torch.stack(parts, 1).flatten(0, 1)


class Net(nn.Module):
    """Blocks by number in a dict, as torchtitan has them."""

    def __init__(self, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.first, self.last = Fused(width), nn.Linear(width, 2)
        self.layers = nn.ModuleDict({str(n): feed_forward(width) for n in range(layers)})
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.layers.values():
            x = x + block(x)
        out: Tensor = self.last(x)
        return out


SMALL, X = {"width": 8, "layers": 2}, torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def family() -> mu.Family:
    return mu.Family(Net, SMALL, inputs=X)


@pytest.fixture(autouse=True)
def one_process() -> None:
    warnings.filterwarnings("ignore", message=".*single process.*")


def trained(name: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    optimizer = getattr(torch.optim, name)(model.named_parameters(), **OPTIMIZERS[name])
    losses(model, optimizer, 3)
    return model, optimizer


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    return [take_step(optimizer, (model(X) - X[:, :2]).square().mean()) for _ in range(steps)]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By names; the model's as its modules save it, which `save_dcp` cannot where they rename a parameter."""
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dcp.save(state_of(model, optimizer), checkpoint_id=str(folder), no_dist=True)


def resumed(folder: Path, model: nn.Module, cls: type[torch.optim.Optimizer], **hyper: Any) -> torch.optim.Optimizer:
    """As a trainer that knows nothing of us resumes: with the groups that mupscale.json lists."""
    groups, named = json.loads((folder / "mupscale.json").read_text())["groups"], dict(model.named_parameters())
    optimizer = cls([{"params": [(n, named[n]) for n in group["params"]]} for group in groups], **hyper)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return optimizer


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3},
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "RMSprop": {"lr": 0.01, "eps": 1e-3, "momentum": 0.5, "centered": True},
}


@pytest.mark.quick("SGD")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copies_go_on_exactly_whatever_the_optimizer(name: str, tmp_path: Path, family: mu.Family) -> None:
    model, optimizer = trained(name)
    save(tmp_path / "small", model, optimizer)
    wide = {"width": 16, "layers": 2}
    upscaled = upscale_dcp(tmp_path / "small", tmp_path / "wide", family, SMALL, wide, copies(0))
    assert upscaled.optimizer is getattr(torch.optim, name)
    grown = Net(**wide)
    again = resumed(tmp_path / "wide", grown, upscaled.optimizer, **OPTIMIZERS[name])
    ours, theirs = losses(model, optimizer, 4), losses(grown, again, 4)
    assert theirs == pytest.approx(ours, rel=1e-10)
    assert ours[-1] < ours[0]


def test_fresh_units_are_those_of_a_growth_in_memory(tmp_path: Path, family: mu.Family) -> None:
    model, optimizer = trained("AdamW")
    save(tmp_path / "small", model, optimizer)
    wide = {"width": 12, "layers": 2}
    upscale_dcp(tmp_path / "small", tmp_path / "wide", family, SMALL, wide, GrowthSettings(how="fresh"), seed=3)
    grown, grown_optimizer = family.upscale(model, optimizer, width=wide, seed=3)
    assert grown_optimizer is not None
    read = DcpFolder(tmp_path / "wide").read
    held = {f"model.{name}": tensor for name, tensor in grown.state_dict().items()}
    for name, p in grown.named_parameters():
        held |= {f"optimizer.state.{name}.{key}": value for key, value in grown_optimizer.state[p].items()}
    assert identical({name: read(name) for name in held}, held)


def test_more_blocks_start_as_identity_with_an_empty_state(tmp_path: Path, family: mu.Family) -> None:
    model, optimizer = trained("AdamW")
    save(tmp_path / "small", model, optimizer)
    deep = {"width": 16, "layers": 3}
    upscale_dcp(tmp_path / "small", tmp_path / "deep", family, SMALL, deep, copies(0))
    grown = Net(**deep)
    again = resumed(tmp_path / "deep", grown, torch.optim.AdamW)
    torch.testing.assert_close(grown(X), model(X), rtol=1e-12, atol=1e-12)
    new = next(name for name in ("1", "2") if not grown.layers[name].down.weight.any())
    state = again.state[grown.layers[new].up.weight]
    assert not state["exp_avg"].any()
    assert int(state["step"]) == 0  # so that its first step is a fresh optimizer's
    assert grown.layers[new].up.weight.std() > 0
    assert compare_dcp(tmp_path / "small", tmp_path / "deep", build=Net).ok


def flat_folder(path: Path) -> None:
    """As torchtitan writes it: the model at the top, hyperparameters by parameter, and what else a trainer keeps."""
    model, optimizer = trained("AdamW")
    flat: dict[str, Any] = {}
    for name, p in model.named_parameters():
        flat |= {f"state.{name}.{key}": value for key, value in optimizer.state[p].items()}
        rest = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "param_names")}
        flat |= {f"param_groups.{name}.{key}": value for key, value in rest.items()}
    others = {"train_state": {"step": torch.tensor(3)}, "lr_scheduler": {"last_epoch": 3}, "dataloader": {"rank": b"x"}}
    dcp.save({**model.state_dict(), "optimizer": flat, **others}, checkpoint_id=str(path), no_dist=True)


NET = """
import sys
module = next(m for name, m in sys.modules.items() if name.endswith("test_dcp"))
build, inputs = module.Net, lambda: module.X
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: mu.Family) -> Path:
    """A folder with a small checkpoint and a module that builds the model; small models have been tried."""
    flat_folder(tmp_path / "small")
    (tmp_path / "nets.py").write_text(NET)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mu, "Family", lambda *args, **kwargs: family)
    return tmp_path


def test_a_torchtitan_folder_on_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--model", "nets.build", "--inputs", "nets.inputs"]
    said = told(capsys, ["upscale", "small", "wide", *named, "--to", "width=16,layers=3", "--exact"])
    assert "width 8 → 16, layers 2 → 3" in said
    assert r'pattern=r"^(first\.both\.weight|layers\.\d+\.(?:_\w+\.)?up\.bias' in said
    small, wide = DcpFolder("small"), DcpFolder("wide")
    assert wide.raw("dataloader.rank") == small.raw("dataloader.rank")
    assert int(wide.read("train_state.step")) == 3
    rate = "optimizer.param_groups.layers.2.up.weight.lr"
    assert wide.value(rate) == 0.005
    assert wide.paths[rate] == ("optimizer", rate.removeprefix("optimizer."))
    assert "equal: all" in told(capsys, ["verify", "small", "wide", *named])
    assert main(["upscale", "small", "wide", *named, "--to", "width=16,layers=2", "--exact"]) == 1
    assert "Use --overwrite" in capsys.readouterr().err
    assert main(["upscale", "small", "wide", *named, "--to", "width=16,layers=2", "--exact", "--overwrite"]) == 0
    assert DcpFolder("wide").shapes["layers.1.up.weight"] == (32, 16)
    assert "layers.*.up.weight" in told(capsys, "inspect wide")
    assert "16×3 → 32×3" in told(capsys, ["inspect", "small", *named, "--to", "width=16,layers=2"])


def test_verify_names_what_differs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--model", "nets.build", "--inputs", "nets.inputs"]
    assert main(["upscale", "small", "wide", *named, "--to", "width=16,layers=2", "--exact"]) == 0
    assert "'first.one' is not a parameter" in refused(capsys, "verify small wide", 1)
    loaded = {name: DcpFolder("wide").read(name) for name in DcpFolder("wide").tensors}
    loaded["last.bias"] += 1
    loaded["optimizer.state.last.bias.exp_avg"] *= 2
    shutil.copy("wide/mupscale.json", here / "record")
    dcp.save({n: t for n, t in loaded.items() if n != "train_state.step"}, checkpoint_id="other", no_dist=True)
    shutil.copy(here / "record", "other/mupscale.json")
    said = told(capsys, ["verify", "small", "other", *named], 1).splitlines()
    differing = {line.split()[0] for line in said if "entries differ" in line}
    assert differing == {"last.bias", "optimizer.state.last.bias.exp_avg"}
    assert any(line.split() == ["train_state.step", "a", "number", "missing"] for line in said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "does not describe its model: give --model"),
        (["--model", "nets.build", "--to", "width=sixteen"], "--to is width=sixteen, but must be names with whole"),
        (["--model", "nets.build", "--to", "depth=2"], "nets.build has no argument depth: it takes width, layers"),
        (
            ["--model", "nets.build", "--from", "width=4", "--to", "width=8,layers=2"],
            "has shape (8, 3) in small and (4, 3) in the model",
        ),
        (["--model", "nets.build", "--to", "width=16", "--times", "2"], "--times is for Hugging Face checkpoints"),
        (["--model", "nets.build", "--to", "width=8,layers=2"], "nothing would grow"),
        (["--model", "nets.build", "--to", "width=16", "--how", "lossless"], "lossless growth needs to see what"),
    ],
)
def test_refused(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["upscale", "small", "wide", *words]) in (1, 2)
    assert said in " ".join(capsys.readouterr().err.split())
    assert not [path for path in here.iterdir() if "wide" in path.name]


def test_a_state_by_numbers_or_of_an_unknown_optimizer(tmp_path: Path, family: mu.Family) -> None:
    """Which parameter is number 3, and how a state scales, is not guessed."""
    model, optimizer = trained("AdamW")
    wide, growth = {"width": 16, "layers": 2}, copies(0)
    state = {"model": model.state_dict(), "optimizer": {"state": optimizer.state_dict()["state"]}}
    dcp.save(state, checkpoint_id=str(tmp_path / "numbers"), no_dist=True)
    with pytest.raises(MupscaleError, match="names no parameter of the model"):
        upscale_dcp(tmp_path / "numbers", tmp_path / "wide", family, SMALL, wide, growth)
    state["optimizer"] = {"state": {"last.bias": {"curvature": torch.zeros(2)}}}
    dcp.save(state, checkpoint_id=str(tmp_path / "unknown"), no_dist=True)
    with pytest.raises(MupscaleError, match="cannot tell which optimizer wrote"):
        upscale_dcp(tmp_path / "unknown", tmp_path / "wide", family, SMALL, wide, growth)
    with pytest.raises(MupscaleError, match="optimizer state 'curvature' is unknown"):
        upscale_dcp(tmp_path / "unknown", tmp_path / "wide", family, SMALL, wide, growth, optimizer=torch.optim.AdamW)
    assert [path.name for path in tmp_path.iterdir() if "wide" in path.name] == []


def test_an_object_that_is_code_is_copied_and_never_run(tmp_path: Path, family: mu.Family) -> None:
    model, _ = trained("SGD")
    state = {"model": model.state_dict(), "dataloader": {"code": Harmful(tmp_path)}}
    dcp.save(state, checkpoint_id=str(tmp_path / "small"), no_dist=True)
    upscale_dcp(tmp_path / "small", tmp_path / "wide", family, SMALL, {"width": 16, "layers": 2}, copies(0))
    assert compare_dcp(tmp_path / "small", tmp_path / "wide", build=Net).ok
    with pytest.raises(MupscaleError, match="is not a plain value"):
        DcpFolder(tmp_path / "wide").value("dataloader.code")
    assert not (tmp_path / "ran").exists()


class Mixture(nn.Module):
    """Stacked experts with a router, and what balances them, as torchtitan has it."""

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, 2 * width, width) / 4)
        self.w2 = nn.Parameter(torch.randn(experts, width, 2 * width) / 4)
        self.gate, self.top_k = nn.Linear(width, experts, bias=False), top_k
        self.register_buffer("balance", torch.zeros(experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = (scores + self.balance).topk(self.top_k, dim=-1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        hidden = torch.tanh(torch.einsum("ehd,bd->beh", self.w1, x))
        return torch.einsum("be,edh,beh->bd", weights / weights.sum(-1, keepdim=True), self.w2, hidden)


class Mixed(nn.Module):
    def __init__(self, width: int = 8, experts: int = 0, top_k: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)
        self.part = Mixture(width, experts, top_k) if experts else feed_forward(width, bias=False)
        self.double()
        for name, buffer in self.named_buffers():
            assert name == "part.balance"
            self.part.balance = buffer.float()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.last(x + self.part(x))
        return out


def mixed(folder: Path, **sizes: int) -> tuple[Mixed, torch.optim.Optimizer]:
    """A trained model in a folder."""
    torch.manual_seed(1)
    model = Mixed(**sizes)
    optimizer = torch.optim.AdamW(model.named_parameters(), **OPTIMIZERS["AdamW"])
    losses(model, optimizer, 3)
    if "experts" in sizes:
        model.part.balance.copy_(torch.linspace(-0.1, 0.1, sizes["experts"]))
    save(folder, model, optimizer)
    return model, optimizer


@pytest.mark.parametrize(
    ("before", "after", "exact"),
    [
        ({}, {"experts": 2, "top_k": 2}, True),
        ({"experts": 2, "top_k": 1}, {"experts": 4, "top_k": 2}, True),
        ({}, {"width": 16, "experts": 2, "top_k": 2}, True),
        ({}, {"experts": 4, "top_k": 2}, False),
    ],
)
def test_experts_are_copies_with_their_state(
    before: dict[str, int], after: dict[str, int], exact: bool, tmp_path: Path
) -> None:
    """Exact where docs/experts.md says so; with a router that is drawn, the function stays."""
    model, optimizer = mixed(tmp_path / "small", **before)
    narrow, wide = {"width": 8, **before}, {"width": 8, **before, **after}
    family: BuiltMembers = BuiltMembers(Mixed, {"width": 8}, inputs=X)
    if wide["width"] > 8:
        family = mu.Family(Mixed, {"width": 8}, inputs=X)
    router = "silent" if exact else "drawn"
    upscaled = upscale_dcp(tmp_path / "small", tmp_path / "wide", family, narrow, wide, copies(0), router=router)  # type: ignore[arg-type]
    large = Mixed(**wide)
    again = resumed(tmp_path / "wide", large, torch.optim.AdamW, **OPTIMIZERS["AdamW"])
    torch.testing.assert_close(large(X), model(X), rtol=1e-12, atol=1e-12)
    assert "experts" in str(upscaled).splitlines()[0]
    assert upscaled.numbers == tuple(sum(p.numel() for p in m.parameters()) for m in (model, large))
    assert compare_dcp(tmp_path / "small", tmp_path / "wide", build=Mixed).ok
    assert compare_dcp(tmp_path / "small", tmp_path / "wide").ok
    assert DcpFolder(tmp_path / "wide").dtypes["model.part.balance"] == torch.float32
    if exact:
        assert losses(large, again, 4) == pytest.approx(losses(model, optimizer, 4), rel=1e-10)
    else:
        assert 0.5 < float(large.part.gate.weight.detach().std() / Mixed(**wide).part.gate.weight.detach().std()) < 2
        assert not again.state[large.part.gate.weight]["exp_avg"].any()


def test_experts_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed(tmp_path / "run" / "step-9")
    mixed(tmp_path / "run" / "step-10", experts=2, top_k=1)
    (tmp_path / "mixed_nets.py").write_text(NET.replace("Net", "Mixed"))
    monkeypatch.delitem(sys.modules, "mixed_nets", raising=False)
    monkeypatch.chdir(tmp_path)
    named = ["--model", "mixed_nets.build", "--inputs", "mixed_nets.inputs"]
    assert main(["upscale", "run", "out", *named, "--experts", "4"]) == 1
    assert "run holds checkpoints (step-9, step-10): give one of them" in " ".join(capsys.readouterr().err.split())
    assert main(["upscale", "run/step-9", "wide", *named, "--experts", "4", "--top-k", "2"]) == 0
    assert "experts 4, top_k 2; 306 → 1,106 parameters (experts: copies, with routers drawn)" in capsys.readouterr().out
    said = told(capsys, ["inspect", "run/step-9", *named, "--experts", "4"])
    assert "experts are copies, among which a gradient is shared (4): the function stays" in said
    factors = next(line for line in reversed(said.splitlines()) if line.startswith("part.w1 "))
    assert factors.split()[1:] == ["1", "1", "0.25", "4"]
    assert main(["upscale", "run/step-10", "more", *named, "--from", "experts=2,top_k=1", "--experts", "4"]) == 0
    assert "experts 2 → 4, top_k 1 → 2" in capsys.readouterr().out
    assert main(["upscale", "run/step-9", "no", *named, "--experts", "4", "--how", "fresh"]) == 1
    assert "experts start as copies" in capsys.readouterr().err
