"""Peak device memory of public research codes, from the tensors alive at once (batch 1, bf16).

Copies of logits and cached features are counted in the codes and from Sparse-dLLM's Table 1; MaskKV's activations a
token are the slope of its Fig. 4.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ...profiler.models import BYTES, ModelShape
from ...profiler.profile import gb

GIB = 2**30
LOGIT_COPIES = 3  # LLaDA's loop: new, previous, softmax
FLOAT64 = 8  # bytes: Fast-dLLM casts logits to float64 and keeps their softmax
CACHE_COPIES, CACHE_BYTES = 2, 12  # dLLM-Cache: bf16 logits of all rows, three fp32 copies of the response's
LOGITS, KEYS, OUTPUTS = "logits", "keys and values", "cached outputs"
MASKKV_ACTIVATIONS = 0.25 * 2**20  # bytes a prompt token (MaskKV, Fig. 4)


@dataclass(frozen=True)
class Sizes:
    """What decides a request's memory."""

    model: ModelShape
    prompt: int  # tokens
    output: int
    block: int
    retention: float = 0.5  # of the other tokens' keys (Sparse-dLLM)
    budget: int = 256  # keys a head (MaskKV)

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    def logits(self, rows: int, per_value: int = BYTES) -> int:
        return rows * self.model.vocab * per_value

    def keys(self, tokens: float) -> float:
        return tokens * self.model.kv_bytes_per_token

    def outputs(self, tokens: int) -> int:
        """Bytes: of attention and feed-forward."""
        return 2 * self.model.layers * tokens * self.model.hidden * BYTES


Held = dict[str, float]  # bytes by tensor


def held(run: str, sizes: Sizes) -> Held:
    """By tensor, weights first, under one of RUNS."""
    return {"weights": sizes.model.weight_bytes, **RUNS[run](sizes)}


def peak(run: str, sizes: Sizes) -> float:
    """In bytes, with weights."""
    return sum(held(run, sizes).values())


def shortage(run: str, sizes: Sizes, capacity: int) -> str | None:
    """Which tensor exceeds `capacity` bytes; None: it fits."""
    found = held(run, sizes)
    more = sum(found.values()) - capacity
    if more <= 0:
        return None
    tensor = max((name for name in found if name != "weights"), key=lambda name: found[name])
    others = ", ".join(f"{name} {gb(size)}" for name, size in found.items() if name != tensor)
    return f"out of memory by {gb(more)} of {gb(capacity)}: {tensor} take {gb(found[tensor])} in addition to {others}"


def _vanilla(s: Sizes) -> Held:
    return {LOGITS: LOGIT_COPIES * s.logits(s.tokens)}


def _sparse(s: Sizes) -> Held:
    return _vanilla(s) | {KEYS: s.keys(int(s.retention * (s.tokens - s.block)))}


def _fast(s: Sizes) -> Held:
    return {LOGITS: s.logits(s.tokens, BYTES + 2 * FLOAT64), KEYS: s.keys(s.tokens)}


def _cache(s: Sizes) -> Held:
    logits = CACHE_COPIES * s.logits(s.tokens) + s.logits(s.output, CACHE_BYTES)
    return {LOGITS: logits, KEYS: s.keys(s.tokens), OUTPUTS: s.outputs(s.tokens)}


def _long_cache(s: Sizes) -> Held:
    """dLLM-Cache in MaskKV's harness; its prompts are long enough for activations to matter."""
    logits = CACHE_COPIES * s.logits(s.tokens)
    own = {LOGITS: logits, KEYS: s.keys(s.tokens), OUTPUTS: s.outputs(s.tokens)}
    return own | {"activations": MASKKV_ACTIVATIONS * s.prompt}


def _masks_only(s: Sizes) -> Held:
    """The LM head on masks."""
    return _long_cache(s) | {LOGITS: CACHE_COPIES * s.logits(s.output)}


def _no_prompt_outputs(s: Sizes) -> Held:
    """And no outputs of the prompt."""
    return _masks_only(s) | {OUTPUTS: s.outputs(s.output)}


def _offline(s: Sizes) -> Held:
    """And keys evicted by layer while the prompt is read: one layer holds all keys."""
    kept = s.keys(min(s.budget, s.prompt)) + s.keys(s.prompt) / s.model.layers
    return _no_prompt_outputs(s) | {KEYS: s.keys(s.output) + kept}


RUNS: dict[str, Callable[[Sizes], Held]] = {
    "vanilla": _vanilla,
    "sparse-dllm": _sparse,
    "fast-dllm": _fast,
    "dllm-cache": _cache,
    "maskkv: dllm-cache": _long_cache,
    "maskkv: mask-only projection": _masks_only,
    "maskkv: prompt-state exclusion": _no_prompt_outputs,
    "maskkv: online budgets": _no_prompt_outputs,
    "maskkv: offline budgets": _offline,
}
