"""The result of a plan: candidates, fleets, risks and the ranking."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..profiler.profile import Profile
from ..report.page import Page
from ..report.shown import Showable, frame_of
from ..results.metrics import no_nan
from .contents import Json
from .deploy import Deployment
from .ensemble import Uncertain
from .quality import Quality
from .race import CONFIDENCE
from .replicate import Interval
from .scaled import Comparison
from .settings import Tried
from .split_plan import SplitOrNot

if TYPE_CHECKING:
    import pandas as pd

MEETS, MISSES, UNSURE = "meets", "misses", "unsure"  # the SLOs


@dataclass(frozen=True)
class PlanCandidate:
    """A policy on a profile, with the cost of a replica's hour: its price, or its GPUs if there is no price."""

    policy: str  # as it was given
    profile: Profile
    place: str  # as in Fleet
    quality: Quality
    price: float | None  # of a GPU for an hour
    settings: tuple[str, ...] = ()  # SPECs to try, the given one first; empty: search none
    qualities: tuple[Quality, ...] = ()  # of the settings
    changing: tuple[str, ...] = ()  # fields with a flag that change the answers, and that the SPEC does not set
    searches_changing: bool = False  # whether the settings to try change answers

    def __str__(self) -> str:
        return f"{self.policy} on {self.place}" if self.place else self.policy

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return self.profile.device.count

    @property
    def weight(self) -> float:
        """The value that fleets are ranked by, for each replica."""
        return self.gpus * (1.0 if self.price is None else self.price)


@dataclass(frozen=True)
class Size:
    """A fleet size that the race tried for a candidate, with a stable queue in the first replication."""

    replicas: int
    gpus: int  # the spare ones included, as the cost is
    per_hour: float | None
    p90_ms: Mapping[str, float]  # by metric, of the first replication
    meets: bool  # the SLOs


@dataclass(frozen=True)
class Fleet:
    """A candidate's place in the ranking: the fewest replicas that meet the SLOs, or why there are none."""

    policy: str
    place: str  # the GPU or profile, if the policy is ranked on several; else empty
    profile: str
    device: str
    model: str
    estimated: bool
    quality: Quality
    gpus_per_replica: int
    replicas: int | None = None  # that meet the SLOs
    spare: int = 0  # replicas beyond those, for when some fail
    gpus: int | None = None  # of all replicas, the spare ones included, as the costs are
    per_hour: float | None = None  # in the currency of the price
    per_million_requests: float | None = None
    values: Mapping[str, Interval] = field(default_factory=dict)  # of each criterion: s, or share of arrivals
    attained: Mapping[str, float] = field(default_factory=dict)  # by SLO without a statistic: share of arrivals
    replications: int = 0
    judged: int = 0  # requests behind `values`, over all replications
    headroom: Interval | None = None  # share of the rate: growth until an SLO breaks; None: not searched
    breaks_first: str = ""  # the criterion that breaks there, or "stability"; without a headroom the worst one
    limited_by: str = ""
    limiting_setting: str = ""
    latency_ms: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[Size, ...] = ()  # by replicas
    tried: Tried | None = None  # the search over its engine's settings; None: not searched
    price: float | None = None  # of a GPU for an hour
    about: int | None = None  # replicas that the pilot estimates, if it was dropped
    least: int | None = None  # lower bound of the replicas, if the race dropped it
    dropped: str = ""  # why it is not in the ranking


@dataclass(frozen=True)
class Risk:
    """The effect of a change (more traffic, a lost replica, a slower profile) on the answer."""

    change: str
    values: Mapping[str, Interval]  # of the criteria, for the recommended fleet as planned; empty if no replica is left
    judged: int  # requests behind `values`
    verdict: str  # whether it still meets the SLOs: MEETS, MISSES or UNSURE
    stable: bool  # the queue stays bounded in every replay
    needs: int | None  # replicas of the recommended policy; None: more than allowed
    per_hour: float | None
    best: str  # the cheaper of recommendation and runner-up then


@dataclass(frozen=True)
class Growth:
    """How long the recommended fleet lasts, without its spare replicas, as the traffic grows; by its headroom."""

    text: str  # as it was given
    share: float  # of the traffic, in each
    per: str  # year, month or week
    low: float  # years until the traffic exceeds the headroom's low end
    high: float  # years until the traffic exceeds the headroom's high end
    replicas_ahead: tuple[int, ...]  # estimates of the replicas needed after one, two and three years


@dataclass(frozen=True)
class Peak:
    """The busiest hour or minute of the trace, and the replicas it would need if it lasted, by the headroom."""

    window: str  # hour or minute
    times: float  # the mean rate
    rate: float  # req/s, at the plan's rate
    replicas: int


@dataclass(frozen=True, repr=False)
class Planned(Showable):
    """The ranking, best first, and what it rests on."""

    rate: float  # req/s
    ranking: tuple[Fleet, ...]
    left_out: tuple[Fleet, ...]  # dropped, or refused
    tied: tuple[str, ...]  # policies that the replays do not distinguish from the recommendation
    risks: tuple[Risk, ...]
    criteria: tuple[str, ...]
    bounds: Mapping[str, float]  # of each criterion: s, or share of arrivals
    share_criteria: tuple[str, ...]
    plan_toml: str
    priced: bool
    num_replays: int
    num_requests: int  # of a replay
    block: int
    confidence: float = CONFIDENCE
    notes: tuple[str, ...] = ()
    peak: Peak | None = None  # None: the times are not the trace's, or it is too short
    growth: Growth | None = None  # None: not asked for
    deployment: Deployment | None = None  # None: no released engine is known to serve the recommendation
    ensemble: Uncertain | None = None  # the recommended fleet under drawn profiles; None: not asked for
    scalers: Comparison | None = None  # the recommended setting fixed and scaled; None: not asked for
    split: SplitOrNot | None = None  # the recommended fleet and a split one; None: not asked for

    @property
    def recommended(self) -> Fleet:
        """The best fleet."""
        return self.ranking[0]

    @property
    def runner_up(self) -> Fleet | None:
        """The second best; None where only one meets the SLOs."""
        return self.ranking[1] if len(self.ranking) > 1 else None

    def page(self) -> Page:
        from ..report.plan import words

        return words(self.to_json())

    def to_frame(self) -> "pd.DataFrame":
        """The ranking, a row a fleet, best first; the entries of plan.json, those within others as `outer_inner`."""
        return frame_of(self.to_json()["ranking"])

    def to_json(self) -> Json:
        """The object that `--json` prints and plan.json holds."""
        data: Json = no_nan(asdict(self))
        data["deploy"] = None if self.deployment is None else self.deployment.to_json()
        del data["deployment"]
        for name in ("ensemble", "scalers", "split"):
            found = getattr(self, name)
            if found is None:
                del data[name]
            else:
                data[name] = found.to_json()
        out: Json = {"schema": SCHEMA, "version": 2, "recommended": data["ranking"][0]}
        return out | {"runner_up": data["ranking"][1] if self.runner_up else None} | data


SCHEMA = "dsim-plan"
