"""A replica's memory: weights, KV pages and a step's tensors, and whether they fit.

Engines size the page pool beforehand (profiler/profile.py); this adds a step's tensors (profiler/footprint.py), and
names the largest if the sum does not fit.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..engine.engine import Limits
from ..engine.errors import ProfileError, cut
from ..engine.part import Policy
from ..engine.rows.passes import RowPosition
from ..profiler.footprint import SERVING, of_forward
from ..profiler.profile import gb
from ..traces import Trace
from .setting import Setting


@dataclass(frozen=True)
class Forward:
    """What a forward's memory depends on."""

    tokens: int  # query positions
    head_rows: int  # rows through the LM head


@dataclass(frozen=True)
class StepMemory:
    """One replica's memory, in bytes over its GPUs."""

    setting: Setting

    @property
    def capacity(self) -> int:
        return self.setting.profile.memory.capacity_bytes

    @property
    def standing(self) -> dict[str, int]:
        """Permanently held bytes, by name."""
        memory = self.setting.memory
        pages = (self.setting.limits.num_pages + 1) * self.setting.policy.memory.page_size * memory.kv_bytes_per_token
        rows = self.setting.limits.max_batch * memory.workspace_bytes
        sizes = {"weights": memory.weight_bytes, "KV pages": pages, "rows": rows}
        return {name: size for name, size in sizes.items() if size}

    def sizes(self, forward: Forward) -> dict[str, int]:
        """Bytes of a forward's tensors: each GPU holds the whole residual stream and logits."""
        cap = getattr(self.setting.policy.batching, "max_num_logits", None)
        # A workspace holds the copies of its row's logits.
        use = SERVING
        if self.setting.memory.workspace_bytes:
            use = replace(SERVING, logit_bytes=4)
        tensors = of_forward(self.setting.profile.model, forward.tokens, forward.head_rows, how=use, max_num_logits=cap)
        return {name: self.setting.profile.device.count * size for name, size in tensors.items()}

    def largest(self, requests: Trace) -> Forward:
        """The largest forward of these requests."""
        forwards = _forwards(self.setting.policy, self.setting.limits, requests)
        return max(forwards, key=lambda forward: sum(self.sizes(forward).values()))

    def shortage(self, forward: Forward) -> str | None:
        """The tensor of a forward that exceeds the memory, and by how much; None if it fits."""
        tensors = self.sizes(forward)
        lack = sum(self.standing.values()) + sum(tensors.values()) - self.capacity
        if lack <= 0:
            return None
        tensor = max(tensors, key=tensors.__getitem__)
        standing = ", ".join(f"{name} {gb(size)}" for name, size in self.standing.items())
        return (
            f"out of memory by {gb(lack)} of {gb(self.capacity)}: {tensor} of a forward of {forward.tokens} tokens and "
            f"{forward.head_rows} rows of logits take {gb(tensors[tensor])} in addition to {standing}"
        )

    def to_json(self, requests: Trace) -> dict[str, Any]:
        """For run.json: GB by name, at the largest forward."""
        forward = self.largest(requests)
        sizes = {**self.standing, **self.sizes(forward)}
        return {
            "policy": self.setting.policy.name,
            "tokens": forward.tokens,
            "head_rows": forward.head_rows,
            "gb": {name: round(size / 1e9, 3) for name, size in sizes.items()},
            "capacity_gb": round(self.capacity / 1e9, 3),
            "shortage": self.shortage(forward),
        }


def check_fits(setting: Setting, requests: Trace) -> None:
    """ProfileError if the largest forward of these requests exceeds the memory."""
    memory = StepMemory(setting)
    if shortage := memory.shortage(memory.largest(requests)):
        raise ProfileError(f"{cut(setting.policy.name)}: {shortage}")


def longest(requests: Trace) -> Trace:
    """The requests that can be in a largest forward."""
    return requests.take(np.sort(np.argsort(requests.input_length + requests.limit)[-8192:]))  # more than its rows


def _forwards(policy: Policy, limits: Limits, requests: Trace) -> list[Forward]:
    """Upper bounds of these requests' forwards."""
    block, batching = policy.block_length, policy.batching
    rows = min(limits.max_batch, len(requests))
    budget = limits.max_prefill_tokens or batching.max_prefill_tokens
    if policy.family == "full-sequence":
        prompt, canvas = requests.input_length, -(-requests.limit // block) * block
        if batching.pads:
            prompt, canvas = np.array([prompt.max()]).repeat(rows), np.array([canvas.max()]).repeat(rows)
        length = prompt + canvas
        cache: Any = policy.cache  # an ApproximateCache
        head = cache.head_rows(
            RowPosition(
                prompt=prompt, length=length, start=prompt, step=0 * prompt, block_step=0 * prompt, block=block
            ),
            length,
        )
        tokens = int(np.sort(length)[-rows:].sum())
        if batching.most_tokens is not None:
            tokens = min(tokens, batching.most_tokens)
        return [Forward(tokens, min(tokens, int(np.sort(head)[-rows:].sum())))]
    decode = rows * policy.width
    if batching.pieces:  # prompts and blocks in one forward
        tokens = batching.most_tokens or decode
        if not policy.granularity.on_a_grid:
            tokens = max(tokens, budget)
        return [Forward(tokens, min(tokens, decode))]
    # A preempted request prefills its answer too.
    prompts = -(-np.maximum(1, requests.limit + requests.input_length) // block) * block
    first = min(budget, int(np.sort(prompts)[-rows:].sum()))
    return [Forward(decode, decode), Forward(first, min(rows, max(1, first // block)) * block)]
