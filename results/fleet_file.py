"""A fleet in words: the options that describe it, and the TOML file that holds the same."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from ..engine.errors import DsimError
from ..files.read import cut, read_toml
from ..files.schema import FileObject
from ..sim.scalers import FIXED


@dataclass(frozen=True)
class FleetWords:
    """Pools, the links between them, and who routes, splits and scales; the fields are the keys of a fleet's file."""

    pools: tuple[str, ...] = ()  # `[NAME:]COUNT@PROFILE,POLICY` each
    links: tuple[str, ...] = ()  # `BANDWIDTH[,LATENCY][,field=value...]` each
    router: str = "round-robin"
    decider: str = "always"
    scaler: str = FIXED
    startup: str = "0"
    failures: tuple[str, ...] = ()  # `field=value,...` each (sim/failures.py)
    tiers: tuple[str, ...] = ()  # `NAME:CAPACITY[@BANDWIDTH[,LATENCY]][,field=value...]` each (sim/tiers.py)

    def or_file(self, path: str | Path | None) -> Self:
        """The fleet of a file in place of these words, or these; DsimError where both are given."""
        if path is None:
            return self
        for field in fields(self):
            if (value := getattr(self, field.name)) != field.default:
                found = value[0] if isinstance(value, tuple) else value
                raise DsimError(f"fleet is {path} and {field.name} is {cut(found)}, expected one of them")
        return self.read(path)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """A fleet's file; DsimError names what it lacks or should not have."""
        defaults = {field.name: field.default for field in fields(cls) if field.name != "pools"}
        return FileObject(str(path), "", read_toml(path), ("pools",), optional=defaults).read(cls)
