"""MaskKV's steps, by the Triton kernels, say what they say by the references, and heads keep the same keys."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dsim.engine.commits import ScheduledCommits
from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.engine.step import Phase
from dsim.kernels import taken, use
from dsim.live.cache import PagedCache
from dsim.live.config import ModelConfig
from dsim.live.forward import Sampled
from dsim.live.full_sequence import pages_of_use
from dsim.live.periodic import Ints, PeriodicExecutor, PeriodicForward, Step
from dsim.live.prompts import random_prompts
from dsim.live.weights import random_model

TINY = ModelConfig("tiny", 3, 64, 4, 2, 16, 96, 67, 256, 8, 66)
PHASES = [Phase.FULL, Phase.PARTIAL, Phase.REFRESH_RESPONSE, Phase.REFRESH_PROMPT, Phase.REFRESH_RESPONSE]


class Told(PeriodicForward):
    """Keeps what its steps said."""

    said: list[Sampled]

    def advance(self, tokens: Ints, step: Step, sampled: Ints, *keys: npt.NDArray[np.uint64] | None) -> Sampled:
        self.said.append(super().advance(tokens, step, sampled, *keys))
        return self.said[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/live/test_full_sequence.py says it of the GPU")
def test_steps_by_the_kernels_say_what_those_by_the_references_say() -> None:
    policy = parse(
        "maskkv:6,page_size=16,block_length=8,denoising_steps=4,prompt_refresh=3,response_refresh=2,transfer=0.5"
    )
    request = Request(0, 0.0, 21, 16)
    model = random_model(TINY, "cpu", torch.float32, seed=1)
    found = {}
    for path in ("reference", "triton"):
        limits = Limits(8, 256, 1, state_tokens=TINY.state_tokens)
        pages, scratch = pages_of_use(policy, limits, [request])
        cache = PagedCache(TINY, pages, 16, "cpu", torch.float32, scratch)
        forward = Told(model, cache, policy)
        forward.said = []
        executor = PeriodicExecutor(forward, policy, random_prompts(TINY, 1), ScheduledCommits(8, 4))
        engine = Engine(policy, limits, RequestTable(1))
        engine.submit(request)
        before = taken.copy()
        for step, phase in enumerate(PHASES):
            plan = engine.schedule(float(step))
            assert plan is not None
            assert plan.phases.tolist() == [phase]
            with use(path):  # type: ignore[arg-type]
                engine.commit(executor.step(plan), step + 1.0)
        now = taken - before
        # A step scatters what it computes, and those that compute the prompt what is kept of it. A layer has two norms,
        # and a third where it looks for what changed, in two steps.
        assert now == {
            ("ragged_paged_attention", path): 5 * TINY.layers, ("kv_scatter", path): (5 + 2) * TINY.layers,
            ("mask_vote", path): TINY.layers, ("confidence_of_hidden", path): 5,
            ("qk_norm_rope", path): 5 * TINY.layers, ("swiglu", path): 5 * TINY.layers,
            ("add_rms_norm", path): 5 * (2 * TINY.layers + 1) + 2 * TINY.layers,
        }  # fmt: skip
        chosen = [layer.chosen for layer in forward._layers]
        found[path] = forward.said, [(c.positions.tolist(), c.heads.tolist()) for c in chosen if c is not None]
    (said, kept), (expected, wanted) = found["triton"], found["reference"]
    assert kept == wanted
    # Two heads of three layers keep six each in the mean, and no layer what another does.
    assert sum(len(positions) for positions, _ in kept) == 6 * 2 * 3
    assert len({len(positions) for positions, _ in kept}) == 3
    for mine, theirs in zip(said, expected, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(mine.confidence, theirs.confidence, rtol=1e-4, atol=1e-6)
