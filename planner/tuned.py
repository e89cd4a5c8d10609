"""The result of a search."""

from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from ..report.page import Figure, Page
from ..report.result import Result
from ..results.metrics import no_nan
from .fleet_space import FleetSpace
from .objective import OBJECTIVES, Tried
from .quality import Quality
from .replicate import Interval
from .space import Space


@dataclass(frozen=True)
class Finalist:
    """A setting confirmed on fresh luck and held-out traffic, paired with the default."""

    candidate: Tried
    quality: Quality
    search: tuple[float, ...]  # objectives in the search: biased upward
    values: tuple[Interval, ...]
    gains: tuple[Interval, ...]  # over the default, relative; above 0 is better
    meets: float  # share of confirming replays that met every SLO on the run
    attainment: float  # mean share of good arrivals


@dataclass(frozen=True, repr=False)
class Tuned(Result):
    """A search's finding, and how sure it is."""

    objectives: tuple[str, ...]
    recommended: Tried  # the winner if its gain is confirmed, else the default
    confirmed: bool
    winner: Finalist
    runner_up: Finalist | None
    default: Finalist
    front: tuple[Finalist, ...]  # Pareto front, with several objectives
    search_gain: float  # the winner's, relative: biased upward
    trials: pd.DataFrame
    space: Space | FleetSpace
    equal: int  # other settings as good in the search, within 1 %
    notes: tuple[str, ...]
    num_replays: int
    replications: int

    @property
    def policy_toml(self) -> str:
        """A file for `--policy` or `--fleet`."""
        return self.recommended.toml()

    def page(self) -> Page:
        from ..report.tune import words

        return words(self.to_json())

    def figures(self) -> list[Figure]:
        from ..report.tune import figures

        return figures(self.to_json(), self.trials)

    def to_frame(self) -> pd.DataFrame:
        """trials.csv: one row per trial."""
        return self.trials

    def to_json(self) -> dict[str, Any]:
        """The object of `--json` and tune.json."""
        found: dict[str, Any] = no_nan(
            {
                "schema": 1,
                "objectives": {name: OBJECTIVES[name] for name in self.objectives},
                "recommended": self.recommended.to_json(),
                "confirmed": self.confirmed,
                "winner": self._plain(self.winner),
                "runner_up": None if self.runner_up is None else self._plain(self.runner_up),
                "default": self._plain(self.default),
                "front": [self._plain(f) for f in self.front],
                "search_gain": self.search_gain,
                "space": self.space.to_json(),
                "equal": self.equal,
                "notes": list(self.notes),
                "num_trials": len(self.trials),
                "num_replays": self.num_replays,
                "replications": self.replications,
            }
        )
        return found

    def _plain(self, f: Finalist) -> dict[str, Any]:
        return {
            **f.candidate.to_json(),
            "quality": {**asdict(f.quality), "notes": list(f.quality.notes)},
            "values": {name: asdict(v) for name, v in zip(self.objectives, f.values, strict=True)},
            "gains": {name: asdict(v) for name, v in zip(self.objectives, f.gains, strict=True)},
            "searched": dict(zip(self.objectives, f.search, strict=True)),
            "meets_run_slos": f.meets,
            "attainment": f.attainment,
            "untested": list(f.candidate.untested),
        }
