"""The shipped models: small and trained; the texts of the block-diffusion model are those of its generator."""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dsim.engine.engine import Limits
from dsim.engine.errors import ModelError
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.live.prompts import WORKLOADS, prompts_from, read_tokens
from dsim.live.weights import FOLDERS, config_of, load

from .answers import Answer, answers, equal_share, likelihood

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


def test_a_directory_of_it_is_the_same_model() -> None:
    folder = str(FOLDERS[BOTH])
    assert replace(config_of(folder), name=BOTH) == config_of(BOTH)
    assert np.array_equal(*(read_tokens("records", name, config_of(name)) for name in (folder, BOTH)))


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_they_learned_both_kinds_of_text(name: str) -> None:
    # A byte of 256 costs 5.5 nats unlearned. The shipped prompts were not trained on.
    model = load(name, "cpu", torch.float32)
    for workload, most in zip(WORKLOADS, (2.5, 1.0), strict=True):
        assert -np.mean([likelihood(model, piece) for piece in pieces(name, workload)]) < most


@pytest.mark.slow
def test_what_a_cache_leaves_out_shows_in_its_answers() -> None:
    model = load(BOTH, "cpu", torch.float32)
    prompts = prompts_from(read_tokens("records", BOTH, model.config), 0)
    requests = [Request(i, 0.0, 96, 32) for i in range(2)]
    limits = Limits(200, 512, 1, state_tokens=model.config.state_tokens)
    exact, *others = (
        answers(model, parse(spec), limits, requests, prompts)
        for spec in ("vanilla", "sparse-dllm:0.9", "sparse-dllm:0.05")
    )
    near, far = (equal_share(exact, other) for other in others)
    assert near > 0.8
    assert near > far + 0.05


@pytest.mark.slow
def test_its_scripts_make_the_shipped_records_and_measure_its_yield(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "research" / "tiny"))
    import corpus  # type: ignore[import-not-found]
    import evaluate  # type: ignore[import-not-found]

    for name in ("corpus", "evaluate", "train"):
        monkeypatch.delitem(sys.modules, name)
    model = load("tiny", "cpu", torch.float32)
    assert read_tokens("records", "tiny", model.config).astype(np.uint8).tobytes() == corpus.records(1, 65536).tobytes()
    monkeypatch.setattr(evaluate, "NUM_REQUESTS", 2)
    monkeypatch.setattr(evaluate, "OUTPUT", 96)
    source, records = (evaluate.yield_of(model, workload, 0.9)[0] for workload in WORKLOADS)
    assert records > source > 1.2
    assert records > 2.5
    assert evaluate.yield_of(model, "records", 0.7)[0] > 1.1 * records
