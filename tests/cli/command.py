"""The command line as a user meets it: in this process for what it prints, in another for how it ends."""

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from dsim.cli import main


@dataclass
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What standard output holds: one JSON value on one line or more, and nothing else; NaN is none."""
        return json.loads(self.out, parse_constant=_no_number)

    @property
    def refusal(self) -> str:
        """The one line of a command that refused what it was given, which printed nothing else but this as JSON."""
        assert (self.code, self.err.count("\n")) == (2, 1), self
        assert self.err.startswith("Error: ")
        line = self.err[len("Error: ") : -1]
        assert self.out == "" or {**self.json["error"], "kind": ""} == {"message": line, "exit_code": 2, "kind": ""}
        return line


def _no_number(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def dsim(*arguments: object, line_every: float = 3600.0) -> Ran:
    """Run `dsim`. arguments: texts, which are split at spaces; others, and what a list holds, are a word each.

    line_every: seconds between lines of progress; by default none comes.
    """
    words: list[object] = ["dsim"]
    for argument in arguments:
        parts = argument.split() if isinstance(argument, str) else argument
        words += parts if isinstance(parts, list) else [parts]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch("dsim.cli.bar.EVERY", line_every),
        mock.patch.object(sys, "argv", [*map(str, words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Ran(code, out.getvalue(), err.getvalue())


def succeed(*arguments: object, line_every: float = 3600.0) -> Ran:
    """Run `dsim`, which must end with code 0."""
    ran = dsim(*arguments, line_every=line_every)
    assert ran.code == 0, ran.err
    return ran


def held(folder: Path) -> list[str]:
    """Everything under a folder, hidden files too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def rows(n: int, gap: int = 200, prompt: int = 100, output: int = 48) -> str:
    """A trace of equal requests, `gap` ms apart, as JSON lines."""
    return "".join(
        json.dumps({"timestamp": gap * i, "input_length": prompt, "output_length": output}) + "\n" for i in range(n)
    )
