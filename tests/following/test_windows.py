"""Windows: what ends a stretch, how long one lasts, and the arrivals that counters tell."""

from dataclasses import replace

import numpy as np

from dsim.following.sources.sample import Buckets, Sample
from dsim.following.windows import Arrivals, Cutter, Scrape, Window, arrivals_at, drawn_arrivals, trace_after


def sample(time: float, requests: float, running: float = 0.0, **more: float) -> Sample:
    counters = {"requests": requests, "prompt_tokens": 100 * requests, "generation_tokens": 10 * requests, **more}
    return Sample(time, "vllm", 1, counters, {"running": running, "waiting": 0.0})


def scrape(time: float, *requests: float | None) -> Scrape:
    return Scrape(time, tuple(None if n is None else sample(time, n) for n in requests))


def test_a_window_lasts_until_both_its_time_and_its_requests_are_there() -> None:
    cutter = Cutter(5.0, seconds=20.0, requests=10)
    found = [cutter.add(scrape(5.0 * i, i)) for i in range(30)]
    assert [w.end for w in found if w is not None] == [50.0, 100.0]
    assert [w.num_arrivals for w in found if w is not None] == [10, 10]
    quick = Cutter(5.0, seconds=20.0, requests=10)
    assert [w.end for i in range(10) if (w := quick.add(scrape(5.0 * i, 100 * i)))] == [20.0, 40.0]


def test_restarts_gaps_and_missing_servers_begin_a_new_stretch() -> None:
    cutter = Cutter(5.0, seconds=20.0, requests=1)
    reasons = []
    for moment in (
        scrape(0, 5, 5), scrape(5, 6, 6), scrape(10, 1, 7), scrape(15, 2, 8), scrape(20, None, 9), scrape(25, 3, 9),
        scrape(60, 4, 10), scrape(65, None, None), scrape(70, 5, 11),
    ):  # fmt: skip
        assert cutter.add(moment) is None
        reasons.append(cutter.broken)
    assert reasons == [
        "", "", *["server 1 was restarted"] * 2, *["server 1 does not answer, or answers again"] * 2,
        "no samples for 35 s", *["server 1 does not answer, or answers again"] * 2,
    ]  # fmt: skip


def test_a_counter_and_a_histogram_that_appear_begin_at_0() -> None:
    """SGLang shows both from the first count on."""
    fresh, counted = sample(0, 0), sample(5, 3, preemptions=2.0)
    ttft = Buckets((1.0,), (2.0, 3.0), 2.5)
    known = replace(counted, histograms={"ttft": ttft})
    window = Window((fresh, known))
    assert [window.added(name) for name in ("preemptions", "steps")] == [2.0, None]
    assert window.histogram("ttft") == ttft
    for pair in ((fresh, known), (known, fresh)):
        both = Scrape(5.0, pair).together()
        assert (both.counters["preemptions"], both.counters["requests"]) == (2.0, 3.0)
        assert both.histograms == {"ttft": ttft}


def test_arrivals_are_those_finished_running_or_waiting_and_fall_where_they_came() -> None:
    window = Window((sample(0, 0, 2), sample(5, 1, 3), sample(10, 3, 1)))
    assert window.arrivals.tolist() == [0, 2, 2]
    drawn = drawn_arrivals(window, 0)
    assert len(drawn) == 2
    assert (drawn.time < 5).all()
    assert abs(drawn.input_length.mean() - 100) <= 1
    assert np.array_equal(drawn.time, drawn_arrivals(window, 0).time)
    assert not np.array_equal(drawn.time, drawn_arrivals(window, 1).time)


def test_drawn_lengths_have_the_histograms_shape_and_mean() -> None:
    values = np.random.default_rng(0).lognormal(np.log(200), 0.6, 4000)
    ends = tuple(float(m * 10**e) for e in range(5) for m in (1, 2, 5))
    counts = tuple(float((values <= end).sum()) for end in (*ends, np.inf))
    last = replace(sample(5, 4000), histograms={"output_length": Buckets(ends, counts, float(values.sum()))})
    none = Buckets(ends, (0.0,) * len(counts), 0.0)
    window = Window((replace(sample(0, 0), histograms={"output_length": none}), last))
    drawn = drawn_arrivals(window, 3).output_length
    assert abs(drawn.mean() / values.mean() - 1) < 0.002
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert abs(np.quantile(drawn, share) / np.quantile(values, share) - 1) < 0.08


def test_the_window_before_and_what_was_in_flight_run_in_the_replay() -> None:
    def three(at: float) -> Arrivals:
        return arrivals_at(np.array([at, at + 1, at + 2]), np.full(3, 7.0), np.full(3, 9.0))

    trace, begins = trace_after(three(1.0), three(0.5), 10.0, 2)
    assert trace.arrival.tolist() == [0, 0, 1, 2, 3, 10.5, 11.5, 12.5]
    assert begins == 10.0
    trace, begins = trace_after(None, three(0.5), 0.0, 0)
    assert (trace.arrival.tolist(), begins) == ([0.0, 1.0, 2.0], -0.5)
