"""Lengths, synthetic traces, and what a replay makes of a trace."""

from dataclasses import replace

import numpy as np
import pytest

from dsim.engine.errors import TraceError
from dsim.traces import LENGTHS, Trace, describe, load, prepare, synth, write
from dsim.traces.lengths import draw_lengths
from dsim.traces.prefixes import prefixes_of
from dsim.traces.trace import Ints

from ..checks import cases, refused


def batched() -> Trace:
    return Trace(
        "batched",
        np.array([0.0, 0.0, 0.0, 3.0, 3.0, 6.0]),
        np.arange(10, 16),
        np.arange(20, 26),
        {"hash_ids": [[i] for i in range(6)], "model": list("abcdef")},
    )


def both(lengths: str | Trace, num_requests: int, seed: int) -> tuple[Ints, Ints]:
    """Inputs and outputs, as drawn."""
    return draw_lengths(lengths, num_requests, seed)[:2]


@cases("name", *LENGTHS)
def test_published_workloads_have_their_published_moments(name: str) -> None:
    num = 400_000
    means, stds = LENGTHS[name][::2], LENGTHS[name][1::2]
    for lengths, mean, std in zip(both(name, num, seed=1), means, stds, strict=True):
        assert lengths.min() >= 1
        # Rounding and the cut at 1 may move a mean by a tenth of a token; the rest is four standard errors.
        assert lengths.mean() == pytest.approx(mean, abs=0.1 + 4 * std / num**0.5)
        assert lengths.std() == pytest.approx(std, rel=0.08)


def test_fixed_and_normal_lengths() -> None:
    assert [column.tolist() for column in both("fixed:512,64", 3, seed=0)] == [[512] * 3, [64] * 3]
    for lengths in both("normal:512,256", 200_000, seed=0):
        # The cut at 1 takes the 2.3 % below 0: the mean of max(1, x) is 2.2 tokens higher.
        assert (lengths.mean(), lengths.min()) == (pytest.approx(514.2, abs=4 * 256 / 200_000**0.5), 1)
    input_length, output_length = both("normal:1000,10,50,5", 10_000, seed=0)
    assert (input_length.mean(), output_length.mean()) == pytest.approx((1000, 50), rel=0.005)
    assert abs(np.corrcoef(input_length, output_length)[0, 1]) < 0.04


@cases(
    "text complaint",
    ("chat", "lengths are chat, expected one of: sharegpt, lmsys"),
    ("fixed:512,a", "lengths are fixed:512,a, expected one of"),
    ("fixed:512.5,1", "lengths are fixed:512.5,1, expected one of: sharegpt, "),
    ("lognormal:nan,1", "mean nan and std 1, expected"),
)
def test_lengths_that_are_none_are_refused(text: str, complaint: str) -> None:
    with refused(kind=TraceError, says=complaint):
        draw_lengths(text, 1, seed=0)


def test_lengths_from_a_trace_are_its_pairs() -> None:
    pairs = set(zip(*(c.tolist() for c in (batched().input_length, batched().output_length)), strict=True))
    input_length, output_length = both(batched(), 600, seed=0)
    assert set(zip(input_length.tolist(), output_length.tolist(), strict=True)) == pairs
    assert np.bincount(input_length - 10).min() > 60  # each of six is drawn about 100 times
    path = write(batched(), "b.jsonl")
    assert set(synth(lengths=str(path), num_requests=50).input_length.tolist()) <= set(range(10, 16))
    assert synth(lengths="azure-conv", num_requests=5000).input_length.mean() == pytest.approx(1155, rel=0.06)


def test_synth_says_what_it_drew() -> None:
    trace = synth("gamma,cv=2", 5.0, num_requests=10, seed=3)
    assert (trace.name, trace.notes.format) == ("gamma(5/s,cv=2,sharegpt,seed=3)", "synthetic")
    for arguments, complaint in (
        ({"arrival": "bursty"}, "no arrival process named bursty, expected one of: trace, poisson"),
        ({"num_requests": 0}, "number of requests is 0, expected 1 to"),
    ):
        with refused(kind=TraceError, says=complaint):
            synth(**arguments)


