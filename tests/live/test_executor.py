"""The executor against a plain one: no pages, no ragged batch, one sequence and one dense array of keys at a time.

Requests that end at an EOS have the tokens of those that do not, up to and with the first EOS.
"""

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from dsim.engine.engine import Limits
from dsim.engine.errors import ModelError
from dsim.engine.latency import LatencyModel
from dsim.engine.request import Request
from dsim.engine.spec import Policy, parse
from dsim.engine.state import CACHED, MASKED
from dsim.engine.step import Phase, StepOutcome, StepPlan
from dsim.live.cache import PagedCache
from dsim.live.executor import ModelExecutor
from dsim.live.forward import Batch, Forward, Sampled
from dsim.live.model import Decoder
from dsim.live.weights import random_model

from ..worlds import BLOCK_PRESETS
from .dense import SMALL, Dense
from .watched import PROMPTS, Run, Texts, serve_all

LATENCY = LatencyModel(((0.0, 0.01), (16.0, 0.02)), 0.001)
SMALL_WORLD = ",max_batch=4,page_size=8,max_prefill_tokens=24"
LENGTHS = [(1, 9), (5, 3), (8, 16), (13, 1), (40, 12), (3, 20), (17, 5), (0, 6)]


def small(name: str) -> Policy:
    return parse(name + SMALL_WORLD + ("" if name.startswith("ar") else ",block_length=4"))


def decoder() -> Decoder:
    model = random_model(SMALL, "cpu", torch.float32, seed=1)
    with torch.no_grad():  # confidences of every size
        model.embedding.weight.mul_(40.0)
    return model


class Watched(Forward):
    """Keeps what the last forwards were asked and said."""

    seen: list[tuple[Batch, Sampled]]

    def run(self, batch: Batch) -> Sampled:
        out = super().run(batch)
        self.seen.append((batch, out))
        return out


