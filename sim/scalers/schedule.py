"""A schedule: numbers of replicas by time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...engine.errors import PolicyError, cut, quoted
from .scaler import PoolView, Scaler


@dataclass(frozen=True)
class Schedule(Scaler):
    """`at=0/2/3600/6` is 2 replicas from the start and 6 after an hour; of several pools `at=0/1+2/3600/2+6`."""

    at: str = "0/1"  # time (s) / replicas / time (s) / replicas ..., times rising

    def __post_init__(self) -> None:
        self._steps()

    def _steps(self) -> list[tuple[float, list[int]]]:
        words = self.at.split("/")
        try:
            steps = [
                (float(time), [*map(int, counts.split("+"))])
                for time, counts in zip(words[::2], words[1::2], strict=True)
            ]
        except ValueError:
            raise PolicyError(
                f"at is {quoted(self.at)}, expected TIME/REPLICAS/TIME/REPLICAS..., such as 0/2/3600/6"
            ) from None
        if any(not later > earlier for (earlier, _), (later, _) in pairwise(steps)) or steps[0][0] != 0:
            raise PolicyError(f"at is {cut(self.at)}, expected rising times, the first of them 0")
        return steps

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        time, counts = max(step for step in self._steps() if step[0] <= now)
        if len(counts) != len(pools):
            raise PolicyError(
                f"the schedule has {len(counts)} numbers of replicas at {time:g} s, and the fleet {len(pools)} pools"
            )
        return counts
