"""An experiment's machine: a profile, or the roofline of a GPU and a model, with changes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from ...engine.errors import DsimError
from ...engine.latency import LatencyModel
from ...engine.spec import Policy
from ...files.schema import FileObject
from ...profiler.hardware import gpu
from ...profiler.models import model
from ...profiler.precision import Precision
from ...profiler.profile import DEFAULT, Profile, as_run_by, load, with_file_of
from ...profiler.roofline import roofline
from ...results.world import World

NUMBERS = {name: None for name, hint in get_type_hints(LatencyModel).items() if hint is float}


@dataclass(frozen=True)
class Machine:
    """A profile, or a GPU and a model; `latency` replaces coefficients."""

    profile: str = DEFAULT
    gpu: str | None = None
    model: str | None = None
    tp: int = 1
    graphs: bool = True
    weights: str = "bf16"
    context_limit: int | None = None  # tokens, if not the model's
    latency: tuple[tuple[str, float], ...] = ()

    @classmethod
    def read(cls, where: str, given: Mapping[str, Any]) -> "Machine":
        """Of a TOML table; DsimError names a wrong value."""
        optional = {field.name: field.default for field in fields(cls)} | {"latency": {}}
        table = FileObject(where, "machine", given, (), optional=optional)
        if ("gpu" in given) != ("model" in given):
            raise DsimError(f"{where}: machine has one of gpu and model, expected both or a profile")
        latency = FileObject(where, "machine.latency", table.values["latency"], (), optional=NUMBERS)
        changed = {name: latency.number(name) for name in NUMBERS if latency.values[name] is not None}
        return table.read(cls, latency=tuple(changed.items()))

    def made(self, policy: Policy) -> Profile:
        """With the costs of the policy's implementation if it has them."""
        if self.gpu is not None and self.model is not None:
            found = roofline(gpu(self.gpu), model(self.model), self.tp, self.graphs, precision=Precision(self.weights))
        else:
            found = load(self.profile)
        found = as_run_by(found, policy)
        if self.context_limit is not None:
            found = replace(found, model=replace(found.model, context_limit=self.context_limit))
        return replace(found, latency=replace(found.latency, **dict(self.latency)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class OnMachine(World):
    """Its profile comes from a machine."""

    machine: Machine = Machine()

    def with_files(self, found: Callable[[str], str]) -> "OnMachine":
        own = super().with_files(found)
        assert isinstance(own, OnMachine)
        return replace(own, machine=replace(self.machine, profile=with_file_of(self.machine.profile, found)))

    def base_profile(self) -> Profile:
        return self.machine.made(self.parsed_policy())
