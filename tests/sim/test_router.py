"""Routers by hand, the shipped ones and those of examples/routers: which replica takes the next request."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.engine.allowed_code import allowed
from dsim.engine.engine import Engine, Limits
from dsim.engine.errors import PolicyError
from dsim.engine.journal import RequestTable
from dsim.engine.prefix import Prefixes
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.state import MASKED, Asked, Inbox
from dsim.engine.step import StepOutcome
from dsim.sim.link import Link
from dsim.sim.pools import Fleet, Pool
from dsim.sim.routers import Routing, routing
from dsim.sim.routers.router import Router
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate

from ..checks import cases
from ..worlds import SECOND, refusal, toy_profile, toy_trace


@dataclass
class Load:
    """What a router may look at."""

    replica: int
    expected_tokens: int
    num_waiting: int
    num_running: int
    pages_held: int = 0
    num_pages: int = 100
    queued_prompt_tokens: int = 0
    page_size: int = 10


ANY = Request(0, 0.0, 10, 10)


def test_random_draws_by_seed_and_request_and_alike_in_advance() -> None:
    router = routing("random").new(seed=3)
    drawn = router.in_advance(6000, 3)
    assert drawn is not None
    assert np.bincount(drawn).tolist() == pytest.approx([2000] * 3, abs=150)
    loads = [Load(i, 0, 9 * i, 0) for i in range(3)]
    for i in (5, 0, 5999, 17):  # in any order
        assert router.route(loads, Request(i, 0.0, 10, 10)) == drawn[i]
    others = routing("random").new(seed=4), routing("random").new(seed=3, prefills=True)
    for other in others:
        assert np.mean(other.in_advance(6000, 3) == drawn) == pytest.approx(1 / 3, abs=0.03)


def sent(route: Router, length: int, index: int, *loads: tuple[int, int, int]) -> int:
    """Where a request of so many tokens goes."""
    return route.route([Load(i, *load) for i, load in enumerate(loads)], Request(index, 0.0, length, 1))


IDLE = (0, 0, 0)


def by_prefix(*names: list[int]) -> Router:
    return routing("prefix").new(Prefixes(10, names, [10 * len(own) for own in names]))


def test_by_prefix_a_request_goes_where_most_of_its_beginning_went() -> None:
    route = by_prefix([0, 1], [0, 1, 2], [3, 4], [0, 5, 6, 7], [0, 1, 2, 8])
    assert sent(route, 20, 0, (5, 0, 1), IDLE) == 1  # nobody knows it: the fewest tokens
    assert sent(route, 30, 1, IDLE, (90, 0, 9)) == 1  # two of its three blocks went there
    assert sent(route, 20, 2, IDLE, (90, 0, 9)) == 0
    assert sent(route, 40, 3, IDLE, (90, 0, 9)) == 0  # one of four is not more than 0.3
    # The first replica has had one block of the last request, the second three: of all that know it, the one most.
    assert sent(route, 40, 4, IDLE, (90, 0, 9)) == 1


def test_by_prefix_equals_are_told_apart_by_tokens() -> None:
    route = by_prefix([0, 1], [0, 1], [0, 1])
    assert sent(route, 20, 0, IDLE, (0, 0, 1), IDLE) == 0
    assert sent(route, 20, 1, (9, 70, 9), IDLE, IDLE) == 1  # queues differ too much: the shortest one
    assert sent(route, 20, 2, (9, 0, 9), (8, 0, 0), IDLE) == 1  # both have had all of it


def test_by_prefix_queues_count_only_beyond_both_thresholds() -> None:
    for longer, shorter, expected in ((65, 0, 1), (64, 0, 0), (195, 130, 0), (196, 130, 1)):
        route = by_prefix([0, 1], [0, 1])
        assert sent(route, 20, 0, IDLE, (9, 0, 0)) == 0
        assert sent(route, 20, 1, (0, longer, 0), (0, 0, shorter)) == expected


def test_by_prefix_what_was_sent_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = (9, 0, 0)
    for tokens, expected in ((30, 0), (20, 1)):  # of each replica that are remembered: three blocks, or two
        monkeypatch.setattr("dsim.sim.routers.longest_prefix.MAX_TREE_TOKENS", tokens)
        route = by_prefix([0, 1], [2, 3], [0, 1])
        assert [sent(route, 20, i, IDLE, busy) for i in (0, 1)] == [0, 0]
        # Of three blocks 1 is forgotten, which follows 0; of two both are.
        assert sent(route, 20, 2, busy, IDLE) == expected


def test_a_server_without_a_trace_routes_by_no_prefix() -> None:
    said = refusal(PolicyError, routing("prefix").new)
    assert said == "router is prefix, and the requests have no known prefixes: expected a trace"


def test_a_router_sees_what_has_ended_and_what_has_been_served() -> None:
    def replicas(name: str, arrival: list[float], outputs: list[int]) -> list[Any]:
        trace = toy_trace(arrival, [10] * len(arrival), outputs)
        result = simulate(trace, Setting(parse("ar,max_batch=1"), toy_profile(latency=SECOND)), replicas=2, router=name)
        held: list[Any] = result.table["replica"].tolist()
        return held

    # Replica 0 works until 9 s, replica 1 until 2 s: at 3 s the shortest queue is 1's, at 3.5 s they are equal.
    assert replicas("jsq", [0.0, 0.0, 3.0, 3.5], [9, 2, 9, 1]) == [0, 1, 1, 0]
    # At 5.5 s replica 0 has 9 - 5 tokens to return, the prompt being in; the second request, 10 + 3 then, has ended.
    assert replicas("least-tokens", [0.0, 0.0, 5.5, 5.5], [9, 3, 1, 1]) == [0, 1, 1, 0]
    # With 10 + 1 tokens on replica 1, the fourth request goes to 0; a fifth finds 15 there and 11 on 1.
    assert replicas("least-tokens", [0.0, 0.0, 5.5, 5.5, 5.5], [9, 3, 1, 1, 1]) == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("spec", ["ar", "chunk:4", "lmdeploy-bd32,num_pages=11", "vllm-ar", "sglang-fdfo"])
@pytest.mark.parametrize("emit", ["step", "end"])
def test_nothing_is_expected_once_all_is_served_whatever_the_estimates_were(spec: str, emit: str) -> None:
    trace = toy_trace(range(12), [40] * 12, [100] * 12)
    told = replace(trace, extras={"estimated_length": [20, 500, 100] * 4})
    policy = parse(spec)
    engine = Engine(policy, Limits(11, 4096, 8), RequestTable(12, trace.arrival, Asked(*told.lengths)), emit=emit)
    for i in range(12):
        engine.submit(told.request(i))
    assert engine.expected_tokens == 12 * 40 + 4 * 620
    engine.cancel(11, 0.0)
    assert engine.expected_tokens == 11 * 40 + 4 * 620 - 100
    now = 0.0
    while (plan := engine.schedule(now)) is not None:
        now += 1.0
        engine.commit(
            StepOutcome(1.0, plan.window & (plan.status == MASKED) | (policy.rows.commits == "tokens") & plan.window),
            now,
        )
        assert engine.expected_tokens >= 0
    assert engine.expected_tokens == 0


def test_requests_that_a_run_takes_by_itself_count_as_those_that_are_submitted() -> None:
    trace = toy_trace([0] * 4, [40, 3_000_000, 8, 24], [100, 10, 50, 30])
    trace = replace(trace, extras={"estimated_length": [20, 10, 70, 30]})
    setting = Setting(parse("ar,max_batch=1"), toy_profile(latency=SECOND))
    seen = []
    for by_itself in (True, False):
        table = RequestTable(4, trace.arrival, Asked(*trace.lengths))
        engine = setting.engine(table)
        if by_itself:
            model = setting.step_model(setting.draws(0, trace))
            fits = np.array([engine.fits(trace.request(i)) for i in range(4)])
            engine.expect(Inbox(np.arange(4, dtype=np.int32), np.zeros(4), fits))
            assert engine.run(0.0, 0.5, model.arrays, model.cost) == 1.0  # s, when the first step ends
        else:
            assert [engine.submit(trace.request(i)) for i in range(4)] == [True, False, True, True]
            assert engine.schedule(0.0) is not None
        seen.append((
            engine.submitted, engine.num_waiting, engine.expected_tokens,
            engine.queued_prompt_tokens, table["status"].tolist(), table["replica"].tolist(),
        ))  # fmt: skip
    assert seen[0] == seen[1]
    assert seen[0][2] == 72 + 120


FOLDER = Path(__file__).parents[2] / "examples" / "routers"


def routing_of(spec: str) -> Routing:
    """The router of a SPEC whose file is in the folder."""
    return routing(f"{FOLDER / spec}", allowed([FOLDER / spec.partition(":")[0]]))


def example(spec: str, *names: list[int]) -> Router:
    routed = routing_of(spec)
    return routed.kind(Prefixes(10, names, [10 * len(prompt) for prompt in names]), **routed.settings)


@pytest.mark.slow
def test_several_routers_know_only_what_each_has_sent() -> None:
    route = example("several.py:Several,router=prefix,routers=2", [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2])
    loads = [Load(0, 0, 0, 0), Load(1, 0, 0, 0)]
    assert route.route(loads, Request(0, 0.0, 30, 1)) == 0
    loads[0].expected_tokens = 50
    # The second router knows nothing of it; later the first one remembers replica 0, and the second one replica 1.
    assert [route.route(loads, Request(i, 0.0, 30, 1)) for i in (1, 2, 3)] == [1, 0, 1]
    turns = example("several.py:Several,router=round-robin,routers=2")
    assert [turns.route(loads, ANY) for _ in range(2)] == [0, 0]


@pytest.mark.slow
def test_llm_d_adds_up_weighted_scores() -> None:
    loads = [Load(0, 0, 4, 0, 20), Load(1, 0, 0, 0, 90), Load(2, 0, 2, 0, 40)]
    # queue 0, 1, 0.5 and free pages 0.8, 0.1, 0.6: sums 0.8, 1.1, 1.1; with half the queue's weight 0.8, 0.6, 0.85.
    assert example("llm_d.py:LlmD", [0]).route(loads, ANY) == 1
    assert example("llm_d.py:LlmD,queue=0.5", [0]).route(loads, ANY) == 2
    assert example("llm_d.py:LlmD,queue=0", [0]).route(loads, ANY) == 0
    route = example("llm_d.py:LlmD", [0], [0])
    assert route.route(loads, ANY) == 1
    # The second replica was sent all of the prompt: 2 more for it, against a queue as long as any.
    assert route.route([Load(0, 0, 0, 0, 0), Load(1, 0, 9, 0, 90)], Request(1, 0.0, 10, 10)) == 1


@pytest.mark.slow
def test_queued_forwards_counts_no_prompts() -> None:
    route = example("fewest_forwards.py:QueuedForwards")
    assert route.route([Load(0, 900, 1, 0, queued_prompt_tokens=800), Load(1, 200, 0, 1)], ANY) == 0
    assert sent(route, 10, 0, (500, 9, 9), (500, 0, 0)) == 0


@pytest.mark.slow
def test_a_router_with_a_delay_sees_replicas_as_they_were() -> None:
    route = example("stale.py:Stale,router=jsq,delay=2")
    loads = [Load(0, 0, 0, 0), Load(1, 0, 1, 0)]
    found = []
    for time in (0.0, 1.0, 1.9, 2.0, 3.0):
        at = route.route(loads, Request(0, time, 10, 10))
        loads[at].num_waiting += 1
        found.append(at)
    assert found == [0, 0, 0, 1, 1]  # until 2 s all join the first; then the second has 1, and the first 3


@pytest.mark.slow
@pytest.mark.parametrize("links", [(), (Link(1e9),)])
@cases(
    "spec",
        "llm_d.py:LlmD",
        "fewest_forwards.py:QueuedForwards", "several.py:Several,router=random", "stale.py:Stale",
)  # fmt: skip
def test_every_router_serves_a_fleet_and_gives_the_same_run_again(spec: str, links: tuple[Link, ...]) -> None:
    setting = Setting(parse("vllm-ar:4,num_pages=90"), toy_profile(latency=SECOND))
    fleet = Fleet((Pool(setting, 2, "p"), Pool(setting, 2, "d")), routing_of(spec), links=links)
    runs = [simulate(toy_trace([i / 2 for i in range(40)], [40] * 40, [8] * 40), fleet) for _ in range(2)]
    assert (runs[0].table["status"] == 0).all()
    assert len(set(runs[0].table["replica"].tolist())) >= 2
    assert runs[0].table.rows.tobytes() == runs[1].table.rows.tobytes()
