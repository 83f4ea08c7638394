"""Checkpoints grown by fresh units, from folder to folder: the bits that growth in memory gives, records, training."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hf_models as models
import mupscale as mu
from hf_files import edit_json, read_checkpoint, write_llama
from mupscale import Axis, Fresh, MupscaleError, Plan, hf
from mupscale.core import index_of_old, places
from mupscale.hf import param_groups, stream, upscale, verify
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.config_fields import Times, times_to
from mupscale.hf.record import GrowthStep, Record
from mupscale.hf.source import open_source
from mupscale.hf.upscaling import Upscaled
from mupscale.planning import relative_difference
from refusals import refuses
from slow_cases import with_slow

LARGER = {"hidden": 24, "ffn": 30, "heads": 6}
OPERATORS = {
    "fresh": mu.Fresh(),
    "half": mu.Fresh(outgoing=0.5),
    "lossless": mu.Fresh(lossless=True),
    "trained": mu.Fresh(spread="trained"),
}


def grow(source: Path, out: Path, operator: mu.Operator | None = None, **options: Any) -> Upscaled:
    """Without the comparison, to the larger sizes unless others are asked for."""
    sizes = {} if options.keys() & {*LARGER, "kv", "times"} else LARGER
    operator = mu.Fresh() if operator is None else operator
    given: dict[str, Any] = {"verify": False, "progress": False, **sizes, **options}
    return hf.upscale(source, out, grow=operator, exact=operator == mu.Copies(), **given)


def load(folder: Path) -> nn.Module:
    config = json.loads((folder / "config.json").read_text())
    return getattr(transformers, config["architectures"][0]).from_pretrained(folder)


def in_memory(small: nn.Module, folder: Path, operator: mu.Fresh, seed: int, name: str) -> nn.Module:
    """The wide model of a folder's config, grown from the small one that is loaded."""
    config = small.config.to_dict()  # type: ignore[union-attr, operator]
    times = Record.load(folder).growths[-1].times
    wide = models.build(json.loads((folder / "config.json").read_text()))
    plan = ConfigFamily({**config, "architectures": [type(small).__name__]}).plan(times)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mu.upscale(small, wide, plan, grow=operator, seed=seed)[0]


# The same bits as in memory.


@pytest.mark.quick("gpt2-lossless", "gpt2-half")
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", with_slow(["llama", "gpt2", "gemma2", "opt", "bert", "phi"], ["gpt2", "gemma2"]))
def test_what_is_streamed_is_what_growth_in_memory_gives(tmp_path: Path, name: str, operator: str) -> None:
    """LayerNorms and RMSNorms, tied and untied, packed and not."""
    small = models.save(tmp_path / "small", name, **({"n_inner": 20} if name == "gpt2" else {}))
    grow(tmp_path / "small", tmp_path / "wide", OPERATORS[operator], seed=3)
    wide = in_memory(small, tmp_path / "wide", OPERATORS[operator], 3, name)
    files = read_checkpoint(tmp_path / "wide")
    own = wide.state_dict()
    assert files
    for tensor, value in files.items():
        assert torch.equal(value, own[tensor]), tensor


