"""Printed numbers stay on their side of a bound, and intervals are rounded outward."""

from dsim.report.table import outward, percent, percent_span, plus_minus, within

from ..checks import cases


@cases(
    "share least shown",
    (1.0, 0.99, "100"), (0.0, 0.99, "0"), (0.9996, None, "99.96"), (0.994, 0.99, "99.4"), (0.99, 0.99, "99.0"),
    (0.98996, 0.99, "98.996"), (0.99949, 0.9995, "99.9"), (1e-5, None, "0.001"),
)  # fmt: skip
def test_a_share_is_all_none_or_enough_exactly_if_it_is(share: float, least: float | None, shown: str) -> None:
    assert percent(share, least) == shown


@cases("value shown", (49.96, "50.0"), (50.04, "50.04"), (50.0, "50.0"), (44.12, "44.1"))
def test_a_time_exceeds_its_bound_exactly_if_it_does(value: float, shown: str) -> None:
    assert within(value, 50.0, 1) == shown


def test_an_interval_is_rounded_outward() -> None:
    assert percent_span(0.9941, 0.99209, 0.99614, 0.99) == "99.4 % (99.2 to 99.7)"
    assert percent_span(0.884, 0.763, 1.0) == "88.4 % (76.3 to 100)"
    assert (outward(4.236, 2), outward(4.231, 2, up=True), outward(0.29 * 100, 1)) == (4.23, 4.24, 29.0)


def test_half_an_interval_has_two_digits_and_no_exponent() -> None:
    assert plus_minus(883.2, 123.4) == "883 ± 123"
    assert plus_minus(5.281, 0.1312) == "5.28 ± 0.13"
    assert plus_minus(5.281, 0.0) == "5.281"
