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
from .read import described, fault, naming, read_json
from .write import NEW, beside, check_parent, encoded, leftovers, sync, sync_folder, tell

OLD = "dsim-old"  # `.NAME.dsim-old`: being replaced
SQLITE, APPLICATION = b"SQLite format 3\x00", 0x6473696D  # "dsim", in a store's header
ASIDE = "dsim-aside"  # `.NAME.dsim-aside`: replaced once the new one has a complete result


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
        return self.store is not None and is_store(folder / self.store)


def check_folder(folder: str | Path, kind: FolderKind, *, force: bool, add: bool = False) -> Path:
    """The absolute path of an output folder; DsimError if this kind of run may not write there.

    New and empty folders are accepted; a folder of dsim may be replaced with `force`, extended with `add`. First, what
    killed runs set aside is restored and their temporary files are removed, with a message each.
    """
    place = whole_path(folder)
    try:
        if any(is_held(entry) for entry in leftovers(place)):
            raise DsimError(f"{folder}: another dsim is writing there: wait for it, or choose another folder")
        _recover(place, kind)
        if not os.path.lexists(place):
            check_parent(_first_new(place))
            return place
        mode = os.lstat(place).st_mode
        if not stat.S_ISDIR(mode):
            raise DsimError(f"{folder}: is {described(mode)}, expected a folder to write to")
        if is_held(place):
            raise DsimError(f"{folder}: another dsim is writing there: wait for it, or choose another folder")
        names = []
        for entry in sorted(place.iterdir()):
            if _is_part(entry):
                entry.unlink()
                tell(f"Removed {entry}, left by a killed run")
            else:
                names.append(entry.name)
        foreign = [name for name in names if not _may_hold(place / name, kind)]
    except (OSError, ValueError) as error:
        raise fault(folder, error) if isinstance(error, OSError) else DsimError(f"{folder}: {error}") from None
    if foreign:
        raise DsimError(f"{folder}: holds {foreign[0]}, which is not of {kind.title}: choose another folder")
    if names and not (force or add):
        raise DsimError(f"{folder}: exists and holds {', '.join(names)}: choose another folder or pass --force")
    if names and not kind.is_ours(place):
        if kind.manifest in names:
            raise DsimError(f"{folder}/{kind.manifest}: does not say that dsim wrote it: choose another folder")
        raise DsimError(f"{folder}: holds {names[0]} and no {kind.manifest}: choose another folder")
    return place


def whole_path(folder: str | Path) -> Path:
    """Without `..`; the same after parents are created."""
    return Path(os.path.normpath(Path(folder).absolute()))


class Staged:
    """A folder built at a temporary `path` and renamed by `commit`; leaving the `with` block before removes it.

    While it is open, a lock tells it from a killed run's leftovers.
    """

    def __init__(self, folder: str | Path, kind: FolderKind, *, force: bool = False) -> None:
        self.folder = check_folder(folder, kind, force=force)
        self._shown, self._kind, self._force = folder, kind, force
        self._made = [p for p in (self.folder.parent, *self.folder.parent.parents) if not p.exists()]
        self.path = beside(self.folder)
        self._lock: Lock | None = None
        self._open = True
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
            self._lock = Lock(self.path)
        except BaseException as error:  # interrupts too: no caller can abort yet
            self.abort()
            if isinstance(error, OSError):
                raise fault(folder, error) from None
            raise

    def commit(self, *, aside: bool = False) -> None:
        """Move into place; after a kill between the two renames the next run restores the old folder.

        aside: keep the old folder until `OpenFolder.settle`.
        """
        with uninterrupted():
            self._commit(aside)

    def _commit(self, aside: bool) -> None:
        old = _hidden(self.folder, ASIDE if aside else OLD)
        with naming(self._shown):
            for name in os.listdir(self.path):
                sync(self.path / name)
            replaces = self._is_taken()
            if replaces:
                os.rename(self.folder, old)
            try:
                os.rename(self.path, self.folder)
            except OSError:
                if replaces:
                    os.rename(old, self.folder)
                raise
            self._open = False
            sync_folder(self.folder.parent)
            if replaces and not aside:
                shutil.rmtree(old, ignore_errors=True)

    def abort(self) -> None:
        """Does nothing after a commit."""
        if self._open:
            self._open = False
            shutil.rmtree(self.path, ignore_errors=True)
            for parent in self._made:
                with suppress(OSError):
                    parent.rmdir()  # not if there is something in it
        if self._lock is not None:
            self._lock.close()

    def keep(self) -> Lock:
        """The lock, to go on writing in the committed folder."""
        assert self._lock is not None, "nothing was staged"
        lock, self._lock = self._lock, None
        return lock

    def __del__(self) -> None:
        # An interrupt may come before a `with` statement.
        if getattr(self, "_open", False):
            self.abort()

    def __enter__(self) -> "Staged":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _is_taken(self) -> bool:
        """Something is there, perhaps since; DsimError unless it may be replaced."""
        if not os.path.lexists(self.folder):
            return False
        names = sorted(os.listdir(self.folder)) if _is_folder(self.folder) else ["a file"]
        if names and not self._force:
            raise DsimError(
                f"{self._shown}: exists and holds {names[0]}, which was not there when this run began: choose another "
                "folder or pass --force"
            )
        if any(not _may_hold(self.folder / name, self._kind) for name in names) or is_held(self.folder):
            raise DsimError(f"{self._shown}: is in use by now: choose another folder")
        return True


