"""A fleet as text: command-line options, or a TOML file with the same keys."""

from dataclasses import dataclass, fields
from typing import Self

from ..engine.errors import DsimError
from ..files.read import FilePath, cut, read_toml
from ..files.schema import FileObject
from ..sim.scalers import FIXED


@dataclass(frozen=True)
class FleetWords:
    """The fields are the keys of the file."""

    pools: tuple[str, ...] = ()  # `[NAME:]COUNT@PROFILE,POLICY`
    links: tuple[str, ...] = ()  # `BANDWIDTH[,LATENCY][,field=value...]`
    router: str = "round-robin"
    decider: str = "always"
    scaler: str = FIXED
    startup: float = 0.0  # s

    def or_file(self, path: FilePath | None) -> Self:
        """Read the file, if given; DsimError if there are options too."""
        if path is None:
            return self
        for field in fields(self):
            if (value := getattr(self, field.name)) != field.default:
                first = value[0] if isinstance(value, tuple) else value
                raise DsimError(f"fleet is {path} and {field.name} is {cut(first)}, expected one of them")
        return self.read(path)

    @classmethod
    def read(cls, path: FilePath) -> Self:
        """DsimError names missing and unknown keys."""
        defaults = {field.name: field.default for field in fields(cls) if field.name != "pools"}
        return FileObject(str(path), "", read_toml(path), ("pools",), optional=defaults).read(cls)
