"""Fleets by hand: pools of several settings, routers and scalers from outside, replicas that come and go."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.engine.allowed_code import allowed
from dsim.engine.errors import CodeError, PolicyError
from dsim.engine.latency import LatencyModel
from dsim.engine.spec import parse
from dsim.profiler.profile import load
from dsim.sim.link import Link
from dsim.sim.pools import Fleet, Pool, with_ends
from dsim.sim.routers import routing
from dsim.sim.scalers import PoolView, scaling
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate

from ..checks import cases
from ..worlds import SECOND, Collector, differences, refusal, table_bytes, toy_profile, toy_trace

# Every step takes 1 s: a prompt's prefill is one step, and each token after the first is another.
ONE_AT_A_TIME = Setting(parse("ar,max_batch=1"), toy_profile(latency=SECOND))
FOUR_AT_A_TIME = Setting(parse("ar,max_batch=4"), toy_profile(latency=SECOND))

LAST_REPLICA = """
from dsim.fleet import Router

class Last(Router):
    def route(self, replicas, request):
        return {answer}

ROUTER = Last
"""


def outside(folder: Path, text: str, name: str) -> tuple[str, Any]:
    """A file's object by its name, and the permission to run the file."""
    path = folder / "mine.py"
    path.write_text(text)
    return f"{path}:{name}", allowed([path])


def routed(folder: Path, answer: str) -> list[int]:
    spec, allow = outside(folder, LAST_REPLICA.format(answer=answer), "ROUTER")
    fleet = Fleet((Pool(ONE_AT_A_TIME, 3),), routing(spec, allow))
    found: list[int] = simulate(toy_trace([0, 0, 1, 9], [10] * 4, [3] * 4), fleet).table["replica"].tolist()
    return found


def test_a_router_from_outside_chooses_by_what_it_may_see(tmp_path: Path) -> None:
    assert routed(tmp_path, "len(replicas) - 1") == [2, 2, 2, 2]
    assert routed(tmp_path, "max(range(3), key=lambda i: (-replicas[i].num_running - replicas[i].num_waiting, i))") == [
        2, 1, 0, 2,
    ]  # fmt: skip
    assert routed(tmp_path, "request.index % 2") == [0, 1, 0, 1]
    assert routed(tmp_path, "0 if request.expected == 3 and request.input_length == 10 else 2") == [0, 0, 0, 0]


@cases(
    "answer message",
    ("3", "returned 3 for request 0, expected a whole number from 0 to 2"),
    ("1 // 0", "asked for request 0: ZeroDivisionError"),
    ("request.output_length", "asked for request 0: AttributeError"),
    ("replicas[0].submitted_tokens", "asked for request 0: AttributeError"),
)
def test_a_router_from_outside_is_checked_and_sees_no_true_length(tmp_path: Path, answer: str, message: str) -> None:
    assert message in refusal(PolicyError, routed, tmp_path, answer)


def test_a_router_and_a_scaler_without_their_method_are_refused(tmp_path: Path) -> None:
    text = "from dsim.fleet import Router, Scaler\n"
    text += "".join(f"class {kind[0]}({kind}):\n    pass\n" for kind in ("Router", "Scaler"))
    spec, allow = outside(tmp_path, text, "")
    pools = Pool(FOUR_AT_A_TIME, name="p"), Pool(FOUR_AT_A_TIME, name="d")
    for method, fleet in (
        ("route", Fleet(pools[:1], routing(f"{spec}R", allow))),
        ("targets", Fleet(pools[:1], scaling=scaling(f"{spec}S", allow))),
    ):
        with pytest.raises(PolicyError, match=f"asked .*it has no method {method}"):
            simulate(toy_trace([0], [40], [3]), fleet)


