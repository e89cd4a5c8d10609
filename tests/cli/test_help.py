"""Each command's help: two examples that its own options parse, every option, nothing cut."""

import re
import shlex

from dsim.cli import QUESTIONS, TRACES
from dsim.cli.declared import about, options_of

from ..checks import cases
from . import said
from .command import dsim

COMMANDS = QUESTIONS | {f"trace {name}": question for name, question in TRACES.items()}
ABOUT = {name: about(question) for name, question in COMMANDS.items()} | {
    "": said.MAIN.help or "",
    "trace": said.named("trace")[1].help,
}


def examples(name: str) -> list[str]:
    return re.findall(r"^ *(dsim .+)$", ABOUT[name], re.MULTILINE)


@cases("name", *ABOUT)
def test_a_command_has_two_examples_which_parse(name: str) -> None:
    assert len(examples(name)) >= 2
    for example in examples(name):
        assert example.startswith(f"dsim {name}".rstrip())
        words, command = said.named(example.removeprefix("dsim "))
        command.make_context(command.name, shlex.split(example)[1 + len(words.split()) :])


@cases("name", *ABOUT)
def test_help_prints_every_word_and_cuts_none(name: str) -> None:
    options = options_of(COMMANDS[name]).values() if name in COMMANDS else ()
    ran = dsim(name, "--help-all" if (name in COMMANDS and COMMANDS[name].COMMON) else "--help")
    assert (ran.code, ran.err) == (0, "")
    printed = ran.out.splitlines()
    assert max(len(line) for line in printed if not line.startswith("  dsim ")) <= 80
    assert {line.strip() for line in printed if line.startswith("  dsim ")} == set(examples(name))
    words = {word for option in options for word in (option.name, *option.help.split())}
    assert words <= {word.strip(",").split("/--no")[0] for word in ran.out.split()} | set(ran.out.split())


@cases(
    "command option facts",
    ("replay", "TRACE", "[required]"),
    ("tune", "--trials N", "[default: 60]"),
    ("replay", "--drain / --no-drain", "[default: drain]"),
    ("replay", "--eos / --no-eos", "a workload."),
)
def test_an_option_says_its_default(command: str, option: str, facts: str) -> None:
    [text] = re.findall(rf"^  {re.escape(option)} .*(?:\n    .*)*", dsim(command, "--help-all").out, re.MULTILINE)
    assert " ".join(text.split()).endswith(facts)
