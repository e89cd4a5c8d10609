"""What a run was made of: trace, profiles and their limits, commit models, lengths, fleet."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from .. import __version__
from ..engine.commits import CanvasLaw, CommitModel
from ..engine.jit import is_ours
from ..engine.policy import Policy
from ..engine.state import COMPLETED
from ..profiler.known import calibrated_under, drafted, unknown_host, unpriced
from ..profiler.profile import COSTS_OF, Profile
from ..sim.scalers import FIXED
from ..sim.setting import Setting
from ..sim.twin import RunRecords
from ..traces import Trace
from ..traces.trace import ESTIMATE
from .metrics import Summary
from .parts import parts
from .run_info import CommitInfo, FleetInfo, FleetRun, ProfileInfo, RunInfo, TraceInfo
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
    profiles = {s.label: profile_info(s.loaded_profile()) for s, _ in runs}
    if world.pools:
        profiles = {f"pool {spec.name}": profile_info(setting.profile) for spec, setting in world.each_pool()}
    drawn = [(result.policy, s.loaded_profile(), result.law or result.commit_model) for s, result in runs]
    emit = world.emit
    if emit == "block" and any(result.policy.rows.commits == "tokens" for result in results):
        emit += f" ({AR_EMITS})"
    return RunInfo(
        question="Which scheduler settings serve this traffic best?",
        dsim=__version__,
        trace=_trace_info(world, requests),
        profiles=profiles,
        notes=tuple(profile_notes(drawn)),
        commit_models=tuple(info for run in drawn for info in commit_infos(*run)),
        limits={result.policy.name: result.limits for result in results},
        replicas=world.num_replicas,
        router=world.router,
        fleet=_fleet_info(world, runs),
        emit=emit,
        guessed_lengths=_guessed_lengths(world, requests, results),
        eos=world.ends_at_eos,
        seed=world.seed,
        slos=world.slos,
        missing_passes=world.missing_passes,
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
        rate=None if math.isnan(requests.rate) else requests.rate,
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


def _guessed_lengths(world: World, requests: Trace, results: Sequence[RunRecords]) -> int:
    """Requests without a limit, if a router or a user's policy may use their lengths."""
    from_outside = any(not is_ours(type(piece)) for result in results for piece in result.policy.parts())
    if not from_outside and not (world.num_replicas > 1 and world.routing().goes_by_length):
        return 0
    if world.lengths is None and ESTIMATE in world.source().extras:
        return 0
    return int((requests.max_tokens == 0).sum())


def commit_infos(policy: Policy, profile: Profile, drawn: Drawn) -> Iterator[CommitInfo]:
    """A policy's law, or its commit models, the one of its own threshold first."""
    if isinstance(drawn, CanvasLaw):
        counted = profile.counted_length(drawn.workload, drawn.canvas_length)
        grid = policy.granularity.on_a_grid
        yield CommitInfo(
            policy=policy.name,
            workload=drawn.workload,
            block_length=drawn.canvas_length if grid else None,
            canvas_length=None if grid else drawn.canvas_length,
            median_steps=drawn.median,
            extrapolated_from=None if counted == drawn.canvas_length else counted,
        )
    elif drawn is not None:
        of_thresholds = Setting(policy, profile, drawn.workload).by_threshold.values()
        for model in (drawn, *(model for model in of_thresholds if model != drawn)):
            threshold = policy.unmasking.threshold
            yield CommitInfo(
                policy=policy.name,
                workload=model.workload,
                block_length=model.block_length,
                threshold=model.threshold,
                policy_threshold=None if model != drawn or model.threshold == threshold else threshold,
                extrapolated_from=model.extrapolated_from,
            )


def profile_notes(runs: Sequence[tuple[Policy, Profile, Drawn]]) -> list[str]:
    """Another yield than a profile's calibration's, unknown host terms, another implementation's costs."""
    lines = []
    for profile in {profile.name: profile for _, profile, _ in runs}.values():
        users = [(policy, model) for policy, other, model in runs if other.name == profile.name]
        yields = list(dict.fromkeys(filter(None, (_other_yield(profile, *run) for run in users))))
        if yields:
            lines.append(
                f"{profile.name}'s step times were calibrated under a yield of {calibrated_under(profile)}; "
                f"this run commits {', '.join(yields)} tokens a step"
            )
        if unknown := unknown_host(profile):
            lines.append(
                f"{profile.name} does not know {' and '.join(unknown)}, which {'is' if len(unknown) == 1 else 'are'} 0 "
                f"in it: {ENSEMBLE} shows how much that may cost"
            )
        if foreign := unpriced(profile, [policy for policy, _ in users]):
            lines.append(
                f"{profile.name} does not hold the costs of {' and '.join(foreign)}: steps cost what its own "
                f"implementation takes ({profile.implementation})"
            )
        if lender := profile.provenance.settings.get(COSTS_OF):
            lines.append(
                f"{profile.name} takes the engine's host time from {lender}, another build or GPU: "
                f"{ENSEMBLE} shows how much that may change"
            )
    return lines


def _other_yield(profile: Profile, policy: Policy, model: Drawn) -> str:
    """Tokens a step and the workload, if they are not the calibration's."""
    calibrated = calibrated_under(profile)
    acceptances = policy.granularity.acceptances
    drafts = model is None and policy.rows.commits == "tokens" and profile.family == "autoregressive"
    if calibrated is None or (model is None and not drafts):
        return ""
    workload = drafted(acceptances) if model is None else model.workload
    threshold = model.threshold if isinstance(model, CommitModel) else None
    if (workload, threshold) == (calibrated.workload, calibrated.threshold):
        return ""
    tokens = float(np.cumprod(acceptances).sum()) if model is None else _tokens_a_step(model)
    return f"{tokens:.3g} ({workload})"


def _tokens_a_step(model: CommitModel | CanvasLaw) -> float:
    from ..profiler.calibrate import mean_yield
    from ..profiler.canvas_law import mean_forwards  # they load SciPy

    return mean_yield(model) if isinstance(model, CommitModel) else model.canvas_length / mean_forwards(model)


def _fleet_info(world: World, runs: Sequence[tuple[World, RunRecords]]) -> FleetInfo | None:
    """None for one pool of constant size."""
    scales = world.scaler != FIXED
    startup = ""
    if scales:
        startup = world.startup if isinstance(world.startup, str) else f"{world.startup:g}"
    if not world.pools and not scales:
        return None
    return FleetInfo(
        pools={spec.name: spec.count for spec, _ in world.each_pool()},
        runs=tuple(_fleet_run(s.label, result) for s, result in runs),
        links=world.links,
        decider=world.decider if world.links else "",
        scaler=world.scaler if scales else "",
        startup=startup,
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