def write_folder(
    folder: str | Path, kind: FolderKind, files: Mapping[str, str | bytes], *, force: bool = False
) -> None:
    """Atomically."""
    with Staged(folder, kind, force=force) as staged:
        with naming(folder):
            for name, content in files.items():
                (staged.path / name).write_bytes(encoded(content))
        staged.commit()


class OpenFolder:
    """An output folder, locked while a run extends it.

    With `force` the old one is set aside until `settle`; else `close`, or after a kill the next run, restores it.
    """

    def __init__(self, folder: str | Path, kind: FolderKind, *, force: bool = False) -> None:
        self._place = check_folder(folder, kind, force=force, add=True)
        self._kind = kind
        self._is_settled = not (force and self._place.is_dir() and any(self._place.iterdir()))
        if self._is_settled:
            self._lock = hold_folder(folder)
        else:
            staged = Staged(folder, kind, force=True)
            try:
                staged.commit(aside=True)
            except BaseException:
                staged.abort()
                raise
            self._lock = staged.keep()

    @property
    def is_settled(self) -> bool:
        return self._is_settled

    def settle(self) -> None:
        """Remove the old folder: the new one has complete results. May be called twice."""
        if not self._is_settled:
            self._is_settled = True
            aside, old = _hidden(self._place, ASIDE), _hidden(self._place, OLD)
            with suppress(OSError):  # the next run removes it
                os.rename(aside, old)  # from now on it is not restored
                shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Unlock; restore the old folder unless settled."""
        if not self._is_settled:
            self._is_settled = True
            with uninterrupted(), suppress(OSError):  # the next run restores it
                if _is_folder(_hidden(self._place, ASIDE)):
                    _put_back(self._place, self._kind)
        self._lock.close()


def hold_folder(folder: str | Path) -> Lock:
    """Create and lock."""
    if os.path.islink(folder):
        raise DsimError(f"{folder}: is a symbolic link, expected a folder to write to")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return Lock(Path(folder))
    except FileExistsError:
        raise DsimError(f"{folder}: is a file, expected a folder to write to") from None
    except OSError as error:
        raise fault(folder, error) from None


def _recover(place: Path, kind: FolderKind) -> None:
    """Restore or remove killed runs' leftovers."""
    old = _hidden(place, OLD)
    if _is_folder(old):
        if os.path.lexists(place):  # the new one is in place
            shutil.rmtree(old, ignore_errors=True)
            tell(f"Removed {old}, left by a killed run")
        else:
            os.rename(old, place)
            tell(f"Found {place} again, set aside by a killed run")
    if _is_folder(_hidden(place, ASIDE)) and not is_held(place) and _put_back(place, kind):
        tell(f"Found {place} again, set aside by a killed run")
    for entry in leftovers(place):
        if _is_folder(entry):
            shutil.rmtree(entry, ignore_errors=True)
            tell(f"Removed {entry}, left by a killed run")


def _put_back(place: Path, kind: FolderKind) -> bool:
    """Restore a set-aside folder, unless the new one has a complete or foreign file."""
    if _is_folder(place) and all(_is_part(entry) or _may_hold(entry, kind) for entry in place.iterdir()):
        shutil.rmtree(place)
    if os.path.lexists(place):
        return False
    os.rename(_hidden(place, ASIDE), place)
    return True


def _hidden(place: Path, suffix: str) -> Path:
    return place.parent / f".{place.name}.{suffix}"


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


def is_store(path: Path) -> bool:
    """Empty, or by its SQLite header a store of dsim."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except OSError:
        return False
    return not header or (header.startswith(SQLITE) and header[68:72] == APPLICATION.to_bytes(4, "big"))


def _first_new(path: Path) -> Path:
    """The highest missing one of a path and its parents."""
    while not os.path.lexists(path.parent):
        path = path.parent
    return path
