"""Autoregressive decoding: one token a sequence and step, on the same latency model."""

from dataclasses import dataclass, replace

from ..block import plan_prefill
from ..errors import PolicyError
from ..hooks import commit_rows, draw_rows, plan_prompts, plan_rows
from ..part import BATCHING_SPACE, Answers, Granularity, Policy, Preset
from ..tokens import commit_tokens, draw_tokens, plan_tokens
from .lmdeploy import EVERY_STEP


@dataclass(frozen=True)
class Autoregressive(Granularity):
    """One token a sequence and step, on the same latency model."""

    autoregressive = True
    block_length = 1

    def check(self, policy: Policy) -> None:
        if policy.eviction.evicts:
            raise PolicyError(f"{policy.name}: an autoregressive model has no block to evict from")

    def answers(self, policy: Policy) -> Answers:
        return {
            plan_prompts: plan_prefill, plan_rows: plan_tokens, commit_rows: commit_tokens, draw_rows: draw_tokens,
        }  # fmt: skip


PRESETS = {
    "ar": Preset(
        Policy("ar", batching=replace(EVERY_STEP, preempts="admitted"), granularity=Autoregressive()),
        "max_batch",
        "autoregressive: one token a sequence and step, continuous batching",
        space=BATCHING_SPACE,
    )
}
