"""Each row's most probable token and its probability."""

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
    if logits.shape[1] == 0:
        raise ValueError("the vocabulary has 0 tokens, expected at least 1")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, expected a finite number of at least 0")
    return run(reference.confidence, logits, logits, temperature)
