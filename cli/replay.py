"""dsim replay: a trace through the twin, with one or several policies side by side."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from . import choices, options
from .bar import Bar, watch_runs
from .options import INTERRUPTED, option
from .screen import Screen, say


@options.of_scenario()
def replay(
    context: typer.Context,
    trace: options.TraceName,
    policy: options.Policies = None,
    as_logged: Annotated[
        bool,
        typer.Option(
            "--as-logged", help="TRACE is a step log: replay its requests under the policy and settings that it names."
        ),
    ] = False,
    given: options.Given = options.NONE_GIVEN,
    pool: options.Pools = None,
    link: options.Links = None,
    decider: options.Decider = "always",
    fleet: options.FleetFile = None,
    scaler: options.Scaler = choices.FIXED,
    startup: options.Startup = "0",
    concurrency: Annotated[int | None, option("N", "Closed loop: N requests in flight, the trace as a queue.")] = None,
    sessions: Annotated[
        bool, typer.Option("--sessions", help="Send a session's turn only after the previous turn has ended.")
    ] = False,
    drain: Annotated[
        bool,
        typer.Option(
            "--drain/--no-drain",
            help="Serve the requests in flight after the last arrival, or count them as unfinished.",
        ),
    ] = True,
    jobs: Annotated[
        int | None,
        option("N", "Replays of --ensemble at once, threads of a replay; by default all cores, on Ray all its CPUs."),
    ] = None,
    backend: options.Backend = "local",
    address: options.Address = None,
    gpu_hour: options.GpuHour = None,
    currency: options.Currency = "USD",
    out: options.RunOut = None,
    fails_on_slo: options.FailOnSlo = False,
    as_json: options.AsJson = False,
    force: options.Force = False,
) -> None:
    """Replay a trace through the twin and report what its clients would have seen.

    dsim replay azure-conv --replicas 2 --policy lmdeploy-bd32 --policy optimus --slo ttft=5s -o runs/azure
    dsim replay mooncake-conv --policy ar --rate 4 --num-requests 500 --json
    """
    from ..planner.grid import check_together
    from ..planner.replay_run import check_place, fleet_cost, write_replay
    from ..report.story import words
    from ..results.fleet_file import FleetWords
    from ..results.manifest import FILES
    from ..results.scenario import different, on_fleet, replicas_of

    known: dict[str, Any] = {"command": options.command(options.SPEED)}
    screen = Screen()
    named = policy or []  # without the log's policy
    if as_logged:
        from .as_logged import as_logged as read_as_logged

        logged = read_as_logged(context, trace, policy, given["profile"])
        policy, given = logged.policies, {**given, "profile": logged.profile, "frontend": 0.0}
        known |= logged.about
        for line in logged.lines:
            screen.print(line)
    specs, ensemble = different(policy or ["optimus"]), given["ensemble"]
    check_place(ensemble, jobs, backend, address)
    of_fleet = FleetWords(
        tuple(pool or ()), tuple(link or ()), given["router"], decider, scaler, startup,
    ).or_file(fleet)  # fmt: skip
    options.check_pools(of_fleet.pools, policy, given)
    first = options.scenario(
        given, named, trace=trace, policy=specs[0], replicas=replicas_of(specs, given["replicas"]),
        concurrency=concurrency, sessions=sessions, drain=drain,
    )  # fmt: skip
    check_together(first)
    scenarios = on_fleet([replace(first, policy=spec) for spec in specs], of_fleet, named=fleet is None)
    first = scenarios[0]
    requests = first.requests()
    options.warn(screen, *scenarios)
    options.warn_of_yields(screen, *scenarios)
    if gpu_hour is not None:
        known["cost"] = fleet_cost(scenarios, gpu_hour, currency)
    if ensemble is not None:
        from ..planner.backend import Pool
        from ..planner.ensemble import check_num  # loads SciPy
        from ..planner.ensemble import ensemble as run_ensemble

        check_num(ensemble, scenarios)
        with Bar(screen, "ensemble", "replays", note="starting") as bar, Pool(backend, jobs, address) as replays:
            drawn = run_ensemble(scenarios, requests, ensemble, pool=replays, progress=bar.update)
        known["ensemble"] = drawn.to_json()
    with Bar(screen, "replay", "requests") as bar:
        watch = watch_runs(bar, len(specs), len(requests), "starting", " simulated")
        recorded = write_replay(scenarios, requests, known, out=out, force=force, jobs=jobs, watch=watch)
    manifest = recorded.manifest
    shown = {"policies": manifest["policies"], "profile": manifest["profile"], "interrupted": recorded.interrupted}
    shown |= {name: manifest[name] for name in ("measured", "ensemble", "cost") if name in manifest}
    say(lambda: words(manifest["policies"], manifest), shown, as_json)
    if recorded.interrupted:
        screen.alarm(f"Interrupted: {recorded.progress(specs, len(requests))}")
    screen.wrote(out, FILES)
    if recorded.interrupted:
        raise typer.Exit(INTERRUPTED)
    if fails_on_slo:
        options.fail_on_slo(screen, manifest["policies"])
