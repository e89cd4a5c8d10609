"""The routers of examples/routers: which replica takes the next request, by hand, and runs with them."""

from pathlib import Path

import pytest

from dsim.engine.allowed_code import allowed
from dsim.engine.policy import parse
from dsim.engine.prefix import Prefixes
from dsim.engine.request import Request
from dsim.sim.fleet import Fleet, Pool
from dsim.sim.link import Link
from dsim.sim.routers import Routing, routing
from dsim.sim.routers.router import Router
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate

from ..worlds import SECOND, toy_profile, toy_trace
from .test_router import ANY, Load, choose

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[2] / "examples" / "routers"


def routing_of(spec: str) -> Routing:
    """The router of a SPEC whose file is in the folder."""
    return routing(f"{FOLDER / spec}", allowed([FOLDER / spec.partition(":")[0]]))


def made(spec: str, *names: list[int]) -> Router:
    routed = routing_of(spec)
    return routed.kind(Prefixes(10, names, [10 * len(prompt) for prompt in names]), **routed.settings)


def test_several_routers_know_only_what_each_has_sent() -> None:
    route = made("several.py:Several,router=prefix,routers=2", [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2])
    loads = [Load(0, 0, 0, 0), Load(1, 0, 0, 0)]
    assert route.route(loads, Request(0, 0.0, 30, 1)) == 0
    loads[0].expected_tokens = 50
    # The second router knows nothing of it; later the first one remembers replica 0, and the second one replica 1.
    assert [route.route(loads, Request(i, 0.0, 30, 1)) for i in (1, 2, 3)] == [1, 0, 1]
    turns = made("several.py:Several,router=round-robin,routers=2")
    assert [turns.route(loads, ANY) for _ in range(2)] == [0, 0]


def test_llm_d_adds_up_weighted_scores() -> None:
    loads = [Load(0, 0, 4, 0, 20), Load(1, 0, 0, 0, 90), Load(2, 0, 2, 0, 40)]
    # queue 0, 1, 0.5 and free pages 0.8, 0.1, 0.6: sums 0.8, 1.1, 1.1; with half the queue's weight 0.8, 0.6, 0.85.
    assert made("llm_d.py:LlmD", [0]).route(loads, ANY) == 1
    assert made("llm_d.py:LlmD,queue=0.5", [0]).route(loads, ANY) == 2
    assert made("llm_d.py:LlmD,queue=0", [0]).route(loads, ANY) == 0
    route = made("llm_d.py:LlmD", [0], [0])
    assert route.route(loads, ANY) == 1
    # The second replica was sent all of the prompt: 2 more for it, against a queue as long as any.
    assert route.route([Load(0, 0, 0, 0, 0), Load(1, 0, 9, 0, 90)], Request(1, 0.0, 10, 10)) == 1


def test_queued_forwards_counts_no_prompts() -> None:
    route = made("queued_forwards.py:QueuedForwards")
    assert route.route([Load(0, 900, 1, 0, queued_prompt_tokens=800), Load(1, 200, 0, 1)], ANY) == 0
    assert choose(route, (500, 9, 9), (500, 0, 0)) == 0


def test_a_router_with_a_delay_sees_replicas_as_they_were() -> None:
    route = made("stale.py:Stale,router=jsq,delay=2")
    loads = [Load(0, 0, 0, 0), Load(1, 0, 1, 0)]
    found = []
    for time in (0.0, 1.0, 1.9, 2.0, 3.0):
        at = route.route(loads, Request(0, time, 10, 10))
        loads[at].num_waiting += 1
        found.append(at)
    assert found == [0, 0, 0, 1, 1]  # until 2 s all join the first; then the second has 1, and the first 3


@pytest.mark.parametrize("links", [(), (Link(1e9),)])
@pytest.mark.parametrize(
    "spec",
    [
        "llm_d.py:LlmD",
        "queued_forwards.py:QueuedForwards", "several.py:Several,router=random", "stale.py:Stale",
    ],
)  # fmt: skip
def test_every_router_serves_a_fleet_and_gives_the_same_run_again(spec: str, links: tuple[Link, ...]) -> None:
    setting = Setting(parse("vllm-ar:4,num_pages=90"), toy_profile(latency=SECOND))
    fleet = Fleet((Pool(setting, 2, "p"), Pool(setting, 2, "d")), routing_of(spec), links=links)
    runs = [simulate(toy_trace([i / 2 for i in range(40)], [40] * 40, [8] * 40), fleet) for _ in range(2)]
    assert (runs[0].table["status"] == 0).all()
    assert len(set(runs[0].table["replica"].tolist())) >= 2
    assert runs[0].table.rows.tobytes() == runs[1].table.rows.tobytes()
