"""What a rule from outside sees, may write and may answer: the same in Python and compiled."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest

from dsim.engine import hooks
from dsim.engine.core import core_of
from dsim.engine.errors import PolicyError
from dsim.engine.jit import rule
from dsim.engine.part import Answers, Eviction, Policy, Range, wraps
from dsim.engine.policies.chunk import FixedChunk
from dsim.engine.policies.delayed_cache import DelayedCache
from dsim.engine.policies.fast_dllm import FastCache
from dsim.engine.policies.llada import script
from dsim.engine.policies.lmdeploy_2025 import EVERY_STEP, Continuous
from dsim.engine.policies.whole_block import FixedBlock
from dsim.engine.state import CACHED, FULL, PENDING, REUSE, RequestRow
from dsim.engine.view import RequestView, View, class_of, inner
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate

from ..checks import cases
from ..serving import serving_profile
from ..worlds import Collector, journal_bytes, refusal, toy_profile, toy_trace

LANES = ["uncompiled", pytest.param("compiled", marks=pytest.mark.slow)]
CHAT = class_of("chat")
TRACE = replace(
    toy_trace(np.arange(12) * 0.4, [10] * 12, [30] * 12),
    extras={"slo_class": ["chat", None, "batch"] * 4, "priority": [1, 0, None] * 4, "deadline": [None, 9.0] * 6},
)


@dataclass(frozen=True)
class Mine(FixedChunk):
    """A granularity that a test answers for."""

    chunk: int = 4
    block_length: int = 4
    rules: tuple[Any, ...] = ()  # question and rule

    def answers(self, policy: Policy) -> Answers:
        return {**super().answers(policy), **dict(self.rules)}

    def record(self, policy: Policy) -> dict[str, Any]:
        return {"last": 0.0, "loads": np.zeros(2)}


def policy(**answers: Any) -> Policy:
    given = tuple((getattr(hooks, name), answer) for name, answer in answers.items())
    return Policy("mine", replace(EVERY_STEP, max_batch=3), Mine(rules=given), DelayedCache())


def run(mine: Policy, profile: Any = None) -> bytes:
    journal = Collector()
    simulate(TRACE, Setting(mine, profile or toy_profile()), append=journal)
    return journal_bytes(journal)


def said(mine: Policy, profile: Any = None) -> str:
    return refusal((PolicyError, ArithmeticError, AttributeError, LookupError, ValueError), run, mine, profile)


@rule
def by_all_it_sees(view: View) -> int:
    found = view.now + view.num_waiting + view.num_rows + view.pages_held / view.num_pages
    for i in range(view.num_waiting):
        one = view.waiting(i)
        found += one.age + one.priority + (one.slo_class == CHAT) + one.prompt + one.estimate + one.arrival + one.index
        found += 0.0 if np.isinf(one.deadline) else one.deadline
    for i in range(view.num_running):
        found += 7 * view.running(i).emitted + view.threshold
    view.record.last = found
    view.record.loads[view.num_rows % 2] += view.num_waiting
    return int(1 + int(10 * view.record.last + view.record.loads[0]) % view.fields.chunk)


@pytest.mark.slow
def test_a_view_is_the_same_in_python_and_compiled(request: pytest.FixtureRequest) -> None:
    found = []
    for lane in ("compiled", "uncompiled"):
        request.getfixturevalue(lane)
        found.append(run(policy(choose=by_all_it_sees)))
    assert found[0] == found[1]
    assert found[0] != run(policy())


def test_a_view_holds_no_true_length_and_nothing_of_it_can_be_written() -> None:
    shown = {*View._fields, *RequestView._fields}
    assert not shown & {"answer", "end", "stop", "output_length", "max_tokens", "expected_tokens"}
    assert {"request", "arrival", "output_length"} <= set(RequestRow.__annotations__)  # the names of what is hidden


@rule
def writes(view: View) -> int:
    view.pages_held = 0  # type: ignore[misc]
    return 2


@rule
def writes_a_field(view: View) -> int:
    view.fields["chunk"] = 2
    return 2


@rule
def writes_a_global(view: View) -> int:
    global CHAT
    CHAT = 1
    return 2


@rule
def reads_the_truth(view: View) -> int:
    return view.stop  # type: ignore[attr-defined,no-any-return]


@rule
def beyond(view: View) -> int:
    return int(view.waiting(10**8).priority)


@rule
def divides(view: View) -> int:
    return 4 // (view.num_waiting * 0)


def answering(answer: Any) -> Any:
    """A rule that answers this."""

    @rule
    def constant(view: View) -> Any:
        return answer

    return constant


@rule
def takes_cached(status: Any, reach: int, chunk: int, fields: Any, window: Any) -> None:
    window[:chunk] = True


@rule
def takes_all(status: Any, reach: int, chunk: int, fields: Any, window: Any) -> None:
    for k in range(reach):
        window[k] = status[k] != CACHED


@rule
def caches(status: Any, reach: int, chunk: int, fields: Any, window: Any) -> None:
    status[0] = CACHED
    window[1] = True


@cases(
    "answer says",
    (writes, "writes writes pages_held"),
    (writes_a_field, "writes_a_field writes chunk"),
    (writes_a_global, "writes_a_global writes CHAT"),
)
def test_a_rule_that_writes_what_is_not_its_own_is_refused_before_it_runs(answer: Any, says: str) -> None:
    said = refusal(PolicyError, core_of, policy(choose=answer))
    assert said == f"policy mine: Mine: rule {says}, expected only fields of its record: last, loads"


@pytest.mark.parametrize("lane", LANES)
@cases(
    "answers says",
    ({"choose": beyond}, "waiting(100000000) of 0 requests"),
    ({"choose": divides}, "by zero"),
    ({"choose": answering(5)}, "policy mine: choose answers 5, expected 1 to 4"),
    ({"choose": answering(2.5)}, "policy mine: choose answers 2.5, expected 1 to 4"),
    ({"choose": answering(np.inf)}, "policy mine: choose answers inf, expected 1 to 4"),
    ({"choose": answering(None)}, "policy mine: choose answers None, expected 1 to 4"),
    ({"holds_back": answering(None)}, "policy mine: holds_back answers None, expected 0 to 1"),
    ({"choose": reads_the_truth}, "'View' object has no attribute 'stop'"),
    ({"select": takes_cached}, "policy mine: select marks position 0, which is cached or beyond the first 4"),
    ({"select": takes_all, "choose": by_all_it_sees}, "positions, more than the chunk of"),
    ({"select": caches}, "assignment destination is read-only"),
)
def test_a_rule_that_lies_is_one_line_in_the_first_steps_even_of_a_compiled_run(
    lane: str, answers: Any, says: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(lane)
    assert says in said(policy(**answers))


@rule
def beyond_late(view: View) -> int:
    return 2 if view.now < 20.0 else int(view.running(10**8).priority)


@rule
def divides_late(view: View) -> int:
    return 2 if view.now < 20.0 else 4 // (view.num_rows * 0)


@rule
def beyond_its_record_late(view: View) -> int:
    view.record.loads[0 if view.now < 20.0 else 10**8] = 1.0
    return 2


def of_a_closure() -> Any:
    @rule
    def divides(number: int) -> int:
        return 4 // number

    @rule
    def calls(view: View) -> int:
        return max(2, divides(2 if view.now < 20.0 else view.num_rows * 0))

    return calls


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@cases(
    "answer says",
    (beyond_late, "running(i) beyond the batch"),
    (divides_late, "integer division by zero"),
    (beyond_its_record_late, "index is out of bounds"),
    (of_a_closure(), "integer division by zero"),
)
def test_compiled_code_that_reads_past_an_end_or_divides_by_zero_is_one_line(
    answer: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsim.engine.rehearsal.STEPS", 2)
    assert said(policy(choose=answer)) == f"policy mine: {says} (--check-rules says where and with what)"


@pytest.mark.usefixtures("uncompiled")
def test_checked_rules_stay_in_python_to_the_end() -> None:
    mine = policy(choose=beyond_late)
    assert "running(100000000) of" in said(replace(mine, checked=True))
    assert core_of(replace(mine, checked=True)).is_young(10**9)
    assert not core_of(mine).is_young(10**9)


@dataclass(frozen=True)
class Capped(Continuous):
    """A scheduler whose steps have chunks of at most `most`."""

    most: Annotated[int, Range(1, 64), "largest chunk"] = 2
    wrapped: ClassVar[bool] = True

    def answers(self, policy: Policy) -> Answers:
        return {**super().answers(policy), hooks.choose: wraps(capped) if self.wrapped else capped}


@rule
def capped(view: View) -> int:
    return min(inner(view), view.fields.most)


@dataclass(frozen=True)
class CappedChunk(FixedChunk):
    """A chunk that wraps the one of the class that it extends."""

    most: int = 2

    def answers(self, policy: Policy) -> Answers:
        return {**super().answers(policy), hooks.choose: wraps(capped)}


@dataclass(frozen=True)
class Overriding(Capped):
    wrapped = False


@pytest.mark.parametrize("lane", LANES)
def test_a_part_that_wraps_gets_the_answer_of_the_part_before_shipped_or_not(
    lane: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(lane)
    batching = Capped(num_loops=1, max_batch=3)
    plain = Policy("mine", replace(EVERY_STEP, max_batch=3), FixedChunk(chunk=2, block_length=4), DelayedCache())
    shipped = replace(plain, batching=batching, granularity=FixedChunk(chunk=4, block_length=4))
    assert run(shipped) == run(plain)
    assert run(replace(plain, granularity=CappedChunk(chunk=2, block_length=4, most=4))) == run(plain)
    whole = replace(plain, granularity=FixedBlock(block_length=4))  # no part before answers
    assert run(replace(whole, batching=replace(batching, most=64))) == run(whole)
    assert run(replace(policy(choose=by_all_it_sees), batching=replace(batching, most=64))) == run(
        policy(choose=by_all_it_sees)
    )
    with pytest.raises(PolicyError, match="Mine and Overriding both answer choose, expected one of them, or wraps"):
        core_of(replace(policy(choose=capped), batching=Overriding(num_loops=1)))


@rule
def sees_what_is_not_held(
    prompt: int, length: int, start: int, step: int, block_step: int, block: int, fields: Any
) -> Any:
    return (FULL if block_step == 0 else REUSE), (length if block_step == 0 else block), length


@rule
def holds_little(prompt: int, length: int, state: int, fields: Any) -> int:
    return prompt - fields.less


@dataclass(frozen=True)
class Forgetful(FastCache):
    less: int = 1
    overhead = "none"
    rules: ClassVar[dict[Any, Any]] = {hooks.work: sees_what_is_not_held, hooks.held: holds_little}


@pytest.mark.usefixtures("uncompiled")
@cases(
    "less says",
    (1, "mine: work sees 42 keys, more than computed and held:"),
    (99, "held answers -89, "),
    (0.5, "held answers 9.5, expected at least 0"),
    (np.nan, "held answers nan, "),
)
def test_a_cache_that_sees_keys_without_holding_them_is_one_line(less: Any, says: str) -> None:
    made = script("mine", Forgetful(less=less))
    mine = replace(made, granularity=replace(made.granularity, block_length=4))
    assert says in said(mine, serving_profile())


@dataclass(frozen=True)
class AtOnce(Eviction):
    """Committed tokens are final at once; or, where `lies`, masks too."""

    lies: bool = False

    def answers(self, policy: Policy) -> Answers:
        return {hooks.settle: settles}


@rule
def settles(status: Any, evaluations: Any, window: Any, block: int, fields: Any, prefill: bool) -> None:
    for k in range(len(status)):
        if status[k] == PENDING or fields.lies:
            status[k] = CACHED


@pytest.mark.usefixtures("uncompiled")
def test_an_eviction_from_outside_runs_and_cannot_settle_masks() -> None:
    whole = Policy("mine", replace(EVERY_STEP, max_batch=3), FixedBlock(block_length=4), AtOnce())
    assert run(whole) != run(replace(whole, eviction=DelayedCache()))
    lie = said(replace(whole, eviction=AtOnce(lies=True)))
    assert lie.startswith("policy mine: settle changes more than committed positions to cached ones: masks by 2, ")
