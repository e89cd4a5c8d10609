"""The file that keeps a search's trials: Optuna's journal, or SQLite, and whose search it is."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from ..engine.errors import DsimError
from ..files.lock import Lock
from ..files.read import cut, described, fault, json_of, naming

STUDY = "dsim-tune"
FINGERPRINT = "fingerprint"
SQLITE = (".db", ".sqlite", ".sqlite3")
SQLITE_MAGIC = b"SQLite format 3\x00"


class Kept:
    """The storage in a file, new or kept, which no other process writes until it is closed.

    DsimError where the file is something else, or another search holds it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        if path.is_dir() or not path.parent.is_dir():
            raise DsimError(f"{path}: expected a file in a folder that exists, to keep the trials in")
        with naming(path):
            path.touch()
            if not path.is_file() or path.is_symlink():
                raise DsimError(f"{path}: is {described(path.lstat().st_mode)}, expected a file to keep the trials in")
            self._lock = Lock(path)
        try:
            self.storage = _open(path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another search have the file."""
        self._lock.close()


class _AlreadyLocked:
    """Optuna's own lock is a link that a killed search leaves behind, and then nobody gets it: ours covers the file."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _open(path: Path) -> BaseStorage:
    sqlite = path.suffix in SQLITE
    with readable(path):
        if path.stat().st_size and not (_is_sqlite(path) if sqlite else _is_journal(path)):
            raise DsimError(f"{path} holds no trials of dsim tune, expected another file")
        if sqlite:
            return RDBStorage(f"sqlite:///{path}")
        _drop_torn_line(path)
        return JournalStorage(JournalFileBackend(str(path), _AlreadyLocked()))  # type: ignore[arg-type]


@contextmanager
def readable(path: str | Path | None) -> Iterator[None]:
    """Round what is made of kept trials: another tool's, or damaged ones, are one line. None: none are kept."""
    try:
        yield
    except DsimError as error:
        if path is None or str(error).startswith(str(path)):
            raise
        raise DsimError(f"{path} cannot be read as kept trials: {error}") from None
    except Exception as error:  # whatever its libraries raise
        if path is None:
            raise
        if isinstance(error, OSError):
            raise fault(path, error) from None
        raise DsimError(f"{path} cannot be read as kept trials: {cut(_line(error))}") from None


def _drop_torn_line(path: Path) -> None:
    """A line without an end was being written as its process was killed: Optuna would refuse all that follows it."""
    with path.open("r+b") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)


def check_same(storage: BaseStorage, path: str, fingerprint: Mapping[str, Any]) -> None:
    """Refuse a file of another search, and say in what it differs."""
    names = optuna.study.get_all_study_names(storage)
    if not names:
        return
    if STUDY not in names:
        raise DsimError(f"{path} holds the study {cut(names[0])}, expected one of dsim tune")
    kept = optuna.load_study(study_name=STUDY, storage=storage).user_attrs.get(FINGERPRINT)
    if kept is None:  # its process was killed as it began
        return
    wanted = json.loads(json.dumps(fingerprint))
    for name in dict.fromkeys([*wanted, *kept]):
        if kept.get(name) != wanted.get(name):
            raise DsimError(
                f"{path} holds another search: its {name.replace('_', ' ')} is {_short(kept.get(name))}, "
                f"this one's is {_short(wanted.get(name))}; choose another --storage"
            )


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC


def _is_journal(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            first = json_of(file.readline())
    except ValueError:
        return False
    return isinstance(first, dict) and "op_code" in first


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
