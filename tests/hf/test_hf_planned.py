"""Described or read off its modules: both answer the same questions, and which of the two is decided in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from mupscale import MupscaleError
from mupscale.hf.describe import DESCRIPTIONS, Times, architecture_of
from mupscale.hf.describe.described import Described
from mupscale.hf.describe.from_modules import FromModules

CONFIG = {"hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA, OTHER = ({**CONFIG, "model_type": name} for name in ("llama", "nobody"))


def test_the_description_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(architecture_of(LLAMA), Described)
    assert isinstance(architecture_of(OTHER), FromModules)
    monkeypatch.setitem(DESCRIPTIONS, "nobody", DESCRIPTIONS["llama"])
    assert isinstance(architecture_of(OTHER), Described)


def test_both_widen_the_same_fields_and_know_their_sizes() -> None:
    described, from_modules = architecture_of(LLAMA), architecture_of(OTHER)
    times = Times.of("hidden=2,ffn=3,heads=2")
    wide = {"hidden_size": 8, "intermediate_size": 18, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert described.wide_config(LLAMA, times) == {**LLAMA, **wide}
    assert from_modules.wide_config(OTHER, times) == {**OTHER, **wide}
    assert list(described.sizes(LLAMA).values()) == [4, 6, 2, 1, 2]
    assert from_modules.sizes(OTHER) == CONFIG


def test_a_description_needs_no_proof() -> None:
    described = architecture_of(LLAMA)
    described.check_unverified()
    described.check_too_large_to_train("9 GB")
    described.check_without_record(Path("wide"))
    described.check_constant_outputs(Path("small"))
    assert not described.evidence.required
    assert described.advice() == ""
    assert described.plan_to_record(LLAMA, Times.of(2), fresh=True) is None
    assert described.is_tied(LLAMA) is False
    assert described.wires_of("lm_head.weight", 2) == {1: "hidden"}


def test_what_is_read_off_modules_has_to_be_shown() -> None:
    from_modules = architecture_of(OTHER)
    with pytest.raises(MupscaleError, match="only verification shows whether it was widened correctly"):
        from_modules.check_unverified()
    with pytest.raises(MupscaleError, match=r"compared in training. That needs 9 GB of memory"):
        from_modules.check_too_large_to_train("9 GB")
    with pytest.raises(MupscaleError, match=r"there is no mupscale.json in wide, and 'nobody' is not described"):
        from_modules.check_without_record(Path("wide"))
    with pytest.raises(MupscaleError, match="the outputs of small are all alike"):
        from_modules.check_constant_outputs(Path("small"))
    with pytest.raises(MupscaleError, match="a description of 'nobody' that is not known here"):
        from_modules.plan_wide_parameters(OTHER, Times.of(2), {})
    assert from_modules.evidence.training_steps > 0
    assert "'nobody' is not described" in from_modules.advice()
    assert from_modules.is_tied(OTHER) is None
