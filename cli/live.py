"""dsim live: serve a trace in real time on a device, under the twin's policies."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from typing import Annotated as A

from . import choices
from . import questions as q
from .answer import Answer
from .bar import watch_runs
from .cautions import stopped, warn
from .declared import Opt, Question, Watch

if TYPE_CHECKING:
    from ..report.run import RunResult
    from ..results.scenario import Scenario
    from .objects import PolicyLike, ProfileLike


@dataclass(frozen=True)
class LiveQuestion(q.OfTrace, q.Paced, q.OnDevice, q.Forced, Question["RunResult"]):
    """Serve a trace on this machine's device, in real time, and report what its clients saw.

    dsim live azure-conv --lengths fixed:64,64 --rate 2 --num-requests 60 --policy lmdeploy-bd32 -o runs/live
    dsim live azure-conv --model ./SDAR-8B-Chat --policy optimus --profile mine.json
    """

    COMMON: ClassVar = (
        "policy", "model", "profile", "commits", "slos", "rate", "lengths", "num_requests", "prompts", "device",
        "temperature", "seed", "out", "force",
    )  # fmt: skip

    policy: A["PolicyLike | Sequence[PolicyLike]", q.MANY_POLICIES] = ()
    _: KW_ONLY
    model: A[
        str | None, Opt("tiny (the default), tiny-both-ways, or a model's directory.", "M", "Model and device")
    ] = None
    commits: A[
        str | None,
        Opt(
            "What decides which tokens commit: model (the weights), or twin (the profile's draws; for random weights).",
            "C", "Policy and profile",
        ),
    ] = None  # fmt: skip
    profile: A[
        "ProfileLike | None",
        Opt("A profile of this model, for --commits twin and elastic chunks.", "P", "Policy and profile"),
    ] = None
    prompts: A[
        str | None, Opt("The prompts: a text, a .jsonl of token ids, or source|records (tiny).", "FILE", "Traffic")
    ] = None
    temperature: A[float, q.TEMPERATURE] = 0.0
    eos: A[bool, q.ENDS_AT_EOS] = False
    slos: A[Sequence[str], q.SLO] = ()
    out: A[str | Path | None, q.RUN_OUT] = None

    def resolve(self) -> "list[Scenario]":
        """One world a policy."""
        profile = choices.PROFILE if self.profile is None else self.profile
        return q.worlds_of(self, "lmdeploy-bd32" if self.policy == () else self.policy, profile)

    def answer(self, watch: Watch) -> "Answer[RunResult]":
        from ..device.live_run import check_scenarios, live_setting
        from ..planner.record import record
        from ..results.run_info import FILES

        scenarios = self.resolve()
        check_scenarios(scenarios)
        requests = scenarios[0].requests()
        warn(watch, *scenarios)
        live = live_setting(
            scenarios, model=self.model, random_weights=self.random_weights, profiled=self.profile is not None,
            commits=self.commits, prompts=self.prompts, device=self.device, graphs=self.graphs,
            mask_token_id=self.mask_token_id, block_length=self.block_length, tokenizer=self.tokenizer,
            temperature=self.temperature,
        )  # fmt: skip
        about = live.about()
        temporary, folder = q.kept_folder(self.folder, watch)
        with watch.bar("live", "requests") as bar:
            run = record(
                scenarios, requests, live.serve, out=folder, force=self.force, keeps=True,
                about=lambda results: {**about(results), "command": watch.command()},
                watch=watch_runs(bar, len(scenarios), len(requests), "warming up"),
            )  # fmt: skip
        return Answer(
            value=replace(run, temporary=temporary), out=self.folder, files=FILES,
            interrupted=stopped(run, scenarios), failure=run.failure,
        )  # fmt: skip
