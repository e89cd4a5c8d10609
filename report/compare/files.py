"""Writes a comparison's folder: compare.json and report.html."""

import json
from collections.abc import Sequence
from pathlib import Path

from ... import __version__
from ...engine.errors import DsimError
from ..html import to_html
from ..run import Run
from .comparison import Comparison
from .page import compare_page

FILES = ("compare.json", "report.html")


def write(
    folder: str | Path, found: Comparison, pairs: Sequence[tuple[Run, Run]], *, force: bool = False, command: str = ""
) -> None:
    """Write compare.json and report.html; the same comparison gives the same bytes."""
    folder = check(folder, force=force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(found.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
        (folder / FILES[0]).write_text(text + "\n", encoding="utf-8")
        (folder / FILES[1]).write_text(to_html(compare_page(found, pairs, command, __version__)), encoding="utf-8")
    except OSError as error:
        raise DsimError(f"{folder}: cannot be written: {error.strerror}") from error


def check(folder: str | Path, *, force: bool = False) -> Path:
    """The folder, if it may be written to."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise DsimError(f"{folder}: is a file, expected a folder to write to")
    held = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in held if name not in FILES]
    if foreign:
        raise DsimError(f"{folder}: holds {foreign[0]}, which is not of a comparison: choose another folder")
    if held and not force:
        raise DsimError(f"{folder}: exists and holds {', '.join(held)}: choose another folder or pass --force")
    return folder
