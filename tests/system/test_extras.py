"""Optional packages, and what is said where one is missing; cores."""

import os
import sys

import pytest

from mupscale.system import MupscaleError, require, usable_cores


def test_a_package_that_is_there() -> None:
    assert require("os.path", reason="sweeps need os.path") is os.path


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MupscaleError, match=r"^sweeps need optuna: pip install 'mupscale\[sweep\]'$"):
        require("optuna", reason="sweeps need optuna")
    with pytest.raises(MupscaleError, match=r"^no optuna: pip install 'mupscale\[sweep\]', or take another$"):
        require("optuna", reason="no optuna", remedy=", or take another")


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 6}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert usable_cores() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1
