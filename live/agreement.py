"""Agreement of an approximation with the exact run of the same weights, on a model that learned something."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..engine.engine import Engine, Limits
from ..engine.journal import RequestTable
from ..engine.latency import LatencyModel
from ..engine.policy import Policy
from ..engine.request import Request
from .loop import serve
from .model import Decoder
from .prompts import Prompts, Tokens
from .session import make_executor, make_forward


@dataclass(frozen=True)
class Answer:
    """A policy's answer to a request."""

    prompt: int  # tokens
    tokens: Tokens  # prompt and answer


@dataclass(frozen=True)
class Agreement:
    """A policy's answers beside those of the exact run."""

    equal: float  # share of the answers' tokens that are the same, at the same place
    likelihood: float  # nats a token, mean log-likelihood of its answers, each masked in turn
    exact_likelihood: float  # of the exact run's

    @property
    def change(self) -> float:
        """Nats a token that the answers are likelier than the exact run's; below 0: less likely."""
        return self.likelihood - self.exact_likelihood


def answers(
    model: Decoder, policy: Policy, limits: Limits, requests: Sequence[Request], prompts: Prompts,
    latency: LatencyModel | None = None,
) -> list[Answer]:  # fmt: skip
    """A policy's answers to requests, served one after another; latency: what an elastic chunk is chosen by."""
    found = []
    for request in requests:
        forward = make_forward(model, policy, limits, [request])
        executor = make_executor(forward, policy, limits, prompts)
        engine = Engine(policy, limits, RequestTable(request.index + 1), latency=latency)
        serve(engine, executor, [Request(request.index, 0.0, request.input_length, request.output_length)])
        length = request.input_length + request.output_length
        text = executor.text(request.index, executor.slot_of(request.index), length)
        found.append(Answer(request.input_length, text))
    return found


def compare(model: Decoder, exact: Sequence[Answer], other: Sequence[Answer]) -> Agreement:
    """Tokens equal and likelihoods, over the answers of the same requests."""
    equal = [a.tokens[a.prompt :] == b.tokens[b.prompt :] for a, b in zip(exact, other, strict=True)]
    return Agreement(float(np.concatenate(equal).mean()), likelihood(model, other), likelihood(model, exact))


@torch.inference_mode()
def likelihood(model: Decoder, found: Sequence[Answer], parts: int = 8) -> float:
    """Mean log-likelihood of answers' tokens in nats: an eighth of them masked at a time, all else seen both ways.

    A model of blocks sees block-causally, as it was trained to. A row that says the next position is taken as such.
    """
    config, device = model.config, model.embedding.weight.device
    total, num = 0.0, 0
    for answer in found:
        text = torch.from_numpy(answer.tokens).long().to(device)
        positions = torch.arange(len(text), device=device)
        block = positions // config.block_length
        seen = torch.ones_like(block[:, None] >= block) if config.both_ways else block[:, None] >= block

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, seen: Tensor = seen) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)

        for part in range(parts):
            masked = positions[(positions >= answer.prompt) & ((positions - answer.prompt) % parts == part)]
            if not len(masked):
                continue
            tokens = text.clone()
            tokens[masked] = config.mask_token
            rows = (masked - int(config.shifted)).clamp(min=0)
            logs = model.logits(model(tokens, positions, attend)[rows]).float().log_softmax(dim=-1)
            total += float(logs.gather(1, text[masked][:, None]).sum())
            num += len(masked)
    return total / max(1, num)
