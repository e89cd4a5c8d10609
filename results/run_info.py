"""run.json: the inputs of a run, and its policies' metrics."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..engine.engine import Limits
from .metrics import Summary
from .spread import Uncertain
from .stored import Stored

FILES = ("run.json", "requests.parquet", "steps.parquet", "report.html")


@dataclass(frozen=True)
class TraceInfo:
    """The served requests."""

    name: str
    num_requests: int = 0
    arrival: str = "trace"  # "poisson", "closed loop of 64"
    rate: float | None = None  # req/s
    skipped_bad: int = 0  # rows, by --skip-bad
    failed_in_trace: int = 0  # rows with an output_length of 0
    sorted_rows: int = 0  # rows out of order
    hash_ids: bool = False  # prefixes are named


@dataclass(frozen=True)
class ProfileInfo:
    """The predicting profile."""

    name: str
    device: str
    model: str
    implementation: str
    estimated: bool = True  # not measured by dsim on this model, device and implementation
    frontend: float = 0.0  # s between client and engine, both directions


@dataclass(frozen=True)
class CommitInfo:
    """A policy's commit model, or law of forwards a block or canvas."""

    policy: str
    workload: str
    block_length: int | None = None
    canvas_length: int | None = None  # of a law of canvases
    threshold: float | None = None
    policy_threshold: float | None = None  # the policy's, if the model has another
    extrapolated_from: int | None = None  # the fitted block or canvas length, if another
    median_steps: float | None = None  # of a law: forwards of a typical first block


@dataclass(frozen=True)
class FleetRun:
    """What a policy's run did with its fleet."""

    policy: str
    replica_hours: float | None = None  # paid; None: constant count
    parts: dict[str, float] = field(default_factory=dict)  # mean s of a finished request (split_times.py), with links
    moved: int = 0  # requests prefilled in a prefill pool
    sent: float | None = None  # share of their tokens sent over the link, if a decoding pool has a prefix cache
    changes: tuple[tuple[float, str, int, int], ...] = ()  # s, pool, serving replicas, paid replicas


@dataclass(frozen=True)
class FleetInfo:
    """Several pools, or replicas that a scaler starts and stops."""

    pools: dict[str, int]  # replicas at the start
    runs: tuple[FleetRun, ...]
    links: tuple[str, ...] = ()
    decider: str = ""  # with links
    scaler: str = ""  # empty: constant count
    startup: str = ""  # s


@dataclass(frozen=True)
class LiveInfo:
    """A device, or a server's twin in real time."""

    device: str
    model: str
    dtype: str = ""
    weights: str = ""  # if they are not the model's
    prompts: str = ""
    host_ms: dict[str, float] = field(default_factory=dict)  # a step's median beyond the device's, by policy
    made_ready: dict[str, int] = field(default_factory=dict)  # kernels compiled and graphs captured, by policy
    settings: dict[str, Any] = field(default_factory=dict)  # versions, clocks, sampling


@dataclass(frozen=True)
class Lateness:
    """ms from a request's time until it was sent."""

    p50: float
    p99: float
    max: float


@dataclass(frozen=True)
class ClientInfo:
    """A load generator's file."""

    tool: str
    failed: int = 0  # requests
    errors: dict[str, int] = field(default_factory=dict)  # requests by message
    lateness_ms: Lateness | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoggedInfo:
    """A step log whose requests, policy and settings were replayed."""

    log: str
    profile: str  # its origin


@dataclass(frozen=True)
class FleetCost:
    gpus: int
    per_hour: float
    currency: str


@dataclass(frozen=True, repr=False)
class RunInfo(Stored):
    """run.json; times in s."""

    schema: ClassVar[str] = "dsim-run"

    trace: TraceInfo
    policies: tuple[Summary, ...] = ()
    question: str = "What did its clients see?"
    command: str = ""
    dsim: str = ""  # version
    driver: str = "twin"  # "live", or "client" for a load generator's file
    commits: str = "twin"  # who decides: the twin's draws, a live "model", or a measured "server"
    profiles: dict[str, ProfileInfo] = field(default_factory=dict)  # by policy, or by `pool NAME`
    commit_models: tuple[CommitInfo, ...] = ()
    limits: dict[str, Limits] = field(default_factory=dict)  # of a replica, by policy
    replicas: int = 1  # at the start
    router: str = ""
    emit: str = "block"
    eos: bool = False  # an unforeseen EOS ends requests
    seed: int | None = None
    slos: tuple[str, ...] = ()
    closed_loop: bool = False
    interrupted: bool = False
    fleet: FleetInfo | None = None  # None: one pool of constant size
    live: LiveInfo | None = None
    client: ClientInfo | None = None
    as_logged: LoggedInfo | None = None
    fitted_profile: dict[str, Any] | None = None  # a profile file, if fitted to that log
    cost: FleetCost | None = None
    ensemble: Uncertain | None = None  # intervals over drawn profiles, and the largest causes
    shortages: tuple[str, ...] = ()  # policies that may run out of memory
    doubted: tuple[str, ...] = ()  # failed checks of profiles, and doubted kinds of steps that take much of the time
    notes: tuple[str, ...] = ()  # limits of the profiles

    @property
    def profile(self) -> ProfileInfo | None:
        """The first policy's; None: nothing was predicted."""
        return next(iter(self.profiles.values()), None)

    @property
    def estimated(self) -> bool:
        """Whether a profile that predicted was not measured."""
        return self.driver == "twin" and any(profile.estimated for profile in self.profiles.values())

    def summary(self, policy: str) -> Summary:
        return next(summary for summary in self.policies if summary.policy == policy)
