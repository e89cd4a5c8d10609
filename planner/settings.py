"""The best of an engine's settings for each policy of a plan, by successive halving (Jamieson and Talwalkar, 2016).

All are tried on short replays, the best share on longer ones, with the same requests and luck. The score is the rate up
to which one replica meets the SLOs.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.errors import DsimError
from ..engine.spec import Policy, name_of, named_fields, parse, preset_of, settings_of
from ..profiler.profile import Profile
from .candidate import changed_fields, grid, plain_spec, refusal, spelt, with_fields
from .capacity import PILOT, CapacitySearch
from .crossing import find

T = TypeVar("T")

RUNGS = (400, 1600)  # requests of a replay, by rung
GOES_ON = 0.25  # share that reaches the next rung
PREFIX_CACHING = {"prefix_caching": [False, True]}
MOST = 64  # settings of a policy
GAIN = 1.02  # factor by which a setting must beat the given one
NEAR = 1.01  # factor within which fewer changes win
UNTESTED = 1.1  # factor by which a setting beyond the engine's tested range must beat the others
WIDTH, SHARPNESS = 0.2, 0.03  # of the search for a score, in log rate


@dataclass(frozen=True)
class Tried:
    """A search over a policy's settings. Rates: req/s that one replica serves within the SLOs."""

    num: int  # settings tried
    given: str  # the policy as given
    given_rate: float  # 0: it meets the SLOs at no rate
    best: str
    rate: float
    equal: int  # other settings as good, within NEAR


def settings_to_try(
    spec: str,
    profile: Profile,
    check: Callable[[Policy], object],
    allow_code: AllowedCode = NO_CODE,
    shared_prefixes: bool = False,
) -> list[str]:
    """The SPEC, if it can run, and its variations by flags of the policy's engine.

    Fields that the SPEC sets stay, and fields that may change answers. Hiding the host's time is no choice where step
    times contain it. shared_prefixes: the trace names prefixes, so prefix caching is one. Empty if no setting passes.
    """
    preset = preset_of(name_of(spec), spec, allow_code)
    base = plain_spec(spec, allow_code)
    policy = parse(base, allow_code)
    fixed = named_fields(spec, allow_code)
    values = settings_of(policy)
    space = {**(preset.space or {}), **(PREFIX_CACHING if shared_prefixes else {})}
    free = {
        name: [values[name], *(v for v in choices if spelt(v) != spelt(values[name]))]
        for name, choices in space.items()
        if preset.engine and name in preset.flags and name in preset.policy.neutral - fixed - policy.granularity.idle
    }
    changed = changed_fields(spec, allow_code)
    specs = [base]
    for point in grid(free):
        moved = {name: spelt(value) for name, value in point.items() if value != values[name]}
        specs.append(with_fields(name_of(spec), changed | moved))

    def check_setting(setting: str) -> None:
        tried = parse(setting, allow_code)
        check(tried)
        if not profile.latency.host_step and tried.batching.hides_host != policy.batching.hides_host:
            raise DsimError("the step times contain the host's")

    unique = [setting for setting in dict.fromkeys(specs) if refusal(check_setting, setting) is None]
    if len(unique) > MOST:  # evenly over the grid, the SPEC first
        unique = [unique[i] for i in np.linspace(0, len(unique) - 1, MOST).round().astype(int)]
    return sorted(unique, key=lambda setting: setting.count(","))  # fewest changes first


# The rates of settings on a rung's replays; the first rate to try (None: the plan's).
Rates = Callable[[Sequence[T], int, float | None], Sequence[float]]


def halve(settings: Sequence[T], rates_of: Rates[T], untested: Collection[T] = ()) -> tuple[T, dict[T, float], int]:
    """The best setting, the last rung's rates, and how many settings are as good.

    The first one is the policy as given. untested: beyond the engine's tested range.
    """
    running = list(settings)
    start: float | None = None
    rates: dict[T, float] = {}
    worth: dict[T, float] = {}
    for rung in range(len(RUNGS)):
        first = rates_of(running[:1], rung, start)
        start = first[0] or start
        rates = dict(zip(running, [*first, *rates_of(running[1:], rung, start)], strict=True))
        worth = {i: rate / UNTESTED ** (i in untested) for i, rate in rates.items()}
        order = sorted(running[1:], key=lambda i: -worth[i])  # stable
        running = [running[0], *order[: max(1, round(GOES_ON * len(order)))]]
        start = max(rates.values()) or start
    as_given, *tried = rates
    highest = max((worth[i] for i in tried), default=0.0)
    equals = [i for i in tried if worth[i] * NEAR >= highest]
    best = min(equals, key=list(settings).index, default=as_given)
    if worth[best] <= GAIN * worth[as_given]:
        best = as_given
    return best, rates, sum(i != best and rate * NEAR >= worth[best] for i, rate in worth.items())


def score(search: CapacitySearch, rung: int, start: float) -> tuple[float, int]:
    """One replica's rate within the SLOs on the rung's replays, and their number; 0 if none or a request does not
    fit."""
    short = search.shortened(min(search.num_requests, RUNGS[rung]))
    read = replace(short, world=replace(search.world, replicas=1)).requests(PILOT)
    try:
        crossing = find(read, search.criteria, start, WIDTH, SHARPNESS)
    except DsimError:
        return 0.0, 0
    return crossing.rate, crossing.num_replays
