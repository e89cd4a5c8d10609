"""Inputs: files and nothing else, never more than can be kept, and one line for whatever a parser says."""

import os
from pathlib import Path

import pytest

from dsim.engine.errors import DsimError, MachineError, TraceError
from dsim.files.read import (
    cut,
    cut_words,
    fault,
    parsing,
    printable,
    read_bytes,
    read_csv,
    read_json,
    read_lines,
    read_text,
)
from dsim.files.write import csv_of


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in {tmp_path / "pipe": "a pipe", "/dev/zero": "a device", tmp_path: "a directory"}.items():
        with pytest.raises(TraceError, match=f"{path}: is {kind}, expected a file"):
            read_bytes(path, kind=TraceError)
        with pytest.raises(DsimError, match=f"is {kind}, expected a file"):
            next(read_lines(path))
    with pytest.raises(DsimError, match="cannot be read: No such file or directory"):
        read_text(tmp_path / "none")
    with pytest.raises(DsimError, match="no file's name holds a null byte"):
        read_text("a\0b")
    with pytest.raises(DsimError, match="no file's name holds half a character"):
        read_text("\ud800")


def test_a_pipe_of_the_shell_is_read_to_its_bound() -> None:
    for sent, most in ((b"12345", 5), (b"123456", 5)):
        read, write = os.pipe()
        os.write(write, sent)
        os.close(write)
        try:
            if len(sent) <= most:
                assert read_bytes(f"/dev/fd/{read}", max_size=most) == sent
            else:
                with pytest.raises(DsimError, match="holds 6 bytes, expected at most 5"):
                    read_bytes(f"/dev/fd/{read}", max_size=most)
        finally:
            os.close(read)


def test_a_message_quotes_no_more_than_80_characters_on_one_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("[" * 200_000)
    for what, text in {"it is nested too deeply": "[" * 200_000, "integer string": "9" * 5000}.items():
        (tmp_path / "x").write_text(text)
        with pytest.raises(DsimError) as error:
            read_json(tmp_path / "x")
        assert what in str(error.value)
        assert len(str(error.value)) < len(str(tmp_path)) + 140
    with pytest.raises(DsimError) as error, parsing("here", "it"):
        raise RuntimeError("long\n" * 1000)
    assert str(error.value).startswith("here: cannot be read as it: long long")
    assert len(str(error.value)) <= len("here: cannot be read as it: ") + 80
    assert len(cut("x" * 500)) == 80
    assert cut_words(f"name {'y' * 5000} end") == f"name {'y' * 40}...{'y' * 40} end"


def test_another_path_mends_the_users_errors_and_not_the_machines() -> None:
    assert type(fault("p", PermissionError(13, "Permission denied"))) is DsimError
    assert type(fault("p", OSError(28, "No space left on device"))) is MachineError


def test_a_name_that_is_no_text_is_shown_as_escapes() -> None:
    assert printable(os.fsdecode(b"a\xff.csv")) == "a\\xff.csv"


def test_a_table_reads_back_as_it_was_written(tmp_path: Path) -> None:
    cells = ["ar", "=1+1", "'quoted'", "two\nlines"]
    (tmp_path / "t.csv").write_text(csv_of([["a", "b", "c", "d"], cells]))
    assert list(read_csv(tmp_path / "t.csv", ["a"])) == [(f"{tmp_path}/t.csv:2", dict(zip("abcd", cells, strict=True)))]
    assert csv_of([["=1+1", "-2+3", "-3", -3, "a=b"]]) == "'=1+1,'-2+3,-3,-3,a=b\n"
