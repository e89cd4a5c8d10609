"""Measured runs on a capacity's curve, judged by the same criteria."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..engine.errors import DsimError
from ..results.metrics import COMPLETED, latencies, meeting, rows_of, statistic
from ..results.run import read_run
from ..results.slo import Slo
from .replicate import criteria_of


@dataclass(frozen=True)
class MeasuredRun:
    run: str
    rate: float  # req/s
    num_requests: int
    completed: int
    stable: bool
    values: dict[str, float | None]  # by criterion: ms, or share of arrivals


def measured_runs(folders: Sequence[str | Path], slos: Sequence[str], attainment: float) -> list[MeasuredRun]:
    """The folders' runs, judged.

    DsimError for a run of several policies or without a duration, and for a class's SLO: run files hold no classes.
    """
    if not folders:
        return []
    parsed = [Slo.parse(text) for text in slos]
    for slo in parsed:
        if slo.slo_class is not None:
            raise DsimError(f"SLO {slo} is of a class, and a measured run's file holds none: expected an SLO of all")
    criteria = criteria_of(parsed, attainment)
    runs = []
    for run in (read_run(Path(folder)) for folder in folders):
        if len(run.policies) != 1:
            policies = ", ".join(run.policies)
            raise DsimError(
                f"{run.folder} holds policies {policies}, expected a run of one, such as of `dsim import -o`"
            )
        (summary,) = run.info.policies
        requests = run.requests(run.policies[0])
        arrival = requests["arrival"]
        duration = float(arrival.max() - arrival.min()) if len(arrival) else 0.0
        if not duration > 0:
            raise DsimError(
                f"{run.folder} holds {len(arrival)} requests in {duration:g} s, expected some time between them"
            )
        done = rows_of(requests, requests["status"] == COMPLETED)
        values = {}
        for criterion in criteria:
            slo = criterion.slos[0]
            if criterion.share is not None:
                values[criterion.text] = float(meeting(requests, criterion.slos).mean())
            elif slo.metric == "itl":  # pooled over requests, of which the file has statistics only
                values[criterion.text] = getattr(summary.itl_ms, slo.stat or "") or math.nan
            else:
                values[criterion.text] = 1e3 * statistic(latencies(done)[slo.metric], slo.stat or "")
        runs.append(MeasuredRun(
            run=run.folder.name, rate=(len(arrival) - 1) / duration, num_requests=len(arrival),
            completed=len(done["status"]), stable=summary.stable,
            values={text: value if math.isfinite(value) else None for text, value in values.items()},
        ))  # fmt: skip
    return runs
