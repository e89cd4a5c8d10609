"""The result of `dsim profile`: a profile, what it was fitted to, and their page."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..engine.latency import POWERS_TO
from ..profiler.canvas_law import mean_forwards
from ..profiler.fit import predict, split
from ..profiler.profile import CommitFit, Profile, gb
from ..profiler.roofline import PAGE, Sheet
from ..profiler.samples import FEATURES, POWERS, Floats, points
from .chart import COLOURS, INK, Chart, logarithmic
from .page import ESTIMATED, Figure, Page, Section, Table, table
from .result import NOT_STORED, Result
from .table import counted, number

if TYPE_CHECKING:
    import pandas as pd

    from ..profiler.samples import Samples
else:
    Samples = Any  # its arrays are not read from JSON

HEIGHT = 340  # pixels
MOST_KNOTS = 12  # in a sentence
Facts = list[tuple[str, str]]


@dataclass(frozen=True, repr=False)
class Profiled(Result):
    """A profile and, in this process, the data of its fit."""

    schema: ClassVar[str] = "dsim-profiled"

    profile: Profile
    sheet: Sheet | None = None  # of a roofline
    command: str = ""
    evidence: "Samples | None" = field(default=None, metadata=NOT_STORED)

    @property
    def doubts(self) -> list[str]:
        """Why not to trust the profile, a line each."""
        return self.profile.doubts

    def page(self) -> Page:
        """Verdict, fitted curves over points, residuals."""
        profile, evidence = self.profile, self.evidence
        figures = [] if evidence is None else _of_steps(profile, evidence)
        tables = [_cache_overhead(profile)] if profile.latency.cache_overhead else []
        tables += [_predictions(fit) for fit in profile.commit_fits]
        sections = [
            Section("What a step costs", tuple(figures[1:])),
            Section("In numbers", (*tables, _provenance(profile))),
        ]
        reason = f"{profile.description}: no device ran these steps."
        return Page(
            name=f"dsim profile: {profile.name}",
            question="What does a step cost, and what does it yield?",
            answer=_answer(profile),
            alarms=tuple(f"DOUBTED {line}" for line in profile.doubts),
            cautions=((ESTIMATED, reason),) if profile.is_estimate else (),
            chart=figures[0] if figures else None,
            facts=tuple(_of_fit(profile) if self.sheet is None else _of_sheet(profile, self.sheet)),
            sections=tuple(section for section in sections if section.blocks),
            notes=tuple(f"Source: {source}" for source in profile.provenance.sources),
            command=self.command,
            version=profile.provenance.tool_version,
        )

    def to_frame(self) -> "pd.DataFrame":
        """One row per measured step: features, latency, device time and fitted latency (s)."""
        import pandas as pd

        if self.evidence is None:
            return pd.DataFrame(columns=[*FEATURES, "latency", "device", "fitted"])
        steps = self.evidence
        columns: dict[str, Any] = dict(zip(FEATURES, steps.features.T, strict=True))
        fitted = predict(self.profile.latency, steps.features)
        return pd.DataFrame({**columns, "latency": steps.latency, "device": steps.device, "fitted": fitted})


def _answer(profile: Profile) -> str:
    fit, judged = profile.fit, profile.fit.held_out
    text = f"{profile.description}: {profile.verdict}."
    if fit.num_points is None:
        return text
    text += f" {'Not valid' if profile.doubts else 'Valid'}: {fit.num_points} step shapes fitted"
    if judged is not None:
        text += (
            f"; {judged.num_points} held out are predicted to {judged.median:.1%} (median) and {judged.p95:.1%} "
            "(95th percentile)"
        )
    return f"{text}."


def _of_sheet(profile: Profile, sheet: Sheet) -> Facts:
    memory = profile.memory
    bound = "kernel launches" if sheet.bound_by_launch else "reading the weights"
    shared = ", which layers with a window share" if memory.window_bytes_per_token else ""
    return [
        ("knee", f"{sheet.knee} tokens a step: reading the weights takes as long as multiplying with them"),
        ("floor", f"{sheet.floor * 1e3:.2g} ms a step of {counted(sheet.floor_tokens, 'token')}, set by {bound}"),
        ("slope", f"{profile.latency.slope * 1e6:.2g} us a token beyond the knee, before attention and LM head"),
        ("memory", f"weights take {gb(memory.weight_bytes)} of {gb(memory.capacity_bytes)}"),
        (
            "KV pages",
            f"{sheet.num_pages} of {PAGE} tokens{shared}, at a batch of {sheet.max_batch} and prefills of "
            f"{sheet.max_prefill_tokens} tokens",
        ),
        ("commits", ", ".join(profile.workloads) or _no_commits(profile)),
        ("trust", f"latencies to about ±{profile.fit.relative_uncertainty:.0%}"),
    ]


def _of_fit(profile: Profile) -> Facts:
    fit, latency = profile.fit, profile.latency
    knots = [f"{seconds * 1e3:.3g} ms at {tokens:.0f}" for tokens, seconds in latency.knots]
    if len(knots) > MOST_KNOTS:
        knots[1:-1] = [f"{len(knots) - 2} between"]
    facts = [
        ("table", f"{', '.join(knots)} tokens, then {number(latency.slope * 1e6)} us a token"),
    ]
    facts += [("judged by", str(error)) for error in fit.judged_by]
    if latency.launch:
        facts.append(("floor", f"{latency.launch * 1e3:.3g} ms a step to launch"))
    if latency.graph_tokens:
        padded = f"decode steps of at most {latency.graph_tokens} tokens are padded to 1, 2, 4 ... 256, 512, 768 ..."
        facts.append(("graphs", f"{padded} and wait for no launch"))
    if fit.unidentified:
        facts.append(("unknown", f"{', '.join(fit.unidentified)}: these steps cannot identify them; stored as 0"))
    for judged in profile.commit_fits:
        mean = judged.predictions[0]
        facts.append(
            (
                "commits",
                f"{judged.workload} at {judged.threshold:g}: {mean.measured:.3g} tokens a step held out, "
                f"{mean.predicted:.3g} predicted ({mean.error:+.1%})",
            )
        )
    for law in profile.canvas_laws:
        shape = f"log-normal of median {law.median:.3g}, each {law.drift:.3g} times the one before"
        if law.histogram:
            shape = f"histogram of mean {mean_forwards(law):.3g} and median {law.median:.3g}, with shares as counted"
        spreads = f"spread {law.request_spread:.2g} between requests and {law.canvas_spread:.2g} within"
        counts = f"{law.least} to {law.most} steps a canvas of {law.canvas_length}"
        facts.append(("canvases", f"{law.workload}: {counts}, {shape}; {spreads} ({law.source})"))
    if not profile.commits and not profile.canvas_laws:
        facts.append(("commits", _no_commits(profile)))
    front_end = f"{profile.frontend * 1e3:.3g} ms between a client and the engine"
    facts.append(("front end", front_end if profile.frontend else "not measured: 0"))
    return facts


def _no_commits(profile: Profile) -> str:
    if profile.family == "full-sequence":
        return "none: policies commit fixed numbers (strategy=low_confidence_static)"
    return "none: it can run `ar` only"


def _of_steps(profile: Profile, evidence: Samples) -> list[Figure]:
    every = points(evidence)
    judging = split(every)
    predicted = predict(profile.latency, every.features)
    errors = predicted / every.latency - 1.0
    prefill = every.column("prefill_tokens") > 0
    curves = _chart("query tokens a step", "ms")
    residuals = _chart("predicted, ms", "predicted / measured - 1")
    for name, of_kind, colour in (("decode", ~prefill, COLOURS[0]), ("prefill", prefill, COLOURS[1])):
        for rows, symbol, label in ((~judging, "circle", name), (judging, "circle-open", f"{name}, held out")):
            which = of_kind & rows
            if not which.any():
                continue
            marker = {"color": colour, "symbol": symbol, "size": 7, "opacity": 0.75}
            common = {"mode": "markers", "name": label, "marker": marker}
            curves.add(
                "scatter", x=every.column("tokens")[which], y=1e3 * every.latency[which], **common,
                hovertemplate="%{x} tokens: %{y:.3~g} ms",
            )  # fmt: skip
            residuals.add(
                "scatter", x=1e3 * predicted[which], y=errors[which], **common,
                hovertemplate="%{x:.3~g} ms: %{y:+.1%}",
            )  # fmt: skip
    keys = every.column("sum_kv")[~prefill] / every.column("batch")[~prefill]
    tokens = _drawn_at(every.column("tokens"), profile.latency.graph_tokens)
    for i, context in enumerate(np.unique(np.quantile(keys, (0.1, 0.5, 0.9)).round()) if len(keys) else []):
        curves.add(
            "scatter", x=tokens, y=1e3 * predict(profile.latency, _decode(profile, tokens, float(context))),
            mode="lines", line={"color": INK, "width": 1.6, "dash": ("solid", "dash", "dot")[i]},
            name=f"fit, {context:.0f} keys a row", hovertemplate="%{x:.0f} tokens: %{y:.3~g} ms",
        )  # fmt: skip
    for axis, values in ((curves.x, every.column("tokens")), (curves.y, every.latency), (residuals.x, predicted)):
        axis["type"] = "log"
        if values.max() > 10 * values.min():  # else Plotly's ticks are readable
            logarithmic(axis)
    residuals.hline(0.0, dash="solid")
    if profile.fit.held_out is not None:
        for sign in (-1, 1):
            residuals.hline(sign * profile.fit.held_out.p95)
    residuals.y["tickformat"] = "+.0%"
    about = "Each point is the median of its repeats; hollow ones were held out. Lines: rows that compute whole blocks."
    dashed = "Dashed: the 95th percentile of the held-out points' error."
    return [
        Figure("curve", "Latency against tokens", about, curves),
        Figure("residuals", "Residuals", dashed, residuals),
    ]


def _drawn_at(tokens: Floats, graph_tokens: int) -> Floats:
    """Where to draw the fit: the measured range, both sides of each CUDA graph bucket's edge."""
    low, high = tokens.min(), tokens.max()
    edges = np.concatenate([POWERS, np.arange(2.0 * POWERS_TO, graph_tokens, POWERS_TO), [graph_tokens]])
    edges = edges[edges <= graph_tokens]
    every = np.unique(np.concatenate([np.geomspace(low, high, 120).round(), edges, edges + 1]))
    return np.asarray(every[(every >= low) & (every <= high)], np.float64)


