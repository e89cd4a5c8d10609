"""dsim live: serve a trace in real time on a device, under the twin's policies."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from typing import Annotated as A

from ..engine.errors import DsimError
from ..files.read import quoted
from . import choices
from . import questions as q
from .answer import Answer
from .bar import watch_runs
from .cautions import stopped, warn
from .declared import Opt, Question, Watch

if TYPE_CHECKING:
    from ..device.on_device import LiveSetting
    from ..report.run import RunResult
    from ..results.world import World
    from .objects import PolicyLike, ProfileLike

# Options of a world that a device cannot honour.
UNSUPPORTED = ("yields", "frontend", "router", "concurrency", "sessions", "drain")
WITH_RECORDS = ("tiny", "tiny-both-ways")  # shipped, trained on own prompts


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

    def resolve(self) -> "list[World]":
        """One world a policy."""
        profile = choices.PROFILE if self.profile is None else self.profile
        return q.worlds_of(self, "lmdeploy-bd32" if self.policy == () else self.policy, profile)

    def answer(self, watch: Watch) -> "Answer[RunResult]":
        from ..planner.record import record
        from ..results.run_info import FILES

        worlds = self.resolve()
        first = worlds[0]
        for name in UNSUPPORTED:
            value, default = getattr(first, name), getattr(type(first), name)
            if value != default:
                raise DsimError(f"{name} is {quoted(value)}, expected {quoted(default)}: a device supports no other")
        requests = first.requests()
        warn(watch, *worlds)
        live = self._setting(first)
        for world in worlds:
            live.check(world)
        about = live.about()
        temporary, folder = q.kept_folder(self.folder, watch)
        with watch.bar("live", "requests") as bar:
            run = record(
                worlds, requests, live.serve, out=folder, force=self.force, keeps=True,
                about=lambda results: {**about(results), "command": watch.command()},
                watch=watch_runs(bar, len(worlds), len(requests), "warming up"),
            )  # fmt: skip
        return Answer(
            value=replace(run, temporary=temporary), out=self.folder, files=FILES,
            interrupted=stopped(run, worlds), failure=run.failure,
        )  # fmt: skip

    def _setting(self, world: "World") -> "LiveSetting":
        """The model and its source of commits, checked before anything is measured."""
        from ..device.on_device import LiveSetting
        from ..live.config import named  # loads PyTorch, as the next
        from ..live.sampling import Sampling
        from ..live.weights import is_canvas
        from ..profiler.measure import open_any

        sampling = Sampling(self.temperature, world.seed) if self.temperature else None
        if sampling is not None and self.graphs:
            raise DsimError("--graphs captures steps that take the likeliest tokens, and --temperature draws them")
        name, settings = named(self.model, self.random_weights, self.mask_token_id, self.block_length)
        if sampling is not None and is_canvas(name, settings):
            raise DsimError(
                f"{name}: its canvases are drawn by the checkpoint's own rule, and --temperature {self.temperature:g} "
                "is of decoders"
            )
        loaded = open_any(name, self.device, world.seed, self.graphs, settings)
        commits, prompts = self.commits or ("model" if loaded.trained else "twin"), self.prompts
        profile = None if self.profile is None else world.loaded_profile()
        if commits == "model" and prompts is None:
            if not loaded.trained or name not in WITH_RECORDS:
                raise DsimError(f"commits is model and no prompts are given: expected --prompts FILE for {name}")
            prompts = "records"
        return LiveSetting(loaded, profile, commits, prompts, self.tokenizer, sampling)
