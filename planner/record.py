"""Runs recorded: scenarios served one after another by the twin or on a device, their journal and report written."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..engine.commits import CanvasLaw, CommitModel
from ..engine.journal import CACHED_COLUMNS
from ..engine.policy import Policy, is_shipped
from ..engine.prefix import caches_prefixes
from ..profiler.known import calibrated_under, drafted, unknown_host
from ..profiler.profile import Profile
from ..report.run_folder import RunWriter
from ..report.story import notes_on
from ..results.manifest import CommitInfo, Manifest, ProfileInfo
from ..results.metrics import Summary
from ..results.scenario import Scenario, arrived
from ..sim.memory import StepMemory
from ..sim.router import BY_TOKENS
from ..sim.setting import Setting
from ..sim.twin import Append, Progress, Result
from ..traces import Trace
from ..traces.estimates import SPREAD
from ..traces.trace import ESTIMATE

AR_EMITS = "an autoregressive policy token by token"

# Serves a scenario's requests: what became of them, and what ended the run early if anything did.
Serve = Callable[[Scenario, Trace, Append | None, Progress | None], tuple[Result, Exception | None]]
Watch = Callable[[str], AbstractContextManager[Progress | None]]  # a policy's name -> who is told of its progress


@dataclass(frozen=True)
class Record:
    """The outcomes of the scenarios that were begun."""

    results: list[Result]
    summaries: list[Summary]
    manifest: Manifest
    failure: Exception | None  # the run that it ended is the last, and what was done until then is written

    @property
    def interrupted(self) -> bool:
        """Whether the last run was stopped, or failed, before its end."""
        return self.results[-1].interrupted

    def progress(self, policies: Sequence[str], num_requests: int) -> str:
        """How far an interrupted run came, of these policies with this number of requests each."""
        begun = len(self.results)
        line = f"{self.results[-1].policy.name} had served {self.summaries[-1].completed} of {num_requests} requests"
        left = len(policies) - begun
        return f"{line}, and {left} of {len(policies)} policies were not begun" if left else line


def record(
    scenarios: Sequence[Scenario],
    requests: Trace,
    serve: Serve,
    *,
    out: Path | None = None,
    force: bool = False,
    about: Callable[[Sequence[Result]], dict[str, Any]] = lambda results: {},
    watch: Watch = lambda name: nullcontext(),
    keeps: bool = False,
) -> Record:
    """Serve each scenario (the same but for its policy) and write a run's folder, whole or not at all.

    keeps: what cannot be served again is kept on a disk that fills up: space is taken before, and later steps are left
    out.
    about: more of the manifest, once the results are known; a value of None takes a key out.
    """
    results: list[Result] = []
    summaries: list[Summary] = []
    failure = None
    caches = any(caches_prefixes(scenario.parsed_policy()) for scenario in scenarios)
    more = tuple(CACHED_COLUMNS) if caches else ()
    room = len(requests) * len(scenarios) if keeps else None
    with nullcontext() if out is None else RunWriter(out, force=force, more=more, room_for=room) as writer:
        for scenario in scenarios:
            name = scenario.policy
            with watch(name) as progress:
                append = None if writer is None else writer.steps(name).append
                result, failure = serve(scenario, requests, append, progress)
            if failure is not None:  # requests that had not come when it ended are no one's
                result = replace(result, interrupted=True)
            results.append(result)
            summaries.append(scenario.summarize(result))
            if writer is not None:
                columns = arrived(result)
                none = {column: np.zeros(len(columns["request"])) for column in more}  # found without a cache
                writer.requests(name, {**none, **columns})
            if result.interrupted:
                break
        manifest: dict[str, Any] = {**manifest_of(scenarios, requests, results, summaries), **about(results)}
        held = Manifest(**{key: value for key, value in manifest.items() if value is not None})  # type: ignore[typeddict-item]
        if writer is not None:
            writer.finish(held)
    return Record(results, summaries, held, failure)


def in_twin(
    scenario: Scenario, requests: Trace, append: Append | None, progress: Progress | None
) -> tuple[Result, Exception | None]:
    """Serve a scenario in the twin."""
    return scenario.simulate(requests, append=append, progress=progress), None


def memory_told(scenarios: Sequence[Scenario], requests: Trace, results: Sequence[Result]) -> list[dict[str, Any]]:
    """The memory of a replica of each policy at its largest forward; GPUs and model are the profile's."""
    return [StepMemory(scenario.setting()).to_json(requests) for scenario, _ in zip(scenarios, results, strict=False)]


