"""The checkpoint families that load: names of weights, and how they were trained (families.json).

No code of a model's directory runs. Weight names are templates of layer {i} and expert {j}; several names fill one
matrix from top to bottom. Settings in `fixed` would change the arithmetic: other values are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files.read import read_json

CANVAS = "DiffusionGemmaForBlockDiffusion"  # no Decoder's layers: canvas_model.py


@dataclass(frozen=True)
class Family:
    names: Mapping[str, Any]  # our weights -> their name, or a list of names
    fixed: Mapping[str, Any]  # key -> its only value, also if absent
    defaults: Mapping[str, Any] = field(default_factory=dict)  # our fields that config.json may leave out
    trained: Mapping[str, Any] = field(default_factory=dict)  # our fields, never in config.json
    rotary: float = 1.0  # share of a head that turns, without a key
    experts: Mapping[str, Any] | None = None  # Experts' fields, never in config.json; None: dense


def _family(tables: Mapping[str, Any], values: Mapping[str, Any]) -> Family:
    """Join the shared tables that a list names with its own."""
    joined: dict[str, dict[str, Any]] = {}
    for kind in ("names", "fixed"):
        joined[kind] = {}
        for table in values[kind]:
            joined[kind] |= tables[kind][table] if isinstance(table, str) else table
    return Family(**{**values, **joined})


_TABLES = read_json(Path(__file__).with_name("families.json"))
FAMILIES = {name: _family(_TABLES, values) for name, values in _TABLES["families"].items()}
