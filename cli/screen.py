"""Output of commands: findings on standard output, messages on standard error."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from ..report.page import Page


has_printed = False  # whether print_json has printed this command's findings


class Screen(Console):
    """Standard error, a line a message."""

    def __init__(self) -> None:
        super().__init__(stderr=True, soft_wrap=True, highlight=False)

    def warn(self, lines: Iterable[str]) -> None:
        """Print warnings."""
        for line in lines:
            self.print(f"Warning: {line}", style="yellow", markup=False)

    def alarm(self, line: str) -> None:
        """Say what went wrong."""
        self.print(line, style="bold red", markup=False)

    def explain(self, line: str) -> None:
        """Print a line about the findings' origin, if any."""
        if line:
            self.print(line, markup=False)

    def wrote(self, out: Path | None, files: Iterable[str]) -> None:
        """Say which of these files were written, if any."""
        if out is not None:
            self.print(f"Wrote {out}/ ({', '.join(file for file in files if (out / file).exists())})", markup=False)


def json_text(data: Any, indent: int | None = None) -> str:
    """One JSON value; NaN and infinity become null."""
    from ..results.metrics import no_nan

    return json.dumps(no_nan(data), indent=indent, allow_nan=False)


def print_json(data: Any, indent: int | None = None) -> None:
    """Print the findings as one JSON value."""
    global has_printed
    print(json_text(data, indent))
    has_printed = True


def print_json_error(message: str, exit_code: int, kind: str) -> None:
    """Print a failure as one JSON object, but not after findings: standard output holds one value."""
    if not has_printed:
        error = {"message": message, "exit_code": exit_code, "kind": kind}
        print(json.dumps({"error": error}), flush=True)


def say(page: Callable[[], "Page"], data: Any, as_json: bool) -> None:
    """Print the findings: a page for people, or one JSON object."""
    if as_json:
        print_json(data)
    else:
        from ..report.text import render

        render(page(), Console(soft_wrap=not sys.stdout.isatty(), highlight=False))
