"""A setting: a policy on a profile, resolved once for twin, server, device and planner."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from ..engine import commits as laws
from ..engine.engine import Engine, Limits
from ..engine.errors import PolicyError, ProfileError, cut
from ..engine.journal import RequestTable
from ..engine.latency import LatencyModel
from ..engine.prefix import Prefixes
from ..engine.spec import Policy
from ..profiler.hardware import default_max_batch
from ..profiler.profile import CLOSE, Device, MemoryModel, Profile, of_family, weights_of
from ..traces import Trace
from ..traces.trace import Ints
from .step_model import StepModel

MAX_STEPS = "diffusion_max_steps"  # trace column: most denoising steps of a canvas or block


@dataclass(frozen=True)
class Setting:
    """A policy on a profile; properties raise ProfileError if the profile lacks data."""

    policy: Policy
    profile: Profile
    workload: str | None = None  # of commit models or laws; None: the first

    def __post_init__(self) -> None:
        batching = self.policy.batching.on(self.profile.device)
        if batching is not self.policy.batching:
            object.__setattr__(self, "policy", replace(self.policy, batching=batching))

    def check(self) -> Self:
        """Self; ProfileError if the profile lacks what decides commits, or its checkpoint is refused."""
        reason = refused(self.policy, self.profile)
        if reason:
            raise ProfileError(f"{cut(self.policy.name)}: {reason}")
        _ = self.commits
        return self

    @cached_property
    def memory(self) -> MemoryModel:
        return memory_of(self.policy, self.profile.memory)

    @cached_property
    def limits(self) -> Limits:
        profile, memory = self.profile, self.memory
        limits = limits_on(self.policy, profile.memory, profile.device, profile.model)
        windowed = profile.model.windowed
        if windowed is None or not memory.window_bytes_per_token or not self.policy.frees_windows:
            return limits
        return replace(
            limits, window=windowed.window, window_bytes=memory.window_bytes_per_token,
            kv_bytes=memory.kv_bytes_per_token,
        )  # fmt: skip

    @cached_property
    def law(self) -> laws.CanvasLaw | None:
        """The law of steps per block, or None."""
        policy = self.policy
        if policy.commits_by != "law":
            return None
        max_steps = policy.unmasking.most_steps(policy.block_length)
        return self.profile.canvas_law(self.workload, policy.block_length, max_steps)

    @cached_property
    def commits(self) -> laws.CommitModel | None:
        """The commit model; None for autoregressive models, laws and schedules.

        ProfileError if the profile lacks it or other data that the policy draws from.
        """
        policy, profile, unmasking = self.policy, self.profile, self.policy.unmasking
        both_ways = policy.family == "full-sequence"
        if both_ways != (profile.family == "full-sequence"):
            family = {True: "full-sequence", False: "block-diffusion"}[both_ways]
            raise ProfileError(
                f"profile {profile.name} is of family {profile.family}, and {cut(policy.name)} of {policy.family}: "
                f"expected a {family} profile, of a file or shipped: {', '.join(of_family(family))}"
            )
        if self.law is not None or policy.commits_by != "confidence":
            return None
        if unmasking.strategy != "low_confidence_dynamic":
            raise PolicyError(
                f"{cut(policy.name)}: strategy is {unmasking.strategy}, and commit models are of "
                "low_confidence_dynamic, the only one the twin draws (dsim live runs it)"
            )
        _ = self.deltas
        model = self._fitted_at(self._fitted_threshold())
        self._of_thresholds(model)
        return model

    @property
    def drawn(self) -> laws.CommitModel | laws.CanvasLaw | None:
        """What sets the pace of blocks, or None."""
        return self.commits or self.law

    @cached_property
    def by_threshold(self) -> dict[float, laws.CommitModel]:
        """Commit models by threshold; empty if all steps share one."""
        if self.commits is None:
            return {}
        return self._of_thresholds(self.commits)

    @cached_property
    def deltas(self) -> laws.ImportanceDeltas | None:
        """The law of importance; None if the policy does not evict by it."""
        if not self.policy.eviction.by_importance:
            return None
        if self.profile.focus is None:
            raise ProfileError(
                f"profile {self.profile.name} has no importance deltas (focus is null), and "
                f"{cut(self.policy.name)} evicts by them: expected a profile that does"
            )
        return self.profile.focus

    def draws(self, seed: int, requests: Trace) -> laws.Commits | None:
        """Source of a run's commits; None if tokens come one by one."""
        policy, unmasking = self.policy, self.policy.unmasking
        if policy.commits_by == "acceptance":
            return laws.TokenDraws(policy.granularity.acceptances, seed) if policy.width > 1 else None
        if self.law is not None:
            cap = caps_of(unmasking.most_steps(policy.block_length), requests)
            return laws.LawDraws(self.law, seed, len(requests), cap)
        if self.commits is None:
            return laws.ScheduledCommits(policy.block_length, unmasking.denoising_steps, unmasking.quotas(policy))
        return laws.CommitDraws(
            self.commits,
            seed,
            requests.input_length,
            requests.output_length,
            policy.width,
            deltas=self.deltas,
            max_tokens=requests.max_tokens,
            on_a_grid=policy.family == "block-diffusion",
            models=self.by_threshold,
            unmasking=unmasking if unmasking.chooses else None,
            ahead=policy.granularity.ahead_of,
        )

    def step_model(self, draws: laws.Commits | None) -> StepModel:
        """Predicts outcomes of steps."""
        policy = self.policy
        return StepModel(self.profile.latency, draws, policy.cache, policy.batching.hides_host)

    @property
    def _foreseen(self) -> LatencyModel:
        """The latency by which a policy chooses: as its steps are priced."""
        latency = self.profile.latency
        return latency if self.policy.batching.hides_host else latency.exposed()

    def engine(
        self, table: RequestTable, *, replica: int = 0, emit: str = "block", eos: bool = False,
        prefixes: Prefixes | None = None, limits: Limits | None = None, like: Engine | None = None,
    ) -> Engine:  # fmt: skip
        """A replica's engine; limits: a recorded run's, instead of the setting's. like: another replica."""
        return Engine(
            self.policy, limits or self.limits, table, replica=replica, latency=self._foreseen, emit=emit,
            eos=eos, prefixes=prefixes, like=like,
        )  # fmt: skip

    def _fitted_at(self, threshold: float) -> laws.CommitModel:
        policy = self.policy
        return self.profile.commit_model(self.workload, policy.block_length, threshold, policy.unmasking.temperature)

    def _of_thresholds(self, commits: laws.CommitModel) -> dict[float, laws.CommitModel]:
        """ProfileError if the profile lacks one."""
        unmasking = self.policy.unmasking
        if not unmasking.varies:
            return {}
        of_workload = replace(self, workload=commits.workload)
        try:
            return {threshold: of_workload._fitted_at(threshold) for threshold in unmasking.thresholds}
        except ProfileError as error:
            choices = ", ".join(f"{threshold:g}" for threshold in unmasking.thresholds)
            raise ProfileError(f"{cut(self.policy.name)} may choose thresholds {choices}: {error}") from None

    def _fitted_threshold(self) -> float:
        """The policy's threshold; for an engine's default the nearest fitted one."""
        unmasking, profile = self.policy.unmasking, self.profile
        threshold = float(unmasking.threshold)
        if threshold != unmasking.own_threshold or not profile.commits:
            return threshold
        name = self.workload or profile.commits[0].workload
        fitted = {m.threshold for m in profile.commits if m.workload == name}
        return min(fitted, key=lambda near: (round(abs(near - threshold), 9), -near), default=threshold)


