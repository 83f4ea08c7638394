"""mupscale.hf.verify: what is equal passes in files, outputs and training, and what is not is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor

import mupscale as mu
from hf_files import edit, edit_json, plan_wrongly
from hf_models import build, grow, save, tiny
from mupscale import GaussianNoise, MupscaleError
from mupscale.core import Entry
from mupscale.hf.building import make_batches, memory_shortage, quiet_transformers, sketch_model
from mupscale.hf.source import open_source
from mupscale.hf.upscaling import upscale
from mupscale.hf.verifying import compare_outputs, load_pretrained, needed_bytes, verify
from refusals import refuses

Q = "model.layers.0.self_attn.q_proj.weight"
Pair = tuple[Path, Path]


def saved(folder: Path, *kind: Any, **config: Any) -> Path:
    save(folder, *kind, **config)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A LLaMA with grouped queries, and its double; not to be changed."""
    folder = tmp_path_factory.mktemp("pair")
    return saved(folder / "small"), grow(folder / "small", folder / "wide").path


@pytest.fixture
def wide(pair: Pair, tmp_path: Path) -> Path:
    """A copy of the double, to be changed."""
    return Path(shutil.copytree(pair[1], tmp_path / "wide"))


# What is equal


def test_equal_in_double_precision_over_training(pair: Pair) -> None:
    found = verify(*pair, dtype="float64", train=20)
    assert [row.what for row in found.rows] == ["tensors in the files", "logits", "outputs over 20 steps of AdamW"]
    assert found.ok
    assert found.first is None
    assert found.rows[0].difference == 0
    assert all(0 < row.difference < 1e-13 and row.tolerance == 1e-10 for row in found.rows[1:])
    assert found.verdict.startswith("equivalent")
    assert found.losses[0] == pytest.approx(found.losses[1], rel=1e-12)


def test_a_table_and_plain_text_and_nothing_of_transformers(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    found = verify(*pair)
    assert capfd.readouterr() == ("", "")
    assert [row.tolerance for row in found.rows[1:]] == [1e-4]
    for text in (found.table(), str(found)):
        assert "logits" in text
        assert "same" in text
    assert str(found).endswith(found.verdict)


@pytest.mark.quick("llama-ForSequenceClassification-*")
@pytest.mark.parametrize(
    ("name", "head", "outputs"),
    [
        ("llama", "Model", ["last_hidden_state"]),
        ("llama", "ForSequenceClassification", ["logits"]),
        ("gpt2", None, ["logits"]),
        ("bert", "Model", ["last_hidden_state", "pooler_output"]),
        ("bert", "ForPreTraining", ["prediction_logits", "seq_relationship_logits"]),
        ("bert", "ForQuestionAnswering", ["start_logits", "end_logits"]),
        ("bert", "ForMultipleChoice", ["logits"]),
        ("vit", "Model", ["last_hidden_state", "pooler_output"]),
        ("gemma", None, ["logits"]),
        ("mixtral", None, ["logits"]),
    ],
)
def test_every_output_of_every_head(name: str, head: str | None, outputs: list[str], tmp_path: Path) -> None:
    """And no auxiliary loss, as mixtures have."""
    torch.set_default_dtype(torch.float64)
    more = {"output_router_logits": True} if name == "mixtral" else {"num_labels": 2}
    small = saved(tmp_path / "small", name, head, torch.float64, **more)
    found = verify(small, grow(small, tmp_path / "wide").path, dtype="float64", train=3)
    assert found.ok, found
    assert [row.what for row in found.rows[1:-1]] == outputs
    assert found.rows[-1].difference < 1e-13


def test_saved_again_and_without_a_record(pair: Pair, wide: Path, tmp_path: Path) -> None:
    with quiet_transformers():
        load_pretrained(open_source(pair[1]), torch.float32)[0].save_pretrained(tmp_path / "again")
    shutil.copy(wide / "mupscale.json", tmp_path / "again")
    found = verify(pair[0], tmp_path / "again")
    assert found.ok
    assert found.rows[0].difference == 0
    (wide / "mupscale.json").unlink()  # then the configs tell
    assert verify(pair[0], wide, train=2).ok


# What is not


def swap_heads(tensors: dict[str, Tensor]) -> None:
    """Query heads copied one by one under grouped queries: static equality holds, training would diverge."""
    for layer in range(2):
        for name, dim in (("q_proj", 0), ("o_proj", 1)):
            weight = tensors[f"model.layers.{layer}.self_attn.{name}.weight"]
            heads = weight.unflatten(dim, (8, 4))  # two groups of two, each twice: 0 1 0 1 2 3 2 3
            order = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7])
            weight.copy_(heads.index_select(dim, order).flatten(dim, dim + 1))


