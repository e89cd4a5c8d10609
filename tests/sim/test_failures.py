"""Failures by hand: replicas that die, come back, are slow, or are lost with their zone, and their requests."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.engine.errors import PolicyError
from dsim.engine.journal import RequestTable
from dsim.engine.policy import parse
from dsim.engine.replay import replay
from dsim.sim.failures import Failure
from dsim.sim.fleet import Fleet, Pool
from dsim.sim.routers import routing
from dsim.sim.scalers import scaling
from dsim.sim.setting import Setting
from dsim.sim.startup import Startup
from dsim.sim.twin import Result, simulate
from dsim.traces import Trace

from ..worlds import SECOND, Collector, journal_bytes, table_bytes, toy_profile, toy_trace

# Every step takes 1 s: a prompt's prefill is one step, and each token after the first is another.
ONE_AT_A_TIME = Setting(parse("ar,max_batch=1"), toy_profile(latency=SECOND))
COMPLETED, UNFINISHED, CANCELLED = 0, 2, 3


def run(*failures: str, trace: Trace | None = None, fleet: Fleet | None = None, **how: Any) -> Result:
    fleet = fleet or Fleet((Pool(ONE_AT_A_TIME, 2),))
    trace = trace or toy_trace([0, 0, 1, 9], [10] * 4, [3] * 4)
    return simulate(trace, replace(fleet, failures=tuple(map(Failure.parse, failures))), **how)


def column(result: Result, name: str) -> list[Any]:
    found: list[Any] = result.table[name].tolist()
    return found


def down(result: Result) -> list[tuple[float, float, int, int]]:
    assert result.failed is not None
    return [(o.start, o.end, o.place, o.replica) for o in result.failed.outages]


def test_an_outage_sends_requests_again_and_the_first_token_stays_seen() -> None:
    # Replica 1 dies in the second step of request 1, which waits for requests 0 and 2 on replica 0.
    result = run("at=1.5,replica=1,for=3")
    assert down(result) == [(1.5, 4.5, 1, 1)]
    assert column(result, "replica") == [0, 0, 0, 2]  # a replica that comes back has a new number
    assert column(result, "scheduled") == [0, 6, 3, 9]
    assert column(result, "first_emission") == [1, 1, 4, 10]
    assert column(result, "finish") == [3, 9, 6, 12]
    assert result.failed is not None
    assert (result.failed.retried, result.failed.lost) == (1, 0)


def test_lost_requests_are_cancelled_and_what_was_returned_is_kept() -> None:
    result = run("at=1.5,replica=1,for=3,requests=lost")
    assert column(result, "status") == [COMPLETED, CANCELLED, COMPLETED, COMPLETED]
    assert column(result, "finish") == [3, 1.5, 6, 12]
    assert column(result, "num_tokens") == [3, 1, 3, 3]
    assert result.failed is not None
    assert (result.failed.retried, result.failed.lost) == (0, 1)


def test_requests_wait_while_no_replica_is_up_and_the_start_up_counts() -> None:
    fleet = Fleet((Pool(ONE_AT_A_TIME, 2, startup=Startup.parse(4)),))
    result = run("zone=1,zones=1,at=1.5,for=20", fleet=fleet)
    assert [row[:3] for row in down(result)] == [(1.5, 25.5, 0), (1.5, 25.5, 1)]
    assert sorted(column(result, "scheduled")) == [25.5, 25.5, 28.5, 28.5]
    assert column(result, "status") == [COMPLETED] * 4


def test_a_zone_is_every_other_replica_of_two() -> None:
    result = run("zone=2,zones=2,at=100,for=5", fleet=Fleet((Pool(ONE_AT_A_TIME, 5),)),
                 trace=toy_trace([0, 99, 200], [10] * 3, [3] * 3))  # fmt: skip
    assert [row[2] for row in down(result)] == [1, 3]
    # An outage within another one makes it no shorter.
    result = run("zone=2,zones=2,at=1,for=50", "at=5,replica=1,for=2", trace=toy_trace([0, 200], [9] * 2, [3] * 2))
    assert down(result) == [(1, 51, 1, 1)]


def test_slow_replicas_take_longer_for_steps_that_begin_while_they_are_slow() -> None:
    assert column(run("slow=2,share=1"), "finish") == [6, 6, 12, 15]
    # Steps begin at 0, 1 and 2 s; that at 2 s takes 2 s.
    assert column(run("slow=2,share=1,at=1.5,for=2"), "finish") == [4, 4, 7, 12]
    one = Fleet((Pool(ONE_AT_A_TIME, 1),))
    finish = [column(run("slow=2,share=0.3", fleet=one, seed=seed), "finish")[0] for seed in range(200)]
    assert 0.2 < np.mean(np.array(finish) == 6) < 0.4


def test_times_between_failures_are_exponential_with_their_mean() -> None:
    trace = toy_trace([0, 200_000], [10] * 2, [3] * 2)
    result = run("mtbf=300,repair=50", trace=trace, fleet=Fleet((Pool(ONE_AT_A_TIME, 1),)))
    found = np.array([row[:2] for row in down(result)])
    up = found[1:, 0] - found[:-1, 1]
    assert np.allclose(found[:, 1] - found[:, 0], 50)
    assert len(up) > 400
    assert abs(up.mean() / 300 - 1) < 4 / np.sqrt(len(up))
    assert abs(up.std() / up.mean() - 1) < 0.2


def busy(count: int = 60) -> Trace:
    random = np.random.default_rng(5)
    arrival = np.cumsum(random.exponential(1.5, count))
    return toy_trace(arrival - arrival[0], random.integers(1, 40, count),
                     random.integers(1, 9, count))  # fmt: skip


TOUGH = ("mtbf=40,repair=5", "at=20,replica=1,for=30,requests=lost", "zone=1,zones=2,at=50,for=10", "slow=3,share=0.5")


@pytest.mark.parametrize("policy", ["ar,max_batch=3", "lmdeploy-bd32,max_batch=3", "optimus,max_batch=3"])
@pytest.mark.parametrize("router", ["round-robin", "jsq"])
def test_each_request_ends_once_and_the_journal_of_each_replica_is_replayed(policy: str, router: str) -> None:
    setting = Setting(parse(policy), toy_profile(latency=SECOND))
    fleet = Fleet((Pool(setting, 3, startup=Startup.parse("load=4+-1")),), routing(router))
    journal = Collector()
    result = run(*TOUGH, trace=busy(), fleet=fleet, append=journal, seed=2)
    failed, status = result.failed, result.table["status"]
    assert failed is not None
    assert failed.retried > 0
    assert failed.lost > 0
    assert (status == CANCELLED).sum() == failed.lost
    assert (status == COMPLETED).sum() == 60 - failed.lost
    assert len(failed.sent) == 60 + failed.retried
    ends = journal.steps["start"] + journal.steps["latency"]
    deaths = {outage.replica: outage.start for outage in failed.outages}
    for replica in range(max(r for _, r in failed.sent) + 1):
        columns = {name: values.copy() for name, values in result.table.columns.items()}
        columns["turn"] = np.full(60, -1)
        columns["replica"][:] = -1
        for turn, (request, number) in enumerate(failed.sent):
            if number == replica:
                columns["replica"][request], columns["turn"][request] = replica, turn
        cut_off = (result.table["replica"] != replica) | (status == CANCELLED)
        columns["status"][cut_off], columns["finish"][cut_off] = UNFINISHED, np.nan
        engine = setting.engine(RequestTable(60), replica=replica)
        steps = journal.steps["replica"] == replica
        found = list(replay(engine, replica, columns, journal.steps, journal.lists))
        died = f"replica {replica}: the journal ends, the engine has more steps to run"
        # A request that ended elsewhere has the outcome of there, and the first times that its client saw.
        other = [f"request {request}: " for request in np.flatnonzero(cut_off)]
        seen = [f"request {request}: first_" for request, number in failed.sent if number != replica]
        ours = [line for line in found if not line.startswith((*other, *seen))]
        assert ours in ([], [died] if replica in deaths else [])
        assert (ends[steps] <= deaths.get(replica, np.inf)).all()
    again = Collector()
    same = run(*TOUGH, trace=busy(), fleet=fleet, append=again, seed=2)
    assert table_bytes(same.table) == table_bytes(result.table)
    assert journal_bytes(again) == journal_bytes(journal)


@pytest.mark.parametrize("router", ["round-robin", "jsq"])
def test_failures_that_never_happen_change_nothing(router: str) -> None:
    fleet = Fleet((Pool(Setting(parse("optimus,max_batch=3"), toy_profile()), 3),), routing(router))
    plain, other = (run(*f, trace=busy(), fleet=fleet) for f in ((), ("mtbf=9e12,repair=1", "at=9e6,replica=0,for=1")))
    assert table_bytes(plain.table) == table_bytes(other.table)
    assert plain.end == other.end


def test_a_scaler_sees_fewer_replicas_and_starts_others() -> None:
    # The scaler wants two: replica 0 is down from 11 s on, and at its next tick another one starts.
    trace = toy_trace(np.arange(0, 60, 1.5), [10] * 40, [3] * 40)
    fleet = Fleet((Pool(ONE_AT_A_TIME, 2),), routing("jsq"), scaling("schedule,at=0/2,every=5"))
    result = run("at=11,replica=0,for=1000", trace=trace, fleet=fleet)
    ready = [(change.time, change.ready) for change in result.changes]
    assert ready == [(0, 2), (11, 1), (15, 2)]
    assert column(result, "status") == [COMPLETED] * 40


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mtbf=6h", "failure 'mtbf=6h': repair is missing, expected mtbf, repair"),
        ("slow=2,share=0.5,at=4", "at is 4 s and for is missing, expected both or none"),
        ("slow=2,mtbf=1,repair=2,share=1", "mtbf and slow is given, expected one of mtbf, replica, zone, slow"),
        ("at=1,replica=2,for=2", "failure names replica 2 and the fleet has 2, expected one from 0 to 1"),
        ("mtbf=1,repair=2,pool=x", "failure names the pool 'x', expected one of pool"),
    ],
)
def test_bad_failures_are_refused_with_both_values(spec: str, message: str) -> None:
    with pytest.raises(PolicyError) as error:
        run(spec)
    assert message in str(error.value)


def test_closed_loops_are_refused() -> None:
    with pytest.raises(PolicyError, match="a failure \\(slow\\) and concurrency 2 are given"):
        run("slow=2,share=1", concurrency=2)
