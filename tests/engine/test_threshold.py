"""A threshold of each step's own: asked in plain Python, drawn from the profile's yield at it, and used by a model."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsim.engine import hooks
from dsim.engine.allowed_code import allowed
from dsim.engine.commits import CommitDraws
from dsim.engine.core import core_of
from dsim.engine.engine import Engine, Limits
from dsim.engine.errors import PolicyError, ProfileError
from dsim.engine.jit import rule
from dsim.engine.journal import RequestTable
from dsim.engine.part import Answers, Policy
from dsim.engine.policies.lmdeploy_2025 import EVERY_STEP
from dsim.engine.replay import replay
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.unmasking import Unmasking
from dsim.engine.view import View
from dsim.profiler.profile import Profile, load
from dsim.sim.setting import Setting
from dsim.sim.step_model import StepModel
from dsim.sim.twin import RunRecords, simulate

from ..checks import cases
from ..worlds import TOY_MODEL, Collector, journal_bytes, refusal, toy_profile, toy_trace

EXAMPLE = Path(__file__).parents[2] / "examples" / "policies" / "dilaserve.py"
LOOSE = replace(TOY_MODEL, threshold=0.5, pass_probability=(0.99, 0.97, 0.95, 0.9))
PROFILE = replace(toy_profile(), commits=(TOY_MODEL, LOOSE))


@dataclass(frozen=True)
class Chosen(Unmasking):
    """A rule that a test answers for."""

    thresholds = (0.9, 0.5)

    def threshold_now(self, view: View) -> float:
        return ANSWER[0](view)


ANSWER: list[Any] = [None]


def dilaserve(fields: str = "") -> Policy:
    return parse(f"{EXAMPLE}:POLICY{fields}", allowed([EXAMPLE]))


def chosen() -> Policy:
    return Policy("chosen", replace(EVERY_STEP, max_batch=2), parse("lmdeploy-bd32:4").granularity, unmasking=Chosen())


TRACE = toy_trace(np.arange(12) * 0.5, [10] * 12, [30] * 12)


def run(policy: Policy, profile: Profile = PROFILE) -> tuple[Collector, RunRecords]:
    journal = Collector()
    return journal, simulate(TRACE, Setting(policy, profile), append=journal, seed=4)


def loose_in_queues(view: View) -> float:
    return 0.5 if view.num_waiting > 3 else 0.9


@pytest.mark.parametrize(("answer", "model"), [(0.9, TOY_MODEL), (0.5, LOOSE)])
def test_a_threshold_that_never_changes_is_the_policy_at_that_threshold_bit_for_bit(answer: float, model: Any) -> None:
    ANSWER[0] = lambda view: answer
    plain = replace(chosen(), unmasking=Unmasking(threshold=answer))
    journals = run(chosen())[0], run(plain, replace(PROFILE, commits=(model,)))[0]
    assert journal_bytes(journals[0]) == journal_bytes(journals[1])


def test_each_step_commits_by_the_yield_at_its_own_threshold_in_one_call_and_step_by_step() -> None:
    asked: list[int] = []

    def by_queue(view: View) -> float:
        asked.append(view.num_waiting)
        return loose_in_queues(view)

    ANSWER[0], policy = by_queue, chosen()
    journal, result = run(policy)
    assert asked == journal.steps["waiting"].tolist()
    assert {n > 3 for n in asked} == {True, False}
    steps = journal.steps
    wanted = np.where(steps["prefill"], np.nan, np.where(steps["waiting"] > 3, 0.5, 0.9))
    np.testing.assert_array_equal(steps["threshold"], wanted)
    engine = Engine(policy, result.limits, RequestTable(12), latency=PROFILE.latency)
    draws = Setting(policy, PROFILE).draws(4, TRACE)
    assert isinstance(draws, CommitDraws)
    model, i = StepModel(PROFILE.latency, draws), 0
    strict = CommitDraws(TOY_MODEL, 4, *TRACE.lengths[:2], 4, max_tokens=TRACE.max_tokens)
    loose = CommitDraws(LOOSE, 4, *TRACE.lengths[:2], 4, max_tokens=TRACE.max_tokens)

    def check(plan: Any, outcome: Any) -> None:
        nonlocal i
        assert plan.threshold == (0.5 if plan.waiting > 3 else 0.9)
        own = (loose if plan.waiting > 3 else strict).draw(replace(plan, threshold=None))
        assert np.array_equal(outcome.committed, own)
        assert np.array_equal(model.step(plan).committed, own)
        i += 1

    columns = result.table.columns
    assert list(replay(engine, 0, columns, journal.steps, journal.lists, on_step=check)) == []
    assert i == len(journal.steps["step"])


@rule
def loose_in_a_queue(view: View) -> int:
    """Loose while more than three wait; a place that there is not where a test asks for it."""
    return 7 if view.fields.wrong else int(view.num_waiting > 3)


@dataclass(frozen=True)
class Compiled(Unmasking):
    wrong: bool = False
    thresholds = (0.9, 0.5)

    def answers(self, policy: Policy) -> Answers:
        return {**super().answers(policy), hooks.threshold_now: loose_in_a_queue}


@pytest.mark.parametrize("lane", ["uncompiled", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_rule_and_python_commit_alike_bit_for_bit(lane: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(lane)
    ANSWER[0] = loose_in_queues
    journal, _ = run(replace(chosen(), unmasking=Compiled()))
    request.getfixturevalue("uncompiled")
    plain, _ = run(chosen())
    assert journal_bytes(plain) == journal_bytes(journal)
    assert plain.steps["threshold"].tobytes() == journal.steps["threshold"].tobytes()


@pytest.mark.usefixtures("uncompiled")
def test_a_compiled_rule_s_place_beyond_its_thresholds_is_refused_with_both_however_it_runs() -> None:
    policy = replace(chosen(), unmasking=Compiled(wrong=True))
    engine = Engine(policy, Limits(100, 4096, 2), RequestTable(1))
    engine.submit(Request(0, 0.0, 10, 10))
    for step in (lambda: engine.schedule(0.0), lambda: run(policy)):
        assert refusal(PolicyError, step) == "policy chosen: threshold_now answers place 7, expected below 2"


def test_one_of_two_chooses_among_thresholds_and_the_policy_s_own_is_among_them() -> None:
    @dataclass(frozen=True)
    class Neither(Unmasking):
        thresholds = (0.9, 0.5)

    @dataclass(frozen=True)
    class Both(Compiled):
        def threshold_now(self, view: View) -> float:
            return 0.9

    for unmasking, says in (
        (Neither(), "no part answers threshold_now, expected one that does"),
        (Both(), "threshold_now in Python is one answer too many"),
    ):
        with pytest.raises(PolicyError, match=f"^policy chosen: {says}$"):
            core_of(replace(chosen(), unmasking=unmasking))
    with pytest.raises(PolicyError, match=r"threshold is 0\.7, expected one of its thresholds 0\.9, 0\.5"):
        replace(chosen(), unmasking=Chosen(threshold=0.7))


def test_the_example_loosens_a_step_for_every_few_that_wait_and_no_further() -> None:
    policy = dilaserve(":2,loosest=0.6")
    rule = policy.unmasking
    assert rule.thresholds == (0.9, 0.8, 0.7, 0.6)
    found = [rule.threshold_now(SimpleNamespace(num_waiting=n)) for n in (0, 1, 2, 5, 6, 99)]
    assert found == [0.9, 0.9, 0.8, 0.7, 0.6, 0.6]


def test_a_threshold_without_a_yield_is_refused_by_name_with_those_there_are() -> None:
    assert refusal(ProfileError, run, dilaserve(",loosest=0.6"), load("a100-sdar-8b")).endswith(
        ":POLICY,loosest=0.6 may choose thresholds 0.9, 0.8, 0.7, 0.6: profile a100-sdar-8b holds commit models of "
        "threshold 0.9, 0.8; this run asks for 0.7"
    )


@dataclass(frozen=True)
class Single(Chosen):
    thresholds = (0.9,)


@cases(
    "unmasking answer says",
    (Chosen(), 0.7, "Chosen.threshold_now returned 0.7, expected one of (0.9, 0.5)"),
    (Chosen(), np.ones(2), "Chosen.threshold_now returned [1. 1.], expected one of (0.9, 0.5)"),
    (Single(), 0.5, "Single.threshold_now returned 0.5, expected one of (0.9,)"),
)
def test_an_answer_that_is_none_of_its_thresholds_is_refused_with_both(unmasking: Any, answer: Any, says: str) -> None:
    ANSWER[0] = lambda view: answer
    engine = Engine(replace(chosen(), unmasking=unmasking), Limits(100, 4096, 2), RequestTable(1))
    engine.submit(Request(0, 0.0, 10, 10))
    assert refusal(PolicyError, engine.schedule, 0.0) == f"policy chosen: {says}"


def test_a_policy_that_goes_by_no_threshold_can_have_none_of_each_step() -> None:
    for policy, unmasking in ((parse("ar"), Chosen()), (chosen(), Chosen(strategy="low_confidence_static"))):
        with pytest.raises(PolicyError, match="Chosen has thresholds or unmask, expected a policy that commits by"):
            replace(policy, unmasking=unmasking)


@dataclass(frozen=True)
class Rewritten(Unmasking):
    """The shipped strategy, in a policy's own words; or a position that is no mask where `wrong`."""

    wrong: bool = False

    def unmask(self, surety: Any, sure: Any, masked: Any) -> Any:
        assert (surety[masked] >= 0).all()
        best = np.argmax(np.where(masked, surety, -np.inf), axis=1)
        first = np.arange(masked.shape[1]) == best[:, None]
        return (sure | first) & masked if not self.wrong else ~masked


