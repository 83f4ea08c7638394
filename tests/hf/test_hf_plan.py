"""By how much a checkpoint grows, and the records of growths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mupscale import MupscaleError
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.multipliers import Times
from mupscale.hf.record import GrowthStep, Record, plan_growths

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 20, "num_attention_heads": 4, "head_dim": 4}


# Growth.


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (2, Times(2, 2, 2, 2)),
        ("3", Times(3, 3, 3, 3)),
        ("hidden=2,ffn=3,heads=2", Times(2, 3, 2, 2)),
        (" hidden = 2 , heads = 4 , kv = 2", Times(2, 1, 4, 2)),
        ("heads=2,kv=1", Times(1, 1, 2, 1)),
        ({"ffn": 2}, Times(1, 2, 1, 1)),
        (Times(ffn=5), Times(1, 5, 1, 1)),
    ],
)
def test_what_times_may_be(given_: Any, expected: Times) -> None:
    assert Times.of(given_) == expected
    assert Times.of(str(expected)) == expected


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (0, "hidden cannot grow 0 times"),
        (1.5, "hidden cannot grow 1.5 times"),
        (True, "hidden cannot grow True times"),
        ("1.5", "'1.5' is not a whole number"),
        ("-2", "'-2' is not a whole number"),
        ("hidden=2,ffn", "'' is not a whole number"),
        ("width=2", "names 'width', which does not grow"),
        ("heads=2,kv=3", r"cannot grow 3 times while heads grow 2 times.*\(kv=2\).*\(kv=1\)"),
        ("kv=2", "cannot grow 2 times while heads grow 1 times"),
        ("2" * 5 + "x", "not a whole number"),
    ],
)
def test_what_times_may_not_be(given_: Any, message: str) -> None:
    with pytest.raises(MupscaleError, match=message):
        Times.of(given_)


def test_growths_multiply() -> None:
    assert Times.of(2) * Times.of("ffn=3,heads=2,kv=1") == Times(2, 6, 4, 2)


@pytest.mark.quick("heads=2,kv=1-2")
@pytest.mark.parametrize("first", ["2", "heads=2,kv=1"])
@pytest.mark.parametrize("second", ["heads=2,kv=1", "ffn=3"])
def test_growing_twice_is_growing_once(first: str, second: str) -> None:
    """In a record that holds its plan, and in one that does not."""
    config = {**LLAMA, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 11, "tie_word_embeddings": True}
    one, two = (GrowthStep(Times.of(times)) for times in (first, second))
    middle = one.config_after(config)
    plans = [ConfigFamily(c).plan(step.times, initial=False) for c, step in ((config, one), (middle, two))]
    record = Record(config).then(one, plans[0]).then(two, plans[1])
    at_once = ConfigFamily(config).plan(one.times * two.times, initial=False)
    assert record.plan is not None
    assert record.plan.rules == at_once.rules == Record(config, (one, two)).whole_plan().rules
    assert two.config_after(middle) == ConfigFamily(config).wide_config(one.times * two.times)


def test_a_record_follows_more_layers() -> None:
    config = {**LLAMA, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 11}
    wider, deeper = GrowthStep(Times.of(2)), GrowthStep(Times(), layers=3)
    record = plan_growths([wider, deeper], config, None)[-1].record
    whole = Record(config, (wider, deeper)).whole_plan()
    assert record.plan is not None
    assert record.plan.parameters == whole.parameters


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"format": "mupscale.hf/2", "growths": [], "config": [], "plan": null}'],
    ids=["too deep", "no config"],
)
def test_a_record_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "mupscale.json").write_text(text)
    with pytest.raises(MupscaleError, match=r"is not a mupscale.json of this version .*Copy the one"):
        Record.load(tmp_path)
