"""What a run was made of: trace, profiles and their limits, commit models, lengths, fleet."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .. import __version__
from ..engine.commits import CanvasLaw, CommitModel
from ..engine.spec import Policy
from ..engine.state import COMPLETED
from ..profiler.known import unknown_host, unpriced
from ..profiler.profile import COSTS_OF, Profile
from ..sim.scalers import FIXED
from ..sim.setting import Setting
from ..sim.twin import RunRecords
from ..traces import Trace
from .metrics import Summary, finite
from .run_info import CommitInfo, FleetInfo, FleetRun, ProfileInfo, RunInfo, TraceInfo
from .split_times import parts
from .world import World

AR_EMITS = "an autoregressive policy token by token"
ENSEMBLE = "`dsim replay --ensemble 19`"

Drawn = CommitModel | CanvasLaw | None  # what draws commits; None: next tokens, or a model's weights


def run_info(
    worlds: Sequence[World], requests: Trace, results: Sequence[RunRecords], summaries: Sequence[Summary]
) -> RunInfo:
    """Without time and place: the same inputs give the same bytes."""
    world = worlds[0]
    runs = list(zip(worlds, results, strict=False))
    profiles = {s.label: s.loaded_profile() for s, _ in runs}
    if world.pools:
        profiles = {f"pool {spec.name}": setting.profile for spec, setting in world.each_pool()}
    drawn = [(result.policy, s.loaded_profile(), result.law or result.commit_model) for s, result in runs]
    emit = world.emit
    if emit == "block" and any(result.policy.rows.commits == "tokens" for result in results):
        emit += f" ({AR_EMITS})"
    return RunInfo(
        question="Which scheduler settings serve this traffic best?",
        dsim=__version__,
        trace=_trace_info(world, requests),
        profiles={name: profile_info(profile) for name, profile in profiles.items()},
        notes=tuple(profile_notes([(policy, profile) for policy, profile, _ in drawn])),
        commit_models=tuple(info for run in drawn for info in commit_infos(*run)),
        limits={result.policy.name: result.limits for result in results},
        replicas=world.num_replicas,
        router=world.router,
        fleet=_fleet_info(world, runs),
        emit=emit,
        eos=world.ends_at_eos,
        seed=world.seed,
        slos=world.slos,
        closed_loop=world.concurrency is not None,
        doubted=tuple(dict.fromkeys(line for result in results for line in result.doubted)),
        interrupted=results[-1].interrupted,
        policies=tuple(summaries),
    )


def _trace_info(world: World, requests: Trace) -> TraceInfo:
    source, arrival = world.source(), world.arrival
    if world.sessions:
        arrival += ", turns of a session one after another"
    if world.concurrency is not None:
        arrival = f"closed loop of {world.concurrency}"
    return TraceInfo(
        name=source.name,
        num_requests=len(requests),
        arrival=arrival,
        rate=finite(requests.rate),
        skipped_bad=source.notes.num_skipped,
        failed_in_trace=source.notes.failed_in_trace,
        sorted_rows=source.notes.num_unsorted,
        hash_ids="hash_ids" in source.extras,
    )


def profile_info(profile: Profile) -> ProfileInfo:
    return ProfileInfo(
        name=profile.name,
        device=profile.device.name,
        model=profile.model.name,
        implementation=profile.implementation,
        estimated=profile.is_estimate,
        frontend=profile.frontend,
    )


def commit_infos(policy: Policy, profile: Profile, drawn: Drawn) -> Iterator[CommitInfo]:
    """A policy's law, or its commit models, the one of its own threshold first."""
    if isinstance(drawn, CanvasLaw):
        info = CommitInfo(policy=policy.name, workload=drawn.workload, median_steps=drawn.median)
        counted = profile.counted_length(drawn.workload, drawn.canvas_length)
        if counted != drawn.canvas_length:
            info = replace(info, extrapolated_from=counted)
        if policy.granularity.on_a_grid:
            yield replace(info, block_length=drawn.canvas_length)
        else:
            yield replace(info, canvas_length=drawn.canvas_length)
    elif drawn is not None:
        threshold = policy.unmasking.threshold
        of_thresholds = Setting(policy, profile, drawn.workload).by_threshold.values()
        for model in (drawn, *(model for model in of_thresholds if model != drawn)):
            info = CommitInfo(
                policy=policy.name,
                workload=model.workload,
                block_length=model.block_length,
                threshold=model.threshold,
                extrapolated_from=model.extrapolated_from,
            )
            if model == drawn and model.threshold != threshold:
                info = replace(info, policy_threshold=threshold)
            yield info


def profile_notes(runs: Sequence[tuple[Policy, Profile]]) -> list[str]:
    """Unknown host terms, and costs of another implementation."""
    lines = []
    for name, profile in {profile.name: profile for _, profile in runs}.items():
        if unknown := unknown_host(profile):
            lines.append(
                f"{name} does not know {' and '.join(unknown)}, stored as 0: {ENSEMBLE} shows how much that may cost"
            )
        if foreign := unpriced(profile, [policy for policy, other in runs if other.name == name]):
            lines.append(
                f"{name} does not hold the costs of {' and '.join(foreign)}: steps cost what its own implementation "
                f"takes ({profile.implementation})"
            )
        if lender := profile.provenance.settings.get(COSTS_OF):
            lines.append(
                f"{name} takes the engine's host time from {lender}, another build or GPU: {ENSEMBLE} shows how much "
                "that may change"
            )
    return lines


def _fleet_info(world: World, runs: Sequence[tuple[World, RunRecords]]) -> FleetInfo | None:
    """None for one pool of constant size."""
    scales = world.scaler != FIXED
    if not world.pools and not scales:
        return None
    return FleetInfo(
        pools={spec.name: spec.count for spec, _ in world.each_pool()},
        runs=tuple(_fleet_run(s.label, result) for s, result in runs),
        links=world.links,
        decider=world.decider * bool(world.links),
        scaler=world.scaler * scales,
        startup=str(world.startup).removesuffix(".0") * scales,
    )


def _fleet_run(policy: str, result: RunRecords) -> FleetRun:
    """Paid time and changes; with links, moved requests and the parts of their time."""
    moved, share, means = 0, None, dict[str, float]()
    if result.moves is not None and "arrived" in result.moves:
        columns = {**result.table.columns, **result.moves}
        done = columns["status"] == COMPLETED
        if done.any():
            means = {name: float(seconds[done].mean()) for name, seconds in parts(columns).items()}
        moved = int((columns["arrived"] > 0).sum())
        if "sent" in columns and moved:
            share = int(columns["sent"].sum()) / int(columns["arrived"].sum())
    return FleetRun(
        policy=policy,
        replica_hours=None if result.replica_time is None else result.replica_time / 3600,
        parts=means,
        moved=moved,
        sent=share,
        changes=tuple((change.time, change.pool, change.ready, change.provisioned) for change in result.changes),
    )
