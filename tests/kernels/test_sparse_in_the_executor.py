"""Passes of the full-sequence executor, by the Triton kernels, say what they say by the references."""

import numpy as np
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
from dsim.live.forward import Batch, Sampled
from dsim.live.full_sequence import FullSequenceExecutor, FullSequenceForward, pages_of_use
from dsim.live.prompts import random_prompts
from dsim.live.weights import random_model

TINY = ModelConfig("tiny", 2, 64, 4, 2, 16, 96, 67, 256, 8, 66)
# The second request comes in while the first packs its block: then it reuses beside a full pass, and beside a pack.
ARRIVALS = {0: Request(0, 0.0, 21, 16), 1: Request(1, 0.0, 12, 8)}
PHASES = [[Phase.FULL], [Phase.PACK, Phase.FULL], [Phase.REUSE, Phase.PACK], [Phase.REUSE, Phase.REUSE]]


class Kept(FullSequenceForward):
    """Keeps what its passes said."""

    said: list[Sampled]

    def run(self, batch: Batch) -> Sampled:
        self.said.append(super().run(batch))
        return self.said[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/live/test_full_sequence.py says it of the GPU")
@pytest.mark.parametrize("head_centric", ["true", "false"])
def test_passes_by_the_kernels_say_what_those_by_the_references_say(head_centric: str) -> None:
    # Pages of as many keys as a tile holds, so that whole tiles between the packed keys and the block's are nobody's.
    policy = parse(f"dllm-serve:0.3,page_size=64,block_length=8,denoising_steps=4,head_centric={head_centric}")
    requests = list(ARRIVALS.values())
    model = random_model(TINY, "cpu", torch.float32, seed=1)
    found = {}
    for path in ("reference", "triton"):
        limits = Limits(8, 256, 4)
        pages, scratch = pages_of_use(policy, limits, requests)
        cache = PagedCache(TINY, pages, 64, "cpu", torch.float32, scratch)
        forward = Kept(model, cache, policy)
        forward.said = []
        executor = FullSequenceExecutor(forward, policy, random_prompts(TINY, 1), ScheduledCommits(8, 4))
        engine = Engine(policy, limits, RequestTable(2))
        before = taken.copy()
        for step, phases in enumerate(PHASES):
            if step in ARRIVALS:
                engine.submit(ARRIVALS[step])
            plan = engine.schedule(float(step))
            assert plan is not None
            assert plan.phases.tolist() == phases
            with use(path):  # type: ignore[arg-type]
                engine.commit(executor.step(plan), step + 1.0)
        now = taken - before
        assert now == {
            ("ragged_paged_attention", path): 4 * TINY.layers, ("kv_scatter", path): 4 * TINY.layers,
            ("pooled_topk_pack", path): 2 * TINY.layers, ("confidence_of_hidden", path): 4,
            ("qk_norm_rope", path): 4 * TINY.layers, ("swiglu", path): 4 * TINY.layers,
            ("add_rms_norm", path): 4 * (2 * TINY.layers + 1),
        }  # fmt: skip
        found[path] = (forward.said, cache.keys.numpy())
    (said, keys), (expected, wanted) = found["triton"], found["reference"]
    for mine, theirs in zip(said, expected, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(mine.confidence, theirs.confidence, rtol=1e-4, atol=1e-6)
    assert np.abs(wanted).sum() > 0
    np.testing.assert_allclose(keys, wanted, rtol=1e-4, atol=1e-5)
