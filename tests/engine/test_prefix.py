"""Prefix caching: which tokens are found, which pages are evicted, and who holds what."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.engine.engine import Engine, Limits
from dsim.engine.errors import PolicyError
from dsim.engine.journal import RequestTable
from dsim.engine.policy import PRESETS, parse
from dsim.engine.prefix import Prefixes, PrefixMemory
from dsim.engine.request import Request
from dsim.engine.step import StepOutcome
from dsim.profiler.profile import load as load_profile
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import Trace, load

from ..reference import prefix as oracle
from ..worlds import SECOND, World

AR = "vllm-ar,max_num_batched_tokens=8,page_size=4,prefix_caching=true"


def prefixes(block: int, *names: list[int], named: list[int]) -> Prefixes:
    return Prefixes(block, names, named)


def idle(engine: Engine) -> list[int]:
    """Keys of the idle pages, the one idle longest first."""
    entries, at = np.asarray(engine._own.cache.entries), engine._own.cache.pool[0]
    found, entry = [], int(at["oldest"])
    while entry >= 0:
        found.append(int(entries[entry]["key"]))
        entry = int(entries[entry]["newer"])
    assert len(found) == at["idle"]
    return found


def check_account(engine: Engine) -> None:
    """Pages held: those of sequences alone, and each that has a name once; with the idle ones no more than the pool."""
    cache, slots = engine._own.cache, engine._arrays.sequences
    columns = engine._own.columns
    own = int((slots["pages"] + slots["window_pages"]).sum() - columns["shared"].sum())
    held, unused = 0, 0
    for bucket in cache.buckets.tolist():
        while bucket >= 0:
            held += int(cache.entries[bucket]["refs"]) > 0
            unused += 1
            bucket = int(cache.entries[bucket]["next"])
    assert engine.pages_held == own + held
    assert unused == held + cache.pool[0]["idle"] == held + len(idle(engine))
    assert engine.pages_held + len(idle(engine)) <= engine.limits.num_pages


# ---- by hand -----------------------------------------------------------------------------------------------------


def test_the_step_behind_an_eos_files_nothing() -> None:
    # Decided on ahead: the answer's last token, the eighth of all, is computed for nothing.
    w = World(AR, eos=True, prefixes=prefixes(4, [0, 1], named=[8]))
    w.submit(0, 4, 4)
    assert [w.step_tokens() for _ in range(6)][3:] == ["decode 0D1/7", "decode 0I1/8", "nothing"]
    assert idle(w.engine) == [0]


# ---- against the oracle ------------------------------------------------------------------------------------------


def draw_world(rng: np.random.Generator) -> dict[str, Any]:
    """Requests that begin with parts of a few documents, as tokens and as names of blocks."""
    documents = [tuple(rng.integers(0, 3, 40).tolist()) for _ in range(2)]
    block, answers_known = int(rng.integers(1, 9)), bool(rng.integers(0, 2))
    asked = []
    for _ in range(int(rng.integers(4, 14))):
        begun = documents[rng.integers(0, 2)][: rng.integers(0, 40)]
        prompt = begun + tuple(rng.integers(0, 3, rng.integers(1, 9)).tolist())
        asked.append((prompt, tuple(rng.integers(0, 3, rng.integers(1, 14)).tolist())))
    known: dict[oracle.Tokens, int] = {}
    names, named = [], []
    for prompt, answer in asked:
        whole = prompt + answer if answers_known else prompt
        ends = range(block, len(whole) + block, block)
        names.append([known.setdefault(whole[:end], len(known)) for end in ends])
        named.append(len(whole))
    longest = max(len(p) + len(a) for p, a in asked)
    page = int(rng.integers(1, 9))
    return {
        "asked": asked, "names": prefixes(block, *names, named=named), "block": block, "answers_known": answers_known,
        "page": page, "budget": int(rng.integers(4, 40)), "max_num_seqs": int(rng.integers(1, 5)),
        "num_pages": -(-longest // page) + int(rng.integers(0, 12)),
        "gaps": rng.integers(0, 4, len(asked)).tolist(),
    }  # fmt: skip


@pytest.mark.parametrize("part", range(3))
def test_random_worlds_run_as_the_oracle_says(part: int) -> None:
    hits, evictions, preemptions = 0, 0, 0
    for seed in range(20 * part, 20 * part + 20):
        d = draw_world(np.random.default_rng(seed))
        spec = (
            f"vllm-ar,prefix_caching=true,async_scheduling=false,page_size={d['page']},"
            f"max_num_batched_tokens={d['budget']},max_num_seqs={d['max_num_seqs']}"
        )
        table = RequestTable(len(d["asked"]))
        limits = Limits(d["num_pages"], 4096, d["max_num_seqs"])
        engine = Engine(parse(spec), limits, table, latency=SECOND, prefixes=d["names"])
        told = oracle.Scheduler(d["budget"], d["page"], d["num_pages"], d["max_num_seqs"], d["block"])
        now, coming = 0.0, list(enumerate(d["asked"]))
        wait = 0
        while True:
            while coming and wait == 0:
                index, (prompt, answer) = coming.pop(0)
                assert engine.submit(Request(index, now, len(prompt), len(answer)))
                told.submit(index, prompt, answer, d["answers_known"])
                wait = d["gaps"][index]
            wait = max(0, wait - 1)
            plan = engine.schedule(now)
            expected = told.schedule()
            if plan is None:
                assert not expected
                if not coming:
                    break
                wait = 0
                continue
            rows = zip(plan.requests.tolist(), plan.num_tokens.tolist(), plan.num_keys.tolist(), strict=True)
            assert (seed, list(rows)) == (seed, expected)
            assert (plan.pages, plan.features.sum_kv) == (told.held, sum(keys for _, _, keys in expected))
            now += 1.0
            engine.commit(StepOutcome(1.0, plan.window.copy()), now)
            told.finish_step()
            check_account(engine)
            assert (engine.pages_held, len(idle(engine))) == (told.held, len(told.idle))
        found = [told.requests[i].cached for i in range(len(d["asked"]))]
        assert d["names"].cached.tolist() == found
        totals = engine.totals
        assert totals.prefix_queries == sum(len(prompt) for prompt, _ in d["asked"])
        assert totals.prefix_hits == sum(value or 0 for value in found)
        assert totals.preemptions == told.preempted
        hits += totals.prefix_hits
        evictions += len(told.evicted)
        preemptions += told.preempted
    assert (hits > 500, evictions > 200, preemptions > 3) == (True, True, True)


# ---- whole runs --------------------------------------------------------------------------------------------------


def conversations(n: int) -> Trace:
    """Turns of a few sessions, each prompt the turn before with more behind it."""
    rng = np.random.default_rng(0)
    length, rows = [0] * 6, []
    for _ in range(n):
        session = int(rng.integers(0, 6))
        prompt, answer = length[session] + int(rng.integers(1, 30)), int(rng.integers(1, 20))
        if prompt + answer > 150:
            prompt = int(rng.integers(1, 30))
        length[session] = prompt + answer
        rows.append((session, prompt, answer))
    arrival = np.cumsum(rng.choice([0.0, 1.0, 8.0], n))
    sessions, prompts, answers = zip(*rows, strict=True)
    return Trace("chats", arrival - arrival[0], prompts, answers, {"session_id": list(sessions)})


@pytest.mark.parametrize(("num", "share"), [(60, 0.0), pytest.param(1500, 0.2, marks=pytest.mark.slow)])
def test_a_pool_without_end_finds_what_the_conversation_trace_repeats(num: int, share: float) -> None:
    trace = load("mooncake-conv").head(num)
    policy = parse("vllm-ar,prefix_caching=true,page_size=16,num_pages=2000000,max_num_seqs=1")
    # One after another, so that each finds all that came before it.
    alone = Trace(trace.name, 1e4 * np.arange(len(trace)), trace.input_length, np.ones(len(trace)), trace.extras)
    result = simulate(alone, Setting(policy, load_profile("h100-qwen3-8b-ar")))
    seen: set[tuple[Any, ...]] = set()
    expected = []
    served = result.table["status"] == 0
    for i, ids in enumerate(trace.extras["hash_ids"]):
        length, own = int(trace.input_length[i]), [tuple(ids[: k + 1]) for k in range(len(ids))]
        repeated = next((k for k, block in enumerate(own) if block not in seen), len(own))
        expected.append(min(repeated * 512, length - 1) // 16 * 16 if served[i] else 0)
        if served[i]:
            seen |= set(own)
    assert result.cached_tokens is not None
    assert result.cached_tokens.tolist() == expected
    assert sum(expected) > share * trace.input_length[served].sum()


# ---- which policies ----------------------------------------------------------------------------------------------


def test_a_scheduler_that_shares_no_pages_takes_no_prefix_cache() -> None:
    memory = PrefixMemory(page_size=256, prefix_caching=True)
    for preset, kinds in (("sglang-gemma", "Rounds reuses no pages of Canvas"), ("ar", "Continuous reuses no pages")):
        with pytest.raises(PolicyError) as error:
            replace(PRESETS[preset].policy, memory=memory)
        assert f"{preset}: prefix_caching is true, and {kinds}" in str(error.value)
