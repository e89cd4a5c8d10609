"""Loading weights and prompts: what is saved reads back, files are read as they say, and a wrong one is one line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dsim.engine.errors import DsimError, ModelError
from dsim.live.config import ModelConfig, named
from dsim.live.hub_cache import in_cache
from dsim.live.prompts import WORKLOADS, prompts_from, random_prompts, read_tokens, tokenizer_folder
from dsim.live.weights import config_of, load, random_model
from dsim.research.tiny.saved import save_model
from dsim.serve.words import Tokenized

from ..worlds import refusal
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
    assert "not a safetensors file" in refusal(ModelError, lambda: load(str(saved), "cpu", torch.float32))
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(ModelError, lambda: load(str(tmp_path / "empty"), "cpu", torch.float32))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two snapshots of owner/tiny.model, the first of which is main."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hub" / "models--owner--tiny.model"
    for revision in ("abc123", "def456"):
        save_model(random_model(SMALL, "cpu", torch.float32), folder / "snapshots" / revision, torch.float32)
        config = folder / "snapshots" / revision / "config.json"
        config.write_text(config.read_text().replace('"name": "small",', ""))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc123")
    return folder


def test_a_name_is_the_snapshot_of_main(cache: Path) -> None:
    assert named("owner/tiny.model", None)[0] == str(cache / "snapshots" / "abc123")
    assert config_of(in_cache("owner/tiny.model")).name == "tiny.model"


def test_what_the_cache_lacks_is_one_line(cache: Path) -> None:
    for name in ("owner/other", "owner/no--name"):
        with pytest.raises(
            ModelError, match=f"^{name} is no path, and the Hugging Face cache has no config.json of it"
        ):
            in_cache(name)
    Path("owner").mkdir()
    Path("owner/other").mkdir()
    assert in_cache("owner/other") == "owner/other"  # a path
    assert in_cache("tiny") == "tiny"


def test_a_tokenizer_is_found_by_its_models_name(cache: Path) -> None:
    assert tokenizer_folder("owner/tiny.model") == cache / "snapshots" / "abc123"
    with pytest.raises(DsimError, match=r"abc123/tokenizer\.json: no such file, expected a tokenizer\.json"):
        Tokenized("owner/tiny.model")


TINY = config_of("tiny")
WORDS = ModelConfig("words", 1, 8, 1, 1, 8, 8, 600, 64, 4, 599)


def test_random_prompts_are_a_requests_own_and_never_hold_the_mask() -> None:
    ask = random_prompts(ModelConfig("m", 1, 8, 1, 1, 8, 8, 5, 64, 4, 2), 1)
    drawn = ask(3, 400)
    assert set(drawn.tolist()) == {0, 1, 3, 4}
    assert ask(3, 10).tolist() == drawn[:10].tolist()
    assert ask(4, 400).tolist() != drawn.tolist()


def test_prompts_are_pieces_of_the_stream_which_goes_on_at_its_start() -> None:
    stream = np.arange(10, dtype=np.int32)
    ask = prompts_from(stream, 0)
    for request in range(20):
        piece = ask(request, 25)
        assert ((np.diff(piece) % 10) == 1).all()
    assert len({int(ask(request, 1)[0]) for request in range(100)}) == 10


def test_bytes_are_the_tiny_models_tokens() -> None:
    for name in WORKLOADS:
        tokens = read_tokens(name, "tiny", TINY)
        assert len(tokens) == 65536
        assert 0 <= tokens.min() <= tokens.max() < 256


def test_a_file_of_token_ids_needs_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text("[1, 2]\n\n[599]\n")
    assert read_tokens(str(path), "m", WORDS).tolist() == [1, 2, 599]


def test_a_text_is_tokenised_as_the_models_directory_has_it(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"chunk": 7, "block": 9, "?": 0}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("block chunk of block")
    assert read_tokens(str(tmp_path / "text.txt"), str(tmp_path), WORDS).tolist() == [9, 7, 0, 9]
