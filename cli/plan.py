"""dsim plan: which policy, on which GPUs, how many of them, at what cost; one ranked answer."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.errors import DsimError
from ..files.read import float_of
from . import choices, options
from .bar import Bar
from .capacity import percent
from .options import INTERRUPTED, option
from .screen import Screen, say

if TYPE_CHECKING:
    from ..profiler.profile import Profile


@options.of_scenario("profile", "yields", "replicas", "rate", "num_requests", "time_scale", "eos", "drop_warmup")
def plan_command(
    trace: options.TraceName,
    rate: Annotated[float | None, option("R", "Requests per second to serve; the trace's own by default.")] = None,
    policy: Annotated[
        list[str] | None,
        option(
            "SPEC",
            "A policy to compare, as elsewhere; repeat. By default every shipped one that the model runs.",
            "--policy",
            values=options.policies,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        option("GPU,...", "GPUs by data sheet: a100, h100, b200 ..., or TOML files (docs/plan.md); estimates."),
    ] = None,
    model: Annotated[
        str | None, option("M", "With --gpu: SDAR-8B by default, another known name, or a config.json.")
    ] = None,
    tp: Annotated[int, option("N", "With --gpu: GPUs of a replica (tensor parallel).")] = 1,
    yields: Annotated[
        str | None, option("P", "With --gpu: a profile whose commit models are taken over.", "--yields")
    ] = None,
    profile: Annotated[
        list[str] | None,
        option("P", "Instead of --gpu: a profile file or shipped profile; repeat.", values=options.profiles),
    ] = None,
    gpu_hour: Annotated[
        str | None, option("PRICE", "Price of a GPU for an hour: 2, or by GPU, a100=2,h100=3.5.", "--gpu-hour")
    ] = None,
    currency: options.Currency = "USD",
    attainment: Annotated[
        str, option("X%", "Share of arrivals that must meet the SLOs without a statistic, all together.")
    ] = "99%",
    max_replicas: Annotated[int, option("N", "Try at most N replicas.")] = 64,
    spare: Annotated[
        int,
        option("N", "Replicas that stand by (N+1): in the cost and the launch files; the SLOs are met without them."),
    ] = 0,
    growth: Annotated[
        str | None, option("X%/year", "How fast traffic grows, also /month or /week: says how long the fleet lasts.")
    ] = None,
    min_quality: Annotated[str | None, option("Q", "Least quality beside the full cache, such as 98%.")] = None,
    quality_table: Annotated[Path | None, option("CSV", "Your own scores, in place of the published ones.")] = None,
    as_given: Annotated[
        bool, typer.Option("--as-given", help="Search no settings of the engines: the policies as they are given.")
    ] = False,
    num_requests: Annotated[
        int | None, option("N", "Requests in a replay: as many as judge the trace once, 6000 to 24000, by default.")
    ] = None,
    given: options.Given = options.NONE_GIVEN,
    jobs: options.Jobs = None,
    backend: options.Backend = "local",
    address: options.Address = None,
    out: Annotated[
        Path | None,
        option(
            "DIR", "Write plan.toml, plan.json, report.html and deploy/; goes on from what it holds.", "-o", "--out"
        ),
    ] = None,
    as_json: options.AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder, its replays included.")] = False,
) -> None:
    """Rank policies on GPUs by what the smallest fleet costs that meets the SLOs, and say how sure that is.

    dsim plan azure-conv --rate 12 --slo ttft=2s --slo 100ms/token --gpu-hour 2 -o runs/plan
    dsim plan mine.jsonl --gpu a100,h100 --gpu-hour a100=2,h100=3.5 --slo ttft=2s --json
    """
    from ..comparison.measured_log import measured_log
    from ..engine.policy import parse
    from ..planner.ensemble import check_num
    from ..planner.plan import best_fleets, candidates_of, own_rate, plan, question_of
    from ..planner.plan_folder import PlanFolder
    from ..planner.purchase import check_growth
    from ..planner.quality import load_table, parse_share
    from ..planner.record import profile_notes
    from ..planner.spread import moved_by_spread
    from ..planner.uncertain_fleet import uncertain_fleet
    from ..profiler.placed import placed
    from ..profiler.profile import load
    from ..report.plan import plan_page
    from ..results.scenario import MAX_REPLICAS, Scenario, asked
    from ..sim.setting import Setting

    if gpu is not None and profile:
        raise DsimError(f"--gpu is {gpu} and --profile is {profile[0]}, expected one of them")
    for name, value in (("--model", model), ("--yields", yields), ("--tp", None if tp == 1 else tp)):
        if value is not None and gpu is None:
            raise DsimError(f"{name} is {value}, expected a --gpu with it: a profile has its own")
    if not given["slo"]:
        raise DsimError("no SLO is given, expected at least one, such as --slo ttft=2s --slo 100ms/token")
    if not 0 <= spare <= MAX_REPLICAS:
        raise DsimError(f"--spare is {spare}, expected 0 to {MAX_REPLICAS} replicas")
    if growth is not None:
        check_growth(growth)
    if given["ensemble"] is not None:
        check_num(given["ensemble"])
    specs = options.different(policy or [])
    sheets = [] if gpu is None else _from_sheets(gpu.split(","), model or "SDAR-8B", tp, yields)
    at_home = bool(specs) and all(placed(spec)[1] is not None for spec in specs)
    if at_home and (gpu is not None or profile):
        raise DsimError(f"every policy names its own profile, expected none of --profile and --gpu: {', '.join(specs)}")
    names = profile or ([] if at_home else [choices.PROFILE])
    profiles = sheets or [load(name) for name in options.different(names)]
    scenario = options.scenario(
        given, specs, trace=trace, policy=Scenario.policy, profile=choices.PROFILE, num_requests=num_requests
    )
    options_asked: dict[str, Any] = {
        "attainment": percent("--attainment", attainment),
        "max_replicas": max_replicas,
        "num_requests": num_requests,
    }
    candidates, left_out = candidates_of(
        scenario, specs, profiles, _prices(gpu_hour),
        min_quality=None if min_quality is None else parse_share(min_quality),
        quality_table=None if quality_table is None else load_table(quality_table, scenario.allow_code),
        as_given=as_given,
    )  # fmt: skip
    profiles = list({c.profile.name: c.profile for c in candidates}.values())
    wanted = own_rate(scenario) if rate is None else rate
    question = question_of(scenario, candidates, wanted, options_asked)
    folder = PlanFolder(out, force=force)
    screen = Screen()
    code = scenario.allow_code
    options.warn(screen, scenario, [parse(placed(spec)[0], code) for spec in specs])
    on_first = {placed(c.policy)[0]: c.profile for c in reversed(candidates)}
    source = scenario.source()
    options.warn_of_runs(
        screen, [(Setting(parse(spec, code), own, scenario.workload), source) for spec, own in on_first.items()]
    )
    try:
        with Bar(screen, "plan", "replays", note="starting") as bar, folder:
            folder.begin("plan", question)

            def show(doing: str, done: int, of: int) -> None:
                if done:
                    folder.settle()
                bar.update(done, of, doing, "")

            planned = plan(
                scenario, candidates, left_out, rate=wanted, jobs=jobs, backend=backend, address=address,
                spare=spare, growth=growth, memo=folder.memo, progress=show,
                **options_asked,
            )  # fmt: skip
            info = {**asked(scenario, options.command(options.SPEED), None, currency), **planned.to_json()}
            info |= {"gpu_hour": gpu_hour, "attainment": options_asked["attainment"]}
            info |= {"profile": ", ".join(p.name for p in profiles), "estimated": any(p.is_estimate for p in profiles)}
            for name in ("device", "model", "profile_version"):
                info.pop(name, None)
            firsts = dict.fromkeys(next(iter(p.workloads), "") for p in profiles)
            info["workload"] = scenario.workload or ", ".join(filter(None, firsts)) or None
            found = measured_log(replace(scenario, num_requests=None))
            info |= {} if found is None else {"measured": found}
            ahead = best_fleets(scenario, candidates, planned)
            info["notes"] += profile_notes(list(ahead.values()))
            if given["ensemble"] is not None:
                told = uncertain_fleet(
                    next(iter(ahead.values())), given["ensemble"], attainment=options_asked["attainment"],
                    num_requests=planned.num_requests, jobs=jobs, memo=folder.memo,
                    progress=lambda done, of: bar.update(done, of, "asking drawn profiles", ""),
                )  # fmt: skip
                info["ensemble"] = told.to_json()
            if out is not None:
                with suppress(KeyboardInterrupt):  # the plan is known, and is written all the same
                    info["spread"] = moved_by_spread(list(ahead.values()), names=list(ahead), memo=folder.memo)
            page = plan_page(info)
            written = folder.write(planned, info, page, sheets)
    except KeyboardInterrupt:
        kept = f"the replays are kept in {out}/: the same command goes on from them" if out else "nothing was kept"
        screen.alarm(f"Interrupted: {kept}")
        raise typer.Exit(INTERRUPTED) from None
    say(lambda: page, info, as_json)
    screen.explain(folder.memo.sentence())
    screen.wrote(out, written)


def _from_sheets(gpus: Sequence[str], model: str, tp: int, yields: str | None) -> "list[Profile]":
    """Profiles of a model on GPUs, from data sheets."""
    from ..profiler import hardware, models
    from ..profiler.profile import load
    from ..profiler.roofline import roofline

    shape, kind = models.model(model), models.family(models.model(model), models.architecture_of(model))
    commits = load(yields).commits if yields else ()
    found = [
        roofline(hardware.gpu(name.strip()), shape, tp, generates=kind, yields=commits)
        for name in options.different([name.strip() for name in gpus])
    ]
    if kind == "block-diffusion" and not found[0].commits:
        raise DsimError(
            f"nobody published what {shape.name} commits a step, expected --yields P: a profile whose commit models "
            "are taken over, such as a100-sdar-8b"
        )
    return found


def _prices(text: str | None) -> "Callable[[Profile], float | None]":
    """The price of an hour of a profile's GPU: one for all, or one for each by the beginning of its name."""
    if text is None:
        return lambda profile: None
    named: dict[str, float] = {}
    for part in text.split(","):
        name, equals, price = part.rpartition("=")
        value = float_of(price)
        if not 0 < value < math.inf or (equals and not name.strip()) or (not equals and "," in text):
            raise DsimError(
                f"--gpu-hour is {text}, expected a price above 0, or one for each GPU such as a100=2,h100=3.5"
            )
        named[name.strip().lower()] = value

    def price_of(profile: "Profile") -> float:
        names = (profile.device.name.lower(), profile.name.lower())
        for name in sorted(named, key=len, reverse=True):
            if any(own.startswith(name) for own in names):
                return named[name]
        raise DsimError(f"--gpu-hour is {text}, which has no price for {profile.device.name}")

    return price_of
