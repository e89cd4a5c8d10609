"""The most probable token of each row and its probability, from logits or from hidden states."""

import torch

from .. import take
from ..checks import check_dense, check_device, check_dtype, check_shape
from . import reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def confidence(logits: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The arg-max of each row of logits [R, V], int64, lowest index on ties, and its soft-max probability, fp32.

    The probability is that of logits / temperature (block-diffusion.md 1.3: confidence depends on temperature).
    Temperature 0 is greedy decoding, whose confidence is that at temperature 1, as in SGLang (focus.md 3.11, row 17).
    A row that holds a NaN, or no finite logit, has probability NaN.
    """
    check_shape("logits", logits, "R", "V")
    check_dtype("logits", logits, *FLOATS)
    check_dense("logits", logits)
    _check_numbers(logits.shape[1], temperature)
    if take("confidence", logits) == "reference":
        return reference.confidence(logits, temperature)
    from . import kernel

    return kernel.confidence(logits, temperature)


def confidence_of_hidden(
    hidden: torch.Tensor, head: torch.Tensor, temperature: float = 1.0, max_num_logits: int = 2048
) -> tuple[torch.Tensor, torch.Tensor]:
    """`confidence` of hidden @ head.T, accumulated in fp32: hidden [R, h], head [V, h].

    Never more than max_num_logits rows of logits exist at once (full-sequence-diffusion.md 4.5).
    """
    check_shape("hidden", hidden, "R", "h")
    check_shape("head", head, "V", hidden.shape[1])
    check_dtype("hidden", hidden, *FLOATS)
    check_dtype("head", head, hidden.dtype)
    check_device("head", head, hidden.device)
    check_dense("hidden", hidden)
    check_dense("head", head)
    _check_numbers(head.shape[0], temperature)
    if max_num_logits < 1:
        raise ValueError(f"max_num_logits is {max_num_logits}, expected at least 1")
    if take("confidence_of_hidden", hidden) == "reference":
        return reference.confidence_of_hidden(hidden, head, temperature, max_num_logits)
    from . import kernel

    return kernel.confidence_of_hidden(hidden, head, temperature, max_num_logits)


def _check_numbers(num_tokens: int, temperature: float) -> None:
    if num_tokens == 0:
        raise ValueError("the vocabulary has 0 tokens, expected at least 1")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, expected a finite number of at least 0")
