"""MaskKV on a device against a plain executor: whole tensors, no pages."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from dsim.engine.policies.dllm_cache import RUN
from dsim.engine.policies.maskkv import MaskKV
from dsim.engine.spec import Policy, parse
from dsim.engine.step import StepPlan
from dsim.live import periodic
from dsim.live.config import ModelConfig
from dsim.live.full_sequence import FullSequenceExecutor
from dsim.live.model import Layer
from dsim.live.periodic import PeriodicForward, importance_of, least_alike, votes_of

from ..checks import cases
from .dense import SMALL
from .plain_focus import feed, project
from .plain_periodic import PlainPeriodic, attention, votes
from .watched import LENGTHS, PROMPTS, Commits, decoder, policy_of, run, served_by

DEEP = replace(SMALL, name="deep", layers=4)
SETTINGS = [
    "maskkv:4,prompt_refresh=6,response_refresh=3",
    "maskkv:3,prompt_refresh=5,response_refresh=4,transfer=0.5",
    "maskkv:8,prompt_refresh=7,response_refresh=2",
    "maskkv:5,prompt_refresh=5,response_refresh=7,transfer=1",
    "maskkv:1,prompt_refresh=4,response_refresh=4",
    "maskkv:4,prompt_refresh=3,response_refresh=2,block_length=8,transfer=0.6",
]


@cache
def measured(config: ModelConfig) -> list[float]:
    """Each layer's importance."""
    found: list[float] = importance_of(served_by(config), PROMPTS).tolist()
    return found


def oracle(policy: Policy, config: ModelConfig = DEEP) -> PlainPeriodic:
    importance = measured(config) if isinstance(policy.cache, MaskKV) else [1.0] * config.layers
    return PlainPeriodic(served_by(config), policy, importance)


