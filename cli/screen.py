"""Findings go to standard output, messages to standard error."""

import json
import shlex
import sys
from collections.abc import Iterable
from typing import Any

import typer

from ..files.read import printable, without_secrets
from ..report.text import Terminal
from .answer import INTERRUPTED, MISSED, Stopped
from .bar import Bar
from .declared import Question, Watch

has_printed = False  # the findings, as JSON
# Options that do not change the result, with their number of values.
PLACES = {"-o": 1, "--out": 1, "--force": 0, "--json": 0}
SPEED = {"--jobs": 1, "--ray": 1}


class Screen(Watch):
    """Standard error, one line per message."""

    in_python = False

    def __init__(self) -> None:
        self.console = Terminal(stderr=True, soft_wrap=True, highlight=False, markup=False)

    def command(self, *speed: str) -> str:
        """For a page, without options that do not change the result; speed: those of SPEED that do not."""
        drop = PLACES | {name: SPEED[name] for name in speed or SPEED}
        words, skip = [], 0
        for word in sys.argv[1:]:
            name, equals, _ = word.partition("=")
            if skip:
                skip -= 1
            elif name in drop:
                skip = drop[name] * (not equals)
            else:
                words.append(without_secrets(word))
        return printable(shlex.join(["dsim", *words]))

    def warn(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.console.print(f"Warning: {line}", style="yellow")

    def say(self, *lines: str) -> None:
        for line in lines:
            self.console.print(line)

    def alarm(self, line: str) -> None:
        self.console.print(line, style="bold red")

    def bar(self, name: str, unit: str = "", total: int | None = None, note: str = "") -> Bar:
        return Bar(self.console, name, unit, total, note)


def run(question: Question[Any], as_json: bool) -> None:
    """Answer a question, show the answer and end as it says."""
    screen = Screen()
    try:
        answer = question.answer(screen)
    except Stopped as stop:
        screen.alarm(str(stop))
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json(answer.to_json())
    else:
        if (page := answer.to_page()) is not None:
            from ..report.text import render

            render(page, Terminal(soft_wrap=not sys.stdout.isatty(), highlight=False))
        for line in answer.lines:
            print(printable(line))
    if answer.explained:
        screen.say(answer.explained)
    if answer.interrupted:
        screen.alarm(answer.interrupted)
    if answer.out is not None:
        written = ", ".join(file for file in answer.files if (answer.out / file).exists())
        screen.say(f"Wrote {answer.out}/ ({written})")
    if answer.failure is not None:
        raise answer.failure
    for line in answer.missed:
        screen.alarm(line)
    code = INTERRUPTED if answer.interrupted else answer.code or MISSED * bool(answer.missed)
    if code:
        raise typer.Exit(code)


def print_json(data: Any) -> None:
    """NaN and infinity become null."""
    from ..files.schema import stored

    global has_printed
    print(json.dumps(stored(data), allow_nan=False))
    has_printed = True


def print_json_error(message: str, exit_code: int, kind: str) -> None:
    """Unless findings were printed: standard output holds one JSON value."""
    if not has_printed:
        error = {"message": message, "exit_code": exit_code, "kind": kind}
        print(json.dumps({"error": error}), flush=True)
