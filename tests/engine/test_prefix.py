"""Prefix caching: which tokens are found, which pages are evicted, who holds what, and what each scheduler reuses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.engine.engine import Engine, Limits
from dsim.engine.errors import PolicyError
from dsim.engine.journal import RequestTable, StepRecorder
from dsim.engine.prefix import Prefixes, PrefixMemory
from dsim.engine.replay import replay
from dsim.engine.request import Request
from dsim.engine.spec import PRESETS, parse
from dsim.engine.step import StepOutcome
from dsim.profiler.profile import load as load_profile
from dsim.sim.setting import Setting
from dsim.sim.step_model import StepModel
from dsim.sim.twin import simulate
from dsim.traces import Trace, load
from dsim.traces.prefixes import prefixes_of

from ..checks import cases
from ..reference import prefix as oracle
from ..worlds import SECOND, Collector, World, asked, draws_of, refusal, table_bytes
from .singly import run_singly

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


def test_the_step_behind_an_eos_files_nothing() -> None:
    # Decided on ahead: the answer's last token, the eighth of all, is computed for nothing.
    w = World(AR, eos=True, prefixes=prefixes(4, [0, 1], named=[8]))
    w.submit(0, 4, 4)
    assert [w.step_tokens() for _ in range(6)][3:] == ["decode 0D1/7", "decode 0I1/8", "nothing"]
    assert idle(w.engine) == [0]


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


def test_a_scheduler_that_shares_no_pages_takes_no_prefix_cache() -> None:
    memory = PrefixMemory(page_size=256, prefix_caching=True)
    for preset, kinds in (("sglang-gemma", "Rounds reuses no pages of Canvas"), ("ar", "Continuous reuses no pages")):
        said = refusal(PolicyError, lambda policy: replace(policy, memory=memory), PRESETS[preset].policy)
        assert f"{preset}: prefix_caching is true, and {kinds}" in said


FDFO = "sglang-fdfo,block_length=4,page_size=4,prefix_caching=true"
AHEAD = "lmdeploy-0.18:4,page_size=8,prefix_caching=true"
DIFFUSION = "vllm-diffusion,canvas_length=4,page_size=4,prefix_caching=true,async_scheduling=false"


def step(w: World) -> str:
    """A step, which commits every mask that it computes, in words."""
    text = w.plan_tokens()
    if w.plan is not None:
        w.commit_masks()
    return text


def steps_of(w: World, request: int) -> list[str]:
    """Such steps to the end of a request."""
    found = []
    while np.isnan(w["finish"][request]):
        found.append(step(w))
    return found


def test_rounds_prefill_only_the_blocks_that_are_not_there() -> None:
    w = asked(World(FDFO, prefixes=prefixes(4, [0, 1, 2], [0, 1, 3], [0, 1, 2], named=[10, 11, 8])), (10, 2))
    assert steps_of(w, 0) == ["prefill 0P4/4", "prefill 0P4/8", "decode 0D4/12", "decode 0F4/12"]
    w.submit(1, 11, 1)  # its two whole blocks are there: it decodes at once
    assert steps_of(w, 1) == ["decode 1D4/12", "decode 1F4/12"]
    w.submit(2, 8, 1)  # so they are where the prompt ends with them: its own masks are computed, no token of the prompt
    assert steps_of(w, 2) == ["decode 2D4/12", "decode 2F4/12"]
    assert w.engine._own.cache.cached.tolist() == [0, 8, 8]
    assert (w.engine.totals.prefix_queries, w.engine.totals.prefix_hits) == (29, 16)
    assert (w.engine.pages_held, w.engine.expected_tokens) == (0, 0)


def test_a_round_s_newcomers_do_not_find_what_it_has_yet_to_compute() -> None:
    w = asked(World(FDFO, prefixes=prefixes(4, [0, 1], [0, 1], named=[8, 8])), (8, 1), (8, 1))
    assert w.step_tokens({}) == "prefill 0P4/4 1P4/4"
    assert w.engine.pages_held == 2  # computed twice ...
    assert w.step_tokens({}) == "prefill 0P4/8 1P4/8"
    assert w.engine.pages_held == 3  # ... and kept once from the next round on
    assert w.engine._own.cache.cached.tolist() == [0, 0]


def test_a_prompt_beside_a_newcomer_that_decodes_in_step_is_computed_again_in_each_of_its_forwards() -> None:
    spec = FDFO.replace("fdfo", "sync")
    w = asked(World(spec, prefixes=prefixes(4, [0, 1], [2, 3], [0, 1], named=[8, 8, 8])), (8, 1))
    steps_of(w, 0)
    w.submit(1, 8, 4)
    w.submit(2, 8, 4)  # its prompt is there
    assert w.step_tokens({}) == "decode 1P4/4 2D4/12"
    assert w.step_tokens({2: range(4)}) == "decode 1I4/4 2D4/12"
    assert w.step_tokens({}) == "decode 1I4/4 2F4/12"
    assert w.step_tokens({}) == "prefill 1P4/8"


def test_a_prefill_leaves_out_the_pages_that_are_there() -> None:
    w = asked(World(AHEAD, prefixes=prefixes(8, [0, 1, 2], [0, 1, 3], [0, 4], named=[20, 21, 9])), (20, 4))
    assert steps_of(w, 0)[0] == "prefill 0P20/20"
    step(w)  # the one decided on ahead
    w.submit(1, 21, 3)
    # Of 24 positions 16 are there; queries see blocks of 4: 24 * 28 / 2 less 16 * 20 / 2 pairs.
    assert w.plan_tokens() == "prefill 1P8/24"
    assert w.features() == (8, 24 * 28 // 2 - 16 * 20 // 2, 24, 4, 4, 1, 8, 1)
    w.commit()
    w.submit(2, 9, 3)
    assert "prefill 2P4/12" in [step(w) for _ in range(4)]
    assert w.engine._own.cache.cached.tolist() == [0, 16, 8]


def test_only_committed_tokens_of_canvases_are_found() -> None:
    w = World(DIFFUSION, prefixes=prefixes(4, [0, 1, 2, 3], [0, 1, 6, 7, 8], [0, 1, 2, 3, 5], named=[16, 20, 20]))
    w.submit(0, 4, 12)
    assert w.step_tokens({}) == "prefill 0P4/4"
    assert w.step_tokens({}) == "decode 0D4/8"
    w.submit(1, 18, 1)
    assert w.step_tokens({}) == "decode 0D4/8 1P14/18"  # the prompt is there, and no canvas that is being denoised
    assert w.engine._own.cache.cached[:2].tolist() == [0, 4]
    assert [step(w).split(" 1")[0] for _ in range(3)] == ["decode 0D4/8", "decode 0F4/8", "decode 0D4/12"]
    w.submit(2, 18, 1)
    assert "2P10/18" in step(w)  # one canvas is committed


def test_eagle_shares_a_page_only_if_the_next_token_is_equal_too() -> None:
    names = prefixes(1, [*range(9)], [*range(8), 9], [*range(9)], named=[9, 9, 9])
    drafted = "vllm-ar,num_speculative_tokens=2,page_size=4,prefix_caching=true,async_scheduling=false"
    for drafter, second in (("eagle", "1P5/9"), ("dflash", "1P3/11"), ("ngram", "1P3/11")):
        spec = f"{drafted},drafter={drafter}"
        w = asked(World(spec, prefixes=names), (9, 1))
        assert step(w) == "prefill 0P9/9"
        w.submit(1, 9, 1)
        assert step(w) == f"prefill {second}"
        w.submit(2, 9, 1)
        assert step(w) == "prefill 2P3/11"


@cases(
    "spec",
    "sglang-fdfo,block_length=4,page_size=8,max_running_requests=4,num_pages=32",
    "sglang-sync,block_length=4,page_size=8,max_running_requests=4,num_pages=32",
    "sglang-joint,block_length=4,page_size=8,max_running_requests=4,num_pages=32",
    "sglang-fdfo,block_length=4,page_size=8,num_pages=40",
    "lmdeploy-0.18:4,page_size=8,max_batch=4,num_pages=30,max_prefill_tokens=64",
    "vllm-diffusion,canvas_length=4,page_size=8,max_num_seqs=4,max_num_batched_tokens=64,num_pages=30",
    "vllm-ar,drafter=eagle,page_size=8,max_num_seqs=4,max_num_batched_tokens=64,num_pages=26",
)
def test_every_scheduler_keeps_account_and_serves_all_and_its_journal_replays(spec: str) -> None:
    trace, policy = conversations(30), parse(spec + ",prefix_caching=true")
    num_pages = policy.memory.num_pages or 0
    limits = Limits(num_pages, 4096, policy.batching.max_batch or 4)

    def fresh() -> Engine:
        table = RequestTable(len(trace))
        return Engine(policy, limits, table, latency=SECOND, prefixes=prefixes_of(trace))

    engine, journal = fresh(), Collector()
    model = StepModel(SECOND, draws_of(policy, trace, 3), policy.cache)
    run_singly(engine, model, trace, StepRecorder(journal, policy.width), check_account)
    assert (engine.table["status"] == 0).all()
    assert (engine.table["num_tokens"] == trace.output_length).all()
    assert (engine.pages_held, engine.expected_tokens) == (0, 0)
    assert engine.totals.prefix_hits > 300
    assert engine.totals.prefix_queries == trace.input_length.sum()
    again = fresh()
    assert list(replay(again, 0, engine.table.columns, journal.steps, journal.lists)) == []
    assert table_bytes(again.table) == table_bytes(engine.table)
    assert np.array_equal(again._own.cache.cached, engine._own.cache.cached)