UP = "model.layers.1.mlp.up_proj.weight"
EDITS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "a number": (lambda tensors: tensors[UP][3, 5].add_(0.01), UP),
    "not finite": (lambda tensors: tensors["model.norm.weight"][0].fill_(torch.nan), "model.norm.weight"),
    "heads that the outputs do not show": (swap_heads, Q.replace("q_proj", "o_proj")),
}


@pytest.mark.parametrize("what", EDITS)
def test_a_wrong_weight_is_named(what: str, pair: Pair, wide: Path) -> None:
    change, name = EDITS[what]
    edit(wide, change)
    found = verify(pair[0], wide)
    assert not found.ok
    assert found.first.name == name
    assert name in found.verdict
    assert "NOT equivalent" in found.verdict
    assert "DIFFERENT" in str(found)
    assert found.rows[1].ok == (change is swap_heads)


def test_a_plan_that_only_training_refutes(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, d in (("*.q_proj.weight", 0), ("*.o_proj.weight", 1)):
        plan_wrongly(monkeypatch, name, lambda e, d=d: replace(e, axes={**e.axes, d: replace(e.axes[d], block=4)}))
    found = verify(pair[0], grow(pair[0], tmp_path / "wide").path, dtype="float64", train=3)
    assert not found.ok
    assert [row.ok for row in found.rows] == [True, True, False]
    assert ".self_attn." in found.first.name
    assert "grouped-query" in found.first.advice


@pytest.mark.quick("*.lr-*", "*.eps-*")
@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        ("mupscale.core.rules.Rule.norm", lambda rule, p: 1.0),  # plain clipping
        ("mupscale.core.rules.Rule.eps", property(lambda rule: 1.0)),
        ("mupscale.core.rules.Rule.decoupled_decay", lambda rule, m: 1.0),
        ("mupscale.core.rules.Rule.lr", lambda rule, m: 1.0),
    ],
)
def test_training_shows_a_wrong_rule(where: str, wrong: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping binds, eps matters, and so does weight decay."""
    monkeypatch.setattr(where, wrong)
    found = verify(*pair, dtype="float64", train=3)
    assert [row.ok for row in found.rows] == [True, True, False]
    assert found.rows[-1].difference > 1e-6
    assert found.first is not None


def test_a_fold_that_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_wrongly(monkeypatch, "transformer.ln_f.*", lambda entry: entry.with_constants(fold=1))
    small = saved(tmp_path / "small", "gpt2")
    found = verify(small, grow(small, tmp_path / "wide").path)
    assert [row.ok for row in found.rows] == [True, False]
    assert found.first.name == "lm_head"
    assert "2 times what it should be" in found.first.advice


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_config_that_was_changed(noise: float, pair: Pair, tmp_path: Path) -> None:
    """Which noise does not hide."""
    wide = grow(pair[0], tmp_path / "wide", **({"noise": noise} if noise else {})).path
    edit_json(wide / "config.json", rms_norm_eps=0.5)
    found = verify(pair[0], wide)
    assert [row.ok for row in found.rows] == ([True, True, False] if noise else [True, False])
    assert found.first.name == "model.layers.0.input_layernorm"
    edit_json(wide / "config.json", tie_word_embeddings="no")
    refuses(r"^transformers refuses this config.json: .*'tie_word_embeddings': .+bool", verify, pair[0], wide)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hidden_size": 24}, "hidden_size 24"),
        ({"num_hidden_layers": 3}, "head_dim 4, layers 3"),
        ({"vocab_size": 31}, "'lm_head.weight' has shape (31, 16)"),
        ({"name": "gpt2"}, "the small one is a gpt2 model and the wide one a llama"),
    ],
)
def test_no_upscaled_version_of_it(config: dict[str, Any], says: str, pair: Pair, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", **config)
    error = refuses(r"not an upscaled version of the small one|do not belong together", verify, other, pair[1])
    assert says in error


def test_the_wrong_way_round(pair: Pair) -> None:
    refuses("is not an upscaled version of the small one: it has hidden_size 16", verify, pair[1], pair[0])


def test_other_weights_of_the_same_sizes(pair: Pair, tmp_path: Path) -> None:
    other = Path(shutil.copytree(pair[0], tmp_path / "other"))
    edit(other, lambda tensors: [t.mul_(1.5) for t in tensors.values()])
    found = verify(other, pair[1])
    assert not found.ok
    assert "SMALL is a different checkpoint" in found.first.advice


# Several growths, and noise


@pytest.mark.slow
def test_any_two_of_several_growths(pair: Pair, tmp_path: Path) -> None:
    middle = pair[1]
    last = grow(middle, tmp_path / "last", times="hidden=2,ffn=3,heads=2").path
    bare = Path(shutil.copytree(middle, tmp_path / "bare", ignore=shutil.ignore_patterns("mupscale.json")))
    for small in (middle, pair[0], bare):
        assert verify(small, last, train=2).ok


def test_noise_is_drawn_again_and_found(pair: Pair, tmp_path: Path) -> None:
    noisy = grow(pair[0], tmp_path / "noisy", noise=0.3, seed=4).path
    found = verify(pair[0], noisy, train=2)
    assert found.ok
    assert found.rows[0].difference < 1e-7
    assert 1e-3 < found.rows[1].difference < 1
    assert found.verdict.startswith("as recorded: the noise moves logits by ")
    assert [row.what for row in found.rows[2:]] == [
        "logits, without the noise",
        "outputs over 2 steps of AdamW, without the noise",
    ]
    strict = verify(pair[0], noisy, tolerance=1e-3)
    assert not strict.ok
    assert "DIFFERENT" in str(strict)
    record = json.loads((noisy / "mupscale.json").read_text())
    record["growths"][0]["seed"] = 5
    edit_json(noisy / "mupscale.json", growths=record["growths"])
    assert not verify(pair[0], noisy).ok


def test_noise_hides_nothing_of_a_wrong_plan(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_one_piece = lambda e: replace(e, axes={**e.axes, 0: replace(e.axes[0], block=8)})  # noqa: E731
    plan_wrongly(monkeypatch, "*.[kv]_proj.weight", in_one_piece)
    with pytest.raises(MupscaleError, match="was not kept: NOT equivalent: logits, without the noise differ") as error:
        upscale(pair[0], tmp_path / "noisy", noise=0.1, progress=False)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_noise_on_the_way(pair: Pair, tmp_path: Path) -> None:
    noisy = grow(pair[0], tmp_path / "noisy", noise=GaussianNoise(0.01, unit="theory")).path
    last = grow(noisy, tmp_path / "last").path
    after = verify(noisy, last, train=2)
    assert after.ok
    assert not after.as_recorded
    both = verify(pair[0], last)
    assert both.ok
    assert both.as_recorded
    edit(last, lambda tensors: tensors[Q].mul_(1.001))
    assert not verify(pair[0], last).ok


# Precision of the files


@pytest.mark.quick("dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """Compared as they are, and before rounding; a small change is named."""
    small = saved(tmp_path / "small", dtype=dtype)
    wide = grow(small, tmp_path / "wide", times=3).path
    found = verify(small, wide, dtype="float64", train=2)
    assert found.ok, found
    off = {row.what: row for row in found.rows}
    assert found.rows[0].difference == 0
    assert 1e-5 < off["logits"].difference < off["logits"].tolerance
    assert off["logits, before rounding"].difference < 1e-10
    assert off["outputs over 2 steps of AdamW, before rounding"].difference < 1e-10
    edit(wide, lambda tensors: tensors[Q][2, 3].mul_(1.5))
    found = verify(small, wide)
    assert found.first.name == Q


@pytest.mark.slow
def test_the_smallest_numbers_of_float16_lose_bits(tmp_path: Path) -> None:
    small = saved(tmp_path / "small", dtype=torch.float16)
    edit(small, lambda tensors: [t.mul_(0.003) for t in tensors.values()])
    found = verify(small, grow(small, tmp_path / "wide").path, dtype="float64", train=3)
    assert found.ok, found
    assert 1e-9 < found.rows[1].difference < found.rows[1].tolerance < 1e-3


@pytest.mark.slow
def test_other_dtypes_on_the_way(pair: Pair, tmp_path: Path) -> None:
    """Rounded to less, and raised: a factor of a third rounds in every dtype."""
    wide = grow(pair[0], tmp_path / "wide", dtype="bfloat16", noise=0.1).path
    assert verify(pair[0], wide).rows[0].difference == 0
    found = verify(pair[0], grow(pair[0], tmp_path / "exact", dtype="bfloat16").path)
    assert found.ok, found
    assert 1e-4 < found.rows[1].difference < found.rows[1].tolerance < 0.1
    more = grow(wide, tmp_path / "more", times=3, dtype="float32").path
    assert verify(wide, more).ok
    assert verify(pair[0], more).ok
    raised = verify(pair[0], grow(pair[0], tmp_path / "raised", times=3, dtype="float64", noise=0.1).path)
    assert raised.ok, raised
    assert raised.rows[0].difference < 1e-7
    triple = verify(pair[0], grow(pair[0], tmp_path / "triple", times=3).path, dtype="float64", train=5)
    assert triple.ok, triple
    assert triple.rows[1].tolerance < 1e-5


# Text, models and memory


def add_tokenizer(folder: Path, size: int = 29) -> None:
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_text_through_the_checkpoints_tokenizer(pair: Pair, tmp_path: Path) -> None:
    small = Path(shutil.copytree(pair[0], tmp_path / "small"))
    add_tokenizer(small)
    text = tmp_path / "text.txt"
    text.write_text("w3 w4 w5 w6 w7")
    model = load_pretrained(open_source(small), torch.float32)[0]
    (batch,) = make_batches(model, 1, 4, rows=2, text=text.read_text(), folder=small)
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6], [7, 3, 4, 5]]
    assert verify(small, pair[1], text=text).ok
    refuses("no-such", verify, small, pair[1], text=tmp_path / "no-such.txt")
    refuses("has no tokenizer that transformers can load", verify, *pair, text=text)
    add_tokenizer(small, 40)
    text.write_text("w39 w38")
    refuses("gives token 39, and the model's vocabulary has 29", verify, small, pair[1], text=text)


def test_random_batches_depend_on_the_seed_and_avoid_padding() -> None:
    model = build(tiny("llama", pad_token_id=3)[0])
    one, again, other = (make_batches(model, 3, 100, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0]["input_ids"], other[0]["input_ids"])
    assert not torch.equal(one[0]["input_ids"], one[1]["input_ids"])
    assert one[0]["input_ids"].shape == (2, 20)  # as far as there are positions
    assert not any((batch["input_ids"] == 3).any() for batch in one)
    model.config.vocab_size = 0  # as a damaged file has it
    refuses("a vocabulary of 0, but needs at least one token", make_batches, model)


@pytest.mark.slow
def test_what_the_model_does_not_use_is_told(tmp_path: Path) -> None:
    small = saved(tmp_path / "small", "bert", "ForPreTraining")
    edit_json(small / "config.json", architectures=["BertForMaskedLM"])
    found = verify(small, grow(small, tmp_path / "wide").path)
    assert found.ok
    assert "which BertForMaskedLM does not use" in found.verdict
    unused = load_pretrained(open_source(small), torch.float32)[1]
    assert len(unused) == 4
    assert "bert.pooler.dense.bias" in unused


def test_no_parameter_is_ever_left_to_chance(pair: Pair, tmp_path: Path) -> None:
    small = Path(shutil.copytree(pair[0], tmp_path / "small"))
    edit(small, lambda tensors: tensors.pop(Q))
    refuses(rf"lacks '{Q}'.*random", load_pretrained, open_source(small), torch.float32)
    edit(small, lambda tensors: tensors.update({Q: torch.zeros(8, 16)}))
    refuses(str(small), load_pretrained, open_source(small), torch.float32)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"architectures": ["LlamaForNothing"]}, "the class 'LlamaForNothing' is not known to transformers"),
        ({"model_type": "nobody", "auto_map": {"AutoConfig": "mine.C"}}, "the checkpoint's own code"),
        ({"model_type": "nobody"}, r"model_type 'nobody' is not known to transformers .* mupscale\.upscale\(narrow"),
    ],
)
def test_configs_that_name_no_model(fields: dict[str, Any], says: str, pair: Pair) -> None:
    refuses(says, sketch_model, {**open_source(pair[0]).config, **fields})


def test_a_sketch_has_no_memory_and_is_tied() -> None:
    config = tiny("gpt2")[0].to_dict()
    sketch: Any = sketch_model(config)
    assert all(p.is_meta for p in sketch.parameters())
    assert sketch.lm_head.weight is sketch.transformer.wte.weight
    without = {k: v for k, v in config.items() if k != "architectures"}
    assert type(sketch_model(without)) is type(sketch)


def test_double_precision_reaches_the_buffers(tmp_path: Path) -> None:
    small = open_source(saved(tmp_path / "small", "gemma", hidden_size=24))
    model = load_pretrained(small, torch.float64)[0]
    assert float(model.get_buffer("model.embed_tokens.embed_scale")) == 24**0.5
    assert all(p.dtype == torch.float64 for p in model.parameters())


def test_too_large_for_the_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    small, wide = map(open_source, pair)
    numbers = sum(t.numel for source in (small, wide) for t in source.tensors.values())
    assert needed_bytes(small, wide, "float64", train=1) == 5 * 8 * numbers
    assert not memory_shortage(1000)
    monkeypatch.setattr("mupscale.system.available_memory", lambda: 600_000_000)
    assert verify(*pair).ok
    monkeypatch.setattr("mupscale.system.available_memory", lambda: 100_000_000)
    refuses(r"takes 0\.1 GB of memory, beside 0\.5 GB for everything else, and 0\.1 GB are free", verify, *pair)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dtype": "bfloat16"}, "in float32 or float64, not in bfloat16"),
        ({"train": -1}, "nothing to compare in 64 tokens and -1 steps"),
        ({"tolerance": -1.0}, "must be 0 or more"),
    ],
)
def test_what_nothing_is_compared_by(given: dict[str, Any], says: str, pair: Pair) -> None:
    refuses(says, verify, *pair, **given)


class Gives(torch.nn.Module):
    """A hidden state, whatever it is given."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": self.hidden}


def test_hidden_states_are_compared_in_the_order_of_their_copies() -> None:
    """WavLM reads its hidden units head by head, so that whole heads of them are copied."""
    axes = {d: mu.Axis(2, block=2, side=side) for d, side in ((0, "out"), (1, "in"))}
    plan = mu.Plan({"weight": Entry((4, 4), (8, 8), axes)})
    hidden = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    models = Gives(hidden), Gives(mu.expand(hidden, {1: axes[0]}))
    assert compare_outputs(*models, [{"x": hidden}], plan=plan).differences == {"hidden": 0.0}
    assert compare_outputs(*models, [{"x": hidden}]).differences["hidden"] > 0.1
