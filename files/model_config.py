"""The values of a checkpoint's config.json, by our fields' names: what all its readers share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine.plain import Range
from .read import read_toml
from .schema import FileObject

FIELDS = read_toml(Path(__file__).with_suffix(".toml"))  # the table explains its columns
KEYS: dict[str, tuple[str, ...]] = {name: tuple(field["keys"]) for name, field in FIELDS.items()}
RANGES = {name: Range(field.get("least", 1), field.get("most", 1 << 16)) for name, field in FIELDS.items()}
SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context_limit")
EXPERTS = ("num", "top_k", "ffn", "shared", "dense_layers")
ABOVE_0 = Range(0, above=True)


def architectures(values: Mapping[str, Any]) -> list[Any]:
    """The architectures that a config.json names."""
    listed = values.get("architectures")
    return listed if isinstance(listed, list) else []


def text_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's values, with those of its `text_config`."""
    text = values.get("text_config")
    return {**values, **text} if isinstance(text, dict) else {**values}


def value_of(config: FileObject, field: str) -> Any:
    """A field's value in config.json, by any of its keys; None: absent. An error names the key."""
    key, row = config.first(*KEYS[field]), FIELDS[field]
    value = config.values.get(key)
    if value is None:
        if "optional" in row or "default" in row:
            return row.get("default")
        raise config.error(" or ".join(KEYS[field]), None, "a model's dimension")
    if row.get("kind") == "flag":
        return bool(value)
    if row.get("kind") == "number":
        return config.number(key, ABOVE_0)
    return config.integer(key, RANGES[field])
