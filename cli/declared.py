"""A command is a question: a frozen dataclass. Its fields are the options, and the keywords in Python.

A docstring declares the options: `--trials N: Settings to try.` in a panel of the help, with the field's name in
parentheses where it is another. A help that begins `With --gpu: ` is of an option that has no effect without that one.
"""

import dataclasses
import functools
import inspect
import re
import typing
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import typer
from typer.core import TyperCommand

from ..engine.errors import DsimError
from ..files.duration import seconds_of
from ..files.read import cut, did_you_mean, share_of
from . import choices, shared
from .answer import Answer

P = ParamSpec("P")
R = TypeVar("R")
KINDS = (str, Path, int, float)  # of an option's value; the first that its field's type names
CHOICES = {name: ", ".join(value) if isinstance(value, tuple) else value for name, value in vars(choices).items()}
PANEL = re.compile(r"^([A-Z][\w ]+):$(?=\n  \S)", re.MULTILINE)
DECLARATION = re.compile(
    r"  (?P<names>(?:-\w, )?[\w-]+)(?: (?P<metavar>[^\s(]\S*))?(?: \((?P<field>\w+)\))?: (?P<help>.+)"
)
NEEDS = re.compile(r"With (\S+(?: or \S+)*): ")


@dataclass(frozen=True)
class Option:
    """A declared option, or an argument."""

    field: str
    names: tuple[str, ...]  # empty for an argument
    metavar: str  # empty for a switch
    panel: str
    help: str

    @property
    def name(self) -> str:
        """The longest name, or an argument's word."""
        return max(self.names, key=len, default=self.metavar.strip("[]"))

    @property
    def needs(self) -> list[str]:
        """Names of options, one of which must be set too."""
        match = NEEDS.match(self.help)
        return match[1].split(" or ") if match else []

    @property
    def read(self) -> "Callable[[str, str], Any] | None":
        """Reads a value, from the option's name and the text; None: the command line's parser does."""
        return {"X%": percent, "X%,...": shares, "TIME": seconds_of}.get(self.metavar)

    def text(self, value: Any) -> Any:
        """A default as on the command line."""
        if self.read is percent:
            return f"{value:.0%}"
        if self.read is seconds_of:
            return f"{value / 60:g}m"
        return ",".join(map(str, value)) if self.read is shares else value

    def is_many(self, default: Any) -> bool:
        """Whether it may be given several times."""
        return default == () or (default is dataclasses.MISSING and "..." in self.metavar)


def percent(name: str, text: str) -> float:
    """`2%` or `0.02`."""
    value = share_of(text)
    if not 0 < value <= 1:
        raise DsimError(f"{name} is {cut(text)}, expected a share above 0% and up to 100%, such as 2%")
    return value


def shares(name: str, text: str) -> tuple[float, ...]:
    return tuple(percent(name, item) for item in text.split(","))


class Bar:
    """Progress that nobody watches."""

    def update(self, *done: Any, **changes: Any) -> None: ...


class Watch:
    """Who follows the work on a question: in Python, by warnings."""

    in_python = True

    def command(self, *speed: str) -> str:
        """The question as words of a shell, for pages; empty in Python. speed: options that change no result."""
        return ""

    def warn(self, lines: Iterable[str]) -> None:
        """At the line that called `dsim`."""
        called = next(level for level, frame in enumerate(inspect.stack(0)) if frame.function == "called")
        for line in lines:
            warnings.warn(line, stacklevel=called + 2)

    def say(self, *lines: str) -> None:
        """Of the work, not its findings."""

    def bar(self, name: str, unit: str = "", total: int | None = None, note: str = "") -> typing.ContextManager[Any]:
        return nullcontext(Bar())


