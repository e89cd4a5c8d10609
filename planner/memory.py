"""The parts of a replica's memory, and which one binds when requests wait for memory."""

from collections.abc import Mapping

from ..sim.setting import Setting

WEIGHTS, PAGES, WINDOWED, WORKSPACE, FREE = (
    "weights", "KV pages", "windowed layers", "sampler workspace", "left free",
)  # fmt: skip
ROWS, TOKENS = "max rows", "tokens of a prefill"  # settings that may bind instead


def parts(setting: Setting, in_windows: float = 0.0) -> dict[str, int]:
    """Bytes by part with max_batch rows, without empty parts.

    in_windows: share of pages in layers with a window (Shares.in_windows), unless they have a pool. The workspace
    includes a step's logits.
    """
    policy, memory, limits = setting.policy, setting.memory, setting.limits
    pool = limits.num_pages * policy.memory.page_size * memory.kv_bytes_per_token
    of_windows = policy.memory.pools(limits.num_pages, limits.window_bytes, limits.kv_bytes)[1]
    windowed = of_windows * policy.memory.page_size * memory.kv_bytes_per_token or round(in_windows * pool)
    logits = memory.logit_bytes(
        limits.max_batch,
        limits.max_prefill_tokens or policy.batching.max_prefill_tokens,
        policy.batching.logit_rows(policy, limits.max_batch),
    )
    sizes = {
        WEIGHTS: memory.weight_bytes,
        PAGES: pool - windowed,
        WINDOWED: windowed,
        WORKSPACE: limits.max_batch * memory.workspace_bytes + logits,
    }
    sizes[FREE] = max(0, memory.capacity_bytes - sum(sizes.values()))
    return {name: size for name, size in sizes.items() if size}


def largest(sizes: Mapping[str, int]) -> str:
    """The part that binds when requests wait for pages."""
    return max((name for name in sizes if name not in (WEIGHTS, FREE)), key=lambda name: sizes[name])
