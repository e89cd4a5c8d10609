"""Splits of full-sequence models by hand: every block's pass is run in one pool, and its whole sequence travels."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.engine.allowed_code import allowed
from dsim.engine.errors import PolicyError
from dsim.engine.journal import RequestTable
from dsim.engine.policy import parse
from dsim.engine.replay import replay
from dsim.planner.replay_run import write_replay
from dsim.results.parts import parts
from dsim.results.run import read_run
from dsim.results.scenario import Scenario
from dsim.sim.deciders import deciding
from dsim.sim.failures import Failure
from dsim.sim.fleet import Fleet, Pool
from dsim.sim.link import Link
from dsim.sim.routers import routing
from dsim.sim.scalers import scaling
from dsim.sim.setting import Setting
from dsim.sim.startup import Startup
from dsim.sim.twin import Result, simulate
from dsim.traces import Trace

from ..serving import serving_profile
from ..worlds import SECOND, Collector, journal_bytes, table_bytes, toy_trace
from .test_failures import differences

KV = serving_profile().memory.kv_bytes_per_token
AT_ONCE = Link(math.inf)
FREE_PAGES = f"{Path(__file__).parents[2]}/examples/routers/free_pages.py:FreePages"
SMALL = "sangam,block_length=4,page_size=4"
COMPLETED, UNFINISHED, CANCELLED = 0, 2, 3


def setting(spec: str = SMALL) -> Setting:
    return Setting(parse(spec), serving_profile(SECOND))


def split(
    trace: Trace, link: Link = AT_ONCE, *fails: str, p: str = SMALL, d: str = SMALL, counts: tuple[int, int] = (1, 1),
    decider: str = "always", router: str = FREE_PAGES, schedule: str = "", **how: Any,
) -> Result:  # fmt: skip
    pools = tuple(
        Pool(setting(spec), count, name, Startup.parse("load=4+-1"))
        for spec, count, name in zip((p, d), counts, "pd", strict=True)
    )
    scaler = scaling(f"schedule,at={schedule},every=5") if schedule else None
    routed = routing(router, allowed([FREE_PAGES.rpartition(":")[0]]))
    fleet = Fleet(
        pools, routed, scaler, links=(link,), deciding=deciding(decider),
        failures=tuple(map(Failure.parse, fails)),
    )  # fmt: skip
    return simulate(trace, fleet, **how)


def blocks(result: Result, *names: str) -> list[list[Any]]:
    """These columns of every block that is over or was cut short, then of every request's last one."""
    assert result.attempts is not None
    assert result.moves is not None
    last = {**result.table.columns, **result.moves}
    return [[*result.attempts[name].tolist(), *last[name].tolist()] for name in names]


def steps(journal: Collector, replica: int) -> list[tuple[float, list[int], list[int]]]:
    """When each step of a replica began, its requests, and the tokens that they computed."""
    (requests, ends), (tokens, _) = journal.lists["requests"], journal.lists["num_tokens"]
    found, start = [], journal.steps["start"]
    for i in np.flatnonzero(journal.steps["replica"] == replica):
        row = slice(ends[i], ends[i + 1])
        found.append((float(start[i]), requests[row].tolist(), tokens[row].tolist()))
    return found


def check_parts(result: Result) -> None:
    columns = {**result.table.columns, **(result.moves or {})}
    found = parts(columns, result.attempts)
    done = columns["status"] == COMPLETED
    assert all((seconds[done] >= -1e-9).all() for seconds in found.values())
    assert np.allclose(sum(found.values())[done], (columns["finish"] - columns["arrival"])[done])


