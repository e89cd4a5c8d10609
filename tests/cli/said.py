"""Rules for what a command prints: options exist, verdicts agree with numbers, and numbers read well."""

import re
from collections.abc import Iterator
from typing import Any

import typer

from dsim.cli import app

from .command import Ran

MAIN = typer.main.get_command(app)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
ADVICE = re.compile(r"`dsim ([^`]*)`|\bdsim ((?:[a-z][a-z-]*)(?: [^\s`'\",;:)]+)*)")
OF_OTHER_TOOLS = {"--no-dllm-fdfo", "--save-result", "--save-detailed"}  # SGLang's, and vLLM's benchmark's
OF_REPLAY = {"trace info", "metrics"}  # they speak of what replay can do
EXPONENT = re.compile(r"\b(?<!commit )\d+(?:\.\d+)?e[+-]?\d")
NO_SPREAD = re.compile(r"± ?0(?:\.0+)?(?![.\d])")
# "1 ms" is a unit and "1 is" is a verb.
ONE_OF_MANY = re.compile(
    r"(?<![\d.,=:+-])1 ((?!ms\b|is\b|was\b|has\b|us\b|its\b|as\b|this\b|process\b|pass\b)[a-z]{2,}s)\b"
)
NOUNS = "cell|replica|replication|replay|request|policy|setting|step|GPU|row|trial|stretch|seed|token|block|page"
MANY_OF_ONE = re.compile(rf"(?<![\d.,=:/-])(?:0|[2-9]|\d{{2,}}|\d+,\d{{3}}) (?:{NOUNS})\b(?! of|-)(?!s)")
SHARE = re.compile(r"(?P<value>[\d.]+) %(?: \([\d.]+ to [\d.]+\))?, (?P<verdict>meets|misses) them")
SLO_ROW = re.compile(
    r"^ *(?:p(?P<percentile>\d+)|(?P<share>[\d.]+)%):\w+[=<]+(?P<bound>[\d.]+)(?P<unit>ms|s)(?:/token)? ", re.M
)
MEASURED = re.compile(r"(?P<value>[\d,.]+) (?P<unit>ms|s|%) (?P<verdict>met|not met)")
SUSTAINS = re.compile(r"(?<!less: )sustains? (?P<value>[\d.]+) req/s \((?P<low>[\d.]+) to (?P<high>[\d.]+)\)")
RATE_ROW = re.compile(r"^ *(?P<rate>[\d.]+) .*(?P<verdict>meets all|violated|violates)", re.M)


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
    here = ADVICE.sub(lambda found: "" if named(found[1] or found[2])[1] else found[0], text)
    known = own_options(own) | (own_options(named("replay")[1]) if called in OF_REPLAY else set()) | OF_OTHER_TOOLS
    unknown = set(OPTION.findall(here)) - known
    assert not unknown, f"{called} names {unknown}, which it does not have: {here}"


def check_numbers(text: str) -> None:
    """No exponent, no interval of no width, and the noun agrees with its number."""
    for rule in (EXPONENT, NO_SPREAD, ONE_OF_MANY, MANY_OF_ONE):
        found = rule.search(text)
        assert found is None, f"{found[0]!r} in {text}"


def check_verdicts(text: str, attainment: float = 99.0) -> None:
    """A verdict is what the rounded number next to it says."""
    for said in SHARE.finditer(text):
        assert said["verdict"] == ("meets" if float(said["value"]) >= attainment else "misses"), said[0]
    for row in SLO_ROW.finditer(text):
        line = text[row.start() :].partition("\n")[0]
        for said in MEASURED.finditer(line):
            value = float(said["value"].replace(",", ""))
            if said["unit"] == "%":
                met = value >= float(row["share"])
            else:
                met = value * (1e3 if said["unit"] == "s" else 1) <= float(row["bound"]) * (
                    1e3 if row["unit"] == "s" else 1
                )
            assert met == (said["verdict"] == "met"), line
    for sustains in SUSTAINS.finditer(text):
        for row in RATE_ROW.finditer(text, sustains.end()):
            rate = float(row["rate"])
            if row["verdict"] == "meets all":
                assert rate <= float(sustains["high"]), f"{sustains[0]}, and {row[0]}"
            else:
                assert rate >= float(sustains["value"]), f"{sustains[0]}, and {row[0]}"


def check(called: str, ran: Ran) -> None:
    """All rules, for what a command printed."""
    text = ran.out + ran.err
    check_options(called, text)
    check_numbers(text)
    check_verdicts(text)
