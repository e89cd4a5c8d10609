"""Serve scenarios in turn, in the twin or on a device, and write the run's folder."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.journal import CACHED_COLUMNS, CHOICE_COLUMNS, MOVE_COLUMNS, ORDER_COLUMNS, SENT_COLUMNS, passed
from ..engine.prefix import caches_prefixes
from ..report.story import notes_on
from ..results.manifest import Manifest
from ..results.manifest_of import calibration_note, info_of, manifest_of
from ..results.metrics import Summary
from ..results.scenario import Scenario, arrived
from ..sim.memory import StepMemory
from ..sim.twin import Append, Progress, RunRecords
from ..traces import Trace
from .limits import PoolShares

if TYPE_CHECKING:
    from ..report.run_folder import RunWriter

# Serves a scenario; returns the result, and the exception that ended it early.
Serve = Callable[[Scenario, Trace, Append | None, Progress | None], tuple[RunRecords, Exception | None]]
Watch = Callable[[str], AbstractContextManager[Progress | None]]  # policy's name -> progress callback


@dataclass(frozen=True)
class Record:
    """The scenarios that began."""

    results: list[RunRecords]
    summaries: list[Summary]
    manifest: Manifest
    failure: Exception | None  # ended the last run; finished requests are written

    @property
    def interrupted(self) -> bool:
        """Whether the last run was stopped, or failed."""
        return self.results[-1].interrupted

    def progress(self, policies: Sequence[str], num_requests: int) -> str:
        """How far an interrupted run came; `num_requests`: of each policy."""
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
    about: Callable[[Sequence[RunRecords]], dict[str, Any]] = lambda results: {},
    watch: Watch = lambda name: nullcontext(),
    keeps: bool = False,
) -> Record:
    """Serve scenarios that differ only in policy, and write a run's folder, whole or not at all.

    about: more manifest entries; None removes a key. keeps: the run cannot be repeated, so space is reserved against a
    full disk, and later steps may be left out.
    """
    results: list[RunRecords] = []
    summaries: list[Summary] = []
    failure = None
    policies = [alone.parsed_policy() for scenario in scenarios for alone in scenario.of_each_pool()]
    caches = any(map(caches_prefixes, policies))
    orders = not scenarios[0].links and any(policy.batching.orders for policy in policies)
    chosen = CHOICE_COLUMNS if any(policy.unmasking.varies for policy in policies) else ()
    moved = MOVE_COLUMNS if scenarios[0].links else ()
    sent = SENT_COLUMNS if scenarios[0].links and scenarios[0].fleet().shares_where_decoded else ()
    more = (*(CACHED_COLUMNS if caches else ()), *(ORDER_COLUMNS if orders else ()), *moved, *sent)
    room = len(requests) * len(scenarios) if keeps else None
    with _writer(out, force=force, more=more, chosen=chosen, room_for=room) as writer:
        for scenario in scenarios:
            name = scenario.label
            with watch(name) as progress:
                append = None if writer is None else writer.steps(name).append
                result, failure = serve(scenario, requests, append, progress)
            if failure is not None:  # requests that had not arrived are left out
                result = replace(result, interrupted=True)
            results.append(result)
            summaries.append(scenario.summarize(result))
            if writer is not None:
                columns = arrived(result)
                none = {column: np.zeros(len(columns["request"])) for column in more}  # without a cache
                order = {"passed": passed(columns)} if orders else {}
                writer.requests(name, {**none, **columns, **order})
            if result.interrupted:
                break
        manifest: dict[str, Any] = {**manifest_of(scenarios, requests, results, summaries), **about(results)}
        held = Manifest(**{key: value for key, value in manifest.items() if value is not None})  # type: ignore[typeddict-item]
        if writer is not None:
            writer.finish(held)
    return Record(results, summaries, held, failure)


def _writer(out: Path | None, **options: Any) -> "AbstractContextManager[RunWriter | None]":
    if out is None:
        return nullcontext()
    from ..report.run_folder import RunWriter  # it loads pyarrow.parquet

    return RunWriter(out, **options)


def in_twin(
    scenario: Scenario, requests: Trace, append: Append | None, progress: Progress | None, threads: int = 1
) -> tuple[RunRecords, Exception | None]:
    shares = PoolShares(scenario.fleet())

    def judged(steps: Mapping[str, Any], lists: Mapping[str, Any]) -> None:
        shares.append(steps, lists)
        if append is not None:
            append(steps, lists)

    receive = judged if any(pool.setting.profile.fit.judged_by for pool in shares.pools) else append
    result = scenario.simulate(requests, append=receive, threads=threads, progress=progress)
    return replace(result, doubted=shares.doubted()), None


def memory_told(scenarios: Sequence[Scenario], requests: Trace, results: Sequence[RunRecords]) -> list[dict[str, Any]]:
    """Each policy's replica at its largest forward; GPUs and model are the profile's."""
    return [StepMemory(scenario.setting()).to_json(requests) for scenario, _ in zip(scenarios, results, strict=False)]


def profile_notes(scenarios: Sequence[Scenario]) -> list[str]:
    """Limits of profiles: a yield other than the calibration's, unknown host terms."""
    lines: list[str] = []
    for scenario in scenarios:
        setting = scenario.setting()
        policy, profile = setting.policy, setting.profile
        lines += profile.failure + notes_on(
            info_of(profile, [policy]), [calibration_note(profile, policy, setting.drawn)]
        )
    return list(dict.fromkeys(lines))