@dataclass(frozen=True)
class Question(ABC, Generic[R]):
    """What is asked. A field that no docstring declares is for Python alone."""

    COMMON: ClassVar[str] = ""  # fields that `--help` shows, not only `--help-all`; none: all

    def __post_init__(self) -> None:
        options = options_of(type(self))
        fields = {option.name: name for name, option in options.items()}
        for name, field in self.__dataclass_fields__.items():
            value = getattr(self, name)
            is_many = field.default == () or (name in options and options[name].is_many(field.default))
            if is_many and (isinstance(value, str) or not isinstance(value, Iterable)):
                object.__setattr__(self, name, (value,))  # in Python
        for name, option in options.items():
            needs = [other for other in option.needs if other in fields]
            if needs and self.sets(name) and not any(self.sets(fields[other]) for other in needs):
                raise DsimError(
                    f"{option.name} is given without {' or '.join(needs)}, expected both: alone it has no effect"
                )

    def sets(self, name: str) -> bool:
        """Whether a field has another value than its default."""
        return bool(getattr(self, name) != _default(type(self), name))

    def values(self, *names: str) -> dict[str, Any]:
        """These fields' values by name."""
        return {name: getattr(self, name) for name in names}

    @abstractmethod
    def answer(self, watch: Watch) -> "Answer[R]":
        """Raises DsimError."""


def _default(question: Any, name: str) -> Any:
    return question.__dataclass_fields__[name].default


@functools.cache
def options_of(question: Any) -> dict[str, Option]:
    """A question's options by field, its own before shared ones."""
    declared: dict[str, Option] = {}
    for text in (shared.__doc__, *(vars(base).get("__doc__") for base in reversed(question.__mro__))):
        declared |= _declared(text or "")
    fields = dict.fromkeys([*question.__annotations__, *question.__dataclass_fields__])
    return {name: declared[name] for name in fields if name in declared}


def _declared(text: str) -> dict[str, Option]:
    options: dict[str, Option] = {}
    _, *panels = PANEL.split(re.sub(r"\n {6,}", " ", inspect.cleandoc(text)))
    for panel, lines in zip(panels[::2], panels[1::2], strict=True):
        for line in filter(None, lines.splitlines()):
            match = DECLARATION.fullmatch(line)
            assert match is not None, f"{line!r} declares no option"
            names = match["names"].split(", ")
            field = match["field"] or names[-1].removeprefix("--").replace("-", "_")
            words = tuple(name for name in names if name.startswith("-"))
            help_text = match["help"].format_map(CHOICES)
            options[field] = Option(
                field=field, names=words, metavar=match["metavar"] or "", panel=panel, help=help_text
            )
    return options


def about(question: type[Question[Any]]) -> str:
    """What a command is for, with its examples: its docstring without the options."""
    return PANEL.split(inspect.cleandoc(question.__doc__ or ""))[0].strip()


def words_of(question: Question[Any], names: Iterable[str]) -> list[str]:
    """These fields as on a command line, without defaults."""
    words: list[str] = []
    for name, option in options_of(type(question)).items():
        value = getattr(question, name)
        if name not in names or not question.sets(name):
            continue
        if isinstance(value, bool):
            words.append(option.name if value else option.name.replace("--", "--no-"))
            continue
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for item in values:
            words += [option.name, str(item)]
    return words


def help_all(ctx: typer.Context, value: bool) -> None:
    """The callback of `--help-all`."""
    if value:
        for param in ctx.command.params:
            param.hidden = False  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit


