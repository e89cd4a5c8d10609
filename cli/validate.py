"""dsim validate: profile, replay, serve and compare over policies and loads, in one run."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from ..files.duration import seconds_of
from . import choices, options
from .bar import Bar
from .options import option
from .screen import Screen, say, show


def validate_command(
    out: Annotated[
        Path,
        option("DIR", "Folder of all runs, the profile and the comparison; a second call continues.", "-o", "--out"),
    ],
    model: Annotated[str | None, option("M", "tiny (the default), or a Hugging Face directory.")] = None,
    random_weights: options.RandomWeights = None,
    device: options.OnDevice = None,
    graphs: options.Graphs = None,
    mask_token_id: options.MaskTokenId = None,
    block_length: options.BlockLength = None,
    tokenizer: options.Tokenizer = None,
    temperature: options.Temperature = 0.0,
    eos: options.EndsAtEos = False,
    budget: Annotated[str, option("T", "About how long it may take: 90s, 20m, 1h.")] = "20m",
    profile: Annotated[
        str | None, option("P", "A measured profile of the model; by default it is measured now.", "--profile")
    ] = None,
    yields: Annotated[
        str | None,
        option("P", "A profile that provides the commit models and importance deltas, for random weights.", "--yields"),
    ] = None,
    policy: Annotated[
        list[str] | None,
        option("SPEC", f"A policy; repeat. By default {', '.join(choices.VALIDATE_POLICIES)}.", "--policy"),
    ] = None,
    load_: Annotated[
        list[str] | None,
        option(
            "X",
            "Requests in flight, full (the largest batch), or a share (below 1) of the policy's predicted capacity; "
            f"repeat, the most important first. By default {', '.join(choices.VALIDATE_LOADS)}.",
            "--load",
        ),
    ] = None,
    seconds: Annotated[
        float | None, option("S", "More time of each cell than 30 requests take; by default from the budget.")
    ] = None,
    trace: Annotated[
        # Named: Typer 0.27 would call it --TRACE, like its value.
        str, option("TRACE", "Trace with the requests' lengths; not one used for profiling.", "--trace")
    ] = "azure-conv",
    columns: options.Columns = None,
    lengths: options.Lengths = None,
    commits: Annotated[str, option("C", "twin: the profile's draws; model: the weights decide.")] = "twin",
    workload: options.Workload = None,
    prompts: Annotated[str | None, option("FILE", "The prompts, for --commits model.")] = None,
    seed: options.Seed = 1,
    allow_code: options.AllowCode = None,
    bound: Annotated[
        list[str] | None, option("BOUND", "[stat:]metric=percent: e2el=3%; exit 1 when missed; repeat.", "--bound")
    ] = None,
    backend: options.Backend = "local",
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure how far the twin is from this device: profile, predict, serve, compare.

    dsim validate --model tiny --budget 10m --lengths lognormal:96,48,64,32 -o runs/validation
    dsim validate --model ./SDAR-8B-Chat --policy optimus --bound e2el=3% -o runs/validation
    """
    from ..api.validation import validate
    from ..device.validate import FEWEST_OF_TTFT

    total = seconds_of(budget)
    screen = Screen()
    with ExitStack() as stack:
        bar = Bar(screen, "validate", "s", round(total))
        found = validate(
            out, budget=total, model=model, random_weights=random_weights,
            device=device, graphs=graphs, mask_token_id=mask_token_id,
            block_length=block_length, tokenizer=tokenizer, temperature=temperature, eos=eos,
            profile=profile, yields=yields, policies=policy or [], loads=load_ or [], seconds=seconds, trace=trace,
            columns=columns, lengths=lengths, commits=commits, workload=workload, prompts=prompts, seed=seed,
            allow_code=allow_code or [], bounds=bound or [], backend=backend, address=address,
            _command=options.command(options.SPEED),
            _ready=lambda: stack.enter_context(bar),
            _progress=lambda elapsed, phase, left: bar.update(min(round(elapsed), round(total)), note=phase, left=left),
        )  # fmt: skip
    say(found.page, found.to_json(), as_json)
    if not as_json:
        show(*found.noise_lines())
    if "ttft" in str(bound):
        screen.print(f"At least {FEWEST_OF_TTFT} requests a cell, as ttft is bounded")
    if found.left:
        screen.print(f"Left out for the budget: {', '.join(found.left)}", style="yellow")
    screen.wrote(out, ("profile.json", "cells/", "comparison/", "validation.json"))
    options.exit_if_any(screen, [str(judged) for judged in found.comparison.bounds if not judged.met])
