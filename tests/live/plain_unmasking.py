"""Which masks of a block a denoising step commits, as the published loops have it (full-sequence-diffusion.md 1.1)."""

from dsim.engine.unmasking import Unmasking


def chosen(rule: Unmasking, block: int, best: dict[int, float], masks: set[int], step: int) -> set[int]:
    """The positions that step `step` of the block commits, by their confidences."""
    order = sorted(masks, key=lambda p: (-best[p], p))
    if rule.strategy == "low_confidence_dynamic":
        return {order[0]} | {p for p in masks if best[p] >= rule.threshold}
    least, more = divmod(block, rule.denoising_steps or block)
    num = least + (1 if step < more else 0)
    if rule.strategy == "sequential":
        return masks & set(range(min(masks), min(masks) + num))
    return set(order[:num])
