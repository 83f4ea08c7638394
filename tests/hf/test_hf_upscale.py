"""From folder to folder: what comes out, what is refused, and what is left behind when something goes wrong."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mupscale as mu
from hf_files import (
    llama_config,
    llama_tensors,
    read_checkpoint,
    write_checkpoint,
    write_llama,
    write_zeros,
)
from hf_models import grow, save
from mupscale import MupscaleError, hf
from mupscale.hf.config_fields import Times
from mupscale.hf.record import GrowthStep, Record
from mupscale.hf.upscaling import upscale
from mupscale.system.files import appearing
from refusals import refuses


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_llama(tmp_path / "small")
    return tmp_path / "small"


def test_what_comes_out(small: Path, tmp_path: Path) -> None:
    beside = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja"]
    left = ["optimizer.pt", "training_args.bin", "trainer_state.json", "flax_model.msgpack", "notes.py"]
    for name in (*beside, "spiece.model", "vocab.txt", *left):
        (small / name).write_text(f"this is {name}")
    (small / "additional_chat_templates").mkdir()
    (small / "additional_chat_templates" / "tool.jinja").write_text("tool")
    (small / "onnx").mkdir()
    made = grow(small, tmp_path / "wide", times="hidden=2,ffn=3,heads=2")
    found = {str(p.relative_to(tmp_path / "wide")) for p in (tmp_path / "wide").rglob("*") if p.is_file()}
    ours = {"README.md", "config.json", "mupscale.json", "model.safetensors", "additional_chat_templates/tool.jinja"}
    assert found == {*beside, "spiece.model", "vocab.txt", *ours}
    assert (tmp_path / "wide" / "merges.txt").read_text() == "this is merges.txt"
    assert sorted(os.listdir(tmp_path)) == ["small", "wide"]
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert list(config)[: len(llama_config())] == list(llama_config())
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    assert [config[name] for name in sizes] == [32, 36, 8, 4]
    record = Record.load(tmp_path / "wide")
    assert (record.config, record.growths) == (llama_config(), (GrowthStep(Times(2, 3, 2, 2)),))
    numbers = [sum(t.numel() for t in read_checkpoint(folder).values()) for folder in (small, tmp_path / "wide")]
    assert made.numbers == tuple(numbers)
    assert made.files == 1
    assert "not verified: verification is off" in str(made)


def test_the_dtype_is_told_in_the_config(tmp_path: Path) -> None:
    for field in ("dtype", "torch_dtype"):
        config = llama_config(**{field: "float32"})
        write_checkpoint(tmp_path / field, config, llama_tensors(config))
        grow(tmp_path / field, tmp_path / f"{field}-wide", dtype="bfloat16")
        config = json.loads((tmp_path / f"{field}-wide" / "config.json").read_text())
        assert {n: config[n] for n in ("dtype", "torch_dtype") if n in config} == {field: "bfloat16"}
        assert {t.dtype for t in read_checkpoint(tmp_path / f"{field}-wide").values()} == {torch.bfloat16}


def test_an_empty_folder_may_stand_there_and_those_on_the_way_are_made(small: Path, tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    for out in (tmp_path / "wide", tmp_path / "a" / "b" / "wide"):
        grow(small, out)
        assert read_checkpoint(out)


def occupied(out: Path) -> None:
    out.mkdir()
    (out / "mine").write_text("keep")


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Path, Path], Any], str]] = {
    "exists": ({}, lambda small, out: occupied(out), "already exists. Remove it"),
    "a file": ({}, lambda small, out: out.write_text(""), "already exists. Remove it"),
    "a link": ({}, lambda small, out: out.symlink_to(out.parent / "nowhere"), "already exists"),
    "real factor": ({"times": 1.5}, None, "times= is 1.5, .* fresh units take sizes"),
    "shard size": ({"shard_size": "much"}, None, "'much' is not a shard size"),
    "dtype": ({"dtype": "int8"}, None, "float32, bfloat16, float16, float64, not int8"),
    "threads": ({"threads": 0}, None, "at least one thread is needed"),
    "negative noise": ({"noise": -1.0}, None, "finite and 0 or more"),
    "noise of signals": ({"noise": mu.SignalNoise(0.1)}, None, "signal-normalised noise needs whole tensors"),
    "no optimizer": ({"optimizer": "nowhere.pt"}, None, "no saved optimizer at nowhere.pt"),
    "NaN": (
        {},
        lambda small, out: write_checkpoint(
            small,
            llama_config(),
            {n: t.fill_(torch.nan) if n == "lm_head.weight" else t for n, t in llama_tensors(llama_config()).items()},
        ),
        "'lm_head.weight' holds NaN",
    ),
    "another config": (
        {},
        lambda small, out: (small / "config.json").write_text(json.dumps(llama_config(intermediate_size=13))),
        r"do not belong together",
    ),
    "stranger": (
        {},
        lambda small, out: write_checkpoint(
            small, llama_config(), {**llama_tensors(llama_config()), "ghost": torch.ones(2)}
        ),
        r"'ghost' of shape \(2,\) is not a parameter .*say what it is with mupscale.hf.register",
    ),
    "quantised in a way of its own": (
        {},
        lambda small, out: (small / "config.json").write_text(json.dumps(llama_config(quantization_config="mine"))),
        r"quantised \(mine\)",
    ),
    "record of another model": (
        {},
        lambda small, out: Record(llama_config(hidden_size=4), (GrowthStep(Times.of(2)),)).save(small),
        "describes a model that grew by 2 in width",
    ),
    "broken record": (
        {},
        lambda small, out: (small / "mupscale.json").write_text("{}"),
        "is not a mupscale.json of this",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_a_sentence_and_nothing_left(small: Path, tmp_path: Path, kind: str) -> None:
    options, change, message = REFUSED[kind]
    out = tmp_path / "wide"
    if change is not None:
        change(small, out)
    before = sorted(tmp_path.rglob("*"))
    error = refuses(message, grow, small, out, **options)
    assert "\n" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_not_into_the_checkpoint_itself(small: Path) -> None:
    refuses("lies inside the checkpoint", grow, small, small / "wide")
    refuses(r"already exists", grow, small, small)


def test_overwrite_replaces_what_mupscale_wrote_alone(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "wide"
    grow(small, out, overwrite=True)
    refuses(r"wide already exists\. Use overwrite=True to replace it", grow, small, out)
    refuses("no saved optimizer at nowhere.pt", grow, small, out, overwrite=True, optimizer="nowhere.pt")
    assert grow(small, out, times=3, overwrite=True).path == out
    sizes = [json.loads((folder / "config.json").read_text())["hidden_size"] for folder in (small, out)]
    assert sizes[1] == 3 * sizes[0]
    assert "wide" in (out / "README.md").read_text()
    assert ".new" not in (out / "README.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} <= {"small", "wide"}

    occupied(tmp_path / "mine")
    refuses("overwrite=True: mupscale did not write", grow, small, tmp_path / "mine", overwrite=True)
    refuses("lies inside the checkpoint", grow, out, out, overwrite=True)
    shutil.copytree(small, out / "within")
    refuses("holds the checkpoint", grow, out / "within", out, overwrite=True)


def test_a_place_that_cannot_be_written(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refuses(r"wide could not be written: .*; nothing was left behind", grow, small, tmp_path / "file" / "wide")


def in_a_child(work: Callable[[], None]) -> int:
    """Do it in a process of its own; its id. Exit status 0, or 1 for a MupscaleError, which it prints."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        status = 0
    except MupscaleError as error:
        os.write(2, str(error).encode())
        status = 1
    except KeyboardInterrupt:
        status = 130
    finally:
        os._exit(status)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_no_space_on_the_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    vocab = shutil.disk_usage(tmp_path).free // (4 * 4096)
    write_zeros(tmp_path / "small", hidden_size=4096, vocab_size=vocab)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # a check that fails must not fill the disk
        grow(tmp_path / "small", tmp_path / "wide")

    assert ended(in_a_child(limited)) == 1
    said = capfd.readouterr().err
    assert re.search(r"needs \S+ GB and the disk of .* has \S+ GB left. Free some space", said), said
    assert os.listdir(tmp_path) == ["small"]