@cache
def served(spec: str) -> dict[int, Commits]:
    """What the executor commits of all requests."""
    return run(policy_of(spec), LENGTHS, config=DEEP).commits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_votes_are_the_column_sums_of_the_attention_of_the_masks(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(63, heads, 24, generator=generator).to(dtype) for heads in (6, 2))
    expected = votes(q[40:].double(), k.double())
    torch.testing.assert_close(votes_of(q, k, 40).double(), expected, rtol=2e-5, atol=1e-7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", SETTINGS)
def test_whole_requests_commit_what_a_plain_executor_commits(spec: str) -> None:
    plain = oracle(policy_of(spec))
    assert served(spec) == {i: plain.serve(PROMPTS(i, p).tolist(), o) for i, (p, o) in enumerate(LENGTHS)}


@cases(
    "spec",
        "maskkv:4,prompt_refresh=3,response_refresh=4,transfer=0",
        "maskkv:4,prompt_refresh=6,response_refresh=20,transfer=0.1",
        "maskkv:4,prompt_refresh=9,response_refresh=20,transfer=0.1,block_length=8,denoising_steps=4",
)  # fmt: skip
def test_every_step_is_as_confident_as_the_plain_executor(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What commits tells little of rows that are a little wrong.
    policy, said, decide = policy_of(spec), list[Any](), FullSequenceExecutor._decide

    def listen(self: FullSequenceExecutor, plan: StepPlan, tokens: Any, confidence: Any) -> Any:
        said.append(confidence[0].copy())
        return decide(self, plan, tokens, confidence)

    monkeypatch.setattr(FullSequenceExecutor, "_decide", listen)
    for i, (prompt, output) in enumerate(LENGTHS):
        if not output:
            continue
        said.clear()
        run(policy, [(prompt, output)], indices=[i], config=DEEP)
        plain, expected = oracle(policy), list[Any]()
        choose = plain.choose

        def told(best: dict[int, float], *rest: Any, expected: Any = expected, choose: Any = choose) -> set[int]:
            expected.append([best[p] for p in sorted(best)])
            chosen: set[int] = choose(best, *rest)
            return chosen

        monkeypatch.setattr(plain, "choose", told)
        plain.serve(PROMPTS(i, prompt).tolist(), output)
        np.testing.assert_allclose(np.array(said), expected, rtol=1e-3, atol=1e-5)


def test_refreshing_all_in_every_step_is_the_models_own_loop() -> None:
    assert served("maskkv:2,prompt_refresh=1,response_refresh=1") == served("vanilla")


@pytest.mark.parametrize("heads", [2, 32])
def test_of_rows_that_did_not_change_the_lower_ones_go_first(heads: int) -> None:
    # As wide as LLaDA's values, where fp32 would leave their cosines around 1.
    old = torch.randn(64, heads, 128, generator=torch.Generator().manual_seed(0))
    assert least_alike(old.clone(), old, 5).tolist() == [0, 1, 2, 3, 4]
    fresh = old.clone()
    fresh[[40, 50]] += 0.1 * torch.randn(2, heads, 128, generator=torch.Generator().manual_seed(1))
    assert least_alike(fresh, old, 4).tolist() == [0, 1, 40, 50]


def test_heads_keep_the_keys_that_the_plain_executor_keeps_and_their_mean_is_the_budget() -> None:
    policy = policy_of("maskkv:4,prompt_refresh=6,response_refresh=3")
    different = 0
    for i, (prompt, output) in enumerate(LENGTHS):
        forward = run(policy, [(prompt, output)], indices=[i], config=DEEP).executor._forward
        assert isinstance(forward, PeriodicForward)
        kept: list[list[list[int]]] = []
        for layer in forward._layers:
            assert layer.chosen is not None
            positions, heads, _ = layer.chosen
            kept.append([positions[heads == h].tolist() for h in range(DEEP.kv_heads)])
        plain = oracle(policy)
        plain.serve(PROMPTS(i, prompt).tolist(), output)
        if output:
            assert kept == plain.kept
            counts = [len(head) for layer in kept for head in layer]
            assert sum(counts) == DEEP.layers * DEEP.kv_heads * min(4, prompt)
            different += len(set(counts)) > 1
    assert different >= 3


def test_importance_is_what_attention_changes() -> None:
    # Attention of the last layer is turned off: it changes nothing.
    model = decoder(DEEP)
    with torch.no_grad():
        model.layers[3].output.weight.zero_()  # type: ignore[union-attr]
    importance = importance_of(model, PROMPTS)
    n, expected = periodic.SAMPLE_LENGTH, np.zeros(4)
    positions = list(range(n))
    with torch.no_grad():
        for request in range(periodic.SAMPLES):
            x = model.embedding.weight[torch.from_numpy(PROMPTS(request, n))]
            for i, layer in enumerate(model.layers):
                assert isinstance(layer, Layer)
                after = x + attention(*project(model, layer, x, positions), [positions] * 2) @ layer.output.weight.T
                expected[i] += float((1 - torch.cosine_similarity(x, after)).mean()) / periodic.SAMPLES
                x = after + feed(layer, after)
    np.testing.assert_allclose(importance, expected, atol=1e-5)
    assert 0.0 <= importance[3] < 1e-6 < importance[:3].min()
    with torch.no_grad():
        for layer in model.layers:
            layer.output.weight.zero_()  # type: ignore[operator, union-attr]
    assert (importance_of(model, PROMPTS) >= 0.0).all()


def test_what_nobody_wrote_is_never_seen() -> None:
    spec = "maskkv:4,prompt_refresh=6,response_refresh=3"
    assert run(policy_of(spec), LENGTHS, poison=True, config=DEEP).commits == served(spec)


@pytest.mark.parametrize(("kv_heads", "page"), [(1, 16), (2, 64), (4, 16)])
@pytest.mark.parametrize("spec", ["maskkv:5", "maskkv:17", "maskkv:200"])
def test_a_request_fits_the_pages_that_the_engine_holds_for_it(spec: str, page: int, kv_heads: int) -> None:
    config = replace(DEEP, kv_heads=kv_heads)
    policy = parse(f"{spec},page_size={page},block_length=4")
    for prompt, output in [(0, 4), (17, 15), (100, 17)]:
        forward = run(policy, [(prompt, output)], config=config).executor._forward
        assert isinstance(forward, PeriodicForward)
        # No more is held than the runs that are begun take, and what the slack of a head's last run adds.
        assert 0 <= len(forward._supply._runs) - forward._supply._used <= config.layers * kv_heads * (2 + page // RUN)
