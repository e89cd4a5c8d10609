"""Inputs: files and nothing else, never more than can be kept, and one line for whatever a parser says."""

import os
from pathlib import Path

from dsim.engine.errors import DsimError, MachineError, TraceError
from dsim.files import read
from dsim.files.write import csv_of

from ..checks import refused


def test_what_is_no_file_is_refused_at_once() -> None:
    os.mkfifo("pipe")
    for path, kind in {"pipe": "a pipe", "/dev/zero": "a device", ".": "a directory"}.items():
        with refused(f"{path}: is {kind}, expected a file", TraceError):
            read.read_bytes(path, kind=TraceError)
        with refused(f"is {kind}, expected a file"):
            next(read.read_lines(path))
    with refused("cannot be read: No such file or directory"):
        read.read_text("none")
    with refused("no file's name holds a null byte"):
        read.read_text("a\0b")
    with refused("no file's name holds half a character"):
        read.read_text("\ud800")


def test_a_pipe_of_the_shell_is_read_to_its_bound() -> None:
    for sent, most in ((b"12345", 5), (b"123456", 5)):
        end, begin = os.pipe()
        os.write(begin, sent)
        os.close(begin)
        try:
            if len(sent) <= most:
                assert read.read_bytes(f"/dev/fd/{end}", max_size=most) == sent
            else:
                with refused("holds 6 bytes, expected at most 5"):
                    read.read_bytes(f"/dev/fd/{end}", max_size=most)
        finally:
            os.close(end)


def test_a_message_quotes_no_more_than_80_characters_on_one_line() -> None:
    Path("x").write_text("[" * 200_000)
    for what, text in {"it is nested too deeply": "[" * 200_000, "integer string": "9" * 5000}.items():
        Path("x").write_text(text)
        with refused(says=what) as error:
            read.read_json("x")
        assert len(str(error.value)) < 140
    with refused() as error, read.parsing("here", "it"):
        raise RuntimeError("long\n" * 1000)
    assert str(error.value).startswith("here: cannot be read as it: long long")
    assert len(str(error.value)) <= len("here: cannot be read as it: ") + 80
    assert len(read.cut("x" * 500)) == 80
    assert read.cut_words(f"name {'y' * 5000} end") == f"name {'y' * 40}...{'y' * 40} end"


def test_another_path_mends_the_users_errors_and_not_the_machines() -> None:
    assert type(read.fault("p", PermissionError(13, "Permission denied"))) is DsimError
    assert type(read.fault("p", OSError(28, "No space left on device"))) is MachineError


def test_a_name_that_is_no_text_is_shown_as_escapes() -> None:
    assert read.printable(os.fsdecode(b"a\xff.csv")) == "a\\xff.csv"


def test_a_table_reads_back_as_it_was_written() -> None:
    cells = ["ar", "=1+1", "'quoted'", "two\nlines"]
    Path("t.csv").write_text(csv_of([["a", "b", "c", "d"], cells]))
    assert list(read.read_csv("t.csv", ["a"])) == [("t.csv:2", dict(zip("abcd", cells, strict=True)))]
    assert csv_of([["=1+1", "-2+3", "-3", -3, "a=b"]]) == "'=1+1,'-2+3,-3,-3,a=b\n"
