"""A run's manifest: the keys of run.json that reports read, all optional."""

from typing import Any, TypedDict

FILES = ("run.json", "requests.parquet", "steps.parquet", "report.html")


class TraceInfo(TypedDict, total=False):
    """The replayed requests."""

    name: str
    num_requests: int
    arrival: str  # "trace", "poisson", "closed loop of 64"
    rate: float  # req/s
    skipped_bad: int  # rows, by --skip-bad
    failed_in_trace: int  # rows with an output_length of 0
    sorted_rows: int  # rows out of order
    hash_ids: bool  # prefixes are named


class ProfileInfo(TypedDict, total=False):
    """The predicting profile."""

    name: str
    device: str
    model: str
    implementation: str
    estimated: bool  # not measured by dsim on this model, device and implementation
    calibrated_with: str  # the yield of its calibration
    unknown_host: list[str]  # host-time terms not identified, stored as 0
    host_or_device: bool  # host_request may be device time
    unpriced: list[str]  # implementations of the policies without costs
    costs_of: str  # the profile whose host time of the engine a data sheet takes
    frontend: float  # s between client and engine, both directions


class CommitInfo(TypedDict, total=False):
    """A policy's commit model, or law of forwards a block or canvas."""

    policy: str
    workload: str
    block_length: int
    threshold: float
    asked_threshold: float  # the policy's, if the model has another
    source: str
    extrapolated_from: int | None  # the fitted block length, if another
    canvas_length: int  # of a law of canvases
    median_steps: float  # of a law: forwards of a typical first block
    tokens_per_step: float  # the profile's usual yield, if calibrated at another


class MemoryInfo(TypedDict, total=False):
    """The largest forward within a policy's limits."""

    policy: str
    tokens: int
    head_rows: int
    gb: dict[str, float]  # by tensor
    capacity_gb: float
    shortage: str | None  # the tensor that does not fit


class LengthsInfo(TypedDict, total=False):
    """The answer lengths that routers and a user's policies see."""

    guessed: int  # requests without a limit: estimated
    spread: float  # standard deviation of log(estimate / truth)


class PoolInfo(TypedDict, total=False):
    """At the run's start."""

    name: str
    replicas: int
    policy: str
    gpus: int  # of a replica
    profile: ProfileInfo


class FleetRun(TypedDict, total=False):
    policy: str
    replica_hours: float | None  # paid; null: constant count
    parts: dict[str, float]  # mean s of a finished request (parts.py); absent: no links
    moved: int  # requests prefilled in a prefill pool
    sent: float  # share of their tokens sent over the link; absent: no decoding pool has a prefix cache
    changes: list[list[Any]]  # s, pool, serving replicas, paid replicas


class FleetInfo(TypedDict, total=False):
    """Not one pool of constant size."""

    pools: list[PoolInfo]
    links: list[str]  # absent: none
    decider: str
    scaler: str  # absent: constant count
    startup: float | str  # s, or its parts
    runs: list[FleetRun]


class Manifest(TypedDict, total=False):
    """run.json without schema and version; times in s."""

    question: str
    command: str
    dsim: str  # version
    driver: str  # "twin" (default), "live", or "client" for a load generator's file
    commits: str  # live: "model" if the weights decided, "twin" if a profile's draws did
    live: dict[str, Any]  # device, versions, model, settings, host time beyond the device's
    client: dict[str, Any]  # tool, file, failures, lateness, differing figures
    trace: TraceInfo
    profile: ProfileInfo
    profiles: dict[str, ProfileInfo]  # by policy, if different
    as_logged: dict[str, Any]  # the log of requests and settings, and its profile's origin
    fitted_profile: Any  # a profile file, if fitted to that log
    commit_models: list[CommitInfo]
    limits: list[dict[str, Any]]  # of a replica, by policy: `policy` and the fields of Limits
    replicas: int  # at the start
    router: str
    fleet: FleetInfo  # unless one pool of constant size
    lengths: LengthsInfo
    emit: str
    eos: bool  # an unforeseen EOS ends requests
    seed: int
    slos: list[str]
    measured: dict[str, Any]  # the trace's log, and predictions for the same requests
    cost: dict[str, Any]  # gpus, per_hour, currency
    memory: list[MemoryInfo]
    ensemble: dict[str, Any]  # intervals over drawn profiles, and the largest causes
    missing_passes: bool
    closed_loop: bool
    doubted: list[str]  # profiles that failed their own checks, and doubted kinds of steps that take much of the time
    interrupted: bool
    journal_failure: str  # why steps.parquet lacks steps
    policies: list[dict[str, Any]]  # Summary.to_json()
