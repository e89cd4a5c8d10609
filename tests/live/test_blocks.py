"""Several blocks of a row in flight on the shipped model, against a loop without cache, pages or batch."""

import numpy as np
import pytest
import torch

from dsim.engine.engine import Limits
from dsim.engine.spec import parse
from dsim.live.model import Decoder
from dsim.live.prompts import read_tokens
from dsim.live.weights import config_of, load

from .dense import logits
from .watched import Texts

LENGTHS = [(37, 60), (64, 40), (5, 33), (90, 71)]


def plain(model: Decoder, prompt: list[int], output: int, num_blocks: int, threshold: float) -> tuple[list[int], int]:
    """The text of whole blocks, and its forwards after the prompt's."""
    block, mask, forwards = model.config.block_length, model.config.mask_token, -1
    end = -(-(len(prompt) + output) // block)
    text = prompt + [mask] * (end * block - len(prompt))
    first, opened = max(0, len(prompt) - 1) // block, (len(prompt) - 1) // block + 1  # block in the buffer, and behind
    while mask in text:
        filled = [block - text[b * block : (b + 1) * block].count(mask) for b in range(end)]
        if forwards >= 0:
            grows = opened == first or filled[opened - 1] >= 0.1 * block
            opened += grows and opened < min(end, first + num_blocks)
        best = logits(model, text[: opened * block], block).float().softmax(-1).max(-1)
        for b in range(first, opened):
            masks = [p for p in range(b * block, (b + 1) * block) if text[p] == mask]
            passed = [p for p in masks if best.values[p] >= threshold]
            if masks and not passed and (b == first or filled[b - 1] >= 0.9 * block):
                passed = [max(masks, key=lambda p: float(best.values[p]))]
            for p in passed:
                text[p] = int(best.indices[p])
        while first < opened and filled[first] == block:  # stored, as no mask was left when it was computed
            first += 1
        forwards += 1
    return text, forwards


@pytest.mark.parametrize(("num_blocks", "extra"), [(1, ""), (2, ""), (3, ",static=false,max_batch=2")])
def test_a_buffer_of_blocks_commits_the_tokens_of_a_plain_loop(num_blocks: int, extra: str) -> None:
    model, source = load("tiny", "cpu", torch.float32), read_tokens("source", "tiny", config_of("tiny"))
    prompts = [source[500 * i : 500 * i + prompt].astype(np.int32) for i, (prompt, _) in enumerate(LENGTHS)]
    policy = parse(f"multi-block:{num_blocks},block_length={model.config.block_length},threshold=0.6{extra}")
    served = Texts(model, policy, LENGTHS, Limits(64, 512, 4), lambda request, length: prompts[request])
    for i, (prompt, output) in enumerate(LENGTHS):
        text, forwards = plain(model, prompts[i].tolist(), output, num_blocks, 0.6)
        assert served.texts[i] == text[: prompt + output]
        assert served.done.table["num_forwards"][i] == forwards
