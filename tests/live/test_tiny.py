"""The shipped models: small and trained; the texts of the block-diffusion model are those of its generator."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from dsim.engine.errors import ModelError
from dsim.live.prompts import WORKLOADS, read_tokens
from dsim.live.weights import FOLDERS, config_of, load

from .answers import Answer, likelihood

ROOT = Path(__file__).parents[2]
BOTH = "tiny-both-ways"


def pieces(name: str, workload: str) -> list[Answer]:
    """Pieces of a shipped text, of which the last 96 bytes are an answer."""
    text = read_tokens(workload, name, config_of(name))
    return [Answer(224, text[at : at + 320]) for at in range(0, 40_000, 10_000)]


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
        assert -np.mean([likelihood(model, piece) for piece in pieces(name, workload)]) < most
