"""The demonstration does what it shows, in a shorter run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import widen_mid_training as demo


@pytest.mark.slow
def test_demo_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curves = demo.run(tmp_path, before=30, after=30)
    gaps = [abs(a - b) for a, b in zip(curves["narrow"].losses, curves["exact"].losses, strict=True)]
    assert max(gaps) < 1e-12
    assert curves["noisy"].losses[0] != curves["exact"].losses[0]
    assert curves["narrow"].losses[-1] < curves["before"].losses[0]
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert str(tmp_path / "demo.png") in capsys.readouterr().out
    assert torch.get_default_dtype() == torch.float32


SHORT = ["--width", "16", "--layers", "1", "--context", "8", "--steps", "6", "--grow-at", "3"]


@pytest.mark.slow
def test_a_plain_loop_grows_and_goes_on_after_a_stop_to_the_same_weights(tmp_path: Path) -> None:
    """Stopped before its growth and behind it. Of its lines, at most ten are about growing."""
    import train

    words = [*SHORT, "--grow-to", "32", "--batch", "2", "--every", "2", "--out"]
    whole, loss = train.train(train.parse([*words, str(tmp_path / "whole")]))
    assert train.GPT(32, 65, 8, 1).readout.weight.shape == whole.get_parameter("readout.weight").shape
    again = None
    for step in (2, 4, 6):
        again, last = stop_after(train, train.parse([*words, str(tmp_path / "run")]), step)
    assert again is not None
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert last == loss
    lines = Path(train.__file__).read_text().splitlines()
    assert len(lines) <= 165
    assert sum("# grow" in line for line in lines) <= 10


def stop_after(script: Any, options: Any, step: int) -> Any:
    """A run that is killed once its checkpoint of this step is written; the last one ends."""

    class Killed(BaseException):
        pass

    real = script.mu.save

    def save(*given: Any, **more: Any) -> None:
        real(*given, **more)
        if more["step"] == step < options.steps:
            raise Killed

    script.mu.save = save
    try:
        return script.train(options)
    except Killed:
        return None, None
    finally:
        script.mu.save = real


@pytest.mark.slow
def test_the_same_with_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = pytest.importorskip("train_with_trainer")
    words = [*SHORT[:-2], "--grow-at", "4", "--every", "2", "--out", str(tmp_path)]
    trainer = script.train(script.parse(words))
    assert trainer.model.config.hidden_size == 32
    assert sorted(path.name for path in (tmp_path / "sizes").iterdir()) == ["hidden-16-layers-1", "hidden-32-layers-1"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_same_with_lightning(tmp_path: Path) -> None:
    script = pytest.importorskip("train_with_lightning")
    module, _ = script.train(script.parse([*SHORT, "--grow-to", "32", "--out", str(tmp_path)]))
    assert module.model.readout.weight.shape[1] == 32
