"""Every field of every question: its default, good and bad values, and what it needs; and the limits of the help."""

import re
from collections import defaultdict
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest

import dsim as in_python
from dsim.cli import QUESTIONS, TRACES
from dsim.cli.answer import Answer
from dsim.cli.declared import Question, has_opt, opt_of, option_name
from dsim.cli.questions import PANELS
from dsim.engine.errors import DsimError

from . import said
from .command import Ran, dsim

COMMANDS = QUESTIONS | {f"trace {name}": question for name, question in TRACES.items()}
FIELDS = {name: [field for field in fields(question) if has_opt(field)] for name, question in COMMANDS.items()}
FUNCTIONS: dict[str, Any] = {
    **{name: getattr(in_python, name) for name in COMMANDS if name in in_python.__all__},
    "import": in_python.import_run, "live": in_python.run_live,
}  # fmt: skip
# By the kind of an option's value: texts, and what each is in Python ...
GOOD: dict[str, tuple[tuple[str, Any], ...]] = {
    "text": (("some", "some"),), "path": (("some", Path("some")),), "file": (("mine.py", Path("mine.py")),),
    "int": (("7", 7),), "float": (("0.25", 0.25), ("3", 3.0)), "percent": (("98%", 0.98), ("0.02", 0.02)),
    "shares": (("0.8,90%", (0.8, 0.9)),),
    "seconds_of": (("90", 90.0), ("45s", 45.0), ("5m", 300.0), ("1.5h", 5400.0), (".5s", 0.5)),
}  # fmt: skip
# ... and texts that are no value, with what is expected.
BAD = {
    "int": (("two", "2.5"), "a whole number"), "float": (("fast",), "a number"), "file": (("none.py",), "not exist"),
    "percent": (("0%", "-1%", "nan", "x%", "101%"), "a share above 0% and up to 100%"),
    "shares": (("2", "x"), "a share above 0% and up to 100%"),
    "seconds_of": (("", "0", "-1s", "5 days", "m", "9" * 400), "more than 0 and finite"),
}  # fmt: skip
TWO_KINDS = {"--gpu-hour": {"float", "text"}}  # `plan` also takes a price by GPU
ALONE = "{} is given without {}, expected both: alone it has no effect"


def kind_of(field: "Field[Any]") -> str:
    """A key of GOOD, or bool: by the option's reader, else by the field's type."""
    opt = opt_of(field)
    if opt.exists or getattr(opt.read, "__name__", "") in GOOD:
        return "file" if opt.read is None else opt.read.__name__
    types = re.findall(r"\w+", str(getattr(field.type, "__origin__")))  # noqa: B009
    if any(name == "str" or name.endswith("Like") for name in types):
        return "text"
    return next(kind for kind in ("Path", "bool", "int", "float") if kind in types).lower()


def is_argument(field: "Field[Any]") -> bool:
    return (field.default is MISSING and not opt_of(field).names) or opt_of(field).metavar.startswith("[")


def good(field: "Field[Any]", nth: int = 0) -> tuple[list[str], Any]:
    """A value on a command line and in Python; of several that may be given, two."""
    kind, option = kind_of(field), option_name(field)
    if kind == "bool":
        return [f"--no-{field.name}" if field.default is True else option], field.default is not True
    text, value = GOOD[kind][nth % len(GOOD[kind])]
    words = [text] if is_argument(field) else [option, text]
    if field.default == () or (is_argument(field) and "..." in opt_of(field).metavar):
        return words * 2, (value, value)
    return words, value


def required(name: str) -> list["Field[Any]"]:
    return [field for field in FIELDS[name] if field.default is MISSING]


def ask(name: str, *words: str) -> Ran:
    """Run a command with what it requires."""
    return dsim(*name.split(), *(word for field in required(name) for word in good(field)[0]), *words)


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
    Path("mine.py").touch()
    return questions


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_is_its_default_or_what_its_text_says_as_in_python(name: str, asked: list[Question[Any]]) -> None:
    optional = [field for field in FIELDS[name] if field.default is not MISSING]
    table = [{field: good(field, nth) for field in optional} for nth in range(max(map(len, GOOD.values())))]
    for values in ({field: ([], field.default) for field in optional}, *table):
        assert ask(name, *(word for words, _ in values.values() for word in words)) == Ran(0, "", "")
        values |= {field: good(field) for field in required(name)}
        for field, (_, value) in values.items():
            parsed = getattr(asked[0], field.name)
            assert (field.name, type(parsed), parsed) == (field.name, type(value), value)
        FUNCTIONS.get(name, COMMANDS[name])(**{field.name: value for field, (_, value) in values.items()})
        assert name not in FUNCTIONS or asked.pop() == asked[0]
        asked.clear()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bad_value_is_one_line_with_the_option_and_the_value(name: str, asked: list[Question[Any]]) -> None:
    for field in FIELDS[name]:
        texts, expected = BAD.get(kind_of(field), ((), ""))
        for text in texts:
            line = ask(name, f"{option_name(field)}={text}").refusal
            assert all(part in line for part in (option_name(field), text[:40], expected)), line
    assert asked == []


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_needs_another_is_refused_alone(name: str, asked: list[Question[Any]]) -> None:
    options = {field.name: option_name(field) for field in FIELDS[name]}
    for field in FIELDS[name]:
        needs = [other for other in opt_of(field).needs if other in options]
        words, value = good(field)
        if needs:
            line = ALONE.format(options[field.name], " or ".join(options[other] for other in needs))
            assert ask(name, *words).refusal == line
        if needs and name in FUNCTIONS:
            with pytest.raises(DsimError, match=ALONE.format(field.name, " or ".join(needs))):
                FUNCTIONS[name](**{other.name: "some" for other in required(name)}, **{field.name: value})
    assert asked == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_at_most_16_options_each_in_a_panel(name: str) -> None:
    panels = {field.name: opt_of(field).panel for field in FIELDS[name] if not is_argument(field)}
    common = COMMANDS[name].COMMON
    assert set(panels.values()) <= set(PANELS)
    assert set(common) <= set(panels)
    assert len(common or panels) + 1 <= 16  # with --json


def test_the_commands_have_at_most_105_options_each_of_one_kind() -> None:
    kinds = defaultdict(set)
    for field in (field for of_command in FIELDS.values() for field in of_command if not is_argument(field)):
        kinds[option_name(field)].add(kind_of(field))
    assert {option: several for option, several in kinds.items() if len(several) > 1} == TWO_KINDS
    assert len(kinds) <= 105
