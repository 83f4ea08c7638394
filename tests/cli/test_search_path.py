"""The current folder may be a download: its files are never imported in place of what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")

from hf_files import llama_config, llama_tensors, write_checkpoint
from mupscale.cli import main

SHADOWS = ("yaml", "rich", "jsonargparse", "torch", "numpy", "safetensors", "transformers", "difflib", "json", "mine")


@pytest.fixture
def download(tmp_path: Path) -> Path:
    """A checkpoint with Python files beside it that leave a trace when they are run."""
    folder = write_checkpoint(tmp_path / "download", llama_config(), llama_tensors(llama_config()))
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open(r'{tmp_path / 'ran'}', 'a').write('{name} ')\n")
    return folder


def test_python_m_runs_nothing_of_the_current_folder(download: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "mupscale", "inspect", "."]
    done = subprocess.run(words, cwd=download, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "embed_tokens" in done.stdout
    assert not (download.parent / "ran").exists()


def test_the_command_looks_there_last_and_only_for_classes(download: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(download)
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    assert main(["inspect", "."]) == 0
    assert main(["recipes"]) == 0
    assert sys.path == before
    assert not (download.parent / "ran").exists()
    assert main(["inspect", ".", "--describe", "mine"]) == 0
    assert (download.parent / "ran").read_text() == "mine "
    assert sys.path == [*before, str(download)]
    sys.path[:] = before
    assert main(["train", "nowhere.yaml"]) == 2
    assert sys.path == [*before, str(download)]
