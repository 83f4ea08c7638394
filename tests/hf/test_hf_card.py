"""README.md beside a wide checkpoint: written anew, or the small model's, extended."""

from __future__ import annotations

from pathlib import Path

import pytest

import mupscale as mu
from hf_files import write_llama
from mupscale import hf


def card(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def test_a_card_is_written(tmp_path: Path) -> None:
    write_llama(tmp_path / "small")
    hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, verify=False, progress=False, exact=True)
    written = card(tmp_path / "wide")
    assert written.startswith(
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- mupscale\n---\n\n# wide\n"
    )
    for part in (
        "`small` made wider with mupscale",
        "hidden size 16 → 32, feed-forward size 12 → 24, attention heads 4 → 8, key/value heads 2 → 4",
        "computes what the small model computes",
        " This was written right after it grew, before any training on.\n",
        "**Comparison of the two models.** Not made, since verification is off.",
        'hf.param_groups("wide", model',
    ):
        assert part in written


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"times": 2, "noise": 0.5, "seed": 3}, "noise was added (level 0.5, seed 3)"),
        ({"ffn": 18, "grow": mu.Fresh(), "seed": 4}, "new ones were drawn beside them (fresh units, seed 4)"),
        ({"ffn": 18, "grow": mu.Fresh(lossless=True)}, "(lossless fresh units, seed 0)"),
    ],
)
def test_it_tells_how_the_model_grew(tmp_path: Path, options: dict[str, object], says: str) -> None:
    write_llama(tmp_path / "small")
    hf.upscale(tmp_path / "small", tmp_path / "wide", verify=False, progress=False, **options)  # type: ignore[arg-type]
    assert says in card(tmp_path / "wide")


@pytest.mark.parametrize("tags", ["tags:\n- text-generation\n- math", "tags: [text-generation, 'math']"])
def test_the_small_ones_card_stands_below_without_its_results_as_ours(tmp_path: Path, tags: str) -> None:
    write_llama(tmp_path / "small", _name_or_path="someone/small")
    front = f"license: mit\nbase_model:\n- someone/else\n{tags}\nmodel-index:\n- name: small\n  results: []\n"
    (tmp_path / "small" / "README.md").write_text(f"---\n{front}---\n\n# Small\n\nIts story.\n", encoding="utf-8")
    hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, verify=False, progress=False, exact=True)
    expected = (
        "---\nlicense: mit\nlibrary_name: transformers\n"
        "base_model: someone/small\npipeline_tag: text-generation\n"
        "tags:\n- text-generation\n- math\n- mupscale\n---\n\n# wide\n\n"
        "This is [someone/small](https://huggingface.co/someone/small) made wider"
    )
    assert card(tmp_path / "wide").startswith(expected)
    below = (
        "# Card of the small model, [someone/small](https://huggingface.co/someone/small)\n\n# Small\n\nIts story.\n"
    )
    assert card(tmp_path / "wide").endswith(below)
    assert card(tmp_path / "small").endswith("Its story.\n")


def test_fields_of_the_small_ones_card_stay_and_the_task_is_told(tmp_path: Path) -> None:
    """Of a model without a name on the hub, the base model that its own card names."""
    write_llama(tmp_path / "small", architectures=["LlamaForCausalLM"])
    front = "license: apache-2.0\nlanguage:\n- en\nbase_model: someone/else\n"
    (tmp_path / "small" / "README.md").write_text(f"---\n{front}---\n\n# Small\n", encoding="utf-8")
    hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, verify=False, progress=False)
    header = card(tmp_path / "wide").split("---")[1]
    for line in ("license: apache-2.0", "language:\n- en", "base_model: someone/else", "pipeline_tag: text-generation"):
        assert f"\n{line}\n" in header


def test_the_name_on_the_hub_is_known_by_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "models--someone--small" / "snapshots" / "0123"
    write_llama(folder)
    hf.upscale(folder, tmp_path / "wide", times="ffn=2", verify=False, progress=False, exact=True)
    assert "base_model: someone/small\n" in card(tmp_path / "wide")


def test_the_card_loads_the_class_of_the_config_and_the_optimizer(tmp_path: Path) -> None:
    """As printed it runs; sentences of the comparison end with a full stop."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=64, vocab_size=11)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "small")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.ones(1, 4, dtype=int)).logits.sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    wide = hf.upscale(
        tmp_path / "small", tmp_path / "wide", times=2, optimizer=tmp_path / "optimizer.pt", layers=2, exact=True
    )
    written = card(tmp_path / "wide")
    assert 'transformers.GPT2LMHeadModel.from_pretrained("wide")' in written
    assert 'hf.resume_optimizer("wide", model' in written
    assert "). New layers write nothing" in written
    assert "optimizer.pt: the saved optimizer, grown too" in str(wide)


def test_a_card_of_ours_is_extended_without_what_is_no_longer_so(tmp_path: Path) -> None:
    """Only this one says how to train on; what people wrote stays. checkpoint-N is named with its run."""
    small = tmp_path / "run" / "checkpoint-40"
    write_llama(small)
    hf.upscale(small, tmp_path / "wide", times=2, progress=False, exact=True)
    (tmp_path / "wide" / "README.md").write_text(card(tmp_path / "wide") + "\nBest on Sundays.\n", encoding="utf-8")
    hf.upscale(tmp_path / "wide", tmp_path / "wider", times=2, progress=False, exact=True)
    told = card(tmp_path / "wider")
    assert told.count("## Training on") == 1
    parts = ("# wider\n\nThis is `wide` made", "# Card of the small model, `wide`\n\n# wide\n", "Best on Sundays.")
    places = [told.index(part) for part in (parts[0], "## Training on", *parts[1:])]
    assert places == sorted(places)
    assert "This is `run/checkpoint-40` made wider" in told
    assert "trained since" not in told  # the small model's card, below, cannot know either
    assert 'from_pretrained("wide")' not in told
    assert "(on random inputs)" in told
