"""Parsed traces on disk: the same trace as from the parser, and never a damaged, strange or stale one."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.engine.errors import TraceError
from dsim.traces import Trace, load, parsed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o700)
    monkeypatch.setattr(parsed, "_folder", lambda: kept)
    return kept


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are parsed."""
    module: Any = import_module("dsim.traces.load")  # the package's name is the function
    own = module.read_data
    found: list[str] = []

    def read_data(where: str, data: bytes, asked: Any) -> Any:
        found.append(where)
        return own(where, data, asked)

    monkeypatch.setattr(module, "read_data", read_data)
    return found


def rows(path: Path, count: int = 5000, last: int = 7) -> Path:
    lines = [f"{k},GPT-4,{k % 900 + 1},{k % 7 + 1},,Conversation log" for k in range(count)]
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path.write_text("\n".join([head, *lines, f"{count},ChatGPT,3,{last},,API log"]) + "\n")
    return path


def same(a: Trace, b: Trace) -> bool:
    columns = all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("arrival", "input_length", "output_length")
    )
    return columns and (a.name, a.extras, a.notes) == (b.name, b.extras, b.notes)


def test_a_trace_that_was_read_before_is_not_parsed_again(tmp_path: Path, folder: Path, parses: list[str]) -> None:
    path = rows(tmp_path / "log.csv")
    first, again = load(path), load(path)
    assert parses == [str(path)]
    assert same(first, again)
    assert first.extras["model"][-1] == "ChatGPT"


def test_another_content_another_question_and_another_name_are_parsed(
    tmp_path: Path, folder: Path, parses: list[str]
) -> None:
    path = rows(tmp_path / "log.csv")
    load(path)
    assert load(rows(path, last=8)).output_length[-1] == 8
    assert len(load(path, only="model=ChatGPT")) == 1
    assert load(path, time_unit="ms").duration == 5.0
    assert load(rows(tmp_path / "other.csv")).name == "other"
    assert len(parses) == 5


@pytest.mark.parametrize("harm", [lambda held: held[:-40], lambda held: b"", lambda held: held.replace(b"5", b"6", 1)])
def test_a_damaged_file_is_parsed_again(tmp_path: Path, folder: Path, parses: list[str], harm: Any) -> None:
    path = rows(tmp_path / "log.csv")
    first = load(path)
    [kept] = folder.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(harm(whole))
    assert same(load(path), first)
    assert len(parses) == 2
    assert kept.read_bytes() == whole


def test_a_file_that_others_can_write_is_not_read(tmp_path: Path, folder: Path, parses: list[str]) -> None:
    path = rows(tmp_path / "log.csv")
    load(path)
    [kept] = folder.iterdir()
    kept.chmod(0o666)
    load(path)
    assert len(parses) == 2


def test_errors_and_small_files_leave_nothing(tmp_path: Path, folder: Path) -> None:
    load(rows(tmp_path / "small.csv", count=10))
    with pytest.raises(TraceError):
        load(rows(tmp_path / "bad.csv", last=-1))
    assert list(folder.iterdir()) == []


def test_what_was_used_longest_ago_makes_room(
    tmp_path: Path, folder: Path, parses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rows(tmp_path / "1.csv"), rows(tmp_path / "2.csv")
    load(first)
    [kept] = folder.iterdir()
    monkeypatch.setattr(parsed, "MOST", int(2.5 * kept.stat().st_size))
    load(second)
    for file in folder.iterdir():
        os.utime(file, (1 + (file != kept), 1 + (file != kept)))  # s
    load(first)  # marks it as used
    load(rows(tmp_path / "3.csv"))
    assert len(list(folder.iterdir())) == 2
    load(first)
    assert parses == [str(first), str(second), str(tmp_path / "3.csv")]
    monkeypatch.setattr(parsed, "MOST", 1000)
    load(rows(tmp_path / "4.csv"))
    assert len(list(folder.iterdir())) == 2
