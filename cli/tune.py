"""dsim tune: find the best settings for a trace, and how certain that is."""

from pathlib import Path
from typing import Annotated

import typer

from ..engine.policies import BASELINES
from . import choices, options
from .bar import Bar
from .options import INTERRUPTED, option
from .screen import Screen, say


@options.of_scenario()
def tune_command(
    trace: options.TraceName,
    objective: Annotated[
        list[str] | None,
        option("O", f"One of: {', '.join(choices.OBJECTIVES)}; repeat for a Pareto front.", "--objective"),
    ] = None,
    trials: Annotated[int, option("N", "Settings to try, including those of the folder.")] = 60,
    policy: Annotated[
        str | None,
        option(
            "SPEC",
            "The policy to beat: your current one.  "
            f"[default: by the checkpoint's family {', '.join(BASELINES.values())}]",
        ),
    ] = None,
    space: Annotated[Path | None, option("FILE", "The settings to vary, as TOML (docs/tune.md).")] = None,
    min_quality: options.MinQuality = None,
    quality_table: options.QualityTable = None,
    gpu_hour: options.GpuHour = None,
    currency: options.Currency = "USD",
    jobs: Annotated[int, option("N", "Replays at once; affects the search's result.")] = 1,
    backend: options.Backend = "local",
    address: options.Address = None,
    given: options.Given = options.NONE_GIVEN,
    pool: options.Pools = None,
    link: options.Links = None,
    decider: options.Decider = "always",
    fleet: options.FleetFile = None,
    gpus: Annotated[
        int | None, option("N", "GPUs that the pools may have together; by default their current number.")
    ] = None,
    out: Annotated[
        Path | None, option("DIR", "Write policy.toml or fleet.toml, the trials and report.html.", "-o", "--out")
    ] = None,
    as_json: options.AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder, including its trials.")] = False,
) -> None:
    """Search for the settings that serve a trace best, and confirm them on traffic that the search did not use.

    dsim tune azure-conv --replicas 2 --slo ttft=2s --slo norm_latency=30ms -o runs/tuned
    dsim tune mine.jsonl --policy lmdeploy-bd32 --space space.toml --trials 200 --jobs 4
    dsim tune azure-conv --rate 9 --fleet examples/fleet/fleet.toml --slo ttft=2s -o runs/tuned
    """
    from ..planner.tune_folder import TUNE, TuneFolder
    from ..planner.tune_run import Options, question_of, write_tune
    from ..results.fleet_file import FleetWords
    from ..results.scenario import Scenario, on_fleet, replicas_of

    asked = Options(
        policy, space, objective or ["goodput"], trials, min_quality, quality_table, gpu_hour, jobs,
        given["ensemble"], gpus,
    )  # fmt: skip
    words = FleetWords(tuple(pool or ()), tuple(link or ()), given["router"], decider).or_file(fleet)
    options.check_pools(words.pools, None if policy is None else [policy], given)
    replicas = replicas_of([policy or ""], given["replicas"])
    named = [] if policy is None else [policy]
    scenario = options.scenario(given, named, trace=trace, policy=Scenario.policy, replicas=replicas)
    [scenario] = on_fleet([scenario], words, named=fleet is None, searched=True)
    question = question_of(scenario, asked)
    folder = TuneFolder(out, TUNE, force=force)
    screen = Screen()
    options.warn(screen, scenario)
    try:
        with folder, Bar(screen, "searching", note="starting") as bar:
            compared, info, page, written = write_tune(
                question, folder, options.command({"--backend": 1, "--address": 1}), currency=currency,
                run=options.words_of(given, "ensemble", "replicas", *(("router",) if words.pools else ())),
                backend=backend, address=address,
                progress=lambda doing, done, of, best: bar.update(done, of, doing, best),
            )  # fmt: skip
    except KeyboardInterrupt:
        store = folder.memo.path
        where = f"the replays are kept in {store}: the same command continues" if store else "nothing was kept"
        screen.alarm(f"Interrupted: {where}")
        raise typer.Exit(INTERRUPTED) from None
    say(lambda: page, info, as_json)
    screen.explain(folder.memo.sentence())
    options.warn_of_yields(screen, *compared)
    screen.wrote(out, written)
