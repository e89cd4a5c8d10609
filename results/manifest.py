"""A run's manifest: the keys of run.json that reports read. Every key is optional."""

from typing import Any, TypedDict

# In a run's folder; attempts.parquet only if replicas may fail.
FILES = ("run.json", "requests.parquet", "steps.parquet", "report.html", "attempts.parquet")


class TraceInfo(TypedDict, total=False):
    """The replayed requests."""

    name: str
    num_requests: int
    arrival: str  # "trace", "poisson", "closed loop of 64" ...
    rate: float  # req/s
    skipped_bad: int  # rows that --skip-bad dropped
    failed_in_trace: int  # rows dropped for an output_length of 0
    sorted_rows: int  # rows found out of order
    hash_ids: bool  # the trace names prefix blocks


class ProfileInfo(TypedDict, total=False):
    """The profile that predicted the step times."""

    name: str
    device: str
    model: str
    implementation: str
    estimated: bool  # not measured with dsim on this model, device and implementation
    calibrated_with: str  # the yield that its step times were calibrated at
    unknown_host: list[str]  # host-time terms that could not be identified, stored as 0
    host_or_device: list[str]  # host terms that may be device time
    unpriced: list[str]  # implementations of the run's policies that it has no costs for
    frontend: float  # s between a client and the engine, both directions
    frontend_service: float  # s per request at the front end's one server


class CommitInfo(TypedDict, total=False):
    """The commit model of a policy's yield, or its law of forwards per block or canvas."""

    policy: str
    workload: str
    block_length: int
    threshold: float
    asked_threshold: float  # the policy's threshold, if the model is of another one
    source: str
    extrapolated_from: int | None  # the fitted block size, if different
    canvas_length: int  # of a law of canvases, instead of block_length
    median_steps: float  # of a law: forwards of a typical request's first block
    tokens_per_step: float  # the profile's usual yield, if it was calibrated at another one


class MemoryInfo(TypedDict, total=False):
    """The largest forward within a policy's limits, and the memory that a replica then uses."""

    policy: str
    tokens: int
    head_rows: int
    gb: dict[str, float]  # by kind of tensor
    capacity_gb: float
    shortage: str | None  # the tensor that does not fit; null: everything fits


class LengthsInfo(TypedDict, total=False):
    """The answer lengths that routers and user-supplied policies see."""

    oracle: bool  # true lengths
    guessed: int  # requests without a limit, with an estimated length
    spread: float  # standard deviation of log(estimate / truth)


class PoolInfo(TypedDict, total=False):
    """A pool of a fleet at the run's start."""

    name: str
    replicas: int
    policy: str
    gpus: int  # per replica
    profile: ProfileInfo


class FailedRun(TypedDict):
    """The effect of failures on a policy's run."""

    outages: list[list[Any]]  # start (s), end (s; null: after the run), pool, place, number of the failed replica
    replica_seconds: float  # of replica downtime, up to the run's end
    retried: int  # resent requests, each time counted
    lost: int  # requests
    arrived: int  # requests that arrived while a replica was down
    slo_attainment: float | None  # of these; null: no SLO or no such request


class FleetRun(TypedDict, total=False):
    """The replicas of a policy's run."""

    policy: str
    replica_hours: float | None  # paid for; null: the number was constant
    parts: dict[str, float]  # mean s of each part of a finished request's time (parts.py); absent: no links
    moved: int  # requests prefilled in a prefill pool
    sent: float  # share of their tokens sent over the link; absent: no decoding pool has a prefix cache
    changes: list[list[Any]]  # time (s), pool, replicas that take requests, replicas paid for
    failed: "FailedRun"  # absent: no failures configured


class FleetInfo(TypedDict, total=False):
    """A fleet other than one pool of constant size."""

    pools: list[PoolInfo]
    links: list[str]  # absent: requests stay in their pool
    decider: str
    scaler: str  # absent: the number of replicas was constant
    startup: float | str  # s that a replica takes to start, or its parts
    failures: list[str]  # absent: none
    runs: list[FleetRun]


class Manifest(TypedDict, total=False):
    """run.json without schema and version. Times are s."""

    question: str
    command: str
    dsim: str  # version
    driver: str  # "twin" (the default), "live", or "client" for a load generator's file
    commits: str  # live runs: "model" if the weights decided the commits, "twin" for a profile's keyed draws
    live: dict[str, Any]  # device, versions, model, settings, and the host's time beyond the device's
    client: dict[str, Any]  # tool, file, failures, lateness, and its own figures if different
    server: dict[str, Any]  # the server's Prometheus metrics of the same time
    trace: TraceInfo
    profile: ProfileInfo
    profiles: dict[str, ProfileInfo]  # by policy, if they differ
    as_logged: dict[str, Any]  # the log that gave requests and settings, and the origin of its profile
    fitted_profile: Any  # the profile's file, if fitted to that log
    commit_models: list[CommitInfo]
    limits: list[dict[str, Any]]  # per replica of each policy: `policy`, and the fields of Limits
    replicas: int  # at the run's start
    router: str
    fleet: FleetInfo  # if not one pool of constant size
    lengths: LengthsInfo
    emit: str
    eos: bool  # requests end at an EOS that the engine does not foresee
    seed: int
    slos: list[str]
    measured: dict[str, Any]  # times in the trace's own log, and predictions for the same requests
    cost: dict[str, Any]  # of the fleet: gpus, per_hour, currency
    spread: dict[str, Any]  # 90th percentiles at other spreads between requests
    memory: list[MemoryInfo]
    ensemble: dict[str, Any]  # intervals over drawn profiles, and the causes with the largest effect
    missing_passes: bool
    drop_warmup: float
    closed_loop: bool
    interrupted: bool
    journal_failure: str  # why steps.parquet lacks steps
    policies: list[dict[str, Any]]  # Summary.to_json() of each
