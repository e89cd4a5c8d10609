"""A replay, from scenarios to files, for `dsim replay` and `dsim.replay`."""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from ..comparison.measured_log import columns_of, measured_log
from ..engine.errors import DsimError, cut
from ..results.scenario import Scenario
from ..traces import Trace
from .record import Record, Watch, in_twin, memory_told, record


def write_replay(
    scenarios: Sequence[Scenario], requests: Trace, about: Mapping[str, Any], *, out: Path | None, force: bool = False,
    jobs: int | None = None, watch: Watch = lambda name: nullcontext(),
) -> Record:  # fmt: skip
    """Replay scenarios that differ only in policy.

    about: more manifest entries. jobs: threads of a replay; None: one a core.
    """
    first = scenarios[0]
    return record(
        scenarios, requests, partial(in_twin, threads=jobs or os.cpu_count() or 1),
        out=out, force=force, watch=watch,
        about=lambda results: {
            **about, "memory": memory_told(scenarios, requests, results),
            "measured": measured_log(first, columns_of(scenarios, results)),
        },
    )  # fmt: skip


def fleet_cost(scenarios: Sequence[Scenario], gpu_hour: float, currency: str) -> dict[str, Any]:
    """The manifest's cost; gpu_hour: price of a GPU per hour."""
    first = scenarios[0]
    if not 0 <= gpu_hour < math.inf:
        raise DsimError(f"--gpu-hour is {gpu_hour}, expected a price of 0 or more")
    if first.scaler != Scenario.scaler:
        raise DsimError(f"--gpu-hour is {gpu_hour:g} and --scaler is {cut(first.scaler)}: the price of a fixed fleet")
    counts = {scenario.loaded_profile().device.count for scenario in scenarios}
    if first.pools:
        counts = {setting.profile.device.count for _, setting in first.each_pool()}
    if len(counts) > 1:
        known = ", ".join(map(str, sorted(counts)))
        raise DsimError(f"--gpu-hour is one price and the policies' profiles have {known} GPUs, expected one number")
    gpus = first.num_replicas * counts.pop()
    return {"gpus": gpus, "per_hour": gpus * gpu_hour, "currency": currency}
