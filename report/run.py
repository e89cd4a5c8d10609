"""A run: its result, its text and its page."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from ..engine.journal import STATUSES
from ..results.curves import distribution, share_by_arrival, step_means, time_edges, waiting
from ..results.metrics import LATENCIES, METRICS, Columns, Floats, Summary, flat, good_requests, latencies, led_by
from ..results.parts import PARTS
from ..results.run import Run
from ..results.run_info import CommitInfo, FleetInfo, FleetRun, LiveInfo, MeasuredLog, RunInfo
from ..results.slo import Slo
from .chart import Chart, colour
from .ensemble import decided, of_ensemble
from .html import to_html
from .page import Block, Figure, Number, Page, Row, Section, Table, estimate, priced_apart, table
from .result import NOT_STORED, Result
from .table import MetricRow, compare, counted, number, percent

if TYPE_CHECKING:
    import pandas as pd

TIMES = ("ttft", "e2el")  # of a trace's log
SLOWEST = 6  # requests of a policy
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
    details, beside = _beside(info.measured)
    return Page(
        name=f"dsim: {info.trace.name}",
        question=info.question,
        answer=decided(answer(info), info.ensemble),
        details=details,
        alarms=tuple(alarms(info)),
        facts=tuple(_facts(info)),
        sections=(
            *((Section("Every number", (_every_number(info.policies),)),) if info.policies else ()),
            *beside,
            *of_ensemble(info.ensemble),
        ),
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
            wait = p.queue_time_ms.p99
            how_long = "" if wait is None else f" (p99 wait {number(wait / 1e3)} s)"
            lines.append(
                f"OVERLOADED {p.policy}: the queue grows without bound{how_long}; its latencies say how long the trace "
                "is, not how the policy serves"
            )
    rejecting = {p.policy: f"{p.rejected:,} of {p.num_requests:,} requests" for p in info.policies if p.rejected}
    if info.driver == "client":
        return lines + [f"FAILED {count} had no answer" for count in rejecting.values()]
    if len(rejecting) == len(info.policies) > 1 and len(set(rejecting.values())) == 1:
        rejecting = {"by every policy": rejecting.popitem()[1]}
    return lines + [
        f"REJECTED {name}: {count} can never fit the KV pool or the context limit" for name, count in rejecting.items()
    ]


def answer(info: RunInfo) -> str:
    """By SLOs, else by the median time a token; empty if nothing completed."""
    remark = priced_apart(info.profiles[p.policy].implementation for p in info.policies if p.policy in info.profiles)
    shares = [(p.slo_attainment, p.policy) for p in info.policies if p.slo_attainment is not None]
    shares.sort(key=lambda pair: -round(pair[0], 3))
    texts = [f"{100 * share:.1f} %" for share, _ in shares]
    if not shares:
        times = sorted((p.norm_latency_ms.p50, p.policy) for p in info.policies if p.norm_latency_ms.p50 is not None)
        listed = ", ".join(f"{policy} {number(ms)} ms" for ms, policy in times)
        return f"The median request's time a token: {listed}{remark}." if times else ""
    if len(shares) > 1 and texts[0] == texts[-1]:
        return f"Every policy meets the SLOs for {texts[0]} of requests{remark}."
    words = [f"{shares[0][1]} meets the SLOs for {texts[0]} of requests"]
    words += [f"{policy} for {text}" for (_, policy), text in zip(shares[1:], texts[1:], strict=True)]
    return f"{', '.join(words)}{remark}."


def _facts(info: RunInfo) -> list[tuple[str, str]]:
    """(name, value)."""
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
    several = len({profile.name for profile in info.profiles.values()}) > 1
    profiles = {}
    for policy, profile in info.profiles.items():
        estimated = ": estimated, not measured" if profile.estimated and info.driver == "twin" else ""
        about = ", ".join(filter(None, (profile.model, profile.device, profile.implementation)))
        profiles[f"Profile of {policy}" if several else "Profile"] = f"{profile.name} ({about}){estimated}"
    facts += profiles.items()
    if info.profile is not None and info.profile.frontend:
        facts.append(("Front end", front_end(info.profile.frontend)))
    facts += [("Commit model", text) for text in _commits(info.commit_models)]
    facts.append(("Serving", ", ".join(_serving(info))))
    if info.slos:
        facts.append(("SLOs", ", ".join(info.slos)))
    if info.cost is not None:
        facts.append(("Cost", _cost(info)))
    return facts


def _serving(info: RunInfo) -> list[str]:
    parts = [counted(info.replicas, "replica")]
    if info.fleet is not None:
        parts[0] += " at the start" if info.fleet.scaler else ""
        parts += _fleet(info.fleet)
    if info.router and info.replicas > 1:
        parts.append(f"router {info.router}")
    if info.driver != "client":
        parts.append(f"emits by {info.emit}")
    return parts if info.seed is None else [*parts, f"seed {info.seed}"]


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
    return f"{number(1e3 * seconds)} ms between a client and the engine, {OF_ARRIVALS}" if seconds else ""


def _device(live: LiveInfo, commits: str) -> str:
    about = ", ".join(filter(None, (live.device, live.model, live.dtype)))
    if live.weights:
        about += f", weights {live.weights}"
    host = ", ".join(f"{policy} {number(time)} ms" for policy, time in live.host_ms.items())
    return f"{about}; {DECIDED[commits]}" + (
        f"; host time of a step in addition to the device's: {host}" if host else ""
    )


def _commits(models: Iterable[CommitInfo]) -> list[str]:
    """Each once; with policies if they differ."""
    policies: dict[str, list[str]] = {}
    for model in models:
        policies.setdefault(_commit(model), []).append(model.policy)
    if len(policies) < 2:
        return list(policies)
    return [f"{text} ({', '.join(names)})" for text, names in policies.items()]


def _commit(model: CommitInfo) -> str:
    kind = "block" if model.canvas_length is None else "canvas"
    text = f"workload {model.workload}, {kind} {model.block_length or model.canvas_length}"
    if model.median_steps is not None:
        text += f", a law of {model.median_steps:.3g} forwards (median)"
    if model.threshold is not None:
        text += f", threshold {model.threshold:g}"
    if model.policy_threshold is not None:
        text += f" in place of the policy's {model.policy_threshold:g}"
    fitted = model.extrapolated_from
    return text + (f": extrapolated from {kind} {fitted}, nothing was fitted here" if fitted else "")


def _cost(info: RunInfo) -> str:
    """The fleet's, and that of a million good (without SLOs, completed) requests."""
    assert info.cost is not None
    hourly, currency = info.cost.per_hour, info.cost.currency
    text = f"{hourly:,.2f} {currency} an hour for {counted(info.cost.gpus, 'GPU')}"
    good = any(p.goodput is not None for p in info.policies)
    rates = {p.policy: p.goodput if good else p.request_throughput for p in info.policies}
    prices = [f"{policy} {hourly / (3600 * rate) * 1e6:,.2f}" for policy, rate in rates.items() if rate]
    if not prices:
        return text
    return f"{text}; a million {'good' if good else 'completed'} requests: {', '.join(prices)}"


