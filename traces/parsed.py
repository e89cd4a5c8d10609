"""Parsed traces on disk: a large file that was read before is not parsed again.

Each is a file in the user's cache, named by a hash of the trace's bytes, of what was asked of them, and of the sources
of this package. It holds numbers and JSON, and ends with a hash of its content. One that cannot be read is made anew.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np

from ..engine.code_cache import is_own, is_private
from .trace import Trace, TraceNotes

FROM = 2**16  # bytes of a trace: smaller ones are parsed at once
MOST = 2**28  # bytes of all files together: the ones that were used longest ago are removed
SIZE = hashlib.sha256().digest_size
COLUMNS = ("arrival", "input_length", "output_length")


def parsed(data: bytes, asked: tuple[object, ...], parse: Callable[[], Trace]) -> Trace:
    """The trace of these bytes: from disk, or else from `parse`. asked: all else that the trace depends on."""
    folder = _folder() if len(data) >= FROM else None
    if folder is None:
        return parse()
    key = hashlib.sha256(data)
    key.update(_sources() + repr(asked).encode())
    path = folder / f"{key.hexdigest()}.trace"
    with suppress(Exception):  # missing, damaged or another user's
        found = _read(path)
        os.utime(path)
        return found
    trace = parse()
    with suppress(OSError, TypeError, ValueError):  # the disk is full, or a column is more than JSON holds
        _write(path, trace)
    return trace


def _read(path: Path) -> Trace:
    held = path.read_bytes()
    if not is_own(path) or hashlib.sha256(held[:-SIZE]).digest() != held[-SIZE:]:
        raise OSError(f"{path} is damaged")
    file = io.BytesIO(held)
    about = json.loads(file.readline())
    arrival, inputs, outputs = (np.load(file) for _ in COLUMNS)
    notes = TraceNotes(**{**about["notes"], "warnings": tuple(about["notes"]["warnings"])})
    return Trace(about["name"], arrival, inputs, outputs, about["extras"], notes)


def _write(path: Path, trace: Trace) -> None:
    about = json.dumps({"name": trace.name, "extras": trace.extras, "notes": asdict(trace.notes)}, allow_nan=False)
    if json.loads(about)["extras"] != trace.extras:  # such as a tuple, which JSON makes a list
        return
    file = io.BytesIO()
    file.write(about.encode() + b"\n")
    for name in COLUMNS:
        np.save(file, getattr(trace, name))
    held = file.getvalue()
    if len(held) > MOST:
        return
    _make_room(path.parent, MOST - len(held))
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(held + hashlib.sha256(held).digest())
    part.replace(path)  # whole, or not at all


def _make_room(folder: Path, most: int) -> None:
    """Remove the files that were used longest ago, until the others take at most so many bytes."""
    used = sorted(((file.stat().st_mtime, file.stat().st_size, file) for file in folder.iterdir()), reverse=True)
    total = 0
    for _, size, file in used:
        total += size
        if total > most:
            file.unlink(missing_ok=True)


@cache
def _folder() -> Path | None:
    """The private folder of parsed traces in the user's cache; None if there is none."""
    with suppress(OSError, RuntimeError):  # it cannot be written, or there is no home
        folder = Path.home() / ".cache" / "dsim" / "traces"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if is_private(folder):
            return folder
    return None


@cache
def _sources() -> bytes:
    """A hash of this package's sources: another parser may find other columns."""
    held = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        held.update(path.read_bytes())
    return held.digest()
