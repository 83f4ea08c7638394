"""mupscale upscale, verify and inspect on the command line, and what inspect says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

import mupscale as mu  # noqa: E402
from commands import refused, told  # noqa: E402
from hf_files import llama_config, llama_tensors, read_checkpoint, write_checkpoint  # noqa: E402
from hf_models import tiny  # noqa: E402
from mupscale import Fresh, MupscaleError, hf  # noqa: E402
from mupscale.cli import main  # noqa: E402
from mupscale.growth import (  # noqa: E402
    DEPTH_OPERATORS,
    OPERATORS,
    GrowthSettings,
)
from mupscale.system import setting  # noqa: E402

SMALL, WIDE = Path("small"), Path("wide")


@pytest.fixture(autouse=True)
def _small(here: Path) -> None:
    """A checkpoint in the current folder."""
    config = llama_config()
    tensors = {name: tensor * 0.1 for name, tensor in llama_tensors(config).items()}
    write_checkpoint(SMALL, {**config, "max_position_embeddings": 64}, tensors)


def test_upscale_verify_and_train_on(capsys: pytest.CaptureFixture[str]) -> None:
    times = ["--times", "hidden=2,ffn=3,heads=2", "--exact"]
    assert "equivalent" in told(capsys, ["upscale", "small", "wide", *times, "--shard-size", "10KB"])
    assert json.loads((WIDE / "config.json").read_text())["intermediate_size"] == 36
    assert (WIDE / "model.safetensors.index.json").exists()
    assert "3 steps" in told(capsys, "verify small wide --dtype float64 --train 3")
    model = transformers.AutoModelForCausalLM.from_pretrained(WIDE)
    groups = hf.param_groups(WIDE, model, torch.optim.AdamW, lr=1e-2)
    rates = {name: group["lr"] for group in groups for name, _ in group["params"]}
    assert rates["model.layers.0.mlp.down_proj.weight"] == pytest.approx(1e-2 / 3)
    assert rates["lm_head.weight"] == pytest.approx(1e-2 / 2)
    assert rates["model.norm.weight"] == 1e-2


def test_noise_moves_the_function_a_little_and_verify_says_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert "noise" in told(capsys, "upscale small wide --noise 0.3 --seed 1")
    assert main(["verify", "small", "wide", "--tolerance", "1e-9"]) == 1
    assert main(["verify", "small", "wide"]) == 0


def test_inspect_shows_the_groups_of_experts() -> None:
    """Copies share a gradient, so their eps is another one; the number of groups is what param_groups makes."""
    for given, eps in (({}, 0.25), ({"times": 2, "grow": mu.Copies()}, 0.125)):
        found = hf.inspect(SMALL, experts=4, **given)
        assert {row.factors["eps"] for row in found.mixture if ".experts." in row.name} == {eps}
        assert re.search(rf"mlp\.experts\.down_proj +[\d.]+ +[\d.]+ +{eps}\n", str(found))
        out = Path(str(eps))
        hf.upscale(SMALL, out, experts=4, verify=False, **({**given, "grow": mu.Copies(1.0)} if given else {}))
        model = transformers.AutoModelForCausalLM.from_pretrained(out)
        groups = hf.param_groups(out, model, torch.optim.AdamW, lr=1.0)
        assert f"AdamW gets {len(groups)} parameter groups" in found.summary()[-1]


def test_inspect_shows_what_experts_would_be(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "inspect small --experts 4")
    assert re.search(r"block_sparse_moe\.experts\.0–3\.w1\.weight +8 +copies", shown)
    config, tensors = json.loads((SMALL / "config.json").read_text()), read_checkpoint(SMALL)
    dense = sum(t.numel() for name, t in tensors.items() if ".mlp." in name)
    routers = 4 * config["hidden_size"] * config["num_hidden_layers"]
    before = sum(t.numel() for t in tensors.values())
    assert hf.inspect(SMALL, experts=4).numbers == (before, before + 3 * dense + routers)
    assert "experts 1 → 4, of which a token uses 2: a checkpoint of mixtral" in shown
    assert "more layers and experts are two growths" in refused(capsys, "inspect small --experts 4 --layers 4", 1)


def test_how_takes_every_word_of_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown, asked = told(capsys, "upscale --help").rpartition("--how ")[2].partition("--hidden")[0], dict[str, Any]()
    monkeypatch.setattr(hf, "upscale", lambda *paths, **given: asked.update(given))
    for word in [*OPERATORS, *DEPTH_OPERATORS]:
        assert word in shown
        layers = ["--layers", "4"] if word in DEPTH_OPERATORS else []
        assert main(["upscale", "small", word, "--how", word, *layers]) == 0
        assert asked["deepen"] == word if layers else asked["grow"] == GrowthSettings(how=word).build_operator()


def test_fresh_units_at_sizes_that_are_no_multiples(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--hidden", "24", "--ffn", "15", "--heads", "6", "--kv", "3"]
    said = told(capsys, ["upscale", "small", "wide", *sizes, "--lossless", "--seed", "1"])
    assert "fresh units (hidden 16 → 24, ffn 12 → 15, heads 4 → 6, kv 2 → 3)" in said
    assert "lossless: logits move by" in told(capsys, "verify small wide")
    assert json.loads((WIDE / "config.json").read_text())["intermediate_size"] == 15
    assert hf.Record.load(WIDE).growths[0].fresh == Fresh(lossless=True)


def test_verify_fails_where_a_weight_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["upscale", "small", "wide", "--how", "copies", "--no-verify"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "stays a replica of the narrow one" in said
    assert "for a replica on purpose, --exact" in said
    tensors = load_file(WIDE / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0] *= 1.5
    save_file(tensors, WIDE / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj" in told(capsys, "verify small wide", 1)


def test_inspect_shows_what_will_happen(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "inspect small --times hidden=2,ffn=3,heads=2 --how copies --optimizer sgd")
    row = next(line for line in shown.splitlines() if "q_proj" in line)
    assert "16×16 → 32×32" in row
    assert "2× by 8" in row
    assert "hidden_size 16 → 32" in shown
    assert "SGD gets" in shown


def test_inspect_tells_what_fresh_units_are_drawn_from(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--hidden", "24", "--ffn", "15", "--heads", "6"]
    shown = told(capsys, ["inspect", "small", "--how", "fresh", *sizes])
    row = next(line for line in shown.splitlines() if "q_proj" in line)
    assert "16×16 → 24×24" in row
    assert "3/2× by 8" in row
    assert "1× ± 0.0163 1×" in " ".join(row.split())  # initializer_range 0.02 at 16 inputs is 0.02·√(2/3) at 24
    assert "with fresh units" in shown
    assert "hidden_size 16 → 24" in shown
    assert "old weights stay as they are" in shown
    shown = told(capsys, ["inspect", "small", "--how", "fresh", *sizes, "--lossless"])
    assert "lossless: the function stays" in shown
    row = next(line for line in shown.splitlines() if "model.norm.weight" in line)
    assert f"{(16 / 24) ** 0.5:.4g}× 1 –" in " ".join(row.split())


@pytest.mark.parametrize("grow", [mu.Fresh(), mu.Fresh(outgoing=0.5), mu.Fresh(lossless=True)])
def test_what_inspect_says_of_fresh_units_is_what_upscale_writes(grow: mu.Fresh) -> None:
    sizes = {"hidden": 64, "ffn": 48, "heads": 16}
    found = hf.inspect(SMALL, grow=grow, **sizes)
    hf.upscale(SMALL, WIDE, grow=grow, verify=False, progress=False, **sizes)
    before, after = (load_file(folder / "model.safetensors") for folder in (SMALL, WIDE))
    for row in found.rows:
        name, values = row.name.replace("*", "1"), row.values
        assert values is not None
        old = mu.index_of_old(row.entry.narrow, row.entry.axes)
        assert torch.allclose(after[name][old], before[name] * values.keep, rtol=1e-6)
        is_new = torch.ones(row.entry.wide, dtype=torch.bool)
        is_new[tuple(old)] = False
        new = after[name][is_new]
        if row.new_units == "0":
            assert not new.any() or row.entry.in_, name
        elif row.new_units.startswith("±") and values.outgoing == 1:
            assert float(new.std()) == pytest.approx(values.law.std, rel=0.15), name
    silent = {row.name for row in found.rows if row.outgoing == "0×"}
    assert ("model.layers.*.mlp.down_proj.weight" in silent) == grow.lossless


def test_the_factors_of_inspect_are_those_of_the_groups() -> None:
    found = hf.inspect(SMALL, times=2)
    hf.upscale(SMALL, WIDE, times=2, verify=False, progress=False, exact=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(WIDE)
    groups = hf.param_groups(WIDE, model, torch.optim.AdamW, lr=1.0, weight_decay=1.0, eps=1.0)
    assert found.groups == len(groups)
    by_name = {name: group for group in groups for name, _ in group["params"]}
    for row in found.rows:
        group = by_name[row.name.replace("*", "1")]
        assert dict(row.factors) == pytest.approx({name: group[name] for name in ("lr", "weight_decay", "eps")})
    assert found.numbers[1] == sum(p.numel() for p in model.parameters())


def test_inspect_tells_of_earlier_growth() -> None:
    hf.upscale(SMALL, WIDE, times=3, verify=False, progress=False, exact=True)
    assert any("grown before, by 3 in width" in line for line in hf.inspect(WIDE).summary())


def test_a_record_of_another_model_is_refused() -> None:
    hf.upscale(SMALL, WIDE, verify=False, progress=False, exact=True)
    shutil.copyfile(WIDE / "mupscale.json", SMALL / "mupscale.json")
    with pytest.raises(MupscaleError, match=r"grew by 2 in width from hidden_size 16.*beside it has hidden_size 16"):
        hf.inspect(SMALL)


@pytest.mark.slow
def test_a_record_from_before_the_readout_was_another_is_refused() -> None:
    """A second growth would fold nothing into the norm that has the first one's 1/k."""
    config, cls = tiny("llama", tie_word_embeddings=True)
    cls(config).save_pretrained(SMALL)
    hf.upscale(SMALL, WIDE, verify=False, progress=False, exact=True)
    assert hf.inspect(WIDE).record is not None
    config = {**json.loads((WIDE / "config.json").read_text()), "architectures": ["LlamaForSequenceClassification"]}
    (WIDE / "config.json").write_text(json.dumps(config))
    with pytest.raises(MupscaleError, match="readout was its embedding when it grew"):
        hf.inspect(WIDE)


