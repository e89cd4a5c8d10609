"""dsim tune: find the best settings for a trace, and how certain that is."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import choices
from . import questions as q
from .answer import Answer, stopped
from .cautions import warn, warn_of_yields
from .declared import Question, Watch, words_of

if TYPE_CHECKING:
    from ..planner.tune import Tuned
    from ..results.world import World
    from .objects import PolicyLike, ProfileLike

PASSED_ON = ("objective", "space", "trials", "min_quality", "quality_table", "gpu_hour", "currency", "jobs", "ray")
# Not of the traffic, for the command that replays the answer.
SEARCHED = ("trace", "policy", "replicas")


@dataclass(frozen=True)
class TuneQuestion(q.OfTrace, q.Paced, q.Somewhere, q.Priced, q.Forced, Question["Tuned"]):
    """Search for the settings that serve a trace best, and confirm them on traffic that the search did not use.

    dsim tune azure-conv --replicas 2 --slo ttft=2s --slo norm_latency=30ms -o runs/tuned
    dsim tune mine.jsonl --policy lmdeploy-bd32 --space space.toml --trials 200 --jobs 4

    Search:
      --objective O: One of: {OBJECTIVES}.
      --trials N: Settings to try, including those of the folder.
      --space FILE: The settings to vary, as TOML (docs/tune.md).
    Policy and profile:
      --policy SPEC: The policy to beat: your current one; by default one of the checkpoint's family.
    Execution:
      --jobs N: Replays at once; affects the search's result.
    Output:
      -o, --out DIR: Write policy.toml, the trials and report.html.
    """

    COMMON = "policy profile slos rate lengths replicas objective trials space min_quality num_requests jobs seed out"

    _: KW_ONLY
    slos: Sequence[str] = ()
    eos: bool | None = None
    frontend: float | None = None
    yields: str | None = None
    profile: "ProfileLike" = choices.PROFILE
    replicas: int | None = None
    router: str = "round-robin"
    objective: str = "goodput"
    trials: int = 60
    policy: "PolicyLike | None" = None
    space: str | Path | Mapping[str, Any] | None = None
    min_quality: float | str | None = None
    quality_table: str | Path | None = None
    jobs: int = 1

    def resolve(self) -> "World":
        """The world that the search varies; its policy stands for those that are tried."""
        from ..results.world import World, replicas_of

        policies = [q.name_of(policy) for policy in [self.policy] if policy is not None]
        replicas = replicas_of(policies, self.replicas)
        [world] = q.worlds_of(self, World.policy, self.profile, candidates=policies, replicas=replicas)
        return world

    def answer(self, watch: Watch) -> "Answer[Tuned]":
        from ..planner.memo import StoreFolder
        from ..planner.tune import FILES, TUNE, tune
        from ..results.world import World
        from .objects import profile_name, spec_of

        policy = q.optional(spec_of, self.policy)
        world = self.resolve()
        folder = StoreFolder(self.folder, TUNE, force=self.force)
        traffic = [field.name for field in fields(World) if field.name not in SEARCHED]
        named_profile = replace(self, profile=profile_name(self.profile))
        try:
            with folder, watch.bar("searching", note="starting") as bar:
                warn(watch, world)
                tuned = tune(
                    world,
                    policy=policy,
                    folder=folder,
                    command=watch.command("--ray"),
                    traffic_words=words_of(named_profile, traffic),
                    progress=lambda doing, done, total: bar.update(done, total, doing),
                    **self.values(*PASSED_ON),
                )
        except KeyboardInterrupt:
            raise stopped(self.out) from None
        warn_of_yields(watch, *tuned.compared)
        return Answer(value=tuned, explained=folder.memo.sentence(), out=self.folder, files=FILES)
