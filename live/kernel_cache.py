"""Use Triton's cache only if it is private to this user: loading a kernel runs it."""

import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..engine.jit import is_private

NAME = "TRITON_CACHE_DIR"  # read at each look-up


def keep_private() -> None:
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = Path(os.environ.get(NAME) or Path(home) / ".triton" / "cache")
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(folder):
            return
    os.environ[NAME] = _temporary().name


@cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="dsim-triton-")
