"""The parts of each weight that one process of a shared model holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..engine.errors import ModelError
from .config import ModelConfig


@dataclass(frozen=True)
class Cut:
    parts: Sequence[slice]  # of the whole
    columns: bool = False  # else rows

    def overlaps(self, first: int, count: int) -> Iterator[tuple[slice, slice]]:
        """Of rows `first` to `first + count`: those in the share, and their place in it."""
        at = 0
        for part in self.parts:
            low, high = max(part.start, first), min(part.stop, first + count)
            if low < high:
                yield slice(low - first, high - first), slice(at + low - part.start, at + high - part.start)
            at += part.stop - part.start


@dataclass(frozen=True)
class Share:
    """What process `rank` of `size` holds: a part of heads and feed-forwards, and all else; KV heads may be copied."""

    whole: ModelConfig
    rank: int
    size: int

    @cached_property
    def config(self) -> ModelConfig:
        """The dimensions of a share; ModelError if the model cannot be cut."""
        config, size = self.whole, self.size
        ffn = config.ffn if config.experts is None else config.experts.ffn
        for name, number in (("heads", config.heads), ("ffn", config.ffn), ("the experts' ffn", ffn)):
            if number % size:
                raise ModelError(f"--tp is {size}, and {config.name} has {name} {number}: expected a divisor of it")
        if config.kv_heads % size and size % config.kv_heads:
            raise ModelError(
                f"--tp is {size}, and {config.name} has kv_heads {config.kv_heads}: expected a divisor or a multiple "
                "of it"
            )
        experts = None if config.experts is None else replace(config.experts, ffn=config.experts.ffn // size)
        return replace(
            config, heads=config.heads // size, kv_heads=max(1, config.kv_heads // size), ffn=config.ffn // size,
            experts=experts,
        )  # fmt: skip

    def cut(self, name: str) -> Cut | None:
        """The held parts of this weight; None: all."""
        config, own = self.whole, self.config
        part, _, kind = name.rpartition(".")
        if ".qkv" in name:
            q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
            first = self.rank * config.kv_heads // self.size * config.head_dim
            keys = slice(q + first, q + first + own.kv_heads * config.head_dim)
            return Cut((self._of(q), keys, slice(keys.start + kv, keys.stop + kv)))
        if part.endswith(".output"):
            return Cut((self._of(config.heads * config.head_dim),), columns=True)
        mixed = config.experts
        if "experts" in name:
            assert mixed is not None
            width = mixed.ffn * (mixed.shared if "shared" in name else 1)
        else:
            width = config.ffn
        if "gate_up" in (part.rpartition(".")[2].removeprefix("shared_"), kind):
            own_rows = self._of(width)
            return Cut((own_rows, slice(own_rows.start + width, own_rows.stop + width)))
        if "down" in (part.rpartition(".")[2].removeprefix("shared_"), kind):
            return Cut((self._of(width),), columns=True)
        return None

    def _of(self, width: int) -> slice:
        each = width // self.size
        return slice(self.rank * each, (self.rank + 1) * each)
