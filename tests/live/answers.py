"""A model's answers to requests served one at a time, and how likely the model finds an answer."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.policy import Policy
from dsim.engine.request import Request
from dsim.live.loop import serve
from dsim.live.model import Decoder
from dsim.live.prompts import Prompts, Tokens
from dsim.live.session import Serving

PARTS = 8  # passes over an answer, each masking every eighth token


class Answer(NamedTuple):
    prompt: int  # tokens
    tokens: Tokens  # prompt and answer


def answers(
    model: Decoder, policy: Policy, limits: Limits, requests: Sequence[Request], prompts: Prompts
) -> list[Answer]:
    found = []
    serving = Serving(model, policy, limits, prompts)
    for request in requests:
        executor = serving.executor(serving.forward([request]))
        engine = Engine(policy, limits, RequestTable(request.index + 1))
        serve(engine, executor, [Request(request.index, 0.0, request.input_length, request.output_length)])
        length = request.input_length + request.output_length
        slot = next(slot for slot, owner in executor._owner.items() if owner == request.index)
        text = executor.text(request.index, slot, length)
        found.append(Answer(request.input_length, text))
    return found


def equal_share(exact: Sequence[Answer], others: Sequence[Answer]) -> float:
    """The share of the answers' tokens that are equal."""
    equal = [a.tokens[a.prompt :] == b.tokens[b.prompt :] for a, b in zip(exact, others, strict=True)]
    return float(np.concatenate(equal).mean())


@torch.inference_mode()
def likelihood(model: Decoder, answer: Answer) -> float:
    """Mean log-likelihood of an answer's tokens (nats), an eighth masked in each pass."""
    config = model.config
    text, positions = torch.from_numpy(answer.tokens).long(), torch.arange(len(answer.tokens))
    block = positions // config.block_length
    seen = torch.ones_like(block[:, None] >= block) if config.both_ways else block[:, None] >= block

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)

    total = 0.0
    for part in range(PARTS):
        masked = positions[(positions >= answer.prompt) & ((positions - answer.prompt) % PARTS == part)]
        tokens = text.clone()
        tokens[masked] = config.mask_token
        logs = model.logits(model(tokens, positions, attend)[masked]).float().log_softmax(dim=-1)
        total += float(logs.gather(1, text[masked][:, None]).sum())
    return total / (len(text) - answer.prompt)
