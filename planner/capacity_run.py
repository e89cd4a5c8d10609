"""`dsim capacity`, from question to files."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..files.place import FolderKind
from ..report.capacity import FILES, IS_CAPACITY, capacity_page
from ..report.html import json_and_page
from ..report.page import Page
from ..results.metrics import no_nan
from ..results.scenario import Scenario, setup_of
from .backend import Pool
from .capacity import Capacity, Interrupted, Progress, question_of
from .contents import Json, asked_of
from .ensemble import capacities, check_num
from .memo import FILES as STORE_FILES
from .memo import STORE, StoreFolder
from .record import profile_notes

CAPACITY = FolderKind("a capacity", (*FILES, *STORE_FILES), FILES[0], IS_CAPACITY, kept=STORE)


def write_capacity(
    scenario: Scenario,
    folder: StoreFolder,
    command: str,
    *,
    rate: float | None,
    replicas: int | None,
    max_replicas: int | None,
    how: Json,
    curve: bool = True,
    points: Sequence[Json] = (),
    gpu_hour: float | None = None,
    currency: str = "USD",
    ensemble: int | None = None,
    jobs: int | None = None,
    progress: Progress,
    asking: Callable[[int, int], None],
    **pool: Any,
) -> tuple[Capacity, Json, Page]:
    """The capacity, the object of `--json`, and the page; the folder gets both.

    how: fields of CapacityOptions. points: measured runs. asking: called with the ensemble's finished and total draws.
    Interrupted if nothing is known yet.
    """
    check_num(ensemble, [scenario])
    search = question_of(scenario, rate, replicas, max_replicas)
    question = asked_of(scenario, rate=rate, replicas=replicas, max_replicas=max_replicas, **how)
    folder.begin("capacity", question)
    try:
        found = search(**how, curve=curve, gpu_hour=gpu_hour, jobs=jobs, memo=folder.memo, progress=progress, **pool)
    except Interrupted as stop:
        if stop.found is None:
            raise
        found = stop.found
    info = {
        **found.to_json(),
        **no_nan(setup_of(scenario, command, gpu_hour, currency)),
        "notes": profile_notes(scenario.of_each_pool()),
        "profile": found.profile,
        "estimated": found.estimated,
    }
    if points:
        info["measured"] = points
    fleet = scenario if scenario.pools else replace(scenario, replicas=found.replicas)
    if ensemble is not None and not found.interrupted:
        with Pool(jobs=jobs, **pool) as own:
            told = capacities(
                fleet, ensemble, attainment=how["attainment"], num_requests=found.num_requests, rate=rate, pool=own,
                memo=folder.memo, progress=asking,
            )  # fmt: skip
        info["ensemble"] = told.to_json()
    page = capacity_page(info)
    folder.put(dict(zip(FILES, json_and_page(info, page), strict=True)))
    return found, info, page
