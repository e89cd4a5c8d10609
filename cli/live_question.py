"""dsim live: serve a trace in real time on a device, under the twin's policies."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

from ..engine.errors import DsimError
from . import choices
from . import questions as q
from .answer import Answer
from .bar import watch_runs
from .cautions import stopped, warn
from .declared import Question, Watch

if TYPE_CHECKING:
    from ..report.run_page import RunResult
    from ..results.on_device import LiveSetting
    from ..results.world import World
    from .objects import PolicyLike, ProfileLike

WITH_RECORDS = ("tiny", "tiny-both-ways")  # shipped, trained on own prompts


@dataclass(frozen=True)
class LiveQuestion(q.OfTrace, q.Paced, q.OnDevice, q.Forced, Question["RunResult"]):
    """Serve a trace on this machine's device, in real time, and report what its clients saw.

    dsim live azure-conv --lengths fixed:64,64 --rate 2 --num-requests 60 --policy lmdeploy-bd32 -o runs/live
    dsim live azure-conv --model ./SDAR-8B-Chat --policy optimus --profile mine.json

    Policy and profile:
      --policy SPEC: name[:value][,field=value...] or a TOML file; repeat to compare.
      --commits C: What decides which tokens commit: model (the weights), or twin (the profile's draws).
      --profile P: A profile of this model, for --commits twin and elastic chunks.
    Model and device:
      --model M: tiny (the default), tiny-both-ways, or a model's directory.
    Traffic:
      --prompts FILE: The prompts: a text, a .jsonl of token ids, or source|records (tiny).
    """

    COMMON = "policy model profile commits slos rate lengths num_requests prompts device seed out force"

    policy: "PolicyLike | Sequence[PolicyLike]" = ()
    _: KW_ONLY
    model: str | None = None
    commits: str | None = None
    profile: "ProfileLike | None" = None
    prompts: str | None = None
    eos: bool = False
    slos: Sequence[str] = ()

    def resolve(self) -> "list[World]":
        """One world a policy."""
        policy = "lmdeploy-bd32" if self.policy == () else self.policy
        return q.worlds_of(self, policy, self.profile or choices.PROFILE)

    def answer(self, watch: Watch) -> "Answer[RunResult]":
        from ..planner.record import record
        from ..results.run_info import FILES

        worlds = self.resolve()
        first = worlds[0]
        requests = first.requests()
        warn(watch, *worlds)
        live = self._setting(first)
        for world in worlds:
            live.check(world)
        about = live.about()
        temporary, folder = q.kept_folder(self.folder, watch)
        with watch.bar("live", "requests") as bar:
            command = {"command": watch.command()}
            runs = watch_runs(bar, len(worlds), len(requests), "warming up")
            run = record(
                worlds,
                requests,
                live.serve,
                out=folder,
                force=self.force,
                about=lambda results: about(results) | command,
                watch=runs,
            )
        value, interrupted = replace(run, temporary=temporary), stopped(run, worlds)
        return Answer(value=value, out=self.folder, files=FILES, interrupted=interrupted, failure=run.failure)

    def _setting(self, world: "World") -> "LiveSetting":
        """The model and its source of commits, checked before anything is measured."""
        from ..results.on_device import LiveSetting

        loaded = self.loaded(self.model, world.seed)
        commits, prompts = self.commits, self.prompts
        if commits is None:
            commits = "model" if loaded.trained else "twin"
        if commits == "model" and prompts is None:
            if loaded.name not in WITH_RECORDS:
                raise DsimError(f"commits is model and no prompts are given: expected --prompts FILE for {loaded.name}")
            prompts = "records"
        profile = None if self.profile is None else world.loaded_profile()
        return LiveSetting(loaded, profile, commits, prompts, tokenizer=self.tokenizer)
