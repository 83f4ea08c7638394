"""What many tests share: float64 for exactness, pictures without pixels, the same examples each time."""

import math
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# The same examples on every machine, and no limit by the clock; `pytest --hypothesis-profile=default` draws others.
settings.register_profile("same-examples", derandomize=True, deadline=None, database=None)
settings.load_profile("same-examples")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow the cases that their test's mark `quick` does not name."""
    found: dict[tuple[str, str], bool] = defaultdict(bool)
    for item in items:
        if mark := item.get_closest_marker("quick"):
            case = item.callspec.id  # type: ignore[attr-defined]
            matching = {pattern: fnmatchcase(case, pattern) for pattern in mark.args}
            for pattern, matches in matching.items():
                found[item.nodeid.partition("[")[0], pattern] |= matches
            if not any(matching.values()):
                item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args):  # else not all cases are here
        for (test, pattern), matches in found.items():
            if not matches:
                raise pytest.UsageError(f"{test} is marked quick({pattern!r}), and has no such case")


@pytest.fixture(autouse=True, scope="session")
def _no_lines_by_the_clock() -> Iterator[None]:
    """A line that tells how far a long run is would come on a busy machine alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mupscale.system.terminal.SECONDS_BETWEEN_LINES", math.inf)
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def float64() -> Iterator[None]:
    """float64 everywhere: optimizers keep their scalar state (ASGD's eta, step) in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def pictures_without_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are laid out, and every part of them is asked to draw itself, but no pixel is set."""
    from matplotlib.figure import Figure

    def save(self: Figure, path: Path, format: str, **_: Any) -> None:
        if format == "svg":
            path.write_text("<svg/>")
        else:
            self.draw_without_rendering()
            path.write_bytes(b"\x89PNG")

    monkeypatch.setattr(Figure, "savefig", save)
