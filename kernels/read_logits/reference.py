"""The same in plain PyTorch and fp32: the specification."""

import torch
from torch import Tensor


def read_logits(logits: Tensor, temperature: Tensor, uniform: Tensor, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    scaled = (logits.float() / cap).tanh() * cap / temperature[:, None]
    logs = scaled.log_softmax(-1)
    probabilities = logs.exp()
    reached = probabilities.double().cumsum(-1)
    total = reached[:, -1:].contiguous()
    drawn = torch.searchsorted(reached, uniform.double()[:, None] * total, right=True)
    drawn = torch.minimum(drawn, torch.searchsorted(reached, total))[:, 0]  # a token with some weight
    logits.copy_(probabilities)
    return drawn, scaled.argmax(-1), -(logs.clamp(min=torch.finfo(logs.dtype).min) * probabilities).sum(-1)
