"""Atomic writes: next to the place, synced, renamed."""

import csv
import io
import json
import math
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..engine.errors import DsimError
from .lock import Lock, is_held
from .read import FORMULA, FilePath, described, fault, float_of, naming, printable

NEW = "dsim-new"  # in an unfinished file's hidden name, `.NAME.dsim-new.RANDOM`


def write_whole(path: FilePath, content: str | bytes) -> None:
    with writing(path) as file:
        file.write(encoded(content))


@contextmanager
def writing(path: FilePath) -> Iterator[BinaryIO]:
    """Named if the block succeeds, else removed."""
    path = Path(path)
    temporary = beside(path)
    with naming(path):
        try:  # an interrupt may come during its creation
            with temporary.open("xb") as file:
                lock = Lock(temporary)
                yield file
                file.flush()
                os.fsync(file.fileno())
            check_file(path, force=True)
            os.replace(temporary, path)
            lock.close()
        finally:
            temporary.unlink(missing_ok=True)


def json_text(value: object, indent: str = "") -> str:
    """For people and diffs: one key per line, a list of plain values on one."""
    deeper = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{deeper}{json.dumps(key)}: {json_text(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + indent + "}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(deeper + json_text(item, deeper) for item in value) + "\n" + indent + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def csv_of(rows: Iterable[Iterable[Any]]) -> str:
    """Rows with the head, as CSV. A text that a spreadsheet would run gets an apostrophe."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_covered, row) for row in rows)
    return text.getvalue()


def _covered(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(FORMULA) and math.isnan(float_of(value)):
        return f"'{value}"
    return value


def check_file(path: FilePath, *, force: bool) -> Path:
    """DsimError if a file may not be written.

    Killed runs' leftovers are removed. Symbolic links and devices are refused.
    """
    path = Path(path)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        mode = None
    except (OSError, ValueError) as error:
        raise _named(path, error) from None
    if mode is not None and not stat.S_ISREG(mode):
        raise DsimError(f"{path}: is {described(mode)}, expected the name of a file to write")
    if mode is not None and not force:
        raise DsimError(f"{path} exists: choose another name, or pass --force to replace it")
    if not path.name:
        raise DsimError(f"{path}: is not a file name, expected one to write")
    check_parent(path)
    for entry in leftovers(path):
        if not entry.is_symlink() and entry.is_file() and not is_held(entry):
            with suppress(OSError):
                entry.unlink()
                tell(f"Removed {entry}, left by a killed run")
    return path


def check_parent(path: Path) -> None:
    """DsimError unless the folder takes a new file."""
    try:
        if not stat.S_ISDIR(os.stat(path.parent).st_mode):
            raise NotADirectoryError(20, "Not a directory")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except (OSError, ValueError) as error:
        raise _named(path, error) from None


def beside(path: Path) -> Path:
    """A unique hidden name for a replacement."""
    # Names have at most 255 bytes.
    return path.with_name(f".{_stem(path)}.{NEW}.{secrets.token_hex(4)}")


def leftovers(path: Path) -> list[Path]:
    """Hidden files being written, finished or not."""
    prefix = f".{_stem(path)}.{NEW}."
    with suppress(OSError):
        return sorted(entry for entry in path.parent.iterdir() if entry.name.startswith(prefix))
    return []


def tell(line: str) -> None:
    """To standard error, if open."""
    with suppress(OSError, ValueError):
        print(printable(line), file=sys.stderr)


def encoded(content: str | bytes) -> bytes:
    """Lone surrogates, as in file names, become escapes."""
    return content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stem(path: Path) -> str:
    return os.fsdecode(os.fsencode(path.name)[:200])


def _named(path: Path, error: OSError | ValueError) -> DsimError:
    if isinstance(error, OSError):
        return fault(path, error)
    return DsimError(f"{str(path)!r:.80}: cannot be written: {error}")
