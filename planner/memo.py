"""The store of answers: a SQLite file with what was computed before, so that the same command goes on.

The key is the digest of a cell's question (contents.py), the answer is JSON: nothing is executed. Only the process that
opened the file reads and writes it.
"""

import json
import sqlite3
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from ..engine.errors import DsimError, MachineError
from ..files.interrupt import uninterrupted
from ..files.lock import Lock
from ..files.place import FolderKind, check_folder, hold_folder, remove
from ..files.read import cut
from ..files.write import write_whole
from .backend import Outcome, Pool, in_order
from .contents import Json, digest

C = TypeVar("C")
R = TypeVar("R")
Question = Callable[[C], Json]  # what tells a cell's answer

STORE = "replays.db"
FILES = (STORE, *(f"{STORE}-{kind}" for kind in ("wal", "shm", "journal")))  # the last during a write or after a kill
OF_THE_MACHINE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_BUSY)
PATIENCE = 60.0  # s for another process's write
QUESTION = "question"  # the key of the search that the file belongs to
APPLICATION = 0x6473696D  # "dsim", in a store's header
TABLE = "CREATE TABLE IF NOT EXISTS replays (key TEXT PRIMARY KEY, answer TEXT, checksum INTEGER) WITHOUT ROWID"


def store_kind(title: str, schema: str, files: tuple[str, ...], manifest: str, folder: str = "") -> FolderKind:
    """A folder with a store; folder: one among its files."""
    return FolderKind(title, (*files, *FILES), manifest, schema, folders=(folder,) * bool(folder), store=STORE)


