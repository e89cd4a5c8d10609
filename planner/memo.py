"""The memo of replays: a SQLite file that answers replays done before, by any command.

The key is a hash of a replay's inputs (contents.py), the answer JSON with a checksum: nothing is executed; damaged or
foreign files are refused. Processes may share a file.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from .. import __version__
from ..engine.errors import DsimError, MachineError
from ..files.interrupt import uninterrupted
from ..files.place import APPLICATION, FolderKind, OpenFolder, check_folder
from ..files.read import cut, described
from ..files.write import write_whole
from .backend import Outcome, Pool, attempt, in_order
from .contents import Found, Json, looked_at_once

C = TypeVar("C")
R = TypeVar("R")

STORE = "replays.db"
FILES = (STORE, f"{STORE}-wal", f"{STORE}-shm")  # the last two during a write or after a kill
VERSION = 1
OF_THE_MACHINE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_BUSY)
OF_THE_PATH = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
PATIENCE = 60.0  # s for another process's write
TABLES = """
    CREATE TABLE IF NOT EXISTS replays (key TEXT PRIMARY KEY, answer TEXT, checksum TEXT) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS searches (asked TEXT);
"""

Row = tuple[str, str, str]  # of the table `replays`
Answered = tuple[R, int, int, list[Row]]  # value, replays, stored replays, new rows


class NotStored(BaseException):
    """A missing replay. Not an Exception, so that pools pass it on."""


class KeptError(DsimError):
    """An input error after which the stored replays are of use."""


class Memo:
    """Answers replays from a file, else computes them. Can be sent to another process, which uses the same file."""

    def __init__(self, path: Path | None = None, *, only_stored: bool = False, keep_rows: bool = False) -> None:
        self.path = path
        self.num_replays = 0  # asked
        self.num_stored = 0  # answered from the store
        self.only_stored = only_stored  # else NotStored
        self._rows: list[Row] | None = [] if keep_rows else None  # new, for the process with the file
        self._database: sqlite3.Connection | None = None
        self._goes_on = False  # the file held replays at first

    def open(self, path: Path) -> None:
        """Use or create this file; DsimError if it is not dsim's store."""
        self.path = path
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            raise DsimError(f"{path}: is {described(path.lstat().st_mode)}, expected a file to keep replays in")
        with _named(path):
            _ = self._connection
        self._goes_on = self._holds_any

    def replay(self, asked: Callable[[], Json], compute: Callable[[], Any]) -> Any:
        """The answer (plain values) of `compute`, or its DsimError, computed once per question."""
        self.num_replays += 1
        if self.path is None and self._rows is None:
            return compute()
        key = hashlib.sha256(json.dumps(asked(), sort_keys=True, default=repr).encode()).hexdigest()[:32]
        answer = self._answer(key)
        if answer is None:
            if self.only_stored:
                raise NotStored
            try:
                answer = json.dumps({"found": compute()})
            except MachineError:
                raise
            except DsimError as error:
                answer = json.dumps({"refused": str(error)})
            self._write([(key, answer, _checksum(key, answer))])
        else:
            self.num_stored += 1
        found = json.loads(answer)
        if "refused" in found:
            raise DsimError(found["refused"])
        return found["found"]

    def run(
        self, pool: Pool, function: Callable[["Memo", C], R], cells: Mapping[str, C]
    ) -> Generator[Outcome[R], None, None]:
        """Like `Pool.run`; function takes a memo. Stored cells come first."""
        left = dict(cells)
        for outcome in self.stored(function, cells):
            del left[outcome.key]
            yield outcome
        yield from self.rest(pool, function, left)

    def stored(self, function: Callable[["Memo", C], R], cells: Mapping[str, C]) -> Iterator[Outcome[R]]:
        """Cells whose replays are all stored."""
        if not self._holds_any:
            return
        found: Found = {}
        for key, cell in cells.items():
            own = self._fork(only_stored=True)
            try:
                with looked_at_once(found):
                    outcome = attempt(partial(function, own), __version__, key, cell)
            except NotStored as missing:
                if self.only_stored:
                    raise
                if missing.__cause__ is not None:  # a damaged file
                    raise missing.__cause__ from None
                continue
            if outcome.trace is None:
                self._count(own.num_replays, own.num_stored)
                yield outcome

    def rest(
        self, pool: Pool, function: Callable[["Memo", C], R], cells: Mapping[str, C]
    ) -> Generator[Outcome[R], None, None]:
        distant = pool.is_distant and self.path is not None  # without access to the file
        memo = Memo(keep_rows=True) if distant else self
        return self._taken(pool.run(partial(_with_memo, function, memo), cells))

    def _taken(self, outcomes: "Generator[Outcome[Answered[R]], None, None]") -> Generator[Outcome[R], None, None]:
        with closing(outcomes):
            for outcome in outcomes:
                if outcome.value is None:
                    yield Outcome(outcome.key, None, outcome.error, outcome.refused, outcome.trace)
                    continue
                value, num_replays, num_stored, rows = outcome.value
                self._count(num_replays, num_stored)
                if rows:
                    self._write(rows)
                yield Outcome(outcome.key, value)

    def map(self, pool: Pool, function: Callable[["Memo", C], R], cells: Iterable[C]) -> Generator[R, None, None]:
        """Like `Pool.map`."""
        return in_order(self.run(pool, function, {str(i): cell for i, cell in enumerate(cells)}))

    def claim(self, what: str, asked: Json) -> None:
        """Reserve the store for a search; DsimError names the difference to the one it holds."""
        wanted = json.loads(json.dumps(asked, default=repr))
        with _named(self.path):
            row = self._connection.execute("SELECT asked FROM searches").fetchone()
            if row is None:
                self._connection.execute("INSERT INTO searches VALUES (?)", (json.dumps(wanted),))
        try:
            held = wanted if row is None else dict(json.loads(row[0]))
        except (TypeError, ValueError):
            raise _damaged(self.path, "its search cannot be read") from None
        for name in dict.fromkeys([*wanted, *held]):
            if held.get(name) != wanted.get(name):
                stored, new = (cut(json.dumps(search.get(name)), 60) for search in (held, wanted))
                raise DsimError(
                    f"{self.path} holds another {what}: its {name.replace('_', ' ')} is {stored}, "
                    f"this one's is {new}; choose another folder or pass --force"
                )

    def sentence(self) -> str:
        """How many replays the store answered; empty if none."""
        told = self._goes_on and self.num_stored
        return f"{self.num_replays:,} replays, {self.num_stored:,} of them from the store" if told else ""

    def close(self) -> None:
        if self._database is not None:
            with suppress(sqlite3.Error):  # the write has reported a full disk
                self._database.close()
            self._database = None

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            assert self.path is not None
            self._database = _connect(self.path)
        return self._database

    @property
    def _holds_any(self) -> bool:
        if self.path is None:
            return False
        with _named(self.path):
            return self._connection.execute("SELECT 1 FROM replays LIMIT 1").fetchone() is not None

    def _fork(self, *, only_stored: bool = False) -> "Memo":
        """The same file, with counts at 0."""
        keep_rows = self.path is not None or self._rows is not None
        own = Memo(self.path, only_stored=only_stored or self.only_stored, keep_rows=keep_rows)
        own._database = self._database
        return own

    def _count(self, num_replays: int, num_stored: int) -> None:
        self.num_replays += num_replays
        self.num_stored += num_stored

    def _answer(self, key: str) -> str | None:
        """Only the process that opened a damaged file raises an error."""
        if self.path is None:
            return None
        try:
            with _named(self.path):
                row = self._connection.execute("SELECT answer, checksum FROM replays WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            answer, checksum = row
            if checksum != _checksum(key, answer):
                raise _damaged(self.path, f"the checksum of {key} does not match its answer")
            return str(answer)
        except DsimError as error:
            if self._rows is None:
                raise
            if self.only_stored:
                raise NotStored from error
            return None

    def _write(self, rows: Sequence[Row]) -> None:
        """Write rows, or keep them for the process with the file."""
        try:
            if self.path is not None:
                with uninterrupted(), _named(self.path):
                    self._connection.executemany("INSERT OR REPLACE INTO replays VALUES (?, ?, ?)", rows)
                return
        except DsimError:
            if self._rows is None:
                raise
        if self._rows is not None:
            self._rows += rows

    def __getstate__(self) -> Json:
        return {**self.__dict__, "_database": None}  # each process opens its own


@dataclass(frozen=True)
class Finished(Generic[R]):
    """Finished cells, by key."""

    outcomes: dict[str, Outcome[R]]
    num_reused: int  # from an earlier run
    interrupted: bool


class StoreFolder:
    """An output folder with a store, extended by one run at a time; without a folder there is no store.

    After an input error it is as it was before. A folder replaced by `force` is put back unless the new one has results
    or, after Ctrl-C, replays.
    """

    def __init__(self, folder: Path | None, kind: FolderKind, *, force: bool = False) -> None:
        self.folder, self.memo = folder, Memo()
        self._kind, self._force = kind, force
        self._taken: OpenFolder | None = None
        self._new: list[Path] | None = None  # folders that this run made; None: the store was there
        if folder is not None:
            add = (folder / STORE).is_file()
            check_folder(folder, kind, force=force, add=True)
            if not add:
                check_folder(folder, kind, force=force)
            if folder.is_dir() and not force:
                self._open(folder)

    def begin(self, what: str = "", asked: Json | None = None) -> None:
        """Make the folder; asked: the only search it may hold."""
        if self.folder is None:
            return
        if self._taken is None:
            self._open(self.folder)
        if asked is not None:
            self.memo.claim(what, asked)

    def finish(
        self, pool: Pool, function: Callable[[Memo, C], R], cells: Mapping[str, C], *,
        begin: Callable[[], object] = lambda: None, progress: Callable[[int, int, str], object] = lambda *_: None,
    ) -> Finished[R]:  # fmt: skip
        """Run cells that the store lacks; Ctrl-C returns the finished ones.

        begin: called once the folder exists. progress: finished and all cells, and the last finished (first: the next).
        """
        done = {outcome.key: outcome for outcome in self.memo.stored(function, cells)}
        reused, interrupted = len(done), False
        left = {key: cell for key, cell in cells.items() if key not in done}
        outcomes = self.memo.rest(pool, function, left)
        try:
            # Not earlier: an unreachable cluster leaves the folder unchanged.
            self.begin()
            begin()
            progress(reused, len(cells), next(iter(left), ""))
            for outcome in outcomes:
                done[outcome.key] = outcome
                progress(len(done), len(cells), outcome.key)
        except KeyboardInterrupt:
            interrupted = True
        except DsimError as error:
            if self.folder is None or not done:
                raise
            self.settle()
            kind = type(error) if isinstance(error, MachineError) else KeptError
            finished = f"{len(done)} of {len(cells)} cells are finished and kept: the same command goes on"
            raise kind(f"{error}; {finished}") from None
        finally:
            outcomes.close()
        if interrupted:  # finished by processes meanwhile
            left = {key: cell for key, cell in cells.items() if key not in done}
            done |= {outcome.key: outcome for outcome in self.memo.stored(function, left)}
        if done:
            self.settle()
        return Finished(done, reused, interrupted)

    def put(self, files: Mapping[str, str]) -> None:
        """Write results, if there is a folder. A full disk before their end puts a replaced folder back."""
        if self.folder is not None:
            for name, text in files.items():
                write_whole(self.folder / name, text)
            self.settle()

    def settle(self) -> None:
        """Something finished: do not put a replaced folder back."""
        if self._taken is not None:
            self._taken.settle()

    @property
    def is_settled(self) -> bool:
        """Whether a folder takes results, and none is to be put back."""
        return self._taken is not None and self._taken.is_settled

    def close(self, error: BaseException | None = None) -> None:
        """Also removes what this run made, if that holds nothing, or nothing but the replays of an input error."""
        is_refusal = isinstance(error, DsimError) and not isinstance(error, MachineError | KeptError)
        folder, new, self._new = self.folder, self._new, None
        holds = new is not None and self.memo._holds_any
        if holds and isinstance(error, KeptError | KeyboardInterrupt):
            self.settle()
        self.memo.close()
        if folder is not None and new is not None and (is_refusal or not holds):
            if {path.name for path in folder.iterdir()} <= {*FILES}:
                for name in FILES:
                    (folder / name).unlink(missing_ok=True)
            for made in new:
                with suppress(OSError):  # it holds something
                    made.rmdir()
        if self._taken is not None:
            self._taken.close()

    def _open(self, folder: Path) -> None:
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        had_store = not self._force and (folder / STORE).exists()
        self._taken = OpenFolder(folder, self._kind, force=self._force)
        try:
            self.memo.open(folder / STORE)
            self._new = None if had_store else new
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)


def _with_memo(function: Callable[[Memo, C], R], memo: Memo, cell: C) -> Answered[R]:
    own = memo._fork()
    try:
        return function(own, cell), own.num_replays, own.num_stored, own._rows or []
    finally:
        if own._database is not memo._database:
            own.close()


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


@contextmanager
def _named(path: Path | None) -> Iterator[None]:
    """SQLite's errors as one line: the system's, or a damaged file."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in OF_THE_MACHINE:
            raise MachineError(f"{path}: cannot be written: {error}") from None
        if code in OF_THE_PATH:
            raise DsimError(f"{path}: cannot be written: {error}") from None
        raise (_foreign(path) if code == sqlite3.SQLITE_NOTADB else _damaged(path, str(error))) from None


def _foreign(path: Path | None) -> DsimError:
    return DsimError(f"{path} holds no replays of dsim, expected another file")


def _damaged(path: Path | None, reason: str) -> DsimError:
    return DsimError(f"{path} cannot be read as a store of replays: {cut(reason)} (delete it, or choose another)")


def _checksum(key: str, answer: str) -> str:
    return hashlib.sha256(f"{key} {answer}".encode()).hexdigest()[:16]