def manifest_of(
    scenarios: Sequence[Scenario], requests: Trace, results: list[Result], summaries: list[Summary]
) -> Manifest:
    """The run's manifest. Nothing of when or where it ran: the same inputs give the same bytes."""
    scenario = scenarios[0]
    profiles = [s.loaded_profile() for s in scenarios[: len(results)]]
    source, profile = scenario.source(), profiles[0]
    notes = source.notes
    emit = scenario.emit
    if emit == "block" and any(result.policy.rows.commits == "tokens" for result in results):
        emit += f" ({AR_EMITS})"
    closed = scenario.concurrency is not None
    turns = ", turns of a session one after another" if scenario.sessions else ""
    commits: list[CommitInfo] = [*_laws(results, profiles), *_drafts(results, profiles)]
    commits += [
        {
            "policy": result.policy.name,
            "workload": result.commit_model.workload,
            "block_length": result.commit_model.block_length,
            "threshold": result.commit_model.threshold,
            **_in_place_of(result),
            "source": result.commit_model.source,
            "extrapolated_from": result.commit_model.extrapolated_from,
            **_under(profile, result.policy, result.commit_model),
        }
        for result, profile in zip(results, profiles, strict=True)
        if result.commit_model is not None
    ]
    commits += [
        {
            "policy": result.policy.name, "workload": model.workload, "block_length": model.block_length,
            "threshold": model.threshold, "source": model.source, "extrapolated_from": model.extrapolated_from,
        }
        for result, profile in zip(results, profiles, strict=True)
        if result.commit_model is not None
        for model in Setting(result.policy, profile, result.commit_model.workload).by_threshold.values()
        if model != result.commit_model
    ]  # fmt: skip
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
        profile=_info(profile),
        **_of_each(scenarios, profiles),
        commit_models=commits,
        replicas=scenario.replicas,
        router=scenario.router,
        emit=emit,
        **_lengths_told(scenario, source, requests, results),
        eos=scenario.eos,
        seed=scenario.seed,
        slos=list(scenario.slos),
        missing_passes=scenario.missing_passes,
        drop_warmup=scenario.drop_warmup,
        closed_loop=closed,
        interrupted=results[-1].interrupted,
        limits=[{"policy": result.policy.name, **asdict(result.limits)} for result in results],
        policies=[summary.to_json() for summary in summaries],
    )


def _lengths_told(scenario: Scenario, source: Trace, requests: Trace, results: Sequence[Result]) -> Manifest:
    """What the router, or a policy from outside, was told of answers' lengths, where one of them may go by that."""
    from_outside = any(not is_shipped(part) for result in results for part in result.policy.parts())
    if not from_outside and not (scenario.replicas > 1 and scenario.router in BY_TOKENS):
        return {}
    if scenario.oracle_lengths:
        return {"lengths": {"oracle": True}}
    guessed = int((requests.max_tokens == 0).sum())
    if guessed == 0 or (scenario.lengths is None and ESTIMATE in source.extras):
        return {}
    return {"lengths": {"guessed": guessed, "spread": SPREAD}}


def _laws(results: Sequence[Result], profiles: Sequence[Profile]) -> Iterator[CommitInfo]:
    """The laws that runs drew their blocks' forwards from."""
    for result, profile in zip(results, profiles, strict=True):
        if result.law is not None:
            yield law_told(result.policy, profile, result.law)


def law_told(policy: Policy, profile: Profile, law: CanvasLaw) -> CommitInfo:
    """The manifest's entry of a law of steps."""
    told = CommitInfo(policy=policy.name, workload=law.workload, median_steps=law.median, source=law.source)
    told["block_length" if policy.granularity.on_a_grid else "canvas_length"] = law.canvas_length
    counted = profile.counted_length(law.workload, law.canvas_length)
    if counted != law.canvas_length:
        told["extrapolated_from"] = counted
    return {**told, **_under(profile, policy, law)}


def _drafts(results: Sequence[Result], profiles: Sequence[Profile]) -> Iterator[CommitInfo]:
    """The autoregressive runs whose steps yield otherwise than those that their profile was calibrated to."""
    for result, profile in zip(results, profiles, strict=True):
        if result.policy.rows.commits == "tokens" and (told := _under(profile, result.policy, None)):
            yield {"policy": result.policy.name, **told}


def profile_notes(scenarios: Sequence[Scenario]) -> list[str]:
    """A line for each limit of the scenarios' profiles: a yield that is not the calibration's, host terms unknown."""
    lines: list[str] = []
    for scenario in scenarios:
        setting = scenario.setting()
        lines += notes_on(_info(setting.profile), [_under(setting.profile, setting.policy, setting.drawn)])
    return list(dict.fromkeys(lines))


def _in_place_of(result: Result) -> CommitInfo:
    """The policy's threshold, where the yield of another stands in for it."""
    asked, model = result.policy.unmasking.threshold, result.commit_model
    return CommitInfo(asked_threshold=asked) if model is not None and model.threshold != asked else {}


def _under(profile: Profile, policy: Policy, drawn: CommitModel | CanvasLaw | None) -> CommitInfo:
    """The tokens that a run's steps yield, and of which workload, where its profile was calibrated under others."""
    with_ = calibrated_under(profile)
    if with_ is None:
        return {}
    from ..profiler.canvas_law import mean_forwards  # imported here: they load SciPy
    from ..profiler.request_effects import mean_yield

    threshold: float | None = None
    match drawn:
        case CommitModel():
            workload, threshold, tokens = drawn.workload, drawn.threshold, mean_yield(drawn)
        case CanvasLaw():
            workload, tokens = drawn.workload, drawn.canvas_length / mean_forwards(drawn)
        case None if policy.rows.commits == "tokens" and profile.family == "autoregressive":
            acceptances = policy.granularity.acceptances
            workload, tokens = drafted(acceptances), float(np.cumprod(acceptances).sum())
        case None:
            return {}
    if (workload, threshold) == (with_.workload, with_.threshold):
        return {}
    return CommitInfo(workload=workload, tokens_per_step=float(f"{tokens:.3g}"))


def _info(profile: Profile) -> ProfileInfo:
    """A profile's part of a report: the yield that it was calibrated under, and host terms unknown to it, too."""
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
    if profile.frontend:
        found["frontend"] = profile.frontend
    return found


def _of_each(scenarios: Sequence[Scenario], profiles: Sequence[Profile]) -> Manifest:
    """Each policy's profile, where they are not all on one."""
    if len({profile.name for profile in profiles}) == 1:
        return {}
    return {"profiles": {s.policy: _info(profile) for s, profile in zip(scenarios, profiles, strict=False)}}
