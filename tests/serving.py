"""Small worlds of full-sequence models: an engine fed by hand, and one driven by a plain loop."""

from dataclasses import replace
from typing import Any

from dsim.engine.commits import CommitDraws, ScheduledCommits
from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.latency import LatencyModel
from dsim.engine.policies.dllm_serve import PhaseMultiplexed
from dsim.engine.spec import Policy, parse
from dsim.engine.step import Phase, StepOutcome, StepPlan
from dsim.profiler.profile import Profile, load
from dsim.sim.step_model import StepModel
from dsim.traces import Trace

from .worlds import SECOND, TOY_MODEL, PlainLoop, World

LETTERS = {
    Phase.FULL: "F", Phase.PACK: "K", Phase.REUSE: "r", Phase.REFRESH_RESPONSE: "G", Phase.REFRESH_PROMPT: "Q",
    Phase.PARTIAL: "p", Phase.IDLE: "-",
}  # fmt: skip


def serving_profile(latency: LatencyModel | None = None) -> Profile:
    """A shipped full-sequence profile with another latency and commit model: 1 s a step, and 1 ms a token."""
    latency = latency or LatencyModel(((0.0, 1.0),), 0.001)
    return replace(load("rtx4090-48gb-llada-8b"), latency=latency, commits=(TOY_MODEL,))


class Served(World):
    """An engine fed by hand: steps take 1 s and commit what the schedule has."""

    def __init__(
        self, spec: str, *, num_pages: int = 10**6, max_batch: int | None = None, requests: int = 8, emit: str = "block"
    ) -> None:
        policy = parse(spec)
        rows = max_batch or policy.batching.max_batch or 512
        super().__init__(spec, num_pages=num_pages, max_batch=rows, requests=requests, emit=emit)
        self.draws: Any = ScheduledCommits(policy.block_length, policy.unmasking.denoising_steps)

    def step(self) -> str:  # type: ignore[override]
        """Run a step; it in words: `0F 3r`, each row's request and phase."""
        self.plan = plan = self.engine.schedule(self.now)
        if plan is None:
            return "nothing"
        self.now += 1.0
        self.engine.commit(StepOutcome(1.0, self.draws.draw(plan)), self.now)
        return " ".join(f"{i}{LETTERS[Phase(p)]}" for i, p in zip(plan.requests, plan.phases, strict=True))

    def steps(self, num: int) -> list[str]:
        return [self.step() for _ in range(num)]


class Loop(PlainLoop):
    """A full-sequence policy's plain loop."""

    def __init__(self, policy: Policy, trace: Trace, limits: Limits, *, emit: str = "block") -> None:
        block = policy.block_length
        draws: ScheduledCommits | CommitDraws = ScheduledCommits(block, policy.unmasking.denoising_steps)
        if policy.unmasking.strategy == "low_confidence_dynamic":
            lengths = trace.input_length, trace.output_length
            draws = CommitDraws(TOY_MODEL.for_block(block), 0, *lengths, block)
        engine = Engine(policy, limits, RequestTable(len(trace)), emit=emit)
        super().__init__(engine, StepModel(SECOND, draws, policy.cache), trace)
        self.most = policy.batching.most_tokens or 10**9

    def _check(self, plan: StepPlan, outcome: StepOutcome) -> None:
        f = plan.features
        assert f.batch <= self.limits.max_batch
        assert f.tokens == plan.num_tokens.sum() <= self.most
        assert (f.sum_kv, f.sum_q_kv) == (plan.num_keys.sum(), (plan.num_tokens * plan.num_keys).sum())
        assert 0 <= f.head_rows == f.sampled_rows
        assert (plan.num_tokens <= plan.num_keys.max()).all()
        assert plan.pages <= self.limits.num_pages
        assert not set(plan.requests.tolist()) & set(self.ended)
        # Nobody is put off but by the budget of a step.
        assert plan.running == len(plan.requests) or isinstance(self.policy.batching, PhaseMultiplexed)
        self._check_commits(plan, outcome)
