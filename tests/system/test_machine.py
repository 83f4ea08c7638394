"""What the machine has: memory, as the files of Linux tell it, cores, and optional packages or none."""

from __future__ import annotations

import gc
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from mupscale.system import (
    MupscaleError,
    available_memory,
    describe_shortage,
    pausing_garbage_collection,
    require,
    usable_cores,
)
from mupscale.system.machine import _in_unknown_system

GIB = 1 << 30


def machine(root: Path, available: int = 16 * GIB) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:       99 kB\nMemAvailable:   {available // 1024} kB\n")
    return root


def container(root: Path, limit: object, used: int, held: int | None = None, *, old: bool = False) -> Path:
    """A machine's folder in which a container is told of, by either version of control groups."""
    folder = root / f"sys/fs/cgroup{'/memory' * old}"
    folder.mkdir(parents=True)
    (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if old else "memory.current")).write_text(f"{used}\n")
    if held is not None:
        stat = f"inactive_file 1\ntotal_inactive_file {held}\n" if old else f"anon 5\ninactive_file {held}\n"
        (folder / "memory.stat").write_text(stat)
    return root


@pytest.mark.parametrize("spare", [0, 500_000_000])
def test_a_shortage_is_never_a_contradiction(spare: int) -> None:
    for size in (1, 10**6, 99_999_999, 10**8, 21_400_000_000, 21_449_999_999):
        for less in (1, 10**5, 10**8, size):
            said = describe_shortage(max(0, size - spare), max(0, size - less), spare=spare)
            *needed, free = map(float, re.findall(r"([\d.]+) GB", said))
            assert sum(needed) > free, said


def test_within_the_limit_of_a_container(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path / "bare")) == 16 * GIB
    assert available_memory(container(machine(tmp_path / "old"), 8 * GIB, 3 * GIB, GIB, old=True)) == 6 * GIB
    assert available_memory(container(machine(tmp_path / "free"), 1 << 62, 3 * GIB, GIB, old=True)) == 16 * GIB
    assert available_memory(container(machine(tmp_path / "a"), str(8 * GIB), 3 * GIB)) == 5 * GIB
    assert available_memory(container(machine(tmp_path / "b"), str(8 * GIB), 3 * GIB, held=GIB)) == 6 * GIB
    assert available_memory(container(machine(tmp_path / "c"), str(2 * GIB), 3 * GIB)) == 0
    assert available_memory(container(machine(tmp_path / "d"), "max", 3 * GIB)) == 16 * GIB
    assert available_memory(container(machine(tmp_path / "e", GIB), str(8 * GIB), 3 * GIB)) == GIB


def test_where_there_is_no_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf_names", {"SC_PHYS_PAGES": 1})
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}[name])
    assert available_memory(tmp_path) == 2_048_000
    monkeypatch.setattr("os.sysconf_names", {})
    assert available_memory(tmp_path) is None
    assert _in_unknown_system(machine(tmp_path)) is None


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_collection_is_afterwards_as_it_was_before_even_after_an_error(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with suppress(MupscaleError), pausing_garbage_collection():
            assert not gc.isenabled()
            raise MupscaleError("no such run")
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()


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
