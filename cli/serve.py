"""dsim serve: an OpenAI-compatible server for a model on a device, or for the twin in real time."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.errors import DsimError, MachineError
from . import choices, options
from .options import option
from .screen import Screen, say

if TYPE_CHECKING:
    from ..engine.journal import Append


def serve_command(
    model: Annotated[
        str | None, option("M", "Serve a model here: tiny, sdar-1.7b ... or a Hugging Face directory.")
    ] = None,
    random_weights: options.RandomWeights = None,
    twin: Annotated[str | None, option("PROFILE", "Serve the twin of this profile in real time instead.")] = None,
    policy: options.OnePolicy = "optimus",
    replicas: Annotated[int, option("N", "Replicas behind the router.", "--replicas")] = 1,
    router: options.Router = "round-robin",
    speed: Annotated[float, option("X", "With --twin: speed of time relative to the clock.")] = 1.0,
    metrics_as: Annotated[
        str | None,
        option("E", "Publish the metrics of vllm, sglang or lmdeploy, for any --policy.", "--metrics-as"),
    ] = None,
    workload: options.Workload = None,
    profile: Annotated[
        str | None, option("P", "With --model: its profile, for --commits twin and elastic chunks.", "--profile")
    ] = None,
    commits: Annotated[
        str | None, option("C", "With --model: what decides which tokens commit, model or twin.")
    ] = None,
    device: Annotated[
        str | None, option("D", "With --model: cuda or cpu; by default the GPU, if there is one.")
    ] = None,
    graphs: options.Graphs = None,
    mask_token_id: options.MaskTokenId = None,
    block_length: options.BlockLength = None,
    eos: options.EndsAtEos = False,
    tokenizer: Annotated[
        str | None, option("DIR", "With --twin: count prompts with this tokenizer.json instead of by bytes.")
    ] = None,
    emit: options.Emit = "block",
    access_log: Annotated[
        Path | None, option("FILE", "Write a JSON line per request, as a trace for `replay`.", "--access-log")
    ] = None,
    host: Annotated[str, option("H", "The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, option("N", "The port; 0 takes a free one.")] = 8000,
    allow_host: Annotated[
        list[str] | None,
        option("NAME", "On 127.0.0.1: a further host name of this server, in addition to localhost.", "--allow-host"),
    ] = None,
    served_name: Annotated[str | None, option("NAME", "The model's name in the API.", "--served-name")] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="DSIM_API_KEY", help="Require this key from clients of /v1.")
    ] = None,
    drain: Annotated[float, option("S", "How long requests in flight may take to end after Ctrl-C.")] = 60.0,
    slo: options.Slos = None,
    seed: options.Seed = 0,
    allow_code: options.AllowCode = None,
    out: Annotated[Path | None, option("DIR", "Write the journal and report.html at the end.", "-o", "--out")] = None,
    force: options.Force = False,
) -> None:
    """Serve an OpenAI-compatible API, block by block, until Ctrl-C.

    dsim serve --twin a100-sdar-8b --policy optimus --replicas 2 -o runs/served
    dsim serve --model tiny --policy lmdeploy-bd32
    """
    here = model or random_weights
    if (here is None) == (twin is None):
        raise DsimError(f"--model is {here} and --twin is {twin}, expected one of them")
    of_model = {
        "--profile": profile, "--commits": commits, "--device": device, "--graphs": graphs, "--eos": eos or None,
        "--mask-token-id": mask_token_id, "--block-length": block_length,
    }  # fmt: skip
    for name, value in of_model.items():
        if value is not None and twin is not None:
            raise DsimError(f"{name} is {value} and --twin is {twin}, expected --model with it")
    from ..report.story import words
    from ..results.manifest import FILES
    from ..results.scenario import Scenario, named_code
    from ..serve.open import Behind, open_live, open_twin
    from ..serve.serving import ServerOptions, serve_until_stopped

    server = ServerOptions(host, port, drain, allow_host or [], served_name, api_key, access_log)
    scenario = Scenario(
        trace="", policy=policy, profile=twin or choices.PROFILE, workload=workload, replicas=replicas, router=router,
        emit=emit, seed=seed, eos=eos, allow_code=named_code([policy, router], allow_code or []),
    )  # fmt: skip
    screen = Screen()

    def open_fleet(append: "Append | None") -> Behind:
        if twin is not None:
            _ = scenario.fleet()  # refused before a line is printed
            screen.print(f"Loading the twin of {twin}, {policy}")
            behind = open_twin(scenario, speed=speed, tokenizer=tokenizer, append=append, metrics_as=metrics_as)
            options.warn_of_yields(screen, scenario)
            return behind
        from ..live.config_file import named  # loads PyTorch
        from ..profiler.canvas import open_any
        from ..profiler.profile import load

        held = None if profile is None else load(profile)
        name, settings = named(model, random_weights, mask_token_id, block_length)
        loaded = open_any(name, device, seed, graphs, settings)
        return open_live(loaded, scenario, profile=held, commits=commits, append=append, metrics_as=metrics_as)

    served = serve_until_stopped(open_fleet, server, slo or [], policy, out, force)
    say(lambda: words(served.manifest["policies"], served.manifest), {}, False)
    if served.speed is not None:
        screen.print(f"Times are simulated: they passed {served.speed:.3g} times as fast as the clock")
    screen.wrote(out, FILES)
    if served.failure is not None:
        raise MachineError(str(served.failure))
    if not served.started:  # uvicorn's log says why
        raise typer.Exit(1)
