"""What a denoising step reads from logits: the likeliest token, a drawn one, the entropy, and probabilities."""

import torch
from torch import Tensor

from ..operation import operation


def _check(logits: Tensor, cap: float, **_: Tensor) -> None:
    if logits.shape[1] == 0:
        raise ValueError("the vocabulary has 0 tokens, expected at least 1")
    if not 0 < cap < float("inf"):
        raise ValueError(f"cap is {cap}, expected a finite number above 0")


@operation("logits float R V", "temperature float32 R", "uniform float32 R", check=_check)
def read_logits(logits: Tensor, temperature: Tensor, uniform: Tensor, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """For each row the drawn and the likeliest token, int64, and the entropy in nats, fp32.

    The distribution is the soft-max of cap * tanh(logits / cap) / temperature; its probabilities replace the logits.
    The drawn token is the first with a cumulative probability above the row's number in `uniform`. Ties for the
    likeliest go to the lowest index.

    logits [R, V]; temperature [R] fp32, above 0; uniform [R] fp32, 0 to 1.
    """
    scaled = (logits.float() / cap).tanh() * cap / temperature[:, None]
    logs = scaled.log_softmax(-1)
    probabilities = logs.exp()
    reached = probabilities.double().cumsum(-1)
    total = reached[:, -1:].contiguous()
    drawn = torch.searchsorted(reached, uniform.double()[:, None] * total, right=True)
    drawn = torch.minimum(drawn, torch.searchsorted(reached, total))[:, 0]  # a token with some weight
    logits.copy_(probabilities)
    return drawn, scaled.argmax(-1), -(logs.clamp(min=torch.finfo(logs.dtype).min) * probabilities).sum(-1)
