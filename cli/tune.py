"""dsim tune: the best settings for a trace, and how sure that is."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.errors import DsimError
from ..engine.policies import BASELINES
from . import choices, options
from .bar import Bar
from .options import INTERRUPTED, option
from .screen import Screen, say

if TYPE_CHECKING:
    from ..planner.memo import Memo
    from ..planner.tuned import Tuned
    from ..results.scenario import Scenario


@options.of_scenario()
def tune_command(
    trace: options.TraceName,
    objective: Annotated[
        list[str] | None,
        option("O", f"One of: {', '.join(choices.OBJECTIVES)}; repeat for a Pareto front.", "--objective"),
    ] = None,
    trials: Annotated[int, option("N", "Settings to try, those kept in the storage included.")] = 60,
    policy: Annotated[
        str | None,
        option(
            "SPEC",
            "The policy to beat: what you run today.  "
            f"[default: by the checkpoint's family {', '.join(BASELINES.values())}]",
        ),
    ] = None,
    space: Annotated[Path | None, option("FILE", "What may be moved, as TOML; see docs/tune.md.")] = None,
    storage: Annotated[
        Path | None, option("FILE", "Keep the replays here and go on from them; replays.db in the output by default.")
    ] = None,
    min_quality: Annotated[str | None, option("Q", "Least quality beside the full cache, such as 98%.")] = None,
    quality_table: Annotated[Path | None, option("CSV", "Your own scores, in place of the published ones.")] = None,
    allow_unknown_quality: Annotated[
        bool, typer.Option("--allow-unknown-quality", help="Move parameters whose quality nobody measured.")
    ] = False,
    gpu_hour: options.GpuHour = None,
    currency: options.Currency = "USD",
    latency_metric: Annotated[str, option("STAT:METRIC", "What the latency objective is.")] = choices.LATENCY_METRIC,
    train: Annotated[float, option("X", "Share of the trace, by time, that the search sees.")] = 0.6,
    replications: Annotated[int, option("N", "Replays of the rest that confirm the winners.")] = 10,
    sampler: Annotated[str, option("S", f"One of: {', '.join(choices.SAMPLERS)}.")] = "tpe",
    prune: Annotated[bool, typer.Option("--prune/--no-prune", help="Stop bad trials early.")] = True,
    jobs: Annotated[int, option("N", "Replays at once; the search depends on it.")] = 1,
    backend: options.Backend = "local",
    address: options.Address = None,
    given: options.Given = options.NONE_GIVEN,
    out: Annotated[Path | None, option("DIR", "Write policy.toml, the trials and report.html.", "-o", "--out")] = None,
    as_json: options.AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder, its trials included.")] = False,
) -> None:
    """Search for the policy that serves a trace best, and confirm it on traffic that the search never saw.

    dsim tune azure-conv --replicas 2 --slo ttft=2s --slo norm_latency=30ms -o runs/tuned
    dsim tune mine.jsonl --policy lmdeploy-bd32 --space space.toml --trials 200 --jobs 4
    """
    from ..planner.ensemble import check_num, of_objective
    from ..planner.objective import parse_latency, split
    from ..planner.quality import load_table, parse_share
    from ..planner.record import profile_notes
    from ..planner.space import candidate_of, load_space, searchable
    from ..planner.spread import moved_by_spread
    from ..planner.tune import tune
    from ..planner.tune_folder import TuneFolder
    from ..profiler.placed import placed
    from ..report.tune import tune_page
    from ..results.scenario import Scenario, asked, replicas_of

    replicas, ensemble = replicas_of([policy or ""], given["replicas"]), given["ensemble"]
    if ensemble is not None:
        check_num(ensemble)
    spec, own = placed(policy or "")
    if own is not None:
        raise DsimError(f"--policy is {policy}, and a search has one profile: expected --policy {spec} --profile {own}")
    named = [] if policy is None else [policy]
    scenario = options.scenario(given, named, trace=trace, policy=Scenario.policy, replicas=replicas)
    check = searchable(scenario.loaded_profile(), scenario.workload)
    declared = None if space is None else load_space(space, check, scenario.allow_code)
    table = None if quality_table is None else load_table(quality_table, scenario.allow_code)
    folder = TuneFolder(out, force=force, storage=storage)
    screen = Screen()
    bar = Bar(screen, "searching", note="starting")
    try:
        with folder, bar:

            def show(doing: str, done: int, of: int, best: str) -> None:
                if done:
                    folder.settle()
                bar.update(done, of, doing, best)

            tuned = tune(
                scenario,
                objectives=objective or ["goodput"],
                space=declared,
                trials=trials,
                default=None if policy is None else candidate_of(policy, replicas, scenario.allow_code),
                memo=folder.memo,
                min_quality=None if min_quality is None else parse_share(min_quality),
                quality_table=table,
                allow_unknown_quality=allow_unknown_quality,
                gpu_hour=gpu_hour,
                latency_metric=latency_metric,
                train=train,
                replications=replications,
                sampler=sampler,
                prune=prune,
                jobs=jobs,
                backend=backend,
                address=address,
                progress=show,
                begin=partial(folder.begin, "search"),
            )
            told = options.command({"--backend": 1, "--address": 1})
            info = {**tuned.to_json(), **asked(scenario, told, gpu_hour, currency)}
            used = scenario.requests()
            info["traffic"] += f"; used: {len(used):,}, at {used.rate:.3g} req/s"
            if ensemble is not None:
                judged = of_objective(next(iter(tuned.objectives)), parse_latency(latency_metric))
                info["ensemble"] = _ensemble(scenario, tuned, judged, ensemble, jobs, bar, folder.memo)
            compared = _recommended_first(scenario, tuned)
            info["notes"] += profile_notes(compared)
            if out is not None:
                with suppress(KeyboardInterrupt):  # the search is over, and its result is written all the same
                    held_out = split(used, train)[1]
                    told_of = " of the part that the search did not see"
                    if (moved := moved_by_spread(compared, held_out, memo=folder.memo)) is not None:
                        info["spread"] = moved | ({} if "none" in moved else {"which": told_of})
            page = tune_page(info, tuned.trials)
            folder.settle()
            written = folder.write(tuned, info, page)
    except KeyboardInterrupt:
        store = folder.memo.path
        where = f"the replays are kept in {store}: the same command goes on from them" if store else "nothing was kept"
        screen.alarm(f"Interrupted: {where}")
        raise typer.Exit(INTERRUPTED) from None
    say(lambda: page, info, as_json)
    screen.explain(folder.memo.sentence())
    options.warn_of_yields(screen, *compared)
    screen.wrote(out, written)


def _ensemble(
    scenario: "Scenario", tuned: "Tuned", judged: tuple[str, bool], num: int, jobs: int, bar: Bar,
    memo: "Memo",
) -> dict[str, Any]:  # fmt: skip
    """Whether what is recommended, winner or default, stays ahead of the other under drawn profiles, on all the trace.

    judged: the metric that the first objective is, and whether more of it is better.
    """
    from ..planner.ensemble import ensemble

    found = ensemble(
        _recommended_first(scenario, tuned), scenario.requests(), num, judged=judged, recommended=True, jobs=jobs,
        memo=memo,
        progress=lambda done, of: bar.update(done, of, "asking drawn profiles", ""),
    )  # fmt: skip
    return found.to_json()


def _recommended_first(scenario: "Scenario", tuned: "Tuned") -> "list[Scenario]":
    """Winner and default, the recommended one first; the default alone where it won."""
    ahead = dict.fromkeys((tuned.recommended, tuned.winner.candidate, tuned.default.candidate))
    return [replace(scenario, policy=c.spec, replicas=c.replicas) for c in ahead]
