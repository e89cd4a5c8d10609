"""A world on a device: same policy, requests and report as in the twin, measured steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..engine.engine import Limits
from ..engine.errors import DsimError, PolicyError
from ..engine.spec import Policy
from ..files.read import cut
from ..profiler.profile import Profile
from ..sim.setting import Setting, limits_on
from ..sim.twin import Append, Progress, RunRecords, check_fit
from ..traces import Trace
from .run_info import LiveInfo
from .world import World

if TYPE_CHECKING:
    from ..live.canvas_model import CanvasConfig
    from ..live.config import ModelConfig
    from ..live.prompts import Prompts
    from ..live.session import Serving
    from ..profiler.measure import Opened

COMMITS = ("model", "twin")


@dataclass(frozen=True)
class LiveSetting:
    """A model on a device, and what answers its requests."""

    loaded: Opened
    profile: Profile | None  # of the device: draws and elastic chunks need one
    commits: str  # "model" (weights) or "twin" (the profile's keyed draws) decides
    prompts: str | None = None  # see live/prompts.py; None: random tokens
    tokenizer: str | None = None  # folder or tokenizer.json; None: the model's

    def check(self, world: World) -> None:
        """DsimError unless the device can run it."""
        loaded, profile, policy = self.loaded, self.profile, world.parsed_policy()
        if world.ends_at_eos:
            check_eos(policy, loaded.model.config, self.commits)
        if self.commits not in COMMITS:
            raise DsimError(f"commits is {cut(self.commits)}, expected one of: {', '.join(COMMITS)}")
        if self.commits == "twin" and profile is None:
            raise DsimError(
                "commits is twin and no profile is given: expected one, whose draws decide commits (--profile)"
            )
        if self.commits == "model" and not loaded.trained:
            raise DsimError(f"commits is model, and the weights of {loaded.name} are random: expected twin")
        if world.replicas != 1:
            raise DsimError(f"replicas is {world.replicas}: a device runs 1")
        self._check_model(policy)
        if profile is not None:
            from ..profiler.measure import check_same_model  # loads PyTorch

            check_same_model(profile, loaded.shape)
        if self.commits == "twin" and profile is not None:
            Setting(policy, profile, world.workload).check()

    def _check_model(self, policy: Policy) -> None:
        from ..live.canvas_executor import check_canvas  # loads PyTorch, as the next
        from ..live.full_sequence import check_runs
        from ..live.refused import check_policy
        from ..profiler.measure import LoadedCanvas

        if isinstance(self.loaded, LoadedCanvas):
            check_canvas(policy, self.loaded.model.config)
            return
        config = self.loaded.model.config
        check_policy(policy)
        if policy.family == "full-sequence":
            check_runs(policy, config)
        if policy.granularity.needs_latency and self.profile is None:
            raise PolicyError(f"{policy.name} chooses by T(c, b): expected a profile with it (--profile)")
        # Full-sequence models have no trained block length.
        if self.commits != "model" or policy.family != "block-diffusion":
            return
        if config.both_ways:
            raise PolicyError(
                f"{policy.name}: decodes block by block, and {config.name} ({config.architecture}) was trained in both "
                "directions: expected a full-sequence policy, as vanilla"
            )
        if policy.block_length > config.block_length:
            raise PolicyError(
                f"{policy.name}: block_length is {policy.block_length}, and {config.name} was trained with "
                f"{config.block_length}: expected at most that"
            )

    def setting(self, world: World) -> tuple[Setting | None, Limits]:
        """The setting, if there is a profile, and limits: the profile's, else the device's."""
        if self.profile is None:
            loaded = self.loaded
            return None, limits_on(world.parsed_policy(), loaded.memory, loaded.device, loaded.model.config)
        setting = Setting(world.parsed_policy(), self.profile, world.workload)
        return setting, setting.limits

    def serving(self, world: World, requests: Trace, prompts: Prompts) -> tuple[Serving, Setting | None]:
        """Ready to serve; the setting draws commits (None: the weights decide)."""
        from ..live.session import Serving  # loads PyTorch

        setting, limits = self.setting(world)
        policy, draws, latency, eos = world.parsed_policy(), None, None, tuple[int, ...]()
        if setting is not None:
            policy = setting.policy
        drawing = setting if self.commits == "twin" else None
        if drawing is not None:
            draws = drawing.draws(world.seed, requests)
        if self.profile is not None:
            latency = self.profile.latency
        if world.ends_at_eos:
            eos = self.loaded.model.config.eos
        graphs = self.loaded.graph_cache
        serving = Serving(
            self.loaded.model,
            policy,
            limits,
            prompts,
            draws=draws,
            latency=latency,
            graphs=graphs,
            eos=eos,
            seed=world.seed,
        )
        return serving, drawing

    def serve(
        self, world: World, requests: Trace, append: Append | None, progress: Progress | None
    ) -> tuple[RunRecords, Exception | None]:
        """Serve in real time on one replica; the result, and the error that ended it early.

        DsimError if world and device do not fit.
        """
        from ..live.session import run  # loads PyTorch

        loaded, policy = self.loaded, world.parsed_policy()
        self.check(world)
        check_fit(requests, self.setting(world)[1], policy)
        if world.ends_at_eos:  # the weights say where an answer ends early
            limit = requests.limit
            requests = replace(requests, output_length=limit, extras={**requests.extras, "max_tokens": limit.tolist()})
        serving, drawing = self.serving(world, requests, self._prompts(world.seed))
        done = run(
            serving,
            [requests.request(i) for i in range(len(requests))],
            emit=world.emit,
            concurrency=world.concurrency,
            append=append,
            progress=progress,
            sample=loaded.clocks.sample,
        )
        commit_model, law = None, None
        if drawing is not None:
            commit_model, law = drawing.commits, drawing.law
        records = RunRecords(
            policy,
            serving.limits,
            commit_model,
            done.table,
            totals=done.totals,
            end=done.seconds,
            interrupted=done.interrupted,
            num_made_ready=done.num_made_ready,
            law=law,
        )
        return records, done.failure

    def _prompts(self, seed: int) -> Prompts:
        from ..live.prompts import random_prompts  # loads PyTorch, as the next
        from ..profiler.measure import prompts_of

        if self.prompts is None:
            return random_prompts(self.loaded.model.config, seed)
        return prompts_of(self.loaded, self.prompts, seed, self.tokenizer)

    def about(self) -> Callable[[Sequence[RunRecords]], dict[str, Any]]:
        """A run's fields: device, settings, host's time.

        Asks the device now: a failure must not cost a measurement.
        """
        settings = dict(self.loaded.settings)
        labels = {name: settings.pop(name, "") for name in ("device", "model", "dtype", "weights")}

        def about(results: Sequence[RunRecords]) -> dict[str, Any]:
            live = LiveInfo(
                **labels,
                prompts=self.prompts or "random tokens",
                host_ms={r.policy.name: 1e3 * r.totals.host.quantile(0.5) for r in results if r.totals.host.count},
                made_ready={result.policy.name: result.num_made_ready for result in results},
                settings=settings | self.loaded.clocks.quantities(),
            )
            fields = {"question": "What did its clients see?", "driver": "live", "commits": self.commits, "live": live}
            if self.profile is None:
                fields |= {"profiles": {}, "notes": ()}
            return fields

        return about


def check_eos(policy: Policy, config: ModelConfig | CanvasConfig, commits: str) -> None:
    """DsimError unless an EOS may end requests."""
    if not config.eos:
        raise DsimError(f"--eos ends requests, and {config.name} names no token that does: expected an eos_token_id")
    if commits != "model":
        raise DsimError(f"--eos ends requests where the weights say so, and commits is {commits}: expected model")
    if policy.family == "full-sequence":
        raise DsimError(f"--eos ends requests between blocks, and {policy.name} denoises a canvas of fixed length")
