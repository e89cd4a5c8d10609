"""A run's manifest: the keys of run.json that every report reads. A key that is absent is left unsaid."""

from typing import Any, TypedDict


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
    """The profile that priced the steps."""

    name: str
    device: str
    model: str
    implementation: str
    estimated: bool  # no one measured this model, device and implementation with dsim
    calibrated_with: str  # the yield that its step times were calibrated under, where they were
    unknown_host: list[str]  # host terms that are 0 because nobody could tell them
    frontend: float  # s between a client and the engine, both ways, where there is any


class CommitInfo(TypedDict, total=False):
    """The commit model behind a policy's yield, or the law of how many forwards its blocks or canvases take."""

    policy: str
    workload: str
    block_length: int
    threshold: float
    asked_threshold: float  # the policy's, where nothing was fitted at it
    source: str
    extrapolated_from: int | None  # the block size that was fitted, where it is another
    canvas_length: int  # of a law of canvases, in place of block_length
    median_steps: float  # of a law: forwards of a typical request's first block
    tokens_per_step: float  # that an ordinary step yields, where the profile was calibrated under another yield


class MemoryInfo(TypedDict, total=False):
    """The largest forward that a policy's limits allow, and what a replica's memory then holds."""

    policy: str
    tokens: int
    head_rows: int
    gb: dict[str, float]  # by what it is
    capacity_gb: float
    shortage: str | None  # which tensor is the one too many; null: it fits


class LengthsInfo(TypedDict, total=False):
    """What routers and policies from outside were told of answers' lengths."""

    oracle: bool  # the true lengths
    guessed: int  # requests whose length was estimated, for they set no limit
    spread: float  # ... standard deviation of the logarithm of estimate over truth


class PoolInfo(TypedDict, total=False):
    """A pool of a fleet when the run began."""

    name: str
    replicas: int
    policy: str
    gpus: int  # of a replica
    profile: ProfileInfo


class FleetRun(TypedDict, total=False):
    """How many replicas a policy's run had."""

    policy: str
    replica_hours: float | None  # paid for; null: the number stayed
    changes: list[list[Any]]  # time (s), pool, replicas that take requests, replicas paid for


class FleetInfo(TypedDict, total=False):
    """A fleet that is not one pool of a fixed count."""

    pools: list[PoolInfo]
    scaler: str  # absent: the number of replicas stayed
    startup: float  # s that a replica takes to start
    runs: list[FleetRun]


class Manifest(TypedDict, total=False):
    """run.json without its format's name and version. Times are seconds."""

    question: str
    command: str
    dsim: str  # version
    driver: str  # "twin", "live" or "client", a load generator's file; a run that does not say is the twin's
    commits: str  # live: "model", the weights decided what commits, or "twin", a profile's keyed draws did
    live: dict[str, Any]  # live: device, versions, model and settings, and the host's time beside the device's
    client: dict[str, Any]  # client: tool, file, failures, how late it sent, and its own figures where they differ
    server: dict[str, Any]  # what the server's Prometheus metrics say of the same time
    trace: TraceInfo
    profile: ProfileInfo
    profiles: dict[str, ProfileInfo]  # by policy, where they are not all on that one
    as_logged: dict[str, Any]  # the log whose requests and settings these are, and where its profile is from
    fitted_profile: Any  # the profile's file, where it was fitted to that log and nobody else has it
    commit_models: list[CommitInfo]
    limits: list[dict[str, Any]]  # what a replica of each policy could hold: `policy`, and Limits' fields
    replicas: int  # when the run began
    router: str
    fleet: FleetInfo  # where it is not one pool of a fixed count
    lengths: LengthsInfo  # what its router, or a policy from outside, was told of answers' lengths
    emit: str
    eos: bool  # requests ended at an EOS, which nobody foresaw
    seed: int
    slos: list[str]
    measured: dict[str, Any]  # what the trace's own log measured, and beside it the predictions for the same requests
    cost: dict[str, Any]  # of the fleet: gpus, per_hour, currency
    spread: dict[str, Any]  # 90th percentiles at other spreads between requests
    memory: list[MemoryInfo]  # of each policy's largest forward
    ensemble: dict[str, Any]  # what the answer hangs on: intervals over drawn profiles, and causes
    missing_passes: bool
    drop_warmup: float
    closed_loop: bool
    interrupted: bool
    journal_failure: str  # why steps.parquet holds fewer steps than were made, where it does
    policies: list[dict[str, Any]]  # Summary.to_json() of each
