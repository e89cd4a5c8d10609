"""The files of Python code that may be loaded: files that the user names, never a file that only data names."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from .errors import CodeError

AllowedCode = frozenset[str]  # real paths: links are followed
NO_CODE: AllowedCode = frozenset()


def allowed(files: Iterable[str | Path]) -> AllowedCode:
    """The files of code that may be loaded."""
    return frozenset(map(_real, files))


def check_allowed(path: str, allow: AllowedCode, asker: str) -> None:
    """Raise CodeError unless the user named the file; asker: what asks for its code, for the message."""
    if _real(path) not in allow:
        raise CodeError(
            f"{asker} asks for code in {path}, expected a file that the command itself names: "
            f"add --allow-code {shlex.quote(path)} if you trust it"
        )


def _real(path: str | Path) -> str:
    """The path without links; one that leads nowhere, as a circle of links does, stays as it is."""
    try:
        return str(Path(path).resolve())
    except (OSError, RuntimeError, ValueError):
        return str(Path(path).absolute())
