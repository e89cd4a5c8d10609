"""Requests' prompts, cut from a text or random: traces give lengths only."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Union

import numpy as np
import numpy.typing as npt

from ..engine.chance import PROMPT, key
from ..engine.errors import ModelError
from ..files.read import cut, json_of, parsing, read_bytes
from .hub_cache import in_cache

if TYPE_CHECKING:
    from .canvas_model import CanvasConfig
    from .config import ModelConfig

Tokens = npt.NDArray[np.int32]
Prompts = Callable[[int, int], Tokens]  # request, length -> token ids


Vocabulary = Union["ModelConfig", "CanvasConfig"]  # a model's token ids
SHIPPED = Path(__file__).parent / "tiny" / "prompts"
WORKLOADS = ("source", "records")  # of the tiny model


def random_prompts(config: Vocabulary, seed: int) -> Prompts:
    """Random prompts, drawn by request and position, without the mask token."""

    def prompt(request: int, length: int) -> Tokens:
        mask = config.mask_token
        num_ids = config.vocab - (mask is not None)
        drawn = (key(seed, PROMPT, request, np.arange(length)) % np.uint64(num_ids)).astype(np.int32)
        return drawn if mask is None else drawn + (drawn >= mask)

    return prompt


def prompts_from(tokens: Tokens, seed: int) -> Prompts:
    """Prompts that each begin at a random place of a stream, which repeats."""

    def prompt(request: int, length: int) -> Tokens:
        begin = int(key(seed, PROMPT, request)[0] % np.uint64(len(tokens)))
        return tokens[(begin + np.arange(length)) % len(tokens)]

    return prompt


def tokenizer_folder(name: str) -> Path:
    """The folder with the tokenizer of --tokenizer or --model."""
    path = Path(in_cache(name))
    return path.parent if path.is_file() else path


def read_tokens(path: str, model: str, config: Vocabulary, tokenizer: str | None = None) -> Tokens:
    """Read a .jsonl of token id lists, or a text to tokenise.

    `path` may name the tiny model's workload. A text needs tokenizer.json, of the model or `tokenizer`, unless the
    model is byte-level. Raises ModelError.
    """
    if path in WORKLOADS and not Path(path).is_file():
        path = str(SHIPPED / f"{path}.txt")
    raw = read_bytes(path, kind=ModelError)
    if path.endswith(".jsonl"):
        tokens = _token_lines(path, raw)
    else:
        tokens = _encode(path, raw, tokenizer_folder(tokenizer or model), config)
    if not len(tokens):
        raise ModelError(f"{path}: holds no tokens, expected at least 1")
    if tokens.min() < 0 or tokens.max() >= config.vocab:
        wrong = int(tokens[(tokens < 0) | (tokens >= config.vocab)][0])
        raise ModelError(f"{path}: holds token {wrong}, expected 0 to {config.vocab - 1}, the model's vocabulary")
    return tokens


def _token_lines(path: str, raw: bytes) -> Tokens:
    tokens: list[int] = []
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        with parsing(f"{path}:{number}", "a list of token ids", ModelError):
            ids = json_of(line)
        if not isinstance(ids, list) or not all(type(i) is int and abs(i) < 2**31 for i in ids):
            raise ModelError(
                f"{path}:{number}: is {cut(line.decode(errors='replace'), 40)}, expected a list of token ids"
            )
        tokens += ids
    return np.array(tokens, np.int32)


def _encode(path: str, raw: bytes, folder: Path, config: Vocabulary) -> Tokens:
    """By tokenizer.json, or bytes for a byte-level model."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        if config.vocab < 512:
            return np.frombuffer(raw, np.uint8).astype(np.int32)
        raise ModelError(f"{path}: is text and {folder} has no tokenizer.json: give token ids, a list a line (.jsonl)")
    from tokenizers import Tokenizer  # ids and bytes need none

    with parsing(file, "a tokenizer", ModelError):
        tokenizer = Tokenizer.from_file(str(file))
        return np.array(tokenizer.encode(raw.decode("utf-8", "replace")).ids, np.int32)
