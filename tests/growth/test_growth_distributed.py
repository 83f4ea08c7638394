"""Two processes on gloo: DDP and FSDP2 widen, perturb, train, save and load to what one process gets.

Both processes are started once and act out every scenario; the tests compare what they left with one process.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional as F

import mupscale as mu
from deep_models import ResidualTable
from mupscale.growth import grow_optimizer
from mupscale.models import GPT2, MLP
from processes import run_in_processes

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch.distributed with gloo is not available"
)

WORLD = 2
CLIP = 0.05
TOLERANCE = 1e-10
HYPER: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-4}
KINDS = ["gpt2", "mlp"]  # a tied readout; sizes that two processes cannot share evenly
MESH: dict[str, Any] = {}


def build(kind: str, k: int) -> nn.Module:
    if kind == "mlp":
        return MLP(5, [3 * k, 5 * k], 3, activation="tanh")
    return GPT2(11, 6, layers=1, heads=2, head_dim=3 * k, attention_multiplier=1.0)


def data(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if kind == "mlp":
        return torch.randn(8, 5, generator=generator)
    return torch.randint(11, (8, 6), generator=generator)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    if batch.is_floating_point():
        return (model(batch) - batch[:, :3].sin()).square().mean()
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(
    model: nn.Module, optimizer: optim.Optimizer, kind: str, steps: int, plan: mu.Plan | None = None, share: bool = True
) -> list[float]:
    """Train on this process's share of the batch; the global norm of each step's gradient, where it is clipped."""
    rank, world = (dist.get_rank(), WORLD) if share and dist.is_initialized() else (0, 1)
    batch, norms = data(kind)[rank::world], list[float]()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, batch).backward()
        if plan is not None:
            norms.append(float(mu.clip_grad_norm_(model, CLIP, plan)))
        optimizer.step()
    return norms


def trained(kind: str) -> tuple[nn.Module, optim.Optimizer]:
    """A narrow model in the middle of its training, the same in every process."""
    torch.manual_seed(1)
    narrow = build(kind, 1)
    optimizer = optim.AdamW(narrow.named_parameters(), **HYPER)
    train(narrow, optimizer, kind, 2, share=False)
    return narrow, optimizer


def plan_for(kind: str, narrow: nn.Module, wide: nn.Module) -> mu.Plan:
    torch.manual_seed(2)
    return mu.plan(narrow, wide, fresh=build(kind, 1))


def wrap(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in getattr(model, "h", []):
            fully_shard(block, mesh=MESH["cpu"])
        fully_shard(model, mesh=MESH["cpu"])
    return model


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}


def states(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name.removeprefix('module.')}/{key}": whole(value)
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }


def is_sharded(tensor: Tensor) -> bool:
    return type(tensor).__name__ == "DTensor" and tensor.to_local().shape != tensor.shape


# ---------------------------------------------------------------------------------------------- scenarios


def upscaled_then_trained(kind: str, how: str) -> dict[str, Any]:
    """The plan is made before wrapping and used after; everything is written into the wrapped model."""
    narrow, optimizer = trained(kind)
    torch.manual_seed(9)
    wide = build(kind, 2)
    plan = plan_for(kind, narrow, wide)
    wide = wrap(wide, how)
    rules_after = mu.plan(narrow, wide).rules
    mu.widen(narrow, wide, plan)
    mu.perturb(wide, plan, 0.5, seed=3)
    grown = mu.make_optimizer(wide, plan, optim.AdamW, **HYPER)
    mu.widen_optimizer(optimizer, grown, plan)
    start = {"weights": weights(wide), "state": states(wide, grown)}
    sharded = {
        "weights": all(is_sharded(p) for p in wide.parameters()),
        "state": all(is_sharded(grown.state[p][key]) for p in wide.parameters() for key in ("exp_avg", "exp_avg_sq")),
    }
    norms = train(wide, grown, kind, 2, plan)
    return {
        "start": start,
        "sharded": sharded,
        "rules": rules_after == plan.rules,
        "norms": norms,
        "end": weights(wide),
        "state": states(wide, grown),
    }


def from_a_wrapped_narrow_model(kind: str, how: str) -> dict[str, Any]:
    """The narrow model is trained wrapped, too, and upscaled in one call; a saved state's names carry the wrapper's."""
    torch.manual_seed(1)
    narrow = wrap(build(kind, 1), how)
    optimizer = optim.AdamW(narrow.named_parameters(), **HYPER)
    train(narrow, optimizer, kind, 2)
    plain = build(kind, 2)
    plan = plan_for(kind, build(kind, 1), plain)
    made_wrapped = mu.plan(narrow, plain).rules == plan.rules
    wide, grown = mu.upscale(narrow, wrap(build(kind, 2), how), plan, optimizer, noise=0.5, seed=3)
    assert grown is not None
    mu.widen(narrow.state_dict(), plain, plan)
    by_name = mu.make_optimizer(plain, plan, optim.AdamW, **HYPER)
    mu.widen_optimizer(optimizer.state_dict(), by_name, plan)
    mu.perturb(plain, plan, 0.5, seed=3)
    same_start = all(torch.equal(v, weights(plain)[n]) for n, v in weights(wide).items())
    same_state = all(torch.equal(v, states(plain, by_name)[n]) for n, v in states(wide, grown).items())
    train(wide, grown, kind, 2, plan)
    return {"end": weights(wide), "agree": (made_wrapped, same_start, same_state)}


def sketched_then_sharded(kind: str, how: str) -> dict[str, Any]:
    """A wide model that never was whole: on the meta device, sharded there, and given memory by widen."""
    narrow, optimizer = trained(kind)
    with torch.device("meta"):
        wide = build(kind, 2)
    plan = plan_for(kind, narrow, wide)
    wide, grown = mu.upscale(narrow, wrap(wide, how), plan, optimizer, noise=0.5, seed=3)
    assert grown is not None
    tied = kind == "mlp" or wide.get_parameter("lm_head.weight") is wide.get_parameter("wte.weight")
    train(wide, grown, kind, 2, plan)
    return {"end": weights(wide), "tied": tied}


def grown_by_fresh_units(kind: str, how: str) -> dict[str, Any]:
    """Any wider width, drawn by seed and name: into a wrapped model, and into a sketch that was sharded there."""
    torch.manual_seed(1)
    if kind == "mlp":
        narrow, builds = MLP(5, [3, 5], 3, activation="tanh"), lambda: MLP(5, [4, 8], 3, activation="tanh")
    else:
        narrow, builds = GPT2(11, 6, layers=1, heads=2, head_dim=3), lambda: GPT2(11, 6, layers=1, heads=3, head_dim=3)
    optimizer = optim.AdamW(narrow.named_parameters(), **HYPER)
    train(narrow, optimizer, kind, 2, share=False)
    grow = mu.Fresh(outgoing=0.5)
    plan = mu.plan(narrow, builds(), fresh=narrow, grow=grow)
    wide, grown = mu.upscale(narrow, wrap(builds(), how), plan, optimizer, grow=grow, seed=3)
    with torch.device("meta"):
        sketch = builds()
    sketched = mu.upscale(narrow, wrap(sketch, how), plan, grow=grow, seed=3)[0] if how == "fsdp2" else wide
    assert grown is not None
    start = {"weights": weights(wide), "state": states(wide, grown), "sketched": weights(sketched)}
    train(wide, grown, kind, 2, plan)
    return {"start": start, "end": weights(wide), "state": states(wide, grown)}


def outputs(model: nn.Module, kind: str) -> Tensor:
    """Of all examples; FSDP2 leaves the outermost parameters whole after a run without a backward pass."""
    out = whole(model(data(kind)))
    if hasattr(model, "reshard"):
        model.reshard()  # type: ignore[operator]
    return out


def grown_in_depth(kind: str, how: str) -> dict[str, Any]:
    """A wrapped shallow model into wrapped deep ones: blocks that start as identity, and copies."""

    def blocks(number: int, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ResidualTable(5, 3, 5, number) if kind == "mlp" else GPT2(11, 6, layers=number, heads=2, head_dim=3)

    shallow = wrap(blocks(2, 1), how)
    optimizer = optim.AdamW(shallow.named_parameters(), **HYPER)
    train(shallow, optimizer, kind, 2)
    made: dict[str, Any] = {"before": outputs(shallow, kind), "refused": ""}
    inputs = data(kind)[:2]
    if how == "fsdp2":
        shallow(data(kind))
        plan = mu.plan_depth(blocks(2, 1), blocks(4, 2), inputs=inputs)
        try:
            grow_optimizer(optimizer, shallow, wrap(blocks(4, 2), how), plan)
        except mu.MupscaleError as error:
            made["refused"] = str(error)
        shallow.reshard()  # type: ignore[operator]
    for name, grow in (("identity", mu.Identity()), ("stack", mu.Stack())):
        operator: Any = grow
        plan = mu.plan_depth(blocks(2, 1), blocks(4, 2), inputs=inputs, grow=operator)
        deep = mu.upscale(shallow, wrap(blocks(4, 2), how), plan)[0]
        deeper = grow_optimizer(optimizer, shallow, deep, plan)
        after, start = outputs(deep, kind), {"weights": weights(deep), "state": states(deep, deeper)}
        sharded = all(is_sharded(p) for p in deep.parameters())
        train(deep, deeper, kind, 2)
        made[name] = {"start": start, "after": after, "end": weights(deep), "sharded": sharded}
    return made


def signal_noise_and_other_norms(kind: str, how: str) -> dict[str, Any]:
    narrow, _ = trained(kind)
    wide = build(kind, 2)
    plan = plan_for(kind, narrow, wide)
    wide = mu.widen(narrow, wrap(wide, how), plan)
    effective = mu.perturb(wide, plan, mu.SignalNoise(0.3), seed=4)
    rank, world = (dist.get_rank(), WORLD) if dist.is_initialized() else (0, 1)
    loss(wide, data(kind)[rank::world]).backward()
    norms = [float(mu.clip_grad_norm_(wide, float("inf"), plan, p)) for p in (1.0, 2.0, 3.0, float("inf"))]
    return {"weights": weights(wide), "effective": effective.std, "norms": norms}


def saved_and_loaded(kind: str, how: str, folder: Path) -> dict[str, Any]:
    """Four steps with a checkpoint after two, into which a second model is put that goes on from there."""
    narrow, optimizer = trained(kind)
    wide = build(kind, 2)
    plan = plan_for(kind, narrow, wide)
    wide, grown = mu.upscale(narrow, wrap(wide, how), plan, optimizer, noise=0.5, seed=3)
    assert grown is not None
    train(wide, grown, kind, 2, plan)
    writes: list[Path] = []
    write = mu.checkpoint.write_tensors
    mu.checkpoint.write_tensors = lambda path, *more: (writes.append(path), write(path, *more))
    path = mu.save(folder / f"{kind}-{how}.ckpt", wide, grown, plan, step=2)
    mu.checkpoint.write_tensors = write
    if dist.is_initialized():
        dist.barrier()
    train(wide, grown, kind, 2, plan)
    torch.manual_seed(20)
    again = wrap(build(kind, 2), how)
    fresh = mu.make_optimizer(again, plan, optim.AdamW, lr=9.0)
    checkpoint = mu.load(path, again, fresh)
    sharded = all(is_sharded(v) for state in fresh.state.values() for key, v in state.items() if key != "step")
    assert checkpoint.plan is not None
    train(again, fresh, kind, 2, checkpoint.plan)
    return {
        "end": weights(wide),
        "again": weights(again),
        "state": (states(wide, grown), states(again, fresh)),
        "extra": checkpoint.extra,
        "same plan": checkpoint.plan == plan,
        "writes": len(writes),
        "sharded": sharded,
    }


def loaded_from_one_process(kind: str, how: str, folder: Path) -> dict[str, Any]:
    """A checkpoint that one unwrapped process wrote, put into a wrapped model."""
    wide = build(kind, 2)
    with torch.device("meta"):
        plan = mu.plan(build(kind, 1), build(kind, 2))
    wide = wrap(wide, how)
    optimizer = mu.make_optimizer(wide, plan, optim.AdamW, lr=9.0)
    mu.load(folder / f"{kind}-plain.ckpt", wide, optimizer)
    train(wide, optimizer, kind, 2, plan)
    return {"end": weights(wide)}


SCENARIOS: dict[str, list[tuple[Any, str]]] = {
    "upscaled": [(upscaled_then_trained, "ddp"), (upscaled_then_trained, "fsdp2")],
    "from": [(from_a_wrapped_narrow_model, "ddp"), (from_a_wrapped_narrow_model, "fsdp2")],
    "sketched": [(sketched_then_sharded, "fsdp2")],
    "fresh": [(grown_by_fresh_units, "ddp"), (grown_by_fresh_units, "fsdp2")],
    "depth": [(grown_in_depth, "ddp"), (grown_in_depth, "fsdp2")],
    "signal": [(signal_noise_and_other_norms, "ddp"), (signal_noise_and_other_norms, "fsdp2")],
    "saved": [(saved_and_loaded, "ddp"), (saved_and_loaded, "fsdp2")],
    "loaded": [(loaded_from_one_process, "ddp"), (loaded_from_one_process, "fsdp2")],
}
WITH_FILES = ("saved", "loaded")
AGAIN = {("depth", "gpt2"), *((name, "mlp") for name in SCENARIOS if name not in ("upscaled", "depth"))}
"""Scenarios under FSDP2 for the slow tests: the same with the other model is acted out for every change."""


def process(rank: int, folder: Path, slow: bool) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(minutes=10),
    )
    from torch.distributed.device_mesh import init_device_mesh

    MESH["cpu"] = init_device_mesh("cpu", (WORLD,))
    for name, cases in SCENARIOS.items():
        for function, how in cases:
            for kind in KINDS:
                if how == "fsdp2" and (name, kind) in AGAIN and not slow:
                    continue
                files = (folder,) if name in WITH_FILES else ()
                torch.manual_seed(100 + rank)  # nothing may depend on the processes' own random numbers
                torch.save(function(kind, how, *files), folder / f"{name}-{kind}-{how}-{rank}.pt")
    dist.destroy_process_group()


@contextmanager
def float64_here() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Results:
    """What the two processes left, and what one process gets."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.failure = folder, ""
        self.alone: dict[tuple[str, str], Any] = {}

    def of(self, name: str, kind: str, how: str) -> list[dict[str, Any]]:
        paths = [self.folder / f"{name}-{kind}-{how}-{rank}.pt" for rank in range(WORLD)]
        if not all(path.exists() for path in paths):
            pytest.fail(f"the processes did not get this far:\n{self.failure}")
        return [torch.load(path, weights_only=True) for path in paths]

    def one(self, name: str, kind: str) -> dict[str, Any]:
        if (name, kind) not in self.alone:
            with float64_here():
                files = (self.folder,) if name in WITH_FILES else ()
                self.alone[name, kind] = SCENARIOS[name][0][0](kind, "plain", *files)
        return copy.deepcopy(self.alone[name, kind])


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    from torch.multiprocessing.spawn import ProcessException

    made = Results(tmp_path_factory.mktemp("processes"))
    torch.set_num_threads(1)
    for kind in KINDS:
        made.one("saved", kind)  # leaves the checkpoint that "loaded" wants
    try:
        slow = any(item.get_closest_marker("slow") for item in request.session.items)
        run_in_processes(process, (made.folder, slow), WORLD)
    except ProcessException as error:
        made.failure = str(error)
    return made


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative difference of any tensor."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm().clamp(min=1e-300)) for n in ours)


