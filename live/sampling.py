"""Draw tokens from logits by temperature, with confidences."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.errors import ModelError
from ..kernels.confidence import confidence

MOST_LOGITS = 1024  # rows of logits at once


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
    logits: Tensor, keys: Tensor | None, how: Sampling | None, by_entropy: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tokens [rows] int64 and confidences [rows] fp32, of logits [rows, vocab] and keys [rows] int64.

    how: None: the likeliest. by_entropy: confidence is negative entropy, in nats (Dream's "entropy").
    """
    if how is None:
        probabilities = logits.float().softmax(dim=-1)
        best, tokens = probabilities.max(dim=-1)
        return tokens, certainty(probabilities) if by_entropy else best
    probabilities = (logits.float() / how.temperature).softmax(dim=-1)
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
    by_entropy: bool = False, temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`sample` of hidden [rows, h] @ head.T, head [vocab, h]; at most max_num_logits rows of logits.

    temperature: of the likeliest tokens' confidence.
    """
    answers = []
    num = min(MOST_LOGITS, max_num_logits)
    for low in range(0, max(1, len(hidden)), num):
        rows = slice(low, low + num)
        logits = fp32_product(hidden[rows], head)
        if how is None and not by_entropy:
            answers.append(confidence(logits, temperature))
        else:
            answers.append(sample(logits, None if keys is None else keys[rows], how, by_entropy))
    if len(answers) == 1:
        return answers[0]
    tokens, sure = zip(*answers, strict=True)
    return torch.cat(tokens), torch.cat(sure)


def fp32_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, h] @ weight.T, always in fp32: rounded logits would tie."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return torch.nn.functional.linear(x.float(), weight.float())


def uniform(keys: Tensor) -> Tensor:
    """`engine.chance.uniform` of int64 keys."""
    return (_right(keys, 12).double() + 0.5) * 2.0**-52


def _right(z: Tensor, bits: int) -> Tensor:
    """Shift right; zeros come in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
