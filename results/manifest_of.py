"""Build a run's manifest."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

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
from ..traces.estimates import SPREAD
from ..traces.trace import ESTIMATE
from .manifest import CommitInfo, FleetInfo, FleetRun, Manifest, PoolInfo, ProfileInfo
from .metrics import Summary
from .parts import parts
from .scenario import Scenario

AR_EMITS = "an autoregressive policy token by token"


def manifest_of(
    scenarios: Sequence[Scenario], requests: Trace, results: list[RunRecords], summaries: list[Summary]
) -> Manifest:
    """Without time and place: the same inputs give the same bytes."""
    scenario = scenarios[0]
    profiles = [s.loaded_profile() for s in scenarios[: len(results)]]
    source, profile = scenario.source(), profiles[0]
    notes = source.notes
    emit = scenario.emit
    if emit == "block" and any(result.policy.rows.commits == "tokens" for result in results):
        emit += f" ({AR_EMITS})"
    closed = scenario.concurrency is not None
    turns = ", turns of a session one after another" if scenario.sessions else ""
    return Manifest(
        question="Which scheduler settings serve this traffic best?",
        dsim=__version__,
        trace={
            "name": source.name,
            "num_requests": len(requests),
            "arrival": f"closed loop of {scenario.concurrency}" if closed else scenario.arrival + turns,
            "rate": 0.0 if math.isnan(requests.rate) else requests.rate,
            "skipped_bad": notes.num_skipped,
            "failed_in_trace": notes.failed_in_trace,
            "sorted_rows": notes.num_unsorted,
            "hash_ids": "hash_ids" in source.extras,
        },
        profile=info_of(profile, [result.policy for result in results]),
        **_of_each(scenarios, profiles),
        commit_models=[
            told for result, profile in zip(results, profiles, strict=True) for told in _commits(result, profile)
        ],
        replicas=scenario.num_replicas,
        router=scenario.router,
        **_of_fleet(scenarios, results),
        emit=emit,
        **_lengths_told(scenario, source, requests, results),
        eos=scenario.ends_at_eos,
        seed=scenario.seed,
        slos=list(scenario.slos),
        missing_passes=scenario.missing_passes,
        closed_loop=closed,
        doubted=list(dict.fromkeys(line for result in results for line in result.doubted)),
        interrupted=results[-1].interrupted,
        limits=[{"policy": result.policy.name, **asdict(result.limits)} for result in results],
        policies=[summary.to_json() for summary in summaries],
    )


def _lengths_told(scenario: Scenario, source: Trace, requests: Trace, results: Sequence[RunRecords]) -> Manifest:
    """The answer lengths that a router or a user's policy saw, if one may use them."""
    from_outside = any(not is_ours(type(part)) for result in results for part in result.policy.parts())
    if not from_outside and not (scenario.num_replicas > 1 and scenario.routing().goes_by_length):
        return {}
    guessed = int((requests.max_tokens == 0).sum())
    if guessed == 0 or (scenario.lengths is None and ESTIMATE in source.extras):
        return {}
    return {"lengths": {"guessed": guessed, "spread": SPREAD}}


def _commits(result: RunRecords, profile: Profile) -> Iterator[CommitInfo]:
    """The law, the commit models, or drafts whose yield is not their calibration's."""
    policy, model = result.policy, result.commit_model
    if result.law is not None:
        yield law_told(policy, profile, result.law)
    if policy.rows.commits == "tokens" and (told := calibration_note(profile, policy, None)):
        yield {"policy": policy.name, **told}
    if model is None:
        return
    asked = policy.unmasking.threshold
    replaced = {} if model.threshold == asked else CommitInfo(asked_threshold=asked)
    yield _model_told(policy, model) | replaced | calibration_note(profile, policy, model)
    for other in Setting(policy, profile, model.workload).by_threshold.values():
        if other != model:
            yield _model_told(policy, other)


def _model_told(policy: Policy, model: CommitModel) -> CommitInfo:
    return CommitInfo(
        policy=policy.name, workload=model.workload, block_length=model.block_length, threshold=model.threshold,
        source=model.source, extrapolated_from=model.extrapolated_from,
    )  # fmt: skip


def law_told(policy: Policy, profile: Profile, law: CanvasLaw) -> CommitInfo:
    told = CommitInfo(policy=policy.name, workload=law.workload, median_steps=law.median, source=law.source)
    told["block_length" if policy.granularity.on_a_grid else "canvas_length"] = law.canvas_length
    counted = profile.counted_length(law.workload, law.canvas_length)
    if counted != law.canvas_length:
        told["extrapolated_from"] = counted
    return {**told, **calibration_note(profile, policy, law)}


