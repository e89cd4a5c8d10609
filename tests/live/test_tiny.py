"""The shipped models: small and trained; the texts of the block-diffusion model are those of its generator."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from dsim.engine.errors import ModelError
from dsim.live.model import Decoder
from dsim.live.prompts import WORKLOADS, Tokens, read_tokens
from dsim.live.weights import FOLDERS, config_of, load

from .dense import Dense, block_causal

ROOT = Path(__file__).parents[2]
BOTH = "tiny-both-ways"


PROMPT, PARTS = 224, 8  # bytes, and passes over an answer, each masking every eighth byte


@torch.inference_mode()
def likelihood(model: Decoder, piece: Tokens) -> float:
    """Mean log-likelihood of an answer's bytes (nats), an eighth masked in each pass."""
    text, positions = torch.from_numpy(piece).long(), torch.arange(len(piece))
    seen = Dense(block_causal(len(piece), len(piece) if model.config.both_ways else model.config.block_length))
    total = 0.0
    for part in range(PARTS):
        masked = positions[(positions >= PROMPT) & ((positions - PROMPT) % PARTS == part)]
        tokens = text.clone()
        tokens[masked] = model.config.mask_token
        logs = model.logits(model(tokens, positions, seen)[masked]).float().log_softmax(dim=-1)
        total += float(logs.gather(1, text[masked][:, None]).sum())
    return total / (len(text) - PROMPT)


def test_they_are_small_and_the_wheel_holds_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FOLDERS:
        config = config_of(name)
        assert (FOLDERS[name] / "model.safetensors").stat().st_size <= 4_000_000
        assert (config.num_params < 2_000_000, config.mask_token, config.both_ways) == (True, 256, name == BOTH)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    tiny = FOLDERS["tiny"]
    files = [path for pattern in settings["package-data"]["dsim.live.tiny"] for path in tiny.glob(pattern)]
    assert [path for path in files if path.suffix == ".safetensors"] == [tiny / "model.safetensors"]
    monkeypatch.setitem(FOLDERS, BOTH, tmp_path / "both_ways")
    with pytest.raises(ModelError, match=r"^model tiny-both-ways is not in the wheel, expected a directory: live/tiny"):
        load(BOTH, "cpu", torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_they_learned_both_kinds_of_text(name: str) -> None:
    # A byte of 256 costs 5.5 nats unlearned. The shipped prompts were not trained on.
    model = load(name, "cpu", torch.float32)
    for workload, most in zip(WORKLOADS, (2.5, 1.0), strict=True):
        text = read_tokens(workload, name, config_of(name))  # of a piece the last 96 bytes are an answer
        assert -np.mean([likelihood(model, text[at : at + 320]) for at in range(0, 40_000, 10_000)]) < most