def test_a_disk_that_fills_up_meanwhile(small: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        grow(small, tmp_path / "wide")

    assert ended(in_a_child(limited)) == 1
    assert "wide could not be written: the disk is full; nothing was left behind" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["small"]


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that takes a moment."""
    folder = tmp_path_factory.mktemp("larger") / "small"
    write_zeros(folder, hidden_size=512, intermediate_size=512, vocab_size=1000, num_hidden_layers=3)
    return folder


def test_killed_at_any_moment_and_started_again(larger: Path, tmp_path: Path) -> None:
    out = tmp_path / "wide"
    start = time.monotonic()
    grow(larger, tmp_path / "whole", noise=0.1, shard_size="20MB")
    whole = time.monotonic() - start
    chance = random.Random(0)
    for number in range(3):

        def work(number: int = number) -> None:
            if number == 2:
                stop_at_opening(r"\.wide\.mupscale-partial-\w+/")
            grow(larger, out, noise=0.1, shard_size="20MB")

        pid = in_a_child(work)
        if number == 2:
            assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        else:
            time.sleep(chance.uniform(0.05, 0.7) * whole)
        os.kill(pid, signal.SIGKILL)
        ended(pid)
        assert len(list(tmp_path.glob(".wide.mupscale-partial-*"))) < 2
        if out.exists():  # it had come to its end
            assert read_all(out) == read_all(tmp_path / "whole")
            shutil.rmtree(out)
    (hidden,) = tmp_path.glob(".wide.mupscale-partial-*")
    (hidden / "model-00099-of-00099.safetensors").write_text("left")
    (hidden / "folder").mkdir()
    grow(larger, out, noise=0.1, shard_size="20MB")
    assert sorted(os.listdir(tmp_path)) == ["whole", "wide"]
    assert read_all(out) == read_all(tmp_path / "whole")


def stop_at_opening(name: str) -> None:
    """Let this process stop, as with Ctrl-Z, when it opens a file whose path matches."""
    stopped = False

    def look(event: str, args: tuple[object, ...]) -> None:
        nonlocal stopped
        if event == "open" and re.search(name, str(args[0])) and not stopped:
            stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(look)


def read_all(folder: Path) -> dict[str, bytes]:
    """All but the card, which has the folder's name in it."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def test_interrupted_by_the_keyboard(larger: Path, tmp_path: Path) -> None:
    def work() -> None:
        stop_at_opening(r"\.wide\.mupscale-partial-\w+/model\.safetensors")
        grow(larger, tmp_path / "wide", noise=0.1)

    pid = in_a_child(work)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGCONT)
    assert ended(pid) == 130
    assert os.listdir(tmp_path) == []


