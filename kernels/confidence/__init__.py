"""Each row's most probable token and its probability, from logits or hidden states."""

from torch import Tensor

from .. import run
from ..checks import FLOATS, check_tensor
from . import reference


def confidence(logits: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The arg-max of each row of logits [R, V], int64, lowest index on ties, and its soft-max probability, fp32.

    The probability is that of logits / temperature (block-diffusion.md 1.3: confidence depends on temperature).
    Temperature 0 is greedy decoding with the confidence of temperature 1, as in SGLang (focus.md 3.11, row 17). A row
    with a NaN, or without a finite maximum, has token 0 and probability NaN.
    """
    check_tensor("logits", logits, logits.device, FLOATS, "R", "V")
    _check_numbers(logits.shape[1], temperature)
    return run(reference.confidence, logits, logits, temperature)


def confidence_of_hidden(
    hidden: Tensor, head: Tensor, temperature: float = 1.0, max_num_logits: int = 2048
) -> tuple[Tensor, Tensor]:
    """`confidence` of hidden @ head.T, accumulated in fp32: hidden [R, h], head [V, h].

    At most max_num_logits rows of logits exist at once (full-sequence-diffusion.md 4.5).
    """
    check_tensor("hidden", hidden, hidden.device, FLOATS, "R", "h")
    check_tensor("head", head, hidden.device, hidden.dtype, "V", hidden.shape[1])
    _check_numbers(head.shape[0], temperature)
    if max_num_logits < 1:
        raise ValueError(f"max_num_logits is {max_num_logits}, expected at least 1")
    return run(reference.confidence_of_hidden, hidden, hidden, head, temperature, max_num_logits)


def _check_numbers(num_tokens: int, temperature: float) -> None:
    if num_tokens == 0:
        raise ValueError("the vocabulary has 0 tokens, expected at least 1")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, expected a finite number of at least 0")
