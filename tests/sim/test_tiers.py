"""KV tiers by hand: when a page is where, how long a request waits for it, and that none is lost or held twice."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from dsim.engine.errors import PolicyError
from dsim.engine.journal import RequestTable
from dsim.engine.offload import Reenacted
from dsim.engine.policy import parse
from dsim.engine.replay import replay as again
from dsim.engine.state import CANCELLED, COMPLETED
from dsim.sim.clock import Clock
from dsim.sim.failures import Failure
from dsim.sim.fleet import Fleet, Pool
from dsim.sim.link import Link
from dsim.sim.routers import routing
from dsim.sim.scalers import scaling
from dsim.sim.setting import Setting
from dsim.sim.startup import Startup
from dsim.sim.tiers import Store, Tier, TierUse, page_bytes
from dsim.sim.twin import Result, simulate
from dsim.traces import Trace
from dsim.traces.prefixes import prefixes_of

from ..worlds import SECOND, Collector, journal_bytes, table_bytes, toy_profile, toy_trace

AR = "vllm-ar,async_scheduling=false,prefix_caching=true,page_size=4"
CACHING = {  # page and block of each divide 8
    "vllm-ar": f"{AR},num_pages=24,max_num_seqs=2",
    "vllm-ar, ahead": "vllm-ar,prefix_caching=true,page_size=4,num_pages=28,max_num_seqs=2",
    "vllm-diffusion": "vllm-diffusion,canvas_length=8,prefix_caching=true,page_size=4,num_pages=32,max_num_seqs=2",
    "sglang-fdfo": "sglang-fdfo,block_length=4,prefix_caching=true,page_size=4,num_pages=22,max_running_requests=2",
    "lmdeploy-0.18": "lmdeploy-0.18,block_length=4,prefix_caching=true,page_size=4,num_pages=22,max_batch=2",
}


def setting(spec: str) -> Setting:
    return Setting(parse(spec), toy_profile(latency=SECOND))


def named(arrival: Sequence[float], prompts: Sequence[str], outputs: Sequence[int]) -> Trace:
    """Requests whose prompts have 4 tokens for each letter, and one more: what begins alike shares its pages."""
    trace = toy_trace(arrival, [4 * len(prompt) + 1 for prompt in prompts], outputs)
    ids = [[ord(letter) for letter in prompt] + [-i] for i, prompt in enumerate(prompts)]
    return replace(trace, extras={**trace.extras, "hash_ids": ids, "block_size": [4] * len(ids)})


def tier(text: str, pages: float = math.inf, seconds: float = 0.0, spec: str = AR, **how: Any) -> Tier:
    """A tier of this many pages; each takes `seconds` to move."""
    size = page_bytes(setting(spec))
    return Tier(text, pages * size, size / seconds if seconds else math.inf, **how)


def served(trace: Trace, *tiers: Tier, spec: str = f"{AR},num_pages=3", replicas: int = 1, **how: Any) -> Result:
    router, failures = routing(how.pop("router", "round-robin")), how.pop("failures", ())
    fleet = Fleet((Pool(setting(spec), replicas),), router, tiers=tiers, failures=failures)
    return simulate(trace, fleet, **how)


def found(result: Result) -> list[int]:
    assert result.tiered is not None
    return [int(n) for n in result.tiered.loaded]


# Request 1 evicts the two full pages of request 0, which request 2 asks for again.
TWICE = ["ab", "xy", "ab"]


def test_an_evicted_page_is_found_in_the_host_after_its_bytes_over_the_bandwidth() -> None:
    # Written from 1 s, the first step's end, to 3.25 s; loaded for as long.
    host = tier("host", seconds=1, latency=0.25)
    early, late = (served(named([0, 1, at], TWICE, [1, 1, 1]), host) for at in (3.2, 10))
    assert found(early) == [0, 0, 0]
    assert early.table["scheduled"].tolist() == [0, 1, 3.2]
    assert found(late) == [0, 0, 8]
    assert late.table["scheduled"].tolist() == [0, 1, 12.25]
    assert late.tiered is not None
    assert late.tiered.deferred.tolist() == [0, 0, 2.25]
    assert late.cached_tokens is not None
    assert late.cached_tokens.tolist() == [0, 0, 8]
    assert late.totals.prefix_hits == 8


def test_a_page_that_is_written_as_it_is_evicted_comes_later() -> None:
    host = tier("host", seconds=1, write="evict")
    # Evicted by the step that ends at 6 s, there at 8 s.
    early, late = (served(named([0, 5, at], TWICE, [1, 1, 1]), host) for at in (7.5, 8.5))
    assert found(early) == [0, 0, 0]
    assert found(late) == [0, 0, 8]
    assert late.table["scheduled"].tolist() == [0, 5, 10.5]


def test_a_full_tier_drops_what_was_used_longest_ago() -> None:
    trace = named([0, 5, 10, 15], ["ab", "xy", "ab", "xy"], [1] * 4)
    assert found(served(trace, tier("host", 2))) == [0, 0, 0, 0]  # two pages took the place of the two before
    assert found(served(trace, tier("host", 3))) == [0, 0, 4, 4]  # a first page outlives the one after it
    assert found(served(trace, tier("host", 4))) == [0, 0, 8, 8]


def test_a_shared_tier_serves_another_replica_and_the_host_does_not() -> None:
    trace = named([0, 5], ["ab", "ab"], [1, 1])
    assert found(served(trace, tier("host"), replicas=2)) == [0, 0]
    shared = served(trace, tier("shared", seconds=0.5), replicas=2)
    assert found(shared) == [0, 8]
    assert shared.table["scheduled"].tolist() == [0, 6]
    # Replica 0 comes back at 4 s without its host's pages.
    lost = Failure.parse("at=3s,replica=0,for=1s")
    assert found(served(trace, tier("host"), failures=(lost,))) == [0, 0]
    assert found(served(trace, tier("shared"), failures=(lost,))) == [0, 8]


def test_pages_of_a_lower_tier_pass_through_the_host_and_stay_there() -> None:
    # The host drops "a" and "b" for "x" and "y", and the third request brings them back.
    tiers = tier("host", 2, seconds=0.25), tier("disk", seconds=1)
    trace = named([0, 5, 10, 20, 30], ["ab", "xy", "ab", "xy", "xy"], [1] * 5)
    result = served(trace, *tiers)
    assert found(result) == [0, 0, 8, 8, 0]
    assert result.table["scheduled"].tolist() == [0, 5, 12.5, 22.5, 30]
    assert result.tiered is not None
    host, disk = result.tiered.uses
    size = host.page_bytes
    assert (host.loaded_tokens, disk.loaded_tokens) == (0, 16)
    assert (host.read_bytes, disk.read_bytes) == (4 * size, 4 * size)
    assert (host.written_bytes, disk.written_bytes) == (4 * size, 4 * size)
    assert (host.dropped_bytes, host.held_bytes, host.most_bytes) == (6 * size, 2 * size, 2 * size)


def test_a_request_that_waits_for_its_pages_blocks_no_other() -> None:
    trace = named([0, 5, 10, 10, 10], ["ab", "xy", "ab", "q", "ab"], [1] * 5)
    result = served(trace, tier("host", seconds=1), spec=f"{AR},num_pages=6")
    # Six pages: "xy" evicts nothing; without tiers or with, the GPU has all of "ab".
    assert found(result) == [0] * 5
    result = served(trace, tier("host", seconds=1), spec=f"{AR},num_pages=4")
    # The fourth goes first, and the fifth waits for the load that the third began.
    assert result.table["scheduled"].tolist() == [0, 5, 11, 10, 11]
    assert found(result) == [0, 0, 4, 0, 0]


def test_transfers_of_one_replica_share_its_bandwidth() -> None:
    names = ["ab", "cd", "xyxyxy", "ab", "cd"]
    trace = named([0, 10, 20, 30, 30], names, [1] * 5)
    result = served(trace, tier("host", seconds=1), spec=f"{AR},num_pages=7")
    assert result.tiered is not None
    # Two loads of two pages each: alike they take 4 s, not 2 s.
    assert result.tiered.deferred.tolist() == [0, 0, 0, 4, 4]


def random_trace(seed: int, count: int = 60, gap: float = 3.0) -> Trace:
    draw = Random(seed)
    prompts = [
        draw.choice("abcd") * draw.randrange(1, 3) + draw.choice("efg") * draw.randrange(3) for _ in range(count)
    ]
    arrival = np.cumsum([gap * draw.random() for _ in range(count)])
    return named((arrival - arrival[0]).tolist(), prompts, [draw.randrange(1, 9) for _ in range(count)])


@pytest.mark.parametrize("name", CACHING)
def test_an_endless_tier_that_costs_nothing_is_a_cache_without_end(name: str) -> None:
    spec = CACHING[name]
    for seed in range(2):
        trace = random_trace(seed)
        without = served(trace, spec=spec)
        tiered = served(trace, tier("host", spec=spec), spec=spec)
        endless = served(trace, spec=",".join(s for s in spec.split(",") if "num_pages" not in s) + ",num_pages=4000")
        assert without.totals.prefix_hits < endless.totals.prefix_hits == tiered.totals.prefix_hits
        assert table_bytes(tiered.table) == table_bytes(endless.table)


@pytest.mark.parametrize("name", CACHING)
def test_no_page_and_no_byte_is_lost_where_everything_is_short(name: str) -> None:
    spec = CACHING[name]
    for seed in range(2):
        trace, journal = random_trace(seed, 80, gap=1.0), Collector()
        tiers = [
            tier("host", 9, 0.3, spec=spec), tier("disk", 15, 0.5, spec=spec, latency=0.1, write="evict"),
            tier("shared", 40, 0.2, spec=spec),
        ]  # fmt: skip
        result = served(trace, *tiers, spec=spec, replicas=2, append=journal)
        assert (result.table["status"] == 0).all()
        assert (journal.steps["pages"] <= parse(spec).memory.num_pages).all()
        tiered = result.tiered
        assert tiered is not None
        assert tiered.loaded.sum() == sum(use.loaded_tokens for use in tiered.uses) > 0
        host, disk, shared = tiered.uses
        for use in (disk, shared):
            assert use.written_bytes == use.held_bytes + use.dropped_bytes
        # What passes through the host stays there, too.
        more = host.held_bytes + host.dropped_bytes - host.written_bytes
        assert 0 <= more <= disk.read_bytes + shared.read_bytes
        assert all(use.most_bytes <= use.tier.capacity for use in tiered.uses)
        again = served(trace, *tiers, spec=spec, replicas=2, append=(other := Collector()), step_by_step=True)
        assert journal_bytes(other) == journal_bytes(journal)
        assert table_bytes(again.table) == table_bytes(result.table)


def differences(
    result: Result, journal: Collector, trace: Trace, spec: str, changes: dict[int, Any], of_prefill: str = ""
) -> list[str]:
    """Replay the journal of each replica with what tiers did to it; pages held at the end, too.

    of_prefill: the spec of replicas that only prefill.
    """
    columns = {**result.table.columns, **(result.moves or {})}
    if result.attempts is not None:
        columns = {name: np.concatenate([values, result.attempts[name]]) for name, values in columns.items()}
    died = set() if result.failed is None else {outage.replica for outage in result.failed.outages}
    lines = []
    for replica in range(int(journal.steps["replica"].max()) + 1):
        prefixes = prefixes_of(trace)
        assert prefixes is not None
        if not (journal.steps["replica"] == replica).any():  # it had nothing to do
            continue
        own = of_prefill if of_prefill and (columns["prefill_replica"] == replica).any() else spec
        engine = setting(own).engine(RequestTable(len(trace)), replica=replica, prefixes=prefixes)
        tiers = Reenacted(engine, prefixes, changes[replica]) if replica in changes else None
        found = list(again(engine, replica, columns, journal.steps, journal.lists, tiers=tiers))
        ended = f"replica {replica}: the journal ends, the engine has more steps to run"
        lines += [line for line in found if line != ended or replica not in died]
        lines += [f"replica {replica} holds pages"] if replica not in died and engine.pages_held else []
    return lines


@pytest.mark.parametrize("failures", [(), ("mtbf=40,repair=5,requests=lost", "zone=1,zones=2,at=20,for=10")])
@pytest.mark.parametrize("name", CACHING)
def test_a_journal_of_a_run_with_tiers_replays_plan_for_plan(name: str, failures: tuple[str, ...]) -> None:
    spec = CACHING[name]
    trace, journal = random_trace(2, 80, gap=1.0), Collector()
    tiers = [tier("host", 9, 0.3, spec=spec), tier("shared", 40, 0.2, spec=spec)]
    fails = tuple(Failure.parse(text) for text in failures)
    result = served(trace, *tiers, spec=spec, replicas=2, append=journal, failures=fails)
    assert result.tiered is not None
    changes = result.tiered.changes
    assert {change.what for own in changes.values() for change in own} >= {"defer", "put_back", "pin", "insert"}
    assert differences(result, journal, trace, spec, changes) == []
    # Each kind of them matters: without it the engine plans other steps, or says what it misses.
    for what in ("defer", "put_back", "pin", "insert"):
        without = {replica: [change for change in own if change.what != what] for replica, own in changes.items()}
        assert differences(result, journal, trace, spec, without)
    assert served(trace, *tiers, spec=spec, replicas=2, failures=fails).tiered.changes == {}  # type: ignore[union-attr]


@pytest.mark.parametrize("fails", [(), ("mtbf=60,repair=5", "at=20,replica=1,for=10,requests=lost")])
@pytest.mark.parametrize("caches", ["p", "d", "pd"])
@pytest.mark.parametrize("name", [name for name in CACHING if name != "vllm-ar, ahead"])
def test_journals_of_split_fleets_with_tiers_replay_through_drains_and_failures(
    name: str, caches: str, fails: tuple[str, ...]
) -> None:
    trace, journal = random_trace(4, 60, gap=1.6), Collector()
    specs = {
        pool: CACHING[name] if pool in caches else CACHING[name].replace("prefix_caching=true", "prefix_caching=false")
        for pool in "pd"
    }
    pools = tuple(Pool(setting(spec), 2, pool, Startup.parse("3")) for pool, spec in specs.items())
    tiers = tuple(tier(*given, spec=CACHING[name]) for given in (("host", 9, 0.3), ("shared", 40, 0.2)))
    fleet = Fleet(
        pools, routing("least-tokens"), scaling("schedule,at=0/2+2/15/1+3/35/3+1/60/2+2,every=5"), (Link(2e9, 0.1),),
        failures=tuple(map(Failure.parse, fails)), tiers=tiers,
    )  # fmt: skip
    result = simulate(trace, fleet, append=journal, seed=3)
    status, tiered = result.table["status"], result.tiered
    assert tiered is not None
    assert result.moves is not None
    assert result.failed is None or result.failed.retried > 0
    assert ((status == COMPLETED) | ((status == CANCELLED) & bool(fails))).all()
    assert (result.table["num_tokens"] == trace.output_length)[status == COMPLETED].all()
    assert (result.moves["arrived"] > 0).sum() > 10
    assert tiered.loaded.sum() > 0
    assert {change.ready for change in result.changes} >= {1, 2, 3}
    assert differences(result, journal, trace, specs["d"], tiered.changes, specs["p"]) == []
    twice = simulate(trace, fleet, append=(other := Collector()), seed=3, step_by_step=True)
    assert table_bytes(twice.table) == table_bytes(result.table)
    assert journal_bytes(other) == journal_bytes(journal)


def test_a_tier_that_nothing_asks_for_changes_nothing() -> None:
    trace = named(np.arange(40) * 0.7, ["ab" + chr(200 + i) for i in range(40)], [1 + i % 5 for i in range(40)])
    spec = f"{AR},num_pages=4000"
    plain = served(trace, spec=spec, replicas=2)
    tiered = served(trace, tier("host", 50, 0.1), spec=spec, replicas=2)
    assert table_bytes(plain.table) == table_bytes(tiered.table)


@pytest.mark.parametrize("how", [{"concurrency": 3}, {"sessions": True}, {"eos": True}])
def test_closed_loops_and_sessions_run_with_tiers(how: dict[str, Any]) -> None:
    trace = random_trace(1, 30)
    trace = replace(trace, extras={**trace.extras, "session_id": [i % 5 for i in range(30)]})
    result = served(trace, tier("host", 30, 0.2), spec=CACHING["vllm-ar"], replicas=2, **how)
    assert (result.table["status"] == 0).all()
    assert sum(found(result)) > 0


def test_a_store_drops_in_the_order_of_a_plain_list() -> None:
    draw, most = Random(5), 7
    use = TierUse(Tier("host", 7 * 10.0, math.inf), "p", 10)
    store, oracle = Store(Clock(), use), OrderedDict[int, None]()
    dropped = 0
    for _ in range(2000):
        first = draw.randrange(20)
        pages = list(range(first, first + draw.randrange(1, 5)))
        if draw.random() < 0.5:
            store.write(pages)
            pages = [page for page in pages if page not in oracle]
        else:
            pages = [page for page in pages if page in oracle]
            store.touch(pages)
        for page in reversed(pages):
            oracle[page] = None
            oracle.move_to_end(page)
        while len(oracle) > most:
            oracle.popitem(last=False)
            dropped += 1
        assert store.names == list(oracle)
    assert use.dropped_bytes == 10 * dropped


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("host:64GB@50GB/s,10us", Tier("host", 64e9, 50e9, 1e-5)),
        ("host:64GB", Tier("host", 64e9, 32e9)),
        ("disk:1TB", Tier("disk", 1e12, 10e9, 1e-4)),
        ("shared:inf@inf,pool=fast,write=evict", Tier("shared", math.inf, math.inf, 0.0, "evict", "fast")),
    ],
)
def test_a_tier_is_read_from_its_words(text: str, tier: Tier) -> None:
    assert Tier.parse(text) == tier


def test_tiers_that_no_pool_can_have_are_refused() -> None:
    trace = named([0], ["a"], [1])
    for spec, tiers, says in (
        ("vllm-ar", [Tier("host", 1e9, 1e9)], "caches no prefixes, expected a policy with prefix_caching=true"),
        (AR, [Tier("host", 1e9, 1e9)] * 2, "tier host is given 2 times for pool pool, expected once"),
        (AR, [Tier("host", 10.0, 1e9)], "expected at least a page of 589,824"),
        (AR, [Tier("host", 1e9, 1e9, pool="slow")], "tier names the pool 'slow', expected one of pool"),
    ):
        with pytest.raises(PolicyError, match=says):
            served(trace, *tiers, spec=spec)


def test_dynamo_s_router_knows_which_replica_has_what() -> None:
    # A long request evicts "cd" from replica 0, and holds 20 pages there as "cd" comes again: 2.25 blocks, of which the
    # host has 2. Costs at a scale of 20: 20 x (2.25 - 2 x 0.75) + 20 = 35 and 45; without the host 65 and 45.
    trace = named([0, 5, 10.5], ["cd", "pqrstuvwxyzABCDEFG", "cd"], [1, 7, 1])
    for weight, chosen in ((0.75, 0), (0.0, 1)):
        how = {"spec": f"{AR},num_pages=20", "router": f"dynamo,prefill_load_scale=20,host_cache_hit_weight={weight}"}
        assert served(trace, tier("host"), replicas=2, **how).table["replica"].tolist() == [0, 0, chosen]
