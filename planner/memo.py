"""The memo of replays: a SQLite file that answers replays done before, by any command.

The key is the digest of a replay's inputs (contents.py), the answer JSON with a checksum: nothing is executed; damaged
or foreign files are refused. Only the process that opened the file reads and writes it; workers send their replays.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from ..engine.errors import DsimError, MachineError
from ..files.interrupt import uninterrupted
from ..files.lock import Lock
from ..files.place import FolderKind, check_folder, hold_folder, remove
from ..files.read import cut, described
from ..files.write import write_whole
from .backend import Outcome, Pool, attempt, in_order
from .contents import Json, digest

C = TypeVar("C")
R = TypeVar("R")

STORE = "replays.db"
FILES = (STORE, *(f"{STORE}-{kind}" for kind in ("wal", "shm", "journal")))  # the last during a write or after a kill
VERSION = 1
APPLICATION = 0x6473696D  # "dsim", in a store's header
OF_THE_MACHINE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_BUSY)
OF_THE_PATH = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
PATIENCE = 60.0  # s for another process's write
TABLES = """
    CREATE TABLE IF NOT EXISTS replays (key TEXT PRIMARY KEY, answer TEXT, checksum TEXT) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS searches (asked TEXT);
"""

Row = tuple[str, str, str]  # of the table `replays`


class NotStored(BaseException):
    """A missing replay. Not an Exception, so that pools pass it on."""


class KeptError(DsimError):
    """An input error after which the stored replays are of use."""


class Memo:
    """Answers replays from a file, else computes them.

    A copy in another process has no file: it computes, and its new rows return with the cell's value.
    """

    def __init__(self, *, only_stored: bool = False) -> None:
        self.path: Path | None = None
        self.num_replays = 0
        self.num_stored = 0  # answered from the store
        self.rows: list[Row] = []  # of a copy: new, for the process with the file
        self.only_stored = only_stored  # else NotStored
        self._database: sqlite3.Connection | None = None
        self._continues = False  # the file held replays at first

    def open(self, path: Path) -> None:
        """Use or create this file; DsimError if it is not dsim's store."""
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            raise DsimError(f"{path}: is {described(path.lstat().st_mode)}, expected a file to keep replays in")
        self.path = path
        with self._named():
            self._database = _connect(path)
        self._continues = self.holds_any

    def replay(self, question: Callable[[], Json], compute: Callable[[], Any]) -> Any:
        """The answer (plain values) of `compute`, or its DsimError, computed once per question."""
        self.num_replays += 1
        if self.path is None:
            return compute()
        key = digest(question())
        answer = self._answer(key)
        if answer is None:
            if self.only_stored:
                raise NotStored
            try:
                answer = json.dumps({"value": compute()})
            except MachineError:  # no answer
                raise
            except DsimError as error:
                answer = json.dumps({"refused": str(error)})
            self._write([(key, answer, _checksum(key, answer))])
        else:
            self.num_stored += 1
        content = json.loads(answer)
        if "refused" in content:
            raise DsimError(content["refused"])
        return content["value"]

    def run(
        self, pool: Pool, function: Callable[["Memo", C], R], cells: Mapping[str, C]
    ) -> Generator[Outcome[R], None, None]:
        """Like `Pool.run`; function takes a memo. Stored cells come first."""
        waiting = dict(cells)
        for outcome in self._stored(function, cells):
            del waiting[outcome.key]
            yield outcome
        with closing(pool.run(partial(_with_memo, function, self), waiting)) as outcomes:
            for answered in outcomes:
                value = None
                if answered.value is not None:
                    value, memo = answered.value
                    self._add(memo)
                yield Outcome(answered.key, value, answered.error, answered.refused, trace=answered.trace)

    def _stored(self, function: Callable[["Memo", C], R], cells: Mapping[str, C]) -> Iterator[Outcome[R]]:
        """Cells whose replays are all stored."""
        if not self.holds_any:
            return
        for key, cell in cells.items():
            memo = self._copy(only_stored=True)
            try:
                outcome = attempt(partial(function, memo), key, cell)
            except NotStored as missing:
                if missing.__cause__ is not None:  # a damaged file
                    raise missing.__cause__ from None
                continue
            if outcome.trace is None:
                self._add(memo)
                yield replace(outcome, is_stored=True)

    def map(self, pool: Pool, function: Callable[["Memo", C], R], cells: Iterable[C]) -> Generator[R, None, None]:
        """The values in the cells' order, until the first failure."""
        return in_order(self.run(pool, function, {str(i): cell for i, cell in enumerate(cells)}))

    def claim(self, kind: str, question: Json) -> None:
        """Reserve the store for a search; DsimError names the difference to the one it holds."""
        new = json.loads(json.dumps(question, default=repr))
        with self._named():
            row = self._connection.execute("SELECT asked FROM searches").fetchone()
            if row is None:
                self._connection.execute("INSERT INTO searches VALUES (?)", (json.dumps(new),))
                return
        try:
            stored = dict(json.loads(row[0]))
        except (TypeError, ValueError):
            raise _damaged(self.path, "its search cannot be read") from None
        for name in dict.fromkeys([*new, *stored]):
            if stored.get(name) != new.get(name):
                before, now = (cut(json.dumps(search.get(name)), 60) for search in (stored, new))
                raise DsimError(
                    f"{self.path} holds another {kind}: its {name.replace('_', ' ')} is {before}, "
                    f"this one's is {now}; choose another folder or pass --force"
                )

    def sentence(self) -> str:
        """How many replays the store answered; empty if none."""
        if not (self._continues and self.num_stored):
            return ""
        return f"{self.num_replays:,} replays, {self.num_stored:,} of them from the store"

    def close(self) -> None:
        if self._database is not None:
            with suppress(sqlite3.Error):  # the write has reported a full disk
                self._database.close()
            self._database = None

    @property
    def holds_any(self) -> bool:
        """Whether the file holds replays."""
        if self._database is None:
            return False
        with self._named():
            return self._database.execute("SELECT 1 FROM replays LIMIT 1").fetchone() is not None

    @property
    def _connection(self) -> sqlite3.Connection:
        assert self._database is not None
        return self._database

    def _copy(self, *, only_stored: bool = False) -> "Memo":
        """The same file, with counts at 0."""
        copy = Memo(only_stored=only_stored)
        copy.path, copy._database = self.path, self._database
        return copy

    def _add(self, copy: "Memo") -> None:
        """Take over a copy's counts and new rows."""
        self.num_replays += copy.num_replays
        self.num_stored += copy.num_stored
        if copy.rows:
            self._write(copy.rows)

    def _answer(self, key: str) -> str | None:
        if self._database is None:
            return None
        try:
            with self._named():
                row = self._database.execute("SELECT answer, checksum FROM replays WHERE key = ?", (key,)).fetchone()
            if row is not None and row[1] != _checksum(key, row[0]):
                raise _damaged(self.path, f"the checksum of {key} does not match its answer")
        except DsimError as error:
            if self.only_stored:
                raise NotStored from error
            raise
        return None if row is None else str(row[0])

    def _write(self, rows: Sequence[Row]) -> None:
        """Write rows, or keep them for the process with the file."""
        if self._database is None:
            self.rows += rows
            return
        with uninterrupted(), self._named():
            self._database.executemany("INSERT OR REPLACE INTO replays VALUES (?, ?, ?)", rows)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """SQLite's errors as one line: the system's, or a damaged file."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code in (*OF_THE_MACHINE, *OF_THE_PATH):
                kind = MachineError if code in OF_THE_MACHINE else DsimError
                raise kind(f"{self.path}: cannot be written: {error}") from None
            raise (_foreign(self.path) if code == sqlite3.SQLITE_NOTADB else _damaged(self.path, str(error))) from None

    def __getstate__(self) -> Json:
        return {**self.__dict__, "_database": None}


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
            check_folder(folder, kind, force=force, add=True)
            if not (folder / STORE).is_file():
                check_folder(folder, kind, force=force)
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

    def finish(
        self, pool: Pool, function: Callable[[Memo, C], R], cells: Mapping[str, C],
        progress: Callable[[int, int, str], object] = lambda *_: None,
    ) -> tuple[dict[str, Outcome[R]], bool]:  # fmt: skip
        """Run cells that the store lacks; returns outcomes by key, and whether Ctrl-C ended it early.

        progress: finished and all cells, and the last finished (first: the next).
        """
        outcomes: dict[str, Outcome[R]] = {}
        interrupted = True
        with suppress(KeyboardInterrupt), closing(self.memo.run(pool, function, cells)) as running:
            progress(0, len(cells), next(iter(cells), ""))
            for outcome in running:
                outcomes[outcome.key] = outcome
                progress(len(outcomes), len(cells), outcome.key)
            interrupted = False
        return outcomes, interrupted

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
        """Also removes what this run made, if that holds nothing, or nothing but the replays of an input error."""
        is_refusal = isinstance(error, DsimError) and not isinstance(error, MachineError | KeptError)
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


def _with_memo(function: Callable[[Memo, C], R], memo: Memo, cell: C) -> tuple[R, Memo]:
    copy = memo._copy()
    return function(copy, cell), copy


def _connect(path: Path) -> sqlite3.Connection:
    """The database with its tables; DsimError for another program's file.

    SQLite reads the header: a file that this process closes loses the POSIX locks of its other connections.
    """
    database = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
    try:
        names = ("page_count", "application_id", "user_version")
        pages, application, version = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        if pages and application != APPLICATION:
            raise _foreign(path)
        if version not in (0, VERSION):
            raise DsimError(f"{path}: version is {version}, expected {VERSION}")
        if version == 0:  # a new file
            database.execute(f"PRAGMA application_id = {APPLICATION}")
            database.execute(f"PRAGMA user_version = {VERSION}")
        # With WAL, commits do not wait for the disk: a machine's crash may lose the last answers.
        [(journal,)] = database.execute("PRAGMA journal_mode = WAL")
        if journal == "wal":
            database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(TABLES)
    except BaseException:
        database.close()
        raise
    return database


def _foreign(path: Path | None) -> DsimError:
    return DsimError(f"{path} holds no replays of dsim, expected another file")


def _damaged(path: Path | None, reason: str) -> DsimError:
    return DsimError(f"{path} cannot be read as a store of replays: {cut(reason)} (delete it, or choose another)")


def _checksum(key: str, answer: str) -> str:
    return hashlib.sha256(f"{key} {answer}".encode()).hexdigest()[:16]
