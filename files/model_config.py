"""The values of a checkpoint's config.json, by our fields' names: what all its readers share."""

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from ..engine.plain import Range
from .read import read_toml
from .schema import FileObject

FIELDS = read_toml(Path(__file__).with_suffix(".toml"))  # the table explains its columns
KEYS: dict[str, tuple[str, ...]] = {name: tuple(field["keys"]) for name, field in FIELDS.items()}
RANGES = {name: Range(field.get("least", 1), field.get("most", 1 << 16)) for name, field in FIELDS.items()}
SHAPE = ("layers", "hidden", "heads", "ffn", "vocab", "context_limit")
EXPERTS = ("num", "top_k", "ffn", "shared", "dense_layers")
ABOVE_0 = Range(0, above=True)
FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types
GLOBAL = {"num_global_key_value_heads": "num_key_value_heads", "global_head_dim": "head_dim"}  # of layers of FULL


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


def attention_of(config: FileObject, kind: str) -> dict[str, int]:
    """`kv_heads` and `head_dim` of a kind of layers, by keys of that kind or, since transformers 5.15, of each layer.

    An error if its layers differ, or in anything else from other kinds.
    """
    kinds = config.get("layer_types", list[str] | None) or []
    stated = config.get("per_layer_config", dict[str, dict[str, Any]] | None) or {}
    by_layer = {key.lstrip("0") or "0": layer for key, layer in stated.items()}  # 05, if there are more than ten
    layers = [by_layer.get(str(i), {}) for i in range(len(kinds)) if kinds[i] == kind] or [{}]
    if any(layer != layers[0] or layer.keys() - GLOBAL.values() for layer in layers):
        raise config.error("per_layer_config", stated, f"{' and '.join(GLOBAL.values())}, alike in layers of {kind}")
    of_kind = {theirs: config.values[key] for key, theirs in GLOBAL.items() if kind == FULL and config.values.get(key)}
    layer = copy(config)
    layer.values = config.values | of_kind | layers[0]
    return {
        "kv_heads": value_of(layer, "kv_heads") or value_of(layer, "heads"),
        "head_dim": value_of(layer, "head_dim") or value_of(layer, "hidden") // value_of(layer, "heads"),
    }
