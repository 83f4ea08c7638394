"""Runs trained as one program: in as many parts as memory needs, from their beginning or from where they were saved."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence

import torch

from mupscale.data import Data
from mupscale.engine.jobs import Work
from mupscale.engine.memory import even_share, runs_at_once
from mupscale.engine.stack import Stack
from mupscale.engine.stack_run import Passage
from mupscale.engine.stackable import NotStackable, check_alike
from mupscale.system import MupscaleError
from mupscale.train import StopRequest, join_processes, matmul_precision


def train_together(work: Work, stop: StopRequest) -> None:
    """Train what is left as one program; NotStackable, before anything is touched, if that cannot be."""
    first = work.recipes[work.left[0]]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise NotStackable("several processes (torchrun) train one run at a time")
    check_alike([work.recipes[number] for number in work.left])
    with matmul_precision(first.precision), join_processes(first.device, first.parallel) as processes:
        loaded = first.make_data() if work.data is None else work.data
        data = loaded.to(processes.device, first.dtype())
        most: int | None = None
        while work.left:
            if work.saved is not None:
                chunk = [int(number) for number in work.saved.extra["stack"]["numbers"]]
            else:
                most = most or _most(work, processes.device, data)
                chunk = work.left[: even_share(len(work.left), most)]
            try:
                _begin(work, chunk, processes.device, data).go(stop)
            except torch.OutOfMemoryError:
                most = _fewer(work, len(chunk))
            _give_back_memory(processes.device)
            work.keep()


def _begin(work: Work, chunk: Sequence[int], device: torch.device, data: Data) -> Passage:
    """A stack of these runs at their first step, or where they were saved."""
    saved, work.saved = work.saved, None
    going = Passage(work, Stack([work.recipes[number] for number in chunk], device, data), list(chunk))
    if saved is not None:
        try:
            going.restore(saved)
        except MupscaleError as error:
            work.note(f"starting over: {error}")
    return going


def _most(work: Work, device: torch.device, data: Data) -> int:
    try:
        most = runs_at_once(work.recipes[work.left[0]], device, data, work.memory)
    except torch.OutOfMemoryError:
        raise _too_big() from None
    if most < len(work.left):
        work.note(f"{even_share(len(work.left), most)} of {len(work.left)} runs at a time: more need more memory")
    return most


def _fewer(work: Work, count: int) -> int:
    if count == 1:
        raise _too_big() from None
    work.note(f"{count} runs at once do not fit into memory: {count // 2} at a time")
    return count // 2


def _too_big() -> MupscaleError:
    return MupscaleError("one run alone does not fit into memory: take a smaller batch or width")


def _give_back_memory(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()  # a compiled step and its stack hold each other
        torch.cuda.empty_cache()