@pytest.mark.quick("lossless-dtype1", "half-dtype2")
@pytest.mark.parametrize(
    "dtype", with_slow([torch.float64, torch.float32, torch.bfloat16, torch.float16], [torch.float32, torch.bfloat16])
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_pieces_shards_and_threads_do_not_matter(
    tmp_path: Path, operator: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "small", dtype)
    sizes = {"hidden": 24, "heads": 6, "ffn": 13}
    grow(tmp_path / "small", tmp_path / "whole", OPERATORS[operator], threads=1, **sizes)
    monkeypatch.setattr(stream, "_PIECE", 50)
    grow(tmp_path / "small", tmp_path / "cut", OPERATORS[operator], threads=3, shard_size="2KB", **sizes)
    whole, cut = read_checkpoint(tmp_path / "whole"), read_checkpoint(tmp_path / "cut")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1
    assert all(torch.equal(whole[name], cut[name]) and whole[name].dtype == dtype for name in whole)


@pytest.mark.slow
def test_the_means_of_a_layer_norms_units_do_not_depend_on_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.save(tmp_path / "small", "phi")
    grow(tmp_path / "small", tmp_path / "whole", mu.Fresh(lossless=True))
    monkeypatch.setattr(stream, "_PIECE", 7)
    grow(tmp_path / "small", tmp_path / "cut", mu.Fresh(lossless=True), threads=2)
    whole, cut = read_checkpoint(tmp_path / "whole"), read_checkpoint(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_row_of_padding_stays_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = models.save(tmp_path / "small")
    with torch.no_grad():
        small.model.embed_tokens.weight[5] = 0.0  # type: ignore[union-attr, operator, index]
    small.save_pretrained(tmp_path / "small")  # type: ignore[operator]
    monkeypatch.setattr(stream, "_PIECE", 10)
    grow(tmp_path / "small", tmp_path / "wide")
    table = read_checkpoint(tmp_path / "wide")["model.embed_tokens.weight"]
    assert [i for i, row in enumerate(table) if bool((row == 0).all())] == [5]


def test_new_units_have_the_spread_of_a_fresh_model_at_the_wide_width(tmp_path: Path) -> None:
    """Measured on the files, against transformers' own initialisation of the small model and μP's factor."""
    config = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.05, "num_hidden_layers": 1}
    torch.manual_seed(0)
    models.save(tmp_path / "small", **config)
    grow(tmp_path / "small", tmp_path / "wide", hidden=96, ffn=150, heads=6)
    fresh = dict(models.build(models.tiny("llama", **config)[0]).named_parameters())
    plan = hf.plan(tmp_path / "wide", load(tmp_path / "wide"))
    for name, p in read_checkpoint(tmp_path / "wide").items():
        entry = plan[name]
        new = torch.ones(entry.wide, dtype=torch.bool)
        new[index_of_old(entry.narrow, entry.axes)] = False
        count = int(new.sum())
        if p.dim() == 1:
            assert bool((p[new] == 1).all())
        else:
            expected = float(fresh[name].detach().std()) * entry.init
            slack = 6 / math.sqrt(2 * min(count, fresh[name].numel()))
            assert float(p[new].std()) == pytest.approx(expected, rel=slack), name


# Configs and records.


def test_what_comes_out(tmp_path: Path) -> None:
    models.save(tmp_path / "small")
    made = grow(tmp_path / "small", tmp_path / "wide", mu.Fresh(outgoing=0.5), seed=7)
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    fields = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [config[name] for name in fields] == [24, 30, 6, 3, 4]
    (step,) = json.loads((tmp_path / "wide" / "mupscale.json").read_text())["growths"]
    assert (step["how"], step["outgoing"], step["lossless"], step["seed"]) == ("fresh", 0.5, False, 7)
    assert step["sizes"]["hidden_size"] == 24
    assert step["times"]["hidden"] == "3/2"
    half = Fraction(3, 2)
    assert Record.load(tmp_path / "wide").growths == (
        GrowthStep(Times(half, half, half, half, fresh=True), mu.Fresh(0.5), seed=7),
    )
    assert "fresh units (hidden 16 → 24, ffn 20 → 30, heads 4 → 6, kv 2 → 3)" in str(made)
    assert load(tmp_path / "wide").config.hidden_size == 24  # type: ignore[union-attr]


def test_a_record_of_an_operator_that_is_not_known_is_refused() -> None:
    copies = GrowthStep(Times.of(2), mu.Copies(0.5), 1)
    assert GrowthStep.from_json(copies.to_json()) == copies
    with pytest.raises(ValueError, match="'magic', which this version does not know"):
        GrowthStep.from_json({**copies.to_json(), "how": "magic"})


def test_sizes_of_copies_and_multipliers_of_fresh_units(tmp_path: Path) -> None:
    models.save(tmp_path / "small")
    sized = grow(tmp_path / "small", tmp_path / "a", mu.Copies(), hidden=32, heads=8)
    assert (type(sized.times), sized.times) == (Times, Times(2, 1, 2, 2))
    doubled = grow(tmp_path / "small", tmp_path / "b", times="hidden=2,heads=2")
    assert doubled.times == Times(2, 1, 2, 2, fresh=True)
    assert hf.verify(tmp_path / "small", tmp_path / "a").ok


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rotary": (
        {"model": "gpt_neox", "hidden": 48},
        "head_dim is hidden_size / num_attention_heads here, and it must stay",
    ),
    "narrower": ({"hidden": 8}, "hidden=8 is smaller than the model"),
    "no multiple": (
        {"hidden": 24, "heads": 6, "grow": None, "exact": True},
        r"^hidden=24 is not a whole .*: grow=mupscale\.Fresh\(\)$",
    ),
    "both": ({"hidden": 24, "times": 2}, "give either how much it grows"),
    "noise": ({"hidden": 24, "noise": 0.5}, "noise= and grow= exclude each other"),
    "divide": (
        {"hidden": 25, "heads": 6},
        r"transformers refuses .*hidden size \(25\) is not a multiple",
    ),
    "a word": ({"grow": "fresh"}, "grow= is 'fresh', but must be an operator of width"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_sentence_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    options, message = REFUSED[case]
    options = {"grow": mu.Fresh(), "progress": False, **options}
    models.save(tmp_path / "small", options.pop("model", "llama"))
    file = tmp_path / "small" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options.pop("config", {})}))
    error = refuses(message, hf.upscale, tmp_path / "small", tmp_path / "wide", **options)
    assert "\n" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


