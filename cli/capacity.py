"""dsim capacity: the highest rate that meets the SLOs, or the fewest replicas for a rate."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from typing import Annotated as A

from . import choices
from . import questions as q
from .answer import Answer, stopped
from .cautions import warn, warn_of_yields
from .declared import Opt, Question, Watch

if TYPE_CHECKING:
    from ..planner.capacity import Capacity
    from ..planner.replicate import Interval
    from ..results.world import World
    from .objects import PolicyLike


@dataclass(frozen=True)
class CapacityQuestion(q.OnFleet, q.Somewhere, q.Forced, Question["Capacity"]):
    """Find the highest request rate at which every SLO holds, or the fewest replicas for a rate.

    dsim capacity azure-conv --policy optimus --slo p90:tpot_chunk=50ms
    dsim capacity azure-conv --rate 12 --slo ttft=2s -o runs/capacity
    dsim capacity azure-conv --fleet examples/fleet/fleet.toml --slo ttft=2s
    """

    COMMON: ClassVar = (
        "policy", "profile", "slos", "rate", "replicas", "arrival", "lengths", "fleet", "attainment",
        "precision", "jobs", "out", "force",
    )  # fmt: skip

    slos: A[Sequence[str], q.SLO] = ()
    _: KW_ONLY
    policy: A["PolicyLike", q.ONE_POLICY] = choices.POLICY
    rate: A[float | None, Opt("Find the fewest replicas for R requests per second instead.", "R", "Traffic")] = None
    max_replicas: A[int | None, Opt("With --rate: try at most N replicas; 64 by default.", "N", "Fleet and price")] = (
        None
    )
    num_requests: A[int | None, q.PER_REPLAY] = None
    attainment: A[float, q.ATTAINMENT] = 0.99
    precision: A[
        float, Opt("Half-width of the confidence interval, relative.", "X%", "Search", read=q.percent, text="2%")
    ] = 0.02
    jobs: A[int | None, q.JOBS] = None
    curve: bool = True
    out: A[str | Path | None, q.out("Write capacity.json and report.html.")] = None

    def resolve(self) -> "World":
        """The world without a rate, which the search varies."""
        from ..results.world import on_fleet

        words = self.fleet_words([q.name_of(self.policy)] if self.sets("policy") else None)
        worlds = q.worlds_of(self, self.policy, self.profile, rate=None, num_requests=None)
        [world] = on_fleet(worlds, words, trusted=self.fleet is None)
        return world

    def answer(self, watch: Watch) -> "Answer[Capacity]":
        from ..planner.capacity import CAPACITY, FILES, sized
        from ..planner.contents import asked_of
        from ..planner.memo import StoreFolder
        from ..planner.record import profile_notes
        from ..report.html import result_files

        folder = StoreFolder(self.folder, CAPACITY, force=self.force)
        world = self.resolve()
        warn(watch, world)
        warn_of_yields(watch, world)
        size = {name: getattr(self, name) for name in ("rate", "replicas", "max_replicas")}
        search = {name: getattr(self, name) for name in ("precision", "attainment", "num_requests")}
        options = {name: getattr(self, name) for name in ("curve", "jobs", "ray")}
        try:
            with folder, watch.bar("capacity", "replays", note="starting") as bar:
                folder.begin("capacity", asked_of(world, **size, **search))
                capacity = sized(
                    world, **size, **search, **options, command=watch.command(), memo=folder.memo,
                    progress=partial(_progress, bar, self.precision),
                )  # fmt: skip
                notes = tuple(profile_notes(world.of_each_pool()))
                capacity = replace(capacity, notes=notes)
                folder.put(result_files(capacity))
        except KeyboardInterrupt:
            raise stopped(self.out) from None
        return Answer(value=capacity, explained=folder.memo.sentence(), out=self.folder, files=FILES)


def _progress(bar: Any, precision: float, replays: int, interval: "Interval | None", replicas: int) -> None:
    name = f"capacity of {replicas} replica{'s' if replicas > 1 else ''}"
    if interval is None:
        bar.update(replays, name=name, note="looking for the range")
        return
    from ..report.capacity import span
    from ..report.table import number

    note = f"{span(interval)}, ±{number(100 * interval.half_width)}% of ±{100 * precision:g}%"
    # The half-width falls as 1 / sqrt(replays).
    share = min(1.0, (precision / interval.half_width) ** 2) if interval.half_width > 0 else 1.0
    bar.update(replays, name=name, note=note, share=share)
