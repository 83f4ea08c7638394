"""Training in stacks: as many runs at once as fit into memory, from their first step or from where they were saved."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from mupscale.data import Data
from mupscale.engine.memory import even_share, runs_at_once
from mupscale.engine.stack import RunStack
from mupscale.engine.stack_run import StackRun
from mupscale.engine.stackable import NotStackable, check_stackable
from mupscale.engine.training_job import TrainingJob
from mupscale.system import MupscaleError, number_in_environment
from mupscale.train import StopRequest, join_processes, matmul_precision


def train_in_stacks(job: TrainingJob, stop: StopRequest) -> None:
    """Train all remaining runs in stacks; raises NotStackable before the first step if they cannot be stacked."""
    first = job.recipes[job.remaining[0]]
    if number_in_environment("WORLD_SIZE", 1) > 1:
        raise NotStackable("several processes (torchrun) train one run at a time")
    check_stackable([job.recipes[number] for number in job.remaining])
    with matmul_precision(first.precision), join_processes(first.device, first.parallel) as processes:
        loaded = first.make_data() if job.data is None else job.data
        data = loaded.to(processes.device, first.dtype())
        largest: int | None = None
        while job.remaining:
            if job.saved is not None:
                chunk = [int(number) for number in job.saved.extra["stack"]["numbers"]]
            else:
                largest = largest or _largest_stack(job, processes.device, data)
                chunk = job.remaining[: even_share(len(job.remaining), largest)]
            try:
                _start_stack(job, chunk, processes.device, data).train(stop)
            except torch.OutOfMemoryError:
                largest = _halve(job, len(chunk))
            _give_back_memory(processes.device)
            job.save_outcomes()
            stop.check()


def _start_stack(job: TrainingJob, chunk: Sequence[int], device: torch.device, data: Data) -> StackRun:
    """A stack of these runs, at their first step or where they were saved."""
    saved, job.saved = job.saved, None
    run = StackRun(job, RunStack([job.recipes[number] for number in chunk], device, data), list(chunk))
    if saved is not None:
        try:
            run.restore(saved)
        except MupscaleError as error:
            job.note(f"starting over: {error}")
    return run


def _largest_stack(job: TrainingJob, device: torch.device, data: Data) -> int:
    """How many of the remaining runs fit into memory at once; one that is left alone need not be measured."""
    if len(job.remaining) == 1:
        return 1
    try:
        largest = runs_at_once(job.recipes[job.remaining[0]], device, data, job.memory)
    except torch.OutOfMemoryError:
        raise _too_large() from None
    if largest < len(job.remaining):
        count = len(job.remaining)
        job.note(f"{even_share(count, largest)} of {count} runs at a time: more need more memory")
    return largest


def _halve(job: TrainingJob, count: int) -> int:
    """Half as many runs, after `count` of them did not fit."""
    if count == 1:
        raise _too_large() from None
    job.note(f"{count} runs at once do not fit into memory: {count // 2} at a time")
    return count // 2


def _too_large() -> MupscaleError:
    return MupscaleError("one run alone does not fit into memory: take a smaller batch or width")


def _give_back_memory(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()  # a compiled step and its stack hold each other
        torch.cuda.empty_cache()