def test_the_whole_sequence_travels_once_a_block_and_the_block_is_decoded_where_it_arrives() -> None:
    journal = Collector()
    # 10 tokens and two blocks: 18 tokens travel in 2 s, and each block takes a pass and three steps.
    result = split(toy_trace([0], [10], [8]), Link(KV * 9.0), append=journal)
    assert steps(journal, 0) == [(0, [0], [18]), (6, [0], [18])]
    assert steps(journal, 1) == [(float(t), [0], [4]) for t in (3, 4, 5, 9, 10, 11)]
    assert blocks(result, "arrived", "pages_kept", "pages_reserved") == [[18, 18], [5, 5], [5, 5]]
    assert blocks(result, "upto", "began", "begun", "transfer_start", "submitted") == [
        [4, 8], [0, 6], [3, 9], [1, 7], [3, 9]
    ]  # fmt: skip
    assert blocks(result, "status", "num_tokens")[0] == [UNFINISHED, COMPLETED]
    assert [result.table[name][0] for name in ("scheduled", "first_emission", "finish", "num_tokens")] == [3, 6, 12, 8]
    found = parts({**result.table.columns, **(result.moves or {})}, result.attempts)
    assert {name: seconds.tolist() for name, seconds in found.items()} == {
        "prefill_queue": [0], "prefill": [2], "reserve": [0], "transfer": [4], "decode_queue": [0], "first_block": [3],
        "rest": [3],
    }  # fmt: skip


def test_a_request_between_two_blocks_is_prefilled_before_those_that_came_later() -> None:
    journal = Collector()
    # The prefill replica takes one pass a step.
    result = split(toy_trace([0] * 8, [12] * 8, [8] * 8), p=f"{SMALL},max_batched_tokens=20", append=journal)
    order = [requests[0] for _, requests, _ in steps(journal, 0)]
    assert order[:5] == [0, 1, 2, 3, 4]
    assert sorted(order) == sorted([*range(8)] * 2)
    again, spec = Collector(), f"{SMALL},max_batched_tokens=20,num_pages=5"
    small = split(toy_trace([0] * 8, [12] * 8, [8] * 8), p=spec, append=again)
    # With pages for one request, the others wait in the queue of all replicas, and request 0 is before them again.
    order = [requests[0] for _, requests, _ in steps(again, 0)]
    assert order[:6] == [0, 1, 2, 3, 0, 1]
    assert (small.table["status"] == COMPLETED).all()
    assert (result.table["status"] == COMPLETED).all()


def test_while_all_prefill_replicas_are_busy_the_decoding_one_runs_the_pass_and_nothing_travels() -> None:
    journal = Collector()
    result = split(
        toy_trace([0] * 3, [12] * 3, [4] * 3), decider="overflow,tokens=20", p=f"{SMALL},max_batched_tokens=16",
        append=journal,
    )  # fmt: skip
    # Requests 0 and 1 leave 32 tokens to prefill, 20 or more.
    assert result.moves is not None
    assert result.moves["prefill_replica"].tolist() == [0, 0, -1]
    assert result.moves["arrived"].tolist() == [16, 16, 0]
    assert steps(journal, 1)[:3] == [(0, [2], [16]), (1, [2, 0], [4, 4]), (2, [2, 0, 1], [4, 4, 4])]
    check_parts(result)


def test_the_decoding_replica_saves_up_budget_for_a_pass_while_blocks_arrive() -> None:
    journal = Collector()
    # Never: every pass is run where it is decoded. Request 1 has 44 tokens, and a step of 20 leaves it 16.
    trace = toy_trace([0, 0.5], [4, 40], [12, 4])
    result = split(trace, decider="never", d=f"{SMALL},max_batched_tokens=20", append=journal)
    alone = Collector()
    other = simulate(trace, Fleet((Pool(setting(f"{SMALL},max_batched_tokens=20"), 1, "d"),)), append=alone)
    assert steps(journal, 1)[:4] == [(0, [0], [16]), (1, [0], [4]), (2, [0], [4]), (3, [0, 1], [4, 44])]
    # The plans are those of a server alone: what is split is only where a request waits.
    assert steps(journal, 1) == steps(alone, 0)
    assert result.table["finish"].tolist() == other.table["finish"].tolist()


