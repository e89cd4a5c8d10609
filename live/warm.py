"""Compile kernels before the clock starts, in every variant that steps may launch."""

import torch
from torch import Tensor

from ..engine.policy import Policy
from ..kernels.confidence import confidence_of_hidden
from ..kernels.grouped_experts import grouped_experts
from ..kernels.ragged_paged_attention import ragged_paged_attention
from .forward import Forward, sequences_of
from .graphs import blank
from .model import MixedFeedForward

# An expert's mean rows at which tiles change: kernels/grouped_experts/kernel.py.
EXPERT_ROWS = (32 / 3, 64 / 3, 128 / 3)


@torch.inference_mode()
def warm_kernels(forward: Forward, policy: Policy, most_tokens: int) -> None:
    """Launch attention (without keys), head and experts in every variant of a policy's steps; writes nothing.

    Attention varies with mean queries and the splitting of keys, experts with mean rows; the warm-up's requests launch
    the rest. most_tokens: of a step.
    """
    config, weight = forward.model.config, forward.model.head_weight
    whole_blocks = policy.granularity.whole_block and not (policy.eviction.evicts or policy.family == "full-sequence")
    most_pages = min(len(forward.attended[0]), 4096)
    queries = policy.block_length if whole_blocks else 1  # fewest of a sequence; doubled below
    while True:
        for pages in {1, most_pages}:  # one page is never split
            _attend(forward, queries, pages, policy.width)
        if queries * config.heads // config.kv_heads >= 128:
            break
        queries *= 2
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


def _attend(forward: Forward, queries: int, pages: int, width: int) -> None:
    config, (keys, values) = forward.model.config, forward.attended
    heads = config.heads // config.kv_heads * keys.shape[2]
    q = torch.zeros(queries, heads, config.head_dim, dtype=keys.dtype, device=keys.device)
    inputs = forward.inputs(blank(queries, 1, pages, width, 1).arrays())
    ragged_paged_attention(q, keys, values, sequences_of(inputs, 1))
