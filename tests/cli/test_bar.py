"""Long work says how far it is: a bar on a terminal, a line every half minute in a pipe."""

import io
import logging
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from dsim.cli import bar as module
from dsim.cli.bar import EVERY, Bar, watch_runs

from ..checks import cases
from .command import rows, succeed


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def pipe(clock: Clock) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, soft_wrap=True, highlight=False, get_time=clock), text


def test_a_line_says_what_is_done_of_what_how_long_it_took_and_how_long_it_will() -> None:
    clock = Clock()
    bar = Bar(pipe(clock)[0], "sweep", "cells")
    assert bar.line() == "sweep: 0 cells; 0 s"
    bar.update(0, 1200)
    clock.now += 30
    assert bar.line() == "sweep: 0 of 1,200 cells; 30 s"
    bar.update(120, note="ar")
    assert bar.line() == "sweep: 120 of 1,200 cells, ar; 30 s"
    clock.now += 20
    bar.update(360, name="other")  # 240 in 20 s: the 30 s before the first were not like them
    assert bar.line() == "other: 360 of 1,200 cells, ar; 50 s, about 70 s left"


def test_what_is_left_of_several_runs_is_of_them_all() -> None:
    clock = Clock()
    bar = Bar(pipe(clock)[0], "replay", "requests")
    watch = watch_runs(bar, 2, 1000, "compiling", " simulated")
    with watch("ar") as told:
        assert bar.line() == "ar: 0 of 2,000 requests, compiling; 0 s"
        told(100, 1.0)
        clock.now += 10
        told(500, 7.0)
        assert bar.line() == "ar: 500 of 2,000 requests, 7 s simulated; 10 s, about 38 s left"
    with watch("optimus") as told:
        told(1000, 1234.5)
        assert bar.line().startswith("optimus: 2,000 of 2,000 requests, 1,234 s simulated; 10 s")


def test_a_pipe_gets_a_line_every_so_often_even_of_work_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EVERY == 30.0
    monkeypatch.setattr(module, "EVERY", 0.001)
    screen, text = pipe(Clock())
    with Bar(screen, "work", "steps", note="compiling"):
        while text.getvalue().count("\n") < 3:
            time.sleep(0.001)
    assert set(text.getvalue().splitlines()) == {"work: 0 steps, compiling; 0 s"}


def test_a_line_in_a_pipe_says_that_a_policy_is_compiled_until_its_run_goes_on() -> None:
    with Bar(pipe(Clock())[0], "replay", "requests") as bar, watch_runs(bar, 1, 80, "starting")("optimus") as told:
        logging.getLogger("dsim").info("Compiling %s, once: about ten seconds", "optimus")
        assert bar.line() == "optimus: 0 of 80 requests, compiling optimus, once; 0 s"
        told(40, 3.0)
        assert bar.line() == "optimus: 40 of 80 requests, 3 s; 0 s"
    logging.getLogger("dsim").info("Compiling %s, once", "ar")
    assert "compiling" not in bar.line()


def test_a_terminal_gets_a_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.001)
    text = io.StringIO()
    screen = Console(file=text, force_terminal=True, width=80)
    with Bar(screen, "work", "steps") as bar:
        bar.update(1, 2)
        time.sleep(0.02)
    assert "1/2" in text.getvalue()
    assert " of 2" not in text.getvalue()


@cases(
    "arguments line",
    ("replay t.jsonl --json", r"(replay|optimus): \d+ (of 80 )?requests"),
    ("sweep c.toml -o s --jobs 1 --json", r"sweep: \d of 2 cells; "),
    pytest.param(
        "tune t.jsonl --slo e2el=9s --trials 2 --space s.toml --json", r"(searching|confirming): \d( of 2)?",
        marks=pytest.mark.slow,
    ),
)  # fmt: skip
def test_the_long_commands_say_so_on_standard_error_alone(arguments: str, line: str) -> None:
    Path("t.jsonl").write_text(rows(80))
    Path("c.toml").write_text('[base]\ntrace = "t.jsonl"\n[grid]\nseed = [0, 1]\n')
    Path("s.toml").write_text('policy = ["optimus", "chunk"]\n')
    ran = succeed(arguments, line_every=0.0005)
    assert any(re.match(line, said) for said in ran.err.splitlines()), ran.err
    assert isinstance(ran.json, dict)