def test_an_idle_decoding_replica_takes_one_pass_of_any_length() -> None:
    journal = Collector()
    split(toy_trace([0, 0], [40, 40], [4, 4]), decider="never", d=f"{SMALL},max_batched_tokens=20", append=journal)
    assert steps(journal, 1)[:4] == [(0, [0], [44]), (1, [0], [4]), (2, [0], [4]), (3, [0, 1], [4, 44])]


def test_with_an_infinite_link_a_block_takes_as_long_as_on_one_replica() -> None:
    trace = toy_trace([0, 100, 200], [10, 3, 30], [9, 4, 16])
    alone = simulate(trace, Fleet((Pool(setting(), 1, "d"),)))
    result = split(trace)
    for name in ("first_emission", "finish", "num_forwards", "num_committed", "num_tokens"):
        different = {"num_forwards": 1}.get(name, 0)  # a pass of the prefill pool is no forward of the table
        blocks_of = -(-trace.output_length // 4)
        assert (alone.table[name] - result.table[name]).tolist() == (different * blocks_of).tolist()


def test_blocks_go_to_the_replica_with_most_free_pages() -> None:
    trace = toy_trace([0, 0.5, 8.5], [40, 4, 4], [4, 4, 4])
    result = split(trace, counts=(1, 2))
    assert result.table["replica"].tolist() == [1, 2, 1]


@pytest.mark.parametrize("how", [{}, {"concurrency": 5}, {"drain": False}, {"emit": "step"}, {"emit": "end"}])
@pytest.mark.parametrize("reserve", ["late", "early"])
@pytest.mark.parametrize("decider", ["always", "overflow,tokens=60"])
@pytest.mark.parametrize("pages", [40, 1000])
def test_requests_are_conserved_and_journals_replay_block_by_block(
    how: dict[str, Any], reserve: str, decider: str, pages: int
) -> None:
    rng, n = np.random.default_rng(7), 24
    trace = toy_trace(np.arange(n) * 1.3, rng.integers(1, 60, n), rng.integers(0, 30, n))
    spec = f"{SMALL},max_batched_tokens=70,max_batch=4,num_pages={pages}"
    journal = Collector()
    link = Link(KV * 40.0, 0.125, reserve=reserve, lease=6.0)
    result = split(trace, link, p=f"{spec},saves=false", d=spec, counts=(2, 2), decider=decider, append=journal, **how)
    done = result.table["status"] == COMPLETED
    assert done.all() == ("drain" not in how)
    assert result.moves is not None
    assert (result.table["num_tokens"] == trace.output_length)[done].all()
    assert (result.moves["arrived"] > 0).any()
    assert result.attempts is not None
    # A row for every block but the last.
    counts = np.bincount(result.attempts["request"], minlength=n)
    assert (counts == np.maximum(0, -(-trace.output_length // 4) - 1))[done].all()
    check_parts(result)
    columns = {**result.table.columns, **result.moves}
    columns = {name: np.concatenate([values, result.attempts[name]]) for name, values in columns.items()}
    for replica in range(4):
        own = setting(f"{spec},saves=false" if replica < 2 else spec)
        engine = own.engine(RequestTable(n), replica=replica, emit=how.get("emit", "block"))
        assert list(replay(engine, replica, columns, journal.steps, journal.lists)) == []
        left = (engine.pages_held, engine.outstanding_tokens, engine.expected_tokens)
        assert left == (0, 0, 0) or not done.all()


TOUGH = ("mtbf=90,repair=5", "at=20,replica=1,for=30,requests=lost", "zone=1,zones=2,at=30,for=10", "slow=3,share=0.5")


@pytest.mark.parametrize("how", [{}, {"concurrency": 5}, {"sessions": True}])
@pytest.mark.parametrize("schedule", ["", "0/2+2/10/3+4/25/0+1/40/2+3"])
@pytest.mark.parametrize("fails", [(), TOUGH])
def test_journals_replay_through_drains_and_failures(
    how: dict[str, Any], schedule: str, fails: tuple[str, ...]
) -> None:
    rng, n = np.random.default_rng(5), 30
    arrival = np.cumsum(rng.exponential(1.6, n))
    trace = toy_trace(arrival - arrival[0], rng.integers(1, 60, n), rng.integers(1, 20, n))
    trace = replace(trace, extras={"session_id": [f"s{i % 7}" for i in range(n)]})
    spec = f"{SMALL},max_batched_tokens=70,max_batch=4,num_pages=60"
    same = dict(how, p=spec, d=spec, counts=(2, 2), schedule=schedule, seed=1)
    journal, again = Collector(), Collector()
    link = Link(KV * 40.0, 0.25, lease=4.0)
    result = split(trace, link, *fails, append=journal, **same)
    status = result.table["status"]
    assert ((status == COMPLETED) | (status == CANCELLED)).all()
    assert (result.table["num_tokens"] == trace.output_length)[status == COMPLETED].all()
    if fails:
        assert result.failed is not None
        assert (status == CANCELLED).sum() == result.failed.lost
        assert result.failed.retried > 0
    check_parts(result)
    assert differences(setting(spec), result, journal) == []
    twice = split(trace, link, *fails, append=again, step_by_step=True, **same)
    assert table_bytes(twice.table) == table_bytes(result.table)
    assert journal_bytes(again) == journal_bytes(journal)


def test_a_block_that_a_failure_cuts_short_begins_again_and_the_blocks_before_it_stay() -> None:
    # Replica 1 dies in the second block, at 11.5 s, and is back at once.
    result = split(toy_trace([0], [10], [8]), Link(KV * 9.0), "at=11.5,replica=1,for=0.5", counts=(1, 2))
    assert blocks(result, "upto", "status", "began", "left")[:3] == [
        [4, 8, 8], [UNFINISHED, CANCELLED, COMPLETED], [0, 6, 6]
    ]  # fmt: skip
    assert result.table["num_tokens"].tolist() == [8]
    assert result.table["finish"].tolist() == [11.5 + 1 + 2 + 3]
    check_parts(result)


def test_a_run_s_folder_has_a_row_a_block_and_its_page_the_sums_of_parts(tmp_path: Path) -> None:
    pools = ("p:1@h100-llada-8b,sangam", "d:1@h100-llada-8b,sangam")
    scenario = Scenario(
        "azure-conv", pools=pools, links=("450GB/s,10us",), arrival="poisson", rate=2.0, lengths="fixed:40,80",
        num_requests=8, decider="overflow,tokens=200",
    )  # fmt: skip
    write_replay([scenario], scenario.requests(), {}, out=tmp_path / "run")
    run = read_run(tmp_path / "run")
    [name] = run.policies
    attempts = run.attempts(name, ["request", "upto", "left", "arrived", "began"])
    assert np.bincount(attempts["request"]).tolist() == [2] * 8
    assert sorted(set(attempts["upto"].tolist())) == [32, 64]
    assert not np.isnan(attempts["left"]).any()
    last = run.requests(name, ["upto", "began", "left"])
    assert (last["upto"] == 96).all()
    assert np.isnan(last["left"]).all()
    [told] = run.info["fleet"]["runs"]
    assert sum(told["parts"].values()) == pytest.approx(run.info["policies"][0]["e2el_ms"]["mean"] / 1e3)
    assert 0 < told["moved"] <= 8


@pytest.mark.parametrize("spec", ["fast-dllm,block_length=4", "dllm-serve,block_length=4,page_size=4"])
def test_passes_of_other_policies_travel_nowhere(spec: str) -> None:
    with pytest.raises(PolicyError, match=r"pool p has .*, whose passes run where it"):
        split(toy_trace([0], [10], [8]), p=spec, d=spec)
