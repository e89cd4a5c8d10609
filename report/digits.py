"""Numbers with enough digits to stay on their side of a bound; intervals rounded outward."""

import math

MOST_PLACES = 9


def counted(count: int, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def within(value: float, bound: float, places: int) -> str:
    """At least `places` decimals, and enough to show whether it exceeds the bound."""
    exceeds = value > bound
    while places < MOST_PLACES and (round(value, places) > bound) != exceeds:
        places += 1
    return f"{value:,.{places}f}"


def percent(share: float, least: float | None = None) -> str:
    """At least one decimal; reads 100, 0 or below `least` only if it is."""
    value, places = 100 * share, 1
    if share in (0.0, 1.0):
        return f"{value:.0f}"
    sides = [100.0, *([] if least is None else [100 * least * (1 - 1e-12)])]

    def agrees() -> bool:
        shown = round(value, places)
        return shown > 0 and all((shown >= side) == (value >= side) for side in sides)

    while places < MOST_PLACES and not agrees():
        places += 1
    return f"{value:.{places}f}"


def percent_span(share: float, low: float, high: float, least: float | None = None) -> str:
    """Rounded outward: `99.4 % (99.2 to 99.6)`."""
    places = 1
    if least is not None and low >= least:  # rounding must not move the end below
        while places < MOST_PLACES and outward(100 * low, places) < 100 * least * (1 - 1e-12):
            places += 1
    ends = [outward(100 * low, places), outward(100 * high, places, up=True)]
    shown = ["0" if end == 0 else "100" if end == 100 else f"{end:.{places}f}" for end in ends]
    return f"{percent(share, least)} % ({' to '.join(shown)})"


def plus_minus(value: float, half: float) -> str:
    """To two digits of the half-width: `5.28 ± 0.13`, `880 ± 120`."""
    if not half > 0:
        return f"{value:.4g}"
    places = places_of(half)
    return f"{value:,.{places}f} ± {half:,.{places}f}"


def places_of(half: float) -> int:
    """For two digits of a half-width."""
    return max(0, 1 - math.floor(math.log10(half)))


def outward(value: float, places: int, *, up: bool = False) -> float:
    scaled = round(value * 10**places, 6)
    return float(math.ceil(scaled) if up else math.floor(scaled)) / float(10**places)
