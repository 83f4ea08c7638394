"""Files and folders that are, at every moment, the old one or the new one, whatever is killed or full.

The one door for writing and deleting: below a folder that a person named, no link is followed. Locks on files end
together with the process that holds them; the one of a run says which process has it, on which machine.
What somebody else may have written is read up to a bounded size and depth, or refused by name.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import platform
import re
import secrets
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from mupscale.system.errors import MupscaleError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def machine_name() -> str:
    """This machine, and the process namespace in it: where process numbers mean the same."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{platform.node()} {space}".strip()


def is_process_alive(pid: int) -> bool:
    """Whether a process of this machine still runs; yes where one cannot ask without ending it (Windows)."""
    if os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:1]
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return state != ["Z"]  # dead, but its parent has not looked yet


_named: list[str] = []


@contextmanager
def writing_into(folder: str | Path) -> Iterator[None]:
    """Until the end, no link below this folder is followed to write or to remove."""
    place = os.path.abspath(folder)
    _named.append(place)
    try:
        yield
    finally:
        _named.remove(place)


def check_links(path: Path) -> bool:
    """Whether a path is below a folder that is written into; an error if any part of it there is a link."""
    place = os.path.abspath(path)
    folders = [folder for folder in _named if place.startswith(os.path.join(folder, ""))]
    if not folders:
        return False
    folder = part = min(folders, key=len)  # of those inside each other the outermost was named by a person
    for name in os.path.relpath(place, folder).split(os.sep):
        part = os.path.join(part, name)
        if os.path.islink(part):
            raise MupscaleError(
                f"{part} is a link to {os.readlink(part)}, and links inside {folder} are not followed to write "
                f"or to remove: put a real file or folder there, or name the target itself"
            )
    return True


def open_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    """A file to write into, as `open` gives it; below a folder that is written into, an ordinary one and no link."""
    is_below = check_links(path)

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | (_UNMOVED if is_below else 0), 0o666)  # a link that came a moment ago included
        if is_below and not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise MupscaleError(f"{path} is not a regular file, so nothing is written into it")
        return handle

    return open(path, mode, opener=opener, **options)


_UNMOVED = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # nor is a pipe waited for


