"""Each row's most probable token and its probability, from logits or hidden states."""

import torch
from torch import Tensor

from ..operation import operation


def _check(*, temperature: float, max_num_logits: int = 1, **tensors: Tensor) -> None:
    if "logits" in tensors and tensors["logits"].shape[1] == 0:
        raise ValueError("the vocabulary has 0 tokens, expected at least 1")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, expected a finite number of at least 0")
    if max_num_logits < 1:
        raise ValueError(f"max_num_logits is {max_num_logits}, expected at least 1")


@operation("logits float R V", check=_check)
def confidence(logits: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The arg-max of each row of logits [R, V], int64, lowest index on ties, and its soft-max probability, fp32.

    The probability is that of logits / temperature (block-diffusion.md 1.3: confidence depends on temperature).
    Temperature 0 is greedy decoding with the confidence of temperature 1, as in SGLang (focus.md 3.11, row 17). A row
    with a NaN, or without a finite maximum, has token 0 and probability NaN.
    """
    return _most_probable(logits.float(), temperature)


@operation("hidden float R h", "head hidden V h", check=_check)
def confidence_of_hidden(
    hidden: Tensor, head: Tensor, temperature: float = 1.0, max_num_logits: int = 2048
) -> tuple[Tensor, Tensor]:
    """`confidence` of hidden @ head.T, accumulated in fp32: hidden [R, h], head [V, h].

    At most max_num_logits rows of logits exist at once (full-sequence-diffusion.md 4.5).
    """
    tokens = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    probabilities = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    head = head.float().T
    for low in range(0, len(hidden), max_num_logits):
        rows = slice(low, low + max_num_logits)
        tokens[rows], probabilities[rows] = _most_probable(hidden[rows].float() @ head, temperature)
    return tokens, probabilities


def _most_probable(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    tokens = logits.argmax(-1)
    below = logits - logits.gather(1, tokens[:, None])
    probabilities = 1.0 / (below / (temperature or 1.0)).exp().sum(-1)
    return tokens.masked_fill(probabilities.isnan(), 0), probabilities
