"""Each command's help: two examples that its own options parse, every option, nothing cut."""

import re
import shlex
from typing import Any

import pytest

from dsim.cli.help import Group, names_of, parts, text_of

from . import said
from .command import dsim

COMMANDS = {"": said.MAIN, "trace": said.named("trace")[1], **dict(said.every_command())}


def _examples() -> list[str]:
    return [example for command in COMMANDS.values() for example in parts(command.help or "")[1]]


def _params(command: Any) -> list[Any]:
    return list(command.get_params(command.make_context(command.name, [], resilient_parsing=True)))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_two_examples(name: str) -> None:
    paragraphs, examples = parts(COMMANDS[name].help or "")
    assert len(examples) >= 2, examples
    assert paragraphs
    for example in examples:
        assert example.startswith(f"dsim {name}".rstrip())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_prints_every_word_and_cuts_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    hidden = [param for param in _params(COMMANDS[name]) if param.hidden]
    ran = dsim(*name.split(), "--help-all" if hidden else "--help")
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "…" not in ran.out
    command = COMMANDS[name]
    words = [word for param in _params(command) for word in f"{names_of(param)} {text_of(param)}".split()]
    if isinstance(command, Group):
        words += [*command.commands, *(w for part in command.commands.values() for w in parts(part.help)[0][0].split())]
    paragraphs, examples = parts(command.help or "")
    words += " ".join([*paragraphs, *examples]).split()
    printed = set(ran.out.split())
    assert [word for word in words if word not in printed] == []


@pytest.mark.parametrize(
    ("command", "option", "facts"),
    [
        ("replay", "TRACE", ["required"]),
        ("tune", "--trials N", ["default: 60"]),
        ("replay", "--drain/--no-drain", ["default: drain"]),
        ("replay", "--eos/--no-eos", []),
    ],
)
def test_an_option_says_its_default_(command: str, option: str, facts: list[str]) -> None:
    [param] = [param for param in _params(COMMANDS[command]) if names_of(param) == option]
    assert re.findall(r" \[(default: [^]]*|required)\]", text_of(param)) == facts


@pytest.mark.parametrize("example", _examples())
def test_an_example_parses(example: str) -> None:
    name, command = said.named(example.removeprefix("dsim "))
    command.make_context(command.name, shlex.split(example)[1 + len(name.split()) :])


def test_a_wrapped_example_is_one_command_to_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "76")
    printed = dsim("replay", "--help").out
    joined = re.sub(r" \\\n +", " ", printed)
    for example in parts(COMMANDS["replay"].help or "")[1]:
        assert f"  {example}\n" in joined
    assert " \\\n" in printed
    assert "--policy \\\n" not in printed  # an option and its value are on one line
