"""Failures by hand: replicas that die, come back, are slow, or are lost with their zone, and their requests."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.engine.errors import PolicyError
from dsim.engine.journal import RequestTable
from dsim.engine.policy import parse
from dsim.engine.replay import replay
from dsim.engine.replicas import Replicas
from dsim.sim.failures import Failure
from dsim.sim.fleet import Fleet, Pool
from dsim.sim.routers import routing
from dsim.sim.scalers import scaling
from dsim.sim.setting import Setting
from dsim.sim.startup import Startup
from dsim.sim.twin import Result, simulate
from dsim.traces import Trace, synth

from ..engine import golden
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
HOW: list[dict[str, Any]] = [{}, {"concurrency": 5}, {"sessions": True}]


def differences(setting: Setting, result: Result, journal: Collector) -> list[str]:
    """Replay the journal of each replica, with the attempts that failures cut short; pages held at the end, too.

    A step in flight is lost with its replica, so an engine may have decided one more, with rows of requests that are
    over.
    """
    columns = {**result.table.columns, **(result.moves or {})}
    if result.attempts is not None:
        columns = {name: np.concatenate([values, result.attempts[name]]) for name, values in columns.items()}
    died = set() if result.failed is None else {outage.replica for outage in result.failed.outages}
    found = []
    for replica in range(int(journal.steps["replica"].max()) + 1):
        engine = setting.engine(RequestTable(len(result.table.rows)), replica=replica)
        lines = list(replay(engine, replica, columns, journal.steps, journal.lists))
        ended = f"replica {replica}: the journal ends, the engine has more steps to run"
        found += [line for line in lines if line != ended or replica not in died]
        over = engine.idle or replica not in died
        found += [f"replica {replica} holds {engine.pages_held} pages"] if over and engine.pages_held else []
    return found


def test_compiled_calls_pause_while_the_first_replica_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.engine.replicas.STEPS_A_CALL", 7)
    setting = Setting(parse("ar,max_batch=3"), toy_profile(latency=SECOND))
    fleet = Fleet((Pool(setting, 3),), routing("jsq"))
    fast, slow = (
        run("at=20,replica=0,for=400", trace=busy(600), fleet=fleet, step_by_step=by_step) for by_step in (False, True)
    )
    assert fast.table.rows.tobytes() == slow.table.rows.tobytes()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("policy", ["ar,max_batch=3", "lmdeploy-bd32,max_batch=3", "optimus,max_batch=3"])
@pytest.mark.parametrize("router", ["round-robin", "jsq"])
def test_each_request_ends_once_and_the_journal_of_each_replica_is_replayed(
    policy: str, router: str, how: dict[str, Any]
) -> None:
    setting = Setting(parse(policy), toy_profile(latency=SECOND))
    fleet = Fleet((Pool(setting, 3, startup=Startup.parse("load=4+-1")),), routing(router))
    trace = replace(busy(), extras={"session_id": [f"s{i % 7}" for i in range(60)]})
    journal = Collector()
    result = run(*TOUGH, trace=trace, fleet=fleet, append=journal, seed=2, **how)
    failed, status, attempts = result.failed, result.table["status"], result.attempts
    assert failed is not None
    assert attempts is not None
    assert failed.retried == len(attempts["request"]) > 0
    assert failed.lost > 0
    assert (status == CANCELLED).sum() == failed.lost
    assert (status == COMPLETED).sum() == 60 - failed.lost
    assert (attempts["status"] == CANCELLED).all()
    ends = journal.steps["start"] + journal.steps["latency"]
    for outage in failed.outages:
        assert (ends[journal.steps["replica"] == outage.replica] <= outage.start).all()
    assert differences(setting, result, journal) == []
    again = Collector()
    same = run(*TOUGH, trace=trace, fleet=fleet, append=again, seed=2, step_by_step=True, **how)
    assert table_bytes(same.table) == table_bytes(result.table)
    assert journal_bytes(again) == journal_bytes(journal)


TOGETHER = (
    ("mtbf=30,repair=3", "slow=3,share=0.5"),
    ("mtbf=12,repair=2", "at=20,replica=1,for=9,requests=lost", "slow=2,share=0.5,at=30,for=20"),
    ("zone=1,zones=1,at=20,for=7", "zone=1,zones=2,at=60,for=5"),  # all replicas, and half of them
)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("scaler", "router"), [("", "jsq"), ("schedule,at=0/3/25/1/40/4,every=5", "least-tokens")])
@pytest.mark.parametrize("fails", TOGETHER)
def test_replicas_that_die_and_come_back_are_run_together(
    fails: tuple[str, ...], scaler: str, router: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = synth("poisson", 5.0, lengths="lognormal:90,70,160,90", num_requests=400, seed=5)
    lengths = trace.input_length.copy()
    lengths[[3, 150, 399]] = 3_000_000  # rejected
    trace = replace(trace, input_length=lengths)
    if whole:  # requests, deaths and replicas that come back at equal times
        trace = replace(trace, arrival=np.floor(trace.arrival))
    setting = Setting(parse("optimus"), golden.profile_of(parse("optimus")))
    fleet = Fleet((Pool(setting, 3, startup=Startup.parse("2")),), routing(router), scaling(scaler) if scaler else None)
    slow = run(*fails, trace=trace, fleet=fleet, drain=not whole, step_by_step=True)
    handed: list[int] = []
    serve = Replicas.take
    monkeypatch.setattr(Replicas, "take", lambda *given: [serve(*given), handed.append(1)])
    fast = run(*fails, trace=trace, fleet=fleet, drain=not whole)
    assert handed, "compiled code hands the requests out"
    assert slow.failed == fast.failed
    assert slow.failed is not None
    assert slow.failed.retried > 0
    assert table_bytes(slow.table) == table_bytes(fast.table)
    assert (slow.changes, slow.end, slow.replica_time) == (fast.changes, fast.end, fast.replica_time)
    assert (slow.totals.num_decode_steps, slow.totals.page_time) == (
        fast.totals.num_decode_steps,
        fast.totals.page_time,
    )
    for one, other in ((slow.moves, fast.moves), (slow.attempts, fast.attempts)):
        assert one is not None
        assert other is not None
        assert {name: column.tobytes() for name, column in one.items()} == {
            name: column.tobytes() for name, column in other.items()
        }


def test_a_turn_of_a_session_waits_for_the_retry_of_the_turn_before() -> None:
    # The first turn dies on replica 0 at 1.5 s and begins again on the other; the second one waits for its end.
    trace = replace(toy_trace([0, 2], [10] * 2, [3] * 2), extras={"session_id": ["s", "s"]})
    result = run("at=1.5,replica=0,for=99", trace=trace, sessions=True)
    assert column(result, "finish") == [4.5, 7.5]
    assert column(result, "arrival") == [0, 4.5]
    lost = run("at=1.5,replica=0,for=99,requests=lost", trace=trace, sessions=True)
    assert column(lost, "status") == [CANCELLED, COMPLETED]
    assert column(lost, "arrival") == [0, 2]


def test_a_closed_loop_sends_a_request_for_each_that_ends_or_is_lost() -> None:
    trace = toy_trace([0] * 4, [10] * 4, [3] * 4)
    # Replica 1 is lost with request 1 at 1.5 s: its worker sends request 2, which waits for request 0.
    result = run("at=1.5,replica=1,for=99,requests=lost", trace=trace, concurrency=2)
    assert column(result, "arrival") == [0, 0, 1.5, 3]
    assert column(result, "finish") == [3, 1.5, 6, 9]
    retried = run("at=1.5,replica=1,for=99", trace=trace, concurrency=2)
    assert column(retried, "arrival") == [0, 0, 3, 6]


def test_a_run_ends_with_a_step_that_was_decided_for_requests_that_are_over() -> None:
    setting = Setting(parse("lmdeploy-0.18,max_batch=3"), toy_profile(latency=SECOND))
    result = run("at=1.5,replica=1,for=3", fleet=Fleet((Pool(setting, 2),)))
    assert column(result, "status") == [COMPLETED] * 4


def test_a_replica_that_is_back_for_a_moment_takes_no_request_into_the_past_of_others() -> None:
    # Pool b dies and comes back often while pool a runs ahead: what begins again on a begins when it dies.
    pools = Pool(ONE_AT_A_TIME, 1, "a"), Pool(ONE_AT_A_TIME, 1, "b")
    trace = toy_trace([0] * 6, [10] * 6, [40] * 6)
    journal = Collector()
    result = run("mtbf=9,repair=2,pool=b", trace=trace, fleet=Fleet(pools, routing("jsq")), append=journal)
    assert differences(ONE_AT_A_TIME, result, journal) == []
    assert result.attempts is not None
    latest = {int(r): float(t) for r, t in zip(result.attempts["request"], result.attempts["finish"], strict=True)}
    assert len(latest) >= 2
    assert all(result.table["scheduled"][request] >= time for request, time in latest.items())


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