def _trace_notes(info: RunInfo) -> list[str]:
    """Requests left out or changed, and how a run is judged."""
    trace = info.trace
    notes = [
        (trace.skipped_bad, "of the trace could not be read and {were} skipped"),
        (trace.failed_in_trace, "with output_length 0 (failed in the trace) {were} dropped"),
        (trace.sorted_rows, "{were} out of order and {were} sorted by timestamp"),
    ]
    lines = []
    for count, note in notes:
        if count:
            lines.append(f"{counted(count, 'row')} {note.format(were='was' if count == 1 else 'were')}")
    without = [p.policy for p in info.policies if p.prefix_cache is None]
    if trace.hash_ids and (without or not info.policies):
        subject = f"{', '.join(without)} {'reuse' if len(without) > 1 else 'reuses'} no"
        if len(without) == len(info.policies):
            subject = "no policy reuses"
        lines.append(
            f"the trace has hash_ids, and {subject} prefixes (prefix_caching=true does): prompts are computed whole"
        )
    lines += info.doubted
    if info.closed_loop:
        lines.append("closed loop: a request arrives when another ends, so the queue cannot grow without bound")
    return lines


def _every_number(policies: Sequence[Summary]) -> Table:
    """One row per metric, one column per policy; transposed on a narrow terminal."""
    names, rows = [policy.policy for policy in policies], compare(policies)
    brief = [row for row in rows if row.brief]
    turned = []
    for i, name in enumerate(names):
        best = frozenset(k + 1 for k, row in enumerate(brief) if i in row.best)
        turned.append(Row((name, *(row.cells[i] for row in brief)), best))
    heads = tuple(f"{row.label}\n{row.unit}" for row in brief)
    return Table(
        head=("", "unit", *names),
        rows=tuple(_down(row) for row in rows),
        caption="Bold: the best of the policies, or within 0.5 % of it.",
        left=frozenset({0, 1}),
        coloured=2,
        turned=Table(head=("policy", *heads), rows=tuple(turned), spare=heads[::-1]),
    )


