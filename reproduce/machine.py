"""The machine of an experiment: a profile, or the roofline of a GPU and a model, and what is known beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..engine.errors import DsimError
from ..engine.latency import LatencyModel
from ..files.read import quoted
from ..profiler.hardware import gpu
from ..profiler.models import model
from ..profiler.profile import DEFAULT, Profile, load
from ..profiler.roofline import roofline
from ..results.scenario import Scenario

KEYS = ("profile", "gpu", "model", "tp", "graphs", "context_limit", "latency")
NUMBERS = tuple(f.name for f in fields(LatencyModel) if f.type == "float" or f.type is float)


@dataclass(frozen=True)
class Machine:
    """A shipped profile or a file, or the roofline of a GPU and a model; `latency` replaces some of its numbers."""

    profile: str = DEFAULT
    gpu: str | None = None
    model: str | None = None
    tp: int = 1
    graphs: bool = True
    context_limit: int | None = None  # tokens, where it ran beyond the model's own
    latency: tuple[tuple[str, float], ...] = ()

    @classmethod
    def read(cls, where: str, given: Mapping[str, Any]) -> "Machine":
        """The machine of a TOML table; a DsimError says what it may not hold."""
        for key in given:
            if key not in KEYS:
                raise DsimError(f"{where}: machine has no key {quoted(key)}, expected {', '.join(KEYS)}")
        if ("gpu" in given) != ("model" in given):
            raise DsimError(f"{where}: machine has one of gpu and model, expected both or a profile")
        for key, kind in (("profile", str), ("gpu", str), ("model", str), ("tp", int), ("graphs", bool),
                          ("context_limit", int)):  # fmt: skip
            if key in given and type(given[key]) is not kind:
                raise DsimError(f"{where}: machine.{key} is {quoted(given[key])}, expected {kind.__name__}")
        latency = given.get("latency", {})
        if not isinstance(latency, Mapping):
            raise DsimError(f"{where}: machine.latency is {quoted(latency)}, expected a table of numbers")
        for name, value in latency.items():
            if name not in NUMBERS:
                raise DsimError(f"{where}: machine.latency has no number {quoted(name)}, expected {', '.join(NUMBERS)}")
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e300:
                raise DsimError(f"{where}: machine.latency.{name} is {quoted(value)}, expected a number of at least 0")
        plain = {key: value for key, value in given.items() if key != "latency"}
        return cls(**plain, latency=tuple((name, float(value)) for name, value in latency.items()))

    def made(self) -> Profile:
        """The profile."""
        if self.gpu is not None and self.model is not None:
            found = roofline(gpu(self.gpu), model(self.model), self.tp, self.graphs)
        else:
            found = load(self.profile)
        if self.context_limit is not None:
            found = replace(found, model=replace(found.model, context_limit=self.context_limit))
        return replace(found, latency=replace(found.latency, **dict(self.latency)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class OnMachine(Scenario):
    """A scenario whose profile is made of a machine."""

    machine: Machine = Machine()

    def base_profile(self) -> Profile:
        return self.machine.made()