# Verification.


def change(folder: Path, name: str, how: Callable[[Tensor], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    how(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_verify_tells_how_far_the_new_units_move_the_outputs(tmp_path: Path) -> None:
    models.save(tmp_path / "small")
    made = grow(tmp_path / "small", tmp_path / "wide", verify=True)
    assert made.comparison.ok
    rows = {row.what: row for row in made.comparison.rows}
    assert rows["old weights in the files"].difference == 0
    assert rows["old weights in the files"].tolerance == 0
    assert rows["new units in the files"].difference == 0
    assert rows["logits"].difference > 0.01
    assert rows["logits, new units silent"].difference < 1e-5
    assert "they move logits by" in made.comparison.verdict
    again = hf.verify(tmp_path / "small", tmp_path / "wide", dtype="float64", train=3)
    assert again.ok
    assert "Training is not compared" in again.verdict
    assert {row.what: row for row in again.rows}["logits, new units silent"].difference < 1e-12
    assert not hf.verify(tmp_path / "small", tmp_path / "wide", tolerance=1e-3).ok


@pytest.mark.quick("llama")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_verify_of_a_lossless_growth(tmp_path: Path, name: str) -> None:
    models.save(tmp_path / "small", name, **({"n_inner": 20} if name == "gpt2" else {}))
    made = grow(tmp_path / "small", tmp_path / "wide", mu.Fresh(lossless=True), verify=True)
    rows = {row.what: row for row in made.comparison.rows}
    assert rows["logits"].difference < 1e-3
    assert rows["logits, eps scaled"].difference < 1e-5
    assert "lossless: logits move by" in made.comparison.verdict


@pytest.mark.slow
def test_what_is_compared_is_not_called_untried(tmp_path: Path) -> None:
    """Outputs with silent units are compared, and there are no inputs= to pass to a command."""
    models.save(tmp_path / "small")
    with warnings.catch_warnings():
        warnings.simplefilter("error", mu.UncheckedPlan)
        assert grow(tmp_path / "small", tmp_path / "wide", verify=True).comparison is not None
        assert hf.verify(tmp_path / "small", tmp_path / "wide").ok


@pytest.mark.slow
def test_silent_units_that_no_norm_reads_change_nothing(tmp_path: Path) -> None:
    models.save(tmp_path / "small", "bert")
    made = grow(tmp_path / "small", tmp_path / "wide", mu.Fresh(outgoing=0.0), ffn=27, verify=True)
    assert [row.tolerance for row in made.comparison.rows if row.what == "logits"] == [1e-4]
    assert "logits are the same" in made.comparison.verdict


@pytest.mark.quick("olmo2-*")
@pytest.mark.parametrize(
    ("name", "why"), [("bert", "a norm comes after a sum"), ("olmo2", "is over heads, old and new")]
)
def test_where_it_cannot_be_lossless_verify_says_so(tmp_path: Path, name: str, why: str) -> None:
    models.save(tmp_path / "small", name)
    made = grow(tmp_path / "small", tmp_path / "wide", mu.Fresh(lossless=True), verify=True)
    assert made.comparison.ok
    assert why in made.comparison.verdict
    assert "it is not lossless" in made.comparison.verdict
    unverified = grow(tmp_path / "small", tmp_path / "unverified", mu.Fresh(lossless=True)).unverified
    assert "it is not lossless, since" in unverified
    assert why in unverified


def test_what_the_norms_eps_moves_far_is_not_called_lossless(tmp_path: Path) -> None:
    """Gemma 3 has norms behind its sublayers, whose outputs are as small as their eps before training."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 29, "head_dim": 4}
    config = transformers.Gemma3TextConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path / "small")
    made = grow(tmp_path / "small", tmp_path / "wide", mu.Fresh(lossless=True), verify=True)
    rows = {row.what: row for row in made.comparison.rows}
    assert rows["logits"].difference > 0.01
    assert rows["logits, eps scaled"].difference < 1e-5
    assert "it is not lossless, since activations are small compared with the norms' eps" in made.comparison.verdict


@pytest.mark.slow
def test_a_feed_forward_layer_of_the_residual_streams_size(tmp_path: Path) -> None:
    """A run tells its new units from those of the stream."""
    models.save(tmp_path / "small", "gpt2", n_inner=16)
    made = grow(tmp_path / "small", tmp_path / "wide", mu.Fresh(lossless=True), hidden=24, heads=6, ffn=24, verify=True)
    assert "lossless: logits move by" in made.comparison.verdict


UP = "model.layers.0.mlp.up_proj.weight"
DAMAGE: dict[str, tuple[mu.Fresh, Callable[[Path], None], str]] = {
    "one bit of an old weight": (
        mu.Fresh(),
        lambda wide: change(wide, UP, lambda t: t[0, 0].copy_(torch.nextafter(t[0, 0], torch.tensor(9.0)))),
        "old weights in the files",
    ),
    "new units of another spread": (  # every third unit is new
        mu.Fresh(),
        lambda wide: change(wide, "lm_head.weight", lambda t: t[:, 2::3].mul_(2)),
        "new units in the files",
    ),
    "other rotary frequencies": (
        mu.Fresh(lossless=True),
        lambda wide: edit_json(wide / "config.json", rope_parameters={"rope_theta": 3.0, "rope_type": "default"}),
        "logits, eps scaled",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_was_changed_shows(what: str, tmp_path: Path) -> None:
    operator, damage, row = DAMAGE[what]
    models.save(tmp_path / "small", num_key_value_heads=4)
    grow(tmp_path / "small", tmp_path / "wide", operator)
    damage(tmp_path / "wide")
    found = hf.verify(tmp_path / "small", tmp_path / "wide")
    assert [each.what for each in found.rows if not each.ok] == [row]
    assert (UP in found.verdict) == (what == "one bit of an old weight")


@pytest.mark.slow
def test_bfloat16(tmp_path: Path) -> None:
    models.save(tmp_path / "small")
    for number, operator in enumerate(OPERATORS.values()):
        made = grow(tmp_path / "small", tmp_path / f"{number}", operator, dtype="bfloat16", verify=True)
        assert made.comparison.ok


def test_hidden_states_are_compared_by_their_old_units(tmp_path: Path) -> None:
    models.save(tmp_path / "small", head="Model")
    made = grow(tmp_path / "small", tmp_path / "wide", mu.Fresh(lossless=True), verify=True)
    assert {row.what for row in made.comparison.rows} >= {"last_hidden_state, eps scaled"}


@pytest.mark.slow
def test_grown_twice(tmp_path: Path) -> None:
    """Fresh units, then copies; rates count from the first model, and each step is verified."""
    models.save(tmp_path / "small")
    grow(tmp_path / "small", tmp_path / "middle", seed=1)
    grow(tmp_path / "middle", tmp_path / "wide", mu.Copies(0.1), times=2)
    record = Record.load(tmp_path / "wide")
    assert record.times == Times(3, 3, 3, 3, fresh=True)
    assert [growth.fresh for growth in record.growths] == [mu.Fresh(), None]
    assert hf.verify(tmp_path / "middle", tmp_path / "wide").ok
    found = hf.verify(tmp_path / "small", tmp_path / "wide")
    assert found.ok
    assert "it grew several times" in found.verdict
    groups = hf.param_groups(tmp_path / "wide", load(tmp_path / "wide"), torch.optim.AdamW, lr=0.3)
    assert {round(group["lr"], 12) for group in groups} == {0.3, 0.1}


# Training on.


def test_groups_are_those_of_copies(tmp_path: Path) -> None:
    """By which operator a model grew is nothing that its rates know of."""
    models.save(tmp_path / "small", tie_word_embeddings=True)
    grow(tmp_path / "small", tmp_path / "fresh", times=2)
    grow(tmp_path / "small", tmp_path / "copies", mu.Copies(), times=2)
    groups = []
    for folder in ("fresh", "copies"):
        model = load(tmp_path / folder)
        made = hf.param_groups(tmp_path / folder, model, torch.optim.AdamW, lr=0.1, weight_decay=0.1, eps=1e-3)
        names = {id(p): name for name, p in model.named_parameters()}
        groups.append([{**g, "params": [names[id(p)] for _, p in g["params"]]} for g in made])
    assert groups[0] == groups[1]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> float:
    tokens = torch.randint(0, models.VOCAB, (4, 12), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.quick("True-AdamW-*", "True-Adafactor-*")
@pytest.mark.parametrize(
    ("cls", "hyper"),
    [
        (torch.optim.AdamW, {"lr": 1e-2}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.25}),
        (torch.optim.Adafactor, {"lr": 1e-2}),
    ],
)
@pytest.mark.parametrize("lossless", with_slow([False, True], [True]))
def test_the_optimizers_old_state_is_carried_and_new_state_is_fresh(
    tmp_path: Path, cls: type[torch.optim.Optimizer], hyper: dict[str, float], lossless: bool
) -> None:
    """To the bit what growth in memory gives, and it trains on."""
    small = models.save(tmp_path / "small", "gpt2", n_inner=20)
    optimizer = cls(small.named_parameters(), **hyper)  # type: ignore[call-arg, arg-type]
    trained(small, optimizer)
    small.save_pretrained(tmp_path / "small")  # type: ignore[operator]
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    operator = mu.Fresh(lossless=lossless)
    grow(tmp_path / "small", tmp_path / "wide", operator, optimizer=tmp_path / "optimizer.pt")
    wide = load(tmp_path / "wide")
    resumed = hf.resume_optimizer(tmp_path / "wide", wide, cls)
    plan = hf.plan(tmp_path / "wide", wide)
    built = models.build(json.loads((tmp_path / "wide" / "config.json").read_text()))
    _, expected = mu.upscale(small, built, plan, optimizer, grow=operator)
    theirs = {name: expected.state[p] for name, p in built.named_parameters()}
    for name, p in wide.named_parameters():
        assert resumed.state[p].keys() == theirs[name].keys()
        for key, value in theirs[name].items():
            assert torch.equal(torch.as_tensor(resumed.state[p][key]), torch.as_tensor(value)), (name, key)
    assert math.isfinite(trained(wide, resumed))


@pytest.mark.slow
def test_lossless_growth_goes_on_without_a_spike(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = models.save(tmp_path / "small")
    optimizer = torch.optim.AdamW(small.named_parameters(), lr=3e-3)
    before = trained(small, optimizer, 60)
    small.save_pretrained(tmp_path / "small")  # type: ignore[operator]
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    grow(tmp_path / "small", tmp_path / "wide", mu.Fresh(lossless=True), optimizer=tmp_path / "optimizer.pt")
    wide = load(tmp_path / "wide")
    resumed = hf.resume_optimizer(tmp_path / "wide", wide, torch.optim.AdamW)
    losses = [trained(wide, resumed, 1) for _ in range(10)]
    assert max(losses) <= before * 1.001
    assert losses[-1] < losses[0]


SOUND: dict[str, Any] = {"conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "vocab_size": 29}
REFUSED_BY_A_RUN: dict[str, tuple[str, dict[str, Any], str]] = {
    "a norm of a weight": (
        "HubertModel",
        {**SOUND, "num_hidden_layers": 1, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
        r"up to 'feature_projection.projection', and 'encoder.layer_norm' is the first .*weight_norm.*Grow by copies",
    ),
    "a rounded constant": (
        "RecurrentGemmaForCausalLM",
        {
            "num_hidden_layers": 3,
            "hidden_size": 40,
            "lru_width": 40,
            "num_key_value_heads": 1,
            "attention_window_size": 8,
        },
        r"first to differ \(by \d.\de-0\d\)\. A difference this small .* bfloat16\. Grow hidden 4 times",
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mupscale.UncheckedPlan")
@pytest.mark.parametrize("case", REFUSED_BY_A_RUN)
def test_where_silent_units_change_the_function_is_said_with_a_way_out(case: str, tmp_path: Path) -> None:
    kind, config, said = REFUSED_BY_A_RUN[case]
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    models.randomised(cls(cls.config_class(**{**SIZES, **config}))).save_pretrained(tmp_path / "small")  # type: ignore[operator]
    refuses(said, hf.upscale, tmp_path / "small", tmp_path / "wide", times=2, grow=mu.Fresh(), progress=False)
    way: dict[str, Any] = {"times": 2, "noise": 0.1} if kind == "HubertModel" else {"times": 4, "grow": mu.Fresh()}
    assert hf.upscale(tmp_path / "small", tmp_path / "wide", **way, progress=False).comparison is not None


# --- ALiBi: fresh heads between the old ones, from files to training, and the slopes that each head has.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_fresh_heads_of_alibi_from_files_to_training(name: str, tmp_path: Path) -> None:
    """Planned, written, verified, trained; and the old heads have their own slopes where they lie among the new."""
    small, wide = tmp_path / "small", tmp_path / "wide"
    config = models.tiny(name)[0]
    models.randomised(models.build(config)).save_pretrained(small, max_shard_size="20KB")
    made = upscale(small, wide, times=2, grow=Fresh(), shard_size="40KB", progress=False)
    assert made.files > 1
    assert verify(small, wide, dtype="float64").ok
    heads = getattr(config, "n_head", None) or config.n_heads
    axis = axis_of_heads(wide, small)
    old = places(axis, heads * axis.block)[:: axis.block] // axis.block
    assert torch.equal(slopes(name, 2 * heads)[old], slopes(name, heads))
    model = models.build(json.loads((wide / "config.json").read_text())).from_pretrained(wide).double()
    optimizer = torch.optim.AdamW(param_groups(wide, model, torch.optim.AdamW, lr=1e-2))
    tokens = torch.randint(0, config.vocab_size, (4, 8), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_slopes_that_are_not_among_those_of_more_heads_are_refused() -> None:
    """As many heads as a power of two have their slopes among those of twice as many, not of three times."""
    config = models.tiny("bloom", num_hidden_layers=1)[0].to_dict()
    with pytest.raises(MupscaleError, match="ALiBi's slopes, and 3 times as many units would change"):
        ConfigFamily(config).plan(Times(3, 3, 3, 3, fresh=True), initial=False)


def axis_of_heads(wide: Path, small: Path) -> Axis:
    """How the heads grew that lead into the first attention's output."""
    record, shapes = Record.load(wide), open_source(small).shapes
    plan = ConfigFamily(record.config).plan_files(record.times, shapes)
    outputs = ("self_attention.dense.weight", "attn.out_proj.weight")
    return next(entry.axes[1] for name, entry in plan.parameters.items() if name.endswith(outputs))


def slopes(name: str, heads: int) -> Tensor:
    """What transformers adds to the scores of each head for the next token."""
    if name == "mpt":
        return transformers.models.mpt.modeling_mpt.build_mpt_alibi_tensor(heads, 4)[:, 0, 1]
    mask = torch.ones(1, 4, dtype=torch.long)
    return transformers.models.bloom.modeling_bloom.build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]


# --- Many architectures grown by fresh units in memory: old units stay, and the function where that can be.
HALF = Fraction(3, 2)
EVERYTHING = {"hidden": HALF, "ffn": HALF, "heads": HALF}

AS_THEY_ARE = ("gpt2", "llama", "mistral", "gemma2", "phi", "gpt_neox", "opt", "mixtral", "vit")
LOSSLESS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, EVERYTHING, {}) for name in AS_THEY_ARE},
    "gpt2-untied": ("gpt2", {**EVERYTHING, "ffn": 1}, {"tie_word_embeddings": False}),
    "gpt2-two-heads": ("gpt2", EVERYTHING, {"head": "DoubleHeadsModel"}),
    "llama-tied-biases": ("llama", EVERYTHING, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-head_dim": (
        "llama",
        {"hidden": Fraction(21, 16)},
        {"hidden_size": 48, "head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "llama-kv-stays": ("llama", {"hidden": HALF, "heads": HALF, "kv": 1}, {}),
    "llama-one-kv-head": ("llama", {"hidden": HALF, "heads": HALF, "kv": 1}, {"num_key_value_heads": 1}),
    "llama-times-2": ("llama", {"hidden": 2, "ffn": 3, "heads": 2}, {}),
    "llama-classifier": (
        "llama",
        EVERYTHING,
        {"head": "ForSequenceClassification", "tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "llama-base": ("llama", EVERYTHING, {"head": "Model"}),
    "qwen2": ("qwen2", EVERYTHING, {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"hidden": Fraction(19, 16), "ffn": Fraction(21, 20), "heads": HALF}, {"attention_bias": True}),
    "gemma": ("gemma", {"hidden": HALF, "heads": HALF, "kv": 1}, {}),
    "gemma-untied": ("gemma", EVERYTHING, {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "phi-tied": ("phi", EVERYTHING, {"tie_word_embeddings": True, "qk_layernorm": True}),
    "gpt_neox-serial": ("gpt_neox", EVERYTHING, {"tie_word_embeddings": True, "use_parallel_residual": False}),
    "opt-words": ("opt", EVERYTHING, {"word_embed_proj_dim": 12}),
    "olmo2-hidden": ("olmo2", {"hidden": HALF, "ffn": 2}, {"head_dim": 4, "tie_word_embeddings": True}),
    "vit-pixels": ("vit", EVERYTHING, {"head": "ForMaskedImageModeling"}),
}

MORE_AS_THEY_ARE = (
    *("smollm3", "phi3", "starcoder2", "cohere", "cohere2", "gemma3_text"),
    *("granitemoe", "gpt_oss", "deepseek_v2", "falcon", "t5"),
)
MORE_LOSSLESS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, EVERYTHING, {}) for name in MORE_AS_THEY_ARE},
    "granite": ("granite", {"hidden": HALF, "heads": HALF, "kv": 1}, {"tie_word_embeddings": True}),
    "cohere-norms": ("cohere", {"hidden": HALF, "heads": HALF, "kv": 1}, {"use_qk_norm": True}),
    "stablelm": ("stablelm", EVERYTHING, {"use_parallel_residual": True}),
    "olmo3-hidden": ("olmo3", {"hidden": HALF, "ffn": 2}, {"head_dim": 4}),
    "qwen2_moe": ("qwen2_moe", {"hidden": HALF, "ffn": 2, "heads": HALF}, {}),
    "qwen3_moe": ("qwen3_moe", {"hidden": HALF, "ffn": HALF, "heads": HALF}, {"tie_word_embeddings": True}),
    "llama4_text": ("llama4_text", {"hidden": HALF, "ffn": HALF, "heads": HALF, "kv": 1}, {}),
    "deepseek_v3": ("deepseek_v3", EVERYTHING, {"first_k_dense_replace": 0}),
    "falcon-one-kv-head": ("falcon", {"hidden": 2, "heads": 2}, {"new_decoder_architecture": False}),
    "qwen3_next": ("qwen3_next", {"hidden": HALF, "ffn": HALF, "heads": HALF}, {}),
    "qwen3_next-full": (
        "qwen3_next",
        {"hidden": HALF, "ffn": HALF, "heads": HALF},
        {"layer_types": ["full_attention"]},
    ),
}

FEED_FORWARD_ALONE = ("roberta", "distilbert", "electra", "modernbert", "olmoe", "bart", "whisper", "wav2vec2")
MORE_EXACT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {"ffn": HALF}, {}) for name in FEED_FORWARD_ALONE},
    "stablelm-norms": ("stablelm", {"ffn": HALF}, {"qk_layernorm": True}),
}

