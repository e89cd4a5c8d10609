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
from dsim.engine.policies.focus import Focus
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.engine.step import Phase
from dsim.kernels import Path, taken, use
from dsim.live import session
from dsim.live.cache import PagedCache
from dsim.live.canvas import CanvasCache, KeyedChance, Turn
from dsim.live.canvas_model import random_canvas_model
from dsim.live.config import ModelConfig
from dsim.live.config_file import ConfigJson, Given
from dsim.live.evicting import Evict
from dsim.live.forward import Batch, Forward, Sampled
from dsim.live.periodic import PeriodicForward
from dsim.live.prompts import random_prompts
from dsim.live.weights import load, random_model

from ..live.checkpoints import CHECKPOINTS, drawn
from ..live.dense import block_causal
from ..live.test_random_weights import GEMMA

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/live/test_gpu.py serves by them on a GPU")
WIDE = ModelConfig("wide", 3, 128, 4, 2, 64, 96, 131, 256, 8, 130)
TINY = ModelConfig("tiny", 2, 64, 4, 2, 16, 96, 67, 256, 8, 66)
PATHS: tuple[Path, ...] = ("reference", "triton")


# ---- block diffusion ----------------------------------------------------------------------------------------------


def batches() -> list[Batch]:
    """The prefill of two prompts of 8 and 16 tokens, and a step on the block after each: as it is, and evicting."""
    chance = np.random.default_rng(1)
    history = np.array([8, 16])
    table = np.array([[3, -1], [0, 2]], np.int32)
    masked = [np.array([1, 2, 4, 5, 6, 7]), np.array([0, 3, 4, 5])]
    decode = [8 + np.array([0, 1, 2, 4, 5, 6, 7]), 16 + np.arange(6)]
    made = []
    for windows, evicts in (([np.arange(8), np.arange(16)], False), (decode, False), (decode, True)):
        rows = np.repeat(np.arange(2), [len(w) for w in windows])
        positions = np.concatenate(windows)
        columns = positions - history[rows]
        listed = np.zeros((2, 8), np.bool_)
        if made:
            listed[rows, columns] = True
        is_mask = np.array([c in masked[r] for r, c in zip(rows, columns, strict=True)])
        num = np.array([len(m) for m in masked])
        evict = Evict(
            Focus(visible="listed", alpha=1.0), np.flatnonzero(is_mask), np.concatenate([[0], num.cumsum()]),
            lambda growth, is_mask=is_mask: ~is_mask | (np.cumsum(is_mask) - 1 == np.argmax(growth)),
        )  # fmt: skip
        made.append(
            Batch(
                chance.integers(0, 130, len(rows)), positions,
                table[rows, positions // 16].astype(np.int64) * 16 + positions % 16,
                np.concatenate([[0], np.bincount(rows).cumsum()]), table, history, listed, 8, np.arange(len(rows)),
                evict if evicts else None,
            )
        )  # fmt: skip
    return made


@pytest.mark.slow
def test_forwards_by_the_kernels_say_what_those_by_the_references_say() -> None:
    model = random_model(WIDE, "cpu", torch.float32, seed=1)
    said = {}
    calls = {
        "ragged_paged_attention": 3 * WIDE.layers, "qk_norm_rope_scatter": 3 * WIDE.layers,
        "swiglu": 3 * WIDE.layers, "focus_importance": 2,
    }  # fmt: skip
    for path in PATHS:
        forward = Forward(model, PagedCache(WIDE, 4, 16, "cpu", torch.float32))
        before = taken.copy()
        with use(path):
            outs = [forward.run(batch) for batch in batches()]
        now = taken - before
        assert {o: now[o, path] for o in calls} == calls  # type: ignore[index]
        assert {taken_path for _, taken_path in now} == {path}
        said[path] = outs, forward.cache.keys.numpy(), forward.cache.values.numpy()
    (found, *cached), (expected, *wanted) = said["triton"], said["reference"]
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.rows is None) == (theirs.rows is None)
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(mine.confidence, theirs.confidence, rtol=1e-4, atol=1e-5)
    assert found[-1].rows is not None
    assert expected[-1].rows is not None
    assert found[-1].rows.tolist() == expected[-1].rows.tolist()
    assert len(found[-1].rows) < 13
    for mine, theirs in zip(cached, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_rows_over_pages_say_the_logits_and_the_tokens_of_an_independent_implementation(
    name: str, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("transformers")
    plain = CHECKPOINTS[name](tmp_path, drawn(3))
    model, tokens = load(str(tmp_path), "cpu", torch.float32), torch.arange(9) * 7 % 97
    config, num = model.config, len(tokens)
    block = num if config.both_ways else min(config.block_length, 4)
    pages, at = np.array([[2, 0, 1]], np.int32), np.arange(num)
    batch = Batch(
        tokens.numpy(), at, pages[0, at // 8].astype(np.int64) * 8 + at % 8, np.array([0, num]), pages, np.array([num]),
        np.zeros((1, 1), np.bool_), block, at, prefill=True,
    )  # fmt: skip
    expected = plain(tokens, block_causal(num, block))
    for path in PATHS:
        forward: Any = Forward(model, PagedCache(config, 3, 8, "cpu", torch.float32))
        before, sample = taken["ragged_paged_attention", path], forward._sample
        read: list[torch.Tensor] = []
        forward._sample = lambda hidden, keys, read=read, sample=sample: (read.append(hidden), sample(hidden, keys))[1]
        with use(path):
            said = forward.run(batch).tokens
        assert taken["ragged_paged_attention", path] == before + config.layers
        torch.testing.assert_close(model.logits(read[0]), expected, rtol=0, atol=1e-4)
        assert said.tolist() == expected.argmax(1).tolist()


# ---- full-sequence models -----------------------------------------------------------------------------------------


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
            ("confidence", path): 4,
            ("qk_norm_rope", path): 4 * TINY.layers, ("swiglu", path): 4 * TINY.layers,
            ("add_rms_norm", path): 4 * (2 * TINY.layers + 1),
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
        # A layer has two norms, and a third where it looks for what changed, in two steps.
        assert now == {
            ("ragged_paged_attention", path): 4 * 3, ("confidence", path): 4,
            ("qk_norm_rope", path): 4 * 3, ("swiglu", path): 4 * 3,
            ("add_rms_norm", path): 4 * (2 * 3 + 1) + 2 * 3,
        }  # fmt: skip
        chosen = [layer.chosen for layer in forward._layers]
        kept[path] = [(c.positions.tolist(), c.heads.tolist()) for c in chosen if c is not None]
    assert kept["triton"] == kept["reference"]
    # Two heads of three layers keep six each in the mean, and no layer what another does.
    counts = [len(positions) for positions, _ in kept["triton"]]
    assert (sum(counts), len(set(counts))) == (6 * 2 * 3, 3)
    assert_alike(said["triton"], said["reference"])


@pytest.mark.slow
def test_canvases_by_the_kernels_are_those_by_the_references() -> None:
    source = ConfigJson(pathlib.Path("config.json"), GEMMA, {}, "gemma")
    model = random_canvas_model(source, "cpu", torch.float32, 0, Given(random_weights=True))
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
