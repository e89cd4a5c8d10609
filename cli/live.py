"""dsim live: a trace served in real time by the executor on a device, under the same policies as in the twin."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..engine.errors import DsimError
from . import choices, options
from .bar import Bar, watch_runs
from .options import INTERRUPTED, option


def live_command(
    trace: options.TraceName,
    model: Annotated[str, option("M", "tiny, sdar-1.7b, sdar-4b, sdar-8b, or a Hugging Face directory.")] = "tiny",
    policy: options.Policies = None,
    commits: Annotated[
        str | None,
        option(
            "C",
            "What decides what commits: model, the weights; twin, the profile's draws, the default of random weights.",
        ),
    ] = None,
    profile: Annotated[
        str | None, option("P", "A profile of this model: for --commits twin and elastic chunks.", "--profile")
    ] = None,
    workload: options.Workload = None,
    prompts: Annotated[
        str | None, option("FILE", "What requests ask: a text, .jsonl of token ids, or source|records (tiny).")
    ] = None,
    device: Annotated[str | None, option("D", "cuda or cpu; the GPU where there is one.")] = None,
    graphs: Annotated[bool, typer.Option("--graphs", help="Capture decode steps as CUDA graphs.")] = False,
    arrival: options.Arrival = "trace",
    rate: options.Rate = None,
    cv: options.Cv = None,
    lengths: options.Lengths = None,
    num_requests: options.NumRequests = None,
    time_scale: options.TimeScale = None,
    time_unit: options.TimeUnit = None,
    skip_bad: options.SkipBad = False,
    emit: options.Emit = "block",
    drop_warmup: options.DropWarmup = 0.0,
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
    from ..planner.on_device import about_live, check_live, on_device
    from ..planner.record import FILES, record
    from ..report.story import words
    from ..report.text import render

    given, specs = locals(), options.different(policy or ["lmdeploy-bd32"])
    first = options.scenario(given, policy=specs[0], profile=profile or choices.PROFILE)
    scenarios = [replace(first, policy=spec) for spec in specs]
    for scenario in scenarios:
        scenario.parsed_policy()
    requests = first.requests()
    screen = Console(stderr=True, soft_wrap=True, highlight=False)
    options.warn(screen, first)
    from ..profiler.measure import open_model  # imported here: it loads PyTorch

    loaded = open_model(model, device, seed, graphs)
    commits = commits or ("model" if loaded.trained else "twin")
    held = first.loaded_profile() if profile is not None else None
    if commits == "model" and prompts is None and model == "tiny":
        prompts = "records"
    if commits == "model" and prompts is None:
        raise DsimError(f"commits is model and no prompts are given: {model} has nothing to answer (--prompts FILE)")
    for scenario in scenarios:  # every mistake is told before the work begins
        check_live(scenario, loaded, held, commits)

    serve = partial(on_device, loaded, held, commits, prompts)
    of_device, told = about_live(loaded, held, commits, prompts), {"command": options.command()}
    with Bar(screen, "live", "requests") as bar:
        watch = watch_runs(bar, len(specs), len(requests), "warming up")
        recorded = record(
            scenarios, requests, serve, out=out, force=force, about=lambda results: {**of_device(results), **told},
            watch=watch,
        )  # fmt: skip
    summaries, manifest = recorded.summaries, recorded.manifest
    if as_json:
        shown = {
            "policies": manifest["policies"], "live": manifest["live"], "commits": commits,
            "interrupted": recorded.interrupted,
        }  # fmt: skip
        print(json.dumps(shown))
    else:
        render(words(manifest["policies"], manifest), Console(soft_wrap=not sys.stdout.isatty()))
    if recorded.interrupted:
        line = (
            f"Interrupted: {specs[len(summaries) - 1]} had served {summaries[-1].completed} of {len(requests)} requests"
        )
        if len(summaries) < len(specs):
            line += f", and {len(specs) - len(summaries)} of {len(specs)} policies were not begun"
        screen.print(line, style="bold red", markup=False)
    if out is not None:
        screen.print(f"Wrote {out}/ ({FILES})", markup=False)
    if recorded.failure is not None:
        raise recorded.failure
    if recorded.interrupted:
        raise typer.Exit(INTERRUPTED)
