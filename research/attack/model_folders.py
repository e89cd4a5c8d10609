"""What a model's directory holds, and what is asked of it: config.json, safetensors, tokenizers, templates, prompts.

Kept apart from the other targets because reading a checkpoint loads PyTorch.
"""

import json
import struct
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch

from dsim.files.model_config import KEYS
from dsim.live.canvas_model import ARCHITECTURE, canvas_config
from dsim.live.config import ModelConfig, Settings
from dsim.live.families import FAMILIES
from dsim.live.prompts import read_tokens
from dsim.live.tensors import INDEX, WEIGHTS
from dsim.live.weights import config_of, is_canvas, load, random_model, source_of
from dsim.research.tiny.saved import save_model

from . import mutate

BYTES = ModelConfig("bytes", 1, 8, 1, 1, 8, 8, 258, 64, 4, 257)
WORDS = ModelConfig("words", 1, 8, 1, 1, 8, 8, 600, 64, 4, 599)
SIZES = {
    "hidden": 8, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 8, "vocab": 300, "context_limit": 64,
    "block_length": 4, "mask_token": 299, "rope_theta": 1e4, "norm_eps": 1e-6, "tied": True, "experts.num": 4,
    "experts.top_k": 2, "experts.ffn": 4, "experts.normed": True, "experts.dense_layers": 1, "experts.shared": 1,
    "experts.groups": 2, "experts.top_groups": 2, "experts.scale": 1.0,
}  # fmt: skip
CANVAS = {
    "architectures": [ARCHITECTURE], "canvas_length": 16,
    "text_config": {
        "num_hidden_layers": 2, "head_dim": 8, "num_key_value_heads": 1, "hidden_size": 8, "num_attention_heads": 2,
        "intermediate_size": 8, "vocab_size": 30, "max_position_embeddings": 64, "sliding_window": 8, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 4, "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 16}}, "rope_parameters": {"full_attention": {"rope_theta": 1e6}},
        "rms_norm_eps": 1e-6,
    },
}  # fmt: skip


@cache
def _configs() -> list[dict[str, Any]]:
    """A valid config.json of every family, by the first and by the last name of each field."""
    found: list[dict[str, Any]] = [CANVAS]
    for (name, family), named in product(FAMILIES.items(), (0, -1)):
        config: dict[str, Any] = {"architectures": [name], "rope_scaling": {"rope_type": "default"}}
        for ours, theirs in KEYS.items():
            if ours not in family.trained and (family.experts is not None or not ours.startswith("experts.")):
                config[theirs[named]] = SIZES[ours]
        found.append(config | {"eos_token_id": [1, 2], "partial_rotary_factor": 1.0})
    return found


def config(chance: Random, folder: Path) -> None:
    """What `dsim live` makes of a directory's JSON files."""
    path = folder / "config.json"
    path.write_bytes(mutate.json_text(chance.choice(_configs()), chance))
    if chance.random() < 0.2:
        said = {"eos_token_id": [1, 3], "sampler_config": {"entropy_bound": 0.1}, "t_min": 0.1}
        (folder / "generation_config.json").write_bytes(mutate.json_text(said, chance))
    try:
        given = Settings(None, None)
        if is_canvas(str(folder), given):
            canvas_config(source_of(str(folder)))
        else:
            load(str(folder), "cpu", torch.float32, settings=given)
    except Exception as error:
        if "has neither model.safetensors" not in str(error):
            raise
    else:
        assert json.loads(path.read_text())["architectures"] == [ARCHITECTURE], "no weights were asked for"


@cache
def _checkpoint(work: Path) -> tuple[bytes, bytes]:
    """config.json and model.safetensors of a decoder of a few hundred weights."""
    config = ModelConfig("small", 2, 8, 2, 1, 4, 8, 20, 64, 4, 19)
    save_model(random_model(config, "cpu", torch.float32), work / "model", torch.float32)
    return (work / "model" / "config.json").read_bytes(), (work / "model" / WEIGHTS).read_bytes()


def weights(work: Path, chance: Random, folder: Path) -> None:
    """A checkpoint whose head, numbers or index were changed."""
    config, data = _checkpoint(work)
    (folder / "config.json").write_bytes(config)
    size = struct.unpack("<Q", data[:8])[0]
    head = data[8 : 8 + size]
    how = chance.random()
    if how < 0.2:  # the weights alone
        data = data[: 8 + size] + mutate.json_text(0, chance)[:9].ljust(9, b"\xff") + data[17 + size :]
    elif how < 0.5:
        head = mutate.json_text(json.loads(head), chance)
        said = chance.choice((0, 1, 2**31, 2**63)) if chance.random() < 0.1 else len(head)
        data = struct.pack("<Q", said) + head + data[8 + size :]
    elif how < 0.7:
        data = mutate.damaged(data, chance)
    else:
        index = {"metadata": {}, "weight_map": dict.fromkeys(list(json.loads(head)), WEIGHTS)}
        (folder / INDEX).write_bytes(mutate.json_text(index, chance))
    (folder / WEIGHTS).write_bytes(data)
    load(str(folder), "cpu", torch.float32, settings=Settings(block_length=chance.choice((None, None, 4, 8))))
    assert config_of(str(folder)).vocab == 20


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"chunk": 7, "block": 9, "?": 0}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return json.loads(made.to_str())


def tokenizer(chance: Random, folder: Path) -> None:
    """A text, tokenised as a damaged tokenizer.json has it."""
    (folder / "tokenizer.json").write_bytes(mutate.json_text(_tokenizer(), chance))
    (folder / "text.txt").write_bytes(mutate.damaged(b"block chunk of block", chance))
    read_tokens(str(folder / "text.txt"), str(folder), WORDS)


def prompts(chance: Random, folder: Path) -> None:
    """Token ids, a list a line."""
    (folder / "ids.jsonl").write_bytes(mutate.json_lines([[1, 2, 3], [4], list(range(20))], chance))
    read_tokens(str(folder / "ids.jsonl"), str(folder), BYTES)


# Name: how, and how often beside the others.
ALL: dict[str, tuple[Callable[[Random, Path], None], int]] = {
    "model config": (config, 1), "tokenizer": (tokenizer, 4), "prompts": (prompts, 4),
}  # fmt: skip
