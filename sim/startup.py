"""Cold starts: the parts of the time until a started replica takes requests."""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..engine.errors import PolicyError, quoted

_PURPOSE = 0x57A47  # one stream of draws


class Part(NamedTuple):
    """Normal with this mean and deviation, never below 0."""

    name: str
    mean: float  # s
    std: float = 0.0  # s


# Measured starts, and their sources.
SETS: dict[str, tuple[tuple[Part, ...], str]] = {
    "qwen3.6-35b-rtx5090": (
        (Part("container", 16), Part("load", 18), Part("compile", 43), Part("warmup", 210)),
        "Qwen3.6-35B NVFP4 on an RTX 5090, vLLM issue 44881 (its total is 277 s, its parts add up to 287 s)",
    ),
    "llama-70b-fp8-tp8": (
        (Part("setup", 60), Part("load", 10), Part("bytecode", 15), Part("compile", 70), Part("warmup", 60)),
        "Llama-70B FP8 on eight GPUs with a hot page cache, vLLM issue 19824; its peer-to-peer check is the set-up",
    ),
    "kubernetes-node": ((Part("provision", 240, 30),), "from node to serving on Kubernetes, BLIS's configuration"),
}


@dataclass(frozen=True)
class Startup:
    """A replica's time to start, in parts."""

    parts: tuple[Part, ...] = ()

    @classmethod
    def parse(cls, given: str | float) -> "Startup":
        """Read seconds, or items as in `provision=240+-30,load=18`, each a part or a measured set's name."""
        try:
            return cls._checked((Part("start", float(given)),)) if float(given) else cls()
        except ValueError:
            pass
        parts: list[Part] = []
        for item in str(given).split(","):
            if item in SETS:
                parts += SETS[item][0]
                continue
            found = re.fullmatch(r"([a-z_-]+)=([0-9.eE]+)(?:\+-([0-9.eE]+))?", item)
            try:
                if found is None:
                    raise ValueError
                parts.append(Part(found[1], float(found[2]), float(found[3] or 0)))
            except ValueError:
                raise PolicyError(
                    f"startup is {quoted(item)}, expected seconds, PART=SECONDS[+-SD],... such as "
                    f"provision=240+-30,load=18, or one of {', '.join(SETS)}"
                ) from None
        return cls._checked(tuple(parts))

    def __str__(self) -> str:
        return ",".join(
            f"{part.name}={part.mean:g}" + (f"+-{part.std:g}" if part.std else "") for part in self.parts
        ).removeprefix("start=")

    @classmethod
    def _checked(cls, parts: tuple[Part, ...]) -> "Startup":
        for part in parts:
            if not (0 <= part.mean < math.inf and 0 <= part.std < math.inf):
                given = f"{part.mean:g}" + (f"+-{part.std:g}" if part.std else "")
                raise PolicyError(f"startup is {given} s, expected at least 0 and finite")
        return cls(parts)

    @property
    def mean(self) -> float:
        """s, without the cut at 0."""
        return sum(part.mean for part in self.parts)

    def draw(self, seed: int, number: int) -> float:
        """Seconds of the run's start with this number."""
        if not any(part.std for part in self.parts):
            return self.mean
        random = np.random.default_rng([seed, _PURPOSE, number])
        return float(sum(max(0.0, random.normal(part.mean, part.std)) for part in self.parts))


AT_ONCE = Startup()


def in_words(given: str) -> str | float:
    """For a scenario: seconds, or the words of its parts."""
    try:
        return float(given)
    except ValueError:
        return given
