"""Text to token ids and back: by a model's tokenizer, as bytes, or as a twin's filler."""

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path

from ..engine.errors import DsimError
from ..files.read import parsing
from ..live.hub_cache import in_cache

FILLER = ("one ", "two ", "six ", "ten ")  # four bytes per token, as prompts are counted
BYTES_PER_TOKEN = 4  # rule of thumb for English

Pieces = Callable[[Sequence[int]], str]  # the text that the next tokens of a reply add


class Bytes:
    """Tokens are bytes; ids above 255 have no text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def pieces(self) -> Pieces:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda tokens: decoder.decode(bytes(t for t in tokens if t < 256))


class Tokenized:
    """A tokenizer.json, or a folder with one."""

    def __init__(self, name: str) -> None:
        path = Path(in_cache(name))
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise DsimError(f"{file}: no such file, expected a tokenizer.json")
        from tokenizers import Tokenizer  # bytes and the twin do not need it

        with parsing(file, "a tokenizer"):
            self._tokenizer = Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        valid = text.encode("utf-8", "replace").decode()  # tokenizers refuses lone surrogates, which JSON may hold
        return list(self._tokenizer.encode(valid).ids)

    def pieces(self) -> Pieces:
        tokens: list[int] = []
        prefix = ""

        def piece(new: Sequence[int]) -> str:
            nonlocal prefix
            tokens.extend(new)
            text: str = self._tokenizer.decode(tokens)
            if text.endswith("\ufffd"):  # half a character: the next tokens may complete it
                return ""
            added, prefix = text[len(prefix) :], text
            return added

        return piece


class Filler:
    """A twin's words: prompts are counted, by a tokenizer if given; replies are filler."""

    def __init__(self, tokenizer: Tokenized | None = None) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is not None:
            return self._tokenizer.encode(text)
        return [0] * -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)

    def pieces(self) -> Pieces:
        count = 0

        def piece(tokens: Sequence[int]) -> str:
            nonlocal count
            begin, count = count, count + len(tokens)
            return "".join(FILLER[i % len(FILLER)] for i in range(begin, count))

        return piece


Words = Bytes | Tokenized | Filler  # `encode` gives a prompt's token ids, `pieces` a new reply's text piece by piece
