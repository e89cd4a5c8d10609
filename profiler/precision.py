"""Weights and keys of fewer bits: bytes, rates, and how a checkpoint says so (precisions-and-cards.md 1).

Experts alone are quantised to 4 bits in a mixture of experts; to FP8 all layers. Embeddings
and the head stay bf16.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.errors import ProfileError
from ..files.read import cut, quoted, read_json
from .models import BYTES, ModelShape, config_path, expert_params, layer_params

# Bits of a weight, scales included.
BITS = {"bf16": 16.0, "fp8": 8.0, "nvfp4": 4.5, "mxfp4": 4.25, "int4": 4.125}
KEYS = {"bf16": 2, "fp8": 1}  # bytes of a key's or value's element
# Words of a checkpoint's name or format, the more special first.
FORMATS = {
    "nvfp4": "nvfp4", "mxfp4": "mxfp4", "fp8": "fp8", "float-quantized": "fp8", "awq": "int4", "gptq": "int4",
    "int4": "int4", "w4a16": "int4", "pack-quantized": "int4",
}  # fmt: skip
# By weights and the start of the compute capability: products' rate over bf16's at full batches, measured on a card of
# each (1.3); others decode weights and multiply at bf16's rate.
RATES = {
    ("fp8", "9."): 1.1, ("fp8", "10.0"): 1.2, ("fp8", "10.3"): 1.5, ("fp8", "8.9"): 1.5, ("fp8", "12.0"): 1.7,
    ("nvfp4", "10."): 2.2, ("nvfp4", "12.0"): 2.8, ("int4", "9."): 0.6,
}  # fmt: skip


@dataclass(frozen=True)
class Precision:
    weights: str = "bf16"
    keys: str = "bf16"
    decodes: bool = False  # weights are decoded and multiplied in bf16

    def __post_init__(self) -> None:
        for name, value, choices in (("weights", self.weights, BITS), ("kv", self.keys, KEYS)):
            if value not in choices:
                raise ProfileError(f"{name} is {cut(value)}, expected one of {', '.join(choices)}")

    @property
    def label(self) -> str:
        """For names; empty in bf16."""
        weights = "" if self.weights == "bf16" else f"-{self.weights}"
        return weights if self.keys == "bf16" else f"{weights}-kv-{self.keys}"

    def quantised(self, model: ModelShape) -> int:
        """Parameters of fewer bits."""
        if self.weights == "bf16":
            return 0
        experts = expert_params(model)
        return experts if experts and self.weights != "fp8" else layer_params(model)

    def weight_bytes(self, model: ModelShape) -> int:
        quantised = self.quantised(model)
        return round(quantised * BITS[self.weights] / 8) + BYTES * (model.total_params - quantised)

    def layer_bytes(self, model: ModelShape) -> float:
        """Of another parameter of a layer."""
        return BITS[self.weights] / 8 if self.quantised(model) == layer_params(model) else BYTES

    def slowdown(self, model: ModelShape, compute_capability: str) -> float:
        """A token's products relative to bf16's time."""
        fits = [kind for kind in RATES if kind[0] == self.weights and compute_capability.startswith(kind[1])]
        if not fits or self.decodes:
            return 1.0
        share = 1.0
        if self.quantised(model) < layer_params(model) and model.experts is not None:
            active = model.experts.top_k / model.experts.num * expert_params(model)
            share = active / layer_params(model, active=True)
        return 1.0 - share + share / RATES[fits[0]]


def precision_of(name: str, config: Mapping[str, Any]) -> Precision:
    """A checkpoint's precision by its config.json, else by its name; ProfileError for an unknown format."""
    quantised = config.get("quantization_config")
    if quantised is None:
        words = re.split(r"[^a-z0-9]+", Path(name).name.lower())
        return Precision(next((FORMATS[word] for word in words if word in FORMATS), "bf16"))
    if not isinstance(quantised, Mapping):
        raise ProfileError(f"quantization_config is {quoted(quantised)}, expected an object")
    groups = [group for group in (quantised.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    format_ = " ".join(str(quantised.get(key, "")) for key in ("quant_method", "format", "quant_algo")).lower()
    weights = next((FORMATS[word] for word in FORMATS if word in format_), None)
    bits = {quantised.get("bits", 4), *((group.get("weights") or {}).get("num_bits", 4) for group in groups)}
    if weights is None or (weights == "int4" and bits != {4}):
        name = format_.strip() or "empty"
        raise ProfileError(
            f"quantization_config is {cut(name)} of {', '.join(map(str, sorted(bits)))} bits, expected fp8, nvfp4, "
            "mxfp4, or awq, gptq or compressed-tensors of 4 bits"
        )
    scheme = quantised.get("kv_cache_scheme")
    eight = isinstance(scheme, Mapping) and scheme.get("num_bits") == 8
    keys = "fp8" if eight or "FP8" in str(quantised.get("kv_cache_quant_algo")) else "bf16"
    # Activations of 16 bits: vLLM decodes the weights (modelopt.py:795 of 0.33.0).
    decodes = bool(groups) and all(group.get("input_activations") is None for group in groups)
    return Precision(weights, keys, decodes)


def precision(model: str, weights: str | None = None, keys: str | None = None) -> Precision:
    """A model's precision by name, folder or config.json; `weights` and `keys` override it."""
    path = config_path(model)
    name = str(path.absolute().parent) if path.name == "config.json" else model
    stored = precision_of(name, read_json(path, kind=ProfileError) if path.is_file() else {})
    return replace(stored, weights=weights or stored.weights, keys=keys or stored.keys)
