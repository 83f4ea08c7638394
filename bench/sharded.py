"""What a process holds of a sharded model, and of a DCP folder that grows: python bench/sharded.py

A GPT-2 is initialised under FSDP2 by 2 and by 4 processes, on the CPU: the highest resident memory of a process, less
what it had before, over its share of the parameters plus the largest tensor. Beside it the same with the whole model in
every process. glibc is told to give back what is freed, as it does of tensors of more than 32 MiB without being told.
Then DCP folders with optimizer state, of few and of many layers, become twice as wide: the highest
memory is to follow the largest tensor, and not the size of the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import mupscale as mu
from _measuring import peak_memory
from mupscale.core import naming
from mupscale.growth import GrowthSettings
from mupscale.models import GPT2
from mupscale.train import join_processes, save_dcp, upscale_dcp
from mupscale.train.run_models import init_member

MIB = 1 << 20
GIVING_BACK = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
WIDTH, LAYERS, VOCABULARY = 1024, 8, 8192


def build(width: int, layers: int = LAYERS) -> GPT2:
    """A model of which the table of tokens is the largest tensor."""
    return GPT2(VOCABULARY, 64, width=width, head_dim=64, layers=layers)


def used_by(action: Callable[[], object]) -> int:
    """How much more memory a process holds at most while it acts."""
    with peak_memory() as most:
        kept = action()
    del kept
    return most[0]


def start(out: Path, *, whole: bool) -> None:
    """One of several processes: what it takes to start in parts, or as a whole."""
    torch.set_num_threads(1)
    family = mu.Family(build, 64)
    with join_processes("cpu", "fsdp") as processes:
        init_member(family, 128, 0, processes, torch.float32)  # so that libraries are there
        if whole:
            used = used_by(lambda: processes.place(family.init_untried(WIDTH)))
        else:
            used = used_by(lambda: init_member(family, WIDTH, 0, processes, torch.float32))
        sizes = [4 * p.numel() for p in naming.parameters(family.sketch(WIDTH)).values()]
        found = {"used": used, "share": sum(sizes) / processes.world, "largest": max(sizes)}
        (out / f"{processes.rank}.json").write_text(json.dumps(found))


def measured(count: int, *words: str) -> tuple[float, dict[str, float]]:
    """Of so many processes, the highest memory less the largest tensor, over a share; and what one of them found."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(count)]
        subprocess.run([*torchrun, __file__, "--figures", folder, *words], check=True, env=GIVING_BACK)
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    return (max(one["used"] for one in found) - found[0]["largest"]) / found[0]["share"], found[0]


def grow(layers: int) -> None:
    """Grow the folder of a model with so many layers, in a process of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), build(512, layers)
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        save_dcp(folder / "small", model, optimizer)
        size = 3 * 4 * sum(p.numel() for p in model.parameters())
        del model, optimizer, p
        plain = {"width": 512}, {"width": WIDTH}
        used = {}
        for how in ("copies", "fresh"):
            family = mu.Family(lambda width: build(width, layers), {"width": 64}, init_at={"width": 512})
            growth = GrowthSettings(how=how)
            used[how] = used_by(partial(upscale_dcp, folder / "small", folder / how, family, *plain, growth))
        written = sum(path.stat().st_size for path in (folder / "copies").iterdir())
    print(
        f"DCP folder, {layers:2} layers: {size / MIB:.0f} → {written / MIB:.0f} MiB, held at most "
        f"{used['copies'] / MIB:.0f} MiB (copies) and {used['fresh'] / MIB:.0f} (fresh units); the largest tensor has "
        f"{4 * VOCABULARY * WIDTH / MIB:.0f}"
    )


def main() -> None:
    """All measurements, or the part of one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, help="internal: be one of several processes, and leave figures here")
    parser.add_argument("--whole", action="store_true", help="internal: with the whole model in each")
    parser.add_argument("--grow", type=int, help="internal: grow the folder of a model with so many layers")
    options = parser.parse_args()
    if options.figures is not None:
        start(options.figures, whole=options.whole)
        return
    if options.grow is not None:
        grow(options.grow)
        return
    for count in (2, 4):
        (parts, one), (whole, _) = measured(count), measured(count, "--whole")
        print(
            f"{count} processes, share {one['share'] / MIB:.0f} MiB, largest tensor {one['largest'] / MIB:.0f} MiB: "
            f"(peak − largest tensor) / share {parts:.2f}  (target ≤ 1.3); with the whole model in each {whole:.2f}",
            flush=True,
        )
    for layers in (4, 16):
        subprocess.run([sys.executable, __file__, "--grow", str(layers)], check=True, env=GIVING_BACK)


if __name__ == "__main__":
    main()