def identical(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


both = pytest.mark.parametrize("how", ["ddp", "fsdp2"])
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.quick("*-ddp", "gpt2-fsdp2")
@both
@kinds
def test_fresh_units_are_those_of_one_process(kind: str, how: str, results: Results) -> None:
    one = results.one("fresh", kind)
    for ours in results.of("fresh", kind, how):
        assert identical(ours["start"]["weights"], one["start"]["weights"])
        assert identical(ours["start"]["sketched"], one["start"]["weights"])
        assert identical(ours["start"]["state"], one["start"]["state"])
        assert difference(ours["end"], one["end"]) < TOLERANCE
        assert difference(ours["state"], one["state"]) < TOLERANCE


@pytest.mark.quick("*-ddp", "*-mlp-fsdp2")
@both
@kinds
@pytest.mark.parametrize("way", ["identity", "stack"])
def test_more_blocks_are_those_of_one_process(kind: str, how: str, way: str, results: Results) -> None:
    """The shallow model trained wrapped, so that it is within rounding; so are deep ones, at the start and trained."""
    one = results.one("depth", kind)
    for two in results.of("depth", kind, how):
        assert difference(two[way]["start"]["weights"], one[way]["start"]["weights"]) <= TOLERANCE
        assert difference(two[way]["start"]["state"], one[way]["start"]["state"]) <= TOLERANCE
        assert difference(two[way]["end"], one[way]["end"]) <= TOLERANCE
        assert ("Call model.reshard()" in two["refused"]) == (how == "fsdp2"), two["refused"]
        same = float((two[way]["after"] - two["before"]).abs().max()) < 1e-12
        assert same == (way == "identity")
        assert two[way]["sharded"] == (how == "fsdp2" and kind == "gpt2") or kind == "mlp"
    if way == "identity":
        assert difference(one[way]["end"], one[way]["start"]["weights"]) > 1e-2, "nothing is learnt"


@both
@kinds
def test_training_an_upscaled_model_gives_the_weights_of_one_process(kind: str, how: str, results: Results) -> None:
    one = results.one("upscaled", kind)
    assert all(norm > 2 * CLIP for norm in one["norms"]), "nothing is clipped"
    assert difference(one["end"], one["start"]["weights"]) > 1e-2, "nothing is learnt"
    for two in results.of("upscaled", kind, how):
        assert difference(two["end"], one["end"]) <= TOLERANCE
        assert difference(two["state"], one["state"]) <= TOLERANCE
        assert two["norms"] == pytest.approx(one["norms"], rel=1e-10)


@both
@kinds
def test_widening_into_a_wrapped_model_gives_the_same_bits(kind: str, how: str, results: Results) -> None:
    """Weights, noise and optimizer state: each process writes its own part of what one process would."""
    one = results.one("upscaled", kind)["start"]
    for two in results.of("upscaled", kind, how):
        assert identical(two["start"]["weights"], one["weights"])
        assert identical(two["start"]["state"], one["state"])
        assert two["rules"], "the plan of a wrapped model is another"


@kinds
def test_weights_and_state_are_sharded_under_fsdp2(kind: str, results: Results) -> None:
    for two in results.of("upscaled", kind, "fsdp2"):
        assert two["sharded"] == {"weights": True, "state": True}


@pytest.mark.quick("*-ddp", "gpt2-fsdp2")
@both
@kinds
def test_upscaling_from_a_wrapped_narrow_model(kind: str, how: str, results: Results) -> None:
    one = results.one("from", kind)
    assert one["agree"] == (True, True, True)
    for two in results.of("from", kind, how):
        assert two["agree"] == (True, True, True)
        assert difference(two["end"], one["end"]) <= TOLERANCE


@pytest.mark.quick("gpt2")
@kinds
def test_a_model_sharded_on_the_meta_device(kind: str, results: Results) -> None:
    one = results.one("sketched", kind)
    for two in results.of("sketched", kind, "fsdp2"):
        assert two["tied"]
        assert difference(two["end"], one["end"]) <= TOLERANCE
    assert difference(one["end"], results.one("upscaled", kind)["end"]) <= TOLERANCE


@pytest.mark.quick("*-ddp", "gpt2-fsdp2")
@both
@kinds
def test_signal_noise_is_the_same_for_one_and_two_processes(kind: str, how: str, results: Results) -> None:
    one = results.one("signal", kind)
    assert any(one["effective"].values())
    for two in results.of("signal", kind, how):
        assert difference(two["weights"], one["weights"]) <= 1e-12
        assert two["effective"] == pytest.approx(one["effective"], rel=1e-12)


@pytest.mark.quick("*-ddp", "gpt2-fsdp2")
@both
@kinds
def test_the_invariant_norm_is_the_same_for_one_and_two_processes(kind: str, how: str, results: Results) -> None:
    one = results.one("signal", kind)
    for two in results.of("signal", kind, how):
        assert two["norms"] == pytest.approx(one["norms"], rel=1e-10)


@pytest.mark.quick("*-ddp", "gpt2-fsdp2")
@both
@kinds
def test_a_checkpoint_of_two_processes_goes_on_in_two(kind: str, how: str, results: Results) -> None:
    """All processes call save and one writes; model, optimizer and plan come back as they were."""
    runs = results.of("saved", kind, how)
    assert [two["writes"] for two in runs] == [1, 0]
    for two in runs:
        assert two["extra"] == {"step": 2}
        assert two["same plan"]
        assert identical(two["again"], two["end"])
        assert identical(two["state"][1], two["state"][0])
        assert two["sharded"] == (how == "fsdp2")
        assert difference(two["end"], results.one("saved", kind)["end"]) <= TOLERANCE
    assert not list(results.folder.glob("*.tmp")) + list(results.folder.glob(".*.tmp"))


@pytest.mark.quick("*-ddp", "gpt2-fsdp2")
@both
@kinds
def test_a_checkpoint_of_two_processes_goes_on_in_one(kind: str, how: str, results: Results) -> None:
    results.of("saved", kind, how)
    with float64_here():
        wide = build(kind, 2)
        plan = mu.load(results.folder / f"{kind}-{how}.ckpt", wide).plan
        assert plan is not None
        optimizer = mu.make_optimizer(wide, plan, optim.AdamW, lr=9.0)
        mu.load(results.folder / f"{kind}-{how}.ckpt", wide, optimizer)
        train(wide, optimizer, kind, 2, plan)
    assert difference(weights(wide), results.one("saved", kind)["end"]) <= TOLERANCE


@pytest.mark.quick("*-ddp", "gpt2-fsdp2")
@both
@kinds
def test_a_checkpoint_of_one_process_goes_on_in_two(kind: str, how: str, results: Results) -> None:
    one = results.one("saved", kind)
    for two in results.of("loaded", kind, how):
        assert difference(two["end"], one["end"]) <= TOLERANCE
