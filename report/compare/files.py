"""Writes a comparison's folder: compare.json and report.html."""

import json
from collections.abc import Sequence
from pathlib import Path

from ...files.place import Kind, check_folder, has_keys, write_folder
from ..run import Run
from .comparison import Comparison

FILES = ("compare.json", "report.html")
COMPARISON = Kind("a comparison", FILES, FILES[0], has_keys("definitions", "pairs", "cells", "overall"))


def write(folder: str | Path, found: Comparison, pairs: Sequence[tuple[Run, Run]], *, force: bool = False) -> None:
    """Write compare.json and report.html; the same comparison gives the same bytes."""
    # Imported here: an answer on the terminal draws nothing and need not load Plotly.
    from .page import page

    text = json.dumps(found.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
    write_folder(folder, COMPARISON, {FILES[0]: text + "\n", FILES[1]: page(found, pairs)}, force=force)


def check(folder: str | Path, *, force: bool = False) -> Path:
    """The folder, if it may be written to."""
    return check_folder(folder, COMPARISON, force=force)
