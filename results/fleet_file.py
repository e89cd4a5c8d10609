"""A fleet as text: its command-line options, or the TOML file with the same keys."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from ..engine.errors import DsimError
from ..files.read import cut, read_toml
from ..files.schema import FileObject
from ..sim.scalers import FIXED


@dataclass(frozen=True)
class FleetWords:
    """Pools, links, router, decider and scaler of a fleet; the fields are the keys of its file."""

    pools: tuple[str, ...] = ()  # each `[NAME:]COUNT@PROFILE,POLICY`
    links: tuple[str, ...] = ()  # each `BANDWIDTH[,LATENCY][,field=value...]`
    router: str = "round-robin"
    decider: str = "always"
    scaler: str = FIXED
    startup: str = "0"
    failures: tuple[str, ...] = ()  # each `field=value,...` (sim/failures.py)
    tiers: tuple[str, ...] = ()  # each `NAME:CAPACITY[@BANDWIDTH[,LATENCY]][,field=value...]` (sim/tiers.py)

    def or_file(self, path: str | Path | None) -> Self:
        """The fleet in a file, or this one without a file; raises DsimError if both are given."""
        if path is None:
            return self
        for field in fields(self):
            if (value := getattr(self, field.name)) != field.default:
                found = value[0] if isinstance(value, tuple) else value
                raise DsimError(f"fleet is {path} and {field.name} is {cut(found)}, expected one of them")
        return self.read(path)

    def toml(self) -> str:
        """The text of a fleet's file: the fields that are not as by default."""
        lines = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and value:
                lines.append(f"{field.name} = [{', '.join(json.dumps(item, ensure_ascii=False) for item in value)}]")
            elif value != field.default:
                lines.append(f"{field.name} = {json.dumps(value, ensure_ascii=False)}")
        return "\n".join([*lines, ""])

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a fleet's file; a DsimError names missing and unknown keys."""
        defaults = {field.name: field.default for field in fields(cls) if field.name != "pools"}
        return FileObject(str(path), "", read_toml(path), ("pools",), optional=defaults).read(cls)