def test_two_runs_at_once(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "wide"
    with appearing(out) as hidden:
        (hidden / "config.json").write_text("of the first run")
        refuses(r"another run is writing .*wide at this moment", grow, small, out)
        assert os.listdir(hidden) == ["config.json"]
    assert os.listdir(out) == ["config.json"]
    refuses("already exists", grow, small, out)


MEASURE = """
import resource, sys
from pathlib import Path
from mupscale import Fresh
from mupscale.hf.upscaling import upscale
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
how = {"copies": {"noise": 0.1}, "fresh": {"hidden": 2000, "heads": 8, "ffn": 10000, "grow": Fresh(lossless=True)}}
upscale(Path(sys.argv[1]), Path(sys.argv[2]), verify=False, threads=2, **how[sys.argv[3]])
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no locks")
def test_another_run_at_the_very_end_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not clear what is complete and about to get its name."""
    rename = os.rename

    def late(one: Path, other: Path) -> None:
        with pytest.raises(MupscaleError, match="another run is writing"), appearing(tmp_path / "out"):
            pass
        rename(one, other)

    monkeypatch.setattr("mupscale.system.files.os.rename", late)
    with appearing(tmp_path / "out") as folder:
        (folder / "weights").touch()
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["weights"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in KiB")
@pytest.mark.parametrize("how", [pytest.param("copies", marks=pytest.mark.slow), "fresh"])
def test_memory_stays_small_whatever_the_size(tmp_path: Path, how: str) -> None:
    write_zeros(tmp_path / "small", hidden_size=1024, intermediate_size=5120, vocab_size=11, num_hidden_layers=1)
    words = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "wide"), how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    assert (tmp_path / "wide" / "model.safetensors").stat().st_size > 230 << 20  # one tensor is 80 MiB
    assert int(done.stdout) < 40  # MiB, of two threads
    shutil.rmtree(tmp_path / "wide")


def test_a_bar_on_a_terminal(larger: Path, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pty = pytest.importorskip("pty")
    reader, writer = pty.openpty()

    def on_a_terminal() -> None:
        os.environ["TERM"] = "xterm"
        sys.stderr = open(writer, "w")  # noqa: SIM115
        upscale(larger, tmp_path / "wide", verify=False, exact=True)

    pid = in_a_child(on_a_terminal)
    os.close(writer)
    shown = b""
    while True:
        try:
            shown += os.read(reader, 1 << 16)
        except OSError:
            break
    os.close(reader)
    assert ended(pid) == 0
    assert b"MB" in shown
    assert b"left" in shown


def logits(model: torch.nn.Module | Path) -> Tensor:
    if isinstance(model, Path):
        model = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        return model(torch.arange(20).view(2, 10)).logits


@pytest.mark.quick("hidden=2,ffn=3,heads=2-False")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("times", [2, 3, "hidden=2,ffn=3,heads=2"])
def test_transformers_loads_it_and_computes_the_same(tmp_path: Path, tied: bool, times: Any) -> None:
    expected, told = logits(save(tmp_path / "small", tie_word_embeddings=tied)), list[str]()
    made = upscale(tmp_path / "small", tmp_path / "wide", times=times, shard_size="5KB", note=told.append, exact=True)
    assert made.comparison.ok
    assert "equivalent" in str(made)
    assert told == ["comparing the two models in float32"]
    assert torch.allclose(logits(tmp_path / "wide"), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide").save_pretrained(tmp_path / "again")
    assert torch.equal(logits(tmp_path / "again"), logits(tmp_path / "wide"))


def test_noise_separates_the_copies_and_moves_the_function_a_little(tmp_path: Path) -> None:
    expected, moved = logits(save(tmp_path / "small")), {}
    for name, noise in (("a", 0.3), ("more", 3.0), ("theory", mu.GaussianNoise(0.01, unit="theory"))):
        made = upscale(tmp_path / "small", tmp_path / name, noise=noise, seed=1, progress=False)
        assert made.comparison.ok
        assert made.comparison.as_recorded
        assert Record.load(tmp_path / name).growths == (GrowthStep(Times.of(2), mu.Copies(noise), 1),)
        moved[name] = float((logits(tmp_path / name) - expected).norm() / expected.norm())
    weights = {name: read_checkpoint(tmp_path / name) for name in moved}
    key = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights["a"][key], weights["more"][key])
    assert not torch.equal(weights["a"][key][0], weights["a"][key][1])
    assert 0 < moved["a"] < 0.2
    assert moved["a"] < moved["more"]


@pytest.mark.slow
def test_rounding_may_send_tokens_to_other_experts(tmp_path: Path) -> None:
    save(tmp_path / "small", "mixtral")
    exact = upscale(tmp_path / "small", tmp_path / "exact", times=3, exact=True)
    assert exact.comparison is not None
    rounded = upscale(tmp_path / "small", tmp_path / "rounded", times=3, dtype="bfloat16", exact=True)
    assert rounded.comparison is None
    assert "its tensors match the small model's, but rounding to 16 bits" in str(rounded)


# --- README.md beside a wide checkpoint: written anew, or the small model's, extended.
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
