"""A run: its result, its text and its page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from ..engine.journal import STATUSES
from ..results.curves import distribution, share_by_arrival, step_means, time_edges, waiting
from ..results.metrics import LATENCIES, METRICS, Columns, Floats, Summary, flat, good_requests, latencies, led_by
from ..results.run import Run
from ..results.run_info import CommitInfo, FleetCost, FleetInfo, LiveInfo, RunInfo
from ..results.slo import Slo
from .chart import Chart, colour
from .ensemble_page import decided, of_ensemble
from .html import to_html
from .page import Figure, Number, Page, Section, Table, estimate, priced_apart
from .result import NOT_STORED, Result
from .table import compare, counted, number, percent

if TYPE_CHECKING:
    import pandas as pd

OF_ARRIVALS = "part of every time from an arrival"
ALWAYS = ("Latencies cover completed requests. Averages over time are weighted by step latency.",)
DECIDED = {"model": "the weights decide the commits", "twin": "the profile's draws decide the commits"}
NUMBERS = {
    "SLO attainment": "requests that meet every SLO",
    "goodput": "good requests a second",
    "output throughput": "of completed requests",
    "ttft p99": "99 % of first tokens came within",
    "norm_latency p50": "the median request's time a token",
    "e2el p99": "99 % of answers were whole within",
}
# Name, title, caption, axis, and whether it is a share.
PANELS = (
    ("queue", "Queue", "Requests that have arrived and not begun, over all replicas.", "requests", False),
    ("batch", "Batch", "Sequences in a decode step, mean of the busy replicas.", "sequences", False),
    ("chunk", "Chunk", "Most positions a sequence computes in a decode step, mean.", "positions", False),
    ("kv", "KV occupancy", "Share of a busy replica's KV pool that is held.", "share", True),
)


@dataclass(frozen=True, repr=False)
class RunResult(RunInfo, Result):
    """A run that was replayed, served or measured; its JSON is run.json."""

    open: Callable[[], Run] | None = field(default=None, compare=False, metadata=NOT_STORED)
    columns: Mapping[str, Columns] | None = field(default=None, compare=False, metadata=NOT_STORED)  # by policy
    temporary: "TemporaryDirectory[str] | None" = field(default=None, compare=False, metadata=NOT_STORED)
    failure: Exception | None = field(default=None, compare=False, metadata=NOT_STORED)  # ended the last policy's run

    @classmethod
    def from_info(cls, info: RunInfo, **parts: Any) -> Self:
        """open: its files. columns: of requests, else read. temporary: the folder, removed with this object."""
        return cls(**{entry.name: getattr(info, entry.name) for entry in fields(RunInfo)}, **parts)

    @cached_property
    def run(self) -> Run:
        """Its files."""
        assert self.open is not None
        return self.open()

    def page(self) -> Page:
        return run_words(self)

    def figures(self) -> list[Figure]:
        return run_page(self.run).figures

    def to_frame(self) -> "pd.DataFrame":
        """A row per policy; metrics named as in a sweep's table (`ttft_ms_p50`)."""
        import pandas as pd

        return pd.DataFrame([{"policy": summary.policy, **flat(summary.to_json())} for summary in self.policies])

    @property
    def requests(self) -> "pd.DataFrame":
        """A row per request and policy: requests.parquet."""
        import pandas as pd

        if self.columns is None:
            return pd.read_parquet(self.run.folder / "requests.parquet")
        frames = []
        for policy, columns in self.columns.items():
            status = pd.Categorical(np.array(STATUSES)[columns["status"]], list(STATUSES))
            frames.append(pd.DataFrame({"policy": policy, **columns, "status": status}))
        return _joined(frames)

    @property
    def steps(self) -> "pd.DataFrame":
        """A row per step and policy: scalar columns of steps.parquet."""
        import pandas as pd

        return _joined([pd.DataFrame({"policy": name, **self.run.steps(name)}) for name in self.run.policies])


RunLike: TypeAlias = str | Path | RunResult | Run


def _joined(frames: "Sequence[pd.DataFrame]") -> "pd.DataFrame":
    import pandas as pd

    joined = pd.concat(frames, ignore_index=True)
    return joined.assign(policy=pd.Categorical(joined["policy"], joined["policy"].unique()))


