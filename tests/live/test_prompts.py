"""Prompts: the same request is asked the same, whatever else is asked, and files are read as they say."""

from pathlib import Path

import numpy as np
import pytest

from dsim.live.config import ModelConfig
from dsim.live.prompts import WORKLOADS, prompts_from, random_prompts, read_tokens
from dsim.live.weights import config_of

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