EXACT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("bert", {"ffn": HALF}, {}),
    "bert-pretraining": ("bert", {"ffn": 2}, {"head": "ForPreTraining"}),
    "opt-350m": ("opt", {"ffn": HALF}, {"word_embed_proj_dim": 12, "do_layer_norm_before": False}),
    "llama-heads": ("llama", {"ffn": HALF, "heads": HALF, "kv": 1}, {"head_dim": 4, "hidden_size": 48}),
    "gemma2-heads": ("gemma2", {"ffn": HALF, "heads": HALF}, {"hidden_size": 48}),
    "vit-heads": ("vit", {"heads": HALF}, {}),
}
"""Models whose hidden size stays."""


FEW = ("llama-kv-stays", "gpt_neox", "vit")


class Grown:
    """A small model in float64 and the wide one with fresh units."""

    def __init__(
        self,
        name: str,
        ratios: dict[str, Any],
        grow: mu.Fresh,
        config: dict[str, Any],
        change: Callable[[Plan], Plan] = lambda plan: plan,
    ) -> None:
        self.config, _ = models.tiny(name, **{"num_hidden_layers": 1, **config})
        self.times = Times(**{"kv": ratios.get("heads", 1), **ratios}, fresh=True)
        family = ConfigFamily(self.config.to_dict())
        self.small = models.randomised(models.build(self.config)).eval()
        self.wide = models.build(family.wide_config(self.times)).eval()
        self.plan = change(family.plan(self.times))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what cannot be lossless
            mu.upscale(self.small, self.wide, self.plan, grow=grow)
        self.batch = models.inputs(self.config)[0]

    def difference(self) -> float:
        """Of the outputs, relative to their size; of hidden states, the old units count."""
        with torch.no_grad():
            small, wide = (models.outputs(model, self.batch) for model in (self.small, self.wide))
        return max(relative_difference(a, self._old(b, a)) for a, b in zip(small, wide, strict=True))

    def _old(self, wide: Tensor, small: Tensor) -> Tensor:
        return wide if wide.shape == small.shape else wide[..., places(mu.Axis(self.times.hidden), small.shape[-1])]


