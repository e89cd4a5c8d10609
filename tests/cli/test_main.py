"""dsim itself: its errors, how it ends in a pipe, and what a shell completes (test_start.py: its help)."""

import errno
import os
import subprocess
import sys

import pytest

from dsim.__main__ import main
from dsim.cli.screen import print_json
from dsim.engine.errors import MachineError

from ..checks import cases
from .command import dsim


@cases("where", "dsim.planner.record.record", "typer.core.TyperOption.process_value")
def test_an_interrupt_that_no_command_answers_is_said(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*of: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    ran = dsim("replay azure-conv --num-requests 5 --policy ar -o run")
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


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@cases(
    "command reader",
    ("replay azure-conv --num-requests 5", "head -1"),
    ("profiles --json", "true"),  # which reads nothing: the pipe is closed by then
    ("policies", "true"),
    ("replay --help", "true"),
)
def test_a_reader_that_leaves_early_is_no_error(command: str, reader: str) -> None:
    dsim = f"NUMBA_DISABLE_JIT=1 {sys.executable} -m dsim {command}"  # five requests are not worth compiling
    done = subprocess.run(f"({dsim}; echo $? >&2) | {reader}", shell=True, capture_output=True, text=True)
    [code] = [line for line in done.stderr.splitlines() if " of 5 requests" not in line]  # but of progress
    assert code == "141" or (code == "0" and reader == "head -1")  # which may have read everything
    assert len(done.stdout.splitlines()) == (reader == "head -1")


@cases(
    "typed completed",
    ("dsim va", ["validate"]),
    ("dsim replay mooncake-conv --conc", ["--concurrency"]),
    ("dsim replay mine.js", []),  # the shell completes a file
)
def test_a_shell_completes_commands_and_options(
    typed: str, completed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_DSIM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    assert dsim().out.split() == completed


@cases(
    "words kind",
    ("replay gone.jsonl --json", "input"),
    ("replay azure-conv --json --polcy ar", "usage"),
    ("repaly azure-conv --json", "usage"),
)
def test_a_refusal_with_json_is_an_object_and_the_same_line(words: str, kind: str) -> None:
    ran = dsim(words)
    assert ran.out.count("\n") == 1
    assert ran.json == {"error": {"message": ran.refusal, "exit_code": 2, "kind": kind}}
    plain = dsim(*(word for word in words.split() if word != "--json"))
    assert (plain.code, plain.out, plain.err) == (2, "", ran.err)


@cases(
    "words line",
    ("serve --twin a100-sdar-8b --graphs", "--graphs is given without --model or --random-weights, expected both"),
    ("replay azure-conv --currency EUR", "--currency is given without --gpu-hour, expected both"),
    ("plan azure-conv --slo ttft=9s --gpu H100,H100", "GPU H100 is given 2 times, expected once"),
)
def test_an_option_without_effect_is_refused(words: str, line: str) -> None:
    assert dsim(words).refusal.startswith(line)


@cases(
    "raised code kind line",
    (OSError(errno.ENOSPC, "No space left on device", "run"), 1, "machine", "Error: run: cannot be written: No space"),
    (MemoryError(), 1, "machine", "Error: there is not enough memory for this"),
    (MachineError("the device is gone"), 1, "machine", "Error: the device is gone"),
    (KeyboardInterrupt(), 130, "interrupted", "Interrupted."),
    (ModuleNotFoundError("", name="torch.nn"), 2, "package", "Error: torch.nn is not installed, expected"),
)
def test_every_other_failure_with_json_is_an_object_too(
    raised: BaseException, code: int, kind: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*of: object, **more: object) -> None:
        raise raised

    monkeypatch.setattr("dsim.traces.load", fail)
    ran = dsim("trace info azure-conv --json")
    assert (ran.code, ran.err.startswith(line), ran.err.count("\n")) == (code, True, 1)
    message = ran.err.removeprefix("Error: ").removesuffix("\n")
    assert ran.json == {"error": {"message": message, "exit_code": code, "kind": kind}}


def test_findings_that_are_printed_are_the_only_object(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(*of: object, **more: object) -> None:
        print_json({"found": 1})
        raise MachineError("too late")

    monkeypatch.setattr("dsim.cli.screen.print_json", printed)
    ran = dsim("trace info azure-conv --json")
    assert (ran.code, ran.json, ran.err) == (1, {"found": 1}, "Error: too late\n")
    assert dsim("trace info gone.jsonl --json").json["error"]["kind"] == "input"  # the next is told anew
