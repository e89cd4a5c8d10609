"""Each row's most probable token and its probability, in plain PyTorch and fp32: the specification."""

import torch
from torch import Tensor


def confidence(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    tokens = logits.argmax(-1)
    below = logits - logits.gather(1, tokens[:, None])
    probabilities = 1.0 / (below / (temperature or 1.0)).exp().sum(-1)
    return tokens.masked_fill(probabilities.isnan(), 0), probabilities


def confidence_of_hidden(
    hidden: Tensor, head: Tensor, temperature: float, max_num_logits: int
) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    probabilities = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    head = head.float().T
    for low in range(0, len(hidden), max_num_logits):
        rows = slice(low, low + max_num_logits)
        tokens[rows], probabilities[rows] = confidence(hidden[rows].float() @ head, temperature)
    return tokens, probabilities
