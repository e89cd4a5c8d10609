"""Links with scalers, by hand: what becomes of keys and values on their way."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.sim.fleet import Fleet, Pool
from dsim.sim.link import Link
from dsim.sim.routers import routing
from dsim.sim.scalers import scaling
from dsim.sim.twin import RunRecords, simulate
from dsim.traces import Trace

from ..worlds import Collector, journal_bytes, table_bytes, toy_trace
from .test_split import BLOCK4, KV, setting

# Every step takes 1 s, so a prompt is prefilled in 1 s; its whole blocks of 4 tokens travel at 2 tokens a second.
SLOW = Link(KV * 2.0)


def run(
    trace: Trace, counts: tuple[int, int], *, link: Link = SLOW, schedule: str | None = None,
    startup: float = 0, spec: str = BLOCK4, **how: Any,
) -> RunRecords:  # fmt: skip
    own = setting(spec)
    pools = tuple(Pool(own, count, name, startup) for count, name in zip(counts, "pd", strict=True))
    scaler = scaling(f"schedule,at={schedule},every=5") if schedule else None
    fleet = Fleet(pools, routing("jsq"), scaler, links=(link,))
    return simulate(trace, fleet, **how)


def moved(result: RunRecords, name: str) -> list[Any]:
    assert result.moves is not None
    found: list[Any] = result.moves[name].tolist()
    return found


def provisioned(result: RunRecords, pool: str) -> list[tuple[float, int, int]]:
    return [(c.time, c.ready, c.provisioned) for c in result.changes if c.pool == pool]


def test_a_draining_replica_decodes_what_is_on_its_way_to_it() -> None:
    # Requests 0 and 1 are sent from 1 to 17 s, one to each replica. The second one drains at 5 s and ends with its
    # request; request 2 goes to the first.
    result = run(toy_trace([0, 0, 6], [16, 16, 3], [4, 4, 4]), (1, 2), schedule="0/1+2/5/1+1")
    assert moved(result, "submitted")[:2] == [17, 17]
    assert result.table["replica"].tolist() == [1, 2, 1]
    end = float(result.table["finish"][1])
    assert end > 17
    assert provisioned(result, "d") == [(0, 2, 2), (5, 1, 2), (end, 1, 1)]
    assert result.replica_time == pytest.approx(2 * result.totals.end + end)


def test_a_draining_replica_keeps_what_it_prefilled_until_it_is_sent() -> None:
    # Of two prefill replicas the second drains at 5 s; the pages that it sends until 9 s are kept, and it with them.
    result = run(toy_trace([0, 0, 6], [16, 16, 16], [4, 4, 4]), (2, 1), schedule="0/2+1/5/1+1")
    assert moved(result, "prefill_replica") == [0, 1, 0]
    assert moved(result, "released") == [11, 9, 17]  # from 7 to 11 s requests 0 and 2 share a link
    assert provisioned(result, "p") == [(0, 2, 2), (5, 1, 2), (9, 1, 1)]


def test_without_prefill_replicas_those_that_decode_do_all() -> None:
    result = run(toy_trace([0, 6, 16], [16] * 3, [4] * 3), (1, 1), schedule="0/1+1/5/0+1/15/1+0")
    assert moved(result, "prefill_replica") == [0, -1, 2]
    # The last one that decodes never drains, whatever the scaler says.
    assert [ready for _, ready, _ in provisioned(result, "d")] == [1]


HOW: list[dict[str, Any]] = [{}, {"concurrency": 5}, {"sessions": True}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "policy",
    [
        "lmdeploy-bd32,num_loops=1,max_batch=3",
        "lmdeploy-0.18,max_batch=3",
        "sglang-fdfo,max_running_requests=3",
        "ar,max_batch=3",
    ],
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
    result = run(trace, (2, 2), append=journal, **same)
    assert (result.table["status"] == 0).all()
    twice = run(trace, (2, 2), append=again, step_by_step=True, **same)
    assert table_bytes(twice.table) == table_bytes(result.table)
    assert journal_bytes(again) == journal_bytes(journal)
