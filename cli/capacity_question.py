"""dsim capacity: the highest rate that meets the SLOs, or the fewest replicas for a rate."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from . import choices
from . import questions as q
from .answer import Answer, stopped
from .cautions import warn, warn_of_yields
from .declared import Question, Watch

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

    Traffic:
      --rate R: Find the fewest replicas for R requests per second instead.
      --num-requests N: Requests in a replay; by default enough for one pass over the trace, 6000 to 24000.
    Fleet and price:
      --max-replicas N: With --rate: try at most N replicas; 64 by default.
    Search:
      --precision X%: Half-width of the confidence interval, relative.
    Output:
      -o, --out DIR: Write capacity.json and report.html.
    """

    COMMON = "policy profile slos rate replicas arrival lengths fleet attainment precision jobs out force"

    slos: Sequence[str] = ()
    _: KW_ONLY
    policy: "PolicyLike" = choices.POLICY
    rate: float | None = None
    max_replicas: int | None = None
    num_requests: int | None = None
    attainment: float = 0.99
    precision: float = 0.02
    jobs: int | None = None
    curve: bool = True

    def resolve(self) -> "World":
        """The world without a rate, which the search varies."""
        from ..results.world import on_fleet

        words = self.fleet_words([q.name_of(self.policy)] if self.sets("policy") else None)
        worlds = q.worlds_of(self, self.policy, self.profile, rate=None, num_requests=None)
        [world] = on_fleet(worlds, words, trusted=self.fleet is None)
        return world

    def answer(self, watch: Watch) -> "Answer[Capacity]":
        from ..planner.capacity import CAPACITY, FILES
        from ..planner.contents import asked_of
        from ..planner.memo import StoreFolder
        from ..planner.pool_counts import sized
        from ..planner.record import profile_notes
        from ..report.html import result_files

        folder = StoreFolder(self.folder, CAPACITY, force=self.force)
        world = self.resolve()
        warn(watch, world)
        warn_of_yields(watch, world)
        inputs = self.values("rate", "replicas", "max_replicas", "precision", "attainment", "num_requests")
        options = self.values("curve", "jobs", "ray")
        try:
            with folder, watch.bar("capacity", "replays", note="starting") as bar:
                folder.begin("capacity", asked_of(world, **inputs))
                options |= {"memo": folder.memo, "progress": partial(_progress, bar, self.precision)}
                capacity = sized(world, **inputs, **options, command=watch.command())
                capacity = replace(capacity, notes=tuple(profile_notes(world.of_each_pool())))
                folder.put(result_files(capacity))
        except KeyboardInterrupt:
            raise stopped(self.out) from None
        return Answer(value=capacity, explained=folder.memo.sentence(), out=self.folder, files=FILES)


def _progress(bar: Any, precision: float, replays: int, interval: "Interval | None", replicas: int) -> None:
    from ..report.capacity_page import span

    note = "looking for the range"
    if interval is not None:
        note = f"{span(interval)}, ±{100 * interval.half_width:.2g}% of ±{100 * precision:g}%"
    bar.update(replays, name=f"capacity of {replicas} replica{'s' * (replicas > 1)}", note=note)
