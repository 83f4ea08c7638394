"""The one door for writing and deleting, and that nobody goes around it; pickles have one, too."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mupscale.system import (
    MupscaleError,
    RunLock,
    appearing,
    clear_leftovers,
    exclusive_lock,
    files,
    make_folder,
    move,
    open_file,
    parse_json,
    remove,
    replace_text,
    replacing,
    writing_into,
)
from refusals import refuses
from syntax import nodes

SOURCE = Path(__file__).parents[2] / "src" / "mupscale"
PATHS = {"mkdir", "unlink", "rmdir", "rename", "touch", "write_text", "write_bytes", "symlink_to", "hardlink_to"}
WRITERS = PATHS | {"savefig", "save_file", "save_pretrained", "mkdtemp", "mkstemp", "NamedTemporaryFile"}
OF_MODULES = {
    "os": {*PATHS, "replace", "remove", "truncate", "makedirs", "removedirs", "symlink", "link"},
    "shutil": {"rmtree", "copy", "copy2", "copyfile", "copytree", "move"},
    "torch": {"save"},
    "np": {"save", "savez", "savetxt"},
}
PICKLES = {"pickle", "marshal", "shelve", "dill"}
LOOKED_AT = {"open", "load", *WRITERS}.union(*OF_MODULES.values())
AROUND_THE_DOOR = {
    "plots.py: fig.savefig": "into the temporary file of `replacing`",
    "hf/groups.py: torch.save": "into the temporary file of `replacing`",
    "hf/source.py: tempfile.mkdtemp": "a new folder of the system's",
    "hf/gguf_files.py: link.symlink_to": "into that folder, where transformers sees the file alone",
    "hf/gguf_files.py: shutil.copyfile": "the same where links cannot be made",
    "hf/gguf_files.py: config.save_pretrained": "into that folder",
    "hf/gguf_files.py: tokenizer.save_pretrained": "into that folder",
    "hf/gguf_files.py: save_file": "into that folder",
    "hf/trainer.py: model.save_pretrained": "into the folder of a Trainer, or the hidden one of `appearing`",
    "hf/trainer.py: torch.save": "into that folder",
    "train/dcp.py: torch.save": "into memory",
    "train/run_models.py: shutil.copytree": "into the hidden folder of `appearing`",
    "train/run_models.py: shutil.copyfile": "into the temporary file of `replacing`",
    "study/family_run.py: shutil.copytree": "into the hidden folder of `appearing`",
    "study/family_run.py: model.save_pretrained": "into that folder",
    "hf/language_model.py: self.model.save_pretrained": "which this is called for",
    "hf/trainer.py: tokenizer.save_pretrained": "into that folder",
    "hf/trainer.py: type(self).save_pretrained": "what the user has called, where he wants it",
    "train/run_folder.py: folder.rmdir": "folders that this run has made, where they are empty",
    "cli/command_table.py: open": "the null device",
}


@functools.cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Every call of such a function outside system/: the module that it is in, the function's name, and itself."""
    found = []
    for path in sorted(SOURCE.glob("**/*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for node in nodes(path) if not name.startswith("system/") else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                last = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                if last in LOOKED_AT or getattr(getattr(node.func, "value", None), "id", "") in PICKLES:
                    found.append((name, ast.unparse(node.func), node))
    return found


def writes(function: str, call: ast.Call) -> bool:
    """Whether a call changes files by itself, as far as its name tells."""
    module, _, name = function.rpartition(".")
    if name == "open":
        given = [node for node in (*call.args, *(k.value for k in call.keywords)) if isinstance(node, ast.Constant)]
        return any(re.fullmatch(r"[rwaxbt]*[wax+][wbt+]*", str(node.value)) for node in given)
    return name in OF_MODULES.get(module, WRITERS)


def test_nobody_writes_or_deletes_around_the_door() -> None:
    found = {f"{name}: {function}" for name, function, call in calls() if writes(function, call)}
    assert found == set(AROUND_THE_DOOR)


def test_nobody_unpickles_without_restriction() -> None:
    """torch.load weights-only; of pickle the error alone, and the one reader that says what it allows."""
    pickles = {function for _, function, _ in calls() if function.startswith(tuple(f"{name}." for name in PICKLES))}
    assert pickles == {"pickle.UnpicklingError"}
    for name, _, call in (one for one in calls() if one[1] in ("torch.load", "np.load")):
        assert {"weights_only=True", "allow_pickle=False"} & {ast.unparse(k) for k in call.keywords}, name
    assert "pickle.Unpickler" in (SOURCE / "train" / "dcp.py").read_text()


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """Somebody's folder, in which nothing may change."""
    folder = tmp_path / "victim"
    (folder / "nested").mkdir(parents=True)
    for name in ("letter", "nested/letter", ".x.12345.tmp"):
        (folder / name).write_text("dear")
    yield folder
    assert sorted(path.name for path in folder.rglob("*")) == [".x.12345.tmp", "letter", "letter", "nested"]
    assert {path.read_text() for path in folder.rglob("*") if path.is_file()} == {"dear"}


@pytest.fixture
def run(tmp_path: Path, victim: Path) -> Path:
    """A folder with links to the victim's in it."""
    folder = tmp_path / "run"
    (folder / "inner").mkdir(parents=True)
    (folder / "file").symlink_to(victim / "letter")
    (folder / "folder").symlink_to(victim)
    (folder / "inner" / "folder").symlink_to("../../victim")
    (folder / "nothing").symlink_to(victim / "new")
    return folder


@pytest.mark.parametrize("place", ["folder/letter", "folder/nested/letter", "inner/folder/letter", "folder/new"])
def test_no_part_of_a_path_may_be_a_link(run: Path, place: str) -> None:
    path = run / place
    actions = [
        lambda: open_file(path, "w"),
        lambda: open_file(path, "a"),
        lambda: make_folder(path / "deeper"),
        lambda: remove(path),
        lambda: remove(path.parent / "nested"),
        lambda: replace_text(path, "x"),
        lambda: move(path, run / "here"),
        lambda: move(run / "inner", path),
        lambda: clear_leftovers(run / "folder", alone=True),
        lambda: RunLock(path.parent),
        lambda: exclusive_lock(path.parent / ".lock").__enter__(),
        lambda: appearing(path).__enter__(),
    ]
    for action in actions:
        with (
            writing_into(run),
            pytest.raises(MupscaleError, match=r"is a link to .*links inside .*run are not followed"),
        ):
            action()


@pytest.mark.parametrize("name", ["file", "nothing"])
def test_a_link_in_the_place_of_a_file(run: Path, victim: Path, name: str) -> None:
    """It is replaced or removed itself; what would write through it is refused."""
    path = run / name
    with writing_into(run):
        for mode in ("w", "a", "r+", "x"):
            with pytest.raises(MupscaleError, match="is a link to"):
                open_file(path, mode)
        replace_text(path, "new")
        assert not path.is_symlink()
        remove(run / "folder")
        assert not (run / "folder").is_symlink()
    assert path.read_text() == "new"


def test_a_link_that_comes_after_the_look(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupscale.system.files.os.path.islink", lambda path: False)
    with writing_into(run), pytest.raises(OSError, match="symbolic link"):
        open_file(run / "file", "w")


def test_locks_follow_no_link(run: Path, victim: Path) -> None:
    (run / ".lock").symlink_to(victim / "letter")
    for take in (lambda: RunLock(run), lambda: exclusive_lock(run / ".lock").__enter__()):
        with pytest.raises(MupscaleError, match=r"\.lock is a link to"):
            take()
    (run / ".lock").unlink()
    os.mkfifo(run / ".lock")
    for take in (lambda: RunLock(run), lambda: exclusive_lock(run / ".lock").__enter__()):
        with pytest.raises((MupscaleError, OSError), match=r"not a regular file|No such device"):
            take()


def test_what_a_person_names_may_be_a_link(run: Path, tmp_path: Path) -> None:
    """And so may what it lies in; the outermost that was named counts."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    lock = RunLock(tmp_path / "link")
    with writing_into(tmp_path / "link" / "inside"):
        replace_text(make_folder(tmp_path / "link" / "inside") / "text", "x")
    lock.release()
    assert (tmp_path / "real" / "inside" / "text").read_text() == "x"
    with writing_into(run), pytest.raises(MupscaleError), exclusive_lock(run / "folder" / ".lock"):
        pass
    with writing_into(run / "folder"), open_file(run / "folder" / "letter", "a"):
        pass


def test_the_end_of_work_is_the_end_of_looking(run: Path) -> None:
    RunLock(run).release()
    with exclusive_lock(run / ".lock"):
        pass
    with open_file(run / "file", "a"):  # by a person who named this very file
        pass


def test_nobody_can_foresee_a_temporary_name(tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        with replacing(tmp_path / "text") as temporary:
            names.add(temporary.name)
            temporary.write_text("x")
    assert len(names) == 2
    (tmp_path / names.pop()).touch()
    clear_leftovers(tmp_path, alone=True)
    assert os.listdir(tmp_path) == ["text"]


def test_what_goes_wrong_inside_is_raised_and_the_lock_freed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), exclusive_lock(tmp_path / ".lock"):
        _ = 1 / 0
    with exclusive_lock(tmp_path / ".lock", refusal="taken"):
        pass


def test_where_there_are_no_locks_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    with exclusive_lock(tmp_path / ".lock"), exclusive_lock(tmp_path / ".lock", refusal="taken"):
        assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" + "[]," * 2_000_000 + "0]", "holds about 2,000,001 lists and mappings, more than the 2,000,000"),
        ("[" + "0," * 20_000_001 + "0]", "holds about 20,000,001 values, more than the 20,000,000"),
    ],
    ids=["lists", "numbers"],
)
def test_json_that_takes_far_more_memory_than_bytes(text: str, said: str) -> None:
    """3 bytes of a file are 80 in memory: a file of the largest size would take 5 GB."""
    refuses(f"^a.json {said}", parse_json, text, "a.json")
    refuses(f"^a.json {said}", parse_json, text.encode(), "a.json")
