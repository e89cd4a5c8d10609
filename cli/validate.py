"""dsim validate: profile, replay, live and compare over policies and loads, in one go."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..engine.errors import DsimError
from ..engine.policy import parse
from ..planner.scenario import Scenario
from ..planner.validate import LOADS, POLICIES, validate
from ..profiler.profile import load, save
from ..report.compare import files as compare_files
from ..report.compare.bounds import Bound
from ..report.compare.page import spoken
from ..report.text import render
from ..sim.twin import Progress
from . import options
from .bar import Bar
from .duration import seconds_of
from .options import option

MISSED = 1
PROFILE_SHARE = 0.4  # of the budget, where the profile is not given


def validate_command(
    out: Annotated[
        Path, option("DIR", "Every cell's runs, the profile and the comparison; a second call goes on.", "-o", "--out")
    ],
    model: Annotated[str, option("M", "tiny, sdar-1.7b, sdar-4b, sdar-8b, or a Hugging Face directory.")] = "tiny",
    device: Annotated[str | None, option("D", "cuda or cpu; the GPU where there is one.")] = None,
    graphs: Annotated[bool, typer.Option("--graphs", help="Capture decode steps as CUDA graphs.")] = False,
    budget: Annotated[str, option("T", "About how long it may take: 90s, 20m, 1h.")] = "20m",
    profile: Annotated[
        str | None, option("P", "A measured profile of the model; by default one is measured.", "--profile")
    ] = None,
    yields: Annotated[
        str | None, option("P", "A profile whose commit models are drawn from: for random weights.", "--yields")
    ] = None,
    policy: Annotated[
        list[str] | None, option("SPEC", f"A policy; repeat. By default {', '.join(POLICIES)}.", "--policy")
    ] = None,
    load_: Annotated[
        list[float] | None,
        option(
            "X", f"Share of the least predicted capacity; repeat. By default {', '.join(map(str, LOADS))}.", "--load"
        ),
    ] = None,
    seconds: Annotated[
        float | None, option("S", "How long each cell's requests arrive; by default what the budget allows.")
    ] = None,
    trace: Annotated[
        str, option("TRACE", "Whose lengths the requests have; never one that was profiled on.")
    ] = "azure-conv",
    lengths: options.Lengths = None,
    commits: Annotated[str, option("C", "twin: the profile's draws; model: the weights decide.")] = "twin",
    workload: options.Workload = None,
    prompts: Annotated[str | None, option("FILE", "What requests ask, for --commits model.")] = None,
    seed: options.Seed = 1,
    bound: Annotated[
        list[str] | None, option("BOUND", "\\[stat:]metric=percent: e2el=3%; exit 1 when missed; repeat.", "--bound")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Say how far the twin is from this device: measure, predict, serve, compare.

    dsim validate --model tiny --budget 10m --lengths lognormal:96,48,64,32 -o runs/validation
    """
    begin = time.monotonic()
    total = seconds_of(budget)
    bounds = [Bound.parse(text) for text in bound or []]
    policies, loads = policy or list(POLICIES), load_ or list(LOADS)
    for share in loads:
        if not 0 < share < 1:
            raise DsimError(f"--load is {share:g}, expected between 0 and 1")
    kinds = {spec: parse(spec).full_sequence for spec in policies}
    if len(set(kinds.values())) > 1:
        both = [next(spec for spec, full in kinds.items() if full == kind) for kind in (True, False)]
        raise DsimError(
            f"{both[0]} is for a full-sequence model and {both[1]} for block diffusion: expected policies of one kind"
        )
    full_sequence = all(kinds.values())
    from ..profiler.measure import default_workloads, open_model, profile_model  # imported here: it loads PyTorch

    loaded = open_model(model, device, 0, graphs)
    screen = Console(stderr=True, soft_wrap=True, highlight=False)
    file = out / "profile.json" if profile is None else Path(profile)
    if profile is None and not file.is_file():
        out.mkdir(parents=True, exist_ok=True)
        with Bar(screen, "profile", "s", round(PROFILE_SHARE * total)) as bar:
            made, _ = profile_model(
                loaded,
                name=f"{out.name}-profile",
                budget=PROFILE_SHARE * total,
                workloads={} if full_sequence else default_workloads(loaded, prompts),
                thresholds=(0.9,),
                yields=load(yields).commits if yields else (),
                full_sequence=full_sequence,
                told=lambda what, share: bar.update(round(share * PROFILE_SHARE * total), note=what),
            )
        save(made, file)
    held = load(str(file))
    if seconds is None:
        # A cell's requests take a while to be served after the last has come, and the middle load runs twice.
        num_runs = len(policies) * (len(loads) + 1)
        seconds = max(2.0, 0.75 * (total - (time.monotonic() - begin)) / num_runs)
    base = Scenario(
        trace=trace, policy=policies[0], profile=str(file), workload=workload, lengths=lengths, num_requests=200,
        seed=seed,
    )  # fmt: skip

    @contextmanager
    def watch(name: str) -> Iterator[Progress | None]:
        with Bar(screen, name, "requests") as bar:
            yield partial(_show, bar) if screen.is_terminal else None

    found = validate(
        out / "cells", base, loaded, held, policies=policies, loads=loads, seconds=seconds, commits=commits,
        prompts=prompts, bounds=bounds, more=lambda: time.monotonic() - begin < total, watch=watch,
    )  # fmt: skip
    (out / "validation.json").write_text(json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n")
    compare_files.write(out / "comparison", found.comparison, found.pairs, force=True, command=options.command())
    if as_json:
        print(json.dumps(found.to_json(), allow_nan=False))
    else:
        console = Console(soft_wrap=not sys.stdout.isatty())
        render(spoken(found.comparison), console)
        for line in found.noise_lines():
            console.print(line, markup=False)
    if found.left:
        screen.print(f"Left out, the budget was spent: {', '.join(found.left)}", style="yellow", markup=False)
    screen.print(f"Wrote {out}/ (profile.json, cells/, comparison/, validation.json)", markup=False)
    missed = [judged for judged in found.comparison.bounds if not judged.met]
    for judged in missed:
        screen.print(str(judged), style="bold red", markup=False)
    if missed:
        raise typer.Exit(MISSED)


def _show(bar: Bar, ended: int, now: float) -> None:
    """So many requests have ended at this time."""
    bar.update(ended, note=f"{now:,.1f} s")
