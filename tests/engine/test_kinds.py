"""Kinds of rows: the questions that each lists are those that its rules ask."""

import pytest

from dsim.engine.core import PLACEHOLDERS
from dsim.engine.jit import called_by
from dsim.engine.policy import PRESETS
from dsim.engine.rows.kind import Kind

KINDS = {preset.policy.rows.name: preset.policy.rows for preset in PRESETS.values()}


def test_every_kind_has_a_preset() -> None:
    assert set(KINDS) == {"blocks", "passes", "tokens", "chunked", "canvas", "blocks in rounds"}


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_a_kind_lists_the_questions_that_its_rules_ask(kind: Kind) -> None:
    asked = set(called_by(kind.rules.values(), {})) & set(PLACEHOLDERS)
    assert {question.__name__ for question in asked - set(kind.rules)} == {q.__name__ for q in kind.asks}
