"""Cold starts: the parts of the time until a started replica takes requests."""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..engine.errors import PolicyError, quoted
from ..files.read import float_of

_PURPOSE = 0x57A47  # one stream of draws


class Part(NamedTuple):
    """Normal with this mean and deviation, never below 0."""

    name: str
    mean: float  # s
    std: float = 0.0  # s

    @property
    def seconds(self) -> str:
        return f"{self.mean:g}+-{self.std:g}" if self.std else f"{self.mean:g}"


@dataclass(frozen=True)
class Startup:
    """A replica's time to start, in parts."""

    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        for stage in self.parts:
            if not (0 <= stage.mean < math.inf and 0 <= stage.std < math.inf):
                raise PolicyError(f"startup is {stage.seconds} s, expected at least 0 and finite")

    @classmethod
    def parse(cls, text: str | float) -> "Startup":
        """Read seconds, or items as in `provision=240+-30,load=18`."""
        seconds = float_of(str(text))
        if not math.isnan(seconds):
            return cls((Part("start", seconds),)) if seconds else cls()
        parts: list[Part] = []
        for item in str(text).split(","):
            shape = re.fullmatch(r"([a-z_-]+)=([0-9.eE]+)(?:\+-([0-9.eE]+))?", item)
            mean, std = (float_of(shape[2]), float_of(shape[3] or "0")) if shape else (math.nan, math.nan)
            if shape is None or math.isnan(mean + std):
                raise PolicyError(
                    f"startup is {quoted(item)}, expected seconds, or PART=SECONDS[+-SD],... such as "
                    "provision=240+-30,load=18"
                )
            parts.append(Part(shape[1], mean, std))
        return cls(tuple(parts))

    def __str__(self) -> str:
        return ",".join(f"{stage.name}={stage.seconds}" for stage in self.parts).removeprefix("start=")

    @property
    def mean(self) -> float:
        """s, without the cut at 0."""
        return sum(stage.mean for stage in self.parts)

    def draw(self, seed: int, number: int) -> float:
        """Seconds of the run's start with this number."""
        if not any(stage.std for stage in self.parts):
            return self.mean
        random = np.random.default_rng([seed, _PURPOSE, number])
        return float(sum(max(0.0, random.normal(stage.mean, stage.std)) for stage in self.parts))


AT_ONCE = Startup()


def in_words(text: str) -> str | float:
    """For a world: seconds, or the words of its parts."""
    seconds = float_of(text)
    return text if math.isnan(seconds) else seconds