class Plain:
    """One request's keys and values by layer and absolute position, and what it says of a plan's row."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        shape = (SMALL.layers, 200, SMALL.kv_heads, SMALL.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    def confidences(self, tokens: list[int], positions: list[int], seen: Callable[[int, int], bool]) -> Tensor:
        """Best probability of each computed position; `seen(p, j)`: whether p sees key j."""
        at = torch.tensor(positions)
        mask = torch.tensor([[seen(p, j) for j in range(200)] for p in positions])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer, at], self.values[layer, at] = k, v
            return Dense(mask)(layer, q, self.keys[layer], self.values[layer])

        with torch.no_grad():
            hidden = self.model(torch.tensor(tokens), at, attend)
            return self.model.logits(hidden).softmax(-1).max(-1).values


class Checked:
    """An executor whose every step is computed again, plainly."""

    def __init__(self, executor: ModelExecutor, forward: Watched, model: Decoder, policy: Policy) -> None:
        self.executor, self.forward, self.policy = executor, forward, policy
        self.plain: dict[int, Plain] = {}
        self.new = lambda: Plain(model)
        self.texts: dict[int, list[int]] = {}
        self.compared = 0

    def step(self, plan: StepPlan) -> StepOutcome:
        self.forward.seen = []
        before = {int(r): self.tokens(plan, i) for i, r in enumerate(plan.requests)} if not plan.prefill else {}
        outcome = self.executor.step(plan)
        said = np.concatenate([out.confidence for _, out in self.forward.seen])
        expected = []
        block = self.policy.block_length
        for i, request in enumerate(plan.requests.tolist()):
            start = int(plan.block_start[i])
            if plan.prefill:
                end = int(plan.num_keys[i])
                positions = list(range(end - int(plan.num_tokens[i]), end))
                if positions[0] == 0:  # or else it is a chunk behind another
                    self.plain[request] = self.new()
                canvas = self.tokens(plan, i, end)
                status = plan.status[i, :block]
                masked = [start + c for c in range(block) if status[c] == MASKED]
                tokens = [SMALL.mask_token if p in masked else canvas[p] for p in positions]
                best = self.plain[request].confidences(tokens, positions, lambda p, j: j // block <= p // block)
                # Only keys that exist: a query never sees beyond its own block, and the last block is the last.
                expected.append(best[len(best) - block * bool(plan.window[i].any()) :])
                continue
            visible = columns = np.flatnonzero(plan.window[i])
            if self.policy.granularity.static:  # dummies see and are not seen
                columns = np.arange(self.policy.width)
            if plan.phases[i] == Phase.IDLE:
                columns = np.arange(block)
            canvas = before[request]
            masks = plan.status[i] == MASKED if self.policy.rows.commits == "masks" else np.zeros(1, np.bool_)
            tokens = [SMALL.mask_token if masks[c] else canvas[start + c] for c in columns]
            listed = {start + c for c in [*np.flatnonzero(plan.status[i] == CACHED).tolist(), *map(int, visible)]}
            if self.executor._listed is False:
                listed = set(range(start, start + int(columns.max()) + 1))

            def seen(p: int, j: int, start: int = start, listed: set[int] = listed) -> bool:
                return j // block <= p // block and (j < start or j in listed)

            expected.append(self.plain[request].confidences(tokens, [start + int(c) for c in columns], seen))
        torch.testing.assert_close(torch.from_numpy(said), torch.cat(expected), rtol=1e-4, atol=1e-5)
        self.compared += len(said)
        return outcome

    def tokens(self, plan: StepPlan, row: int, length: int | None = None) -> list[int]:
        text = self.executor.text(int(plan.requests[row]), int(plan.slots[row]), length or 200)
        return text.tolist()


def run(policy: Policy, num_pages: int = 200) -> tuple[Checked, Run]:
    model = decoder()
    cache = PagedCache(SMALL, num_pages, policy.memory.page_size, "cpu", torch.float32)
    forward = Watched(model, cache)
    executor = ModelExecutor(forward, policy, PROMPTS, None, policy.batching.max_prefill_tokens)
    checked = Checked(executor, forward, model, policy)
    limits = Limits(num_pages, 256, policy.batching.max_batch or 4)
    requests = [Request(i, 0.0, p, o) for i, (p, o) in enumerate(LENGTHS)]
    done = serve_all(checked, policy, limits, requests, latency=LATENCY)
    assert (done.table["status"] == 0).all()
    return checked, done


# What FOCUS computes is held against a plain executor of its own, in test_focus.py.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in BLOCK_PRESETS if name != "focus"])
@torch.no_grad()
def test_every_policy_computes_what_a_plain_executor_does_and_its_journal_replays(name: str) -> None:
    checked, done = run(small(name))
    assert checked.compared > 140 or name == "ar"
    assert done.differences() == []
    # The latency holds the device's time, and the host's on top of it.
    device = done.journal.steps["device"]
    assert ((device > 0) & (device <= done.journal.steps["latency"])).all()


@pytest.mark.parametrize(("extra", "page"), [("", 8), (",num_blocks=2", 4)])
def test_streaming_over_blocks_computes_what_a_plain_executor_does(extra: str, page: int) -> None:
    # A page a block: a step within its block sees keys of the next one, on a page that it does not write to.
    policy = parse(f"chunk:3,max_batch=4,max_prefill_tokens=24,block_length=4,page_size={page}{extra}")
    assert run(policy)[0].compared > 140


@pytest.mark.parametrize("name", ["lmdeploy-bd32", "chunk:3", "ar", "lmdeploy-0.18"])
def test_preempted_sequences_get_their_tokens_and_pages_again(name: str) -> None:
    # So few pages that sequences lose theirs; the cache asserts that no page is lost or had twice.
    checked, done = run(small(name), num_pages=9)
    assert done.table["num_preemptions"].sum() > 0
    cache = checked.forward.cache
    held = cache.table[cache.table >= 0].tolist()
    assert len(set(held)) == len(held)
    assert len(held) + cache.num_free == 9


def test_out_of_memory_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Forward, batch: Batch) -> Sampled:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(Forward, "run", full)
    with pytest.raises(ModelError, match=r"out of memory in a step of \d+ tokens and \d sequences: set num_pages"):
        run(small("chunk:3"))


ANSWERS = [(1, 19), (5, 13), (8, 16), (13, 1), (40, 12), (3, 20), (17, 25), (2, 16), (4, 0)]
EOS = tuple(range(0, SMALL.vocab, 9))
SPECS = [
    "lmdeploy-bd32", "multi-block", "chunk:3", "chunk:3,num_blocks=2", "delayed-cache", "focus",
    "lmdeploy-bd32,num_loops=3", "ar", "ar,decide_ahead=true",
]  # fmt: skip


def run_to_eos(policy: Policy, eos: tuple[int, ...], emit: str = "block") -> Texts:
    with pytest.MonkeyPatch.context() as patch:
        # The likeliest tokens would all be the same.
        patch.setattr(
            Forward, "_head", lambda _, h: ((h.double().sum(1).abs() * 1e4).long() % SMALL.vocab, h[:, 0].sigmoid())
        )
        how = {"eos": eos, "engine": {"latency": LATENCY, "emit": emit}}
        found = Texts(decoder(), policy, ANSWERS, Limits(200, 256, 4), **how)
    cache = found.forward.cache
    assert cache.num_free + len(cache.table[cache.table >= 0]) == cache.num_pages
    return found


@cache
def whole(spec: str) -> dict[int, list[int]]:
    """The texts of requests that no EOS ends."""
    return run_to_eos(small(spec), ()).texts


def expected(policy: Policy, text: list[int], prompt: int, output: int) -> int:
    """Tokens of an answer of `text`, by the rule as it is told."""
    seen = prompt
    if policy.rows.commits == "masks" and prompt % policy.block_length:
        seen = -(-prompt // policy.block_length) * policy.block_length
    ends = [i + 1 - prompt for i in range(seen, prompt + output) if text[i] in EOS]
    return ends[0] if ends else output


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spec", "emit"),
    [*((spec, "block") for spec in SPECS), *product(("chunk:3,num_blocks=2", "focus"), ("step", "end"))],
)
def test_a_request_ends_at_its_first_eos_and_its_journal_replays(spec: str, emit: str) -> None:
    policy, texts = small(spec), whole(spec)
    found = run_to_eos(policy, EOS, emit)
    table, engine = found.done.table, found.done.engine
    wanted = [expected(policy, texts[i], *lengths) for i, lengths in enumerate(ANSWERS)]
    assert table["num_tokens"].tolist() == wanted
    assert sum(n < o for n, (_, o) in zip(wanted, ANSWERS, strict=True)) >= 3
    for i, (prompt, _) in enumerate(ANSWERS):
        assert found.texts[i][: prompt + wanted[i]] == texts[i][: prompt + wanted[i]]
    assert engine.expected_tokens == engine.pages_held == 0
