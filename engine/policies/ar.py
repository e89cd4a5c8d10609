"""Autoregressive decoding: one token a sequence and step, on the same latency model."""

from dataclasses import dataclass

from ..errors import PolicyError
from ..part import BATCHING_SPACE, Granularity, Policy, Preset
from ..rows.tokens import TOKENS
from .lmdeploy_2025 import EVERY_STEP


@dataclass(frozen=True)
class Autoregressive(Granularity):
    rows = TOKENS
    family = "autoregressive"
    block_length = 1

    def check(self, policy: Policy) -> None:
        if policy.eviction.evicts:
            raise PolicyError(f"{policy.name}: an autoregressive model has no block to evict from")


PRESETS = {
    "ar": Preset(
        Policy("ar", batching=EVERY_STEP, granularity=Autoregressive()),
        "max_batch",
        "autoregressive: one token a sequence and step, continuous batching",
        space=BATCHING_SPACE,
    )
}
