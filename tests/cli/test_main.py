"""dsim itself: its errors, how it ends in a pipe, and what a shell completes (test_start.py: its help)."""

import os
import signal
import subprocess
import sys

import pytest

from dsim.__main__ import main

from .command import dsim


@pytest.mark.parametrize("where", ["dsim.planner.spread.moved_by_spread", "typer.core.TyperOption.process_value"])
def test_an_interrupt_that_no_command_answers_is_said(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*of: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    ran = dsim("replay", "azure-conv", "--num-requests", "5", "--policy", "ar", "-o", "run")
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.endswith("Interrupted.\n")


def test_an_interrupt_while_the_command_line_is_loaded_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        @staticmethod
        def find_spec(name: str, *of: object) -> None:
            if name == "dsim.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "dsim.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "Interrupted.\n")


def test_an_interrupt_after_the_end_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dsim", "--version"])
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            main()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_group_of_commands_alone_prints_its_help_and_nothing_else() -> None:
    ran = dsim("trace")
    assert (ran.code, ran.err) == (2, "")
    assert "Usage: dsim trace" in ran.out
    assert "synth" in ran.out


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    ("command", "reader"),
    [
        ("replay azure-conv --num-requests 5", "head -1"),
        ("profiles --json", "true"),  # which reads nothing: the pipe is closed by then
        ("metrics", "true"),
    ],
)
def test_a_reader_that_leaves_early_is_no_error(command: str, reader: str) -> None:
    done = subprocess.run(f"{sys.executable} -m dsim {command} | {reader}", shell=True, capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if " of 5 requests" not in line] == []  # but of progress
    assert len(done.stdout.splitlines()) == (reader == "head -1")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("dsim va", ["validate"]),
        ("dsim replay mo", ["mooncake-conv"]),
        ("dsim replay mooncake-conv --policy opt", ["optimus"]),
        ("dsim capacity mooncake-conv --router ", ["round-robin", "least-tokens", "jsq", "prefix"]),
        ("dsim tune mooncake-conv --profile l40s-llada", ["l40s-llada-8b"]),
        ("dsim replay mine.js", []),  # the shell completes a file
    ],
)
def test_a_shell_completes_commands_and_names(
    typed: str, completed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_DSIM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    assert dsim().out.split() == completed
