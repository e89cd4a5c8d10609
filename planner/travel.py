"""Files that travel with the work, to machines that lack them."""

import io
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from ..files.write import write_whole
from ..results.scenario import Scenario
from .contents import digest_of

PLACE = "\0placed\0"  # stands for the folder on the other machine
LASTS = 7 * 86400.0  # s on a machine after its last use

Files = dict[str, Path]  # by "digest/name", its place in the folder


def packed(value: Any) -> tuple[bytes, Files]:
    """A value for another machine, and its scenarios' files."""
    from ray import cloudpickle

    files: Files = {}
    base: Any = cloudpickle.CloudPickler

    class Packer(base):  # type: ignore[misc]
        """Gives scenarios their files' future places."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, Scenario):
                return _arrived, (type(obj), vars(_placed(obj, files)))
            return super().reducer_override(obj)

    stream = io.BytesIO()
    packer: Any = Packer
    packer(stream).dump(value)
    return stream.getvalue(), files


def unpacked(data: bytes) -> Any:
    """Work from another machine of the cluster, which Ray trusts too; never a user's data."""
    from ray import cloudpickle

    return cloudpickle.loads(data)


def place(files: Mapping[str, Callable[[], bytes]]) -> None:
    """Write the files that this machine lacks; files: return contents."""
    for name, contents in files.items():
        path = _folder() / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_whole(path, contents())
        os.utime(path.parent)
    for old in _folder().iterdir():
        with suppress(OSError):  # another process removed it
            if time.time() - old.stat().st_mtime > LASTS:
                rmtree(old, ignore_errors=True)


def as_named(text: str, named: Mapping[str, str]) -> str:
    """Another machine's message, with this machine's file names."""
    for at, name in named.items():
        text = text.replace(f"{PLACE}/{at}", name)
    return text


def as_placed(text: str) -> str:
    """A message for the sending machine; see `as_named`."""
    return text.replace(str(_folder()), PLACE)


def _placed(scenario: Scenario, files: Files) -> Scenario:
    there: dict[str, str] = {}  # by given path
    code: dict[str, str] = {}

    def found(path: str) -> str:
        at = Path(path).absolute()
        name = f"{digest_of(at)}/{at.name}"
        files[name] = at
        there[path] = code[str(at.resolve())] = f"{PLACE}/{name}"
        return there[path]

    own = scenario.with_files(found)
    allowed = own.allow_code | {code[path] for path in own.allow_code if path in code}
    return replace(own, allow_code=allowed, sent_from=tuple((at, path) for path, at in there.items()))


def _arrived(kind: type[Scenario], state: Mapping[str, Any]) -> Scenario:
    """A scenario with its files' places here."""
    own = object.__new__(kind)
    folder = str(_folder())

    def here(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(PLACE, folder)
        if is_dataclass(value) and not isinstance(value, type):  # such as the machine of a published experiment
            old = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
            new = {name: moved for name, own in old.items() if (moved := here(own)) != own}
            return replace(value, **new) if new else value
        return type(value)(map(here, value)) if type(value) in (tuple, frozenset) else value

    for name, value in state.items():
        object.__setattr__(own, name, here(value))
    return own


def _folder() -> Path:
    """This user's folder for files that came with work."""
    path = Path(os.path.realpath(tempfile.gettempdir())) / f"dsim-files-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user, expected a folder of this one")
    return path
