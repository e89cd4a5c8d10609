"""Kinds of rows: the questions that each lists are those that its rules ask."""

import pytest

from dsim.engine.core import PLACEHOLDERS, Question, answers_of, questions_of
from dsim.engine.jit import called_by
from dsim.engine.policy import PRESETS, parse
from dsim.engine.rows.kind import Kind

KINDS = {preset.policy.rows.name: preset.policy.rows for preset in PRESETS.values()}


def test_every_kind_has_a_preset() -> None:
    assert set(KINDS) == {"blocks", "passes", "tokens", "chunked", "canvas", "blocks in rounds"}


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_a_kind_lists_the_questions_that_its_rules_ask(kind: Kind) -> None:
    asked = set(called_by(kind.rules.values(), {})) & set(PLACEHOLDERS)
    assert {question.__name__ for question in asked - set(kind.rules)} == {q.__name__ for q in kind.asks}


@pytest.mark.parametrize("name", PRESETS)
def test_a_policy_lists_what_its_step_asks_and_who_answers(name: str) -> None:
    policy = parse(name)
    listed = {question.name: question for question in Question.listed(policy)}
    parts = {type(part).__name__ for part in policy.parts()} | {f"rows: {policy.rows}", ""}
    assert {question.by for question in listed.values()} <= parts
    assert listed["decide"].by == type(policy.batching).__name__
    assert listed["commit_rows"].by == f"rows: {policy.rows}"
    assert set(listed) == {question.__name__ for question in questions_of(answers_of(policy))}
    # A question that a part or a kind answers is asked: an answer that nobody asks for is refused.
    assert {question.__name__ for question in answers_of(policy)} - set(listed) <= {"plan_prompts"}
