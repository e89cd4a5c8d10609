"""Values from files: what a type and a range take, and the line about what they do not."""

from dataclasses import dataclass
from typing import Annotated, Any

from dsim.engine.errors import ProfileError
from dsim.engine.plain import Choice, Positive, Range, Signed
from dsim.files.schema import FileObject

from ..checks import cases, refused


@dataclass(frozen=True)
class Wheel:
    size: Positive
    drift: Signed = 0.0


@dataclass(frozen=True)
class Cart:
    name: Annotated[str, Choice(("ox", "mule"))]
    load: float
    wheels: tuple[Wheel, ...]
    span: tuple[float, float]
    notes: dict[str, str | int | bool | None]
    spare: Wheel | None


GIVEN: dict[str, Any] = {
    "name": "ox", "load": 2, "wheels": [{"size": 3, "drift": -0.5}], "span": [0, 1.5], "notes": {"a": None, "b": 2},
    "spare": None,
}  # fmt: skip


def test_a_dataclass_is_read_by_its_types_and_ranges() -> None:
    found = FileObject("cart.json", "", GIVEN, GIVEN).read(Cart)
    assert found == Cart("ox", 2.0, (Wheel(3, -0.5),), (0.0, 1.5), {"a": None, "b": 2}, None)
    assert isinstance(found.load, float)


@cases(
    "change says",
    ({"name": "cow"}, 'name is "cow", expected one of ox, mule'),
    ({"load": -1}, "load is -1, expected at least 0"),
    ({"load": True}, "load is true, expected a number"),
    ({"load": float("inf")}, "load is Infinity, expected a finite number"),
    ({"wheels": [{"size": 0, "drift": 0}]}, "wheels[0].size is 0, expected at least 1"),
    ({"wheels": [{"size": 2**63, "drift": 0}]}, f"wheels[0].size is {2**63}, expected at most {2**63 - 1}"),
    ({"wheels": [{"drift": 1}]}, "wheels[0].size is missing, expected keys size, drift"),
    ({"wheels": {}}, "wheels is an object of 0, expected a list"),
    ({"span": [1]}, "span has 1 values, expected 2"),
    ({"notes": {"a": []}}, "notes.a is a list of 0, expected a text, a whole number, true or false, null"),
    ({"spare": 7}, "spare is 7, expected an object"),
    ({"lode": 3}, f"lode is unknown (did you mean load?), expected keys {', '.join(GIVEN)}"),
)
def test_an_error_names_the_file_the_key_and_both_values(change: dict[str, Any], says: str) -> None:
    with refused(kind=ProfileError) as error:
        FileObject("cart.json", "", GIVEN | change, GIVEN, error=ProfileError).read(Cart)
    assert str(error.value) == f"cart.json: {says}"


def test_a_key_with_a_default_may_be_absent() -> None:
    found = FileObject("gpu.toml", "", {"b": 2}, ("b",), optional={"a": 1})
    assert (found.integer("a"), found.integer("b", Range(0, 2)), found.first("c", "b")) == (1, 2, "b")
    with refused(r"gpu\.toml: b is missing, expected keys b, a"):
        FileObject("gpu.toml", "", {}, ("b",), optional={"a": 1})
