"""Draw tokens from logits by temperature, with confidences."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.errors import ModelError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; chance is keyed by request, position and step.

    A token comes from soft-max(logits / temperature); its confidence is the probability there.
    """

    temperature: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ModelError(f"--temperature is {self.temperature}, expected a finite number above 0")


def sample(
    logits: Tensor, uniform: Tensor | None, sampling: Sampling | None, by_entropy: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tokens [rows] int64 and confidences [rows] fp32, of logits [rows, vocab] and uniform numbers [rows] fp64.

    sampling: None: the likeliest. by_entropy: confidence is negative entropy, in nats (Dream's "entropy").
    """
    if sampling is None:
        probabilities = logits.float().softmax(dim=-1)
        best, tokens = probabilities.max(dim=-1)
        return tokens, certainty(probabilities) if by_entropy else best
    probabilities = (logits.float() / sampling.temperature).softmax(dim=-1)
    assert uniform is not None, "chance is keyed"
    tokens = drawn(probabilities, uniform)
    return tokens, certainty(probabilities) if by_entropy else probabilities.gather(1, tokens[:, None])[:, 0]


def certainty(probabilities: Tensor) -> Tensor:
    """Negative entropy of rows, in nats."""
    return probabilities.xlogy(probabilities).sum(dim=-1)


def drawn(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """A token a row of probabilities [rows, vocab], by uniform numbers [rows] fp64."""
    reached = probabilities.double().cumsum(dim=-1)
    target = uniform[:, None] * reached[:, -1:]
    return torch.searchsorted(reached, target, right=True)[:, 0].clamp(max=probabilities.shape[1] - 1)


def sample_of_hidden(
    hidden: Tensor, head: Tensor, uniform: Tensor | None, sampling: Sampling | None, max_num_logits: int,
    by_entropy: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`sample` of hidden [rows, h] @ head.T, head [vocab, h]; at most max_num_logits rows of logits."""
    tokens = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    confidence = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for low in range(0, len(hidden), max_num_logits):
        rows = slice(low, low + max_num_logits)
        tokens[rows], confidence[rows] = sample(
            (hidden[rows] @ head.T).float(), None if uniform is None else uniform[rows], sampling, by_entropy
        )
    return tokens, confidence