def _down(row: MetricRow) -> Row:
    best = frozenset(i + 2 for i in row.best)
    return Row((row.label, row.unit, *row.cells), best, row.group, row.about)


# ---- a trace's own log ----------------------------------------------------------------------------------------------


def log_words(measured: MeasuredLog) -> str:
    """The times that a trace's log measured."""
    parts = []
    for name in TIMES:
        times = getattr(measured.summary, f"{name}_ms")
        if times.p50 is not None:
            parts.append(f"{name} p50 {number(times.p50)} ms, p99 {number(times.p99)} ms")
    rate = "" if measured.rate is None else f" at {number(measured.rate)} req/s"
    text = f"The log measured{rate} {'; '.join(parts)}"
    attained = measured.summary.slo_attainment
    if attained is not None:
        failed = f", {measured.num_failed:,} of which failed" if measured.num_failed else ""
        num = measured.num_timed + measured.num_failed
        text += f" and met the SLOs for {percent(attained)} % of {counted(num, 'request')}{failed}"
    return text


def _beside(measured: MeasuredLog | None) -> tuple[tuple[str, ...], tuple[Section, ...]]:
    """Each policy's largest difference from the log, in a sentence, and a table of all."""
    if measured is None:
        return (), ()
    policies = dict.fromkeys(policy for row in measured.beside for policy in row.measured_predicted_ms)
    if not policies:
        return (f"{log_words(measured)}. This traffic is not the log's: its times do not test the prediction.",), ()
    rows, furthest = [], dict.fromkeys(policies, (0.0, ""))
    for row in measured.beside:
        cells, name = dict.fromkeys(policies, "–"), f"{row.metric} {row.stat}"
        for policy, (log, predicted) in row.measured_predicted_ms.items():
            difference = predicted / log - 1
            cells[policy] = f"{number(predicted)} ms ({100 * difference:+.1f} %)"
            furthest[policy] = max(furthest[policy], (difference, name), key=lambda pair: abs(pair[0]))
        rows.append((name, f"{number(log)} ms", *cells.values()))
    gaps = ", ".join(f"{policy} {100 * difference:+.1f} % ({name})" for policy, (difference, name) in furthest.items())
    counts = ", ".join({row.metric: f"{row.metric} of {row.num_timed:,}" for row in measured.beside}.values())
    about = f"Both sides: {counts} of {measured.num_requests:,} requests, which have it in the log."
    sentence = (
        f"{log_words(measured)}. Largest difference from it for the same requests: {gaps}; the prediction's error "
        "where the log's server ran that policy."
    )
    beside = table(("", "measured", *policies), rows, caption=about)
    return (sentence,), (Section("Measured beside predicted", (beside,), spoken=True),)


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
    missed = any((p.slo_attainment or 0.0) < 0.9995 for p in info.policies if p.slo_attainment is not None)
    first = "slo-time" if missed else f"cdf-{slos[0].metric if slos else 'e2el'}"
    figures.sort(key=lambda figure: figure.name != first)
    estimates = dict.fromkeys(profile.name for profile in info.profiles.values() if profile.estimated)
    numbers, *remainder = words.sections or (Section("Every number", ()),)
    sections = [
        Section("Latency and SLOs", tuple(figures[1:])),
        _replicas(info.fleet, float(edges[-1])),
        Section("Timeline", tuple(_timeline(run, requests, edges))),
        Section("Slowest requests", _slowest(requests, judging)),
        *remainder,
        replace(numbers, fold=numbers.title),
    ]
    return replace(
        words,
        cautions=(
            *([estimate(" and ".join(estimates))] if info.estimated else []),
            *(("Doubted.", line) for line in info.doubted),
        ),
        numbers=_numbers(info.policies),
        chart=figures[0] if figures else None,
        policies=tuple(run.policies),
        sections=tuple(section for section in sections if section.blocks),
        notes=(*words.notes, *ALWAYS),
        command=info.command,
        version=info.dsim,
    )


