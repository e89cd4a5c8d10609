"""The result of `dsim.compare` and `dsim.validate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..report.page import Figure, Page
from ..report.result import Result, frame_of
from ..results.run import Run
from .cells import Comparison
from .page import compare_page, spoken

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Compared(Result):
    """A comparison and its pairs of runs."""

    comparison: Comparison
    pairs: Sequence[tuple[Run, Run]]

    def page(self) -> Page:
        return spoken(self.comparison)

    def figures(self) -> list[Figure]:
        return compare_page(self.comparison, self.pairs).figures

    def to_frame(self) -> "pd.DataFrame":
        """One row per policy and metric: both runs' statistics in the metric's unit, and relative errors."""
        cells = self.to_json()["cells"]
        return frame_of([{"policy": c["policy"], "metric": m, **v} for c in cells for m, v in c["metrics"].items()])

    def to_json(self) -> dict[str, Any]:
        """The object of `--json` and compare.json."""
        return self.comparison.to_json()
