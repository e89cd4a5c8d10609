"""dsim capacity: the highest rate that meets the SLOs, or the fewest replicas for a rate."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import choices, options
from .bar import Bar
from .options import INTERRUPTED, option
from .screen import Screen, say

if TYPE_CHECKING:
    from ..planner.replicate import Interval


@options.of_scenario("rate", "num_requests", "time_scale", "eos")
def capacity_command(
    trace: options.TraceName,
    policy: options.OnePolicy = choices.POLICY,
    given: options.Given = options.NONE_GIVEN,
    pool: options.Pools = None,
    link: options.Links = None,
    decider: options.Decider = "always",
    fleet: options.FleetFile = None,
    rate: Annotated[float | None, option("R", "Find the fewest replicas for R requests per second instead.")] = None,
    max_replicas: Annotated[int | None, option("N", "With --rate: try at most N replicas; 64 by default.")] = None,
    gpu_hour: options.GpuHour = None,
    currency: options.Currency = "USD",
    attainment: options.Attainment = "99%",
    precision: Annotated[str, option("X%", "Half-width of the confidence interval, relative.")] = "2%",
    num_requests: options.PerReplay = None,
    jobs: options.Jobs = None,
    backend: options.Backend = "local",
    address: options.Address = None,
    out: Annotated[Path | None, option("DIR", "Write capacity.json and report.html.", "-o", "--out")] = None,
    measured: Annotated[
        list[Path] | None,
        option("RUN", "Draw a measured run (dsim import -o, dsim live -o) next to the curve; repeat.", "--measured"),
    ] = None,
    as_json: options.AsJson = False,
    force: options.Force = False,
) -> None:
    """Find the highest request rate at which every SLO holds, or the fewest replicas for a rate.

    dsim capacity azure-conv --policy optimus --slo p90:tpot_chunk=50ms
    dsim capacity azure-conv --rate 12 --slo ttft=2s --gpu-hour 2 -o runs/capacity
    dsim capacity azure-conv --fleet examples/fleet/fleet.toml --slo ttft=2s
    """
    from ..planner.capacity import Interrupted
    from ..planner.capacity_run import CAPACITY, write_capacity
    from ..planner.measured import measured_points
    from ..planner.memo import StoreFolder
    from ..report.capacity import FILES
    from ..results.fleet_file import FleetWords
    from ..results.scenario import on_fleet

    share, width = options.percent("--attainment", attainment), options.percent("--precision", precision)
    points = measured_points(measured or [], given["slo"] or [], share, not given["missing_fails"])
    words = FleetWords(tuple(pool or ()), tuple(link or ()), given["router"], decider).or_file(fleet)
    options.check_pools(words.pools, None if policy == choices.POLICY else [policy], given)
    folder = StoreFolder(out, CAPACITY, force=force)
    scenario = options.scenario(
        given, [policy], trace=trace, policy=policy, replicas=1,
        slos=tuple(given["slo"] or ()),
    )  # fmt: skip
    [scenario] = on_fleet([scenario], words, named=fleet is None)
    how = {"precision": width, "attainment": share, "num_requests": num_requests}
    screen = Screen()
    options.warn(screen, scenario)
    options.warn_of_yields(screen, scenario)
    try:
        with folder, Bar(screen, "capacity", "replays", note="starting") as bar:
            found, info, page = write_capacity(
                scenario, folder, options.command(options.SPEED), rate=rate, replicas=given["replicas"],
                max_replicas=max_replicas, how=how, points=points, gpu_hour=gpu_hour, currency=currency,
                ensemble=given["ensemble"], jobs=jobs, backend=backend, address=address,
                progress=partial(_show, bar, width),
                asking=lambda done, of: bar.update(done, of, "ensemble", "", unit="capacities"),
            )  # fmt: skip
    except Interrupted:
        screen.alarm("Interrupted before two replications were done: nothing is known yet")
        raise typer.Exit(INTERRUPTED) from None
    say(lambda: page, info, as_json)
    screen.explain(folder.memo.sentence())
    screen.wrote(out, FILES)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def _show(bar: Bar, precision: float, replays: int, known: "Interval | None", replicas: int) -> None:
    name = f"capacity of {replicas} replica{'s' if replicas > 1 else ''}"
    if known is None:
        bar.update(replays, name=name, note="looking for the range")
        return
    from ..report.capacity import span
    from ..report.table import number

    rate = {"value": known.value, "low": known.low, "high": known.high}
    note = f"{span(rate)}, ±{number(100 * known.half_width)}% of ±{100 * precision:g}%"
    # The half-width falls as 1 / sqrt(replays).
    share = min(1.0, (precision / known.half_width) ** 2) if known.half_width > 0 else 1.0
    bar.update(replays, name=name, note=note, share=share)
