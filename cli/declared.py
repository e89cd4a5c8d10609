"""A command is a question: a frozen dataclass, whose fields are its options and its keywords in Python."""

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
from types import MappingProxyType
from typing import Any, Generic, ParamSpec, TypeVar

import typer

from ..engine.errors import DsimError
from ..files.read import did_you_mean
from .answer import Answer

P = ParamSpec("P")
R = TypeVar("R")
KINDS = (str, Path, int, float)  # of an option's value; the first that its type names


@dataclass(frozen=True)
class Opt:
    """A field as an option.

    metavar: empty for a switch. names: on the command line, if not the field's. panel: of the help. values: for the
    shell's completion. read: the value of a text, from the option's name and the text; text: the default as a text.
    needs: fields, one of which must be set too, if the question has any: alone the option has no effect.
    """

    help: str
    metavar: str = ""
    panel: str = "Other options"
    names: tuple[str, ...] = ()
    values: Callable[[], Iterable[str]] | None = None
    read: Callable[[str, str], Any] | None = None
    text: str | None = None
    needs: tuple[str, ...] = ()
    envvar: str | None = None
    exists: bool = False  # a file that must exist


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
    """What is asked. Its fields with an Opt are options; those without are for Python alone."""

    COMMON: typing.ClassVar[tuple[str, ...]] = ()  # fields that `--help` shows, not only `--help-all`; none: all

    def __post_init__(self) -> None:
        fields = {field.name: field for field in dataclasses.fields(self)}
        for name, field in fields.items():
            value = getattr(self, name)
            if _is_many(field) and (isinstance(value, str) or not isinstance(value, Iterable)):
                object.__setattr__(self, name, (value,))  # in Python
            needs = [other for other in opt_of(field).needs if other in fields] if has_opt(field) else []
            if needs and self.sets(name) and not any(map(self.sets, needs)):
                required = " or ".join(option_name(fields[other]) for other in needs)
                raise DsimError(
                    f"{option_name(field)} is given without {required}, expected both: alone it has no effect"
                )

    def sets(self, name: str) -> bool:
        """Whether a field has another value than its default."""
        return bool(getattr(self, name) != next(f.default for f in dataclasses.fields(self) if f.name == name))

    @abstractmethod
    def answer(self, watch: Watch) -> "Answer[R]":
        """Raises DsimError."""


def has_opt(field: "dataclasses.Field[Any]") -> bool:
    return any(isinstance(note, Opt) for note in getattr(field.type, "__metadata__", ()))


def opt_of(field: "dataclasses.Field[Any]") -> Opt:
    return next(note for note in typing.cast(Any, field.type).__metadata__ if isinstance(note, Opt))


def option_name(field: "dataclasses.Field[Any]") -> str:
    """On the command line, the longest of several; of an argument that may be left out its word."""
    if opt_of(field).metavar.startswith("["):
        return opt_of(field).metavar.strip("[]")
    return max(_names(field), key=len).split("/")[0]


def words_of(question: Question[Any], names: Iterable[str]) -> list[str]:
    """These fields as on a command line, without defaults."""
    words: list[str] = []
    for field in dataclasses.fields(question):
        value = getattr(question, field.name)
        if field.name not in names or value == field.default:
            continue
        if isinstance(value, bool):
            words.append(max(_names(field), key=len).split("/")[0 if value else -1])
        else:
            values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            words += [word for item in values for word in (option_name(field), str(item))]
    return words


def command(
    question: type[Question[Any]], run: Callable[[Question[Any], bool], None], help_all: Callable[..., None]
) -> Callable[..., None]:
    """The command that asks the question; run: gets the question, and whether JSON is asked for."""
    fields = [field for field in dataclasses.fields(question) if has_opt(field)]
    first = question.__annotations__  # fields of its own, before shared ones

    def called(**values: Any) -> None:
        as_json = values["as_json"]
        run(question(**{field.name: _value(field, values[field.name]) for field in fields}), as_json)

    parameters = [
        _parameter(
            field.name, _typed(field, bool(question.COMMON) and field.name not in question.COMMON), _default(field)
        )
        for field in sorted(fields, key=lambda f: (f.default is not dataclasses.MISSING, f.name not in first))
    ]
    json = typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel="Output")
    parameters.append(_parameter("as_json", typing.Annotated[bool, json], False))
    if question.COMMON:
        option = typer.Option("--help-all", help="Show all options.", is_eager=True, callback=help_all)
        parameters.append(_parameter("help_all", typing.Annotated[bool, option], False))
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    called.__doc__ = question.__doc__
    return called


