"""Where studies are stored: a SQLite file, a journal or a database; errors there are explained in one sentence."""

from __future__ import annotations

import errno
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, TypeVar

from mupscale.system import MupscaleError, check_links, open_file, require

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

T = TypeVar("T")
PATIENCE = 30.0  # seconds for which a storage may be locked or gone
_DAMAGE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class Storage:
    """A storage of optuna's, by path, journal:PATH or URL; a call is tried again for a while before it fails."""

    def __init__(self, place: str | Path, patience: float = PATIENCE) -> None:
        self.place, self.patience = str(place), patience
        self.shown = re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", self.place)  # without its password
        with self._explain("opened"):
            self.optuna: BaseStorage = _open(self.place, patience)

    def use(self, call: Callable[[], T]) -> T:
        """The result of the call, tried again for a while where the storage is out of reach; then a MupscaleError."""
        end = time.monotonic() + self.patience
        while True:
            try:
                return call()
            except Exception as error:
                if not _is_temporary(error) or time.monotonic() > end:
                    with self._explain("used"):
                        raise
            time.sleep(min(1.0, self.patience / 10))

    @contextmanager
    def _explain(self, verb: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            cause = _describe_cause(error, self.patience)
            if cause is None:
                raise
            after_use = "; all that it was told is kept, and the same command goes on from there"
            remedy = "" if verb == "opened" else after_use
            raise MupscaleError(f"the study's storage {self.shown} cannot be {verb}: {cause}{remedy}") from error


def _open(place: str, patience: float) -> BaseStorage:
    optuna = load_optuna()
    if place.startswith("journal:"):
        path = place.removeprefix("journal:").removeprefix("//")
        check_links(Path(path))
        return optuna.storages.JournalStorage(_journal(path))
    check_links(Path(place))
    url, options = place, dict[str, Any]()
    if "://" not in place:  # opened by itself, since ?, % and # of its path would mean something else in a URL
        import sqlite3

        url = "sqlite:///study.db"  # so that SQLAlchemy knows the kind; the path is given to SQLite itself
        options["creator"] = lambda: sqlite3.connect(place, timeout=patience, check_same_thread=False)
    elif place.startswith("sqlite"):
        options["connect_args"] = {"timeout": patience}
    else:
        waits = {"connect_timeout": max(2, int(patience / 3))} if place.startswith("postgresql") else {}
        options |= {"pool_pre_ping": True, "connect_args": waits}
    for attempt in range(5):  # two workers may create the tables at the same moment: the second then finds them there
        try:
            database = optuna.storages.RDBStorage(url, engine_kwargs=options)
            break
        except Exception as error:
            said = str(_driver_error(error)).lower()
            if attempt == 4 or not ("already exists" in said or "unique" in said):
                raise
            time.sleep(0.1 * (attempt + 1))
    weakref.finalize(database, database.engine.dispose)  # connections would warn that nobody closed them
    if database.engine.dialect.name == "sqlite":
        _serialize_transactions(database.engine)
    return optuna.storages.get_storage(database)


def load_optuna() -> Any:
    """Optuna, without its running commentary."""
    optuna = require("optuna", reason="sweeps need optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what it warns of, it then raises
    return optuna


def _serialize_transactions(engine: Any) -> None:
    """One SQLite transaction at a time, from its first read on: or two workers could take the same trial."""
    from sqlalchemy import event

    @event.listens_for(engine, "connect")
    def plain(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        connection.execute("PRAGMA synchronous=NORMAL")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()
    raw = engine.raw_connection()
    try:
        if raw.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            raw.execute("PRAGMA journal_mode=WAL")
    except Exception as error:  # somebody else is at it, or the file system has no shared memory: it works without
        if _describe_cause(error, 0) is None:
            raise
    finally:
        raw.close()


def _journal(path: str) -> Any:
    """Optuna's journal in a file, in which half a line, of a full disk or a killed process, does no harm."""
    from optuna.storages.journal import JournalFileBackend
    from optuna.storages.journal._file import get_lock_file

    class Journal(JournalFileBackend):  # type: ignore[misc]
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            with get_lock_file(self._lock), open_file(Path(self._file_path), "r+b") as file:
                end = file.seek(0, os.SEEK_END)
                while end and (file.seek(end - 1), file.read(1))[1] != b"\n":
                    end -= 1
                file.truncate(end)
            super().append_logs(logs)

    return Journal(path)


# ------------------------------------------------------------------------------------------------ what goes wrong


def _driver_error(error: BaseException) -> BaseException:
    """The database driver's own error, under optuna's and SQLAlchemy's."""
    from optuna.exceptions import StorageInternalError

    if isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    return getattr(error, "orig", None) or error


def _is_storage_error(error: BaseException) -> bool:
    import sqlite3

    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, StorageInternalError | SQLAlchemyError | sqlite3.Error | OSError)


def _is_temporary(error: BaseException) -> bool:
    """Whether waiting could help: a server that restarts, a network that comes back; not a full disk or a long lock.

    SQLite has no server: it has waited for locks already, and nothing else of it passes.
    """
    import sqlite3

    if not _is_storage_error(error) or isinstance(_driver_error(error), sqlite3.Error):
        return False
    text = str(_driver_error(error)).lower()
    hopeless = ("locked", "full", "disk i/o", "readonly", "read-only", "not a database", "malformed", "no such table")
    if any(word in text for word in hopeless):
        return False
    return not isinstance(error, OSError) or error.errno not in (*_FULL, errno.EACCES, errno.EROFS)


def _describe_cause(error: BaseException, patience: float) -> str | None:
    """What is wrong with the storage, in words; None for errors that are not the storage's."""
    text = (str(_driver_error(error)).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, ImportError):
        return "its database driver is missing; for PostgreSQL, pip install 'mupscale[sweep]'"
    if isinstance(error, ValueError) and "null byte" in text:  # a mistake in the name
        return None
    if "database is locked" in text:
        return f"another process has kept it locked for more than {patience:g} s"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{os.strerror(error.errno)}{f' ({error.filename})' if error.filename else ''}"
    if _is_storage_error(error):
        return text
    if isinstance(error, KeyError) and "does not exist" in text:
        return "the study has been deleted from it"
    if isinstance(error, RuntimeError) and ("schema" in text or "possess lock" in text):
        return text
    readers = {Path(frame.f_code.co_filename).parent.name for frame, _ in walk_tb(error.__traceback__)}
    if isinstance(error, _DAMAGE) and readers & {"journal", "_rdb", "storages"}:  # packages of optuna's
        return f"it is no {'journal' if 'journal' in readers else 'study'} of optuna's, or a damaged one"
    return None