def with_tiny_eps(model: nn.Module, eps: float = 1e-30) -> None:
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, eps)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", with_slow([*LOSSLESS, *MORE_LOSSLESS], FEW))
def test_lossless_growth_keeps_the_outputs(variant: str) -> None:
    name, ratios, config = {**LOSSLESS, **MORE_LOSSLESS}[variant]
    grown = Grown(name, ratios, mu.Fresh(lossless=True), config)
    for model in (grown.small, grown.wide):
        with_tiny_eps(model)
    assert grown.difference() <= 1e-10


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", with_slow([*EXACT, *MORE_EXACT], ("bert", "vit-heads")))
def test_silent_new_units_keep_the_outputs_where_no_norm_reads_them(variant: str) -> None:
    name, ratios, config = {**EXACT, **MORE_EXACT}[variant]
    assert Grown(name, ratios, mu.Fresh(outgoing=0.0), config).difference() <= 1e-12
    assert Grown(name, ratios, mu.Fresh(), config).difference() > 1e-6


def without_keep(plan: Plan) -> Plan:
    return replace(plan, parameters={n: e.with_constants(keep=1) for n, e in plan.parameters.items()})


def folded(plan: Plan) -> Plan:
    """As if old units were copies, too."""
    return replace(plan, parameters={n: e.with_constants(keep=e.fold) for n, e in plan.parameters.items()})


