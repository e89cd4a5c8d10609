"""Steps of the live executors, by the Triton kernels, say what they say by the references."""

import pathlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsim.engine.commits import ScheduledCommits
from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.step import Phase
from dsim.kernels import Path, taken, use
from dsim.live import session
from dsim.live.cache import PagedCache
from dsim.live.canvas_forward import CanvasCache, KeyedChance, Turn
from dsim.live.canvas_model import random_canvas_model
from dsim.live.config import ConfigJson, ModelConfig, Settings
from dsim.live.forward import Forward, Sampled
from dsim.live.periodic import PeriodicForward
from dsim.live.prompts import random_prompts
from dsim.live.weights import load, random_model

from ..live.checkpoints import CHECKPOINTS, drawn
from ..live.dense import batch_of, block_causal
from ..live.test_random_weights import GEMMA

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/live/test_gpu.py serves by them on a GPU")
TINY = ModelConfig("tiny", 2, 64, 4, 2, 16, 96, 67, 256, 8, 66)
PATHS: tuple[Path, ...] = ("reference", "triton")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_forwards_over_pages_say_the_logits_and_tokens_of_an_independent_implementation(
    name: str, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("transformers")
    plain = CHECKPOINTS[name](tmp_path, drawn(3))
    model, tokens = load(str(tmp_path), "cpu", torch.float32), torch.arange(9) * 7 % 97
    config, num = model.config, len(tokens)
    block = num if config.both_ways else min(config.block_length, 4)
    batch = batch_of(np.random.default_rng(0), [num], [np.arange(num)], block, page=4, prefill=True)
    batch = replace(batch, tokens=tokens.numpy())
    expected = plain(tokens, block_causal(num, block))
    for path in PATHS:
        forward = Forward(model, PagedCache(config, 3, 4, "cpu", torch.float32))
        before = taken["ragged_paged_attention", path]
        with use(path), torch.inference_mode():
            hidden = forward.hidden(forward.inputs(batch.arrays()), batch)
            said, _ = forward._head(hidden)
        assert taken["ragged_paged_attention", path] == before + config.layers
        torch.testing.assert_close(model.logits(hidden), expected, rtol=0, atol=1e-4)
        assert said.tolist() == expected.argmax(1).tolist()


def served(
    path: Path, spec: str, requests: Mapping[int, Request], phases: list[list[Phase]], told_by: str, layers: int
) -> tuple[list[Sampled], Any, Counter[tuple[str, Path]]]:
    """What the forward's method `told_by` said of steps of these phases, the forward, and the paths that were taken.

    requests: by the step that they come before.
    """
    config = replace(TINY, layers=layers)
    policy = parse(f"{spec},block_length=8,denoising_steps=4")
    limits = Limits(8, 256, 4, state_tokens=config.state_tokens)
    model = random_model(config, "cpu", torch.float32, seed=1)
    serving = session.Serving(model, policy, limits, random_prompts(config, 1), ScheduledCommits(8, 4))
    forward: Any = serving.forward(list(requests.values()))
    said: list[Sampled] = []
    tells = getattr(forward, told_by)

    def keep(*arguments: Any) -> Sampled:
        said.append(tells(*arguments))
        return said[-1]

    setattr(forward, told_by, keep)
    executor = serving.executor(forward)
    engine = Engine(policy, limits, RequestTable(len(requests)))
    before = taken.copy()
    for step, expected in enumerate(phases):
        if step in requests:
            engine.submit(requests[step])
        plan = engine.schedule(float(step))
        assert plan is not None
        assert plan.phases.tolist() == expected
        with use(path):
            engine.commit(executor.step(plan), step + 1.0)
    return said, forward, taken - before


def assert_alike(found: list[Sampled], expected: list[Sampled]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(mine.confidence, theirs.confidence, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_packs_and_reuses_by_the_kernels_say_what_those_by_the_references_say() -> None:
    # The second request comes in while the first packs its block: then it reuses beside a full pass, and beside a pack.
    # Pages of as many keys as a tile holds, so that whole tiles between the packed keys and the block's are nobody's.
    requests = {0: Request(0, 0.0, 21, 16), 1: Request(1, 0.0, 12, 8)}
    phases = [[Phase.FULL], [Phase.PACK, Phase.FULL], [Phase.REUSE, Phase.PACK], [Phase.REUSE, Phase.REUSE]]
    said, keys = {}, {}
    for path in PATHS:
        said[path], forward, now = served(path, "dllm-serve:0.3,page_size=64", requests, phases, "run", TINY.layers)
        keys[path] = forward.cache.keys.numpy()
        assert now == {
            ("ragged_paged_attention", path): 4 * TINY.layers,
            ("pooled_topk_pack", path): 2 * TINY.layers, ("confidence_of_hidden", path): 4,
            ("qk_norm_rope", path): 4 * TINY.layers,
        }  # fmt: skip
    assert_alike(said["triton"], said["reference"])
    assert np.abs(keys["reference"]).sum() > 0
    np.testing.assert_allclose(keys["triton"], keys["reference"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_refreshes_by_the_kernels_say_what_those_by_the_references_say_and_heads_keep_the_same_keys() -> None:
    order = [Phase.FULL, Phase.PARTIAL, Phase.REFRESH_RESPONSE, Phase.REFRESH_PROMPT]
    spec = "maskkv:6,page_size=16,prompt_refresh=3,response_refresh=2,transfer=0.5"
    said, kept = {}, {}
    for path in PATHS:
        said[path], forward, now = served(path, spec, {0: Request(0, 0.0, 21, 16)}, [[p] for p in order], "advance", 3)
        assert isinstance(forward, PeriodicForward)
        assert now == {
            ("ragged_paged_attention", path): 4 * 3, ("confidence_of_hidden", path): 4,
            ("qk_norm_rope", path): 4 * 3,
        }  # fmt: skip
        chosen = [layer.chosen for layer in forward._layers]
        kept[path] = [(positions.tolist(), heads.tolist()) for positions, heads, _ in chosen]
    assert kept["triton"] == kept["reference"]
    # Two heads of three layers keep six each in the mean, and no layer what another does.
    counts = [len(positions) for positions, _ in kept["triton"]]
    assert (sum(counts), len(set(counts))) == (6 * 2 * 3, 3)
    assert_alike(said["triton"], said["reference"])


@pytest.mark.slow
def test_canvases_by_the_kernels_are_those_by_the_references() -> None:
    source = ConfigJson(pathlib.Path("config.json"), GEMMA, {}, "gemma")
    model = random_canvas_model(source, "cpu", torch.float32, 0, Settings(random_weights=True))
    answers, logits = [], []
    for path in PATHS:
        cache = CanvasCache(model, (20, 20), 4, "cpu", torch.float32)
        chances = [KeyedChance(0, slot, 0, model.config.canvas_length) for slot in range(2)]
        with use(path):
            for slot, chance in enumerate(chances):
                cache.encode({slot: torch.arange(5 + 12 * slot)})
                cache.begin(slot, chance.noise(model.config.vocab))
            for step in range(2):
                turns = {s: Turn(0.5 + step, c.uniform(), c.noise(model.config.vocab)) for s, c in enumerate(chances)}
                answers.append(cache.denoise(turns))
            logits.append(model.logits(cache.states([0])[0]))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)
    assert len(answers) == 4
    for one, other in zip(answers[:2], answers[2:], strict=True):
        assert [x.likeliest.tolist() for x in one.values()] == [x.likeliest.tolist() for x in other.values()]
        assert [x.entropy for x in one.values()] == pytest.approx([x.entropy for x in other.values()], rel=1e-4)
