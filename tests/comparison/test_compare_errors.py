"""Errors against numbers worked by hand."""

import math

import numpy as np
import pytest

from dsim.comparison.bounds import Bound
from dsim.comparison.comparison_page import share
from dsim.comparison.deviation import errors

from ..checks import cases, refused

NAN = math.nan


def test_mape_is_the_mean_of_the_relative_errors_sizes() -> None:
    found = errors(np.array([110.0, 90.0, 120.0, 200.0]), np.array([100.0, 100.0, 100.0, 200.0]))
    assert (found.num, found.mape) == (4, pytest.approx((0.1 + 0.1 + 0.2 + 0.0) / 4))
    assert found.median == pytest.approx(0.1)
    assert found.p95 == pytest.approx(0.1 + 0.85 * 0.1)  # between the third and the fourth of four
    assert found.bias == pytest.approx((0.1 - 0.1 + 0.2) / 4)


def test_a_missing_value_and_a_measured_zero_are_left_out_and_counted() -> None:
    found = errors(np.array([NAN, 1.0, 5.0, 3.0]), np.array([1.0, NAN, 0.0, 2.0]))
    assert (found.num, found.num_missing, found.num_zero, found.mape, found.bias) == (1, 2, 1, 0.5, 0.5)
    none = errors(np.array([1.0]), np.array([0.0]))
    assert (none.num, none.mape) == (0, None)


def test_a_bound_is_read() -> None:
    assert Bound.parse("e2el=3%") == Bound("e2el=3%", "e2el", None, 0.03)
    assert Bound.parse(" p95:ttft=.5 % ") == Bound("p95:ttft=.5 %", "ttft", "p95", 0.005)


@cases(
    "text told",
    ("e2e=3%", "unknown metric 'e2e' (did you mean e2el?), expected one of e2el, norm_latency"),
    ("step_latency=3%", "expected a statistic, such as mean:step_latency=3%"),
)
def test_a_bound_that_cannot_be_read_says_what_could(text: str, told: str) -> None:
    with refused(says=told):
        Bound.parse(text)


def test_no_share_is_written_with_an_exponent() -> None:
    assert [share(value) for value in (0.004, 0.095, 0.4, 9.99, 10.6, 1234.5)] == [
        "0.4 %", "9.5 %", "40 %", "999 %", "1,060 %", "123,000 %"
    ]  # fmt: skip
