"""Compile kernels before the clock starts, in every variant that steps may launch."""

import torch
from torch import Tensor

from ..engine.spec import Policy
from ..kernels.confidence import confidence_of_hidden
from ..kernels.grouped_experts import grouped_experts
from ..kernels.ragged_paged_attention import Sequences, ragged_paged_attention
from .forward import Forward
from .model import MixedFeedForward

# An expert's mean rows at which tiles change: kernels/grouped_experts/grouped_experts_kernel.py.
EXPERT_ROWS = (32 / 3, 64 / 3, 128 / 3)


@torch.inference_mode()
def warm_kernels(forward: Forward, policy: Policy, most_tokens: int) -> None:
    """Launch attention (without keys), head and experts in every variant of a policy's steps; writes nothing.

    Attention varies with mean queries and the splitting of keys, experts with mean rows; the warm-up's requests launch
    the rest. most_tokens: of a step.
    """
    config, weight = forward.model.config, forward.model.head_weight
    queries = 1  # fewest of a sequence
    if policy.granularity.whole_block and not (policy.eviction.evicts or policy.family == "full-sequence"):
        queries = policy.block_length
    warm_attention(*forward.attended, config.heads // config.kv_heads, queries)
    hidden = torch.zeros(1, config.hidden, dtype=weight.dtype, device=weight.device)
    confidence_of_hidden(hidden, weight, forward.temperature, forward.max_num_logits)
    layer = next((x for x in forward.model.modules() if isinstance(x, MixedFeedForward)), None)
    if layer is not None:
        warm_experts(layer.gate_up, layer.down, layer.about.top_k, "silu", most_tokens)


@torch.inference_mode()
def warm_experts(gate_up: Tensor, down: Tensor, top_k: int, activation: str, most_tokens: int) -> None:
    """Launch the experts' kernels in every variant of steps of up to `most_tokens` rows."""
    for rows in (1, *(int(mean * len(gate_up) / top_k) + 1 for mean in EXPERT_ROWS)):
        if rows <= max(1, most_tokens):
            x = torch.zeros(rows, gate_up.shape[2], dtype=gate_up.dtype, device=gate_up.device)
            chosen = torch.arange(top_k, device=x.device).expand(rows, -1)
            grouped_experts(x, chosen, torch.ones(rows, top_k, device=x.device), gate_up, down, activation)


@torch.inference_mode()
def warm_attention(
    keys: Tensor, values: Tensor, group: int, queries: int = 1, window: int = 0, scale: float | None = None
) -> None:
    """Launch attention for sequences of `queries` rows and more. group: query heads for one of keys."""
    device = keys.device
    while True:
        for pages in {1, min(len(keys), 4096)}:  # one page is never split
            table = torch.full((1, pages), -1, dtype=torch.int32, device=device)
            start = torch.tensor([0, queries], dtype=torch.int32, device=device)
            zeros = torch.zeros(queries, dtype=torch.int32, device=device)
            listed = torch.zeros(1, 1, dtype=torch.bool, device=device)
            q = keys.new_zeros(queries, group * keys.shape[2], keys.shape[3])
            sequences = Sequences(table, start, zeros, zeros[:1], listed=listed, block_length=1)
            ragged_paged_attention(q, keys, values, sequences, window, scale)
        if queries * group >= 128:
            return
        queries *= 2