def centring(plan: Plan) -> Plan:
    """As if all norms subtracted the mean, which LLaMA's do not."""
    return plan.with_initial("norm", dict.fromkeys(plan.norms, "layer"))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("variant", "change"),
    [
        pytest.param("gemma", without_keep, marks=pytest.mark.slow),
        ("gemma-untied", without_keep),
        pytest.param("gemma", folded, marks=pytest.mark.slow),
        ("gpt2", folded),
        ("llama", centring),
    ],
)
def test_a_wrong_factor_of_old_weights_or_kind_of_norm_shows(variant: str, change: Callable[[Plan], Plan]) -> None:
    name, ratios, config = LOSSLESS[variant]
    grown = Grown(name, ratios, mu.Fresh(lossless=True), config, change)
    for model in (grown.small, grown.wide):
        with_tiny_eps(model)
    assert grown.difference() > 1e-2


@pytest.mark.slow
def test_a_tied_final_norm_keeps_its_old_gains_and_folds_new_ones() -> None:
    family = ConfigFamily(models.tiny("gemma")[0].to_dict())
    plan = family.plan(Times(hidden=4, ffn=4, heads=4, kv=1, fresh=True))
    norm, embedding = plan["model.norm.weight"], plan["model.embed_tokens.weight"]
    # √4 / 4 for new ones; √4, which the embedding took, for old
    assert (norm.fold, norm.keep) == (pytest.approx(0.5), pytest.approx(2))
    assert (embedding.fold, embedding.keep) == (pytest.approx(0.5), pytest.approx(0.5))
    assert plan.means["model.norm.weight"] == (pytest.approx(-0.5),)  # 1 + w is a half
    llama = ConfigFamily(models.tiny("llama", tie_word_embeddings=True)[0].to_dict())
    norm = llama.plan(Times(hidden=4, heads=4, kv=4, fresh=True), initial=False)["model.norm.weight"]
    assert (norm.fold, norm.keep) == (pytest.approx(0.25), 1)


