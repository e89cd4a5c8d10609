"""The result of a plan: fleets, risks, the ranking, and how long the fleet lasts as traffic grows."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ..engine.errors import DsimError
from ..report.page import Page
from ..report.result import Result, frame_of
from ..results.spread import Spread, Uncertain
from ..results.world import Setup
from .deploy import Deployment
from .memo import store_kind
from .quality import Quality
from .replicate import CONFIDENCE, Interval
from .settings import Tried

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "dsim-plan"
FILES = ("plan.toml", "plan.json", "report.html")
DEPLOY = "deploy"  # a folder
PLAN = store_kind("a plan", SCHEMA, (*FILES, DEPLOY, "profile-*.json"), "plan.json", DEPLOY)

PERIODS = {"year": 1.0, "month": 12.0, "week": 365.25 / 7}  # in a year
MOST_GROWTH = 10.0  # each period
MOST_YEARS = 10.0
QUARTERS = 4  # of a horizon

MEETS, MISSES, UNSURE = "meets", "misses", "unsure"  # the SLOs
Values = Mapping[str, Spread]  # by criterion: s, or share of arrivals


@dataclass(frozen=True, kw_only=True)
class Due:
    """The fleet that grown traffic needs, by a race at that rate."""

    years: float  # from today
    rate: float  # req/s
    replicas: int
    gpus: int  # with spare
    per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A row of the ranking: the fewest replicas that meet the SLOs, or why there are none."""

    policy: str
    place: str  # GPU or profile, if several are ranked
    profile: str
    device: str
    model: str
    implementation: str
    estimated: bool
    quality: Quality
    gpus_per_replica: int
    price: float | None  # of a GPU per hour
    replicas: int | None = None
    spare: int = 0  # standby replicas
    gpus: int | None = None  # with spare, like the costs
    per_hour: float | None = None  # in the price's currency
    per_million_tokens: float | None = None  # of answers, at the plan's rate
    values: Values = field(default_factory=dict)
    attained: Mapping[str, float] = field(default_factory=dict)  # SLO without statistic -> share of arrivals
    replications: int = 0
    judged: int = 0  # requests in all replications
    headroom: Interval | None = None  # growth until an SLO breaks, share of the rate; None: not searched
    breaks_first: str = ""  # that criterion or "stability"; without headroom the worst criterion
    limited_by: str = ""
    limiting_setting: str = ""
    assumed: float = 0.0  # share of busy time in decode steps larger than any that the prices were read from
    doubted: tuple[str, ...] = ()  # failed checks of the profile, and doubted steps that take much of the time
    untested: tuple[str, ...] = ()  # settings beyond what the engine is tested with
    latency_ms: Mapping[str, Mapping[str, float] | None] = field(default_factory=dict)  # by metric and percentile
    due: tuple[Due, ...] = ()  # today, each quarter and the end of the horizon; empty: no growth
    mean_cost: float | None = None  # an hour (without prices: GPUs) over the horizon, which ranks fleets then
    tried: Tried | None = None  # None: settings not searched
    about: int | None = None  # the pilot's estimate, if it dropped the candidate
    least: int | None = None  # lower bound, if the race dropped it
    dropped: str = ""

    @property
    def name(self) -> str:
        return " on ".join(filter(None, (self.policy, self.place)))