def test_a_replay_takes_the_head_and_rescales_it() -> None:
    assert prepare(batched()).arrival.tolist() == batched().arrival.tolist()
    assert prepare(batched()).extras == batched().extras
    assert prepare(batched(), num_requests=5, rate=8.0).arrival.tolist() == [0, 0, 0, 0.5, 0.5]
    other = prepare(batched(), lengths="fixed:7,8")
    assert (other.arrival.tolist(), other.extras) == (batched().arrival.tolist(), {})
    assert (set(other.input_length.tolist()), set(other.output_length.tolist())) == ({7}, {8})


def test_a_run_longer_than_its_trace_begins_it_again() -> None:
    source = replace(batched(), extras={**batched().extras, "session_id": [None, *"aabbc"]})
    ready = prepare(source, arrival="poisson", rate=2.0, num_requests=4)
    assert (ready.input_length.tolist(), ready.extras["hash_ids"]) == ([10, 11, 12, 13], [[0], [1], [2], [3]])
    for arrival, times in (
        ("trace", [0, 0, 0, 3, 3, 6, 7.2, 7.2, 7.2]),  # between its end and its beginning lies its mean gap
        ("poisson", synth("poisson", source.rate, num_requests=9).arrival.tolist()),
    ):
        more = prepare(source, arrival=arrival, num_requests=9)
        assert more.arrival.tolist() == pytest.approx(times)
        assert more.input_length.tolist() == [*range(10, 16), 10, 11, 12]
        names = [prefixes_of(more).of(i).tolist() for i in range(9)]
        assert len({name for [name] in names}) == 9
        assert more.extras["session_id"] == [None, *"aabbc", None, ("a", 1), ("a", 1)]
    assert prepare(batched(), arrival="constant").rate == pytest.approx(batched().rate)


def test_a_replay_that_cannot_be_is_refused() -> None:
    still = Trace("talk", np.zeros(3), np.ones(3), np.ones(3))
    for trace, arguments, complaint in (
        (batched().head(1), {"num_requests": 2}, "batched holds 1 requests, the run asks for 2"),
        (batched(), {"arrival": "trace,cv=2"}, "cv is 2, expected none with trace arrivals"),
        (still, {"arrival": "poisson"}, "talk has no rate, expected a --rate for poisson arrivals"),
    ):
        with refused(kind=TraceError, says=complaint):
            prepare(trace, **arguments)


def test_a_description_of_a_small_trace_is_exact() -> None:
    facts = describe(batched())
    assert (facts["num_requests"], facts["duration"], facts["repeated_hash_ids"]) == (6, 6.0, 0)
    assert (facts["rate"], facts["cv"]) == (pytest.approx(5 / 6), pytest.approx(np.std([0, 0, 3, 0, 3]) / 1.2))
    # Windows of 1 s: 3, 0, 0, 2, 0, 0, and the last arrival beyond them.
    late = Trace("late", np.array([0.0, 10.0, 70.0, 130.0]), *np.full((2, 4), 9))
    assert describe(late)["by_minute"] == {
        "num": 2, "mean": 0.025, "p50": 1 / 60, "p90": 2 / 60, "peak": 2 / 60, "peak_at": 0,
    }  # fmt: skip
    sparse = describe(Trace("sparse", np.array([0.0, 500.0]), *np.full((2, 2), 9)))["by_minute"]
    assert (sparse["num"], sparse["p50"], sparse["p90"]) == (8, 0.0, 1 / 60)
    assert (facts["input_length"]["p50"], facts["output_length"]["total"]) == (12.5, sum(range(20, 26)))
    assert describe(load("mooncake-conv"))["repeated_hash_ids"] == pytest.approx(0.34, abs=0.005)
    alone = describe(batched().head(1))
    assert (alone["rate"], alone["cv"]) == (None, None)