LLAMA_SIZES = {"hidden": 1024, "ffn": 2816, "heads": 16, "kv": 4}


@pytest.mark.parametrize(
    ("wanted", "fresh", "message"),
    [
        ({"hidden": 512}, True, "hidden=512 is smaller than the model's hidden size, 1024"),
        (
            {"hidden": 1500},
            False,
            "not a whole multiple of 1024, .* Fresh units fit any larger size: grow=mupscale.Fresh",
        ),
        ({"hidden": 1024}, True, "nothing would grow: the model has hidden 1024, ffn 2816, heads 16, kv 4 already"),
        ({"heads": 18}, True, "heads=18 cuts a group: each key/value head serves 4 heads. Choose heads=20"),
        ({"heads": 22}, True, "Choose heads=20 or 24"),
        ({"heads": 24, "kv": 5}, True, "16 heads with 4 key/value heads cannot become 24 with 5"),
        ({"heads": 32, "kv": 6}, True, "in whole groups of 4, or stay .4. .* Choose 32 heads with 8, or 32 with 4"),
        ({"ffn": True}, True, "ffn= takes the size of the feed-forward layers of the wide model, as in ffn=5632"),
        ({"ffn": 0}, True, "ffn= takes the size"),
    ],
)
def test_sizes_that_cannot_be(wanted: dict[str, int], fresh: bool, message: str) -> None:
    refuses(message, times_to, wanted, LLAMA_SIZES, fresh=fresh)


def test_key_value_heads_may_stay() -> None:
    assert times_to({"heads": 24, "kv": 4}, LLAMA_SIZES, fresh=True) == Times(heads=HALF, fresh=True)
    assert times_to({"heads": 24}, LLAMA_SIZES, fresh=True) == Times(heads=HALF, kv=HALF, fresh=True)
    assert times_to({"heads": 32, "ffn": 5632}, LLAMA_SIZES, fresh=False).kv == 2


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({"hidden": Fraction(800, 768)}, "hidden=800 would cut a head of 64 units. Choose 832 with heads=13"),
        ({"hidden": Fraction(1000, 768)}, "Choose 960 with heads=15 or 1024 with heads=16"),
        ({"hidden": 2}, "let hidden and heads grow by the same factor, as in hidden=1536, heads=24"),
        ({"heads": 2, "kv": 2}, "as in hidden=1536, heads=24"),
        ({"hidden": 2, "heads": 2, "kv": 1}, "Leave kv out"),
    ],
)
def test_a_head_is_not_cut(ratios: dict[str, Any], message: str) -> None:
    config = {"model_type": "gpt2", "n_embd": 768, "n_head": 12}
    refuses(message, ConfigFamily(config).wide_config, Times(**ratios, fresh=True))
