"""The result of `dsim profile`: a profile, what it was fitted to, and their page."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..profiler.canvas_law import mean_forwards
from ..profiler.fit import predict, split
from ..profiler.profile import CommitFit, Profile, gb
from ..profiler.roofline import PAGE, Sheet
from ..profiler.samples import FEATURES, Floats, points
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
        """Verdict, and the fitted curve over the points."""
        profile = self.profile
        tables = tuple(_predictions(fit) for fit in profile.commit_fits)
        cautions, facts, chart = [], _of_fit(profile), None
        if profile.is_estimate:
            cautions.append((ESTIMATED, f"{profile.description}: no device ran these steps."))
        if self.sheet is not None:
            facts = _of_sheet(profile, self.sheet)
        if self.evidence is not None:
            chart = _of_steps(profile, self.evidence)
        return Page(
            name=f"dsim profile: {profile.name}",
            question="What does a step cost, and what does it yield?",
            answer=_answer(profile),
            alarms=tuple(f"DOUBTED {line}" for line in profile.doubts),
            cautions=tuple(cautions),
            chart=chart,
            facts=tuple(facts),
            sections=(Section("Held-out requests", tables, fold=True),) * bool(tables),
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
    verdict = "Not valid" if profile.doubts else "Valid"
    text += f" {verdict}: {fit.num_points} step shapes fitted"
    if judged is not None:
        text += (
            f"; {judged.num_points} held out are predicted to {judged.median:.1%} (median) and {judged.p95:.1%} "
            "(95th percentile)"
        )
    return f"{text}."


def _of_sheet(profile: Profile, sheet: Sheet) -> Facts:
    memory, bound, shared = profile.memory, "reading the weights", ""
    if sheet.bound_by_launch:
        bound = "kernel launches"
    if memory.window_bytes_per_token:
        shared = ", which layers with a window share"
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
    facts = [("table", f"{', '.join(knots)} tokens, then {number(latency.slope * 1e6)} us a token")]
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
        text = f"{judged.workload} at {judged.threshold:g}: {mean.measured:.3g} tokens a step held out"
        facts.append(("commits", f"{text}, {mean.predicted:.3g} predicted ({mean.error:+.1%})"))
    for law in profile.canvas_laws:
        shape = f"log-normal of median {law.median:.3g}, each {law.drift:.3g} times the one before"
        if law.histogram:
            shape = f"histogram of mean {mean_forwards(law):.3g} and median {law.median:.3g}, with shares as counted"
        spreads = f"spread {law.request_spread:.2g} between requests and {law.canvas_spread:.2g} within"
        counts = f"{law.least} to {law.most} steps a canvas of {law.canvas_length}"
        facts.append(("canvases", f"{law.workload}: {counts}, {shape}; {spreads} ({law.source})"))
    if not profile.commits and not profile.canvas_laws:
        facts.append(("commits", _no_commits(profile)))
    front_end = "not measured: 0"
    if profile.frontend:
        front_end = f"{profile.frontend * 1e3:.3g} ms between a client and the engine"
    return [*facts, ("front end", front_end)]


def _no_commits(profile: Profile) -> str:
    if profile.family == "full-sequence":
        return "none: policies commit fixed numbers (strategy=low_confidence_static)"
    return "none: it can run `ar` only"


def _of_steps(profile: Profile, evidence: Samples) -> Figure:
    every = points(evidence)
    judging = split(every)
    tokens, latency = every.column("tokens"), every.latency
    prefill = every.column("prefill_tokens") > 0
    chart = Chart("query tokens a step", "ms", height=HEIGHT, legend=True, from_zero=False)
    for name, of_kind, colour in (("decode", ~prefill, COLOURS[0]), ("prefill", prefill, COLOURS[1])):
        for rows, symbol, label in ((~judging, "circle", name), (judging, "circle-open", f"{name}, held out")):
            which = of_kind & rows
            if which.any():
                chart.add(
                    "scatter",
                    x=tokens[which],
                    y=1e3 * latency[which],
                    mode="markers",
                    name=label,
                    marker={"color": colour, "symbol": symbol, "size": 7, "opacity": 0.75},
                    hovertemplate="%{x} tokens: %{y:.3~g} ms",
                )
    keys = every.column("sum_kv")[~prefill] / every.column("batch")[~prefill]
    if len(keys):
        context = float(np.median(keys).round())
        x = np.geomspace(tokens.min(), tokens.max(), 240).round()
        chart.add(
            "scatter",
            x=x,
            y=1e3 * predict(profile.latency, _decode(profile, x, context)),
            mode="lines",
            line={"color": INK, "width": 1.6},
            name=f"fit, {context:.0f} keys a row",
            hovertemplate="%{x:.0f} tokens: %{y:.3~g} ms",
        )
    for axis, values in ((chart.x, tokens), (chart.y, latency)):
        axis["type"] = "log"
        if values.max() > 10 * values.min():  # else Plotly's ticks are readable
            logarithmic(axis)
    about = "Each point is the median of its repeats; hollow ones were held out. Line: rows that compute whole blocks."
    return Figure("curve", "Latency against tokens", about, chart)


def _decode(profile: Profile, tokens: Floats, keys: float) -> Floats:
    """Steps whose rows compute a block (the last may be partial) and see `keys` keys."""
    rows = np.ceil(tokens / max((model.block_length for model in profile.commits), default=1))
    columns = dict.fromkeys(("tokens", "head_rows", "sampled_rows"), tokens)
    columns |= {"sum_q_kv": tokens * keys, "sum_kv": rows * keys, "batch": rows, "num_forwards": np.ones_like(rows)}
    return np.stack([columns.get(name, np.zeros_like(rows)) for name in FEATURES], axis=1)


def _predictions(fit: CommitFit) -> Table:
    rows = [[p.name, f"{p.measured:.3g}", f"{p.predicted:.3g}", f"{p.error:+.1%}"] for p in fit.predictions]
    title = f"{fit.workload} at threshold {fit.threshold:g}: held-out requests"
    caption = f"{fit.num_requests} requests fitted ({fit.num_steps} steps), {fit.num_held_out} held out."
    return table(("", "measured", "predicted", "error"), rows, title=title, caption=caption)
