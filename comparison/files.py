"""A comparison's folder."""

from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..files.place import FolderKind, has_keys
from ..report.html import write_findings
from ..results.run import Run
from .cells import Comparison
from .page import compare_page

FILES = ("compare.json", "report.html")
COMPARISON = FolderKind("a comparison", FILES, FILES[0], has_keys("definitions", "pairs", "cells", "overall"))


def write(
    folder: str | Path, found: Comparison, pairs: Sequence[tuple[Run, Run]], *, force: bool = False, command: str = ""
) -> None:
    """Write the folder; the same comparison gives the same bytes."""
    write_findings(folder, COMPARISON, found.to_json(), compare_page(found, pairs, command, __version__), force=force)
