"""Rules bound into one: each placeholder in it stands for the rule that answers it, however deep it is called."""

import dis
import fcntl
import threading
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.core import _RULES, PLACEHOLDERS, answers_of
from dsim.engine.errors import PolicyError
from dsim.engine.jit import JIT, bind, called_by, is_rule, rule
from dsim.engine.rows.kind import Kind
from dsim.engine.spec import PRESETS, parse

compiled = pytest.mark.skipif(not JIT, reason="rules run as plain Python: nothing is compiled")


@rule
def ask(n: Any) -> Any:
    """A placeholder."""
    return 0


@rule
def between(n: Any) -> Any:
    return 10 * ask(n)


@rule
def top(n: Any) -> Any:
    return between(n) + 1


@rule
def double(n: Any) -> Any:
    return 2 * n


@rule
def asks_itself(n: Any) -> Any:
    return 100 + between(n - 1) if n > 0 else 7


def test_a_placeholder_stands_for_its_answer_however_deep_it_is_called() -> None:
    assert (top(3), bind(top, {ask: double})(3)) == (1, 61)


def test_a_rule_that_answers_a_question_by_asking_it_is_refused() -> None:
    with pytest.raises(PolicyError, match="rule between calls itself through the answers to its questions"):
        bind(top, {ask: asks_itself})


@rule
def triple(n: Any) -> Any:
    return 3 * n


@rule
def at_two_places(n: Any) -> Any:
    return 10 * between(1) + between(2) + between(n)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep compiled code in a folder of this test."""
    monkeypatch.setattr("dsim.engine.jit._home", lambda: tmp_path)


@compiled
def test_a_rule_is_compiled_once_for_a_type_and_not_for_every_constant() -> None:
    made = bind(at_two_places, {ask: triple})
    assert made(3) == 10 * 30 + 60 + 90
    assert len(made.py_func.__globals__["between"].signatures) == 1


@compiled
def test_code_that_is_on_disk_is_loaded_without_binding_what_it_calls() -> None:
    first, again = bind(top, {ask: triple}), bind(top, {ask: triple})
    assert (first(4), again(4)) == (121, 121)
    later = bind(top, {ask: triple})
    assert later(4) == 121
    assert later.py_func.__globals__["between"] is between


@compiled
def test_what_another_process_compiles_is_waited_for(tmp_path: Path) -> None:
    assert bind(top, {ask: triple})(3) == 91
    [lock] = tmp_path.glob("*/lock")
    found: list[int] = []
    second = threading.Thread(target=lambda: found.append(bind(top, {ask: triple})(3)))
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second.start()
        second.join(0.3)
        assert found == []
    second.join()
    assert found == [91]


def sizes(rule: Any, answers: dict[int, Any], found: dict[Any, tuple[int, int]]) -> tuple[int, int]:
    """A rule's instructions, and those with all that it calls: a rule is compiled into each place that calls it."""
    if rule not in found:
        plain = getattr(rule, "py_func", rule)
        code = list(dis.get_instructions(plain.__code__))
        called = [plain.__globals__.get(i.argval) for i in code if i.opname == "LOAD_GLOBAL"]
        rules = [answers.get(id(value), value) for value in called if is_rule(value)]
        found[rule] = len(code), len(code) + sum(sizes(each, answers, found)[1] for each in rules)
    return found[rule]


@pytest.mark.parametrize("spec", PRESETS)
def test_a_policy_s_rules_are_compiled_into_few_places(spec: str) -> None:
    answers = {id(placeholder): answer for placeholder, answer in answers_of(parse(spec)).items()}
    for entry in ("run", "serve"):
        found: dict[Any, tuple[int, int]] = {}
        inlined = sizes(_RULES[entry], answers, found)[1]
        assert inlined < 2 * sum(own for own, _ in found.values()), "large code takes long to compile"


KINDS = {preset.policy.rows.name: preset.policy.rows for preset in PRESETS.values()}


def test_every_kind_has_a_preset() -> None:
    assert set(KINDS) == {"blocks", "passes", "tokens", "chunked", "canvas", "blocks in rounds"}


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_a_kind_lists_the_questions_that_its_rules_ask(kind: Kind) -> None:
    asked = set(called_by(kind.rules.values(), {})) & set(PLACEHOLDERS)
    assert {question.__name__ for question in asked - set(kind.rules)} == {q.__name__ for q in kind.asks}
