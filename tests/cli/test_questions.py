"""Every option of every question: its default, good and bad values, and what it needs; and the limits of the help."""

from collections import defaultdict
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest

import dsim as in_python
from dsim.cli import QUESTIONS, TRACES
from dsim.cli.answer import Answer
from dsim.cli.declared import Option, Question, kind_of, options_of

from ..checks import cases, refused
from . import said
from .command import Ran, dsim

COMMANDS = QUESTIONS | {f"trace {name}": question for name, question in TRACES.items()}
OPTIONS = {name: list(options_of(question).values()) for name, question in COMMANDS.items()}
FUNCTIONS: dict[str, Any] = {
    **{name: getattr(in_python, name) for name in COMMANDS if name in in_python.__all__},
    "import": in_python.import_run,
    "live": in_python.run_live,
}
# By the kind of an option's value: texts, and what each is in Python ...
GOOD: dict[str, tuple[tuple[str, Any], ...]] = {
    "str": (("some", "some"),),
    "Path": (("some", Path("some")),),
    "int": (("7", 7),),
    "float": (("0.25", 0.25), ("3", 3.0)),
    "percent": (("98%", 0.98), ("0.02", 0.02)),
    "shares": (("0.8,90%", (0.8, 0.9)),),
    "seconds_of": (("90", 90.0), ("45s", 45.0), ("5m", 300.0), ("1.5h", 5400.0), (".5s", 0.5)),
}
# ... and texts that are no value, with what is expected.
BAD = {
    "int": (("two", "2.5"), "a whole number"),
    "float": (("fast",), "a number"),
    "percent": (("0%", "-1%", "nan", "x%", "101%"), "a share above 0% and up to 100%"),
    "shares": (("2", "x"), "a share above 0% and up to 100%"),
    "seconds_of": (("", "0", "-1s", "5 days", "m", "9" * 400), "more than 0 and finite"),
}
TWO_KINDS = {"--gpu-hour": {"float", "str"}}  # `plan` also takes a price by GPU
ALONE = "{} is given without {}, expected both: alone it has no effect"


def default(name: str, option: Option) -> Any:
    return COMMANDS[name].__dataclass_fields__[option.field].default


def kind(name: str, option: Option) -> str:
    """A key of GOOD, or bool: by the option's reader, else by the field's type."""
    return getattr(option.read or kind_of(COMMANDS[name], option), "__name__", "")


def good(name: str, option: Option, nth: int = 0) -> tuple[list[str], Any]:
    """A value on a command line and in Python; of several that may be given, two."""
    of_kind, usual = kind(name, option), default(name, option)
    if of_kind == "bool":
        return [f"--no-{option.field}" if usual is True else option.name], usual is not True
    text, value = GOOD[of_kind][nth % len(GOOD[of_kind])]
    words = [option.name, text] if option.names else [text]
    return (words * 2, (value, value)) if option.is_many(usual) else (words, value)


def required(name: str) -> list[Option]:
    return [option for option in OPTIONS[name] if default(name, option) is MISSING]


def ask(name: str, *words: str) -> Ran:
    """Run a command with what it requires."""
    return dsim(name, [word for option in required(name) for word in good(name, option)[0]], [*words])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question[Any]]:
    """The questions that commands and functions ask, none of which is answered."""
    questions: list[Question[Any]] = []

    def answer(question: Question[Any], _: object) -> Answer[None]:
        questions.append(question)
        return Answer(value=None, json={})

    for question in COMMANDS.values():
        monkeypatch.setattr(question, "answer", answer)
    monkeypatch.setattr("dsim.cli.app", said.MAIN)  # built once
    return questions


@cases("name", *COMMANDS)
def test_an_option_is_its_default_or_what_its_text_says_as_in_python(name: str, asked: list[Question[Any]]) -> None:
    optional = [option for option in OPTIONS[name] if default(name, option) is not MISSING]
    table = [{option: good(name, option, nth) for option in optional} for nth in range(max(map(len, GOOD.values())))]
    for values in ({option: ([], default(name, option)) for option in optional}, *table):
        assert ask(name, *(word for words, _ in values.values() for word in words)) == Ran(0, "", "")
        values |= {option: good(name, option) for option in required(name)}
        for option, (_, value) in values.items():
            parsed = getattr(asked[0], option.field)
            assert (option.field, type(parsed), parsed) == (option.field, type(value), value)
        FUNCTIONS.get(name, COMMANDS[name])(**{option.field: value for option, (_, value) in values.items()})
        assert name not in FUNCTIONS or asked.pop() == asked[0]
        asked.clear()


@cases("name", *COMMANDS)
def test_a_bad_value_is_one_line_with_the_option_and_the_value(name: str, asked: list[Question[Any]]) -> None:
    for option in OPTIONS[name]:
        texts, expected = BAD.get(kind(name, option), ((), ""))
        for text in texts:
            line = ask(name, f"{option.name}={text}").refusal
            assert all(part in line for part in (option.name, text[:40], expected)), line
    assert asked == []


@cases("name", *COMMANDS)
def test_an_option_that_needs_another_is_refused_alone(name: str, asked: list[Question[Any]]) -> None:
    fields = {option.name: option.field for option in OPTIONS[name]}
    for option in OPTIONS[name]:
        needs = [other for other in option.needs if other in fields]
        words, value = good(name, option)
        if needs:
            assert ask(name, *words).refusal == ALONE.format(option.name, " or ".join(needs))
        if needs and name in FUNCTIONS:
            keywords = " or ".join(fields[other] for other in needs)
            with refused(ALONE.format(option.field, keywords)):
                FUNCTIONS[name](**{other.field: "some" for other in required(name)}, **{option.field: value})
    assert asked == []


@cases("name", *COMMANDS)
def test_help_shows_at_most_16_options(name: str) -> None:
    options = {option.field for option in OPTIONS[name] if option.names}
    common = COMMANDS[name].COMMON.split()
    assert set(common) <= options
    assert len(common or options) + 1 <= 16  # with --json


def test_the_commands_have_at_most_100_options_each_of_one_kind() -> None:
    kinds = defaultdict(set)
    for name, options in OPTIONS.items():
        for option in options:
            if option.names:
                kinds[option.name].add(kind(name, option))
    assert {option: several for option, several in kinds.items() if len(several) > 1} == TWO_KINDS
    assert len(kinds) <= 100
