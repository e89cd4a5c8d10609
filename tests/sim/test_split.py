"""Split prefill by hand: what travels and when, which pages are held, what caches save, and what scalers change."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.engine.errors import PolicyError
from dsim.engine.journal import unpack
from dsim.engine.latency import LatencyModel
from dsim.engine.spec import parse
from dsim.profiler.profile import load
from dsim.results.split_times import PARTS, parts
from dsim.sim.clock import Clock
from dsim.sim.deciders import least_uncached
from dsim.sim.link import Link, Wire
from dsim.sim.pools import Fleet, Pool
from dsim.sim.routers import routing
from dsim.sim.scalers import scaling
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate
from dsim.traces import Trace

from ..checks import cases
from ..worlds import BLOCK_PRESETS, SECOND, Collector, journal_bytes, refusal, table_bytes, toy_profile, toy_trace

KV = 147_456  # bytes of a token of SDAR-8B
AT_ONCE = Link(math.inf)
BLOCK4 = "lmdeploy-bd32,block_length=4,page_size=8,num_loops=1"


def setting(spec: str = BLOCK4, latency: LatencyModel = SECOND) -> Setting:
    return Setting(parse(spec), toy_profile(latency=latency))


def split(
    trace: Trace, link: Link = AT_ONCE, *, p: Setting | None = None, d: Setting | None = None, decider: str = "always",
    counts: tuple[int, int] = (1, 1), **how: Any,
) -> RunRecords:  # fmt: skip
    pools = Pool(p or setting(), counts[0], "p"), Pool(d or setting(), counts[1], "d")
    return simulate(trace, Fleet(pools, links=(link,), least_uncached=least_uncached(decider)), **how)


def moves(result: RunRecords) -> dict[str, list[Any]]:
    assert result.moves is not None
    return {name: column.tolist() for name, column in result.moves.items()}


def columns_of(result: RunRecords) -> dict[str, Any]:
    assert result.moves is not None
    return {**result.table.columns, **result.moves}


def test_whole_blocks_travel_and_the_tail_is_computed_where_it_is_decoded() -> None:
    journal = Collector()
    result = split(toy_trace([0, 0, 0], [10, 3, 8], [4, 4, 4]), append=journal)
    # A prompt below a block never travels; of 10 tokens two blocks do; of 8 all.
    assert moves(result)["arrived"] == [8, 0, 8]
    assert moves(result)["prefill_replica"] == [0, -1, 0]
    assert result.table["replica"].tolist() == [1, 1, 1]
    steps, (requests, offsets) = journal.steps, journal.lists["requests"]
    prefilled = [int(n) for n in steps["tokens"][steps["replica"] == 0]]
    assert prefilled == [16]
    # The first step on the decoding replica computes the tail and the masks of its block, not the prompt before it.
    first = next(
        i for i in range(len(steps["step"])) if steps["replica"][i] == 1 and 0 in requests[offsets[i] : offsets[i + 1]]
    )
    row = requests[offsets[first] : offsets[first + 1]].tolist().index(0)
    assert not steps["prefill"][first]
    assert journal.lists["num_tokens"][0][offsets[first] + row] == 4
    assert unpack(journal.lists["window"][0][offsets[first] : offsets[first + 1], None], 4)[row].all()


@pytest.mark.parametrize("spec", ["ar,max_batch=4", "vllm-ar,async_scheduling=false"])
def test_a_next_token_model_sends_all_but_the_last_token_of_a_prompt(spec: str) -> None:
    result = split(toy_trace([0, 0], [10, 1], [3, 3]), p=setting(spec), d=setting(spec))
    assert moves(result)["arrived"] == [9, 0]
    # The prefill takes 1 s; the last token's step gives the first token of the answer.
    assert result.table["first_emission"].tolist() == [2, 1]


def test_a_transfer_takes_its_latency_and_its_bytes_over_the_bandwidth() -> None:
    times = moves(split(toy_trace([0], [8], [4]), Link(KV * 4.0, 0.5)))
    assert times["transfer_start"] == [1]
    assert times["submitted"] == times["released"] == [1 + 0.5 + 8 / 4]


def test_a_replicas_transfers_share_its_link_and_those_of_others_do_not() -> None:
    # On one replica prefills end at 1 and 2 s, on two at 1 and 1.5 s. A token takes a quarter of a second.
    trace, slow = toy_trace([0, 0.5], [8, 8], [4, 4]), Link(KV * 4.0)
    for count, ends in ((1, [4, 5]), (2, [3, 3.5])):
        assert moves(split(trace, slow, counts=(count, 1)))["submitted"] == pytest.approx(ends), count


def test_layers_that_travel_while_others_are_computed_leave_the_last_one() -> None:
    layers = toy_profile().model.layers
    fast = moves(split(toy_trace([0], [8], [4]), Link(KV * 80.0, overlap=True)))["submitted"]
    assert fast == pytest.approx([1 + 8 / 80 / layers])
    slow = moves(split(toy_trace([0], [8], [4]), Link(KV * 2.0, overlap=True)))["submitted"]
    assert slow == pytest.approx([1 + (8 - 2) / 2])  # the prefill's second was enough for two tokens


@pytest.mark.parametrize("shape", ["exponential", "constant"])
def test_the_mean_time_on_a_shared_link_is_that_of_processor_sharing(shape: str) -> None:
    rng, n, load = np.random.default_rng(3), 40_000, 0.7
    arrival = np.cumsum(rng.exponential(1 / load, n))
    sizes = rng.exponential(1.0, n) if shape == "exponential" else np.ones(n)
    env, took = Clock(), np.zeros(n)
    wire = Wire(env, Link(1.0))

    def arrive(i: int) -> None:
        begun = env.now
        wire.send(sizes[i], lambda: took.__setitem__(i, env.now - begun))

    def later(i: int) -> Callable[[], None]:
        return lambda: arrive(i)

    for i, time in enumerate(arrival):
        env.call(float(time), later(i))
    env.run()
    means = took.reshape(20, -1).mean(axis=1)  # M/G/1-PS: E[S] / (1 - load), whatever the sizes' law
    assert abs(means.mean() - 1 / (1 - load)) < 3 * means.std(ddof=1) / math.sqrt(len(means))


def test_pages_are_held_at_both_ends_until_a_transfer_is_over() -> None:
    journal = Collector()
    small = setting(f"{BLOCK4},num_pages=3")
    result = split(toy_trace([0, 0], [16, 16], [4, 4]), Link(KV * 4.0), p=small, d=setting(), append=journal)
    # Two prompts of two pages do not fit into three: the second is prefilled once the first one's are sent, at 5 s.
    assert moves(result)["prefill_scheduled"] == [0, 5]
    assert moves(result)["pages_kept"] == moves(result)["pages_reserved"] == [2, 2]
    pages = journal.steps["pages"][journal.steps["replica"] == 1].tolist()
    assert pages[0] >= 2
    assert result.table["finish"].tolist() == sorted(result.table["finish"].tolist())


@pytest.mark.parametrize(
    ("decider", "moved"), [("always", [1, 1, 1, 1]), ("never", [0, 0, 0, 0]), ("uncached,tokens=40", [0, 1, 1, 0])]
)
def test_a_decider_says_which_requests_are_prefilled_elsewhere(decider: str, moved: list[int]) -> None:
    result = split(toy_trace([0] * 4, [8, 80, 40, 8], [4] * 4), decider=decider)
    assert [int(tokens > 0) for tokens in moves(result)["arrived"]] == moved
    assert result.table["status"].tolist() == [0] * 4


@pytest.mark.parametrize("spec", ["sglang-fdfo", "sglang-sync"])
def test_with_an_infinite_link_decode_plans_are_those_of_a_server_with_cached_prompts(spec: str) -> None:
    """The first ten requests have the server's cache hold the prompts of the last ten."""
    spec += ",block_length=4,page_size=4"
    prompts, outputs = [4 * (2 + i % 5) + i % 4 for i in range(10)], [3 + i for i in range(10)]
    named = [[100 * i + k for k in range(-(-prompt // 4))] for i, prompt in enumerate(prompts)] * 2
    trace = replace(
        toy_trace([*range(10), *(100 + 0.77 * i for i in range(10))], [*prompts, *prompts], [*[4] * 10, *outputs]),
        extras={"hash_ids": named, "block_size": [4] * 20},
    )
    cached, served = Collector(), Collector()
    simulate(trace, Fleet((Pool(setting(f"{spec},prefix_caching=true")),)), append=cached)
    free = setting(spec, LatencyModel(((0.0, 0.0),), 0.0, layers=2))
    split(trace, p=free, d=setting(spec), append=served)

    def plans(journal: Collector, replica: int) -> list[Any]:
        steps, found = journal.steps, []
        for i in np.flatnonzero((steps["replica"] == replica) & (steps["start"] >= 100)):
            own = {}
            for name in ("requests", "phases", "num_tokens", "window", "commits"):
                values, offsets = journal.lists[name]
                own[name] = values[offsets[i] : offsets[i + 1]].tolist()
            found.append((steps["start"][i], steps["sum_kv"][i], own))
        return found

    assert plans(cached, 0) == plans(served, 1)


SPECS = [
    *(f"{name},page_size=32" for name in BLOCK_PRESETS if name != "delayed-cache-plus"),
    *("sglang-fdfo", "lmdeploy-0.18", "vllm-ar", "vllm-ar,drafter=eagle,async_scheduling=false"),
    *(f"{name},canvas_length=4,page_size=8" for name in ("sglang-gemma", "vllm-diffusion")),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("crowded", [False, True])
def test_requests_are_conserved_through_moves(spec: str, crowded: bool) -> None:
    pages = 1200 // parse(spec).memory.page_size
    rng, n = np.random.default_rng(2), 16
    prompts = np.where(np.arange(n) % 3 == 0, 32 * rng.integers(1, 9, n), rng.integers(1, 300, n))
    trace = toy_trace(np.arange(n) * 0.5, prompts, rng.integers(0, 50, n))
    own = Setting(parse(f"{spec},num_pages={pages}" if crowded else spec), toy_profile())
    fleet_of = Pool(own, 1, "p"), Pool(own, 2, "d")
    link = Link(KV * 2000.0, 0.01)
    result = simulate(trace, Fleet(fleet_of, routing("least-tokens"), links=(link,)))
    assert result.moves is not None
    assert (result.table["status"] == 0).all()
    assert (result.moves["arrived"] > 0).any()


@pytest.mark.parametrize("how", [{}, {"concurrency": 5}, {"sessions": True}, {"drain": False}, {"emit": "step"}])
def test_times_add_up_however_requests_come_and_tokens_go(how: dict[str, Any]) -> None:
    trace = toy_trace(
        np.arange(40) * (0.3 if how else 0.7), [3 + 7 * (i % 9) for i in range(40)], [1 + i % 11 for i in range(40)]
    )
    trace = replace(trace, extras={"session_id": [f"s{i % 7}" for i in range(40)]})
    result = split(trace, Link(KV * 20.0, 0.25), counts=(1, 2), **how)
    columns = columns_of(result)
    done = columns["status"] == 0
    assert done.all() == ("drain" not in how)
    found = parts(columns)
    assert tuple(found) == PARTS
    assert all((seconds[done] >= 0).all() for seconds in found.values())
    latency, ttft = ((columns[name] - columns["arrival"])[done] for name in ("finish", "first_emission"))
    whole = sum(found.values())
    assert np.allclose(whole[done], latency, atol=1e-9)
    assert np.allclose((whole - found["rest"])[done], ttft, atol=1e-9)
    assert (found["transfer"][done & (columns["arrived"] > 0)] >= 0.25 + 4 / 20).all()


def test_a_gemma_prompt_sends_the_last_tokens_alone_of_layers_with_a_window() -> None:
    profile = load("h100-diffusiongemma-fp8")
    assert AT_ONCE.size(profile, 500) == 500 * (20_480 + 204_800)
    assert AT_ONCE.size(profile, 5000) == 5000 * 20_480 + 1023 * 204_800


@cases(
    "links specs message",
    ([Link(1.0, source="a", to="b")], [BLOCK4, BLOCK4], "link names the pool 'a', expected one of p, d"),
    ([Link(1.0), Link(2.0)], [BLOCK4, BLOCK4], "2 links join p and d, expected one"),
    ([Link(1.0), Link(1.0, source="d", to="p")], [BLOCK4, BLOCK4], "pool p is at both ends of links"),
    ([Link(1.0)], [BLOCK4, "ar"], "pool p has block_length 4 and pool d 1: expected the same"),
    ([Link(1.0)], [BLOCK4] * 3, "a link is given without pools and the fleet has 3, expected from=POOL,to=POOL"),
)
def test_a_fleet_whose_links_cannot_work_is_refused(links: list[Link], specs: list[str], message: str) -> None:
    names = ("p", "d", "e")
    pools = tuple(Pool(setting(spec), name=name) for spec, name in zip(specs, names, strict=False))
    trace = toy_trace([0], [8], [4])
    assert message in refusal(PolicyError, lambda: simulate(trace, Fleet(pools, links=tuple(links))))


@cases(
    "text link",
    ("450GB/s,10us", Link(450e9, 10e-6)),
    ("400Gb/s", Link(50e9)),
    ("inf,1ms,from=p,to=d", Link(math.inf, 1e-3, "p", "d")),
    ("1.5TB/s,overlap=true", Link(1.5e12, overlap=True)),
)
def test_a_link_is_read(text: str, link: Link) -> None:
    assert Link.parse(text) == link


FDFO = "sglang-fdfo,block_length=4,page_size=4"


def with_names(trace: Trace, names: list[list[int]], block: int = 4) -> Trace:
    return replace(trace, extras={"hash_ids": names, "block_size": [block] * len(trace)})


def cached_split(
    trace: Trace, link: Link, spec: str = FDFO, *, caches: str = "pd", decider: str = "always", num: int = 1,
    router: str = "round-robin", **how: Any,
) -> RunRecords:  # fmt: skip
    p, d = (setting(f"{spec},prefix_caching={str(name in caches).lower()}") for name in "pd")
    fleet = Fleet(
        (Pool(p, 1, "p"), Pool(d, num, "d")), routing(router), links=(link,), least_uncached=least_uncached(decider),
    )  # fmt: skip
    return simulate(trace, fleet, **how)


def of(result: RunRecords, *names: str) -> list[list[Any]]:
    return [columns_of(result)[name].tolist() for name in names]


def test_only_what_the_decoding_replica_lacks_travels() -> None:
    # Request 1 begins with the three pages of request 0; a token takes a quarter of a second.
    trace = with_names(toy_trace([0, 20, 40], [12, 16, 16], [4, 4, 4]), [[0, 1, 2], [0, 1, 2, 3], [5, 1, 2, 3]])
    result = cached_split(trace, Link(KV * 4.0), caches="d")
    assert of(result, "arrived", "sent", "pages_reserved") == [[12, 16, 16], [12, 4, 16], [3, 4, 4]]
    assert of(result, "transfer_start", "submitted") == [[3, 24, 44], [6, 25, 48]]
    # Nothing is computed less: the prefill pool has no cache.
    assert result.cached_tokens is not None
    assert result.cached_tokens.tolist() == [0, 0, 0]
    without = cached_split(trace, Link(KV * 4.0), caches="")
    assert of(without, "submitted") == [[6, 28, 48]]
    assert "sent" not in (without.moves or {})


@cases(
    "spec second sent",
        (FDFO, 9, 4), ("lmdeploy-0.18,block_length=4,page_size=4", 3.5, 4), ("vllm-ar,page_size=4", 9, 3),
)  # fmt: skip
def test_pages_of_a_request_that_decodes_still_are_found(spec: str, second: float, sent: int) -> None:
    # LMDeploy's first request is decoded from 4 s on, and pages for the second are reserved at 4.5 s.
    trace = with_names(toy_trace([0, second], [12, 16], [40, 4]), [[0, 1, 2], [0, 1, 2, 3]])
    result = cached_split(trace, Link(KV * 4.0), spec, caches="d")
    assert result.table["finish"][0] > result.table["finish"][1]
    assert of(result, "sent")[0][1] == sent


def test_what_a_replica_computed_itself_counts_as_cached() -> None:
    # Both are prefilled where they are decoded: of request 1's 16 tokens 8 are there.
    trace = with_names(toy_trace([0, 30], [8, 16], [4, 4]), [[0, 1], [0, 1, 2, 3]])
    local = cached_split(trace, Link(KV * 4.0), caches="d", decider="uncached,tokens=9")
    assert of(local, "prefill_replica", "sent") == [[-1, -1], [0, 0]]
    never = cached_split(trace, Link(KV * 4.0), caches="", decider="uncached,tokens=9")
    assert of(never, "prefill_replica") == [[-1, 0]]


def test_uncached_counts_what_the_replica_that_has_most_of_a_prompt_lacks() -> None:
    # Requests 0 and 1 go to different replicas; request 2 begins with both pages of request 1.
    trace = with_names(toy_trace([0, 0, 40], [8, 12, 16], [4] * 3), [[0, 1], [5, 6, 7], [5, 6, 7, 8]])
    for tokens, moved in ((4, 0), (5, -1)):
        result = cached_split(trace, Link(KV * 4.0), caches="d", num=2, decider=f"uncached,tokens={tokens}")
        assert of(result, "prefill_replica")[0][2] == moved, tokens


def tree(seed: int, n: int = 40) -> Trace:
    """Prompts that begin alike: each is a path in a tree of blocks of 16 tokens."""
    rng = np.random.default_rng(seed)
    names: list[list[int]] = []
    for _ in range(n):
        path = [0]
        for _ in range(rng.integers(0, 8)):
            path.append(3 * path[-1] + 1 + int(rng.integers(0, 2)))
        names.append(path)
    arrival = np.cumsum(rng.exponential(0.8, n))
    prompts = [16 * (len(path) - 1) + int(rng.integers(1, 17)) for path in names]
    return with_names(toy_trace(arrival - arrival[0], prompts, rng.integers(1, 40, n)), names, 16)


@cases(
    "spec",
        "sglang-fdfo,block_length=4,page_size=8", "lmdeploy-0.18,block_length=4,page_size=8", "vllm-ar,page_size=8",
        "vllm-diffusion,canvas_length=4,page_size=8",
)  # fmt: skip
@pytest.mark.parametrize("pages", [400, 40], ids=["roomy", "crowded"])
def test_requests_are_conserved_beside_caches(spec: str, pages: int) -> None:
    num = 20
    for seed, router in enumerate(("prefix", "least-tokens")):
        trace = tree(seed, num)
        link, spec_of = Link(KV * 300.0, 0.01), f"{spec},num_pages={pages}"
        result = cached_split(trace, link, spec_of, caches="d", num=2, router=router, seed=1)
        assert (result.table["status"] == 0).all()
        columns = columns_of(result)
        found = parts(columns)
        assert np.allclose(sum(found.values()), columns["finish"] - columns["arrival"])
        if pages == 400:
            assert 0 < columns["sent"].sum() < columns["arrived"].sum()


# Every step takes 1 s, so a prompt is prefilled in 1 s; its whole blocks of 4 tokens travel at 2 tokens a second.
SLOW = Link(KV * 2.0)


def run_scaled(
    trace: Trace, counts: tuple[int, int], *, link: Link = SLOW, schedule: str | None = None,
    startup: float = 0, spec: str = BLOCK4, **how: Any,
) -> RunRecords:  # fmt: skip
    own = setting(spec)
    pools = tuple(Pool(own, count, name, startup) for count, name in zip(counts, "pd", strict=True))
    scaler = scaling(f"schedule,at={schedule},every=5") if schedule else None
    fleet = Fleet(pools, routing("jsq"), scaler, links=(link,))
    return simulate(trace, fleet, **how)


def provisioned(result: RunRecords, pool: str) -> list[tuple[float, int, int]]:
    return [(c.time, c.ready, c.provisioned) for c in result.changes if c.pool == pool]


def test_a_draining_replica_decodes_what_is_on_its_way_to_it() -> None:
    # Requests 0 and 1 are sent from 1 to 17 s, one to each replica. The second one drains at 5 s and ends with its
    # request; request 2 goes to the first.
    result = run_scaled(toy_trace([0, 0, 6], [16, 16, 3], [4, 4, 4]), (1, 2), schedule="0/1+2/5/1+1")
    assert moves(result)["submitted"][:2] == [17, 17]
    assert result.table["replica"].tolist() == [1, 2, 1]
    end = float(result.table["finish"][1])
    assert end > 17
    assert provisioned(result, "d") == [(0, 2, 2), (5, 1, 2), (end, 1, 1)]
    assert result.replica_time == pytest.approx(2 * result.totals.end + end)


def test_a_draining_replica_keeps_what_it_prefilled_until_it_is_sent() -> None:
    # Of two prefill replicas the second drains at 5 s; the pages that it sends until 9 s are kept, and it with them.
    result = run_scaled(toy_trace([0, 0, 6], [16, 16, 16], [4, 4, 4]), (2, 1), schedule="0/2+1/5/1+1")
    assert moves(result)["prefill_replica"] == [0, 1, 0]
    assert moves(result)["released"] == [11, 9, 17]  # from 7 to 11 s requests 0 and 2 share a link
    assert provisioned(result, "p") == [(0, 2, 2), (5, 1, 2), (9, 1, 1)]


def test_without_prefill_replicas_those_that_decode_do_all() -> None:
    result = run_scaled(toy_trace([0, 6, 16], [16] * 3, [4] * 3), (1, 1), schedule="0/1+1/5/0+1/15/1+0")
    assert moves(result)["prefill_replica"] == [0, -1, 2]
    # The last one that decodes never drains, whatever the scaler says.
    assert [ready for _, ready, _ in provisioned(result, "d")] == [1]


HOW: list[dict[str, Any]] = [{}, {"concurrency": 5}, {"sessions": True}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", HOW)
@cases(
    "policy",
    "lmdeploy-bd32,num_loops=1,max_batch=3",
    "lmdeploy-0.18,max_batch=3",
    "sglang-fdfo,max_running_requests=3",
    "ar,max_batch=3",
)
def test_runs_with_moves_and_drains_are_the_same_step_by_step(policy: str, how: dict[str, Any]) -> None:
    rng, n = np.random.default_rng(5), 36
    arrival = np.cumsum(rng.exponential(0.8, n))
    trace = toy_trace(arrival - arrival[0], rng.integers(1, 60, n), rng.integers(1, 12, n))
    trace = replace(trace, extras={"session_id": [f"s{i % 7}" for i in range(n)]})
    spec = policy + ("" if policy == "ar,max_batch=3" else ",block_length=4,page_size=4")
    journal, again = Collector(), Collector()
    link = Link(KV * 20.0, 0.25)
    same = dict(how, link=link, schedule="0/2+2/10/3+4/25/0+1/40/2+3", startup=4, spec=spec, seed=1)
    result = run_scaled(trace, (2, 2), append=journal, **same)
    assert (result.table["status"] == 0).all()
    twice = run_scaled(trace, (2, 2), append=again, step_by_step=True, **same)
    assert table_bytes(twice.table) == table_bytes(result.table)
    assert journal_bytes(again) == journal_bytes(journal)
