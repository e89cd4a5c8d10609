"""dsim serve: an OpenAI-compatible server in front of the executor on a device, or of the twin in real time."""

import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..engine.errors import DsimError, MachineError
from . import choices, options
from .options import option
from .screen import Screen


def serve_command(
    model: Annotated[
        str | None, option("M", "Serve a model here: tiny, sdar-1.7b ... or a Hugging Face directory.")
    ] = None,
    twin: Annotated[str | None, option("PROFILE", "Serve the twin of this profile in real time instead.")] = None,
    policy: Annotated[
        str, option("SPEC", "name[:value][,field=value...] or a TOML file.", "--policy", values=options.policies)
    ] = "optimus",
    replicas: Annotated[int, option("N", "Replicas behind the router.", "--replicas")] = 1,
    router: options.Router = "round-robin",
    speed: Annotated[float, option("X", "The twin's: how much faster than real time.")] = 1.0,
    workload: options.Workload = None,
    profile: Annotated[
        str | None, option("P", "With --model: a profile of it, for --commits twin and elastic chunks.", "--profile")
    ] = None,
    commits: Annotated[str | None, option("C", "With --model: what decides what commits, model or twin.")] = None,
    device: Annotated[str | None, option("D", "With --model: cuda or cpu; the GPU where there is one.")] = None,
    graphs: options.Graphs = None,
    mask_token_id: options.MaskTokenId = None,
    block_length: options.BlockLength = None,
    eos: options.EndsAtEos = False,
    tokenizer: Annotated[
        str | None, option("DIR", "The twin's: count prompts by this tokenizer.json, not by bytes.")
    ] = None,
    emit: options.Emit = "block",
    host: Annotated[str, option("H", "The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, option("N", "The port; 0 takes a free one.")] = 8000,
    allow_host: Annotated[
        list[str] | None,
        option("NAME", "On 127.0.0.1: a name by which clients call this server, next to localhost.", "--allow-host"),
    ] = None,
    served_name: Annotated[str | None, option("NAME", "The model's name in the API.", "--served-name")] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="DSIM_API_KEY", help="Ask clients of /v1 for this key.")
    ] = None,
    max_waiting: Annotated[int, option("N", "Requests that may wait; beyond, 503 and Retry-After.")] = 256,
    max_requests: Annotated[
        int, option("N", "Requests in the server's life, which the journal has room for.")
    ] = 100_000,
    max_body: Annotated[int, option("BYTES", "The largest request.")] = 8 << 20,
    max_connections: Annotated[
        int | None, option("N", "Open connections; 4096, or fewer where the process may open fewer files.")
    ] = None,
    request_timeout: Annotated[float, option("S", "How long a client may take to send its request.")] = 30.0,
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
    if (model is None) == (twin is None):
        raise DsimError(f"--model is {model} and --twin is {twin}, expected one of them")
    if twin is not None and (eos or mask_token_id is not None or block_length is not None):
        raise DsimError(f"--twin is {twin}, and --eos, --mask-token-id and --block-length are of --model")
    if not 0 <= port < 1 << 16:
        raise DsimError(f"--port is {port}, expected 0 to 65535")
    if max_body < 1:
        raise DsimError(f"--max-body is {max_body} bytes, expected at least 1")
    if not 0 <= drain < float("inf"):
        raise DsimError(f"--drain is {drain} s, expected at least 0 and finite")
    if not 0 < request_timeout < float("inf"):
        raise DsimError(f"--request-timeout is {request_timeout} s, expected above 0 and finite")
    from ..profiler.profile import load as load_profile
    from ..report.run_folder import RunWriter
    from ..report.spread import no_spread
    from ..report.story import words
    from ..report.text import render
    from ..results.run import FILES
    from ..results.scenario import Scenario, named_code
    from ..results.slo import Slo
    from ..serve.app import Settings, application, known_hosts
    from ..serve.log import counted
    from ..serve.open import Bounds, open_live, open_twin
    from ..serve.protocol import ConnectionLimits
    from ..serve.server import Server, most_connections

    slos = [Slo.parse(text) for text in slo or []]
    for bound in slos:
        bound.check_class(set())
    scenario = Scenario(
        trace="", policy=policy, profile=twin or choices.PROFILE, workload=workload, replicas=replicas, router=router,
        emit=emit, seed=seed, eos=eos, allow_code=named_code([policy, router], allow_code or []),
    )  # fmt: skip
    bounds = Bounds(max_requests, max_waiting)
    limits = ConnectionLimits(most_connections(max_connections), request_timeout)
    screen = Screen()

    def log(line: str) -> None:
        screen.print(line, markup=False)

    with nullcontext() if out is None else RunWriter(out, force=force, room_for=max_requests) as writer, counted(log):
        append = None if writer is None else writer.steps(policy).append
        if twin is not None:
            behind = open_twin(scenario, bounds, speed=speed, tokenizer=tokenizer, append=append)
            options.warn_of_yields(screen, scenario)
        else:
            from ..live.config_file import Given  # imported here: they load PyTorch
            from ..profiler.canvas import open_any

            assert model is not None
            held = None if profile is None else load_profile(profile)
            loaded = open_any(model, device, seed, graphs, Given(mask_token_id, block_length))
            behind = open_live(loaded, scenario, bounds, profile=held, commits=commits, append=append)
        name = served_name or str(behind.manifest["live"]["model"])
        hosts = known_hosts(host, allow_host or [])
        settings = Settings(name, behind.header, max_body, api_key or None, request_timeout, hosts)
        server = Server(
            application(behind.fleet, behind.words, settings), host, port, drain, behind.fleet, limits,
            lambda url: print(f"Serving {name}: {behind.about}, on {url}", flush=True),
        )  # fmt: skip
        behind.start()
        try:
            with suppress(SystemExit):  # uvicorn's, where it cannot listen: its log says why
                server.run()
        finally:
            totals = behind.fleet.stop()
        summary = behind.summarize(totals, slos)
        manifest = behind.run_json(summary, slos)
        if writer is not None:
            writer.requests(policy, behind.columns())
            writer.finish({**manifest, "spread": no_spread("requests come as they come; `dsim replay` a trace")})
    render(words(manifest["policies"], manifest), Console(soft_wrap=not sys.stdout.isatty()))
    if behind.fleet.num_refused:
        screen.print(f"{behind.fleet.num_refused:,} requests were told to come again", style="yellow", markup=False)
    screen.wrote(out, FILES)
    for failure in (behind.fleet.failure, behind.fleet.journal_failure):
        if failure is not None:
            raise MachineError(str(failure))
    if not server.started:  # uvicorn's log says why
        raise typer.Exit(1)
