"""Writes a comparison's folder: compare.json and report.html."""

import json
from collections.abc import Sequence
from pathlib import Path

from ... import __version__
from ...files.place import Kind, check_folder, has_keys, write_folder
from ..html import to_html
from ..run import Run
from .comparison import Comparison
from .page import compare_page

FILES = ("compare.json", "report.html")
COMPARISON = Kind("a comparison", FILES, FILES[0], has_keys("definitions", "pairs", "cells", "overall"))


def write(
    folder: str | Path, found: Comparison, pairs: Sequence[tuple[Run, Run]], *, force: bool = False, command: str = ""
) -> None:
    """Write compare.json and report.html; the same comparison gives the same bytes."""
    text = json.dumps(found.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
    page = to_html(compare_page(found, pairs, command, __version__))
    write_folder(folder, COMPARISON, {FILES[0]: text + "\n", FILES[1]: page}, force=force)


def check(folder: str | Path, *, force: bool = False) -> Path:
    """The folder, if it may be written to."""
    return check_folder(folder, COMPARISON, force=force)
