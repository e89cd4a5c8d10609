"""Use Triton's cache of kernels only if it is private to this user: loading a kernel runs it."""

import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..engine.code_cache import is_private

NAME = "TRITON_CACHE_DIR"  # Triton reads it at each look-up; processes that share a model inherit it


def keep_private() -> None:
    """Give Triton a temporary folder if its own is not private."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = Path(os.environ.get(NAME) or Path(home) / ".triton" / "cache")
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        os.environ[NAME] = _temporary().name


@cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="dsim-triton-")