def test_what_muon_cannot_train_is_in_no_group() -> None:
    found = hf.inspect(SMALL, optimizer="muon")
    norm = next(row for row in found.rows if row.name == "model.norm.weight")
    assert all(value != value for value in norm.factors.values())
    trained = {tuple(row.factors.items()) for row in found.rows if len(row.entry.narrow) == 2}
    assert found.groups == len(trained) > 1


def test_a_fold_is_named() -> None:
    config, cls = tiny("gpt2")
    cls(config).save_pretrained(SMALL)
    found = hf.inspect(SMALL, grow=mu.Copies())
    assert any("ln_f" in line for line in found.summary())
    row = next(row for row in found.rows if row.name.endswith("c_attn.weight"))
    assert row.output == "2× by 4"


MISTAKES = {
    "inspect": "give CHECKPOINT",
    "upscale a": "give CHECKPOINT and OUT",
    "verify a b c": "give SMALL and WIDE",
    "inspect small --times 1.5": "'1.5' is not a whole number, as in --times 2 or",
    "upscale small out --times 1.5": "by name, as in --hidden 1536 --ffn 6144 --heads 24",
    "inspect small --times depth=2": "which does not grow",
    "inspect small --times ffn=2,ffn=3": "'ffn' twice",
    "inspect small --times 2 --hidden 32": "either how much it grows",
    "inspect small --how afresh": "naive, identity, stack or interleaved",
    "upscale small out --how magic": "--how is 'magic', but must be copies, paired, fresh, lossless",
    "upscale small out --times 2 --layers 4 --how stack": "use --deepen stack",
    "inspect small --how copies --lossless": "--lossless is for fresh units: leave out --how copies",
    "upscale small out --outgoing 0.5 --how copies": "--outgoing goes with --how fresh, and not with --how copies",
    "upscale small out --lossless --noise 1": "--noise goes with --how copies, and not with --lossless",
    "upscale small out --how fresh --hidden 24 --heads 6 --noise 0.3": "--noise goes with --how copies, and not",
    "upscale small out --exact --noise 1": "--exact copies every unit without noise: leave out --how and --noise",
    "upscale small out --how fresh --lossless --outgoing 0.5": "--outgoing goes with --how fresh, and not",
    "upscale small out --how lossless --outgoing 0.5": "--outgoing goes with --how fresh, and not with --how lossless",
    "upscale small out --how fresh --outgoing 2": "--outgoing is 2.0, but must be a number between 0 and 1",
    "upscale small out --how copies --hidden 24 --heads 6": "Fresh units fit any larger size: --how fresh",
    "inspect small --how fresh --heads 5": "5",
    "upscale small out --how fresh --hidden 8": "--hidden 8 is smaller",
    "upscale small out --how fresh --hidden wide": "--hidden wide: give a whole number",
    "inspect small --optimizer adan": "no optimizer 'adan'",
    "inspect small --optimizer radam": "RAdam",
    "upscale small out --optimizer a/optimizer.pt": "A saved one is --optimizer-state FILE",
    "upscale small out --describe no_such_module": "no_such_module",
    "upscale small out --noice 1": "--noise",
    "upscale small out --noise -1": "0 or more",
}