# ---- text -----------------------------------------------------------------------------------------------------------


def run_words(info: RunInfo) -> Page:
    """The page without charts, which need the run's files."""
    sections = of_ensemble(info.ensemble)
    if info.policies:
        sections = (Section("Every number", (_every_number(info.policies),)), *sections)
    return Page(
        name=f"dsim: {info.trace.name}",
        question=info.question,
        answer=decided(answer(info), info.ensemble),
        alarms=tuple(alarms(info)),
        facts=tuple(_facts(info)),
        sections=sections,
        notes=(*info.notes, *_trace_notes(info)),
    )


def alarms(info: RunInfo) -> list[str]:
    """Interrupted, out of memory, unfinished, overloaded, rejected."""
    lines = []
    if info.interrupted:
        lines.append("INTERRUPTED: the run was stopped; these are the requests and steps until then")
    lines += [f"OUT OF MEMORY {line}" for line in info.shortages]
    for p in info.policies:
        if p.unfinished:
            lines.append(
                f"UNFINISHED {p.policy}: {p.unfinished:,} of {p.num_requests:,} requests were still in flight when the "
                "run ended; latencies cover only those that completed"
            )
        elif not p.stable:
            lines.append(
                f"OVERLOADED {p.policy}: the queue grows without bound (p99 wait {number(p.queue_time_ms.p99)} ms); "
                "its latencies say how long the trace is, not how the policy serves"
            )
    for p in info.policies:
        count = f"{p.rejected:,} of {p.num_requests:,} requests"
        if p.rejected and info.driver == "client":
            lines.append(f"FAILED {count} had no answer")
        elif p.rejected:
            lines.append(f"REJECTED {p.policy}: {count} can never fit the KV pool or the context limit")
    return lines


def answer(info: RunInfo) -> str:
    """By SLOs, else by the median time a token; empty if nothing completed."""
    remark = priced_apart(info.profiles[p.policy].implementation for p in info.policies if p.policy in info.profiles)
    shares = [(p.slo_attainment, p.policy) for p in info.policies if p.slo_attainment is not None]
    if not shares:
        times = sorted((p.norm_latency_ms.p50, p.policy) for p in info.policies if p.norm_latency_ms.p50 is not None)
        if not times:
            return ""
        medians = ", ".join(f"{policy} {number(ms)} ms" for ms, policy in times)
        return f"The median request's time a token: {medians}{remark}."
    shares.sort(key=lambda pair: -round(pair[0], 3))
    texts = [f"{100 * share:.1f} %" for share, _ in shares]
    if len(texts) > 1 and texts[0] == texts[-1]:
        return f"Every policy meets the SLOs for {texts[0]} of requests{remark}."
    sentences = [f"{policy} for {text}" for (_, policy), text in zip(shares, texts, strict=True)]
    sentences[0] = f"{shares[0][1]} meets the SLOs for {texts[0]} of requests"
    return f"{', '.join(sentences)}{remark}."


def _facts(info: RunInfo) -> list[tuple[str, str]]:
    """(name, value); without empty ones."""
    trace = info.trace
    traffic = [trace.name, f"{trace.num_requests:,} requests"]
    if trace.rate is not None and not info.closed_loop:
        traffic.append(f"{number(trace.rate)} req/s")
    facts = [("Trace", ", ".join([*traffic, f"arrivals: {trace.arrival}"]))]
    if info.live is not None:
        facts.append(("Measured on", _device(info.live, info.commits)))
    if info.client is not None:
        facts.append(("Measured by", info.client.tool))
    if info.as_logged is not None:
        facts.append(("As logged", f"{info.as_logged.log}, by a profile {info.as_logged.profile}"))
    profiles: dict[str, list[str]] = {}
    for policy, profile in info.profiles.items():
        about = ", ".join(filter(None, (profile.model, profile.device, profile.implementation)))
        text = f"{profile.name} ({about})"
        if profile.estimated and info.driver == "twin":
            text += ": estimated, not measured"
        profiles.setdefault(text, []).append(policy)
    facts += _shared("Profile", profiles)
    if info.profile is not None:
        facts.append(("Front end", front_end(info.profile.frontend)))
    commits: dict[str, list[str]] = {}
    for model in info.commit_models:
        commits.setdefault(_commit(model), []).append(model.policy)
    facts += _shared("Commit model", commits)
    facts += [("Serving", ", ".join(_serving(info))), ("SLOs", ", ".join(info.slos))]
    if info.cost is not None:
        facts.append(("Cost", _cost(info, info.cost)))
    return [(name, text) for name, text in facts if text]


