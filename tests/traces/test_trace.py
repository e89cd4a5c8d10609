"""The trace itself, and its way to a file and back."""

import hashlib
import os

import numpy as np
import pytest

from dsim.engine.errors import TraceError
from dsim.engine.request import Request
from dsim.traces import Trace, load, write
from dsim.traces.shipped import SHIPPED

from ..checks import cases, refused

SHA256 = {
    "azure-conv": "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    "mooncake-conv": "0b278e6a285958f6f087394ad02026d734591c67f44cccecb0e0f9a59d509b98",
}


def small() -> Trace:
    return Trace(
        "small",
        np.array([0.0, 0.5, 0.5, 2.0]),
        np.array([10, 20, 30, 40]),
        np.array([1, 2, 3, 4]),
        {"session_id": ["a", None, "a", "b"], "gen_length": [None, 64, 64, 64]},
    )


def test_rows_heads_and_rates_are_exact() -> None:
    assert small().request(2) == Request(2, 0.5, 30, 3)
    assert type(small().request(2).input_length) is int
    assert small().head(2).extras == {"session_id": ["a", None], "gen_length": [None, 64]}
    taken = small().take([1, 3])
    assert (taken.arrival.tolist(), taken.input_length.tolist()) == ([0, 1.5], [20, 40])
    assert taken.extras["session_id"] == [None, "b"]
    assert small().rate == 1.5
    assert small().scaled_to_rate(3.0).arrival.tolist() == [0, 0.25, 0.25, 1.0]
    assert small().time_scaled(2.0).arrival.tolist() == [0, 1.0, 1.0, 4.0]
    with pytest.raises(ValueError, match="read-only"):
        small().arrival[0] = 3.0


def test_what_makes_no_sense_is_refused() -> None:
    for call, complaint in (
        (lambda: small().head(5), "small holds 4 requests, the run asks for 5"),
        (lambda: small().scaled_to_rate(0.0), "rate is 0.0 req/s, expected above 0 and finite"),
        (lambda: small().time_scaled(-1.0), "time scale is -1.0, expected above 0 and finite"),
        (lambda: small().head(1).scaled_to_rate(1.0), "lasts 0 s, so it cannot be scaled to 1.0 req/s"),
        (lambda: Trace("t", np.array([0.0, 1.0]), np.array([1]), np.array([1, 1])), "columns of [1, 2] rows"),
        (lambda: Trace("t", np.array([1.0]), np.array([1]), np.array([1])), "arrivals must start at 0, never decrease"),
        (lambda: Trace("t", np.array([0.0]), np.array([0]), np.array([1])), "input_length of row 0 is 0, expected 1"),
    ):
        with refused(kind=TraceError, says=complaint):
            call()


def test_the_written_file_has_mooncakes_keys_and_whole_milliseconds() -> None:
    arrival, input_length, output_length = np.array([0.0, 0.0014, 4.3145790]), np.array([5, 6, 7]), np.array([1, 2, 3])
    trace = Trace("t", arrival, input_length, output_length, small().head(3).extras)
    assert write(trace, "out.jsonl").read_text() == (
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "session_id": "a"}\n'
        '{"timestamp": 1, "input_length": 6, "output_length": 2, "gen_length": 64}\n'
        '{"timestamp": 4315, "input_length": 7, "output_length": 3, "session_id": "a", "gen_length": 64}\n'
    )


def test_a_file_is_overwritten_only_by_force_and_survives_a_failed_write() -> None:
    path = write(small(), "out.jsonl")
    before = path.read_bytes()
    circle: list[object] = []
    circle.append(circle)
    broken = Trace("t", np.zeros(2), np.ones(2), np.ones(2), {"id": ["fine", circle]})
    with refused("exists: choose another name, or pass --force to replace it"):
        write(small().head(1), path)
    with pytest.raises(ValueError, match="Circular"):
        write(broken, path, force=True)
    assert (path.read_bytes(), os.listdir()) == (before, [path.name])
    assert len(load(write(small().head(1), path, force=True))) == 1
    with refused("cannot be written: No such file or directory"):
        write(small(), "missing/out.jsonl")


@cases("name", "azure-conv", "mooncake-conv")
def test_a_shipped_trace_is_unmodified_named_with_its_licence_and_survives_writing(name: str) -> None:
    path = SHIPPED[name]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[name]
    words = " ".join(file.read_text() for file in sorted(path.parent.iterdir()) if file != path)
    licence = {"azure-conv": "https://creativecommons.org/licenses/by/4.0/", "mooncake-conv": "Apache License"}[name]
    assert all(word in words for word in (licence, "Changes:", SHA256[name]))
    assert tuple(SHIPPED) == tuple(SHA256)
    before = load(name)
    after = load(write(before, "out.jsonl"))
    assert np.abs(after.arrival - before.arrival).max() <= 0.0005 + 1e-9
    assert after.input_length.tolist() == before.input_length.tolist()
    assert after.output_length.tolist() == before.output_length.tolist()
    assert (after.extras, after.notes.num_unsorted) == (before.extras, 0)
