"""Models of other libraries, as they are: each widens exactly over training steps, or is refused for the known reason.

The libraries are installed by `make test-zoo`, which runs this file; models of those that are missing are skipped.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import mupscale as mu
from exactness import assert_exact
from mupscale.planning import KeepDouble, in_double
from table import LIBRARIES, MODELS, counts, rows
from third_party import Model

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "third-party-models.md", DOCS / "third-party-table.md"]


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")  # of the libraries, about their own future
@pytest.mark.parametrize("model", [pytest.param(m, id=f"{m.library}: {m.name}") for m in MODELS])
def test_exact_over_training_steps_or_refused(model: Model) -> None:
    missing = [package for package in LIBRARIES[model.library] if find_spec(package) is None]
    if missing:  # what is there and fails to be imported is an error
        pytest.skip(f"{', '.join(missing)} not installed; make test-zoo installs it")
    torch.manual_seed(0)
    narrow, wide, inputs = model.build(1).double(), model.build(2).double(), in_double(model.inputs())
    if model.refused:
        with pytest.raises(mu.MupscaleError, match=model.refused):
            mu.plan(narrow, wide, inputs=inputs)
        return
    plan = mu.plan(narrow, wide, inputs=inputs)
    with KeepDouble():  # where a model casts to float32 inside
        assert_exact(narrow, wide, plan, inputs)


def test_the_pages_have_the_tables() -> None:
    """`python tests/zoo/table.py` prints what has to be there."""
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    missing = [row for row in (*counts(), *rows()) if row not in lines]
    assert not missing, "docs/third-party-*.md lack\n" + "\n".join(missing)
    of_the_tables = [line for line in lines if line.startswith("| ") and line.endswith(" |")]
    assert len(of_the_tables) == len(rows()) + len(counts()) + 4, "docs/third-party-*.md have rows of their own"


def test_the_table_is_large_and_mostly_exact() -> None:
    assert len({(model.library, model.name) for model in MODELS}) == len(MODELS) >= 100
    assert sum(model.library == "timm" for model in MODELS) >= 20
    assert all(bool(model.refused) == bool(model.why) for model in MODELS)
    assert sum(not model.refused for model in MODELS) >= 0.85 * len(MODELS)
