"""Findings go to standard output, messages to standard error."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.read import printable
from ..report.terminal import Terminal

if TYPE_CHECKING:
    from ..report.page import Page


has_printed = False  # the findings, as JSON


class Screen(Terminal):
    """Standard error, one line per message."""

    def __init__(self) -> None:
        super().__init__(stderr=True, soft_wrap=True, highlight=False, markup=False)

    def warn(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.print(f"Warning: {line}", style="yellow")

    def alarm(self, line: str) -> None:
        self.print(line, style="bold red")

    def explain(self, line: str) -> None:
        """Where findings come from, if not empty."""
        if line:
            self.print(line)

    def wrote(self, out: Path | None, files: Iterable[str]) -> None:
        """Which of the files were written."""
        if out is not None:
            self.print(f"Wrote {out}/ ({', '.join(file for file in files if (out / file).exists())})")


def json_text(data: Any, indent: int | None = None) -> str:
    """NaN and infinity become null."""
    from ..results.metrics import no_nan

    return json.dumps(no_nan(data), indent=indent, allow_nan=False)


def print_json(data: Any, indent: int | None = None) -> None:
    global has_printed
    print(json_text(data, indent))
    has_printed = True


def print_json_error(message: str, exit_code: int, kind: str) -> None:
    """Unless findings were printed: standard output holds one JSON value."""
    if not has_printed:
        error = {"message": message, "exit_code": exit_code, "kind": kind}
        print(json.dumps({"error": error}), flush=True)


def show(*lines: str) -> None:
    print(*map(printable, lines), sep="\n")


def say(page: Callable[[], "Page"], data: Any, as_json: bool) -> None:
    """For people, or as JSON."""
    if as_json:
        print_json(data)
    else:
        from ..report.text import render

        render(page(), Terminal(soft_wrap=not sys.stdout.isatty(), highlight=False))
