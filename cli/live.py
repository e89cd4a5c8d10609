"""dsim live: serve a trace in real time on a device, under the twin's policies."""

from dataclasses import replace
from typing import Annotated

import typer

from . import choices, options
from .bar import Bar, watch_runs
from .options import INTERRUPTED, option
from .screen import Screen, say


@options.of_scenario("profile", "frontend", "yields", "ensemble", "replicas", "router", "eos")
def live_command(
    trace: options.TraceName,
    model: Annotated[str | None, option("M", "tiny (the default), tiny-both-ways, or a model's directory.")] = None,
    random_weights: options.RandomWeights = None,
    policy: options.Policies = None,
    commits: Annotated[
        str | None,
        option(
            "C",
            "What decides which tokens commit: model (the weights), or twin (the profile's draws; for random weights).",
        ),
    ] = None,
    profile: Annotated[
        str | None, option("P", "A profile of this model, for --commits twin and elastic chunks.", "--profile")
    ] = None,
    prompts: Annotated[
        str | None,
        option("FILE", "The prompts: a text, a .jsonl of token ids, or source|records (tiny)."),
    ] = None,
    device: options.OnDevice = None,
    graphs: options.Graphs = None,
    mask_token_id: options.MaskTokenId = None,
    block_length: options.BlockLength = None,
    tokenizer: options.Tokenizer = None,
    temperature: options.Temperature = 0.0,
    given: options.Given = options.NONE_GIVEN,
    eos: options.EndsAtEos = False,
    out: options.RunOut = None,
    as_json: options.AsJson = False,
    force: options.Force = False,
) -> None:
    """Serve a trace on this machine's device, in real time, and report what its clients saw.

    dsim live azure-conv --lengths fixed:64,64 --rate 2 --num-requests 60 --policy lmdeploy-bd32 -o runs/live
    dsim live azure-conv --model ./SDAR-8B-Chat --policy optimus --profile mine.json
    """
    from ..device.live_run import live_run
    from ..report.story import words
    from ..results.manifest import FILES
    from ..results.scenario import different

    specs = different(policy or ["lmdeploy-bd32"])
    first = options.scenario(given, specs, trace=trace, policy=specs[0], profile=profile or choices.PROFILE, eos=eos)
    screen = Screen()
    scenarios = [replace(first, policy=spec) for spec in specs]
    run = live_run(
        scenarios, model=model, random_weights=random_weights,
        profiled=profile is not None, commits=commits,
        prompts=prompts, device=device, graphs=graphs, mask_token_id=mask_token_id, block_length=block_length,
        tokenizer=tokenizer, temperature=temperature,
        ready=lambda: options.warn(screen, *scenarios),
    )  # fmt: skip
    requests = run.requests
    with Bar(screen, "live", "requests") as bar:
        watch = watch_runs(bar, len(specs), len(requests), "warming up")
        recorded = run.serve(out, force=force, about={"command": options.command()}, watch=watch)
    manifest = recorded.manifest
    shown = {
        "policies": manifest["policies"], "live": manifest["live"], "commits": run.live.commits,
        "interrupted": recorded.interrupted,
    }  # fmt: skip
    say(lambda: words(manifest["policies"], manifest), shown, as_json)
    if recorded.interrupted:
        screen.alarm(f"Interrupted: {recorded.progress(specs, len(requests))}")
    screen.wrote(out, FILES)
    if recorded.failure is not None:
        raise recorded.failure
    if recorded.interrupted:
        raise typer.Exit(INTERRUPTED)
