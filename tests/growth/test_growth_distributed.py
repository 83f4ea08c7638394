"""Two processes on gloo: DDP and FSDP2 widen, perturb, train, save and load to what one process gets.

Both processes are started once and act out every scenario; a test compares what they left with one process.
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
from weights import difference, identical, whole

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch.distributed with gloo is not available"
)

WORLD = 2
CLIP = 0.05
TOLERANCE = 1e-10
HYPER: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-4}
MESH: dict[str, Any] = {}


Left = dict[str, Any]
"""What a scenario leaves: "bits" that one process gets, too; "near", to rounding; "numbers"; and "facts" that hold."""


def build(kind: str, k: int) -> nn.Module:
    """gpt2: a tied readout. mlp: sizes that two processes cannot share evenly."""
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


def upscaled(kind: str, how: str) -> Left:
    """The plan is made before wrapping and used after; everything is written into the wrapped model."""
    narrow, optimizer = trained(kind)
    torch.manual_seed(9)
    wide = build(kind, 2)
    plan = plan_for(kind, narrow, wide)
    wide = wrap(wide, how)
    facts = {"the plan of a wrapped model is the same": mu.plan(narrow, wide).rules == plan.rules}
    mu.widen(narrow, wide, plan)
    mu.perturb(wide, plan, 0.5, seed=3)
    grown = mu.make_optimizer(wide, plan, optim.AdamW, **HYPER)
    mu.widen_optimizer(optimizer, grown, plan)
    start = {"weights": weights(wide), "state": states(wide, grown)}
    moments = [grown.state[p][key] for p in wide.parameters() for key in ("exp_avg", "exp_avg_sq")]
    facts["sharded"] = {is_sharded(t) for t in (*wide.parameters(), *moments)} == {how == "fsdp2"}
    norms, end = train(wide, grown, kind, 2, plan), weights(wide)
    facts |= {"clipped": min(norms) > 2 * CLIP, "learnt": difference(end, start["weights"]) > 1e-2}
    return {"bits": start, "near": {"end": end, "state": states(wide, grown)}, "numbers": norms, "facts": facts}


def from_a_wrapped_narrow_model(kind: str, how: str) -> Left:
    """The narrow model is trained wrapped, too, and upscaled in one call; a saved state's names carry the wrapper's."""
    torch.manual_seed(1)
    narrow = wrap(build(kind, 1), how)
    optimizer = optim.AdamW(narrow.named_parameters(), **HYPER)
    train(narrow, optimizer, kind, 2)
    plain = build(kind, 2)
    plan = plan_for(kind, build(kind, 1), plain)
    made_wrapped = mu.plan(narrow, plain).rules == plan.rules
    wide, grown = mu.upscale(narrow, wrap(build(kind, 2), how), plan, optimizer, noise=0.5, seed=3)
    mu.widen(narrow.state_dict(), plain, plan)
    by_name = mu.make_optimizer(plain, plan, optim.AdamW, **HYPER)
    mu.widen_optimizer(optimizer.state_dict(), by_name, plan)
    mu.perturb(plain, plan, 0.5, seed=3)
    facts = {
        "made wrapped": made_wrapped,
        "same start": identical(weights(wide), weights(plain)),
        "same state": identical(states(wide, grown), states(plain, by_name)),
    }
    train(wide, grown, kind, 2, plan)
    return {"near": {"end": weights(wide)}, "facts": facts}


def sketched_then_sharded(kind: str, how: str) -> Left:
    """A wide model that never was whole: on the meta device, sharded there, and given memory by widen."""
    narrow, optimizer = trained(kind)
    with torch.device("meta"):
        wide = build(kind, 2)
    plan = plan_for(kind, narrow, wide)
    wide, grown = mu.upscale(narrow, wrap(wide, how), plan, optimizer, noise=0.5, seed=3)
    tied = kind == "mlp" or wide.get_parameter("lm_head.weight") is wide.get_parameter("wte.weight")
    train(wide, grown, kind, 2, plan)
    return {"near": {"end": weights(wide)}, "facts": {"tied": tied}}


def grown_by_fresh_units(kind: str, how: str) -> Left:
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
    start = {"weights": weights(wide), "state": states(wide, grown), "sketched": weights(sketched)}
    train(wide, grown, kind, 2, plan)
    return {"bits": start, "near": {"end": weights(wide), "state": states(wide, grown)}}


def outputs(model: nn.Module, kind: str) -> Tensor:
    """Of all examples; FSDP2 leaves the outermost parameters whole after a run without a backward pass."""
    out = whole(model(data(kind)))
    if hasattr(model, "reshard"):
        model.reshard()
    return out


def grown_in_depth(kind: str, how: str) -> Left:
    """A wrapped shallow model into wrapped deep ones: blocks that start as identity, and copies."""

    def blocks(number: int, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ResidualTable(5, 3, 5, number) if kind == "mlp" else GPT2(11, 6, layers=number, heads=2, head_dim=3)

    shallow = wrap(blocks(2, 1), how)
    optimizer = optim.AdamW(shallow.named_parameters(), **HYPER)
    train(shallow, optimizer, kind, 2)
    before, inputs, near, refused = outputs(shallow, kind), data(kind)[:2], dict[str, Any](), how != "fsdp2"
    if how == "fsdp2":
        shallow(data(kind))
        plan = mu.plan_depth(blocks(2, 1), blocks(4, 2), inputs=inputs)
        try:
            grow_optimizer(optimizer, shallow, wrap(blocks(4, 2), how), plan)
        except mu.MupscaleError as error:
            refused = "Call model.reshard()" in str(error)
        shallow.reshard()
    facts = {"what is not sharded now is refused": refused}
    grows: dict[str, Any] = {"identity": mu.Identity(), "stack": mu.Stack()}
    for name, grow in grows.items():
        plan = mu.plan_depth(blocks(2, 1), blocks(4, 2), inputs=inputs, grow=grow)
        deep = mu.upscale(shallow, wrap(blocks(4, 2), how), plan)[0]
        deeper = grow_optimizer(optimizer, shallow, deep, plan)
        near |= {f"{name} weights": weights(deep), f"{name} state": states(deep, deeper)}
        stays = float((outputs(deep, kind) - before).abs().max()) < 1e-12
        facts[f"{name}: the function"] = stays == (name == "identity")
        facts[f"{name}: sharded"] = kind == "mlp" or {is_sharded(p) for p in deep.parameters()} == {how == "fsdp2"}
        train(deep, deeper, kind, 2)
        near[f"{name} end"] = weights(deep)
    facts["learnt"] = difference(near["identity end"], near["identity weights"]) > 1e-2
    return {"near": near, "facts": facts}


def signal_noise_and_other_norms(kind: str, how: str) -> Left:
    narrow, _ = trained(kind)
    wide = build(kind, 2)
    plan = plan_for(kind, narrow, wide)
    wide = mu.widen(narrow, wrap(wide, how), plan)
    effective = mu.perturb(wide, plan, mu.SignalNoise(0.3), seed=4)
    rank, world = (dist.get_rank(), WORLD) if dist.is_initialized() else (0, 1)
    loss(wide, data(kind)[rank::world]).backward()
    norms = [float(mu.clip_grad_norm_(wide, float("inf"), plan, p)) for p in (1.0, 2.0, 3.0, float("inf"))]
    numbers = [*norms, *effective.std.values()]
    return {"near": {"weights": weights(wide)}, "numbers": numbers, "facts": {"noisy": any(effective.std.values())}}


def saved_and_loaded(kind: str, how: str, folder: Path) -> Left:
    """Four steps with a checkpoint after two, into which a second model is put that goes on from there.

    All processes call save and one writes; model, optimizer and plan come back as they were.
    """
    narrow, optimizer = trained(kind)
    wide = build(kind, 2)
    plan = plan_for(kind, narrow, wide)
    wide, grown = mu.upscale(narrow, wrap(wide, how), plan, optimizer, noise=0.5, seed=3)
    train(wide, grown, kind, 2, plan)
    writes: list[Path] = []
    write = mu.checkpoint.write_tensors
    mu.checkpoint.write_tensors = lambda path, *more: (writes.append(path), write(path, *more))
    path = mu.save(folder / f"{kind}-{how}.ckpt", wide, grown, plan, step=2)
    mu.checkpoint.write_tensors = write
    rank = dist.get_rank() if dist.is_initialized() else 0
    if dist.is_initialized():
        dist.barrier()
    train(wide, grown, kind, 2, plan)
    torch.manual_seed(20)
    again = wrap(build(kind, 2), how)
    fresh = mu.make_optimizer(again, plan, optim.AdamW, lr=9.0)
    checkpoint = mu.load(path, again, fresh)
    moments = [value for state in fresh.state.values() for key, value in state.items() if key != "step"]
    facts = {
        "one writes": len(writes) == (rank == 0),
        "extra": checkpoint.extra == {"step": 2},
        "plan": checkpoint.plan == plan,
        "sharded": {is_sharded(moment) for moment in moments} == {how == "fsdp2"},
    }
    train(again, fresh, kind, 2, checkpoint.plan)
    facts["weights"] = identical(weights(again), weights(wide))
    facts["state"] = identical(states(again, fresh), states(wide, grown))
    return {"near": {"end": weights(wide)}, "facts": facts}


def loaded_from_one_process(kind: str, how: str, folder: Path) -> Left:
    """A checkpoint that one unwrapped process wrote, put into a wrapped model."""
    wide = build(kind, 2)
    with torch.device("meta"):
        plan = mu.plan(build(kind, 1), build(kind, 2))
    wide = wrap(wide, how)
    optimizer = mu.make_optimizer(wide, plan, optim.AdamW, lr=9.0)
    mu.load(folder / f"{kind}-plain.ckpt", wide, optimizer)
    train(wide, optimizer, kind, 2, plan)
    return {"near": {"end": weights(wide)}}


SCENARIOS: dict[str, tuple[Any, str]] = {
    "upscaled": (upscaled, "ddp-gpt2 fsdp2-gpt2 fsdp2-mlp"),
    "from": (from_a_wrapped_narrow_model, "ddp-mlp fsdp2-gpt2"),
    "sketched": (sketched_then_sharded, "fsdp2-gpt2"),
    "fresh": (grown_by_fresh_units, "ddp-mlp fsdp2-gpt2"),
    "depth": (grown_in_depth, "ddp-gpt2 fsdp2-mlp"),
    "signal": (signal_noise_and_other_norms, "fsdp2-gpt2"),
    "saved": (saved_and_loaded, "ddp-mlp fsdp2-gpt2"),
    "loaded": (loaded_from_one_process, "fsdp2-gpt2"),
}
"""Each with the cases that are acted out for every change; under FSDP2 the other model is slow."""
WITH_FILES = ("saved", "loaded")
REFERENCE = {"sketched": "upscaled", "loaded": "saved"}  # others have what they themselves get in one process


def cases(slow: bool) -> list[tuple[str, str, str]]:
    """Scenario, wrapper and model."""
    fast = [(name, *case.split("-")) for name, (_, listed) in SCENARIOS.items() for case in listed.split()]
    every = [(name, "fsdp2", kind) for name in SCENARIOS for kind in ("gpt2", "mlp")]
    return [*fast, *(case for case in every if slow and case not in fast)]


def process(rank: int, folder: Path, slow: bool) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rendezvous, most = f"file://{folder / 'rendezvous'}", timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD, timeout=most)
    from torch.distributed.device_mesh import init_device_mesh

    MESH["cpu"] = init_device_mesh("cpu", (WORLD,))
    for name, how, kind in cases(slow):
        files = (folder,) if name in WITH_FILES else ()
        torch.manual_seed(100 + rank)  # nothing may depend on the processes' own random numbers
        torch.save(SCENARIOS[name][0](kind, how, *files), folder / f"{name}-{how}-{kind}-{rank}.pt")
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
        self.alone: dict[tuple[str, str], Left] = {}

    def of(self, name: str, how: str, kind: str) -> list[Left]:
        paths = [self.folder / f"{name}-{how}-{kind}-{rank}.pt" for rank in range(WORLD)]
        if not all(path.exists() for path in paths):
            pytest.fail(f"the processes did not get this far:\n{self.failure}")
        return [torch.load(path, weights_only=True) for path in paths]

    def one(self, name: str, kind: str) -> Left:
        if (name, kind) not in self.alone:
            with float64_here():
                files = (self.folder,) if name in WITH_FILES else ()
                self.alone[name, kind] = SCENARIOS[name][0](kind, "plain", *files)
        return copy.deepcopy(self.alone[name, kind])


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    from torch.multiprocessing.spawn import ProcessException

    made = Results(tmp_path_factory.mktemp("processes"))
    torch.set_num_threads(1)
    for kind in ("gpt2", "mlp"):
        made.one("saved", kind)  # leaves the checkpoint that "loaded" wants
    try:
        slow = any(item.get_closest_marker("slow") for item in request.session.items)
        run_in_processes(process, (made.folder, slow), WORLD)
    except ProcessException as error:
        made.failure = str(error)
    return made


FAST = cases(slow=False)
CASES = [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in cases(slow=True)]


@pytest.mark.parametrize(("name", "how", "kind"), CASES)
def test_two_processes_get_what_one_gets(name: str, how: str, kind: str, results: Results) -> None:
    """Each writes its own part of the same weights, noise and optimizer state; and trains to the same, but rounding."""
    one = results.one(REFERENCE.get(name, name), kind)
    for left in (*results.of(name, how, kind), one):
        assert [fact for fact, holds in left.get("facts", {}).items() if not holds] == []
        for key, tensors in left.get("bits", {}).items():
            assert identical(tensors, one["bits"][key]), key
        for key, tensors in left["near"].items():
            assert difference(tensors, one["near"][key]) <= TOLERANCE, key
        if "numbers" in left:
            assert left["numbers"] == pytest.approx(one["numbers"], rel=1e-10)
    assert not list(results.folder.glob("*.tmp")) + list(results.folder.glob(".*.tmp"))


@pytest.mark.parametrize(("how", "kind"), [case[1:] for case in FAST if case[0] == "saved"])
def test_a_checkpoint_of_two_processes_goes_on_in_one(how: str, kind: str, results: Results) -> None:
    results.of("saved", how, kind)
    with float64_here():
        wide = build(kind, 2)
        plan = mu.load(results.folder / f"{kind}-{how}.ckpt", wide).plan
        optimizer = mu.make_optimizer(wide, plan, optim.AdamW, lr=9.0)
        mu.load(results.folder / f"{kind}-{how}.ckpt", wide, optimizer)
        train(wide, optimizer, kind, 2, plan)
    assert difference(weights(wide), results.one("saved", kind)["near"]["end"]) <= TOLERANCE
