"""A threshold of each step's own, on a device: the weights commit what reaches it, or the profile's draws at it do."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dsim.engine.commits import CommitDraws, Commits
from dsim.engine.engine import Limits
from dsim.engine.part import Policy
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.unmasking import Unmasking
from dsim.engine.view import View
from dsim.live.model import Decoder
from dsim.live.prompts import prompts_from, read_tokens
from dsim.live.session import Serving, run
from dsim.live.weights import load

from ..worlds import TOY_MODEL

STRICT = replace(TOY_MODEL, block_length=32, pass_probability=(0.5,) * 32)
LOOSE = replace(STRICT, threshold=0.5, pass_probability=(0.99,) * 32)


@dataclass(frozen=True)
class Alternating(Unmasking):
    """Strict while a request waits, and loose from then on."""

    @property
    def thresholds(self) -> tuple[float, ...]:
        return (0.9, 0.5)

    def threshold_now(self, view: View) -> float:
        return 0.9 if view.num_waiting else 0.5


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load("tiny", "cpu", torch.float32)


def steps(model: Decoder, unmasking: Unmasking, draws: Commits | None = None) -> list[tuple[int, int]]:
    """Requests that wait and positions that commit, of each step of two requests served one after the other."""
    found: list[tuple[int, int]] = []

    def append(columns: Any, lists: Any) -> None:
        found.extend(zip(columns["waiting"].tolist(), columns["committed"].tolist(), strict=True))
        chosen = np.where(columns["prefill"] | (not unmasking.varies), np.nan, np.where(columns["waiting"], 0.9, 0.5))
        np.testing.assert_array_equal(columns["threshold"], chosen)

    block = parse("lmdeploy-bd32,num_loops=1,decide_ahead=false,max_batch=1")
    policy: Policy = replace(block, unmasking=unmasking)
    requests = [Request(i, 0.0, 32, 64) for i in range(2)]
    prompts = prompts_from(read_tokens("source", "tiny", model.config), seed=0)
    done = run(Serving(model, policy, Limits(16, 512, 1), prompts, draws), requests, append=append)
    assert done.failure is None
    return found


@pytest.mark.slow
def test_a_model_commits_by_the_threshold_of_each_step(model: Decoder) -> None:
    mixed = steps(model, Alternating())
    strict, loose = (steps(model, Unmasking(threshold=t)) for t in (0.9, 0.5))
    waits = [step for step in mixed if step[0]]
    assert waits == [step for step in strict if step[0]]
    assert len(loose) < len(mixed) < len(strict)


@pytest.mark.slow
def test_a_profile_s_draws_commit_by_the_threshold_of_each_step(model: Decoder) -> None:
    lengths = np.full(2, 32), np.full(2, 64)
    both = CommitDraws(STRICT, 0, *lengths, 32, models={0.9: STRICT, 0.5: LOOSE})
    apart = CommitDraws(STRICT, 0, *lengths, 32), CommitDraws(LOOSE, 0, *lengths, 32)
    mixed = steps(model, Alternating(), both)
    strict, loose = (steps(model, Unmasking(), draws) for draws in apart)
    assert [step for step in mixed if step[0]] == [step for step in strict if step[0]]
    assert [step for step in mixed if not step[0]] == [step for step in loose if not step[0]]
