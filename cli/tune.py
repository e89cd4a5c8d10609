"""dsim tune: find the best settings for a trace, and how certain that is."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from typing import Annotated as A

from ..engine.policies import BASELINES
from . import choices
from . import questions as q
from .answer import Answer, stopped
from .cautions import warn, warn_of_yields
from .declared import Opt, Question, Watch, words_of

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
    """

    COMMON: ClassVar = (
        "policy", "profile", "slos", "rate", "lengths", "replicas", "objective", "trials", "space", "min_quality",
        "num_requests", "jobs", "seed", "out",
    )  # fmt: skip

    _: KW_ONLY
    slos: A[Sequence[str], q.SLO] = ()
    eos: A[bool | None, q.EOS] = None
    frontend: A[float | None, q.FRONTEND] = None
    yields: A[str | None, q.YIELD] = None
    profile: A["ProfileLike", q.PROFILE] = choices.PROFILE
    replicas: A[int | None, q.REPLICAS] = None
    router: A[str, q.ROUTER] = "round-robin"
    objective: A[str, Opt(f"One of: {', '.join(choices.OBJECTIVES)}.", "O", "Search")] = "goodput"
    trials: A[int, Opt("Settings to try, including those of the folder.", "N", "Search")] = 60
    policy: A[
        "PolicyLike | None",
        Opt(
            "The policy to beat: your current one.  "
            f"[default: by the checkpoint's family {', '.join(BASELINES.values())}]", "SPEC", "Policy and profile",
        ),
    ] = None  # fmt: skip
    space: A[
        str | Path | Mapping[str, Any] | None, Opt("The settings to vary, as TOML (docs/tune.md).", "FILE", "Search")
    ] = None
    min_quality: A[float | str | None, q.MIN_QUALITY] = None
    quality_table: A[str | Path | None, q.QUALITY_TABLE] = None
    gpu_hour: A[float | None, q.GPU_HOUR] = None
    jobs: A[int, Opt("Replays at once; affects the search's result.", "N", "Execution")] = 1
    out: A[str | Path | None, q.out("Write policy.toml, the trials and report.html.")] = None

    def resolve(self) -> "World":
        """The world that the search varies; its policy stands for those that are tried."""
        from ..results.world import World, replicas_of

        policies = [] if self.policy is None else [q.name_of(self.policy)]
        replicas = replicas_of(policies, self.replicas)
        [world] = q.worlds_of(self, World.policy, self.profile, candidates=policies, replicas=replicas)
        return world

    def answer(self, watch: Watch) -> "Answer[Tuned]":
        from ..planner.memo import StoreFolder
        from ..planner.tune import FILES, TUNE, tune
        from ..results.world import World
        from .objects import profile_name, spec_of

        policy = None if self.policy is None else spec_of(self.policy)
        world = self.resolve()
        folder = StoreFolder(self.folder, TUNE, force=self.force)
        traffic = [field.name for field in fields(World) if field.name not in SEARCHED]
        named_profile = replace(self, profile=profile_name(self.profile))
        try:
            with folder, watch.bar("searching", note="starting") as bar:
                warn(watch, world)
                tuned = tune(
                    world, policy=policy, folder=folder, command=watch.command("--ray"),
                    traffic_words=words_of(named_profile, [*traffic, "missing_fails"]),
                    progress=lambda doing, done, total: bar.update(done, total, doing),
                    **{name: getattr(self, name) for name in PASSED_ON},
                )  # fmt: skip
        except KeyboardInterrupt:
            raise stopped(self.out) from None
        warn_of_yields(watch, *tuned.compared)
        return Answer(value=tuned, explained=folder.memo.sentence(), out=self.folder, files=FILES)