def _numbers(policies: Sequence[Summary]) -> tuple[Number, ...]:
    """The first four of NUMBERS that the run has."""
    rows = {row.label: row for row in compare(policies)}
    tiles = []
    for label, about in NUMBERS.items():
        if row := rows.get(label):
            cells = [(i if len(policies) > 1 else None, f"{cell} {row.unit}") for i, cell in enumerate(row.cells[:4])]
            tiles.append(Number(label, tuple(cells), about))
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
        drawn = [(x, y) for _, x, y in lines if len(x)]
        if not drawn:
            continue
        bounds = [slo for slo in slos if slo.metric == name]
        chart = Chart(f"{name} ({unit})", "share of completed requests", percent=True)
        for i, (policy, x, y) in enumerate(lines):
            chart.line(x, y, policy, i, hover=f"%{{y:.1%}} within %{{x:.3~g}} {unit}")
        # Outliers would flatten the curves.
        end = max([float(np.interp(0.995, y, x)) for x, y in drawn] + [slo.bound * scale for slo in bounds])
        chart.x["range"] = [0.0, 1.1 * end or 1.0]
        for slo in bounds:
            chart.vline(slo.bound * scale, str(slo))
        caption = "Up and to the left is better." + (" Dashed: the SLO's bound." if bounds else "")
        if name == "tpot_chunk":
            caption += " Requests with a single emission have none."
        figures.append(Figure(f"cdf-{name}", metric.title, caption, chart))
    return figures


def _timeline(run: Run, requests: Mapping[str, Columns], edges: Floats) -> list[Figure]:
    """Means over time of the queue and the steps."""
    charts = {name: Chart("time (s)", axis, percent=share) for name, _, _, axis, share in PANELS}
    middle = (edges[:-1] + edges[1:]) / 2
    replicas = max(1, run.info.replicas)
    for i, summary in enumerate(run.info.policies):
        means = step_means(run, summary.policy, edges, (summary.kv_pages or 0) / replicas)
        means["queue"] = waiting(requests[summary.policy], edges)
        for name, _, _, _, share in PANELS:
            hover = "%{y:.1%} at %{x:.0f} s" if share else "%{y:,.1f} at %{x:.0f} s"
            charts[name].line(middle, means[name], summary.policy, i, hover=hover)
    figures = []
    for name, title, caption, _, _ in PANELS:
        charts[name].y.pop("range", None)  # the largest value sets it
        # A client's file has no queue or steps.
        if any(not np.isnan(line["y"]).all() for line in charts[name].data):
            charts[name].x["range"] = [0.0, float(edges[-1])]
            figures.append(Figure(name, title, caption, charts[name], time=True))
    return figures