@pytest.mark.usefixtures("uncompiled")
def test_unmasking_from_outside_commits_in_the_twin_as_the_same_strategy_that_is_shipped() -> None:
    ANSWER[0] = loose_in_queues

    @dataclass(frozen=True)
    class Both(Rewritten, Chosen):
        """With thresholds, too."""

    for theirs, shipped in ((Rewritten(), Unmasking()), (Both(), Chosen())):
        policies = [replace(chosen(), unmasking=unmasking) for unmasking in (theirs, shipped)]
        journals = [run(policy)[0] for policy in policies]
        assert journal_bytes(journals[0]) == journal_bytes(journals[1])
    settings = [Setting(policy, PROFILE) for policy in policies]
    engine = Engine(policies[0], settings[0].limits, RequestTable(12))
    for i in range(12):
        engine.submit(TRACE.request(i))
    plan = engine.schedule(TRACE.arrival[-1])
    assert plan is not None
    theirs, shipped = (setting.step_model(setting.draws(0, TRACE)).step(plan).committed for setting in settings)
    assert theirs.any()
    assert np.array_equal(theirs, shipped)  # as a server's twin draws


@pytest.mark.usefixtures("uncompiled")
def test_unmasking_what_is_no_mask_or_of_a_policy_that_commits_otherwise_is_one_line() -> None:
    with pytest.raises(PolicyError, match=r"Rewritten.unmask returned position \d of row 0, which is no computed mask"):
        run(replace(chosen(), unmasking=Rewritten(wrong=True)))
    with pytest.raises(PolicyError, match="Rewritten has thresholds or unmask, expected a policy that commits by"):
        replace(chosen(), unmasking=Rewritten(strategy="low_confidence_static"))
