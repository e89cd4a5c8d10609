"""Each row's most probable token and its probability, in plain PyTorch and fp32: the specification."""

from torch import Tensor


def confidence(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    tokens = logits.argmax(-1)
    below = logits - logits.gather(1, tokens[:, None])
    probabilities = 1.0 / (below / (temperature or 1.0)).exp().sum(-1)
    return tokens.masked_fill(probabilities.isnan(), 0), probabilities