class Command(TyperCommand):
    """Its help has options in panels, as plain text, which loads in a moment."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        by_panel: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:  # else it is hidden
                panel = getattr(param, "rich_help_panel", None) or "Output"
                by_panel.setdefault(panel, []).append(record)
        by_panel["Output"] = by_panel.pop("Output")
        for panel, records in by_panel.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)


JSON = typer.Option("--json", help="Print one JSON object and nothing else.")
HELP_ALL = typer.Option("--help-all", help="Show all options.", is_eager=True, callback=help_all)


def command(question: type[Question[Any]], run: Callable[[Question[Any], bool], None]) -> Callable[..., None]:
    """The command that asks the question; run: gets the question, and whether JSON is asked for."""
    options = options_of(question)

    def called(**words: Any) -> None:
        values = {name: _value(option, words[name]) for name, option in options.items() if words[name] is not None}
        run(question(**values), words["as_json"])

    types = {name: _typed(question, option) for name, option in options.items()}
    types["as_json"] = bool, JSON, False
    if question.COMMON:
        types["help_all"] = bool, HELP_ALL, False
    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=typing.Annotated[kind, declared], default=default
        )
        for name, (kind, declared, default) in types.items()
    ]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    called.__doc__ = re.sub(r"\n\n(?=dsim )", "\n\n\b\n", about(question))  # click does not wrap them
    return called


def _typed(question: Any, option: Option) -> tuple[Any, Any, Any]:
    """For Typer: type, declaration and default."""
    default, kind = _default(question, option.field), kind_of(question, option)
    typed: Any = kind
    is_many = option.is_many(default)
    if is_many:
        typed = list[kind]  # type: ignore[valid-type]
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    elif default is None or is_many:
        typed, default = typed | None, None
    else:
        default = option.text(default)
    if not option.names:
        argument = typer.Argument(metavar=option.metavar, help=option.help, rich_help_panel=option.panel)
        return typed, argument, default
    names = option.names
    if kind is bool and default is not False:
        names = (f"{option.name}/{option.name.replace('--', '--no-')}",)
    is_hidden = bool(question.COMMON) and option.field not in question.COMMON.split()
    metavar, panel = option.metavar or None, option.panel
    return (
        typed,
        typer.Option(*names, metavar=metavar, help=option.help, rich_help_panel=panel, hidden=is_hidden),
        default,
    )


def kind_of(question: Any, option: Option) -> type:
    """The type of an option's value on the command line."""
    if not option.metavar:
        return bool
    words = re.findall(r"\w+", str(question.__dataclass_fields__[option.field].type))  # `float | str | None`
    kinds = [str] if option.read else [kind for kind in KINDS if kind.__name__ in words]
    return next(iter(kinds), str)


def _value(option: Option, word: Any) -> Any:
    if option.read is not None:
        return option.read(option.name, word)
    return tuple(word) if isinstance(word, list) else word


def asks(question: Callable[P, Question[R]], name: str) -> Callable[P, R]:
    """The function of `import dsim` that asks the question."""

    def answer(*args: P.args, **options: P.kwargs) -> R:
        return question(*args, **options).answer(Watch()).to_python()

    answer.__doc__ = (question.__doc__ or "").format_map(CHOICES)
    fields = typing.cast(Any, question).__annotations__  # before shared ones
    parameters = inspect.signature(question).parameters.values()
    signature = inspect.Signature(
        sorted(parameters, key=lambda p: (p.kind, p.kind is p.KEYWORD_ONLY and p.name not in fields))
    )
    return suggesting(answer, name, signature, {option.name: field for field, option in options_of(question).items()})


def suggesting(
    function: Callable[P, R],
    name: str,
    signature: inspect.Signature | None = None,
    by_option: Mapping[str, str] | None = None,
) -> Callable[P, R]:
    """As `dsim.NAME`: TypeError for an unknown keyword; errors name keywords, not options, but for commands.

    by_option: keywords by option, where they differ in more than dashes.
    """
    signature = signature or inspect.signature(function)

    @functools.wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> R:
        for option in options:
            if option not in signature.parameters:
                raise TypeError(f"dsim.{name}() has no argument {option!r}{did_you_mean(option, signature.parameters)}")
        try:
            return function(*args, **options)
        except DsimError as error:
            error.args = (re.sub(r"(dsim [a-z]+ [^;`)]*)|--([a-z][a-z-]*)", in_python, str(error)),)
            raise

    def in_python(option: re.Match[str]) -> str:
        return option[1] or (by_option or {}).get(f"--{option[2]}", option[2].replace("-", "_"))

    called.__name__ = called.__qualname__ = name
    called.__signature__ = signature  # type: ignore[attr-defined]
    return called
