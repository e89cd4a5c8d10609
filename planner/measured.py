"""Measured runs on a capacity's curve, judged by the same criteria."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine.errors import DsimError
from ..results.metrics import COMPLETED, latencies, meeting, no_nan, rows_of, statistic
from ..results.run import Run, read_run
from ..results.slo import Slo
from .replicate import Criterion, criteria_of


def measured_points(
    folders: Sequence[str | Path], slos: Sequence[str], attainment: float, missing_passes: bool = True
) -> list[dict[str, Any]]:
    """A point per run: name, rate (req/s), each criterion's value (ms, or share of arrivals).

    DsimError for a run of several policies or without a duration, and for a class's SLO: run files hold no classes.
    """
    if not folders:
        return []
    parsed = [Slo.parse(text) for text in slos]
    for slo in parsed:
        if slo.slo_class is not None:
            raise DsimError(f"SLO {slo} is of a class, and a measured run's file holds none: expected an SLO of all")
    return [_point(read_run(Path(folder)), criteria_of(parsed, attainment), missing_passes) for folder in folders]


def _point(run: Run, criteria: Sequence[Criterion], missing_passes: bool) -> dict[str, Any]:
    if len(run.policies) != 1:
        names = ", ".join(run.policies)
        raise DsimError(f"{run.folder} holds policies {names}, expected a run of one, such as of `dsim import -o`")
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
            values[criterion.text] = float(meeting(requests, criterion.slos, missing_passes=missing_passes).mean())
        elif slo.metric == "itl":  # pooled over requests, of which the file has statistics only
            values[criterion.text] = float(getattr(summary.itl_ms, str(slo.stat)) or math.nan)
        else:
            assert slo.stat is not None
            values[criterion.text] = 1e3 * statistic(latencies(done)[slo.metric], slo.stat)
    point: dict[str, Any] = no_nan({
        "run": run.folder.name, "rate": (len(arrival) - 1) / duration, "num_requests": len(arrival),
        "completed": len(done["status"]), "stable": summary.stable, "values": values,
    })  # fmt: skip
    return point
