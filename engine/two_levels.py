"""Rules of routers, deciders and scalers from outside: compiled, or in plain Python with the same results."""

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import numpy as np

from .core import MANY_REQUESTS
from .errors import PolicyError, quoted
from .jit import bind, entry, in_python, is_kept, is_rule, uncompiled, wrong_parameters
from .numba_parts import JIT, NumbaError
from .records import table

LOG = logging.getLogger("dsim")
_KINDS = {int: "int64", float: "float64", bool: "bool"}


class TwoLevels:
    """A rule from outside, called through the shipped rule that asks it.

    asks: the shipped rule; it calls `placeholder`, which `answer` answers. asker: begins errors. num_requests: of the
    run, compiled from MANY_REQUESTS on or if the code is on disk; 0: in plain Python.
    """

    def __init__(self, asks: Any, placeholder: Any, answer: Any, asker: str, num_requests: int) -> None:
        self._asks, self._answers, self._asker = asks, {placeholder: answer}, asker
        many = num_requests >= MANY_REQUESTS
        self._compiles = JIT and num_requests > 0 and (many or is_kept(asks, self._answers, ""))
        self._call: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """The answer; arguments of every call have the same types. PolicyError if the rule cannot be compiled."""
        if self._call is None:
            self._call = self._compiled(arguments) if self._compiles else in_python(self._asks, self._answers)
        return self._call(*arguments)

    def _compiled(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        try:
            made: Callable[..., Any] = entry(bind(self._asks, self._answers, self._say), *arguments)
        except (NumbaError, KeyError) as error:
            raise PolicyError(f"{self._asker}: {uncompiled(error, self._answers.values())}") from error
        return made

    def _say(self) -> None:
        LOG.info("Compiling %s, once: some seconds", self._asker)


def check_rule(asker: str, name: str, answer: Any, placeholder: Any) -> None:
    """PolicyError for an answer to `placeholder` that is no rule or has another number of parameters."""
    if not is_rule(answer):
        raise PolicyError(f"{asker}: {name} is {quoted(answer)}, expected a rule (dsim.fleet.rule)")
    if wrong := wrong_parameters(answer, placeholder):
        raise PolicyError(f"{asker}: {name} is {wrong}")


def check_one_level(asker: str, kind: type, base: type, method: str, name: str, placeholder: Any) -> None:
    """PolicyError unless a class has either its own `method` or a rule `name` that can answer `placeholder`."""
    plain, answer = getattr(kind, method) is not getattr(base, method), getattr(kind, name)
    if plain == (answer is not None):
        has = f"{method} and {name}" if plain else f"neither {method} nor {name}"
        raise PolicyError(f"{asker}: it has {has}, expected one of them")
    if answer is not None:
        check_rule(asker, name, answer, placeholder)


def no_method(kind: type, name: str) -> None:
    """Keep a class's rule a function: without machine code it would be bound to instances."""
    if callable(kind.__dict__.get(name)):
        setattr(kind, name, staticmethod(getattr(kind, name)))


def settings_of(part: Any) -> Any:
    """A dataclass's numbers and truth values, without fields that begin with `_`, as one record in an array."""
    hints = get_type_hints(type(part))
    kinds = [(f.name, _KINDS[hints[f.name]]) for f in fields(part) if f.name[0] != "_" and hints[f.name] in _KINDS]
    made = np.zeros(1, np.dtype(kinds or [("none", "u1")], align=True))
    for name, _ in kinds:
        made[name] = getattr(part, name)
    return table(made)
