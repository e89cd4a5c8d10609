"""Loading: what is saved reads back, and every way in which a directory can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsim.engine.errors import ModelError
from dsim.live import weights
from dsim.live.config import PRESETS
from dsim.live.weights import config_of, load, random_model, read_model, save_model

from .checkpoints import rewrite
from .dense import SMALL, Dense, block_causal, logits

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def test_a_saved_model_reads_back_the_same_and_in_transformers(tmp_path: Path) -> None:
    model = random_model(SMALL, "cpu", torch.float32, seed=3)
    save_model(model, tmp_path / "m", torch.float32)
    back = read_model(tmp_path / "m", "cpu", torch.float32)
    assert back.config == SMALL
    assert torch.equal(logits(back, TOKENS, 4), logits(model, TOKENS, 4))


def test_the_same_seed_makes_the_same_weights_and_another_seed_others() -> None:
    one, same, other = (random_model(SMALL, "cpu", torch.float32, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.head_weight, same.head_weight)
    assert not torch.equal(one.head_weight, other.head_weight)


@pytest.mark.parametrize(("name", "params"), [("sdar-8b", 8_190_735_360), ("sdar-4b", 4_411_424_256)])
def test_presets_have_the_published_number_of_parameters(name: str, params: int) -> None:
    # Half the bytes of the published safetensors indices: 16,381,470,720 and 8,822,848,512 (block-diffusion.md 3).
    assert PRESETS[name].num_params == params
    assert sum(w.numel() for w in weights._empty(PRESETS[name], weights.NOWHERE, torch.float32).parameters()) == params


def test_bfloat16_weights_keep_their_angles_in_float32() -> None:
    assert random_model(SMALL, "cpu", torch.bfloat16).frequencies.dtype == torch.float32


# ---- what can be wrong ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(random_model(SMALL, "cpu", torch.float32), tmp_path / "m", torch.float32)
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture is LlamaForCausalLM, expected one of: Qwen3"),
        ({"architectures": None}, "architecture is None, expected one of"),
        ({"hidden_size": "48"}, 'hidden_size is "48", expected a whole number'),
        ({"mask_token_id": -1}, "mask_token_id is -1, expected 0 to "),
        ({"mask_token_id": 97}, "mask_token_id is 97, expected below vocab_size, 97"),
        ({"attention_bias": True}, "attention_bias is true, expected false"),
        ({"rope_scaling": {"rope_type": "yarn"}}, 'rope_type is "yarn", expected default'),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"is quantised \(quant_method fp8\), expected plain",
        ),
        (
            {"quantization_config": {"bits": 4}},
            r"is quantised \(quantization_config\), expected plain",
        ),
        ({"intermediate_size": 96}, r"down_proj.weight is \[48, 80\], expected \[48, 96\] by config.json"),
        ({"num_hidden_layers": 3}, r"lacks model.layers.2.input_layernorm.weight \(11 of 36 weights are missing\)"),
        ({"num_hidden_layers": 1}, "holds model.layers.1.input_layernorm.weight, which small of 1 layers has no place"),
    ],
)
def test_a_wrong_config_is_one_line_with_both_values(saved: Path, values: dict[str, Any], says: str) -> None:
    rewrite(saved, **values)
    with pytest.raises(ModelError, match=says):
        read_model(saved, "cpu", torch.float32)


def test_missing_files_are_named(saved: Path, tmp_path: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        read_model(saved, "cpu", torch.float32)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks model-00001-of-00002.safetensors \(1 of 1 shards are missing\)"):
        read_model(saved, "cpu", torch.float32)
    (saved / "model-00001-of-00002.safetensors").write_bytes(b"not one")
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_model(saved, "cpu", torch.float32)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_model(tmp_path / "empty", "cpu", torch.float32)


def test_an_unknown_model_lists_the_presets() -> None:
    for ask in (lambda: load("sdar-9b", "cpu", torch.float32), lambda: config_of("sdar-9b")):
        with pytest.raises(ModelError, match=r"model is sdar-9b, expected a directory or one of: sdar-1.7b, sdar-4b"):
            ask()


def test_the_mask_of_a_dense_sequence_is_block_causal() -> None:
    assert Dense(block_causal(4, 2)).mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
