"""Output folders: check that dsim may write there, and replace its own without loss."""

import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ..engine.errors import DsimError
from .interrupt import uninterrupted
from .lock import Lock, is_held
from .read import FilePath, described, fault, naming, read_json
from .write import NEW, beside, check_parent, encoded, leftovers, sync, tell

OLD = "dsim-old"  # `.NAME.dsim-old`: being replaced


@dataclass(frozen=True)
class FolderKind:
    title: str  # in messages: "a run"
    files: tuple[str, ...]  # may hold; `*` is a wildcard
    manifest: str  # identifies the folder
    schema: str  # of the manifest
    folders: tuple[str, ...] = ()  # those of `files`
    store: str | None = None  # the store of replays, which identifies a folder without a manifest

    def is_ours(self, folder: Path) -> bool:
        """By its manifest, or a killed run's store."""
        with suppress(DsimError):
            info = read_json(folder / self.manifest)
            if isinstance(info, dict):
                return bool(info.get("schema") == self.schema)
        return self.store is not None and (folder / self.store).is_file()


def check_folder(folder: FilePath, kind: FolderKind, *, force: bool, add: bool = False) -> Path:
    """The absolute path of an output folder; DsimError if this kind of run may not write there.

    New and empty folders are accepted; a folder of dsim may be replaced with `force`, extended with `add`. First, what
    killed runs set aside is restored and their temporary files are removed, with a message each.
    """
    try:
        place = whole_path(folder)
        if any(is_held(entry) for entry in leftovers(place)):
            raise DsimError(f"{folder}: another dsim is writing there: wait for it, or choose another folder")
        _recover(place)
        if os.path.lexists(place):
            _check_content(folder, place, kind, may_hold=force or add)
        else:
            check_parent(_first_new(place))
        return place
    except OSError as error:
        raise fault(folder, error) from None
    except ValueError as error:
        raise DsimError(f"{folder}: {error}") from None


def _check_content(folder: FilePath, place: Path, kind: FolderKind, *, may_hold: bool) -> None:
    """DsimError unless the folder is empty, or ours and may hold something."""
    mode = os.lstat(place).st_mode
    if not stat.S_ISDIR(mode):
        raise DsimError(f"{folder}: is {described(mode)}, expected a folder to write to")
    if is_held(place):
        raise DsimError(f"{folder}: another dsim is writing there: wait for it, or choose another folder")
    names = sorted(entry.name for entry in place.iterdir() if not _is_part(entry))
    foreign = [name for name in names if not _may_hold(place / name, kind)]
    if foreign:
        raise DsimError(f"{folder}: holds {foreign[0]}, which is not of {kind.title}: choose another folder")
    if names and not may_hold:
        raise DsimError(f"{folder}: exists and holds {', '.join(names)}: choose another folder or pass --force")
    if names and not kind.is_ours(place):
        if kind.manifest in names:
            raise DsimError(f"{folder}/{kind.manifest}: does not say that dsim wrote it: choose another folder")
        raise DsimError(f"{folder}: holds {names[0]} and no {kind.manifest}: choose another folder")


def whole_path(folder: FilePath) -> Path:
    """Without `..`; the same after parents are created."""
    return Path(os.path.normpath(Path(folder).absolute()))


class Staged:
    """A folder built at a temporary `path` and renamed by `commit`; leaving the `with` block before removes it.

    While it is open, a lock tells it from a killed run's leftovers.
    """

    def __init__(self, folder: FilePath, kind: FolderKind, *, force: bool = False) -> None:
        self.folder = check_folder(folder, kind, force=force)
        self._shown, self._kind, self._force = folder, kind, force
        self._new = [p for p in (self.folder.parent, *self.folder.parent.parents) if not p.exists()]
        self.path = beside(self.folder)
        self._is_open = True
        try:
            with naming(folder):
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                self.path.mkdir()
                self.lock = Lock(self.path)
        except BaseException:  # interrupts too: no caller can abort yet
            self.abort()
            raise

    def commit(self) -> None:
        """Move into place; after a kill between the two renames the next run restores the old folder."""
        with uninterrupted(), naming(self._shown):
            for name in os.listdir(self.path):
                sync(self.path / name)
            old = _hidden(self.folder)
            replaces = os.path.lexists(self.folder)
            if replaces:
                _check_content(self._shown, self.folder, self._kind, may_hold=self._force)
                os.rename(self.folder, old)
            try:
                os.rename(self.path, self.folder)
            except OSError:
                if replaces:
                    os.rename(old, self.folder)
                raise
            self._is_open = False
            with suppress(OSError):  # not every system can
                sync(self.folder.parent)
            shutil.rmtree(old, ignore_errors=True)

    def abort(self) -> None:
        """Does nothing after a commit but unlock."""
        if self._is_open:
            self._is_open = False
            shutil.rmtree(self.path, ignore_errors=True)
            for parent in self._new:
                with suppress(OSError):
                    parent.rmdir()  # not if there is something in it
        if hasattr(self, "lock"):
            self.lock.close()

    def __del__(self) -> None:
        # An interrupt may come before a `with` statement.
        if getattr(self, "_is_open", False):
            self.abort()

    def __enter__(self) -> "Staged":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


def write_folder(folder: FilePath, kind: FolderKind, files: Mapping[str, str | bytes], *, force: bool = False) -> None:
    """Atomically."""
    with Staged(folder, kind, force=force) as staged:
        with naming(folder):
            for name, content in files.items():
                (staged.path / name).write_bytes(encoded(content))
        staged.commit()


def hold_folder(folder: FilePath) -> Lock:
    """Create and lock."""
    if os.path.islink(folder):
        raise DsimError(f"{folder}: is a symbolic link, expected a folder to write to")
    with naming(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        return Lock(Path(folder))


def _recover(place: Path) -> None:
    """Restore or remove killed runs' leftovers."""
    old = _hidden(place)
    if _is_folder(old) and not os.path.lexists(place):
        os.rename(old, place)
        tell(f"Found {place} again, set aside by a killed run")
    remains = [entry for entry in (old, *leftovers(place)) if _is_folder(entry)]
    if _is_folder(place) and not is_held(place):
        remains += filter(_is_part, place.iterdir())
    for entry in remains:
        remove(entry)
        tell(f"Removed {entry}, left by a killed run")


def remove(path: Path) -> None:
    """A file, or a folder with all that it holds."""
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _hidden(place: Path) -> Path:
    return place.parent / f".{place.name}.{OLD}"


def _is_part(path: Path) -> bool:
    """The name of an unfinished file."""
    return path.name.startswith(".") and f".{NEW}." in path.name


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _may_hold(path: Path, kind: FolderKind) -> bool:
    """As a plain file, or one of its folders."""
    mode = os.lstat(path).st_mode
    if not any(fnmatchcase(path.name, name) for name in kind.files):
        return False
    return stat.S_ISDIR(mode) if path.name in kind.folders else stat.S_ISREG(mode)


def _first_new(path: Path) -> Path:
    """The highest missing one of a path and its parents."""
    while not os.path.lexists(path.parent):
        path = path.parent
    return path