def asks(question: Callable[P, Question[R]], name: str) -> Callable[P, R]:
    """The function of `import dsim` that asks the question."""

    def answer(*args: P.args, **options: P.kwargs) -> R:
        return question(*args, **options).answer(Watch()).to_python()

    answer.__doc__ = question.__doc__
    fields = dataclasses.fields(typing.cast(Any, question))
    by_option = {option_name(field): field.name for field in fields if has_opt(field)}
    return suggesting(answer, name, _signature(question), by_option)


def suggesting(
    function: Callable[P, R], name: str, signature: inspect.Signature | None = None,
    by_option: Mapping[str, str] = MappingProxyType({}),
) -> Callable[P, R]:  # fmt: skip
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
            signature.bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"dsim.{name}(): {error}") from None
        try:
            return function(*args, **options)
        except DsimError as error:
            error.args = (re.sub(r"(dsim [a-z]+ [^;`)]*)|--([a-z][a-z-]*)", in_python, str(error)),)
            raise

    def in_python(option: re.Match[str]) -> str:
        return option[1] or by_option.get(f"--{option[2]}", option[2].replace("-", "_"))

    called.__name__ = called.__qualname__ = name
    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


def _signature(question: Any) -> inspect.Signature:
    """Of the constructor, with plain types."""
    plain = [
        parameter.replace(annotation=_plain(parameter.annotation))
        for parameter in inspect.signature(question).parameters.values()
    ]
    first = question.__annotations__  # fields of its own, before shared ones
    return inspect.Signature(sorted(plain, key=lambda p: (p.kind, p.kind is p.KEYWORD_ONLY and p.name not in first)))


def _plain(annotation: Any) -> Any:
    inner = annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation
    return inner.__forward_arg__ if isinstance(inner, typing.ForwardRef) else inner


def _names(field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    names = opt_of(field).names or (f"--{field.name.replace('_', '-')}",)
    if _kind(field) is bool and field.default is not False:
        return (f"{names[0]}/--no-{names[0][2:]}",)
    return names


def _kind(field: "dataclasses.Field[Any]") -> type:
    if not opt_of(field).metavar:
        return bool
    words = re.findall(r"\w+", str(_plain(field.type)))  # of `float | str | None`, or `TraceLike`
    return next((kind for kind in KINDS if kind.__name__ in words), str)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _typed(field: "dataclasses.Field[Any]", hidden: bool) -> Any:
    """For Typer."""
    opt = opt_of(field)
    kind: Any = str if opt.read is not None else Path if opt.exists else _kind(field)
    values = opt.values
    completion = None if values is None else lambda incomplete: [v for v in values() if v.startswith(incomplete)]
    is_many = _is_many(field)
    if is_many:
        kind = list[kind]
    if opt.metavar.startswith("[") or (field.default is dataclasses.MISSING and not opt.names):
        kind = kind if field.default is dataclasses.MISSING else kind | None
        return typing.Annotated[kind, typer.Argument(metavar=opt.metavar, help=opt.help, autocompletion=completion)]
    if field.default is None or is_many:
        kind = kind | None
    option = typer.Option(
        *_names(field), metavar=opt.metavar or None, help=opt.help, rich_help_panel=opt.panel, envvar=opt.envvar,
        autocompletion=completion, exists=opt.exists, dir_okay=not opt.exists, hidden=hidden,
    )  # fmt: skip
    return typing.Annotated[kind, option]


def _is_many(field: "dataclasses.Field[Any]") -> bool:
    return field.default == () or (field.default is dataclasses.MISSING and "..." in opt_of(field).metavar)


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is dataclasses.MISSING:
        return inspect.Parameter.empty
    text = opt_of(field).text
    if text is not None:
        return text
    return None if field.default == () else field.default


def _value(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """A field's value of an option's."""
    opt = opt_of(field)
    if value is None:
        return field.default
    if opt.read is not None:
        return opt.read(option_name(field), value)
    return tuple(value) if isinstance(value, list) else value