class Memo:
    """Answers cells from a file, else computes them; without a file it keeps nothing."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.num_replays = 0  # of the answers, counted by those who ask
        self.num_answers = 0
        self.num_stored = 0  # answers from the store
        self._database: sqlite3.Connection | None = None

    def open(self, path: Path) -> None:
        """Use or create this file; DsimError if it is not dsim's store."""
        self.path = path
        with self._named():
            self._database = database = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
            [(pages,)], [(application,)] = map(database.execute, ("PRAGMA page_count", "PRAGMA application_id"))
            if pages and application != APPLICATION:
                raise sqlite3.DatabaseError("it is another program's")
            database.execute(f"PRAGMA application_id = {APPLICATION}")
            # With WAL, commits do not wait for the disk: a machine's crash may lose the last answers.
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute(TABLE)

    def run(
        self, pool: Pool, function: Callable[[C], R], cells: Mapping[str, C], question: Question[C]
    ) -> Generator[Outcome[R], None, None]:
        """Like `Pool.run`, stored cells first. Values are plain (JSON). question: what tells a cell's answer."""
        waiting, keys = dict(cells), {}
        if self._database is not None:
            for name, cell in cells.items():
                keys[name] = digest(question(cell))
                if (outcome := self._stored(name, keys[name])) is not None:
                    del waiting[name]
                    self.num_stored += 1
                    self.num_answers += 1
                    yield outcome
        with closing(pool.run(function, waiting)) as outcomes:
            for outcome in outcomes:
                if keys and (outcome.error is None or outcome.refused):
                    self._write(keys[outcome.key], {"value": outcome.value, "refused": outcome.error})
                self.num_answers += 1
                yield outcome

    def map(
        self, pool: Pool, function: Callable[[C], R], cells: Iterable[C], question: Question[C]
    ) -> Generator[R, None, None]:
        """The values in the cells' order, until the first failure."""
        return in_order(self.run(pool, function, {str(i): cell for i, cell in enumerate(cells)}, question))

    def claim(self, kind: str, question: Json) -> None:
        """Reserve the store for a search; DsimError if it has another one's answers."""
        key = digest(question)
        stored = self._answer(QUESTION)
        if stored is None:
            self._write(QUESTION, key)
        elif stored != key:
            raise DsimError(
                f"{self.path} holds another {kind}, or a file that it names has changed: choose another folder or pass "
                "--force"
            )

    def sentence(self) -> str:
        """How many answers were stored; empty if none."""
        if not self.num_stored:
            return ""
        return f"{self.num_answers:,} answers, {self.num_stored:,} of them from the store"

    def close(self) -> None:
        if self._database is not None:
            with suppress(sqlite3.Error):  # the write has reported a full disk
                self._database.close()
            self._database = None

    @property
    def holds_any(self) -> bool:
        """Whether the file holds answers."""
        if self._database is None:
            return False
        with self._named():
            row = self._database.execute("SELECT 1 FROM replays WHERE key != ? LIMIT 1", (QUESTION,)).fetchone()
        return row is not None

    def _stored(self, name: str, key: str) -> "Outcome[Any] | None":
        answer = self._answer(key)
        if answer is None:
            return None
        refused = answer["refused"]
        return Outcome(name, answer["value"], refused, refused=refused is not None, is_stored=True)

    def _answer(self, key: str) -> Any:
        assert self._database is not None
        with self._named():
            row = self._database.execute("SELECT answer, checksum FROM replays WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            if row[1] != _checksum(key, row[0]):
                raise ValueError(f"the checksum of {key} does not match its answer")
            return json.loads(row[0])

    def _write(self, key: str, answer: Any) -> None:
        assert self._database is not None
        text = json.dumps(answer)
        with uninterrupted(), self._named():
            row = (key, text, _checksum(key, text))
            self._database.execute("INSERT OR REPLACE INTO replays VALUES (?, ?, ?)", row)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Damage, and a full disk, in one line."""
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            self.close()
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in OF_THE_MACHINE:
                raise MachineError(f"{self.path}: cannot be written: {error}") from None
            raise DsimError(f"{self.path} is no store of dsim's: {cut(error)} (delete it)") from None


def _checksum(key: str, text: str) -> int:
    return zlib.crc32(f"{key} {text}".encode())


class StoreFolder:
    """An output folder with a store, extended by one run at a time; without a folder there is no store.

    After an input error it is as it was before. With `force` replays begin anew; old results stay until new ones are
    written.
    """

    def __init__(self, folder: Path | None, kind: FolderKind, *, force: bool = False) -> None:
        self.folder, self.memo = folder, Memo()
        self._kind, self._force = kind, force
        self._lock: Lock | None = None
        self._new: list[Path] | None = None  # folders that this run made; None: the store was there
        if folder is not None:
            check_folder(folder, kind, force=force, add=(folder / STORE).is_file())
            if folder.is_dir() and not force:
                self.begin()

    def begin(self, kind: str = "", question: Json | None = None) -> None:
        """Make the folder; question: the only search it may hold."""
        if self.folder is None:
            return
        if self._lock is None:
            new = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            extends = not self._force and (self.folder / STORE).exists()
            check_folder(self.folder, self._kind, force=self._force, add=True)
            self._lock = hold_folder(self.folder)
            for name in FILES if self._force else ():
                (self.folder / name).unlink(missing_ok=True)
            try:
                self.memo.open(self.folder / STORE)
            except BaseException:
                self.close()
                raise
            self._new = None if extends else new
        if question is not None:
            self.memo.claim(kind, question)

    def put(self, files: Mapping[str, str | bytes]) -> None:
        """Write files, if there is a folder."""
        if self.folder is None:
            return
        for entry in self.folder.iterdir() if self._force else ():
            if entry.name not in FILES:
                remove(entry)
        self._force = False
        for name, content in files.items():
            write_whole(self.folder / name, content)

    def close(self, error: BaseException | None = None) -> None:
        """Also removes what this run made, if that holds nothing, or nothing but the answers of an input error."""
        is_refusal = isinstance(error, DsimError) and not isinstance(error, MachineError)
        holds = self._new is not None and self.memo.holds_any
        self.memo.close()
        new, self._new = self._new, None
        if self.folder is not None and new is not None and (is_refusal or not holds):
            if {path.name for path in self.folder.iterdir()} <= {*FILES}:
                for name in FILES:
                    (self.folder / name).unlink(missing_ok=True)
            for path in new:
                with suppress(OSError):  # it holds something
                    path.rmdir()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)
