"""Draw tokens from logits, with confidences: by temperature and top-p, or Gumbel noise."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.chance import GOLDEN, MIX1, MIX2
from ..engine.errors import ModelError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; chance is keyed by request, position and step.

    Without `gumbel`: from soft-max(logits / temperature), cut to the likeliest tokens of total `top_p`; confidence is
    the probability there (Dream, Fast-dLLM v2, LMDeploy). With it: arg-max of logits / temperature + noise; confidence
    is the probability without noise (LLaDA).
    """

    temperature: float
    top_p: float = 1.0
    gumbel: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ModelError(f"--temperature is {self.temperature}, expected a finite number above 0")
        if not 0 < self.top_p <= 1:
            raise ModelError(f"--top-p is {self.top_p}, expected more than 0 and at most 1")
        if self.gumbel and self.top_p != 1:
            raise ModelError(f"--top-p is {self.top_p}, and --gumbel draws from all tokens: expected 1")


def sample(
    logits: Tensor, keys: Tensor | None, how: Sampling | None, by_entropy: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tokens [rows] int64 and confidences [rows] fp32, of logits [rows, vocab] and keys [rows] int64.

    how: None: the likeliest. by_entropy: confidence is negative entropy, in nats (Dream's "entropy").
    """
    if how is None:
        probabilities = logits.float().softmax(dim=-1)
        best, tokens = probabilities.max(dim=-1)
        return tokens, certainty(probabilities) if by_entropy else best
    if how.gumbel:
        assert keys is not None, "chance is keyed"
        # fp64, as LLaDA: fp32 noise near its bounds would favour some tokens.
        noisy = logits.double() / how.temperature + gumbel(keys, logits.shape[1])
        tokens = noisy.argmax(dim=-1)
        probabilities = logits.float().softmax(dim=-1)
        return tokens, certainty(probabilities) if by_entropy else probabilities.gather(1, tokens[:, None])[:, 0]
    probabilities = (logits.float() / how.temperature).softmax(dim=-1)
    if how.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays while those before sum below top_p: the first always.
        out = (ordered.cumsum(dim=-1) - ordered) >= how.top_p
        probabilities = torch.zeros_like(probabilities).scatter(1, order, ordered.masked_fill(out, 0.0))
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
    assert keys is not None, "chance is keyed"
    tokens = drawn(probabilities, keys)
    return tokens, certainty(probabilities) if by_entropy else probabilities.gather(1, tokens[:, None])[:, 0]


def certainty(probabilities: Tensor) -> Tensor:
    """Negative entropy of rows, in nats."""
    return probabilities.xlogy(probabilities).sum(dim=-1)


def drawn(probabilities: Tensor, keys: Tensor) -> Tensor:
    """A token a row of probabilities [rows, vocab], by keys [rows] int64."""
    reached = probabilities.double().cumsum(dim=-1)
    wanted = uniform(keys)[:, None] * reached[:, -1:]
    return torch.searchsorted(reached, wanted, right=True)[:, 0].clamp(max=probabilities.shape[1] - 1)


def sample_of_hidden(
    hidden: Tensor, head: Tensor, keys: Tensor | None, how: Sampling | None, max_num_logits: int,
    by_entropy: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`sample` of hidden [rows, h] @ head.T, head [vocab, h]; at most max_num_logits rows of logits."""
    tokens = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    confidence = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for low in range(0, len(hidden), max_num_logits):
        rows = slice(low, low + max_num_logits)
        tokens[rows], confidence[rows] = sample(
            (hidden[rows] @ head.T).float(), None if keys is None else keys[rows], how, by_entropy
        )
    return tokens, confidence


def gumbel(keys: Tensor, num_tokens: int) -> Tensor:
    """Gumbel noise, [rows, num_tokens] fp64."""
    token = torch.arange(num_tokens, dtype=torch.int64, device=keys.device)
    return -(-uniform(_mix((keys[:, None] + _signed(GOLDEN)) ^ (token * _signed(MIX2)))).log()).log()


def uniform(keys: Tensor) -> Tensor:
    """`engine.chance.uniform` of int64 keys."""
    return (_right(keys, 12).double() + 0.5) * 2.0**-52


def _mix(z: Tensor) -> Tensor:
    """`engine.chance.mix` in int64, which wraps alike."""
    z = (z ^ _right(z, 30)) * _signed(MIX1)
    z = (z ^ _right(z, 27)) * _signed(MIX2)
    return z ^ _right(z, 31)


def _right(z: Tensor, bits: int) -> Tensor:
    """Shift right; zeros come in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
