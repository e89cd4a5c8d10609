"""A rule for what a command prints: the options that it names exist."""

import re
from collections.abc import Iterator
from typing import Any

import typer

from dsim.cli import app

MAIN = typer.main.get_command(app)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
ADVICE = re.compile(r"`dsim ([^`]*)`|\bdsim ((?:[a-z][a-z-]*)(?: [^\s`'\",;:)]+)*)")
OF_OTHER_TOOLS = {"--no-dllm-fdfo", "--save-result", "--save-detailed"}  # SGLang's, and vLLM's benchmark's
# An engine's command, and rows of what it changes, with their reasons.
LAUNCH = re.compile(
    r"^ *(?:vllm|lmdeploy) serve .*|^ *(?:env .* )?python3 -m sglang.*"
    r"|^ *--\S.*  (?:as replayed|GPUs of|the (?:profile|longest)).*",
    re.MULTILINE,
)
OF_REPLAY = {"trace info"}  # it speaks of what replay can do


def named(words: str) -> tuple[str, Any]:
    """The command that words after `dsim` begin with; None where they begin with none."""
    command: Any = MAIN
    path = []
    for word in words.split():
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
        path.append(word)
    return " ".join(path), command if path else None


def own_options(command: Any) -> set[str]:
    """Every spelling of a command's options."""
    own = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return own | {"--help"}


def every_command(group: Any = None) -> Iterator[tuple[str, Any]]:
    """Each command that can be called, with the words that call it."""
    group = group or MAIN
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {below}", found) for below, found in every_command(command))
        else:
            yield name, command


def check_options(called: str, text: str) -> None:
    """Every option that a text names is of the command that the text advises, or else of the one that printed it."""
    own = named(called)[1]
    assert own is not None, called
    for found in ADVICE.finditer(text):
        path, command = named(found[1] or found[2])
        if command is not None:
            unknown = set(OPTION.findall(found[0])) - own_options(command)
            assert not unknown, f"{called} advises `{found[0]}`, and dsim {path} has no {unknown}"
    here = ADVICE.sub(lambda found: "" if named(found[1] or found[2])[1] else found[0], LAUNCH.sub("", text))
    known = own_options(own) | (own_options(named("replay")[1]) if called in OF_REPLAY else set()) | OF_OTHER_TOOLS
    unknown = set(OPTION.findall(here)) - known
    assert not unknown, f"{called} names {unknown}, which it does not have: {here}"
