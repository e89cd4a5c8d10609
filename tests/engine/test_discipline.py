"""What a discipline decides under vLLM's token budget, step by step, as vLLM 0.32 plans it with the same answers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsim.engine.discipline import Caps, Decision
from dsim.engine.engine import Engine, Limits
from dsim.engine.errors import PolicyError
from dsim.engine.journal import RequestTable
from dsim.engine.part import Discipline, Policy
from dsim.engine.policies.lmdeploy_2025 import Continuous
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.view import View
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate

from ..checks import cases
from ..worlds import World, asked, toy_profile, toy_trace

Answer = Callable[[View], Any]


def answering(**answers: Answer) -> Discipline:
    """A discipline whose methods are these."""
    methods = {name: lambda self, view, answer=answer: answer(view) for name, answer in answers.items()}
    discipline: Discipline = dataclass(frozen=True)(type("Answers", (Discipline,), methods))()
    return discipline


def under(spec: str, **answers: Answer) -> Policy:
    return replace(parse(spec), discipline=answering(**answers))


SYNC = "vllm-ar,max_num_batched_tokens=8,page_size=4,async_scheduling=false"
AHEAD = "vllm-ar,max_num_batched_tokens=8,page_size=4"


def steps(world: World, num: int) -> list[str]:
    return [world.step_tokens() for _ in range(num)]


def test_one_request_is_admitted_a_step() -> None:
    w = asked(World(under(SYNC, most_admitted=lambda view: 1)), (2, 4), (2, 4), (2, 4))
    assert steps(w, 3) == ["prefill 0P2/2", "decode 0D1/3 1P2/2", "decode 0D1/4 1D1/3 2P2/2"]


def test_a_decision_ahead_is_asked_for_itself_with_what_is_known_by_then() -> None:
    views: list[tuple[float, int, int]] = []

    def one(view: View) -> int:
        views.append((view.now, view.num_waiting, view.num_running))
        return 1

    w = asked(World(under(AHEAD, most_admitted=one)), (2, 4), (2, 4), (2, 4))
    assert steps(w, 3) == ["prefill 0P2/2", "decode 0D1/3 1P2/2", "decode 0D1/4 1D1/3 2P2/2"]
    assert views == [(0.0, 3, 0), (0.0, 2, 1), (1.0, 1, 2)]  # it is not asked where nobody waits


@pytest.mark.parametrize("spec", [SYNC, AHEAD])
def test_a_request_held_back_lets_others_past_and_keeps_its_place(spec: str) -> None:
    w = asked(
        World(under(spec, holds=lambda view: (view.waiting().index == 2) & (view.now < 1.0))),
        (5, 3),
        (2, 3),
        (4, 3),
        (1, 3),
    )
    assert w.step_tokens() == "prefill 0P5/5 1P2/2 3P1/1"
    w.submit(4, 2, 2)
    assert "2P4/4 4P1/1" in w.step_tokens() + w.step_tokens()


def test_order_and_holds_are_about_the_same_queue() -> None:
    policy = under(SYNC, order=lambda view: np.array([2, 1, 0]), holds=lambda view: view.waiting().prompt == 3)
    policy = replace(policy, batching=replace(policy.batching, max_num_seqs=1))
    w = asked(World(policy, max_batch=1), (1, 2), (2, 2), (3, 2))
    assert steps(w, 1) == ["prefill 1P2/2"]


def test_prompt_tokens_are_bounded_besides_what_decodes() -> None:
    w = asked(World(under(SYNC, most_prompt_tokens=lambda view: 3)), (5, 3), (4, 2))
    assert steps(w, 3) == ["prefill 0P3/3", "prefill 0P2/5 1P1/1", "decode 0D1/6 1P3/4"]


@pytest.mark.parametrize(("spec", "resting"), [(SYNC, 1), (AHEAD, 2)])  # looking ahead, 1 s decides the step at 2 s
def test_a_row_that_rests_keeps_its_pages(spec: str, resting: int) -> None:
    w = asked(World(under(spec, rests=lambda view: (view.running().index == 0) & (view.now == 1.0))), (2, 4), (2, 4))
    texts = steps(w, resting + 1)
    assert texts[resting] == f"decode 1D1/{resting + 2}"
    assert w.engine.pages_held == resting + 1  # looking ahead, 1 has room for its next token
    assert w.step_tokens() == f"decode 0D1/{resting + 2} 1D1/{resting + 3}"


CANVASES = "vllm-diffusion,canvas_length=4,page_size=4,max_num_batched_tokens=64,max_num_seqs=4"


def forwards(policy: Policy) -> list[int]:
    trace = toy_trace([0.0, 0.0, 100.0], [4, 4, 4], [8, 8, 8])
    result = simulate(trace, Setting(policy, toy_profile()))
    counts: list[int] = result.table["num_forwards"].tolist()
    return counts


def test_denoising_steps_are_capped_at_admission_or_as_they_run() -> None:
    free = forwards(parse(CANVASES))
    ahead = 1  # the row is computed once more, since the end is seen a step late
    assert min(free) > 2 * (2 + 1) + ahead
    one_step = forwards(under(CANVASES, steps=lambda view: np.full(view.num_waiting, 2)))
    assert one_step == [2 * (2 + 1) + ahead] * 3
    crowded = under(CANVASES, steps_now=lambda view: np.full(view.num_running, 2 if view.num_running > 1 else 99))
    assert forwards(crowded) == [2 * (2 + 1) + ahead, 2 * (2 + 1) + ahead, free[2]]


def test_two_decisions_in_a_row_both_cap_the_requests_that_they_admit() -> None:
    caps, most = Caps(ahead=True), np.full(3, 9)
    draws: Any = SimpleNamespace(requests={"most": most})
    running = np.array([], np.int32)
    caps.decided(Decision(steps=np.array([2, 3])), np.array([0, 1], np.int32), running)
    caps.decided(Decision(steps=np.array([4])), np.array([1], np.int32), running)
    caps.apply(draws)
    assert most.tolist() == [2, 4, 9]


def test_a_discipline_that_lets_nothing_run_is_asked_again_soon_and_not_for_ever() -> None:
    policy = under(SYNC, holds=lambda view: view.waiting().age < 0.25)
    trace = toy_trace([0.0, 10.0], [2, 2], [2, 2])
    waited = simulate(trace, Setting(policy, toy_profile())).table["scheduled"] - trace.arrival
    assert ((waited > 0.2499) & (waited < 0.2536)).all()
    never = under(SYNC, most_admitted=lambda view: 0)
    with pytest.raises(PolicyError, match="Answers lets nothing run for 60 s, and 0 run and 2 wait"):
        simulate(trace, Setting(never, toy_profile()))


@cases(
    "answers says",
    ({"order": [0]}, "order returned int64 [1], expected whole numbers [2]"),
    ({"order": [0.0, 1.0]}, "order returned float64 [2], expected whole numbers [2]"),
    ({"order": [1, 1]}, "order returned [1, 1], expected 0 to 1, each once"),
    ({"order": [[0], [0, 1]]}, "order returned object [], expected whole numbers [2]"),
    ({"order": [0, 2]}, "order returned [0, 2], expected 0 to 1, each once"),
    ({"most_admitted": -1}, "most_admitted returned -1, expected a whole number of at least 0"),
    ({"most_prompt_tokens": 1.5}, "most_prompt_tokens returned 1.5, expected a whole number of at least 0"),
    ({"holds": np.zeros(2, np.int64)}, "holds returned int64 [2], expected bool [2]"),
    ({"holds": [True]}, "holds returned bool [1], expected bool [2]"),
)
def test_an_impossible_answer_is_one_line_with_both(answers: dict[str, Any], says: str) -> None:
    policy = under(SYNC, **{name: lambda view, value=value: value for name, value in answers.items()})
    engine = Engine(policy, Limits(64, 4096, 1), RequestTable(2))
    for i in range(2):
        engine.submit(Request(i, 0.0, 8, 8))
    with pytest.raises(PolicyError) as caught:
        engine.schedule(0.0)
    assert str(caught.value) == f"policy {policy.name}: Answers.{says}"


def test_a_question_that_a_scheduler_does_not_ask_is_refused() -> None:
    holds = answering(holds=lambda view: [])
    with pytest.raises(PolicyError, match="mine: Answers answers holds, and Continuous asks only order"):
        Policy("mine", Continuous(), discipline=holds)
    with pytest.raises(PolicyError, match="vllm-ar: Answers answers steps, expected a policy of canvases"):
        under("vllm-ar", steps=lambda view: [])
