"""torchtitan's own checkpoints, grown: it trains, saves, and resumes from what `mupscale upscale` made of them.

`make test-titan` runs this in an environment of its own: two processes on the CPU, FSDP2, torchtitan's model,
optimizer, schedule and checkpoints.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mupscale.cli import main

pytestmark = [pytest.mark.titan, pytest.mark.filterwarnings("ignore:In CPU autocast")]
HERE = Path(__file__).parent
Run = tuple[Path, list[float]]
MODEL = ["--model", "titan_llama.build", "--inputs", "titan_llama.tokens"]


def processes(*words: object) -> str:
    """Two processes of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *map(str, words)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, cwd=HERE, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def train(folder: Path, steps: int, sizes: dict[str, int], *groups: Path, clip: float = 100.0) -> list[float]:
    processes("titan_run.py", folder, steps, json.dumps(sizes), clip, *groups)
    return json.loads((folder / "losses.json").read_text())


def run_of(folder: Path, steps: int, sizes: dict[str, int], *groups: Path, clip: float = 100.0) -> Run:
    """A checkpoint four steps before the end, in a place of its own, and the losses of these steps."""
    losses = train(folder, steps, sizes, *groups, clip=clip)
    last = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoint").iterdir())
    shutil.copytree(folder / "checkpoint" / f"step-{last - 4}", folder / "step-4")
    return folder / "step-4", losses[-4:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("small"), 8, {})


def grown(small: Path, folder: Path, *how: str, alone: bool = True) -> Path:
    """The folder of a run that resumes from the grown checkpoint; a file of the groups that it needs."""
    out = folder / "checkpoint" / "step-4"
    out.parent.mkdir(parents=True)
    words, said = ["upscale", str(small), str(out), *MODEL, *how], io.StringIO()
    with contextlib.chdir(HERE), contextlib.redirect_stdout(said):
        if alone:
            assert main(words) == 0
        else:
            said.write(processes("-m", "mupscale", *words))
        assert main(["verify", str(small), str(out), *MODEL[:2]]) == 0
    lines = said.getvalue()
    (folder / "groups.py").write_text(lines[lines.index("param_groups = [") : lines.rindex("]") + 1])
    return folder


def test_copies_go_on_with_the_same_losses(trained: Run, tmp_path: Path) -> None:
    small, losses = trained
    wide = grown(small, tmp_path / "wide", "--to", "dim=128,heads=8", "--exact", alone=False)
    again = train(wide, 4, {"dim": 128, "heads": 8}, wide / "groups.py")
    print("losses of the small run, and of the wide one:", losses, again)
    assert again == pytest.approx(losses, rel=1e-6)


def test_fresh_units_and_more_layers_train_on(trained: Run, tmp_path: Path) -> None:
    small, losses = trained
    large = grown(small, tmp_path / "large", "--to", "dim=96,heads=6,layers=3")
    again = train(large, 4, {"dim": 96, "heads": 6, "layers": 3}, large / "groups.py")
    assert all(abs(ours - theirs) < 1 for ours, theirs in zip(again, losses, strict=True))


def test_layers_that_start_as_identity_keep_the_loss(trained: Run, tmp_path: Path) -> None:
    small, losses = trained
    deep = grown(small, tmp_path / "deep", "--to", "dim=64,heads=4,layers=3")
    again = train(deep, 1, {"layers": 3}, deep / "groups.py")
    assert again[0] == pytest.approx(losses[0], rel=1e-6)


def test_clipping_by_the_norm_that_no_width_changes(tmp_path: Path) -> None:
    """The hook is all that the trainer needs; torchtitan's own clipping would have other losses."""
    small, losses = run_of(tmp_path / "small", 8, {}, clip=0.1)
    wide = grown(small, tmp_path / "wide", "--to", "dim=128,heads=8", "--exact")
    assert train(wide, 4, {"dim": 128, "heads": 8}, wide / "groups.py", clip=0.1) == pytest.approx(losses, rel=1e-6)


def test_all_experts_active_go_on_with_the_same_losses(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With experts that compute in float32; torchtitan's own round to bfloat16, which the dense model does not."""
    small, losses = trained
    sizes = {"experts": 4, "top_k": 4}
    rounded = grown(small, tmp_path / "rounded", "--experts", "4", "--top-k", "4", "--exact")
    again = train(rounded, 4, sizes, rounded / "groups.py")
    print("losses of the dense run, and of the mixture in bfloat16:", losses, again)
    assert again == pytest.approx(losses, rel=1e-3)
    monkeypatch.setenv("TITAN_FLOAT32", "1")
    exact = grown(small, tmp_path / "exact", "--experts", "4", "--top-k", "4", "--exact")
    again = train(exact, 4, sizes, exact / "groups.py")
    print("and in float32:", again)
    assert again == pytest.approx(losses, rel=1e-6)


def test_a_mixture_trains_on_and_gets_more_experts(trained: Run, tmp_path: Path) -> None:
    small, dense = trained
    mixture, sizes = grown(small, tmp_path / "mixture", "--experts", "4", "--top-k", "2"), {"experts": 4, "top_k": 2}
    kept, losses = run_of(mixture, 8, sizes, mixture / "groups.py")
    first = json.loads((mixture / "losses.json").read_text())[0]
    print("losses of the dense run, and of a mixture with a router:", dense[0], first)
    assert first == pytest.approx(dense[0], rel=1e-3)
    more = grown(kept, tmp_path / "more", "--from", "experts=4,top_k=2", "--experts", "8", "--exact")
    again = train(more, 4, {"experts": 8, "top_k": 4}, more / "groups.py")
    print("losses of four experts, and of eight:", losses, again)
    assert again == pytest.approx(losses, rel=1e-5)


def test_weights_of_experts_that_do_not_sum_to_one_are_refused(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchtitan's DeepSeek-V3 has them, unless route_norm is set."""
    monkeypatch.setenv("TITAN_SCORES", "sigmoid")
    with pytest.raises(AssertionError):
        grown(trained[0], tmp_path / "mixture", "--experts", "4")
    assert "weights of the active experts must sum to 1" in " ".join(capsys.readouterr().err.split())
