"""Triton's folder of compiled kernels, used only if it is private to this user, since loading a kernel runs it."""

import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..engine.code_cache import is_private

NAME = "TRITON_CACHE_DIR"  # Triton reads it whenever it looks for a kernel, and processes that share a model inherit it


def keep_private() -> None:
    """Give Triton a folder that lasts as long as this process, if its own is not private."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = Path(os.environ.get(NAME) or Path(home) / ".triton" / "cache")
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        os.environ[NAME] = _temporary().name


@cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    """A folder that is removed as the process ends."""
    return tempfile.TemporaryDirectory(prefix="dsim-triton-")
