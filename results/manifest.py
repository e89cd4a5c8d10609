"""A run's manifest: the keys of run.json that reports read. Every key may be absent."""

from typing import Any, TypedDict

# Of a run's folder; attempts.parquet only where replicas may fail.
FILES = ("run.json", "requests.parquet", "steps.parquet", "report.html", "attempts.parquet")


class TraceInfo(TypedDict, total=False):
    """The requests that were replayed."""

    name: str
    num_requests: int
    arrival: str  # "trace", "poisson", "closed loop of 64" ...
    rate: float  # req/s
    skipped_bad: int  # rows dropped by --skip-bad
    failed_in_trace: int  # rows dropped because their output_length is 0
    sorted_rows: int  # rows that were out of order
    hash_ids: bool  # the trace names prefix blocks


class ProfileInfo(TypedDict, total=False):
    """The profile that predicted the step times."""

    name: str
    device: str
    model: str
    implementation: str
    estimated: bool  # not measured with dsim on this model, device and implementation
    calibrated_with: str  # the yield that its step times were calibrated under
    unknown_host: list[str]  # host-time terms that could not be identified and are 0
    host_or_device: list[str]  # host terms whose time may be the device's
    unpriced: list[str]  # implementations of the run's policies whose costs it does not hold
    frontend: float  # s between a client and the engine, both ways
    frontend_service: float  # s that a request takes of the front end's one server


class CommitInfo(TypedDict, total=False):
    """The commit model of a policy's yield, or the law of the number of forwards of its blocks or canvases."""

    policy: str
    workload: str
    block_length: int
    threshold: float
    asked_threshold: float  # the policy's, if nothing was fitted at it
    source: str
    extrapolated_from: int | None  # the block size that was fitted, if it is another
    canvas_length: int  # of a law of canvases, in place of block_length
    median_steps: float  # of a law: forwards of a typical request's first block
    tokens_per_step: float  # the usual yield, if the profile was calibrated under another one


class MemoryInfo(TypedDict, total=False):
    """The largest forward that a policy's limits allow, and the memory that a replica then uses."""

    policy: str
    tokens: int
    head_rows: int
    gb: dict[str, float]  # by kind of tensor
    capacity_gb: float
    shortage: str | None  # the tensor that does not fit; null: all fit


class LengthsInfo(TypedDict, total=False):
    """The answers' lengths as routers and policies of a user's own see them."""

    oracle: bool  # the true lengths
    guessed: int  # requests without a limit, whose length was estimated
    spread: float  # standard deviation of the logarithm of estimate over truth


class PoolInfo(TypedDict, total=False):
    """A pool of a fleet when the run began."""

    name: str
    replicas: int
    policy: str
    gpus: int  # of a replica
    profile: ProfileInfo


class FailedRun(TypedDict):
    """What failures did to a policy's run."""

    outages: list[list[Any]]  # start (s), end (s; null: after the run), pool, place, number of the replica that died
    replica_seconds: float  # that replicas were down, up to the end of the run
    retried: int  # times that a request was sent again
    lost: int  # requests
    arrived: int  # requests that arrived while at least one replica was down
    slo_attainment: float | None  # of these; null: no SLO, or none arrived


class FleetRun(TypedDict, total=False):
    """How many replicas a policy's run had."""

    policy: str
    replica_hours: float | None  # paid for; null: the number stayed
    parts: dict[str, float]  # mean seconds of each part of a finished request's time (parts.py); absent: no links
    moved: int  # requests that were prefilled in a pool of their own
    sent: float  # share of these requests' tokens that travelled; absent: no pool that decodes has a prefix cache
    changes: list[list[Any]]  # time (s), pool, replicas that take requests, replicas paid for
    failed: "FailedRun"  # absent: no failures were given


class FleetInfo(TypedDict, total=False):
    """A fleet that is not one pool of a fixed count."""

    pools: list[PoolInfo]
    links: list[str]  # absent: requests stay where they are sent
    decider: str
    scaler: str  # absent: the number of replicas stayed
    startup: float | str  # s that a replica takes to start, or parts
    failures: list[str]  # absent: none
    runs: list[FleetRun]


class Manifest(TypedDict, total=False):
    """run.json without its schema and version. Times are seconds."""

    question: str
    command: str
    dsim: str  # version
    driver: str  # "twin" (the default), "live", or "client" for a load generator's file
    commits: str  # of a live run: "model", the weights decided what commits, or "twin", a profile's keyed draws
    live: dict[str, Any]  # device, versions, model, settings, and the host's time in addition to the device's
    client: dict[str, Any]  # tool, file, failures, lateness, and its own figures where they differ
    server: dict[str, Any]  # the server's Prometheus metrics of the same time
    trace: TraceInfo
    profile: ProfileInfo
    profiles: dict[str, ProfileInfo]  # by policy, if they are not all on one profile
    as_logged: dict[str, Any]  # the log whose requests and settings these are, and the origin of its profile
    fitted_profile: Any  # the profile's file, if it was fitted to that log
    commit_models: list[CommitInfo]
    limits: list[dict[str, Any]]  # of a replica of each policy: `policy`, and the fields of Limits
    replicas: int  # when the run began
    router: str
    fleet: FleetInfo  # if it is not one pool of a fixed count
    lengths: LengthsInfo
    emit: str
    eos: bool  # requests end at an EOS, which the engine does not foresee
    seed: int
    slos: list[str]
    measured: dict[str, Any]  # the times in the trace's own log, and the predictions for the same requests
    cost: dict[str, Any]  # of the fleet: gpus, per_hour, currency
    spread: dict[str, Any]  # 90th percentiles at other spreads between requests
    memory: list[MemoryInfo]
    ensemble: dict[str, Any]  # intervals over drawn profiles, and the causes that move the answer most
    missing_passes: bool
    drop_warmup: float
    closed_loop: bool
    interrupted: bool
    journal_failure: str  # why steps.parquet lacks steps
    policies: list[dict[str, Any]]  # Summary.to_json() of each
