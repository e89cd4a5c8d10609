"""A run's page: policies side by side, timeline, slowest requests."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..files.write import encoded
from ..results.manifest import Manifest
from ..results.metrics import Floats, latencies
from ..results.run import Columns, Run
from ..results.slo import Slo
from . import closeup, curves, figures
from .choices import of_choices
from .html import to_html
from .measured import TITLE
from .memory import of_memory
from .page import Figure, Number, Page, Section, Table, estimate, table
from .replicas import of_replicas
from .story import Json, estimated, profiles_of, words
from .table import compare, number

SLOWEST = 6  # by policy
MAX_CLOSEUPS = 4  # policies
ALWAYS = ("Latencies cover completed requests. Averages over time are weighted by step latency.",)


def write_html(path: str | Path, run: Run) -> None:
    """The same run gives the same bytes."""
    Path(path).write_bytes(encoded(to_html(run_page(run))))


def run_page(run: Run) -> Page:
    info, text = run.info, words(run.info["policies"], run.info)
    slos = [Slo.parse(text) for text in info.get("slos", [])]
    requests = {policy: run.requests(policy, figures.REQUEST_NEEDS) for policy in run.policies}
    edges = curves.time_edges(run, list(requests.values()))
    pages = figures.pool_sizes(run)
    steps = {policy: curves.steps(run, policy, edges, pages[policy]) for policy in run.policies}
    latency = figures.latency(requests, slos)
    attained = figures.attainment(requests, slos, bool(info.get("missing_passes", True)))
    shown = _foremost([*attained, *latency], info["policies"], slos)
    timeline = figures.timeline(requests, steps, edges)
    engine = _engine(run, requests, steps, edges)
    details = (*text.sections, of_memory(info.get("memory", [])))
    sections = [
        Section("Latency and SLOs", tuple(shown[1:])),
        of_replicas(info.get("fleet"), float(edges[-1]), next((c["arrival"] for c in requests.values()), np.zeros(0))),
        Section("Timeline", tuple(timeline)),
        Section("Slowest requests", _slowest(requests, slos)),
        Section("The engine's steps", tuple(engine)),
        Section("Steps", (*figures.by_chunk(steps), *of_choices(run))),
        *(Section(s.title, s.blocks, fold="" if s.title == TITLE else s.title) for s in details),
    ]
    return Page(
        name=text.name,
        question=text.question,
        answer=text.answer,
        details=text.details,
        alarms=text.alarms,
        cautions=(
            *([estimate(" and ".join(_estimates(info)) or "unnamed")] if estimated(info) else []),
            *(("Doubted.", line) for line in info.get("doubted", [])),
        ),
        numbers=_numbers(info["policies"]),
        chart=shown[0] if shown else None,
        facts=text.facts,
        policies=tuple(run.policies),
        sections=tuple(section for section in sections if section.blocks),
        notes=(*text.notes, *ALWAYS),
        command=info.get("command", ""),
        version=info.get("dsim", ""),
    )


def _estimates(info: Manifest) -> list[str]:
    """Profiles that were not measured."""
    found = [p.get("name", "") for p in profiles_of(info).values() if p.get("estimated", True)]
    return list(dict.fromkeys(name for name in found if name))


def _foremost(found: Sequence[Figure], policies: Sequence[Json], slos: Sequence[Slo]) -> list[Figure]:
    """The answer's figure first: attainment over time, or the first SLO's metric."""
    missed = any((p["slo_attainment"] or 0.0) < 0.9995 for p in policies if p["slo_attainment"] is not None)
    wanted = "slo-time" if missed else f"cdf-{slos[0].metric}" if slos else "cdf-e2el"
    return sorted(found, key=lambda figure: figure.name != wanted)


def _numbers(policies: Sequence[Json]) -> tuple[Number, ...]:
    rows = {row.label: row for row in compare(policies)}
    picked = [
        ("SLO attainment", "requests that meet every SLO"),
        ("goodput", "good requests a second"),
        ("output throughput", "of completed requests"),
        ("ttft p99", "99 % of first tokens came within"),
        ("norm_latency p50", "the median request's time a token"),
        ("e2el p99", "99 % of answers were whole within"),
    ]
    found, several = [], len(policies) > 1
    for label, about in picked:
        if row := rows.get(label):
            cells = tuple((i if several else None, f"{cell} {row.unit}") for i, cell in enumerate(row.cells[:4]))
            found.append(Number(label, cells, about))
    return tuple(found[:4])


def _slowest(requests: dict[str, Columns], slos: Sequence[Slo]) -> tuple[Table, ...]:
    """Requests that miss the SLOs most, or slowest."""
    judging = [slo for slo in slos if slo.stat is None and slo.slo_class is None]
    head = ["request", "policy", "arrived", "prompt", "tokens", "queued", "ttft", "e2el", "a token", "preempted"]
    rows = []
    for policy, columns in requests.items():
        known = latencies(columns)
        worst = known["e2el"]
        if judging:
            worst = np.nanmax(np.stack([np.nan_to_num(known[s.metric] / s.bound, nan=-1.0) for s in judging]), axis=0)
            worst = np.where(np.isnan(known["e2el"]), math.nan, worst)
        for i in closeup.slowest(worst, SLOWEST):
            rows.append([
                f"#{columns['request'][i]}", policy, f"{columns['arrival'][i]:,.1f} s",
                f"{columns['input_length'][i]:,}", f"{columns['num_tokens'][i]:,}",
                *(f"{number(known[n][i])} s" for n in ("queue_time", "ttft", "e2el")),
                f"{number(1e3 * known['norm_latency'][i])} ms", f"{columns['num_preemptions'][i]:,}",
            ])  # fmt: skip
    how = f"that miss {' and '.join(map(str, judging))} by most" if judging else "that took longest"
    about = f"For each policy the requests {how}."
    return (table(head, rows, title="The slowest requests", caption=about, left=frozenset({0, 1})),) if rows else ()


def _engine(
    run: Run, requests: dict[str, Columns], steps: dict[str, curves.StepCurves], edges: Floats
) -> list[Figure]:  # fmt: skip
    """Steps where the queue was longest, else the batch largest."""
    found: list[Any] = []
    for i, (policy, columns) in enumerate(list(requests.items())[:MAX_CLOSEUPS]):
        waiting = curves.waiting(columns, edges)
        by, why = (waiting, "when the queue was longest")
        if not waiting.max(initial=0.0) > 0:
            by, why = np.nan_to_num(steps[policy].batch, nan=0.0), "when the batch was largest"
        found.append(closeup.engine_figure(run, policy, i, float(edges[int(np.argmax(by))]), why))
    return [figure for figure in found if figure is not None]