@pytest.mark.parametrize(("words", "sentence"), MISTAKES.items())
def test_mistakes_are_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in refused(capsys, words.split())
    assert [path.name for path in Path().iterdir()] == ["small"]
    assert setting("hidden", 24) == "hidden=24"  # whoever calls from Python then has arguments again


def test_tensors_of_ones_own_in_one_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--describe imports a module that says what they are."""
    from mupscale.hf.config_family import GIVEN

    config, tensors = json.loads((SMALL / "config.json").read_text()), read_checkpoint(SMALL)
    write_checkpoint(SMALL, config, {**tensors, "probe.weight": torch.ones(3, config["hidden_size"])})
    Path("my_probe.py").write_text(
        "from mupscale import Role, hf\nhf.register('llama', {'probe.weight': Role(in_=1)})\n"
    )
    monkeypatch.syspath_prepend(str(here))
    try:
        assert main(["upscale", "small", "wide", "--describe", "my_probe", "--no-verify"]) == 0
    finally:
        GIVEN.clear()
    assert (WIDE / "mupscale.json").exists()


def test_overwrite_replaces_what_mupscale_wrote_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["upscale", "small", "wide", "--no-verify"]
    assert main([*words, "--overwrite"]) == 0
    assert "already exists. Use --overwrite to replace it" in refused(capsys, words, 1)
    assert main([*words, "--overwrite", "--times", "3"]) == 0
    assert json.loads((WIDE / "config.json").read_text())["hidden_size"] == 48
    assert sorted(path.name for path in Path().iterdir()) == ["small", "wide"]
    assert '"wide"' in (WIDE / "README.md").read_text()  # as the folder is called, and not its place until then
    assert "mupscale did not write" in refused(capsys, "upscale wide small --overwrite --no-verify", 1)


@pytest.mark.parametrize("options", [[], ["--how", "fresh", "--hidden", "24", "--heads", "6"]])
def test_tables_fit_80_columns(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = told(capsys, ["inspect", "small", *options])
    assert "model.layers.0–1.self_attn.q_proj.weight" in whole
    monkeypatch.setenv("COLUMNS", "80")
    shown = told(capsys, ["inspect", "small", *options])
    assert max(map(len, shown.splitlines())) <= 80
    words = set(whole.split())
    assert not [word for word in shown.split() if word not in words and "…" not in word]
    assert max(map(len, told(capsys, "verify small small").splitlines())) <= 80
