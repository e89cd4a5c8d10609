"""Text to token ids and back: a model's tokenizer, bytes for a byte-level model, a filler for the twin."""

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ..engine.errors import DsimError
from ..files.read import parsing

FILLER = ("one ", "two ", "six ", "ten ")  # four bytes a token, as the twin counts a prompt's
BYTES_PER_TOKEN = 4  # a rule of thumb for English text


class Pieces(Protocol):
    """The text of one reply, growing."""

    def more(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add."""


class Words(Protocol):
    """A server's words: text to tokens, and tokens to text."""

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt."""

    def pieces(self) -> Pieces:
        """A reply's text, to begin."""


class Bytes:
    """Bytes are tokens; ids above 255 are special and have no text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def pieces(self) -> Pieces:
        return _ByteText()


class _ByteText:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def more(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(bytes(t for t in tokens if t < 256))


class Tokenized:
    """A tokenizer.json."""

    def __init__(self, file: Path) -> None:
        if not file.is_file():
            raise DsimError(f"{file}: no such file, expected a tokenizer.json")
        from tokenizers import Tokenizer  # imported here: bytes and the twin need none

        with parsing(file, "a tokenizer"):
            self._tokenizer = Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        whole = text.encode("utf-8", "replace").decode()  # JSON can hold half a character, a tokenizer takes none
        return list(self._tokenizer.encode(whole).ids)

    def pieces(self) -> Pieces:
        return _TokenText(self._tokenizer)


class _TokenText:
    def __init__(self, tokenizer: "object") -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._told = ""

    def more(self, tokens: Sequence[int]) -> str:
        self._tokens += tokens
        text: str = self._tokenizer.decode(self._tokens)  # type: ignore[attr-defined]
        if text.endswith("\ufffd"):  # half a character: the next tokens may end it
            return ""
        new, self._told = text[len(self._told) :], text
        return new


class Filler:
    """The twin's: prompts are counted, by a tokenizer where there is one, and replies say nothing."""

    def __init__(self, tokenizer: Tokenized | None = None) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is not None:
            return self._tokenizer.encode(text)
        return [0] * -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)

    def pieces(self) -> Pieces:
        return _FillerText()


class _FillerText:
    def __init__(self) -> None:
        self._num = 0

    def more(self, tokens: Sequence[int]) -> str:
        begin, self._num = self._num, self._num + len(tokens)
        return "".join(FILLER[i % len(FILLER)] for i in range(begin, self._num))
