"""Kernels compiled before the clock starts, in every variant that steps may launch."""

import torch

from ..engine.policy import Policy
from ..kernels.confidence import confidence_of_hidden
from ..kernels.ragged_paged_attention import Sequences, ragged_paged_attention
from .forward import Forward

# Rows from which the head's launch differs: kernels/confidence/kernel.py.
HEAD_ROWS = (1, 17, 33, 65, 256)


@torch.inference_mode()
def warm_kernels(forward: Forward, policy: Policy, most_tokens: int) -> None:
    """Launch attention and the head, without visible keys, in every variant of a policy's steps.

    Attention varies with the mean number of queries of a sequence and with splitting of keys. The other kernels have
    one variant, which the warm-up's requests launch. Nothing is written. most_tokens: of a step.
    """
    config, weight = forward.model.config, forward.model.head_weight
    whole = policy.granularity.whole_block and not (policy.eviction.evicts or policy.family == "full-sequence")
    most_pages = min(len(forward.attended[0]), 4096)
    queries = policy.block_length if whole else 1  # the fewest of a sequence; then doubled
    while True:
        for pages in {1, most_pages}:  # keys of one page are never split
            _attend(forward, queries, pages, policy.width)
        if queries * config.heads // config.kv_heads >= 128:
            break
        queries *= 2
    for rows in HEAD_ROWS:
        if rows <= max(1, most_tokens):
            hidden = torch.zeros(rows, config.hidden, dtype=weight.dtype, device=weight.device)
            confidence_of_hidden(hidden, weight, forward.temperature, forward.max_num_logits)


def _attend(forward: Forward, queries: int, pages: int, width: int) -> None:
    config, (keys, values) = forward.model.config, forward.attended
    device, heads = keys.device, config.heads // config.kv_heads * keys.shape[2]
    q = torch.zeros(queries, heads, config.head_dim, dtype=keys.dtype, device=device)
    table = torch.full((1, pages), -1, dtype=torch.int32, device=device)
    start = torch.tensor([0, queries], dtype=torch.int32, device=device)
    nowhere = torch.zeros(queries, dtype=torch.int32, device=device)
    listed = torch.zeros((1, width), dtype=torch.bool, device=device)
    ragged_paged_attention(q, keys, values, Sequences(table, start, nowhere, nowhere[:1], listed, 1), check=False)
