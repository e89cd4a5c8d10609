"""The settings that an engine lets one choose, for each policy of a plan: the best by successive halving.

Successive halving (Jamieson and Talwalkar, 2016): all settings of a policy are tried on short replays, the best
share of them on longer ones, and the best of those stands for the policy in the race. A setting's score is the rate
up to which one replica meets the SLOs, on the same requests with the same luck as the others.
"""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.errors import DsimError
from ..engine.policy import Policy, name_of, named_fields, preset_of, settings_of
from ..profiler.profile import Profile
from .capacity import PILOT, PILOT_BLOCKS, CapacitySearch
from .crossing import find
from .memo import Memo
from .replicate import Reading
from .space import candidate_of, fitted_at, spelt

RUNGS = (400, 1600)  # requests of a replay, rung by rung
GOES_ON = 0.25  # share of the settings that reach the next rung
PREFIX_CACHING = {"prefix_caching": [False, True]}
CANVASES = {"canvas_length": [64, 128]}  # a law is scaled to canvases narrower than those that it was counted on
MOST = 64  # settings of a policy that are tried
GAIN = 1.02  # by which a setting must beat the policy as it is given, or that stands
NEAR = 1.01  # within which the setting of fewer changes is preferred
WIDTH, SHARPNESS = 0.2, 0.03  # of the search for a score, in log rate


@dataclass(frozen=True)
class Tried:
    """What a search over settings found for a policy: rates are req/s that one replica serves within the SLOs."""

    num: int  # settings that were tried
    given: str  # the policy as it was given
    given_rate: float  # 0: at no rate
    rate: float


def settings_to_try(
    spec: str,
    profile: Profile,
    check: Callable[[Policy], object],
    allow_code: AllowedCode = NO_CODE,
    shared_prefixes: bool = False,
    answers: Mapping[str, Sequence[Any]] | None = None,
) -> list[str]:
    """SPECs of the settings that the policy's engine has flags for: the SPEC itself first, if it can run.

    What the SPEC sets is kept, and so is what may change answers, but for the fields in `answers`
    (`changing_answers`). Whether host time is hidden is not chosen on a profile whose step times hold it already: both
    ways would cost the same. Prefix caching is chosen where the trace names its requests' prefixes (`shared_prefixes`).
    Empty where nothing passes the check.
    """
    answers = answers or {}
    preset = preset_of(name_of(spec), spec, allow_code)
    base = candidate_of(spec, allow_code=allow_code)
    fixed = named_fields(spec, allow_code)
    values = settings_of(base.policy)
    space = {**(preset.space or {}), **(PREFIX_CACHING if shared_prefixes else {}), **answers}
    free = {
        name: [v for v in choices if spelt(v) != spelt(values[name])]
        for name, choices in space.items()
        if preset.engine and name in preset.flags and name in (preset.policy.neutral | answers.keys()) - fixed
    }
    named = dict(base.settings)
    found = [base.spec]
    for chosen in itertools.product(*([None, *others] for others in free.values())):
        own = named | {name: spelt(v) for name, v in zip(free, chosen, strict=True) if v is not None}
        found.append(",".join([base.preset, *(f"{name}={value}" for name, value in own.items())]))
    hides = base.policy.batching.hides_host

    def can(one: str) -> bool:
        try:
            policy = candidate_of(one, allow_code=allow_code).policy
            check(policy)
        except DsimError:
            return False
        return profile.latency.host_step > 0 or policy.batching.hides_host == hides

    unique = [one for one in dict.fromkeys(found) if can(one)]
    if len(unique) > MOST:  # evenly spread over the grid, with the SPEC itself
        unique = [unique[i] for i in np.linspace(0, len(unique) - 1, MOST).round().astype(int)]
    return sorted(unique, key=lambda one: one.count(","))  # the fewer changes first


def changing_answers(
    spec: str, profile: Profile, workload: str | None, allow_code: AllowedCode = NO_CODE
) -> dict[str, list[Any]]:
    """The fields with a flag of a policy's engine that change its answers, and the values to try.

    Blocks and thresholds that the profile's yields were fitted at, and narrower canvases. What the SPEC sets is kept.
    """
    preset = preset_of(name_of(spec), spec, allow_code)
    found = {**fitted_at(profile, workload), **(CANVASES if profile.family == "canvas" else {})}
    free = preset.flags.keys() - named_fields(spec, allow_code) if preset.engine else ()
    return {name: values for name, values in found.items() if name in free}


# Settings, the rung and the rate to begin at (None: the one to be served), for which it is sent the rates that a
# replica serves; in the end the best setting, and the scores of the last rung.
Halving = Generator[tuple[Sequence[int], int, float | None], Sequence[float], tuple[int, dict[int, float]]]


def halve(settings: Sequence[int]) -> Halving:
    """Find the best setting; the first is the policy as given."""
    left = list(settings)
    start: float | None = None
    found: dict[int, float] = {}
    for rung in range(len(RUNGS)):
        first = yield left[:1], rung, start
        start = first[0] or start
        others = yield left[1:], rung, start
        found = dict(zip(left, [*first, *others], strict=True))
        order = sorted(left[1:], key=lambda i: -found[i])  # equal ones as they were
        left = [left[0], *order[: max(1, round(GOES_ON * len(order)))]]
        start = max(found.values()) or start
    most = max((found[i] for i in found if i != left[0]), default=0.0)
    best = min((i for i in found if i != left[0] and found[i] * NEAR >= most), default=left[0])
    return (best if found[best] > GAIN * found[left[0]] else left[0]), found


def score(search: CapacitySearch, rung: int, start: float, memo: Memo) -> tuple[float, int]:
    """The rate that one replica serves within the SLOs, by replays of the rung's length, and how many those were.

    0 where it serves none: its SLOs hold at no rate, or a request does not fit.
    """
    num = min(search.num_requests, RUNGS[rung])
    short = replace(search, num_requests=num, block=min(search.block, -(-num // PILOT_BLOCKS)))
    ask = replace(short, scenario=replace(search.scenario, replicas=1)).requests(PILOT, memo)
    replays = 0

    def read(rate: float) -> Reading:
        nonlocal replays
        replays += 1
        return ask(rate)

    try:
        return find(read, search.criteria, start, WIDTH, SHARPNESS).rate, replays
    except DsimError:
        return 0.0, replays