def make_folder(path: Path) -> Path:
    """The folder, made with those that it lies in where there is none."""
    check_links(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link itself; nothing where there is none."""
    check_links(path.parent)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move(path: Path, target: Path) -> None:
    """Give a file or folder another name, in place of what has it, and see to it that this is on the disk."""
    for parent in {path.parent, target.parent}:
        check_links(parent)
    os.replace(path, target)
    sync_folder(target.parent)


def replace_folder(new: Path, old: Path) -> None:
    """Put a finished folder into the place of another, which is gone only then."""
    aside = old.with_name(f".{old.name}.{secrets.token_hex(8)}")
    move(old, aside)
    move(new, old)
    remove(aside)


def sync_folder(folder: Path) -> None:
    """See to it that what was renamed in a folder is on the disk; nothing where folders cannot be synced."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def exclusive_lock(
    path: Path, *, refusal: str | None = None, before_waiting: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Hold the lock of this file, which is made if there is none; no other process holds it meanwhile.

    If one does, raise the refusal, or wait for it where none is given. before_waiting: called once, if it must wait.
    On Windows there is no such lock, and nobody waits. Whoever has it works in its folder: see `writing_into`.
    """
    with writing_into(path.parent):
        if fcntl is None:
            yield
            return
        file = _lock_file(path, None if refusal is not None else before_waiting)
        if file is None:
            raise MupscaleError(refusal)
        with file:
            yield


def _lock_file(path: Path, before_waiting: Callable[[], object] | None = None) -> IO[str] | None:
    """The file, open and locked as long as it is; None where another process has it, and nobody is to wait."""
    while True:
        file: IO[str] = open_file(path, "a+", encoding="utf-8")
        if fcntl is None:
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if before_waiting is None:
                file.close()
                return None
            before_waiting()
            before_waiting = bool  # nothing: it is said once
            fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
                return file
        file.close()  # who had it before has removed or moved it meanwhile


_NAME = ".lock"
_TOUCH_EVERY = 10.0  # seconds
GRACE = 45.0
"""Seconds without a touch after which the lock of another machine is stale."""


class RunLock:
    """The lock of a folder, once it is taken; the second who asks is refused with the process that has it.

    Whoever has it works in the folder: see `writing_into`.
    """

    def __init__(self, folder: Path, grace: float = GRACE) -> None:
        self.path = folder / _NAME
        with ExitStack() as held:
            held.enter_context(writing_into(folder))
            self.file: IO[str] | None = _lock_file(self.path)
            if self.file is None:
                raise MupscaleError(f"{_describe(_owner(self.path))} is training in {folder}: wait for it, or stop it")
            held.callback(self.file.close)
            self._wait_for_other_machine(folder, grace)
            self.file.truncate(0)
            self.file.write(json.dumps({"pid": os.getpid(), "machine": machine_name()}) + "\n")
            self.file.flush()
            self._held = held.pop_all()
        self._released = threading.Event()
        threading.Thread(target=self._keep_touching, name="run-lock", daemon=True).start()

    def _wait_for_other_machine(self, folder: Path, grace: float) -> None:
        """The lock is ours, but its file names another machine, which may not see our lock, nor we its."""
        owner = _owner(self.path)
        if owner is None or owner["machine"] == machine_name():
            return  # nobody, or a process that is dead: the system would have kept its lock
        seen = self.path.stat().st_mtime_ns
        end = time.monotonic() + grace
        while time.monotonic() < end:
            time.sleep(min(1.0, grace / 10))
            if self.path.stat().st_mtime_ns != seen:
                raise MupscaleError(f"{_describe(owner)} is training in {folder}: wait for it, or stop it")

    def _keep_touching(self) -> None:
        """Show other machines that somebody is here."""
        while not self._released.wait(_TOUCH_EVERY):
            with suppress(OSError):
                os.utime(self.file.fileno() if self.file and os.utime in os.supports_fd else self.path)

    def release(self) -> None:
        self._released.set()
        if self.file is not None:
            with suppress(OSError):
                self.path.unlink()
            self._held.close()
            self.file = None


def _owner(path: Path) -> dict[str, Any] | None:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return {"pid": int(owner["pid"]), "machine": str(owner["machine"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _describe(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "another process"
    where = "this machine" if owner["machine"] == machine_name() else owner["machine"].partition(" ")[0] or "another"
    return f"process {owner['pid']} of {where}"


_MARK = ".mupscale-"  # torch.save writes the name before the last dot into its file: that must always be the same
_LONG = 86_400.0  # seconds after which what is half-written is nobody's any more
_TEMPORARY = re.compile(
    r"\..+\.mupscale-(?P<place>[0-9a-f]{6})-(?P<pid>\d+)(-[0-9a-f]{8})?"
    r"|\..+\.tmp|\.tmp[A-Za-z0-9]{6}"  # of safetensors
)


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside this one; what is written there takes its place when it is whole and on the disk.

    A link of this name is replaced, and what it leads to stays. durable: whether to wait for the disk.
    """
    check_links(path.parent)
    temporary = path.with_name(f".{path.name}{_MARK}{_here()}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield temporary
        if durable:
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file that is, at every moment, the old one or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, values: Any) -> Path:
    """Write plain values as a JSON file, whole or not at all, in a folder that is made; an error names the file."""
    try:
        make_folder(path.parent)
        replace_text(path, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise MupscaleError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A hidden folder beside this path that one process alone has; it takes the name when all in it is on the disk.

    If anything goes wrong it goes away. Nobody can foresee its name; a file beside it, which is locked meanwhile, keeps
    it in mind, and what a killed process has left is cleared by the next one.
    """
    place = path.absolute()
    memory = place.with_name(f".{place.name}.mupscale-partial.json")
    make_folder(place.parent)
    refusal = f"another run is writing {path} at this moment: wait for it, or choose another name"
    with exclusive_lock(memory, refusal=refusal):
        _clear_partial(memory)
        hidden = place.with_name(f".{place.name}.mupscale-partial-{secrets.token_hex(8)}")
        try:
            _remember(memory, hidden)
            hidden.mkdir()
            _remember(memory, hidden)
            yield hidden
            for each in hidden.rglob("*"):
                if each.is_file():
                    with open(each, "rb") as file:
                        os.fsync(file.fileno())
            for folder in (*filter(Path.is_dir, hidden.rglob("*")), hidden):
                sync_folder(folder)
            with suppress(FileNotFoundError):  # an empty folder may stand there
                place.rmdir()
            os.rename(hidden, place)
            sync_folder(place.parent)
        except BaseException:
            with suppress(OSError):
                remove(hidden)
            raise
        finally:
            memory.unlink(missing_ok=True)


def _remember(memory: Path, partial: Path) -> None:
    """Write down which folder is being written, and its number on the disk once it has one."""
    number = partial.lstat().st_ino if partial.exists() else None
    with open_file(memory, "w", encoding="utf-8") as file:
        file.write(json.dumps({"folder": partial.name, "number": number}) + "\n")


def _clear_partial(memory: Path) -> None:
    """Remove the folder that a killed process has written down: that very one, and none that somebody named so."""
    try:
        values = read_json(memory)
        partial, number = memory.with_name(str(values["folder"])), values["number"]
    except (OSError, MupscaleError, ValueError, KeyError, TypeError):
        return  # a new file, or nobody's note
    is_ours = re.fullmatch(re.escape(memory.stem) + "-[0-9a-f]{16}", partial.name) and not partial.is_symlink()
    if is_ours and partial.is_dir() and number in (None, partial.lstat().st_ino):
        partial.rmdir() if number is None else remove(partial)  # None: it was killed before there was a file in it


def clear_leftovers(folder: Path, alone: bool = False) -> None:
    """Remove what killed processes have left in a folder half-written.

    alone: whether nobody else writes there at this moment; else only what a process of this machine left that is dead,
    or what is older than a day.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if (match := _TEMPORARY.fullmatch(path.name)) is None:
            continue
        is_dead = match["pid"] is not None and match["place"] == _here() and not is_process_alive(int(match["pid"]))
        with suppress(OSError):  # it is in nobody's way
            if alone or is_dead or time.time() - path.lstat().st_mtime > _LONG:
                remove(path)


def _here() -> str:
    return hashlib.sha256(machine_name().encode()).hexdigest()[:6]


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint_files(paths: Iterable[Path]) -> str:
    """Eight digits that change with any byte of the files, in their order."""
    total = 0
    for path in paths:
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                total = zlib.crc32(part, total)
    return f"{total:08x}"


FOLD, FLOOR = 200, 64 << 20


def most_unpacked(packed: int) -> int:
    """The bytes that a packed file of this size may unpack to: 200 times its size, and 64 MiB of a small one."""
    return max(FLOOR, FOLD * packed)


def too_much_unpacked(path: Path, packed: int, remedy: str = "unpack it yourself") -> MupscaleError:
    """The refusal of a file that unpacks to more than that."""
    return MupscaleError(
        f"{path} has {packed:,} bytes and unpacks to more than {FOLD} times as many, which no real data does: {remedy} "
        f"if you trust it"
    )


class _Bounded(io.RawIOBase):
    """What gzip unpacks, up to a number of bytes."""

    def __init__(self, source: gzip.GzipFile, path: Path, packed: int) -> None:
        self._source, self._path, self._packed = source, path, packed
        self._left = most_unpacked(packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._source.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise too_much_unpacked(self._path, self._packed)
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


def open_gzip(path: Path, raw: IO[bytes] | None = None) -> IO[bytes]:
    """A gzip file to be read, of which no more is unpacked than `most_unpacked` allows.

    raw: the file where it is open already.
    """
    packed = path.stat().st_size if raw is None else os.fstat(raw.fileno()).st_size
    source = gzip.GzipFile(path) if raw is None else gzip.GzipFile(fileobj=raw)
    return io.BufferedReader(_Bounded(source, path, packed), 1 << 16)


MOST_BYTES, MOST_DEPTH = 128 << 20, 100
_MOST_CONTAINERS, _MOST_VALUES = 2_000_000, 20_000_000  # a pair of brackets takes 3 bytes of a file and 80 of memory
_NESTED = {dict, list}
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def read_json(path: str | Path) -> Any:
    """The values in a JSON file; an OSError where it cannot be opened, and a sentence for whatever else is wrong."""
    return parse_json(read_regular(path), path)


def read_regular(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of an ordinary file of a bounded size: a pipe would be waited for, and a device never ends."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        kind = _KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is not None:
            raise MupscaleError(f"{path} is {kind}, not a file")
        if status.st_size > most:
            raise MupscaleError(
                f"{path} has {status.st_size:,} bytes, more than the {most:,} that are read of such a file"
            )
        return file.read(most + 1)[:most]


def open_below(folder: Path, *names: str) -> BinaryIO:
    """An ordinary file inside a folder, open for reading. names: of the folders in between and of the file.

    Below the folder no link is followed, wherever it leads and whenever it appears: an OSError. The folder itself may
    be one. Nothing is reached by "..", nor by a name that is a path.
    """
    if any(name in ("", ".", "..") or Path(name).name != name for name in names):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.path.join(*names))
    flags = os.O_RDONLY | _UNMOVED | getattr(os, "O_BINARY", 0)
    if os.open in os.supports_dir_fd:
        handle = _open_step_by_step(folder, names, flags)
    else:  # Windows, where making links takes rights of its own
        path = folder
        for name in names:
            path = path / name
            if path.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", names[-1])
    return open(handle, "rb")


def _open_step_by_step(folder: Path, names: Sequence[str], flags: int) -> int:
    """A file by way of the folders above it, each opened in the one before: none can become a link meanwhile."""
    *between, last = names
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in between:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = inner
        return os.open(last, flags, dir_fd=here)
    finally:
        os.close(here)


def parse_json(text: str | bytes, where: object) -> Any:
    """The values of a JSON text that is not nested too deeply; `where` is named in the error.

    >>> from mupscale.system import parse_json
    >>> parse_json("[" * 1000 + "]" * 1000, "deep.json")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: deep.json is damaged: its values are nested more than 100 deep
    """
    deep = f"its values are nested more than {MOST_DEPTH} deep"
    _check_count(text, where)
    try:
        values = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise MupscaleError(f"{where} is damaged: {deep}") from None
    except UnicodeDecodeError as error:
        raise MupscaleError(f"{where} is damaged: it is not UTF-8 text ({error.reason})") from None
    except ValueError as error:
        raise MupscaleError(f"{where} is damaged: {error}") from None
    if _is_deeper(values, MOST_DEPTH):
        raise MupscaleError(f"{where} is damaged: {deep}")
    return values


def _check_count(text: str | bytes, where: object) -> None:
    """Refuse a JSON text whose values would take gigabytes; marks that stand inside a string count as well."""
    limits = (("[{", _MOST_CONTAINERS, "lists and mappings"), (",:", _MOST_VALUES, "values"))
    for marks, most, what in limits:
        held = 0
        for mark in marks:
            held += text.count(mark) if isinstance(text, str) else text.count(mark.encode())
        if held > most:
            raise MupscaleError(
                f"{where} holds about {held:,} {what}, more than the {most:,} that are read of such a file"
            )


def _is_deeper(values: Any, most: int) -> bool:
    level = [values]
    for _ in range(most + 1):
        parts = [value.values() if isinstance(value, dict) else value for value in level if type(value) in _NESTED]
        nested = [
            part for part in parts if not _NESTED.isdisjoint(map(type, part))
        ]  # not the million numbers of a curve
        level = [inner for part in nested for inner in part if type(inner) in _NESTED]
        if not level:
            return False
    return True
