"""Parsed traces on disk: a large file is parsed once.

Each is a file in the user's cache, named by a hash of the trace's bytes, the arguments and this package's sources. It
holds numbers, JSON and a hash of its content; an unreadable one is made anew.
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

FROM = 2**16  # bytes; smaller traces are parsed each time
MOST = 2**28  # bytes in all: the longest unused are removed
SIZE = hashlib.sha256().digest_size
COLUMNS = ("arrival", "input_length", "output_length")


def parsed(data: bytes, asked: tuple[object, ...], parse: Callable[[], Trace]) -> Trace:
    """From disk, else from `parse`. asked: what the trace depends on besides its bytes."""
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
    with suppress(OSError, TypeError, ValueError):  # full disk, or a column that JSON cannot hold
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
    if json.loads(about)["extras"] != trace.extras:  # a tuple among them becomes a list
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
    """Remove the longest unused files, until at most `most` bytes are left."""
    used = sorted(((file.stat().st_mtime, file.stat().st_size, file) for file in folder.iterdir()), reverse=True)
    total = 0
    for _, size, file in used:
        total += size
        if total > most:
            file.unlink(missing_ok=True)


@cache
def _folder() -> Path | None:
    """Private; None if there is none."""
    with suppress(OSError, RuntimeError):  # not writable, or no home
        folder = Path.home() / ".cache" / "dsim" / "traces"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if is_private(folder):
            return folder
    return None


@cache
def _sources() -> bytes:
    """A hash: another parser may find other columns."""
    held = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        held.update(path.read_bytes())
    return held.digest()
