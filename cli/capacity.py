"""dsim capacity: the highest rate that meets the SLOs, or the fewest replicas for a rate."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.errors import DsimError
from ..files.read import cut, float_of
from . import choices, options
from .bar import Bar
from .options import INTERRUPTED, option
from .screen import Screen, say

if TYPE_CHECKING:
    from ..planner.capacity import Capacity
    from ..planner.replicate import Interval


@options.of_scenario("rate", "num_requests", "time_scale", "eos", "drop_warmup")
def capacity_command(
    trace: options.TraceName,
    policy: Annotated[
        str, option("SPEC", "name[:value][,field=value...] or a TOML file.", values=options.policies)
    ] = "optimus",
    given: options.Given = options.NONE_GIVEN,
    rate: Annotated[float | None, option("R", "Find the fewest replicas for R requests per second instead.")] = None,
    max_replicas: Annotated[int | None, option("N", "With --rate: try at most N replicas; 64 by default.")] = None,
    gpu_hour: options.GpuHour = None,
    currency: options.Currency = "USD",
    attainment: Annotated[
        str, option("X%", "Share of arrivals that must meet the SLOs without a statistic, all together.")
    ] = "99%",
    precision: Annotated[str, option("X%", "Half-width of the confidence interval, relative.")] = "2%",
    confidence: Annotated[str, option("X%", "Level of the confidence interval.")] = "95%",
    num_requests: Annotated[
        int | None, option("N", "Requests in a replay: as many as judge the trace once, 6000 to 24000, by default.")
    ] = None,
    block: Annotated[
        int | None,
        option("N", "Consecutive requests that are resampled together; a quarter by default."),
    ] = None,
    max_replications: Annotated[
        int, option("N", "Stop after N replications, however wide the interval.")
    ] = choices.MAX_REPLICATIONS,
    jobs: options.Jobs = None,
    backend: options.Backend = "local",
    address: options.Address = None,
    out: Annotated[Path | None, option("DIR", "Write capacity.json and report.html.", "-o", "--out")] = None,
    measured: Annotated[
        list[Path] | None,
        option("RUN", "Draw a measured run (dsim import -o, dsim live -o) beside the curve; repeat.", "--measured"),
    ] = None,
    as_json: options.AsJson = False,
    force: options.Force = False,
) -> None:
    """Find the highest request rate at which every SLO holds, or the fewest replicas for a rate.

    dsim capacity azure-conv --policy optimus --slo p90:tpot_chunk=50ms
    dsim capacity azure-conv --rate 12 --slo ttft=2s --gpu-hour 2 -o runs/capacity
    """
    from ..planner.capacity import Interrupted, question_of
    from ..planner.capacity_folder import CapacityFolder
    from ..planner.contents import asked_of
    from ..planner.ensemble import capacities, check_num
    from ..planner.measured import measured_points
    from ..planner.record import profile_notes
    from ..planner.spread import moved_by_spread
    from ..report import capacity as report
    from ..results.scenario import asked

    ensemble, replicas = given["ensemble"], given["replicas"]
    if ensemble is not None:
        check_num(ensemble)
    share = percent("--attainment", attainment)
    points = measured_points(measured or [], given["slo"] or [], share, not given["missing_fails"])
    folder = CapacityFolder(out, force=force)
    scenario = options.scenario(
        given, [policy], trace=trace, policy=policy, replicas=1, num_requests=num_requests,
        slos=tuple(given["slo"] or ()),
    )  # fmt: skip
    width = percent("--precision", precision)
    search = question_of(scenario, rate, replicas, max_replicas)
    how = {
        "precision": width, "confidence": percent("--confidence", confidence), "attainment": share,
        "num_requests": num_requests, "block": block, "max_replications": max_replications,
    }  # fmt: skip
    screen = Screen()
    options.warn(screen, scenario)
    options.warn_of_yields(screen, scenario)
    found: Capacity | None
    with folder:
        folder.begin("capacity", asked_of(scenario, rate=rate, replicas=replicas, max_replicas=max_replicas, **how))
        try:
            with Bar(screen, "capacity", "replays", note="starting") as bar:
                found = search(
                    **how, gpu_hour=gpu_hour, jobs=jobs, backend=backend, address=address, memo=folder.memo,
                    progress=partial(_show, bar, width),
                )  # fmt: skip
        except Interrupted as stop:
            found = stop.found
            if found is None:
                screen.alarm("Interrupted before two replications were done: nothing is known yet")
                raise typer.Exit(INTERRUPTED) from None
        data = {**found.to_json(), **asked(scenario, options.command(options.SPEED), gpu_hour, currency)}
        data["notes"] = profile_notes([scenario])
        if points:
            data["measured"] = points
        if ensemble is not None and not found.interrupted:
            with Bar(screen, "ensemble", "capacities") as bar:
                fleet = replace(scenario, replicas=found.replicas)
                told = capacities(
                    fleet, ensemble, attainment=share, num_requests=found.num_requests,
                    rate=rate, jobs=jobs, memo=folder.memo, progress=bar.update,
                )  # fmt: skip
            data["ensemble"] = told.to_json()
        if out is not None and not found.interrupted:  # at the rate that was found, or asked for
            busy = replace(scenario, replicas=found.replicas, rate=found.rate.value if rate is None else rate)
            with suppress(KeyboardInterrupt):  # the capacity is known, and is written all the same
                data["spread"] = moved_by_spread([busy], busy.requests(), memo=folder.memo)
        folder.write(data, report.capacity_page(data))  # before a word is said: who listens may leave early
    say(lambda: report.capacity_page(data), data, as_json)
    screen.explain(folder.memo.sentence())
    screen.wrote(out, report.FILES)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def percent(name: str, text: str) -> float:
    """A share from `2%` or `0.02`."""
    value = float_of(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < value <= 1:
        raise DsimError(f"{name} is {cut(text)}, expected a share above 0% and up to 100%, such as 2%")
    return value


def _show(bar: Bar, precision: float, replays: int, known: "Interval | None", replicas: int) -> None:
    """So many replays are done, and this is what they say."""
    name = f"capacity of {replicas} replica{'s' if replicas > 1 else ''}"
    if known is None:
        bar.update(replays, name=name, note="looking for the range")
        return
    from ..report.capacity import span
    from ..report.table import number

    rate = {"value": known.value, "low": known.low, "high": known.high}
    note = f"{span(rate)}, ±{number(100 * known.half_width)}% of ±{100 * precision:g}%"
    # The half-width falls as the root of the replays.
    share = min(1.0, (precision / known.half_width) ** 2) if known.half_width > 0 else 1.0
    bar.update(replays, name=name, note=note, share=share)
