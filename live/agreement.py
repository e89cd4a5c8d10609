"""Compare an approximate run of a trained model with the exact run."""

from collections.abc import Iterator, Sequence
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
from .canvas import CanvasCache
from .canvas_executor import KeyedChance
from .canvas_model import CanvasModel
from .loop import serve
from .model import Decoder
from .prompts import Prompts, Tokens
from .session import Serving

PARTS = 8  # passes over an answer, each masking every eighth token
PAGE = 64  # tokens


@dataclass(frozen=True)
class Answer:
    prompt: int  # tokens
    tokens: Tokens  # prompt and answer


@dataclass(frozen=True)
class Agreement:
    equal: float  # share of the answers' tokens
    likelihood: float  # nats a token, of the policy's answers
    exact_likelihood: float  # of the exact run's answers

    @property
    def change(self) -> float:
        """Nats a token; below 0: less likely than the exact run's."""
        return self.likelihood - self.exact_likelihood


def answers(
    model: Decoder | CanvasModel, policy: Policy, limits: Limits, requests: Sequence[Request], prompts: Prompts,
    latency: LatencyModel | None = None, seed: int = 0,
) -> list[Answer]:  # fmt: skip
    """Serve requests one at a time. latency: for elastic chunks; seed: for canvases."""
    found = []
    serving = Serving(model, policy, limits, prompts, seed=seed)
    for request in requests:
        executor = serving.executor(serving.forward([request]))
        engine = Engine(policy, limits, RequestTable(request.index + 1), latency=latency)
        serve(engine, executor, [Request(request.index, 0.0, request.input_length, request.output_length)])
        length = request.input_length + request.output_length
        text = executor.text(request.index, executor.slot_of(request.index), length)
        found.append(Answer(request.input_length, text))
    return found


def compare(model: Decoder | CanvasModel, exact: Sequence[Answer], other: Sequence[Answer]) -> Agreement:
    equal = [a.tokens[a.prompt :] == b.tokens[b.prompt :] for a, b in zip(exact, other, strict=True)]
    return Agreement(float(np.concatenate(equal).mean()), likelihood(model, other), likelihood(model, exact))


@torch.inference_mode()
def likelihood(model: Decoder | CanvasModel, found: Sequence[Answer]) -> float:
    """Mean log-likelihood of the answers' tokens (nats), each hidden while predicted."""
    total, num = 0.0, 0
    for i, answer in enumerate(found):
        parts = _of_canvases(model, answer, i) if isinstance(model, CanvasModel) else _of_masks(model, answer)
        for logs in parts:
            total += float(logs.sum())
            num += len(logs)
    return total / max(1, num)


def _of_masks(model: Decoder, answer: Answer) -> Iterator[Tensor]:
    """Log-likelihoods of an answer's tokens, an eighth masked in each pass.

    A model of blocks sees block-causally, as trained; a shifted model's row predicts the next position.
    """
    config, device = model.config, model.embedding.weight.device
    text = torch.from_numpy(answer.tokens).long().to(device)
    positions = torch.arange(len(text), device=device)
    block = positions // config.block_length
    seen = torch.ones_like(block[:, None] >= block) if config.both_ways else block[:, None] >= block

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)

    for part in range(PARTS):
        masked = positions[(positions >= answer.prompt) & ((positions - answer.prompt) % PARTS == part)]
        if not len(masked):
            continue
        tokens = text.clone()
        tokens[masked] = config.mask_token
        rows = (masked - int(config.shifted)).clamp(min=0)
        logs = model.logits(model(tokens, positions, attend)[rows]).float().log_softmax(dim=-1)
        yield logs.gather(1, text[masked][:, None])


def _of_canvases(model: CanvasModel, answer: Answer, index: int) -> Iterator[Tensor]:
    """The same for canvases, each after all earlier text; noise hides tokens and fills the last canvas.

    index: keys the noise.
    """
    weight, length = model.embedding, model.config.canvas_length
    text = torch.from_numpy(answer.tokens).long().to(weight.device)
    pages = -(-(len(text) + length) // PAGE)
    cache = CanvasCache(model, (pages, pages), PAGE, str(weight.device), weight.dtype)
    read = 0
    for begin in range(answer.prompt, len(text), length):
        cache.encode({0: text[read:begin]})
        read = begin
        chance, own = KeyedChance(0, index, begin, length), text[begin : begin + length]
        for part in range(min(PARTS, len(own))):
            tokens = chance.noise(model.config.vocab)
            hidden = np.arange(len(own)) % PARTS == part
            tokens[: len(own)][~hidden] = answer.tokens[begin : begin + length][~hidden]
            cache.begin(0, tokens)
            rows = torch.from_numpy(hidden).to(weight.device)
            logits = model.logits(cache.states([0])[0, : len(own)][rows])
            yield logits.log_softmax(dim=-1).gather(1, own[rows][:, None])
