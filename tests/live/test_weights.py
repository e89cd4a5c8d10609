"""Loading: what is saved reads back, and every way in which a directory can be wrong."""

import json
from pathlib import Path

import pytest
import torch

from dsim.engine.errors import ModelError
from dsim.live.weights import load, random_model
from dsim.research.tiny.saved import save_model

from .dense import SMALL, logits

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def test_a_saved_model_reads_back_the_same_and_in_transformers(tmp_path: Path) -> None:
    model = random_model(SMALL, "cpu", torch.float32, seed=3)
    save_model(model, tmp_path / "m", torch.float32)
    back = load(str(tmp_path / "m"), "cpu", torch.float32)
    assert back.config == SMALL
    assert torch.equal(logits(back, TOKENS, 4), logits(model, TOKENS, 4))


def test_bfloat16_weights_keep_their_angles_in_float32() -> None:
    assert random_model(SMALL, "cpu", torch.bfloat16).frequencies.dtype == torch.float32


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(random_model(SMALL, "cpu", torch.float32), tmp_path / "m", torch.float32)
    return tmp_path / "m"


def test_missing_files_are_named(saved: Path, tmp_path: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load(str(saved), "cpu", torch.float32)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks model-00001-of-00002.safetensors \(1 of 1 shards are missing\)"):
        load(str(saved), "cpu", torch.float32)
    (saved / "model-00001-of-00002.safetensors").write_bytes(b"not one")
    with pytest.raises(ModelError, match="not a safetensors file"):
        load(str(saved), "cpu", torch.float32)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(str(tmp_path / "empty"), "cpu", torch.float32)
