"""Models of other libraries with twice as many blocks: each keeps its function, or is refused for the known reason."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import mupscale as mu
from deeper import NEVER_LEARN, ONE_DEPTH, REFUSED, deepened, difference, outputs, sentence, title
from mupscale.planning import in_double
from table import LIBRARIES, MODELS
from third_party import Model, twice_as_deep

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")  # of the libraries, about their own future
@pytest.mark.parametrize("model", [pytest.param(m, id=title(m)) for m in MODELS])
def test_the_function_stays_or_it_is_refused(model: Model) -> None:
    """Outputs to 1e-12, gradients of old blocks to 1e-9; what writes into the stream of a new block has a gradient."""
    if missing := [package for package in LIBRARIES[model.library] if find_spec(package) is None]:
        pytest.skip(f"{', '.join(missing)} not installed; make test-zoo installs it")
    if title(model) in REFUSED:
        with pytest.raises(mu.MupscaleError, match=REFUSED[title(model)][0]):
            deepened(model)
        return
    pair = deepened(model)
    assert (pair is None) == (title(model) in ONE_DEPTH)
    if pair is None:
        return
    shallow, deep, plan = pair
    batch = in_double(model.inputs())
    assert difference(shallow, deep, batch) < 1e-12
    for each in (shallow, deep):
        outputs(each, batch)[0].square().mean().backward()
    ours, theirs = dict(shallow.named_parameters()), dict(deep.named_parameters())
    for name, p in theirs.items():
        old = ours.get(plan.sources[name].name) if name in plan.sources else None
        if (
            old is not None
            and old.grad is not None
            and p.grad is not None
            and p.numel()
            and not plan.sources[name].is_new
        ):
            assert float((p.grad - old.grad).abs().max()) <= 1e-9 * (1 + float(old.grad.abs().max())), name
    trained = [theirs[n] for n, s in plan.sources.items() if s.kind == "silent" and theirs[n].requires_grad]
    learns = any(bool(p.grad.any()) for p in trained if p.grad is not None)
    assert learns == (bool(trained) and title(model) not in NEVER_LEARN)


def test_the_list_of_refusals_and_the_docs() -> None:
    """`python tests/zoo/deeper.py` prints what became of each model."""
    titles = {title(model) for model in MODELS}
    assert REFUSED.keys() <= titles
    assert titles >= ONE_DEPTH
    assert not REFUSED.keys() & ONE_DEPTH
    assert sentence() in (DOCS / "depth.md").read_text(encoding="utf-8")


def test_twice_as_deep() -> None:
    assert twice_as_deep({"depth": ((1, 2),), "dim": 3}) == {"depth": ((2, 4),), "dim": 3}
    assert twice_as_deep({"dim": 3, "stages": 2}) is None