def calibration_note(profile: Profile, policy: Policy, drawn: CommitModel | CanvasLaw | None) -> CommitInfo:
    """The calibration's yield, if the run's differs."""
    with_ = calibrated_under(profile)
    if with_ is None:
        return {}
    acceptances = policy.granularity.acceptances
    threshold: float | None = None
    match drawn:
        case CommitModel() | CanvasLaw():
            workload, threshold = drawn.workload, drawn.threshold if isinstance(drawn, CommitModel) else None
        case None if policy.rows.commits == "tokens" and profile.family == "autoregressive":
            workload = drafted(acceptances)
        case None:
            return {}
    if (workload, threshold) == (with_.workload, with_.threshold):
        return {}
    tokens = float(np.cumprod(acceptances).sum()) if drawn is None else _tokens_a_step(drawn)
    return CommitInfo(workload=workload, tokens_per_step=float(f"{tokens:.3g}"))


def _tokens_a_step(drawn: CommitModel | CanvasLaw) -> float:
    from ..profiler.canvas_law import mean_forwards  # they load SciPy
    from ..profiler.request_effects import mean_yield

    return mean_yield(drawn) if isinstance(drawn, CommitModel) else drawn.canvas_length / mean_forwards(drawn)


def info_of(profile: Profile, policies: Sequence[Policy]) -> ProfileInfo:
    """With the calibration's yield and unknown terms."""
    found = ProfileInfo(
        name=profile.name,
        device=profile.device.name,
        model=profile.model.name,
        implementation=profile.implementation,
        estimated=profile.is_estimate,
    )
    with_, unknown = calibrated_under(profile), unknown_host(profile)
    if with_ is not None:
        found["calibrated_with"] = str(with_)
    if unknown:
        found["unknown_host"] = list(unknown)
    if profile.fit.host_or_device:
        found["host_or_device"] = True
    if elsewhere := unpriced(profile, policies):
        found["unpriced"] = elsewhere
    if like := profile.provenance.settings.get(COSTS_OF):
        found["costs_of"] = str(like)
    return ProfileInfo(**found, **front_end_info(profile))


def front_end_info(profile: Profile) -> ProfileInfo:
    return ProfileInfo(frontend=profile.frontend) if profile.frontend else ProfileInfo()


def _of_fleet(scenarios: Sequence[Scenario], results: Sequence[RunRecords]) -> Manifest:
    """Empty for one pool of constant size."""
    scenario = scenarios[0]
    if not scenario.pools and scenario.scaler == FIXED:
        return {}
    pools = [
        PoolInfo(
            name=spec.name, replicas=spec.count, policy=spec.policy, gpus=setting.profile.device.count,
            profile=info_of(setting.profile, [setting.policy]),
        )
        for spec, setting in scenario.each_pool()
    ]  # fmt: skip
    runs = [
        FleetRun(
            policy=scenario.label,
            replica_hours=None if result.replica_time is None else result.replica_time / 3600,
            changes=[list(change) for change in result.changes],
        )
        | _moved(result)
        for scenario, result in zip(scenarios, results, strict=False)
    ]
    found = FleetInfo(pools=pools, runs=runs)
    if scenario.links:
        found |= {"links": list(scenario.links), "decider": scenario.decider}
    if scenario.scaler != FIXED:
        found |= {"scaler": scenario.scaler, "startup": scenario.startup}
    return {"fleet": found}


def _moved(result: RunRecords) -> FleetRun:
    """Moved requests, and the parts of their time."""
    if result.moves is None or "arrived" not in result.moves:
        return {}
    columns = {**result.table.columns, **result.moves}
    done = columns["status"] == COMPLETED
    seconds_of = parts(columns)
    means = {name: float(seconds[done].mean()) for name, seconds in seconds_of.items()} if done.any() else {}
    came = columns["arrived"] > 0
    found = FleetRun(parts=means, moved=int(came.sum()))
    if "sent" in columns and (arrived := int(columns["arrived"].sum())):
        found["sent"] = int(columns["sent"].sum()) / arrived
    return found


def _of_each(scenarios: Sequence[Scenario], profiles: Sequence[Profile]) -> Manifest:
    """By policy or pool, if they differ."""
    if scenarios[0].pools:
        found = {
            f"pool {spec.name}": info_of(setting.profile, [setting.policy])
            for spec, setting in scenarios[0].each_pool()
        }
        return {"profiles": found} if len({info["name"] for info in found.values()}) > 1 else {}
    if len({profile.name for profile in profiles}) == 1:
        return {}
    by_policy = zip(scenarios, profiles, strict=False)
    return {"profiles": {s.policy: info_of(profile, [s.parsed_policy()]) for s, profile in by_policy}}
