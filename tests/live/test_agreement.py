"""Agreement with the exact run: tokens and likelihoods, told plainly, and the table that the tuner takes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dsim.device.agreement import Agreed, exact_of, table
from dsim.engine.engine import Limits
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.live.agreement import Answer, answers, compare, likelihood
from dsim.planner.quality import load_table, quality_of

from .dense import SMALL, Dense, block_causal
from .watched import PROMPTS, decoder


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_the_likelihood_is_of_each_token_masked_with_an_eighth_of_the_answer(both_ways: bool, shifted: bool) -> None:
    config = replace(SMALL, both_ways=both_ways, shifted=shifted)
    model, tokens, prompt = decoder(config), PROMPTS(0, 25), 5
    seen = torch.ones(25, 25, dtype=torch.bool) if both_ways else block_causal(25, 4)
    total = 0.0
    for part in range(8):
        masked = [p for p in range(prompt, 25) if (p - prompt) % 8 == part]
        text = [SMALL.mask_token if p in masked else int(t) for p, t in enumerate(tokens)]
        with torch.no_grad():
            logs = model.logits(model(torch.tensor(text), torch.arange(25), Dense(seen))).log_softmax(-1)
        total += sum(float(logs[p - shifted, int(tokens[p])]) for p in masked)
    assert likelihood(model, [Answer(prompt, tokens)]) == pytest.approx(total / 20, rel=1e-5)


def test_tokens_agree_where_they_are_equal_at_the_same_place() -> None:
    model, text = decoder(), PROMPTS(0, 12)
    other = text.copy()
    other[[2, 5, 9]] += 1  # one of them in the prompt
    found = compare(model, [Answer(4, text)], [Answer(4, other)])
    assert found.equal == 6 / 8
    assert found.change == pytest.approx(likelihood(model, [Answer(4, other)]) - likelihood(model, [Answer(4, text)]))


@pytest.mark.parametrize("spec", ["lmdeploy-bd32:4,max_batch=3", "sglang-bd32:4", "vanilla,block_length=4"])
def test_a_policy_that_changes_no_token_agrees_wholly(spec: str) -> None:
    policy = parse(spec + ",page_size=8")
    exact = parse(
        exact_of(policy, 4) + ",page_size=8" + (",block_length=4" if policy.family == "full-sequence" else "")
    )
    requests = [Request(i, 0.0, 7 + i, 10) for i in range(3)]
    limits = Limits(200, 256, 3, state_tokens=2)
    model = decoder()
    both = [answers(model, run, limits, requests, PROMPTS) for run in (exact, policy)]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(*both, strict=True))
    assert [len(answer.tokens) for answer in both[0]] == [17, 18, 19]
    assert compare(model, *both).equal == 1.0
    assert compare(model, *both).change == 0.0


def test_the_tuner_finds_each_policy_in_the_table(tmp_path) -> None:  # type: ignore[no-untyped-def]
    specs = (
        "focus,alpha=1.4",
        "chunk:8,obs=true",
        "sparse-dllm:0.3",
        "fast-dllm:prefix",
        "maskkv:16",
        "lmdeploy-bd32,threshold=0.7",
    )
    found = [
        (Agreed(spec, exact_of(parse(spec), 32), 0.9 - i / 10, -0.25, 3, 30), parse(spec))
        for i, spec in enumerate(specs)
    ]
    path = tmp_path / "quality.csv"
    path.write_text(table(found, "tiny-bytes", "records"))
    held = load_table(path)
    for i, spec in enumerate(specs):
        quality = quality_of(parse(spec + ",max_batch=7"), "tiny-bytes", held)
        assert quality.relative == pytest.approx(0.9 - i / 10), spec
        assert "of 30 tokens of 3 requests" in quality.source
    assert quality_of(parse("focus,alpha=1.5"), "tiny-bytes", held).relative is None
    assert quality_of(parse("focus,alpha=1.4"), "SDAR-8B", held).relative is None