@dataclass(frozen=True, kw_only=True)
class Risk:
    """Effect of more traffic, a lost replica or a slower profile."""

    change: str
    values: Values  # on the planned fleet; empty without replicas
    judged: int  # requests
    verdict: str  # MEETS, MISSES or UNSURE
    stable: bool  # in most replays
    needs: int | None  # replicas; None: more than allowed
    per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How long the fleet lasts as traffic grows, by headroom, without spare replicas."""

    text: str  # as in the command
    share: float  # of the traffic, per `per`
    per: str  # year, month or week
    low: float  # years, by the headroom's low end
    high: float  # years, by its high end
    horizon: float  # years


@dataclass(frozen=True)
class Horizon:
    """Traffic that grows; each quarter buys the GPUs that it needs."""

    growth: str  # 30%/year, or per month or week; compound
    years: float = 1.0

    def __post_init__(self) -> None:
        parsed_growth(self.growth)
        if not 0 < self.years <= MOST_YEARS:
            raise DsimError(f"horizon is {self.years:g} years, expected above 0 and at most {MOST_YEARS:g}")

    @property
    def yearly(self) -> float:
        """Factor of the traffic."""
        share, per = parsed_growth(self.growth)
        return math.pow(1 + share, PERIODS[per])

    @property
    def dates(self) -> list[float]:
        """Today, each quarter of the horizon, and its end, in years."""
        return [self.years * k / QUARTERS for k in range(QUARTERS + 1)]

    def mean(self, replicas: Sequence[int]) -> float:
        """Paid on average, by the replicas that each date needs; between two dates the mean of both."""
        return sum((a + b) / 2 for a, b in itertools.pairwise(replicas)) / QUARTERS


def growth_of(horizon: Horizon, fleet: Fleet) -> Growth:
    """How long the fleet lasts."""
    share, per = parsed_growth(horizon.growth)
    room = fleet.headroom
    assert room is not None
    low, high = (math.log(1 + max(end, 0.0)) / math.log(horizon.yearly) for end in (room.low, room.high))
    return Growth(text=horizon.growth, share=share, per=per, low=low, high=high, horizon=horizon.years)


def parsed_growth(text: str) -> tuple[float, str]:
    """Share of the traffic, and period."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?%/({'|'.join(PERIODS)})", text.strip())
    if match is None or not 0 < (share := float(match[1]) / 100) <= MOST_GROWTH:
        raise DsimError(
            f"growth is {text}, expected a percentage above 0 and up to {100 * MOST_GROWTH:g} for each "
            f"{', '.join(PERIODS)}, such as 30%/year".replace(", week", " or week")
        )
    return share, match[2]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The recommended policy behind another router, or under a counted law of canvases."""

    name: str
    replicas: int | None  # None: more than allowed
    gpus: int | None  # with spare
    per_hour: float | None
    forwards: float = 0.0  # of a law: denoising, of a canvas, on average
    source: str = ""  # of a law


@dataclass(frozen=True, repr=False, kw_only=True)
class Planned(Result):
    """The ranking, best first."""

    schema: ClassVar[str] = SCHEMA

    rate: float  # req/s
    ranking: tuple[Fleet, ...]
    left_out: tuple[Fleet, ...]  # dropped or refused
    tied: tuple[str, ...]  # policies not distinguished from the recommendation
    risks: tuple[Risk, ...]
    criteria: tuple[str, ...]
    bounds: Mapping[str, float]  # s, or share of arrivals
    share_criteria: tuple[str, ...]
    plan_toml: str
    priced: bool
    num_replays: int
    num_requests: int  # of a replay
    block: int
    setup: Setup
    confidence: float = CONFIDENCE
    notes: tuple[str, ...] = ()
    growth: Growth | None = None  # None: traffic is constant
    laws: tuple[Variant, ...] = ()  # the default one first; empty: the workload or yield is given, or no canvases
    routed: Variant | None = None  # behind a router that knows the queues; None: one is named, or one replica
    research: tuple[Fleet, ...] = ()  # of schedulers that no released engine has, the cheapest first
    today: Fleet | None = None  # what runs now, on the recommended GPUs
    deployment: Deployment | None = None  # None: no released engine is known to serve it
    ensemble: Uncertain | None = None

    @property
    def recommended(self) -> Fleet:
        return self.ranking[0]

    @property
    def runner_up(self) -> Fleet | None:
        """None if only one fleet meets the SLOs."""
        return self.ranking[1] if len(self.ranking) > 1 else None

    def cost(self, fleet: Fleet) -> float:
        """What ranks fleets: money an hour, or GPUs without prices; with growth the mean over the horizon."""
        if fleet.mean_cost is not None:
            return fleet.mean_cost
        return float((fleet.per_hour if self.priced else fleet.gpus) or 0)

    @property
    def missed_today(self) -> list[str]:
        """The criteria that what runs today misses."""
        missed = []
        for text, spread in self.today.values.items() if self.today else ():
            value, bound, is_share = spread.value or 0.0, self.bounds[text], text in self.share_criteria
            if (is_share and value < bound) or (not is_share and value > bound):
                missed.append(text)
        return missed

    def page(self) -> Page:
        from ..report.plan_page import plan_page

        return plan_page(self)

    def to_frame(self) -> "pd.DataFrame":
        """One row per fleet, best first; nested entries as `outer_inner`."""
        return frame_of(self.to_json()["ranking"])
