"""Python files that may be loaded: named by the user, not by data."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from .errors import CodeError

AllowedCode = frozenset[str]  # real paths
NO_CODE: AllowedCode = frozenset()


def allowed(files: Iterable[str | Path]) -> AllowedCode:
    return frozenset(map(_real, files))


def check_allowed(path: str, allow: AllowedCode, asker: str) -> None:
    """CodeError unless the user named the file; asker: begins the message."""
    if _real(path) not in allow:
        raise CodeError(
            f"{asker} asks for code in {path}, expected a file that the command itself names: "
            f"add --allow-code {shlex.quote(path)} if you trust it"
        )


def _real(path: str | Path) -> str:
    """The path with links resolved, or as it is if that fails."""
    try:
        return str(Path(path).resolve())
    except (OSError, RuntimeError, ValueError):
        return str(Path(path).absolute())