def test_code_from_outside_runs_only_where_it_is_allowed(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = f"open({str(marker)!r}, 'w')\n"
    for find, name in ((routing, "ROUTER"), (scaling, "SCALER")):
        spec, allow = outside(tmp_path, text, name)
        assert "add --allow-code" in refusal(CodeError, find, spec)
        assert not marker.exists()
        with pytest.raises(PolicyError, match=f"holds no {name}"):
            find(spec, allow)
        assert marker.exists()
        marker.unlink()
        with pytest.raises(PolicyError, match=f"mine.py:{name}"):
            find(spec.rpartition(":")[0])


def test_pools_serve_each_by_its_own_policy_and_profile() -> None:
    slow = Setting(parse("ar,max_batch=1"), toy_profile(latency=LatencyModel(((0.0, 2.0),), 0.0, layers=2)))
    fleet = Fleet((Pool(FOUR_AT_A_TIME, 1, "wide"), Pool(slow, 1, "slow")))
    # Round robin: the even requests go to the wide replica, together; the odd ones to the slow one, one by one.
    table = simulate(toy_trace([0] * 4, [10] * 4, [3] * 4), fleet).table
    assert table["replica"].tolist() == [0, 1, 0, 1]
    assert table["finish"].tolist() == [3, 6, 3, 12]


def scaled(spec: str, arrival: list[float], outputs: list[int], startup: float = 0.0, count: int = 1) -> RunRecords:
    fleet = Fleet((Pool(ONE_AT_A_TIME, count, startup=startup),), routing("jsq"), scaling(spec))
    return simulate(toy_trace(arrival, [10] * len(arrival), outputs), fleet)


def test_a_replica_that_is_started_takes_requests_after_its_start_up() -> None:
    result = scaled("schedule,at=0/1/10/2,every=5", [0, 11, 14, 16], [30, 1, 1, 1], startup=5)
    # Replica 1 is asked for at 10 s and is there at 15 s: the first three wait in the queue of replica 0.
    assert result.table["replica"].tolist() == [0, 0, 0, 1]
    assert [tuple(change) for change in result.changes] == [(0, "pool", 1, 1), (10, "pool", 1, 2), (15, "pool", 2, 2)]
    assert result.replica_time == 32 + (32 - 10)  # paid for from the decision on; the last step ends at 32 s


def test_a_replica_that_drains_serves_what_it_has_and_no_more() -> None:
    result = scaled("schedule,at=0/2/5/1,every=5", [0, 0, 1, 6, 7], [3, 10, 10, 1, 1], count=2)
    table = result.table
    # Replica 1 drains from 5 s to the end of its request at 10 s; those that come later go to replica 0.
    assert table["replica"].tolist() == [0, 1, 0, 0, 0]
    assert table["finish"].tolist() == [3, 10, 13, 14, 15]
    assert [tuple(change) for change in result.changes][1:] == [(5, "pool", 1, 2), (10, "pool", 1, 1)]
    assert result.replica_time == 15 + 10


def test_starts_that_are_no_longer_wanted_are_cancelled() -> None:
    result = scaled("schedule,at=0/1/5/3/10/1,every=5", [0, 30], [3, 1], startup=60)
    assert set(result.table["replica"].tolist()) == {0}
    assert [tuple(change)[2:] for change in result.changes] == [(1, 1), (1, 3), (1, 1)]
    assert result.replica_time == 31 + 2 * 5


def test_hpa_brings_the_mean_to_the_target_and_waits_before_it_scales_down() -> None:
    pool = PoolView("pool", 2, 0, 0, 10, 8, 0, 0, 100, 0, 0)
    hpa = scaling("hpa,target=4,most=4,down_window=60")
    assert hpa is not None
    scaler = hpa.scaler.begin()
    assert list(scaler.targets(0.0, [pool])) == [4]  # ceil(2 x 9 / 4) = 5, at most 4
    assert list(scaler.targets(15.0, [pool._replace(ready=4, waiting=0)])) == [4]  # ceil(4 x 2 / 4) = 2, but 4 at 0 s
    assert list(scaler.targets(61.0, [pool._replace(ready=4, waiting=0)])) == [2]
    assert list(scaler.targets(200.0, [pool._replace(waiting=0, running=8)])) == [2]  # within a tenth: no change
    anew = hpa.scaler.begin()
    assert list(anew.targets(0.0, [pool._replace(ready=4, waiting=0)])) == [4]  # its first tick removes none
    assert list(anew.targets(61.0, [pool._replace(ready=4, waiting=0)])) == [2]


SCALER = """
from dataclasses import dataclass
from dsim.fleet import Scaler

@dataclass(frozen=True)
class Queue(Scaler):
    of_each: int = 2

    def targets(self, now, pools):
        return [{answer} for pool in pools]
"""


def test_a_scaler_from_outside_has_fields_of_its_own(tmp_path: Path) -> None:
    name, allow = outside(tmp_path, SCALER.format(answer="max(1, pool.waiting // self.of_each)"), "Queue")
    for fields, most in ((",every=2", 3), (",of_each=3,every=2", 2)):
        fleet = Fleet((Pool(ONE_AT_A_TIME),), routing("jsq"), scaling(name + fields, allow))
        result = simulate(toy_trace([0] * 7, [10] * 7, [2] * 7), fleet)
        assert max(change.ready for change in result.changes) == most
        assert (result.table["status"] == 0).all()


@cases(
    "answer message",
    ("0", "expected a number of replicas for each of 1 pools, at least 1 in all"),
    ("'x'", "expected a number of replicas for each of 1 pools, at least 1 in all"),
    ("1 // pool.starting", r"mine.py:Queue, asked at 0 s: ZeroDivisionError"),
)
def test_a_scaler_that_leaves_no_replica_or_raises_is_refused(tmp_path: Path, answer: str, message: str) -> None:
    name, allow = outside(tmp_path, SCALER.format(answer=answer), "Queue")
    with pytest.raises(PolicyError, match=message):
        simulate(toy_trace([0], [10], [2]), Fleet((Pool(ONE_AT_A_TIME),), scaling=scaling(name, allow)))


def test_a_router_that_cannot_be_made_is_told_in_a_line(tmp_path: Path) -> None:
    text = "from dsim.fleet import Router\nclass Bare(Router):\n    def __init__(self, prefixes):\n        pass\n"
    spec, allow = outside(tmp_path, text, "Bare")
    with pytest.raises(PolicyError, match=r"mine.py:Bare: AttributeError"):
        simulate(toy_trace([0], [10], [2]), Fleet((Pool(ONE_AT_A_TIME),), routing(spec, allow)))


@pytest.mark.parametrize("how", [{}, {"concurrency": 5}, {"sessions": True}])
def test_requests_are_conserved_while_replicas_come_and_go(how: dict[str, Any]) -> None:
    trace = toy_trace(np.arange(40) * 0.2, [50] * 40, [40] * 40)
    trace = replace(trace, extras={"session_id": [f"s{i % 7}" for i in range(40)]})
    setting = Setting(parse("optimus"), load("a100-sdar-8b"))
    fleet = Fleet(
        (Pool(setting, 1, "a", startup=3), Pool(setting, 2, "b")), routing("least-tokens"),
        scaling("hpa,target=0.7,every=1,down_window=2"),
    )  # fmt: skip
    journal = Collector()
    result = simulate(trace, fleet, append=journal, **how)
    assert (result.table["status"] == 0).all()
    assert len({change.ready for change in result.changes}) > 2
    assert differences(setting, result, journal) == []
    again = simulate(trace, fleet, **how)
    assert table_bytes(again.table) == table_bytes(result.table)
    assert again.changes == result.changes


@pytest.mark.parametrize(
    ("text", "ends"),
    [("inf", ("a", "b")), ("inf,from=b", ("b", "a")), ("inf,to=a", ("b", "a")), ("inf,to=b", ("a", "b"))],
)
def test_the_pools_that_a_link_does_not_name_are_the_others_of_two(text: str, ends: tuple[str, str]) -> None:
    link = with_ends(Link.parse(text), ["a", "b"])
    assert (link.source, link.to) == ends


@cases(
    "read words message",
    (routing, "jsq,delay=x", "router 'jsq,delay=x': there is no field 'delay', expected one of "),
    (routing, "jsk,delay=1", "router is 'jsk' (did you mean jsq?), expected one of round-robin, random, least"),
    (scaling, "hpb", "scaler is 'hpb' (did you mean hpa?), expected one of fixed, schedule, hpa, queued-forward"),
    (scaling, "hpa,metric=cpu", "metric is 'cpu', expected one of requests, waiting, running, tokens, kv"),
    (scaling, "hpa,worst=2", "there is no field 'worst', expected one of every, metric, target, least, most"),
    (scaling, "hpa,every=0", "every is 0.0 s, expected above 0 and finite"),
    (scaling, "schedule,at=0/2/x/4", "at is '0/2/x/4', expected TIME/REPLICAS/TIME/REPLICAS..., such as 0/2/3"),
    (Link.parse, "450GB/s,10", "'10' is not a latency in us, ms, s"),
    (Link.parse, "1GB/s,share=pool", "there is no field 'share', expected one of from, to, overlap"),
    (Link.parse, "1GB/s,overlap=yes", "overlap is 'yes', expected true or false"),
)
def test_words_that_cannot_be_read_are_refused_with_both_values(
    read: Callable[[str], Any], words: str, message: str
) -> None:
    assert message in refusal(PolicyError, read, words)
