"""How likely a model finds an answer."""

from typing import NamedTuple

import torch

from dsim.live.model import Decoder
from dsim.live.prompts import Tokens

from .dense import Dense

PARTS = 8  # passes over an answer, each masking every eighth token


class Answer(NamedTuple):
    prompt: int  # tokens
    tokens: Tokens  # prompt and answer


@torch.inference_mode()
def likelihood(model: Decoder, answer: Answer) -> float:
    """Mean log-likelihood of an answer's tokens (nats), an eighth masked in each pass."""
    config = model.config
    text, positions = torch.from_numpy(answer.tokens).long(), torch.arange(len(answer.tokens))
    block = positions // config.block_length
    seen = torch.ones_like(block[:, None] >= block) if config.both_ways else block[:, None] >= block

    total = 0.0
    for part in range(PARTS):
        masked = positions[(positions >= answer.prompt) & ((positions - answer.prompt) % PARTS == part)]
        tokens = text.clone()
        tokens[masked] = config.mask_token
        logs = model.logits(model(tokens, positions, Dense(seen))[masked]).float().log_softmax(dim=-1)
        total += float(logs.gather(1, text[masked][:, None]).sum())
    return total / (len(text) - answer.prompt)
