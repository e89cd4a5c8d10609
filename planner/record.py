"""Serve worlds in turn, in the twin or on a device, and write the run's folder."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.errors import DsimError, cut
from ..engine.journal import CACHED_COLUMNS, CHOICE_COLUMNS, MOVE_COLUMNS, SENT_COLUMNS
from ..engine.prefix import caches_prefixes
from ..report.run_page import RunResult, run_html
from ..results import provenance
from ..results.metrics import Summary
from ..results.run import read_run
from ..results.run_info import FleetCost
from ..results.world import World, arrived
from ..sim.memory import StepMemory
from ..sim.twin import Append, Progress, RunRecords
from ..traces import Trace
from .limits import PoolShares

if TYPE_CHECKING:
    from ..results.run_folder import RunWriter

# Serves a world; returns the result, and the exception that ended it early.
Serve = Callable[[World, Trace, Append | None, Progress | None], tuple[RunRecords, Exception | None]]
Watch = Callable[[str], AbstractContextManager[Progress | None]]  # policy's name -> progress callback


def record(
    worlds: Sequence[World],
    requests: Trace,
    serve: Serve,
    *,
    out: Path | None = None,
    force: bool = False,
    about: Callable[[Sequence[RunRecords]], Mapping[str, Any]] = lambda results: {},
    watch: Watch = lambda name: nullcontext(),
) -> RunResult:
    """Serve worlds that differ only in policy, and write a run's folder, whole or not at all.

    about: more fields of the result.
    """
    results: list[RunRecords] = []
    summaries: list[Summary] = []
    tables = {}
    failure = None
    policies = [pool_world.parsed_policy() for world in worlds for pool_world in world.of_each_pool()]
    links = worlds[0].links
    extra_columns: list[str] = []
    if any(map(caches_prefixes, policies)):
        extra_columns += CACHED_COLUMNS
    if links:
        extra_columns += MOVE_COLUMNS
    if links and worlds[0].fleet().shares_where_decoded:
        extra_columns += SENT_COLUMNS
    chosen = CHOICE_COLUMNS if any(policy.unmasking.varies for policy in policies) else ()
    with _writer(out, force=force, more=extra_columns, chosen=chosen) as writer:
        for world in worlds:
            name = world.label
            with watch(name) as progress:
                append = None if writer is None else partial(writer.append, name)
                result, failure = serve(world, requests, append, progress)
            if failure is not None:  # requests that had not arrived are left out
                result = replace(result, interrupted=True)
            results.append(result)
            summaries.append(world.summarize(result))
            tables[name] = arrived(result)
            if writer is not None:
                columns = tables[name]
                none = {column: np.zeros(len(columns["request"])) for column in extra_columns}  # without a cache
                writer.requests(name, {**none, **columns})
            if result.interrupted:
                break
        info = replace(provenance.run_info(worlds, requests, results, summaries), **about(results))
        if writer is not None:
            writer.finish(info, run_html)
    code = worlds[0].allow_code
    opened = None if out is None else partial(read_run, out, code)
    return RunResult.from_info(info, open=opened, columns=tables, failure=failure)


def _writer(out: Path | None, **options: Any) -> "AbstractContextManager[RunWriter | None]":
    if out is None:
        return nullcontext()
    from ..results.run_folder import RunWriter  # it loads pyarrow.parquet

    return RunWriter(out, **options)


def in_twin(
    world: World, requests: Trace, append: Append | None, progress: Progress | None
) -> tuple[RunRecords, Exception | None]:
    shares = PoolShares(world.fleet())

    def judged(steps: Mapping[str, Any], lists: Mapping[str, Any]) -> None:
        shares.append(steps, lists)
        if append is not None:
            append(steps, lists)

    receive = judged if any(pool.setting.profile.fit.judged_by for pool in shares.pools) else append
    result = world.simulate(requests, append=receive, progress=progress)
    return replace(result, doubted=shares.doubted()), None


def doubts_of(world: World, requests: Trace) -> tuple[str, ...]:
    """Doubted kinds of a replay's steps, by profiles that judge kinds of steps."""
    if not any(pool.setting.profile.fit.judged_by for pool in world.fleet().pools):
        return ()
    return in_twin(world, requests, None, None)[0].doubted


def shortages(worlds: Sequence[World], requests: Trace) -> tuple[str, ...]:
    """Policies whose replica may run out of memory at its largest forward."""
    lines = []
    for world in worlds:
        memory = StepMemory(world.setting())
        if shortage := memory.shortage(memory.largest(requests)):
            lines.append(f"{memory.setting.policy.name}: it may be {shortage}")
    return tuple(lines)


def fleet_cost(worlds: Sequence[World], gpu_hour: float, currency: str) -> FleetCost:
    """gpu_hour: price of a GPU per hour."""
    first = worlds[0]
    if not 0 <= gpu_hour < math.inf:
        raise DsimError(f"--gpu-hour is {gpu_hour}, expected a price of 0 or more")
    if first.scaler != World.scaler:
        raise DsimError(f"--gpu-hour is {gpu_hour:g} and --scaler is {cut(first.scaler)}: the price of a fixed fleet")
    counts = {setting.profile.device.count for world in worlds for _, setting in world.each_pool()}
    if len(counts) > 1:
        listed = ", ".join(map(str, sorted(counts)))
        raise DsimError(f"--gpu-hour is one price and the policies' profiles have {listed} GPUs, expected one number")
    gpus = first.num_replicas * counts.pop()
    return FleetCost(gpus, gpus * gpu_hour, currency)


def profile_notes(worlds: Sequence[World]) -> list[str]:
    """Limits of profiles: failed checks, unknown host terms, costs of another implementation."""
    settings = [world.setting() for world in worlds]
    failures = [line for setting in settings for line in setting.profile.failure]
    notes = provenance.profile_notes([(setting.policy, setting.profile) for setting in settings])
    return list(dict.fromkeys([*failures, *notes]))
