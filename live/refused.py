"""Policies that the executors do not run."""

from collections.abc import Mapping

from ..engine.errors import PolicyError
from ..engine.policies.focus import Focus
from ..engine.policies.sglang import Rounds
from ..engine.policy import Policy
from ..engine.prefix import caches_prefixes
from .config import ModelConfig


def refuse(policy: Policy, reasons: Mapping[str, bool]) -> None:
    """PolicyError says the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise PolicyError(f"{policy.name}: {reason}")


def shares_pages(policy: Policy) -> dict[str, bool]:
    return {"prefix_caching is true, and dsim live shares no pages: expected false": caches_prefixes(policy)}


def check_policy(policy: Policy) -> None:
    """PolicyError if no decoder's executor runs it."""
    batching, eviction = policy.batching, policy.eviction
    refuse(policy, {
        "denoises canvases, which no mask model does: expected a DiffusionGemma": not policy.granularity.on_a_grid,
        f"dsim live prefills a prompt apart from others' steps, and {type(batching).__name__} beside them":
            batching.pieces and not isinstance(batching, Rounds),
        **shares_pages(policy),
        "strategy is law, which a twin draws by, and dsim live unmasks by confidence":
            policy.unmasking.strategy == "law",
        f"dsim live cannot evict as {type(eviction).__name__} does: expected a kind of Focus":
            eviction.by_importance and not isinstance(eviction, Focus),
    })  # fmt: skip


def check_whole_blocks(policy: Policy, config: ModelConfig) -> None:
    """PolicyError unless all steps compute whole blocks: rows predict the next position."""
    refuse(policy, {
        f"leaves positions out of its steps, and the rows of {config.name} ({config.architecture}) say the position "
        "after theirs: expected whole blocks, as lmdeploy-bd32":
            not policy.granularity.whole_block or policy.eviction.evicts,
        f"head is masks, and the row before a mask says what {config.name} has there: expected all":
            policy.unmasking.head == "masks",
        f"prefills a prompt in pieces, and a row of {config.name} says the position after its own, which is of the "
        "next piece: expected lmdeploy-bd32": policy.batching.pieces,
    })  # fmt: skip
