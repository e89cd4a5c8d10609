"""The store of a command's replays, as a test looks into it and damages it."""

import sqlite3
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any


def rows(store: Path, columns: str = "key") -> list[Any]:
    """These columns of the replays that a store holds; none where it is not there yet."""
    if not store.is_file():
        return []
    with closing(sqlite3.connect(store, timeout=60)) as database:
        try:
            found = database.execute(f"SELECT {columns} FROM replays ORDER BY key").fetchall()
            words = "".join(row[0] for row in database.execute("SELECT text FROM words")).encode()
            return [tuple(_text(value, words) for value in row) for row in found]
        except sqlite3.OperationalError:  # its tables are being made
            return []


def _text(value: Any, words: bytes) -> Any:
    if not isinstance(value, bytes):
        return value
    return zlib.decompressobj(-zlib.MAX_WBITS, words).decompress(value).decode()


def change(store: Path, statement: str) -> None:
    """Change a store as dsim never does."""
    with closing(sqlite3.connect(store, isolation_level=None)) as database:
        database.execute(statement)
