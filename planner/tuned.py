"""The result of a search."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from ..report.page import Page
from ..report.result import NOT_STORED, Result
from ..results.world import Setup, World
from .quality import Quality
from .replicate import Interval

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A setting confirmed on fresh luck and held-out traffic, paired with the default."""

    policy: str  # SPEC
    replicas: int
    untested: tuple[str, ...]  # fields beyond the engine's tested range, in words
    quality: Quality
    value: Interval  # of the objective
    gain: Interval | None  # over the default, relative; above 0 is better; None: the default's is 0
    meets_run_slos: float  # share of confirming replays that met every SLO on the run
    attainment: float | None  # mean share of good arrivals

    def __str__(self) -> str:
        return self.policy if self.replicas == 1 else f"{self.policy} on {self.replicas} replicas"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A row of trials.csv."""

    trial: int
    policy: str
    replicas: int
    state: str  # complete or refused
    value: float | None  # of the objective; None: refused
    attainment: float | None
    violation: float | None  # relative to the bound of the worst SLO
    reason: str  # of a refusal, or the missed SLO
    quality: float | None
    fields: Mapping[str, str]  # the point of the space


@dataclass(frozen=True, kw_only=True, repr=False)
class Tuned(Result):
    """A search's finding, and how sure it is."""

    schema: ClassVar[str] = "dsim-tune"

    objective: str
    unit: str
    confirmed: bool  # the winner's gain
    winner: Finalist
    runner_up: Finalist | None
    default: Finalist
    search_gain: float | None  # the winner's, relative: biased upward
    equal: int  # other settings as good in the search, within 1 %
    num_replays: int
    replications: int
    space: Mapping[str, tuple[Any, ...]]
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]
    setup: Setup
    implementations: tuple[str, ...]  # that price the compared settings
    run: str  # the command that replays the recommendation
    doubted: tuple[str, ...] = ()  # of the recommendation's steps, by its profiles
    policy_toml: str = field(default="", metadata=NOT_STORED)  # the recommendation's file for `--policy`
    compared: tuple[World, ...] = field(default=(), metadata=NOT_STORED)  # recommended, winner, default

    @property
    def recommended(self) -> Finalist:
        """The winner if its gain is confirmed, else the default."""
        return self.winner if self.confirmed else self.default

    def page(self) -> Page:
        from ..report.search import tune_page

        return tune_page(self)

    def to_frame(self) -> "pd.DataFrame":
        """trials.csv: one row per trial."""
        import pandas as pd

        rows = []
        for trial in self.trials:
            row = {f.name: getattr(trial, f.name) for f in fields(trial) if f.name != "fields"}
            rows.append({**row, **trial.fields})
        return pd.DataFrame(rows)
