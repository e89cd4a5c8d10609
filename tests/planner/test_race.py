"""A race of fleets: who is enough, who is dropped, and where replays go."""

import math
from collections.abc import Callable, Sequence

from dsim.planner.race import CLEAR, FIRST, MOST, Entry, best_of, race, verdict

from ..checks import cases


def world(severity: Callable[[int, int, int], float]) -> tuple[list[Entry], Callable[[Sequence[Entry]], list[float]]]:
    """What is asked for, and a world that answers by candidate, replicas and replication."""
    asked: list[Entry] = []

    def severities(entries: Sequence[Entry]) -> list[float]:
        asked.extend(entries)
        return [severity(e.candidate, e.replicas, e.index) for e in entries]

    return asked, severities


def needs(*replicas: float) -> Callable[[int, int, int], float]:
    """Candidates that need so many replicas; replications differ by a hundredth."""
    return lambda c, n, i: math.log(replicas[c] / n) + 0.01 * (i % 3 - 1)


def test_the_fewest_replicas_are_found_from_any_guess() -> None:
    for guess in (1, 3, 5, 6, 12, 64):
        _, severities = world(needs(4.5))
        [lane] = race([1.0], [guess], 64, severities)
        assert (lane.low, lane.high, lane.replicas) == (4, 5, 5)


def test_a_candidate_that_needs_more_than_is_allowed_has_no_fleet() -> None:
    _, severities = world(needs(9.0))
    [lane] = race([1.0], [2], 8, severities)
    assert (lane.replicas, lane.low) == (None, 8)


def test_what_can_be_neither_first_nor_second_is_dropped_and_costs_few_replays() -> None:
    asked, severities = world(needs(1.5, 2.5, 30.05))
    first, second, third = race([1.0, 1.0, 1.0], [2, 3, 20], 64, severities)
    assert (first.replicas, second.replicas) == (2, 3)
    assert third.dropped
    assert third.replicas is None
    assert sum(e.candidate == 2 for e in asked) <= 2 * FIRST
    assert race([1.0, 1.0, 1.0], [2, 3, 30], 64, severities, drop=False)[2].replicas == 31


def test_replays_go_where_the_verdict_is_open() -> None:
    # The first is surely enough with two; the second hovers at the bound with two.
    def severity(c: int, n: int, i: int) -> float:
        if n == 1:
            return 3.0
        return -0.5 + 0.01 * i if c == 0 or n > 2 else (-1) ** i * 0.1

    asked, severities = world(severity)
    clear, close = race([1.0, 1.0], [2, 2], 8, severities)
    assert (clear.replicas, close.replicas) == (2, 3)
    assert [sum(e.candidate == c and e.replicas == 2 for e in asked) for c in (0, 1)] == [FIRST, MOST]
    assert [e.index for e in asked if e.candidate == 1 and e.replicas == 2] == list(range(MOST))


@cases(
    "severities most spread expected",
    # Twice the bound: out after one replay.
    ([CLEAR], MOST, None, False), ([CLEAR - 0.01], MOST, None, None), ([-5.0], MOST, None, None),
    # An interval decides, and what stays undecided counts as too little.
    ([-0.3, -0.31, -0.29], MOST, None, True), ([0.3, 0.31, 0.29], MOST, None, False),
    ([-0.2, 0.1, -0.2], MOST, None, None), ([-0.2, 0.1, -0.2], 3, None, False),
    # A known spread decides from the first replay.
    ([-0.3], MOST, 0.1, True), ([0.3], MOST, 0.1, False), ([-0.1], MOST, 0.1, None),
)  # fmt: skip
def test_a_verdict_is_of_an_interval_a_known_spread_or_one_clear_replay(
    severities: list[float], most: int, spread: float | None, expected: bool | None
) -> None:
    assert verdict(severities, most, spread) is expected


def test_the_best_are_those_that_a_paired_interval_cannot_tell_apart() -> None:
    noise = [0.3, -0.2, 0.5, 0.1]
    a = [-1.0 + x for x in noise]
    assert best_of([a, [x + 0.1 + 0.001 * i for i, x in enumerate(a)]]) == [0]  # the same luck, always a little worse
    assert best_of([a, [-1.0, -1.02, -1.01, -0.8]]) == [0, 1]
    assert best_of([[0.0], [-1.0]]) == [0, 1]  # one replication tells nothing
