"""Files as damage and malice leave them: fields dropped and retyped, bytes flipped, cut, deep, huge; by a seed."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing, suppress
from typing import Any

from mupscale.system.tensor_files import checksum

POOL: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 10**30, 1e300, float("inf"), float("nan"), "", "x", "../../x", "\x00", "\x1b[2J"),
    *([], {}, [1], ["x"], {"x": 1}, [[]], {"class_path": "os.system"}, "9" * 300, -(2**70)),
)
DEEP, DIGITS = b"[" * 3000 + b"]" * 3000, b"9" * 5000


def damage_json(content: bytes, seed: int) -> bytes:
    """A JSON text with something wrong in it."""
    chance = random.Random(seed)
    if chance.random() < 0.3:
        return damage_bytes(content, seed)
    values = json.loads(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        values = _changed(values, chance)
    return json.dumps(values).encode()


def damage_lines(content: bytes, seed: int) -> bytes:
    """JSON lines, one of which has something wrong in it."""
    chance = random.Random(seed)
    lines = content.splitlines(keepends=True)
    place = chance.randrange(len(lines))
    lines[place] = damage_json(lines[place], seed) + b"\n" * chance.choice((0, 1, 1))
    return b"".join(lines)


def damage_bytes(content: bytes, seed: int) -> bytes:
    """Any file: cut, with bits flipped, with a part that is deep, huge, empty or somebody else's."""
    chance = random.Random(seed)
    place = chance.randrange(len(content) + 1)
    how = chance.randrange(7)
    if how == 0:
        return content[:place]
    if how == 1:
        return b""
    if how == 2:
        return content[:place] + chance.choice((DEEP, DIGITS, b"\xff\xfe", b"\x00" * 50, b"1e400")) + content[place:]
    if how == 3:
        return content[:place] + content[place + chance.randrange(1, 40) :]
    if how == 4:
        return chance.choice((DEEP, DIGITS, b"null", b"5", b"[1]", b'"x"', b"{}", b"{" * 3000))
    flipped = bytearray(content)
    for _ in range(chance.choice((1, 1, 3, 20))):
        at = chance.randrange(len(flipped))
        flipped[at] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def damage_safetensors(content: bytes, seed: int) -> bytes:
    """A safetensors file, its header's JSON changed with its length, or its bytes as they come."""
    chance = random.Random(seed)
    if chance.random() < 0.4:
        return damage_bytes(content, seed)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    inner = [name for name, text in metadata.items() if text[:1] in "[{"]
    if inner and chance.random() < 0.7:  # what mupscale keeps in there is JSON, too
        name = chance.choice(inner)
        metadata[name] = damage_json(metadata[name].encode(), seed).decode("utf-8", "replace")
        if name != "checksums" and "checksums" in metadata:  # as somebody would who knows them
            sums = json.loads(metadata["checksums"]) | {f"metadata/{name}": checksum(metadata[name].encode())}
            metadata["checksums"] = json.dumps(sums)
        text = json.dumps(header).encode()
    else:
        text = damage_json(content[8 : 8 + length], seed)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def damage_sqlite(content: bytes, seed: int) -> bytes:
    """A SQLite file with something wrong in one of its rows or tables, or in its bytes as they come."""
    chance = random.Random(seed)
    if chance.random() < 0.4:
        return damage_bytes(content, seed)
    plain = content[:18] + b"\x01\x01" + content[20:]  # without a log beside it, which would not be in memory
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(plain)
        database.execute("PRAGMA foreign_keys = OFF")
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        filled = [name for name in tables if database.execute(f"SELECT 1 FROM {name}").fetchone()]
        for _ in range(chance.choice((1, 1, 2, 5))):
            with suppress(sqlite3.Error, IndexError, ValueError):  # refused by the tables, or damaged already
                _change_database(database, chance.choice(filled), chance)
        database.commit()
        return database.serialize()


def _change_database(database: sqlite3.Connection, table: str, chance: random.Random) -> None:
    """One value retyped, one row or table dropped."""
    how = chance.random()
    rows = [row for (row,) in database.execute(f"SELECT rowid FROM {table}")]
    column = chance.choice(database.execute(f"PRAGMA table_info({table})").fetchall())[1]
    if how < 0.1:
        database.execute(f"DROP TABLE {table}")
    elif how < 0.2:
        database.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO strange")
    elif how < 0.3:
        database.execute(f"DELETE FROM {table} WHERE rowid = ?", (chance.choice(rows),))
    else:
        row = chance.choice(rows)
        (value,) = database.execute(f"SELECT {column} FROM {table} WHERE rowid = ?", (row,)).fetchone()
        changed: Any = chance.choice(POOL)
        if isinstance(value, str) and value[:1] in "[{" and chance.random() < 0.7:  # what optuna keeps in there is JSON
            changed = damage_json(value.encode(), chance.randrange(10**6)).decode("utf-8", "replace")
        if isinstance(changed, dict | list) or (isinstance(changed, int) and abs(changed) >= 1 << 63):
            changed = json.dumps(changed)
        database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (changed, row))


def _changed(values: Any, chance: random.Random) -> Any:
    """One field dropped, retyped, renamed or doubled, somewhere."""
    if not isinstance(values, dict | list) or not values or chance.random() < 0.08:
        return chance.choice(POOL)
    if isinstance(values, list):
        place = chance.randrange(len(values))
        changed = list(values)
        if chance.random() < 0.25:
            return changed[:place] if chance.random() < 0.5 else [*changed, changed[place]]
        changed[place] = _changed(changed[place], chance)
        return changed
    name = chance.choice(list(values))
    how = chance.random()
    if how < 0.2:
        return {key: value for key, value in values.items() if key != name}
    if how < 0.3:
        return {**values, "strange": chance.choice(POOL)}
    if how < 0.5:
        return {**values, name: chance.choice(POOL)}
    return {**values, name: _changed(values[name], chance)}