def _decode(profile: Profile, tokens: Floats, keys: float) -> Floats:
    """Steps whose rows compute a block (the last may be partial) and see `keys` keys."""
    block = max((m.block_length for m in profile.commits), default=1)
    rows = np.ceil(tokens / block)
    columns = {
        "tokens": tokens, "sum_q_kv": tokens * keys, "sum_kv": rows * keys, "head_rows": tokens,
        "sampled_rows": tokens, "batch": rows, "num_forwards": np.ones_like(rows),
    }  # fmt: skip
    return np.stack([columns.get(name, np.zeros_like(rows)) for name in FEATURES], axis=1)


def _chart(x: str, y: str) -> Chart:
    chart = Chart(x, y, height=HEIGHT, legend=True, from_zero=False)
    chart.layout["legend"] = {"orientation": "h", "y": -0.3}
    return chart


def _cache_overhead(profile: Profile) -> Table:
    rows = [
        [cost.cache, cost.phase, f"{cost.row * 1e3:.3g}", f"{cost.token * 1e6:.3g}"]
        for cost in profile.latency.cache_overhead
    ]
    caption = "The cost of a request in this phase beyond the coefficients above: median of measured less predicted."
    head = ("cache", "phase", "ms a row", "us a token of its prompt and output")
    title = "Overhead of full-sequence caches"
    return table(head, rows, title=title, caption=caption, left=frozenset({0, 1}))


def _predictions(fit: CommitFit) -> Table:
    rows = [[p.name, f"{p.measured:.3g}", f"{p.predicted:.3g}", f"{p.error:+.1%}"] for p in fit.predictions]
    title = f"{fit.workload} at threshold {fit.threshold:g}: held-out requests"
    caption = f"{fit.num_requests} requests fitted ({fit.num_steps} steps), {fit.num_held_out} held out."
    return table(("", "measured", "predicted", "error"), rows, title=title, caption=caption, fold=True)


def _provenance(profile: Profile) -> Table:
    origin = profile.provenance
    facts = {
        "profile": profile.name, "model": profile.model.name, "device": profile.device.name,
        "implementation": profile.implementation, "date": origin.date, "torch": origin.torch, "driver": origin.driver,
        "clocks": origin.clocks, "prompts": origin.prompts, **origin.settings,
    }  # fmt: skip
    rows = [[name.replace("_", " "), str(value)] for name, value in facts.items() if value]
    return table(("", ""), rows, title="Origin", left=frozenset({0, 1}), fold=True)
