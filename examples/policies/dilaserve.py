"""A threshold that goes by load (DiLaServe, arXiv 2606.29094): the longer the queue, the looser it is."""

from dataclasses import dataclass
from typing import Annotated

from dsim.policy import EVERY_STEP, Policy, PolicyError, Preset, Range, Unmasking, View

STEP = 0.1  # between two thresholds: the profile needs a yield at each


@dataclass(frozen=True)
class ByLoad(Unmasking):
    """`threshold` while few wait; for each further `patience` requests in the queue a step less, down to `loosest`."""

    loosest: Annotated[float, Range(0.5, 0.9), "the threshold under the highest load"] = 0.8
    patience: Annotated[int, Range(1, 64), "waiting requests that loosen the threshold by 0.1"] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.loosest <= self.threshold:
            raise PolicyError(f"loosest is {self.loosest}, expected above 0 and at most the threshold {self.threshold}")

    @property
    def thresholds(self) -> tuple[float, ...]:
        steps = round((self.threshold - self.loosest) / STEP)
        return tuple(round(self.threshold - STEP * i, 6) for i in range(steps + 1))

    def threshold_now(self, view: View) -> float:
        load = view.num_waiting // self.patience
        return self.thresholds[min(load, len(self.thresholds) - 1)]


POLICY = Preset(
    Policy("dilaserve", EVERY_STEP, unmasking=ByLoad()),
    main="patience",
    summary="a threshold that loosens as the queue grows",
    space={"patience": [1, 2, 4, 8, 16], "loosest": [0.8, 0.9]},
)
