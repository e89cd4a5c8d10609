"""dsim live: a trace served in real time by the executor on a device, under the same policies as in the twin."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..engine.errors import DsimError, PolicyError
from ..planner.on_device import check_live, run_on_device
from ..planner.scenario import Scenario, arrived
from ..profiler.profile import DEFAULT
from ..report.files import RunWriter
from ..report.metrics import Summary
from ..report.slo import Slo
from ..report.text import render
from ..sim.twin import Result
from . import options
from .bar import Bar
from .options import INTERRUPTED, option
from .replay import manifest_of


def live_command(
    trace: options.TraceName,
    model: Annotated[str, option("M", "tiny, sdar-1.7b, sdar-4b, sdar-8b, or a Hugging Face directory.")] = "tiny",
    policy: Annotated[
        list[str] | None, option("SPEC", "name[:value][,field=value...] or a TOML file; repeat to compare.", "--policy")
    ] = None,
    commits: Annotated[
        str | None,
        option("C", "What decides what commits: model, the weights; twin, the profile's draws, the default of random "
               "weights."),
    ] = None,
    profile: Annotated[
        str | None, option("P", "A profile of this model: for --commits twin and elastic chunks.", "--profile")
    ] = None,
    workload: options.Workload = None,
    prompts: Annotated[
        str | None, option("FILE", "What requests ask: a text, .jsonl of token ids, or source|records (tiny).")
    ] = None,
    device: Annotated[str | None, option("D", "cuda or cpu; the GPU where there is one.")] = None,
    arrival: options.Arrival = "trace",
    rate: options.Rate = None,
    cv: options.Cv = None,
    lengths: options.Lengths = None,
    num_requests: options.NumRequests = None,
    time_scale: options.TimeScale = None,
    time_unit: options.TimeUnit = None,
    skip_bad: options.SkipBad = False,
    emit: options.Emit = "block",
    drop_warmup: Annotated[float, option("S", "Leave out requests of the first S seconds.")] = 0.0,
    slo: options.Slos = None,
    missing_fails: options.MissingFails = False,
    seed: options.Seed = 0,
    out: Annotated[Path | None, option("DIR", "Write the run and report.html.", "-o", "--out")] = None,
    as_json: options.AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder.")] = False,
) -> None:
    """Serve a trace on this machine's device, in real time, and report what its clients saw.

    dsim live azure-conv --lengths fixed:64,64 --rate 2 --num-requests 60 --policy lmdeploy-bd32 -o runs/live
    """
    specs = policy or ["lmdeploy-bd32"]
    for spec in specs:
        if specs.count(spec) > 1:
            raise PolicyError(f"policy {spec} is given {specs.count(spec)} times, expected once")
    if not 0 <= drop_warmup < float("inf"):
        raise DsimError(f"--drop-warmup is {drop_warmup} s, expected at least 0 and finite")
    first = Scenario(
        trace=trace, policy=specs[0], profile=profile or DEFAULT, workload=workload, arrival=arrival, rate=rate, cv=cv,
        lengths=lengths, num_requests=num_requests, time_scale=time_scale, time_unit=time_unit, skip_bad=skip_bad,
        emit=emit, slos=tuple(str(Slo.parse(text)) for text in slo or []), missing_passes=not missing_fails,
        drop_warmup=drop_warmup, seed=seed,
    )  # fmt: skip
    scenarios = [replace(first, policy=spec) for spec in specs]
    for scenario in scenarios:
        scenario.parsed_policy()
    requests = first.requests()
    screen = Console(stderr=True, soft_wrap=True, highlight=False)
    for warning in first.source().notes.warnings:
        screen.print(f"Warning: {warning}", style="yellow", markup=False)
    from ..profiler.measure import open_model  # imported here: it loads PyTorch

    loaded = open_model(model, device, seed)
    commits = commits or ("model" if loaded.trained else "twin")
    held = first.loaded_profile() if profile is not None else None
    if commits == "model" and prompts is None and model == "tiny":
        prompts = "records"
    if commits == "model" and prompts is None:
        raise DsimError(f"commits is model and no prompts are given: {model} has nothing to answer (--prompts FILE)")
    for scenario in scenarios:  # every mistake is told before the work begins
        check_live(scenario, loaded, held, commits)
    results: list[Result] = []
    summaries: list[Summary] = []
    failure: Exception | None = None
    with nullcontext() if out is None else RunWriter(out, force=force) as writer:
        for scenario in scenarios:
            name = scenario.policy
            with Bar(screen, name, "requests", len(requests), "warming up") as bar:
                result, failure = run_on_device(
                    scenario, loaded, held, requests, commits=commits, prompts=prompts,
                    append=None if writer is None else writer.steps(name).append, progress=partial(_show, bar),
                )  # fmt: skip
            # Requests that had not come when it ended are no one's.
            result = replace(result, interrupted=result.interrupted or failure is not None)
            results.append(result)
            summaries.append(scenario.summarize(result))
            if writer is not None:
                writer.requests(name, arrived(result))
            if result.interrupted:
                break
        manifest = manifest_of(first, requests, results, summaries)
        manifest["question"] = "What did its clients see?"
        manifest["driver"], manifest["commits"] = "live", commits
        host = {summary.policy: _host(result) for summary, result in zip(summaries, results, strict=True)}
        manifest["live"] = loaded.settings | {"prompts": prompts or "random tokens", "host_ms": host}
        if held is None:
            del manifest["profile"]
        if commits == "model":
            manifest["commit_models"] = []
        if writer is not None:
            writer.finish(manifest)
    if as_json:
        shown = {name: manifest[name] for name in ("policies", "live", "commits", "interrupted")}  # type: ignore[literal-required]
        print(json.dumps(shown))
    else:
        render(summaries, manifest, Console(soft_wrap=not sys.stdout.isatty()))
    if results[-1].interrupted:
        done = summaries[-1].completed
        line = f"Interrupted: {results[-1].policy.name} had served {done} of {len(requests)} requests"
        if len(results) < len(specs):
            line += f", and {len(specs) - len(results)} of {len(specs)} policies were not begun"
        screen.print(line, style="bold red", markup=False)
    if out is not None:
        screen.print(f"Wrote {out}/ (run.json, requests.parquet, steps.parquet, report.html)", markup=False)
    if failure is not None:
        raise failure
    if results[-1].interrupted:
        raise typer.Exit(INTERRUPTED)


def _host(result: Result) -> dict[str, float]:
    """The host's time a step that no device time hides, in ms."""
    times = result.totals.host
    return {"mean": 1e3 * times.mean(), "p50": 1e3 * times.quantile(0.5), "p99": 1e3 * times.quantile(0.99)}


def _show(bar: Bar, ended: int, now: float) -> None:
    """So many requests have ended at this time."""
    bar.update(ended, note=f"{now:,.1f} s")


