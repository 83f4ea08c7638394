"""One process or many: the rank of this one, how the model is spread over all, and what they agree on."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mupscale.system import MupscaleError, derive, number_in_environment

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes that train one model, as this one sees them. A single process has nothing to exchange."""

    device: torch.device
    rank: int = 0
    world: int = 1
    mode: Literal["ddp", "fsdp"] = "ddp"

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether each process holds a part of the model only."""
        return self.world > 1 and self.mode == "fsdp"

    def place(self, model: nn.Module) -> nn.Module:
        """The model where it trains: moved to the device, or sharded (FSDP2) block by block; in place."""
        if not self.sharded:
            return model if any(p.is_meta for p in model.parameters()) else model.to(self.device)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        for parent in reversed(list(model.modules())):  # inner blocks before those that hold them
            for block in parent if isinstance(parent, nn.ModuleList) else ():
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def runner(self, model: nn.Module) -> nn.Module:
        """What is called in a training step: the model, in DDP where processes have a copy each."""
        if self.world == 1 or self.sharded:
            return model
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)

    def accumulating(self, runner: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged with the last part of a step's batch only."""
        if isinstance(runner, DistributedDataParallel) and not last:
            return runner.no_sync()
        if self.sharded:
            runner.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def reshard(self, model: nn.Module) -> None:
        """Back to shards: after a forward pass without a backward one, FSDP leaves the outermost weights whole."""
        if self.sharded:
            from torch.distributed.fsdp import FSDPModule

            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def share_buffers(self, model: nn.Module) -> None:
        """The main process's buffers for all: each gathers its running statistics from its own examples."""
        for buffer in model.buffers() if self.world > 1 else ():
            dist.broadcast(buffer, 0)

    def share(self, start: int, count: int) -> tuple[int, int]:
        part = count // self.world
        return start + self.rank * part, part

    def seed_generators(self, seed: int, step: int) -> None:
        """Make what modules draw in this step (dropout) depend on the seed, the step and the process alone."""
        own = derive(seed, step, self.rank)
        torch.default_generator.manual_seed(own)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(own)

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.world if self.world > 1 else values

    def sum(self, values: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether any process has it set; what all of them then know."""
        if self.world == 1:
            return list(flags)
        raised = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in raised.tolist()]

    def by_main(self, action: Callable[[], T], what: str = "") -> T:
        """Let the main process do something, while the others wait: all get what it gives, or fail with its words.

        So they agree, though they may not see the same files at the same moment.
        """
        told: list[Any] = [None, None]  # what the action gives, and what is said where it fails
        if self.main:
            try:
                told[0] = action()
            except MupscaleError as error:
                told[1] = str(error)
            except OSError as error:
                is_named = error.strerror and str(error.filename) in what
                told[1] = f"{what}: {error.strerror if is_named else error}"
        if self.world > 1:
            dist.broadcast_object_list(told)
        if told[1] is not None:
            raise MupscaleError(told[1])
        return cast(T, told[0])


@contextmanager
def join_processes(device: str, mode: Literal["ddp", "fsdp"]) -> Iterator[Processes]:
    """Join the processes that torchrun has started, or be the only one; leave the process group as it was."""
    chosen = _device(device)
    world = number_in_environment("WORLD_SIZE", 1)
    if world == 1 and not (dist.is_available() and dist.is_initialized()):
        yield Processes(chosen)
        return
    ours = not dist.is_initialized()
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if ours:
        from torch.distributed.distributed_c10d import PrefixStore

        store, rank, world = _rendezvous_store()
        store = PrefixStore(f"run-{next(_RUNS)}", store)
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", store=store, rank=rank, world_size=world)
    try:
        yield Processes(chosen, dist.get_rank(), dist.get_world_size(), mode)
    finally:
        if ours:
            dist.destroy_process_group()


_RUNS = itertools.count()


@functools.cache
def _rendezvous_store() -> tuple[Store, int, int]:
    """The store of torchrun's rendezvous, with this process's rank and their number.

    It is made once, and every run has a prefix of its own in it: a second rendezvous on the same store can hang.
    """
    from torch.distributed.rendezvous import rendezvous

    world, rank = number_in_environment("WORLD_SIZE", 1), number_in_environment("RANK", -1)
    number_in_environment("MASTER_PORT", 0)
    lacking = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if lacking or not 0 <= rank < world:
        wrong = f"{lacking[0]} is not set" if lacking else f"RANK is {rank}"
        raise MupscaleError(
            f"the environment variable WORLD_SIZE is {world}, but {wrong}: unset WORLD_SIZE, or start with torchrun"
        )
    store: tuple[Store, int, int] = next(iter(rendezvous("env://")))
    return store


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MupscaleError(f"there is no device {name!r}: give auto, cpu, cuda or cuda:0") from None
    if device.type == "meta":
        raise MupscaleError("device meta stores no values, so nothing can be trained on it: give auto, cpu or cuda")
    if device.type not in ("cpu", "cuda"):
        try:
            torch.zeros(1, device=device)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
            raise MupscaleError(f"device {name} cannot be used here: {reason}") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise MupscaleError("device cuda was asked for, but torch finds no GPU here: use device auto or cpu")
        if device.index is None:
            return torch.device("cuda", number_in_environment("LOCAL_RANK", 0))
    return device


def divide_by_size(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    parts: list[list[str]] = [[] for _ in range(count)]
    load = [0] * count
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = load.index(min(load))
        parts[least].append(name)
        load[least] += sizes[name]
    return parts
