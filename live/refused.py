"""Policies that the executors do not run."""

from collections.abc import Mapping

from ..engine.errors import PolicyError
from ..engine.policies.focus import Focus
from ..engine.policies.sglang_0_5 import Rounds
from ..engine.prefix import caches_prefixes
from ..engine.spec import Policy


def refuse(policy: Policy, reasons: Mapping[str, bool]) -> None:
    """PolicyError says the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise PolicyError(f"{policy.name}: {reason}")


def shares_pages(policy: Policy) -> dict[str, bool]:
    return {"prefix_caching is true, and dsim live shares no pages: expected false": caches_prefixes(policy)}


def check_policy(policy: Policy) -> None:
    """PolicyError if no decoder's executor runs it."""
    batching, eviction = type(policy.batching).__name__, type(policy.eviction).__name__
    mixes = policy.batching.pieces and not isinstance(policy.batching, Rounds)
    is_unknown = policy.eviction.by_importance and not isinstance(policy.eviction, Focus)
    reasons = {
        "denoises canvases, which no mask model does: expected a DiffusionGemma": not policy.granularity.on_a_grid,
        f"dsim live prefills a prompt apart from others' steps, and {batching} beside them": mixes,
        "strategy is law, and dsim live unmasks by confidence": policy.unmasking.strategy == "law",
        f"dsim live cannot evict as {eviction} does: expected a kind of Focus": is_unknown,
    }
    refuse(policy, reasons | shares_pages(policy))


def check_caps(policy: Policy) -> None:
    """PolicyError for a discipline that caps denoising steps."""
    capped = policy.discipline.questions & {"steps", "steps_now"}
    refuse(policy, {f"its discipline answers {name}: expected vLLM with dsim-hooks": True for name in sorted(capped)})
