"""dsim plan: which policy, on which GPUs, how many, at what cost; one ranked answer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.errors import DsimError
from . import choices, options
from .bar import Bar
from .options import INTERRUPTED, option
from .screen import Screen, say

if TYPE_CHECKING:
    from ..planner.planned import PlanCandidate
    from ..profiler.profile import Profile
    from ..results.scenario import Scenario


Compared = Annotated[
    list[str] | None,
    option(
        "SPEC",
        "A policy to compare, as elsewhere; repeat. By default those of released engines that run the model.",
        "--policy",
        values=options.policies,
    ),
]
Gpus = Annotated[
    list[str] | None,
    option("GPU,...", "GPUs by data sheet: a100, h100, b200 ..., or TOML files (docs/plan.md); estimates."),
]


@options.of_scenario("profile", "replicas", "router", "rate", "num_requests", "time_scale", "eos")
def plan_command(
    trace: options.TraceName,
    rate: Annotated[float | None, option("R", "Requests per second to serve; the trace's own by default.")] = None,
    policy: Compared = None,
    gpu: Gpus = None,
    model: Annotated[
        str | None, option("M", "With --gpu: SDAR-8B by default, another known name, or a config.json.")
    ] = None,
    tp: Annotated[int, option("N", "With --gpu: GPUs of a replica (tensor parallel).")] = 1,
    weights: options.Weights = None,
    kv: options.Kv = None,
    commits: Annotated[
        str | None, option("P", "With --gpu: a profile that provides the commit models.", "--yields")
    ] = None,
    profile: Annotated[
        list[str] | None,
        option("P", "Instead of --gpu: a profile file or shipped profile; repeat.", values=options.profiles),
    ] = None,
    gpu_hour: Annotated[
        str | None, option("PRICE", "Price of one GPU per hour: 2, or by GPU, a100=2,h100=3.5.", "--gpu-hour")
    ] = None,
    currency: options.Currency = "USD",
    attainment: options.Attainment = "99%",
    max_replicas: Annotated[int, option("N", "Try at most N replicas.")] = 64,
    spare: Annotated[
        int,
        option("N", "Standby replicas (N+1): included in cost and launch files; the SLOs hold without them."),
    ] = 0,
    growth: Annotated[
        str | None, option("X%/year", "Growth of traffic, also per /month or /week; costs are then of the horizon.")
    ] = None,
    horizon: Annotated[float, option("YEARS", "With --growth: the years that are paid.")] = 1.0,
    buy_now: Annotated[
        bool, typer.Option("--buy-now", help="With --growth: buy what the end needs, instead of each quarter's.")
    ] = False,
    today: Annotated[str | None, option("SPEC,replicas=N", "What runs today: replayed beside the answer.")] = None,
    min_quality: options.MinQuality = None,
    quality_table: options.QualityTable = None,
    as_given: Annotated[
        bool, typer.Option("--as-given", help="Use the policies as given, without a search over engine settings.")
    ] = False,
    change_answers: Annotated[
        bool,
        typer.Option(
            "--change-answers", help="Also search block, threshold and canvas, which change the model's answers."
        ),
    ] = False,
    research: Annotated[
        bool, typer.Option("--research", help="Also what a scheduler that no released engine has would save.")
    ] = False,
    router: options.Router = choices.UNROUTED,
    num_requests: options.PerReplay = None,
    given: options.Given = options.NONE_GIVEN,
    jobs: options.Jobs = None,
    backend: options.Backend = "local",
    address: options.Address = None,
    out: Annotated[
        Path | None,
        option("DIR", "Write plan.toml, plan.json, report.html and deploy/; reuses the replays in it.", "-o", "--out"),
    ] = None,
    fails_on_slo: options.FailOnSlo = False,
    as_json: options.AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder, including its replays.")] = False,
) -> None:
    """Rank policies on GPUs by the cost of the smallest fleet that meets the SLOs, with its uncertainty.

    dsim plan azure-conv --rate 12 --slo ttft=2s --slo 100ms/token --gpu-hour 2 -o runs/plan
    dsim plan mine.jsonl --gpu a100,h100 --gpu-hour a100=2,h100=3.5 --slo ttft=2s --json
    """
    from ..planner.plan_folder import PLAN, PlanFolder
    from ..planner.plan_run import Options, question_of, write_plan
    from ..planner.prices import prices
    from ..results.scenario import Scenario, different

    if not given["slo"]:
        raise DsimError("no SLO is given, expected at least one, such as --slo ttft=2s --slo 100ms/token")
    if fails_on_slo and today is None:
        raise DsimError(
            "--fail-on-slo is given and no --today, expected what runs today: a plan's own fleet meets the SLOs"
        )
    asked = Options(
        rate, options.percent("--attainment", attainment), max_replicas, num_requests, spare, growth, horizon, buy_now,
        today,        given["ensemble"], min_quality, quality_table, as_given, change_answers,
        research,
    )  # fmt: skip
    specs = different(policy or [])
    sheets, profiles = _profiles(specs, ",".join(gpu or []) or None, model, tp, weights, kv, commits, profile)
    given = {**given, "router": router}
    scenario = options.scenario(given, specs, trace=trace, policy=Scenario.policy, profile=choices.PROFILE)
    question = question_of(scenario, specs, profiles, prices(gpu_hour), asked)
    folder = PlanFolder(out, PLAN, force=force)
    screen = Screen()
    _warn(screen, scenario, specs, question.candidates)
    try:
        with Bar(screen, "plan", "replays", note="starting") as bar, folder:
            info, page, written = write_plan(
                question, folder, options.command(options.SPEED), sheets=sheets, gpu_hour=gpu_hour, currency=currency,
                jobs=jobs, backend=backend, address=address,
                progress=lambda doing, done, of: bar.update(done, of, doing, ""),
            )  # fmt: skip
    except KeyboardInterrupt:
        kept = f"the replays are kept in {out}/: the same command continues" if out else "nothing was kept"
        screen.alarm(f"Interrupted: {kept}")
        raise typer.Exit(INTERRUPTED) from None
    say(lambda: page, info, as_json)
    screen.explain(folder.memo.sentence())
    screen.wrote(out, written)
    if fails_on_slo and info["today"] is not None:
        for text, value in info["today"]["values"].items():
            sign = -1 if text in info["share_criteria"] else 1
            if sign * (value["value"] - info["bounds"][text]) > 0:
                screen.alarm(f"{today} misses {text}")
                raise typer.Exit(options.MISSED)


def _profiles(
    specs: list[str],
    gpu: str | None,
    model: str | None,
    tp: int,
    weights: str | None,
    kv: str | None,
    yields: str | None,
    profile: list[str] | None,
) -> "tuple[list[Profile], list[Profile] | None]":
    """From data sheets, and all to compare (None if no option names one)."""
    from ..planner.plan_run import name_their_profiles
    from ..planner.prices import from_sheets
    from ..profiler.profile import load
    from ..results.scenario import different

    if gpu is not None and profile:
        raise DsimError(f"--gpu is {gpu} and --profile is {profile[0]}, expected one of them")
    names = different([name.strip() for name in gpu.split(",")]) if gpu is not None else []
    sheets = from_sheets(names, model or "SDAR-8B", tp, yields, weights, kv)
    if name_their_profiles(specs) and (gpu is not None or profile):
        raise DsimError(f"every policy names its own profile, expected none of --profile and --gpu: {', '.join(specs)}")
    return sheets, sheets or ([load(name) for name in different(profile)] if profile else None)


def _warn(screen: Screen, scenario: "Scenario", specs: list[str], candidates: "Sequence[PlanCandidate]") -> None:
    """Of the trace, and of each policy on its first profile."""
    from ..engine.policy import parse
    from ..profiler.placed import placed
    from ..sim.setting import Setting

    code, source = scenario.allow_code, scenario.source()
    options.warn(screen, *(replace(scenario, policy=spec) for spec in specs or [scenario.policy]))
    on_first = {placed(c.policy)[0]: c.profile for c in reversed(candidates)}
    options.warn_of_runs(
        screen, [(Setting(parse(spec, code), own, scenario.workload), source) for spec, own in on_first.items()]
    )
