"""dsim validate: profile, replay, live and compare over policies and loads, in one go."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..engine.errors import DsimError
from ..files.place import hold_folder
from ..files.write import write_whole
from . import choices, options
from .bar import Bar
from .duration import seconds_of, words_of
from .model import canvas_policies
from .options import option
from .screen import json_text, print_json

if TYPE_CHECKING:
    from ..profiler.profile import Profile
    from ..sim.twin import Progress

MISSED = 1
PILOT_SHARE, PROFILE_SHARE = 0.05, 0.4  # of the budget, where the profile is not given
CELLS_SHARE = 0.75  # of the rest: a cell's requests go on being served after the last has come
ENOUGH = 30  # requests in a cell


def validate_command(
    out: Annotated[
        Path, option("DIR", "Every cell's runs, the profile and the comparison; a second call goes on.", "-o", "--out")
    ],
    model: Annotated[str, option("M", "tiny, sdar-1.7b, sdar-4b, sdar-8b, or a Hugging Face directory.")] = "tiny",
    device: Annotated[str | None, option("D", "cuda or cpu; the GPU where there is one.")] = None,
    graphs: options.Graphs = None,
    mask_token_id: options.MaskTokenId = None,
    block_length: options.BlockLength = None,
    tokenizer: options.Tokenizer = None,
    temperature: Annotated[float, option("T", "Draw tokens at this temperature; 0: the likeliest.")] = 0.0,
    top_p: options.TopP = 1.0,
    eos: options.EndsAtEos = False,
    budget: Annotated[str, option("T", "About how long it may take: 90s, 20m, 1h.")] = "20m",
    profile: Annotated[
        str | None, option("P", "A measured profile of the model; by default one is measured.", "--profile")
    ] = None,
    yields: Annotated[
        str | None, option("P", "A profile whose commit models are drawn from: for random weights.", "--yields")
    ] = None,
    policy: Annotated[
        list[str] | None,
        option("SPEC", f"A policy; repeat. By default {', '.join(choices.VALIDATE_POLICIES)}.", "--policy"),
    ] = None,
    load_: Annotated[
        list[float] | None,
        option(
            "X",
            f"Share of the least predicted capacity; repeat. By default {', '.join(map(str, choices.VALIDATE_LOADS))}.",
            "--load",
        ),
    ] = None,
    seconds: Annotated[
        float | None, option("S", "How long each cell's requests arrive; by default what the budget allows.")
    ] = None,
    trace: Annotated[
        str, option("TRACE", "Whose lengths the requests have; never one that was profiled on.")
    ] = "azure-conv",
    columns: options.Columns = None,
    lengths: options.Lengths = None,
    commits: Annotated[str, option("C", "twin: the profile's draws; model: the weights decide.")] = "twin",
    workload: options.Workload = None,
    prompts: Annotated[str | None, option("FILE", "What requests ask, for --commits model.")] = None,
    seed: options.Seed = 1,
    allow_code: options.AllowCode = None,
    bound: Annotated[
        list[str] | None, option("BOUND", "\\[stat:]metric=percent: e2el=3%; exit 1 when missed; repeat.", "--bound")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Say how far the twin is from this device: measure, predict, serve, compare.

    dsim validate --model tiny --budget 10m --lengths lognormal:96,48,64,32 -o runs/validation
    """
    from ..engine.policy import parse
    from ..planner.scenario import Scenario, named_code
    from ..planner.validate import LOADS, POLICIES, least_time, validate
    from ..profiler.profile import load, save
    from ..report.compare import files as compare_files
    from ..report.compare.bounds import Bound
    from ..report.compare.page import spoken
    from ..report.text import render

    begin = time.monotonic()
    total = seconds_of(budget)
    bounds = [Bound.parse(text) for text in bound or []]
    policies, loads = policy or list(POLICIES), load_ or list(LOADS)
    for share in loads:
        if not 0 < share < 1:
            raise DsimError(f"--load is {share:g}, expected between 0 and 1")
    code = named_code(policies, allow_code or [])
    kinds = {spec: parse(spec, code).full_sequence for spec in policies}
    if len(set(kinds.values())) > 1:
        both = [next(spec for spec, full in kinds.items() if full == kind) for kind in (True, False)]
        raise DsimError(
            f"{both[0]} is for a full-sequence model and {both[1]} for block diffusion: expected policies of one kind"
        )
    full_sequence = all(kinds.values())
    from ..live.config_file import Given  # imported here, as below: they load PyTorch
    from ..live.sampling import Sampling
    from ..planner.on_device import Answers, check_eos
    from ..profiler.canvas import LoadedCanvas, open_any
    from ..profiler.measure import default_workloads, profile_model
    from ..profiler.measure_canvas import profile_canvas

    if not temperature and top_p != 1:
        raise DsimError(f"--temperature is {temperature:g}, and --top-p draws tokens: expected above 0")
    answers = Answers(tokenizer, Sampling(temperature, top_p, seed=seed) if temperature else None)
    loaded = open_any(model, device, 0, graphs, Given(mask_token_id, block_length))
    if isinstance(loaded, LoadedCanvas):
        if temperature or yields:
            asked = f"--yields is {yields}" if yields else f"--temperature is {temperature:g}"
            raise DsimError(f"{model}: its canvases go by the checkpoint's own rule, and {asked}: expected none")
        policies = policy or canvas_policies(loaded.model.config.canvas_length)
    if eos:
        for spec in policies:
            check_eos(parse(spec, code), loaded.model.config, commits)
    screen = Console(stderr=True, soft_wrap=True, highlight=False)
    file = out / "profile.json" if profile is None else Path(profile)
    given = profile is not None or file.is_file()
    num_runs = len(policies) * (len(loads) + 1)  # the middle load's twice
    base = Scenario(
        trace=trace, policy=policies[0], profile=str(file), workload=workload, lengths=lengths, num_requests=200,
        columns=columns, seed=seed, eos=eos, allow_code=code,
    )  # fmt: skip
    with Bar(screen, "validate", "s", round(total)) as bar:

        def told(what: str) -> None:
            bar.update(min(round(time.monotonic() - begin), round(total)), note=what)

        by_confidence = [
            policy.unmasking.threshold
            for policy in (parse(spec, code) for spec in policies)
            if not policy.autoregressive and policy.unmasking.strategy == "low_confidence_dynamic"
        ]
        thresholds = sorted(set(by_confidence)) or [0.9]

        def measure(within: float) -> "Profile":
            said: Any = {
                "name": f"{out.name}-profile", "budget": within, "tokenizer": tokenizer,
                "on_progress": lambda what, _: told(f"profile: {what}"),
            }  # fmt: skip
            if isinstance(loaded, LoadedCanvas):
                workloads = {} if prompts is None else {Path(prompts).stem: prompts}
                return profile_canvas(loaded, workloads=workloads, **said)[0]
            made, _ = profile_model(
                loaded,
                workloads={} if full_sequence else default_workloads(loaded, prompts),
                thresholds=thresholds,
                yields=load(yields).commits if yields else (),
                full_sequence=full_sequence,
                eos=eos,
                **said,
            )
            return made

        if seconds is None and not (out / "cells").is_dir():
            # Of what the cells take, a pilot says enough to refuse a budget before most of it is spent.
            with TemporaryDirectory() as folder:
                pilot = file if given else Path(folder) / file.name
                if not given:
                    save(measure(PILOT_SHARE * total), pilot)
                cells = least_time(replace(base, profile=str(pilot)), policies, loads)
            least = cells / (CELLS_SHARE * (1 if given else 1 - PROFILE_SHARE - PILOT_SHARE))
            if total < least:
                raise DsimError(
                    f"--budget is {words_of(total)}, expected at least {words_of(math.ceil(least))} for {num_runs} "
                    f"runs of {', '.join(policies)}: give more, or fewer --policy and --load"
                )
        lock = hold_folder(out)  # what is refused has left nothing
        if not given:
            save(measure(PROFILE_SHARE * total), file)
        held = load(str(file))
        if seconds is None:
            seconds = CELLS_SHARE * (total - (time.monotonic() - begin)) / num_runs

        @contextmanager
        def watch(name: str) -> Iterator["Progress"]:
            told(f"{name}: warming up")
            yield lambda ended, now: told(f"{name}: {ended} requests, {now:,.1f} s")

        found = validate(
            out / "cells", base, loaded, held, policies=policies, loads=loads, seconds=seconds, commits=commits,
            prompts=prompts, answers=answers, bounds=bounds, more=lambda: time.monotonic() - begin < total, watch=watch,
        )  # fmt: skip
    fewest = min(cell.num_requests for cell in found.cells)
    if fewest < ENOUGH:
        screen.print(
            f"Warning: {fewest} requests in a cell show little, expected {ENOUGH} or more: give a longer --budget or "
            "--seconds, or fewer policies and loads",
            style="yellow", markup=False,
        )  # fmt: skip
    write_whole(out / "validation.json", json_text(found.to_json(), indent=1) + "\n")
    compare_files.write(out / "comparison", found.comparison, found.pairs, force=True, command=options.command())
    lock.close()
    if as_json:
        print_json(found.to_json())
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