def refused(policy: Policy, profile: Profile) -> str:
    """Why a profile's checkpoint does not run so, or not on the policy's engine; empty: it does."""
    model = profile.model
    if model.experts is not None and model.experts.by_block is not None and policy.family == "block-diffusion":
        block = model.experts.by_block.block_length
        if policy.block_length != block:
            return f"block_length is {policy.block_length}, expected {block}, by which {model.name} routes experts"
    reason = policy.batching.refuses_quantised(profile.family)
    if reason and profile.memory.weight_bytes < (1 - CLOSE) * model.weight_bytes:
        return f"{profile.name} has weights of {weights_of(profile)}, and {reason}"
    return ""


def limits_on(policy: Policy, memory: MemoryModel, device: Device, model: Any) -> Limits:
    """A replica's limits in this memory on the device. model: a profile's, or a loaded configuration."""
    batching, memory = policy.batching, memory_of(policy, memory)
    max_batch = batching.max_batch
    if max_batch is None:
        usual = batching.batch_on(device, default_max_batch(device.compute_capability), policy.block_length)
        max_batch = memory.usual_rows(usual)
    max_batch = min(max_batch, policy.granularity.most_rows(policy))
    num_pages, budget = policy.memory.num_pages, batching.max_prefill_tokens
    if num_pages is None:
        # Shrink a prefill whose logits leave no room for pages.
        rows = batching.logit_rows(policy, max_batch)
        num_pages, budget = memory.fit(policy.memory.page_size, max_batch, budget, rows)
    return Limits(
        num_pages=num_pages,
        context_limit=model.context_limit,
        max_batch=max_batch,
        max_prefill_tokens=budget,
        state_tokens=model.state_tokens,
    )


def memory_of(policy: Policy, memory: MemoryModel) -> MemoryModel:
    """The memory as the policy uses it.

    No sampling workspace without canvases; with a block drafter its weights, keys and values. A policy that treats all
    layers alike also keeps every token in layers with a window.
    """
    if policy.granularity.drafts_blocks:
        memory = memory.with_drafter()
    if policy.rows.commits == "tokens":
        memory = replace(memory, workspace_bytes=0)
    if not policy.frees_windows:
        total = memory.kv_bytes_per_token + memory.window_bytes_per_token
        memory = replace(memory, kv_bytes_per_token=total, window_bytes_per_token=0)
    return memory


def caps_of(max_steps: int | None, requests: Trace) -> "Ints | int | None":
    """Most steps of a block: the policy's, or per request if the trace allows fewer."""
    limits = requests.extras.get(MAX_STEPS)
    if limits is None:
        return max_steps
    no_limit = max_steps or np.iinfo(np.int32).max
    return np.array([min(int(limit or no_limit), no_limit) for limit in limits])
