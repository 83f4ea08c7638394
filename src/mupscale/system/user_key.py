"""A key of this user on this machine, with which mupscale recognises what it has written itself.

A folder that somebody passes on can hold anything but a signature by a key that lies outside it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

_BYTES = 32


def sign(text: str) -> str | None:
    """A signature of this user's; None where no key can be kept. The first one makes the key.

    >>> len(sign("this"))
    64
    """
    key = _read_key() or _make_key()
    return None if key is None else _signature(key, text)


def is_signed(text: str, signature: str) -> bool:
    """Whether `sign` gave this signature for this text, to this user on this machine."""
    key = _read_key()
    return key is not None and hmac.compare_digest(_signature(key, text).encode(), signature.encode())


def _signature(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _place() -> Path | None:
    """The key's file in the user's configuration, by the rules of XDG."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    with suppress(RuntimeError):  # no home
        return (Path(folder) if os.path.isabs(folder) else Path.home() / ".config") / "mupscale" / "key"
    return None


def _read_key() -> bytes | None:
    """The key, if it is this user's file and nobody else can read it."""
    path = _place()
    if path is None:
        return None
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        is_private = os.name == "nt" or (status.st_uid == os.getuid() and not status.st_mode & 0o077)
        key = file.read(_BYTES + 1) if stat.S_ISREG(status.st_mode) and is_private else b""
    return key if len(key) == _BYTES else None


def _make_key() -> bytes | None:
    """A new key, whole before it has its name; if another process was faster, its key."""
    path = _place()
    if path is None:
        return None
    hidden = path.with_name(f".{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
        with suppress(FileExistsError):
            os.link(hidden, path)
    except OSError:
        return None
    finally:
        with suppress(OSError):
            hidden.unlink()
    return _read_key()
