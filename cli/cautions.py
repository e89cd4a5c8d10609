"""Warnings of a question's traces, policies and profiles, and SLOs that end a command."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..results.metrics import Summary
    from ..results.run_info import RunInfo
    from ..results.world import World
    from ..sim.setting import Setting
    from .declared import Watch

MOST_SAID = 8  # warnings of a kind
LEAST = 0.99  # share of requests within SLOs without a statistic


def warn(watch: "Watch", *worlds: "World") -> None:
    """Of their traces, in general and for their policies."""
    from ..engine.prefix import caches_prefixes
    from ..traces.prefixes import warning

    lines: list[str | None] = []
    for world in worlds:
        source, num = world.source(), world.num_requests or 0
        lines += source.notes.warnings
        if num > len(source):
            lines.append(f"{source.name} holds {len(source)} requests and the run asks for {num}: it begins again")
        if world.lengths is not None:
            source = replace(source, extras={})
        lines.append(warning(source, world.router, caches_prefixes(world.parsed_policy())))
    watch.warn(filter(None, dict.fromkeys(lines)))


def warn_of_yields(watch: "Watch", *worlds: "World") -> None:
    """Of settings and requests that the profiles do not cover."""
    warn_of_settings(watch, [(world.setting(), world) for world in worlds])


def warn_of_settings(watch: "Watch", runs: Iterable[tuple["Setting", "World"]]) -> None:
    """The first warnings, and the number of the rest."""
    from ..sim.unknown import warnings_of

    lines: list[str] = []
    for setting, world in runs:
        # A server's requests are unknown yet.
        models: Iterable[object] = world.source().extras.get("model", ()) if world.trace else ()
        lines += warnings_of(setting, models)
    lines = list(dict.fromkeys(lines))
    if len(lines) > MOST_SAID:
        lines[MOST_SAID:] = [f"{len(lines) - MOST_SAID} more policies need data that their profiles lack"]
    watch.warn(lines)


def stopped(run: "RunInfo", worlds: Sequence["World"]) -> str:
    """How far an interrupted run came; empty for a whole one."""
    if not run.interrupted:
        return ""
    last, num = run.policies[-1], run.trace.num_requests
    line = f"Interrupted: {last.policy} had served {last.completed} of {num} requests"
    if waiting := len(worlds) - len(run.policies):
        line += f", and {waiting} of {len(worlds)} policies were not begun"
    return line


def missed_slos(policies: Sequence["Summary"]) -> list[str]:
    """The SLOs that runs miss."""
    missed = []
    for summary in policies:
        missed += [f"{summary.policy} misses {verdict.slo}" for verdict in summary.slos if verdict.met is False]
        share = summary.slo_attainment
        if share is not None and share < LEAST:
            missed.append(f"{summary.policy} meets the SLOs for {100 * share:.4g} % of requests, of {LEAST:.0%}")
    return missed
