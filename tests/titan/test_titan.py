"""torchtitan's own checkpoints, grown: it trains, saves, and resumes from what `mupscale upscale` made of them.

`make test-titan` runs this in an environment of its own: two processes on the CPU, FSDP2, torchtitan's model,
optimizer, schedule and checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.titan
HERE = Path(__file__).parent
MODEL = ["--model", "titan_llama.build", "--inputs", "titan_llama.tokens"]


def processes(*words: object) -> str:
    """Two processes of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *map(str, words)]
    done = subprocess.run(
        command, cwd=HERE, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def train(folder: Path, steps: int, sizes: dict[str, int], *groups: Path) -> list[float]:
    processes("titan_run.py", folder, steps, json.dumps(sizes), *groups)
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint after four steps, and the losses of the four that come then."""
    folder = tmp_path_factory.mktemp("small")
    train(folder, 4, {})
    kept = folder / "step-4"
    shutil.copytree(folder / "checkpoint" / "step-4", kept)
    return kept, train(folder, 4, {})


def grown(small: Path, folder: Path, to: str, *how: str) -> Path:
    """The folder of a run that resumes from the grown checkpoint; a file of the groups that it needs."""
    (folder / "checkpoint").mkdir(parents=True)
    said = processes("-m", "mupscale", "upscale", small, folder / "checkpoint" / "step-4", *MODEL, "--to", to, *how)
    (folder / "groups.py").write_text(said[said.index("param_groups = [") :])
    verify = ["verify", str(small), str(folder / "checkpoint" / "step-4"), *MODEL[:2]]
    done = subprocess.run(
        [sys.executable, "-m", "mupscale", *verify], cwd=HERE, capture_output=True, text=True, check=False
    )
    assert "equal: all" in done.stdout, done.stdout + done.stderr
    return folder


def test_copies_go_on_with_the_same_losses(trained: tuple[Path, list[float]], tmp_path: Path) -> None:
    small, losses = trained
    wide = grown(small, tmp_path / "wide", "dim=128,heads=8", "--exact")
    again = train(wide, 4, {"dim": 128, "heads": 8}, wide / "groups.py")
    print("losses of the small run, and of the wide one:", losses, again)
    assert again == pytest.approx(losses, rel=1e-6)


def test_fresh_units_and_more_layers_train_on(trained: tuple[Path, list[float]], tmp_path: Path) -> None:
    small, losses = trained
    large = grown(small, tmp_path / "large", "dim=96,heads=6,layers=3")
    again = train(large, 4, {"dim": 96, "heads": 6, "layers": 3}, large / "groups.py")
    assert all(abs(ours - theirs) < 1 for ours, theirs in zip(again, losses, strict=True))


def test_layers_that_start_as_identity_keep_the_loss(trained: tuple[Path, list[float]], tmp_path: Path) -> None:
    small, losses = trained
    deep = grown(small, tmp_path / "deep", "dim=64,heads=4,layers=3")
    again = train(deep, 1, {"layers": 3}, deep / "groups.py")
    assert again[0] == pytest.approx(losses[0], rel=1e-6)
