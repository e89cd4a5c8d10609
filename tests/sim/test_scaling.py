"""What is said of a scaler's behaviour, on changes and arrivals written out by hand."""

from math import isnan

import numpy as np
import pytest

from dsim.results.scaling import behaviour, rises_of


def changes(*steps: tuple[float, int], pool: str = "pool") -> list[list[object]]:
    return [[time, pool, ready, ready] for time, ready in steps]


@pytest.mark.parametrize(
    ("steps", "flaps"),
    [
        (((0, 2), (60, 3), (200, 2)), 1),
        (((0, 2), (60, 3), (360, 2)), 0),  # five minutes later
        (((0, 2), (60, 3), (90, 4), (120, 5)), 0),
        (((0, 4), (60, 3), (90, 4), (120, 3)), 2),
        (((0, 2),), 0),
    ],
)
def test_a_flap_is_a_change_of_direction_within_five_minutes(steps: tuple[tuple[float, int], ...], flaps: int) -> None:
    assert behaviour(changes(*steps), np.zeros(0)).flaps == flaps
    two = [*changes(*steps), *changes(*steps, pool="other")]  # of each pool on its own
    assert behaviour(two, np.zeros(0)).flaps == 2 * flaps


# 2 requests a second for 10 minutes, 4 for 10, 1 for 10, and 3 for 10.
ARRIVAL = np.concatenate([600 * i + np.arange(0, 600, 1 / rate) for i, rate in enumerate((2, 4, 1, 3))])


def test_a_rise_is_half_more_than_the_lowest_load_since_the_last() -> None:
    assert rises_of(ARRIVAL) == [660, 1860]  # the ends of the first minutes of more
    assert rises_of(np.zeros(0)) == []
    assert rises_of(np.arange(1000.0)) == []


def test_the_time_to_react_ends_with_a_replica_that_takes_requests() -> None:
    steady = changes((0, 1), (700, 2), (1900, 1), (2000, 2))
    found = behaviour(steady, ARRIVAL)
    assert (found.rises, found.answered, found.reaction) == (2, 2, ((700 - 660) + (2000 - 1860)) / 2)
    never = behaviour(changes((0, 1), (650, 2)), ARRIVAL)
    assert (never.rises, never.answered) == (2, 0)
    assert isnan(never.reaction)
