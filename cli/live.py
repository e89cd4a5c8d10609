"""dsim live: a trace served in real time by the executor on a device, under the same policies as in the twin."""

import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..engine.errors import DsimError
from ..files.read import cut
from ..files.write import check_file, write_whole
from . import choices, options
from .bar import Bar, watch_runs
from .options import INTERRUPTED, option
from .screen import print_json

if TYPE_CHECKING:
    from ..planner.on_device import Answers
    from ..planner.scenario import Scenario
    from ..profiler.canvas import Opened
    from ..profiler.profile import Profile
    from ..traces import Trace


@options.of_scenario("profile", "frontend", "yields", "ensemble", "replicas", "router", "eos")
def live_command(
    trace: options.TraceName,
    model: Annotated[str, option("M", "tiny, tiny-both-ways, sdar-8b ..., or a model's directory.")] = "tiny",
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
    prompts: Annotated[
        str | None,
        option("FILE", "What requests ask: a text, .jsonl of token ids or conversations, or source|records (tiny)."),
    ] = None,
    device: Annotated[str | None, option("D", "cuda or cpu; the GPU where there is one.")] = None,
    graphs: options.Graphs = None,
    tp: Annotated[int, option("N", "Processes that share the model, on a GPU each (tensor parallel).", "--tp")] = 1,
    mask_token_id: options.MaskTokenId = None,
    block_length: options.BlockLength = None,
    tokenizer: options.Tokenizer = None,
    temperature: Annotated[float, option("T", "Draw tokens at this temperature; 0: the likeliest.")] = 0.0,
    top_p: options.TopP = 1.0,
    gumbel: Annotated[bool, typer.Option("--gumbel", help="Draw with Gumbel noise, as LLaDA does.")] = False,
    given: options.Given = options.NONE_GIVEN,
    eos: options.EndsAtEos = False,
    agreement: Annotated[
        bool, typer.Option("--agreement", help="Compare answers with the exact run's, and write scores (-o FILE.csv).")
    ] = False,
    out: Annotated[Path | None, option("DIR", "Write the run and report.html.", "-o", "--out")] = None,
    as_json: options.AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder.")] = False,
) -> None:
    """Serve a trace on this machine's device, in real time, and report what its clients saw.

    dsim live azure-conv --lengths fixed:64,64 --rate 2 --num-requests 60 --policy lmdeploy-bd32 -o runs/live
    """
    from ..planner.on_device import Answers, about_live, check_live, on_device
    from ..planner.record import FILES, record
    from ..planner.spread import beside_live
    from ..report.story import words
    from ..report.text import render

    specs, seed = options.different(policy or ["lmdeploy-bd32"]), given["seed"]
    first = options.scenario(given, specs, trace=trace, policy=specs[0], profile=profile or choices.PROFILE, eos=eos)
    scenarios = [replace(first, policy=spec) for spec in specs]
    for scenario in scenarios:
        scenario.parsed_policy()
    requests = first.requests()
    screen = Console(stderr=True, soft_wrap=True, highlight=False)
    options.warn(screen, first)
    from ..live.canvas_model import is_canvas  # imported here: they load PyTorch
    from ..live.config_file import Given
    from ..live.sampling import Sampling
    from ..profiler.canvas import open_any

    sampling = Sampling(temperature, top_p, gumbel, seed) if temperature else None
    if sampling is None and (gumbel or top_p != 1):
        raise DsimError(f"--temperature is {temperature:g}, and --top-p and --gumbel draw tokens: expected above 0")
    if sampling is not None and graphs:
        raise DsimError("--graphs captures steps that take the likeliest tokens, and --temperature draws them")
    if tp < 1:
        raise DsimError(f"--tp is {tp}, expected at least 1")
    if is_canvas(Path(model)) and sampling is not None:
        raise DsimError(
            f"{model}: its canvases are drawn by the checkpoint's own rule, and --temperature {temperature:g} is of "
            "decoders"
        )
    loaded = open_any(model, device, seed, graphs, Given(mask_token_id, block_length), tp)
    answers = Answers(tokenizer, sampling)
    requests = answers.conversations(loaded, prompts, requests)
    commits = commits or ("model" if loaded.trained else "twin")
    held = first.loaded_profile() if profile is not None else None
    if commits == "model" and prompts is None and model in ("tiny", "tiny-both-ways"):
        prompts = "records"
    if commits == "model" and prompts is None:
        raise DsimError(f"commits is model and no prompts are given: {model} has nothing to answer (--prompts FILE)")
    for scenario in scenarios:  # every mistake is told before the work begins
        check_live(scenario, loaded, held, commits)

    if agreement:
        if commits != "model" or prompts is None or sampling is not None:
            raise DsimError(f"--agreement is of the likeliest tokens of trained weights, and commits is {cut(commits)}")
        _agree(loaded, held, prompts, scenarios, requests, answers, out, force, as_json, screen)
        return

    serve = partial(on_device, loaded, held, commits, prompts, answers=answers)
    of_device = about_live(loaded, held, commits, prompts, answers)
    told: dict[str, Any] = {"command": options.command()}
    if out is not None:
        told |= {"spread": beside_live(scenarios, requests, held)}
    with Bar(screen, "live", "requests") as bar:
        watch = watch_runs(bar, len(specs), len(requests), "warming up")
        recorded = record(
            scenarios, requests, serve, out=out, force=force, about=lambda results: {**of_device(results), **told},
            watch=watch, keeps=True,
        )  # fmt: skip
    summaries, manifest = recorded.summaries, recorded.manifest
    if as_json:
        shown = {
            "policies": manifest["policies"], "live": manifest["live"], "commits": commits,
            "interrupted": recorded.interrupted,
        }  # fmt: skip
        print_json(shown)
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


def _agree(
    loaded: "Opened", held: "Profile | None", prompts: str, scenarios: "list[Scenario]", requests: "Trace",
    answers: "Answers", out: Path | None, force: bool, as_json: bool, screen: Console,
) -> None:  # fmt: skip
    """Serve the requests one after another under each policy, print the agreement, and write the table."""
    from ..planner.agreement import table
    from ..planner.on_device import agreement

    if out is not None:
        check_file(out, force=force)
    with Bar(screen, "agreement", "policies", len(scenarios) + 1) as bar:
        found = agreement(loaded, held, prompts, scenarios, requests, answers, bar.update)
    if out is not None:  # before a word is said: who listens may leave early
        write_whole(out, table(found, loaded.model.config.name, Path(prompts).stem))
    if as_json:
        print_json([asdict(agreed) for agreed, _ in found])
    else:
        for agreed, _ in found:
            print(agreed)
    if out is not None:
        screen.print(f"Wrote {out}", markup=False)
