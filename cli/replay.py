"""dsim replay: a trace through the twin, one or several policies side by side."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import __version__
from ..engine import compiled
from ..engine.engine import EMIT
from ..engine.errors import DsimError, PolicyError
from ..engine.policy import Policy, parse
from ..profiler.profile import DEFAULT, Profile
from ..profiler.profile import load as load_profile
from ..report.files import RunWriter
from ..report.manifest import CommitInfo, Manifest
from ..report.metrics import Summary, summarize
from ..report.slo import Slo
from ..report.text import render
from ..sim.router import ROUTERS
from ..sim.twin import Result, commit_model_of, simulate
from ..traces import ARRIVALS, LENGTHS, Trace, load, prepare, shipped_names
from ..traces.burstgpt import fit_burstgpt_like

INTERRUPTED = 130


def replay(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help=f"A trace file, or: {', '.join(shipped_names())}.")],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="SPEC", help="name[:value][,field=value...] or a TOML file; repeat to compare."),
    ] = None,
    profile: Annotated[str, typer.Option(metavar="P", help="A profile file, or one that `dsim profiles` lists.")] = DEFAULT,
    workload: Annotated[
        str | None, typer.Option(metavar="W", help="The profile's commit model to draw from; its first by default.")
    ] = None,
    replicas: Annotated[int, typer.Option(metavar="N", help="Replicas behind the router.")] = 1,
    router: Annotated[str, typer.Option(metavar="R", help=f"One of: {', '.join(ROUTERS)}.")] = "round-robin",
    arrival: Annotated[str, typer.Option(metavar="A", help=f"One of: {', '.join(ARRIVALS)}.")] = "trace",
    rate: Annotated[float | None, typer.Option(metavar="R", help="Requests per second; the trace's own by default.")] = None,
    cv: Annotated[float | None, typer.Option(metavar="C", help="Coefficient of variation of gamma or weibull gaps.")] = None,
    burstiness: Annotated[float | None, typer.Option(metavar="B", help="The same as vLLM says it: cv^-2.")] = None,
    fit: Annotated[
        str | None, typer.Option(metavar="FILE", help="Take burstgpt-like arrivals' parameters from a trace.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="L", help=f"Other lengths than the trace's: {', '.join(LENGTHS)}, or a trace.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="Closed loop: N requests in flight, the trace as a queue.")
    ] = None,
    num_requests: Annotated[int | None, typer.Option(metavar="N", help="How many requests to replay.")] = None,
    time_scale: Annotated[float | None, typer.Option(metavar="X", help="Multiply the trace's gaps.")] = None,
    jitter: Annotated[float, typer.Option(metavar="S", help="Delay each arrival by up to S seconds.")] = 0.0,
    time_unit: Annotated[str | None, typer.Option(metavar="s|ms|us|ns", help="Unit of the file's times.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out and count them.")] = False,
    keep_failed: Annotated[bool, typer.Option("--keep-failed", help="Keep requests without output.")] = False,
    emit: Annotated[str, typer.Option(metavar="E", help=f"What reaches the client when: {', '.join(EMIT)}.")] = "block",
    drain: Annotated[
        bool, typer.Option("--drain/--no-drain", help="Serve what is in flight after the last arrival, or count it.")
    ] = True,
    drop_warmup: Annotated[float, typer.Option(metavar="S", help="Leave out requests of the first S seconds.")] = 0.0,
    slo: Annotated[
        list[str] | None,
        typer.Option("--slo", metavar="SLO", help="[stat:]metric=bound, as ttft=2s or p90:tpot_chunk=50ms; repeat."),
    ] = None,
    missing_fails: Annotated[
        bool, typer.Option("--missing-fails", help="A request that lacks a metric misses a bound on it.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="S", help="Same seed, same bytes.")] = 0,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="Write the run and report.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder.")] = False,
) -> None:
    """Replay a trace through the twin and report what its clients would have seen.

    dsim replay azure-conv --replicas 2 --policy lmdeploy-bd32 --policy optimus --slo ttft=5s -o runs/azure
    """
    policies = [parse(spec) for spec in policy or ["optimus"]]
    _check_names(policies)
    slos = [Slo.parse(text) for text in slo or []]
    priced = load_profile(profile)
    for p in policies:
        commit_model_of(p, priced, workload)
    if fit is not None and arrival != "burstgpt-like":
        raise DsimError(f"--fit is {fit} and --arrival is {arrival}, expected burstgpt-like")
    if concurrency is not None and (arrival != "trace" or rate is not None or replicas and not drain):
        raise DsimError(f"--concurrency is {concurrency}: a closed loop takes no --arrival, --rate or --no-drain")
    if not drop_warmup >= 0:
        raise DsimError(f"--drop-warmup is {drop_warmup} s, expected at least 0")
    source = load(trace, time_unit=time_unit, skip_bad=skip_bad, keep_failed=keep_failed)
    if concurrency is not None and not source.notes.has_arrivals:
        # A closed loop needs no arrival times.
        ready = prepare(source, arrival="constant", rate=1.0, num_requests=num_requests, seed=seed, lengths=lengths)
    else:
        ready = prepare(
            source, arrival=arrival, rate=rate, cv=cv, burstiness=burstiness, num_requests=num_requests, seed=seed,
            lengths=lengths, time_scale=time_scale, jitter=jitter,
            parameters=None if fit is None else fit_burstgpt_like(load(fit)),
        )  # fmt: skip
    screen = Console(stderr=True)
    for warning in source.notes.warnings:
        screen.print(f"Warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    # The folder is checked before the work, not after it.
    writer = None if out is None else RunWriter(out, force=force)
    try:
        results: list[Result] = []
        summaries: list[Summary] = []
        for p in policies:
            sink = None if writer is None else writer.steps(p.name)
            with _Progress(screen, p.name, len(ready)) as progress:
                result = simulate(
                    ready, priced, p, replicas=replicas, router=router, seed=seed, workload=workload, emit=emit,
                    concurrency=concurrency, drain=drain, append=None if sink is None else sink.append,
                    progress=progress.update if screen.is_terminal else None,
                )  # fmt: skip
            results.append(result)
            columns = _seen(result)
            summaries.append(
                summarize(
                    p.name, columns, result.totals, slos, missing_passes=not missing_fails, drop_warmup=drop_warmup,
                    replicas=replicas, closed_loop=concurrency is not None,
                )  # fmt: skip
            )
            if writer is not None:
                writer.requests(p.name, columns)
            if result.interrupted:
                break
        how = f"closed loop of {concurrency}" if concurrency is not None else arrival
        manifest = _manifest(ready, source, how, priced, results, summaries)
        manifest |= Manifest(
            replicas=replicas, router=router, emit=emit, seed=seed, slos=[str(s) for s in slos],
            missing_passes=not missing_fails, drop_warmup=drop_warmup, closed_loop=concurrency is not None,
        )  # fmt: skip
        if writer is not None:
            writer.finish(manifest)
    finally:
        if writer is not None:
            writer.abort()  # does nothing once finished
    interrupted = results[-1].interrupted
    if as_json:
        print(json.dumps({"policies": manifest["policies"], "profile": manifest["profile"], "interrupted": interrupted}))
    else:
        render(summaries, manifest, Console(soft_wrap=not sys.stdout.isatty()))
    if interrupted:
        done = summaries[-1].completed
        screen.print(
            f"Interrupted: {results[-1].policy.name} had served {done} of {len(ready)} requests; "
            f"the figures are of the {len(results)} of {len(policies)} policies run so far.",
            style="bold red",
            soft_wrap=True,
        )
    if out is not None:
        screen.print(f"Wrote {out}/ (run.json, requests.parquet, steps.parquet, report.html)", soft_wrap=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _check_names(policies: list[Policy]) -> None:
    names = [p.name for p in policies]
    for name in names:
        if names.count(name) > 1:
            raise PolicyError(f"policy {name} is given {names.count(name)} times, expected once")


def _seen(result: Result) -> dict[str, Any]:
    """The request columns; after an interrupt, of the requests that had arrived."""
    columns = result.table.columns
    if not result.interrupted:
        return columns
    arrived = columns["replica"] >= 0
    return {name: column[arrived] for name, column in columns.items()}


def _manifest(
    trace: Trace, source: Trace, arrival: str, profile: Profile, results: list[Result], summaries: list[Summary]
) -> Manifest:
    """What the run was. Nothing of when or where it ran: the same inputs give the same bytes."""
    notes = source.notes
    commits: list[CommitInfo] = []
    for result in results:
        model = result.commit_model
        if model is not None:
            commits.append(
                CommitInfo(
                    policy=result.policy.name, workload=model.workload, block_length=model.block_length,
                    threshold=model.threshold, source=model.source, extrapolated_from=model.extrapolated_from,
                )  # fmt: skip
            )
    return Manifest(
        question="Which scheduler settings serve this traffic best?",
        dsim=__version__,
        trace={
            "name": source.name, "num_requests": len(trace), "arrival": arrival,
            "rate": trace.rate if len(trace) > 1 and trace.duration > 0 else 0.0,
            "skipped_bad": notes.num_skipped, "failed_in_trace": notes.failed_in_trace,
            "sorted_rows": notes.num_unsorted, "hash_ids": notes.has_hash_ids,
        },
        profile={
            "name": profile.name, "device": profile.device.name, "model": profile.model.name,
            "implementation": profile.implementation, "estimated": profile.is_estimate,
        },
        commit_models=commits,
        interrupted=results[-1].interrupted,
        policies=[summary.to_json() for summary in summaries],
    )  # fmt: skip


class _Progress:
    """A bar on a terminal, nothing in a pipe."""

    def __init__(self, screen: Console, name: str, total: int) -> None:
        self._screen = screen
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"),
            TextColumn("[dim]{task.fields[clock]}"), TimeElapsedColumn(), console=screen, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(name, total=total, clock="")

    def __enter__(self) -> "_Progress":
        if self._screen.is_terminal:
            self._bar.start()
            compiled.warm_up()
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen.is_terminal:
            self._bar.stop()

    def update(self, ended: int, now: float) -> None:
        """So many requests have ended at this simulated time."""
        self._bar.update(self._task, completed=ended, clock=f"{now:,.0f} s simulated")