def _shared(name: str, policies: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """A fact of all policies; if they differ, each with its policies."""
    if len(policies) < 2:
        return [(name, text) for text in policies]
    return [(name, f"{text} ({', '.join(names)})") for text, names in policies.items()]


def _serving(info: RunInfo) -> list[str]:
    parts = [counted(info.replicas, "replica")]
    if info.fleet is not None:
        parts[0] += " at the start" * bool(info.fleet.scaler)
        parts += _fleet(info.fleet)
    if info.router and info.replicas > 1:
        parts.append(f"router {info.router}")
    if info.driver != "client":
        parts.append(f"emits by {info.emit}")
    if info.seed is not None:
        parts.append(f"seed {info.seed}")
    return parts


def _fleet(fleet: FleetInfo) -> list[str]:
    parts = []
    if len(fleet.pools) > 1:
        parts.append(f"pools {' and '.join(f'{name} of {count}' for name, count in fleet.pools.items())}")
    if fleet.links:
        moved = sum(run.moved for run in fleet.runs)
        parts += [f"links {' and '.join(fleet.links)}", f"decider {fleet.decider}", f"{moved:,} requests moved"]
        shares = [run.sent for run in fleet.runs if run.sent is not None]
        parts += [f"{percent(share)} % of their keys and values travelled" for share in shares]
    if fleet.scaler:
        hours = [f"{number(run.replica_hours)} replica-hours" for run in fleet.runs if run.replica_hours]
        parts += [f"scaler {fleet.scaler}", f"{fleet.startup} s to start one", *hours]
    return parts


def front_end(seconds: float) -> str:
    if not seconds:
        return ""
    return f"{number(1e3 * seconds)} ms between a client and the engine, {OF_ARRIVALS}"


def _device(live: LiveInfo, commits: str) -> str:
    about = ", ".join(filter(None, (live.device, live.model, live.dtype)))
    if live.weights:
        about += f", weights {live.weights}"
    about += f"; {DECIDED[commits]}"
    if live.host_ms:
        host = ", ".join(f"{policy} {number(time)} ms" for policy, time in live.host_ms.items())
        about += f"; host time of a step in addition to the device's: {host}"
    return about


def _commit(model: CommitInfo) -> str:
    kind, length = "block", model.block_length
    if model.canvas_length is not None:
        kind, length = "canvas", model.canvas_length
    text = f"workload {model.workload}, {kind} {length}"
    if model.median_steps is not None:
        text += f", a law of {model.median_steps:.3g} forwards (median)"
    if model.threshold is not None:
        text += f", threshold {model.threshold:g}"
    if model.policy_threshold is not None:
        text += f" in place of the policy's {model.policy_threshold:g}"
    if model.extrapolated_from:
        text += f": extrapolated from {kind} {model.extrapolated_from}, nothing was fitted here"
    return text


def _cost(info: RunInfo, cost: FleetCost) -> str:
    """The fleet's, and that of a million good (without SLOs, completed) requests."""
    text = f"{cost.per_hour:,.2f} {cost.currency} an hour for {counted(cost.gpus, 'GPU')}"
    kind, rates = "completed", {p.policy: p.request_throughput for p in info.policies}
    if any(p.goodput is not None for p in info.policies):
        kind, rates = "good", {p.policy: p.goodput for p in info.policies}
    prices = [f"{policy} {cost.per_hour / (3600 * rate) * 1e6:,.2f}" for policy, rate in rates.items() if rate]
    if prices:
        text += f"; a million {kind} requests: {', '.join(prices)}"
    return text


def _trace_notes(info: RunInfo) -> list[str]:
    """Requests left out or changed, and how a run is judged."""
    trace = info.trace
    counts = {
        "skipped rows of the trace that could not be read": trace.skipped_bad,
        "dropped rows with output_length 0 (failed in the trace)": trace.failed_in_trace,
        "rows out of order, sorted by timestamp": trace.sorted_rows,
    }
    lines = [f"{text}: {count:,}" for text, count in counts.items() if count]
    without = [p.policy for p in info.policies if p.prefix_cache is None]
    if trace.hash_ids and without:
        lines.append(
            f"the trace has hash_ids, and {', '.join(without)} computes prompts whole: prefix_caching=true reuses "
            "prefixes"
        )
    lines += info.doubted
    if info.closed_loop:
        lines.append("closed loop: a request arrives when another ends, so the queue cannot grow without bound")
    return lines


def _every_number(policies: Sequence[Summary]) -> Table:
    """One row per metric, one column per policy."""
    return Table(
        head=("", "unit", *(policy.policy for policy in policies)),
        rows=tuple(compare(policies)),
        caption="Bold: the best of the policies, or within 0.5 % of it.",
        left=frozenset({0, 1}),
        coloured=2,
    )


# ---- page -----------------------------------------------------------------------------------------------------------


def run_html(run: Run) -> str:
    """The same run gives the same bytes."""
    return to_html(run_page(run))


def run_page(run: Run) -> Page:
    info, words = run.info, run_words(run.info)
    slos = [Slo.parse(text) for text in info.slos]
    requests = {policy: run.requests(policy) for policy in run.policies}
    edges = time_edges(run, list(requests.values()))
    judging = [slo for slo in slos if slo.stat is None and slo.slo_class is None]  # a run's folder lacks classes
    figures = [*_attainment(requests, judging, info), *_latency(requests, slos)]
    first = f"cdf-{next((slo.metric for slo in slos), 'e2el')}"
    if any(p.slo_attainment is not None and p.slo_attainment < 0.9995 for p in info.policies):
        first = "slo-time"
    figures.sort(key=lambda figure: figure.name != first)
    cautions = [("Doubted.", line) for line in info.doubted]
    if info.estimated:
        estimates = dict.fromkeys(profile.name for profile in info.profiles.values() if profile.estimated)
        cautions.insert(0, estimate(" and ".join(estimates)))
    sections = [
        Section("Latency and SLOs", tuple(figures[1:])),
        Section("Replicas", tuple(_over_time(info.fleet, float(edges[-1])))),
        Section("Timeline", tuple(_timeline(run, requests, edges))),
        *words.sections[1:],
        *(replace(section, fold=True) for section in words.sections[:1]),
    ]
    return replace(
        words,
        cautions=tuple(cautions),
        numbers=_numbers(info.policies),
        chart=next(iter(figures), None),
        policies=tuple(run.policies),
        sections=tuple(section for section in sections if section.blocks),
        notes=(*words.notes, *ALWAYS),
        command=info.command,
        version=info.dsim,
    )


def _numbers(policies: Sequence[Summary]) -> tuple[Number, ...]:
    """The first four of NUMBERS that the run has."""
    cells_by_label = {row.cells[0]: row.cells[1:] for row in compare(policies)}
    tiles = []
    for label, about in NUMBERS.items():
        if label in cells_by_label:
            unit, *cells = cells_by_label[label]
            colours = [*range(len(policies))] * (len(policies) > 1) or [None]
            values = tuple((i, f"{cell} {unit}") for i, cell in zip(colours, cells[:4], strict=False))
            tiles.append(Number(label, values, about))
    return tuple(tiles[:4])


def _attainment(requests: Mapping[str, Columns], judging: Sequence[Slo], info: RunInfo) -> list[Figure]:
    """Shares of arrivals that meet all SLOs, over time."""
    if not judging:
        return []
    chart = Chart("arrival time (s)", "share of arrivals that are good", percent=True)
    worst = 1.0
    for i, (policy, columns) in enumerate(requests.items()):
        good = good_requests(columns, judging)
        assert good is not None
        x, y = share_by_arrival(columns["arrival"], good)
        chart.line(x, y, policy, i, hover="%{y:.1%} of arrivals around %{x:.0f} s")
        worst = min(worst, float(y.min(initial=1.0)))
    if worst > 0.8:  # the top only
        chart.y |= {"range": [worst - 0.02, 1.002], "tickformat": ".1~%"}
    caption = "The share of each window's arrivals that meet every SLO. Rejected and unfinished requests miss them."
    if len(judging) < len(info.slos):
        caption += " SLOs of a class or of a run's statistic are in the table."
    return [Figure("slo-time", "SLO attainment by arrival time", caption, chart, time=True)]


def _latency(requests: Mapping[str, Columns], slos: Sequence[Slo]) -> list[Figure]:
    """Distributions, with the SLOs' bounds."""
    values = [(policy, latencies(columns)) for policy, columns in requests.items()]
    figures = []
    for name in led_by("ttft", "e2el"):
        metric = METRICS[name]
        if name not in LATENCIES or not metric.title:
            continue
        unit, scale = metric.axis, 1e3 * metric.scale
        lines = [(policy, *distribution(of_policy[name] * scale)) for policy, of_policy in values]
        bounds = [slo for slo in slos if slo.metric == name]
        # Outliers would flatten the curves.
        ends = [float(np.interp(0.995, y, x)) for _, x, y in lines if len(x)]
        if not ends:
            continue
        chart = Chart(f"{name} ({unit})", "share of completed requests", percent=True)
        for i, (policy, x, y) in enumerate(lines):
            chart.line(x, y, policy, i, hover=f"%{{y:.1%}} within %{{x:.3~g}} {unit}")
        chart.x["range"] = [0.0, 1.1 * max([*ends, *(slo.bound * scale for slo in bounds)]) or 1.0]
        for slo in bounds:
            chart.vline(slo.bound * scale, str(slo))
        caption = "Up and to the left is better. Dashed: an SLO's bound. Requests without the metric are left out."
        figures.append(Figure(f"cdf-{name}", metric.title, caption, chart))
    return figures


def _timeline(run: Run, requests: Mapping[str, Columns], edges: Floats) -> list[Figure]:
    """Means over time of the queue and the steps."""
    figures = []
    for name, title, caption, axis, share in PANELS:
        chart = Chart("time (s)", axis, percent=share)
        chart.y.pop("range", None)  # the largest value sets it
        chart.x["range"] = [0.0, float(edges[-1])]
        figures.append(Figure(name, title, caption, chart, time=True))
    for i, summary in enumerate(run.info.policies):
        pages = (summary.kv_pages or 0) / max(1, run.info.replicas)
        means = step_means(run, summary.policy, edges, pages) | {"queue": waiting(requests[summary.policy], edges)}
        for figure in figures:
            hover = "%{y:,.3~g} at %{x:.0f} s"
            figure.chart.line((edges[:-1] + edges[1:]) / 2, means[figure.name], summary.policy, i, hover=hover)
    # A client's file has no queue or steps.
    return [figure for figure in figures if any(not np.isnan(line["y"]).all() for line in figure.chart.data)]


def _over_time(fleet: FleetInfo | None, end: float) -> list[Figure]:
    """Scaled pools."""
    if fleet is None:
        return []
    chart = Chart("time (s)", "replicas", legend=True)
    lines: dict[str, list[tuple[float, int, int]]] = {}
    for run in fleet.runs:
        for time, pool, serving, paid in run.changes:
            lines.setdefault(f"{run.policy}, {pool}", []).append((time, serving, paid))
    for i, (name, changes) in enumerate(lines.items()):
        times, *counts = ([*column, column[-1]] for column in zip(*changes, strict=True))
        times[-1] = max(end, times[-1])
        for replicas, dash, state in zip(counts, ("solid", "dot"), ("taking requests", "paid for"), strict=True):
            line = {"color": colour(i), "width": 2, "dash": dash, "shape": "hv"}
            chart.line(times, replicas, f"{name}: {state}", i, hover="%{y} at %{x:.1f} s", line=line)
    caption = (
        "Replicas that take requests (solid) and replicas that are paid for (dotted). Replicas that start or drain "
        "take no request and are paid for: from the decision to start one until its last request has ended."
    )
    return [Figure("replicas", "Replicas over time", caption, chart, time=True)] * bool(lines)
