"""Write a decoder's weights and config.json, as checkpoints of its family have them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dsim.files.model_config import KEYS
from dsim.live.config import SCALINGS, ModelConfig
from dsim.live.families import FAMILIES
from dsim.live.model import Decoder
from dsim.live.tensors import WEIGHTS
from dsim.live.weights import stored_parts


def save_model(model: Decoder, folder: Path, dtype: torch.dtype) -> None:
    """Write a decoder's weights, by the names of its family, and its config.json."""
    config = model.config
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to("cpu", dtype) for name, weight in model.state_dict().items()}
    assert config.rotary is None, "components in another order than the family has them"
    tensors = {name: part.contiguous().clone() for name, part in stored_parts(config, weights)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_written(config), indent=2) + "\n", encoding="utf-8")


def config_written(config: ModelConfig) -> dict[str, Any]:
    family = FAMILIES[config.architecture]
    written: dict[str, Any] = {"name": config.name, "architectures": [config.architecture]}
    for ours, keys in KEYS.items():
        of, _, name = ours.rpartition(".")
        if ours not in family.trained and (config.experts or not of):
            written["vocab_size" if ours == "vocab" else keys[0]] = getattr(config.experts if of else config, name)
    if config.rotary is not None:
        written["partial_rotary_factor"] = config.rotary / config.head_dim
    if config.scaling is not None:
        fast, slow = SCALINGS[config.scaling.kind]
        written["rope_scaling"] = {
            "rope_type": config.scaling.kind, "factor": config.scaling.factor, fast: config.scaling.fast,
            slow: config.scaling.slow, "original_max_position_embeddings": config.scaling.original,
            "attention_factor": config.scaling.attention,
        }  # fmt: skip
    if config.eos:
        written["eos_token_id"] = list(config.eos)
    return written
