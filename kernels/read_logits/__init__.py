"""What a denoising step reads from logits: the likeliest token, a drawn one, the entropy, and probabilities."""

import torch
from torch import Tensor

from .. import run
from ..checks import FLOATS, check_tensor
from . import reference


def read_logits(logits: Tensor, temperature: Tensor, uniform: Tensor, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """For each row the drawn and the likeliest token, int64, and the entropy in nats, fp32.

    The distribution is the soft-max of cap * tanh(logits / cap) / temperature; its probabilities replace the logits.
    The drawn token is the first with a cumulative probability above the row's number in `uniform`. Ties for the
    likeliest go to the lowest index.

    logits [R, V]; temperature [R] fp32, above 0; uniform [R] fp32, 0 to 1.
    """
    check_tensor("logits", logits, logits.device, FLOATS, "R", "V")
    check_tensor("temperature", temperature, logits.device, torch.float32, len(logits))
    check_tensor("uniform", uniform, logits.device, torch.float32, len(logits))
    if logits.shape[1] == 0:
        raise ValueError("the vocabulary has 0 tokens, expected at least 1")
    if not 0 < cap < float("inf"):
        raise ValueError(f"cap is {cap}, expected a finite number above 0")
    return run(reference.read_logits, logits, logits, temperature, uniform, cap)
