"""Threads that share the replicas of a call: each share is run once a round, whatever the threads do."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dsim.engine.histogram import NUM_BINS
from dsim.engine.jit import bind, rule
from dsim.engine.numba_parts import WAITS
from dsim.engine.team import (
    SHARE,
    Team,
    await_round,
    begin_call,
    begin_round,
    claim,
    end_call,
    end_round,
    forget_codes,
    note_run,
    team_of,
)

PLACES = 5 * SHARE + 3
SHARES = 6


def team(threads: int) -> Team:
    return team_of(threads, np.zeros((threads, 2, NUM_BINS), np.int64))


def test_threads_claim_their_own_shares_first_and_then_those_of_others() -> None:
    t = team(2)
    assert claim(t, 0, PLACES) == -1, "no round"
    for now in (1.0, 2.0):
        begin_round(t, now, now + 1)
        assert t.times.tolist() == [now, now + 1]
        assert await_round(t, 1, PLACES)
        first = [claim(t, thread, PLACES) // SHARE for thread in (0, 1, 1, 1, 1, 0, 1, 0)]
        assert first == [0, 1, 3, 5, 2, 4, -1, -1]
        for i in range(SHARES):
            note_run(t, i % 2, -1)
        assert end_round(t, PLACES) == -1
    end_call(t)
    assert not await_round(t, 1, PLACES)
    assert claim(t, 1, PLACES) == -1


def test_the_lowest_code_of_a_round_is_returned_and_forgotten() -> None:
    for threads in (1, 2):
        t = team(threads)
        for codes in ([-1, 70, 30], [-1, -1, -1]):
            forget_codes(t)
            begin_round(t, 0.0, 1.0)
            run = 0
            while claim(t, 0, PLACES) >= 0:
                note_run(t, run % threads, codes[min(run, 2)] if threads > 1 else codes[1])
                run += 1
            assert run == (SHARES if threads > 1 else 1)
            assert end_round(t, PLACES) == (-1 if codes[1] < 0 else 30 if threads > 1 else 70)


@rule
def work(t: Any, thread: int, rounds: int, times: Any) -> int:
    """Add the round's number to each place; returns the shares run."""
    run = 0
    for i in range(1, (rounds if thread == 0 else 1 << 40) + 1):
        if thread == 0:
            begin_round(t, 0.0, float(i))
        elif not await_round(t, thread, len(times)):
            break
        first = claim(t, thread, len(times))
        while first >= 0:
            for at in range(first, min(len(times), first + t.share)):
                times[at] += t.times[1]
                for _ in range((31 * i + 7 * at) % 29):  # as long as another thread takes to begin, more or less
                    times[at] = times[at] * 1.0 + 0.0
            run += 1
            note_run(t, thread, -1)
            first = claim(t, thread, len(times))
        if thread == 0:
            end_round(t, len(times))
    return run


@pytest.mark.skipif(not WAITS, reason="nothing is compiled")
@pytest.mark.parametrize(("threads", "shares"), [(1, 1), (2, 2), (2, 6), (3, 6)])
def test_every_place_is_run_once_in_every_round(threads: int, shares: int) -> None:
    rounds, times, t = 100_000, np.zeros(shares * SHARE - 3), team(threads)
    compiled = bind(work, {}, nogil=True)
    calls = helped = 0
    with ThreadPoolExecutor(threads) as pool:
        while calls < 2 or (threads > 1 and helped < rounds and calls < 40):  # a thread takes a while to begin
            calls += 1
            begin_call(t)
            helpers = [pool.submit(compiled, t, thread, rounds, times) for thread in range(1, threads)]
            run = compiled(t, 0, rounds, times)
            end_call(t)
            more = sum(helper.result() for helper in helpers)
            assert run + more == rounds * shares
            assert (times == calls * rounds * (rounds + 1) / 2).all()
            helped += more