def _slowest(requests: Mapping[str, Columns], judging: Sequence[Slo]) -> tuple[Table, ...]:
    """Requests that miss the SLOs most, or slowest."""
    rows = []
    for policy, columns in requests.items():
        times = latencies(columns)
        worst = times["e2el"]
        if judging:
            excess = np.stack([np.nan_to_num(times[slo.metric] / slo.bound, nan=-1.0) for slo in judging])
            worst = np.where(np.isnan(worst), math.nan, excess.max(axis=0))
        order = np.argsort(-worst, kind="stable")[:SLOWEST]
        for i in order[~np.isnan(worst[order])]:
            rows.append([
                f"#{columns['request'][i]}", policy, f"{columns['arrival'][i]:,.1f} s",
                f"{columns['input_length'][i]:,}", f"{columns['num_tokens'][i]:,}",
                *(f"{number(times[name][i])} s" for name in ("queue_time", "ttft", "e2el")),
                f"{number(1e3 * times['norm_latency'][i])} ms", f"{columns['num_preemptions'][i]:,}",
            ])  # fmt: skip
    criterion = f"that miss {' and '.join(map(str, judging))} by most" if judging else "that took longest"
    head = ["request", "policy", "arrived", "prompt", "tokens", "queued", "ttft", "e2el", "a token", "preempted"]
    about = f"For each policy the requests {criterion}."
    return (table(head, rows, title="The slowest requests", caption=about, left=frozenset({0, 1})),) if rows else ()


def _replicas(fleet: FleetInfo | None, end: float) -> Section:
    """Parts of moved requests' times, and scaled pools over time."""
    blocks: list[Block] = []
    runs = () if fleet is None else fleet.runs
    moved = [(f"{run.moved:,}", *(number(1e3 * run.parts[name]) for name in PARTS)) for run in runs if run.parts]
    if moved:
        blocks.append(
            table(
                ("moved", *(f"{name.replace('_', ' ')} (ms)" for name in PARTS)), moved,
                caption="Requests that a prefill pool prefilled, and the mean times of a finished request: to its "
                "first tokens (up to first block), and the rest. Links: keys and values travel after the prefill, once "
                "pages are reserved.",
            )
        )  # fmt: skip
    scaled = [run for run in runs if run.changes]
    if scaled:
        blocks.append(_over_time(scaled, end))
    return Section("Replicas", tuple(blocks))


def _over_time(runs: Sequence[FleetRun], end: float) -> Figure:
    chart = Chart("time (s)", "replicas", legend=True)
    lines = [(run, pool) for run in runs for pool in dict.fromkeys(change[1] for change in run.changes)]
    for i, (run, pool) in enumerate(lines):
        changes = [change for change in run.changes if change[1] == pool]
        times = [change[0] for change in changes] + [max(end, changes[-1][0])]
        name = f"{run.policy}, {pool}" if len(lines) > len(runs) else run.policy
        for column, dash, state in ((2, "solid", "taking requests"), (3, "dot", "paid for")):
            replicas = [change[column] for change in changes]
            chart.line(
                times, [*replicas, replicas[-1]], f"{name}: {state}", i, hover="%{y} at %{x:.1f} s",
                line={"color": colour(i), "width": 2, "dash": dash, "shape": "hv"},
            )  # fmt: skip
    caption = (
        "Replicas that take requests (solid) and replicas that are paid for (dotted). Replicas that start or drain "
        "take no request and are paid for: from the decision to start one until its last request has ended."
    )
    return Figure("replicas", "Replicas over time", caption, chart, time=True)
