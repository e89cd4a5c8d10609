"""The store of a command's replays, as a test looks into it and damages it."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def rows(store: Path, columns: str = "key") -> list[Any]:
    """These columns of the replays that a store holds; none where it is not there yet."""
    if not store.is_file():
        return []
    with closing(sqlite3.connect(store, timeout=60)) as database:
        try:
            return database.execute(f"SELECT {columns} FROM replays ORDER BY key").fetchall()
        except sqlite3.OperationalError:  # its tables are being made
            return []


def change(store: Path, statement: str) -> None:
    """Change a store as dsim never does."""
    with closing(sqlite3.connect(store, isolation_level=None)) as database:
        database.execute(statement)
