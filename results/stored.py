"""A frozen dataclass whose fields are its JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..engine.errors import DsimError
from ..files.read import quoted, shown
from ..files.schema import stored

VERSION = 1  # of every JSON object
NOT_STORED = {"stored": False}
FAULTS = {"missing": "is missing", "unexpected_keyword_argument": "is unknown"}


@dataclass(frozen=True, repr=False)
class Stored:
    """A frozen dataclass of plain values: `to_json` and `from_json` are exact inverses.

    A field's name is its key; NaN is null, so a number that may be missing is `float | None`. A field that is no part
    of the JSON (arrays, an open folder) has `metadata=NOT_STORED`.
    """

    schema: ClassVar[str]  # "dsim-plan"

    def to_json(self) -> dict[str, Any]:
        """The object of `--json` and of the result's file."""
        return {"schema": self.schema, "version": VERSION, **stored(self)}

    def to_text(self) -> str:
        """Of the result's file."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str = "the result") -> Self:
        """DsimError, in one line, unless `to_json` could have written it."""
        import pydantic  # slow to load

        for name, value in {"schema": cls.schema, "version": VERSION}.items():
            if data.get(name) != value:
                raise DsimError(f"{source}: {name} is {quoted(data.get(name))}, expected {quoted(value)}")
        values = {name: value for name, value in data.items() if name not in ("schema", "version")}
        # A field that is not stored may be of any type.
        rules = pydantic.ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)
        reader = pydantic.TypeAdapter(list[cls], config=rules)  # type: ignore[valid-type]
        try:
            [result] = reader.validate_json(json.dumps([values]))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            place, expected = ".".join(map(str, first["loc"][1:])), first["msg"].removeprefix("Input should be ")
            problem = FAULTS.get(first["type"], f"is {shown(first['input'])}, expected {expected}")
            raise DsimError(f"{source}: {place} {problem}") from None
        return result
