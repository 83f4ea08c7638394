"""The demonstration does what it shows, in a shorter run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import widen_mid_training as demo
from mupscale.data import covtype_sample


def test_demo_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curves = demo.run(tmp_path, before=30, after=30)
    gaps = [abs(a - b) for a, b in zip(curves["narrow"].losses, curves["exact"].losses, strict=True)]
    assert max(gaps) < 1e-12
    assert curves["noisy"].losses[0] != curves["exact"].losses[0]
    assert curves["narrow"].losses[-1] < curves["before"].losses[0]
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert str(tmp_path / "demo.png") in capsys.readouterr().out
    assert torch.get_default_dtype() == torch.float32


def test_covtype_sample() -> None:
    data = covtype_sample()
    assert data.train_x.shape == (12_000, 54)
    assert data.test_x.shape == (3_000, 54)
    assert data.train_y.unique().tolist() == list(range(7))
    torch.testing.assert_close(data.train_x[:, :10].mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.train_x[:, :10].std(0), torch.ones(10))
    assert ((data.train_x[:, 10:] == 0) | (data.train_x[:, 10:] == 1)).all()
    assert (data.train_x[:, 10:].sum(1) == 2).all()
