"""A profile's page: verdict, fitted curves over points, residuals."""

from collections.abc import Mapping

import numpy as np

from ..engine.commits import CommitModel
from ..engine.latency import POWERS_TO
from ..profiler.commit_log import CommitLog
from ..profiler.fit import predict
from ..profiler.fit import split as split_points
from ..profiler.fit_commits import SEED
from ..profiler.fit_commits import split as split_requests
from ..profiler.profile import CommitFit, Profile
from ..profiler.samples import FEATURES, POWERS, Floats, Samples, joined, points
from ..profiler.yields import blocks, draw, repeated
from .chart import COLOURS, INK, Chart, logarithmic
from .page import ESTIMATED, Figure, Page, Section, Table, table
from .profile_words import fitted_lines

HEIGHT = 340  # pixels
NUM_BLOCKS = 4000  # a figure
Logs = Mapping[tuple[str, float], CommitLog]  # by workload and threshold


def profile_page(
    profile: Profile, steps: Samples, logs: Logs, command: str = "", served: Samples | None = None
) -> Page:  # fmt: skip
    """served: the steps of which every second one judged the fit."""
    curve, *rest = _of_steps(profile, steps, served)
    tables = [_coefficients(profile), *([_cache_overhead(profile)] if profile.latency.cache_overhead else [])]
    tables += [_predictions(fit) for fit in profile.commit_fits]
    sections = [
        Section("What a step costs", tuple(rest)),
        Section("What a step yields", tuple(_of_commits(profile, logs))),
        Section("The fit in numbers", tuple(tables)),
    ]
    why = f"{profile.description}: no device ran these steps."
    return Page(
        name=f"dsim profile: {profile.name}",
        question="What does a step cost, and what does it yield?",
        answer=answer(profile),
        alarms=tuple(f"DOUBTED {line}" for line in profile.doubts),
        cautions=((ESTIMATED, why),) if profile.is_estimate else (),
        chart=curve,
        facts=tuple(_facts(profile)),
        sections=tuple(section for section in sections if section.blocks),
        notes=(*fitted_lines(profile), *(f"Source: {source}" for source in profile.provenance.sources)),
        command=command,
        version=profile.provenance.tool_version,
    )


def derived_page(profile: Profile) -> Page:
    """Inputs and coefficients, no figures."""
    return Page(
        name=f"dsim profile: {profile.name}",
        question="What does a step cost, and what does it yield?",
        answer=f"{profile.description}: {profile.verdict}",
        facts=tuple(_facts(profile)),
        sections=(Section("In numbers", (_coefficients(profile),)),),
        notes=tuple(f"Source: {source}" for source in profile.provenance.sources),
        version=profile.provenance.tool_version,
    )


def answer(profile: Profile) -> str:
    fit, judged = profile.fit, profile.fit.held_out
    text = f"{fit.num_points} step shapes" if fit.num_points is not None else "No step"
    if judged is not None:
        text += (
            f" fitted; {judged.num_points} held out are predicted to {judged.median:.1%} (median) and {judged.p95:.1%} "
            "(95th percentile)"
        )
    return f"{'Not valid' if profile.doubts else 'Valid'}: {text}."


def _facts(profile: Profile) -> list[tuple[str, str]]:
    origin = profile.provenance
    known = {
        "profile": profile.name,
        "model": profile.model.name,
        "device": profile.device.name,
        "implementation": profile.implementation,
        "date": origin.date,
        "torch": origin.torch,
        "driver": origin.driver,
        "clocks": origin.clocks,
        "prompts": origin.prompts,
        **{name.replace("_", " "): str(value) for name, value in origin.settings.items()},
    }
    return [(name, value) for name, value in known.items() if value]


def _of_steps(profile: Profile, steps: Samples, served: Samples | None) -> list[Figure]:
    every = points(steps)
    if served is None:
        held = split_points(every)
    else:
        judges = points(served)
        held = np.arange(len(every) + len(judges)) >= len(every)
        every = joined(every, judges)
    predicted = predict(profile.latency, every.features)
    off = predicted / every.latency - 1.0
    prefill = every.column("prefill_tokens") > 0
    curves = _chart("query tokens a step", "ms")
    residuals = _chart("predicted, ms", "predicted / measured - 1")
    judging = ", held out" if served is None else ", served"
    kinds = (("decode", ~prefill, COLOURS[0]), ("prefill", prefill, COLOURS[1]))
    for name, of_kind, colour in kinds:
        for chosen, symbol, how in ((~held, "circle", ""), (held, "circle-open", judging)):
            which = of_kind & chosen
            if not which.any():
                continue
            marker = {"color": colour, "symbol": symbol, "size": 7, "opacity": 0.75}
            common = {"mode": "markers", "name": name + how, "marker": marker}
            curves.add("scatter", x=every.column("tokens")[which], y=1e3 * every.latency[which], **common,
                    hovertemplate="%{x} tokens: %{y:.3~g} ms")  # fmt: skip
            residuals.add(
                "scatter", x=1e3 * predicted[which], y=off[which], **common, hovertemplate="%{x:.3~g} ms: %{y:+.1%}"
            )
    keys = every.column("sum_kv")[~prefill] / every.column("batch")[~prefill]
    tokens = _drawn_at(every.column("tokens"), profile.latency.graph_tokens)
    for i, context in enumerate(np.unique(np.quantile(keys, (0.1, 0.5, 0.9)).round()) if len(keys) else []):
        line = {"color": INK, "width": 1.6, "dash": ("solid", "dash", "dot")[i]}
        curves.add(
            "scatter",
            x=tokens,
            y=1e3 * predict(profile.latency, _decode(profile, tokens, float(context))),
            mode="lines",
            line=line,
            name=f"fit, {context:.0f} keys a row",
            hovertemplate="%{x:.0f} tokens: %{y:.3~g} ms",
        )
    for axis, values in ((curves.x, every.column("tokens")), (curves.y, every.latency), (residuals.x, predicted)):
        axis["type"] = "log"
        if values.max() > 10 * values.min():  # else Plotly's ticks are readable
            logarithmic(axis)
    residuals.hline(0.0, dash="solid")
    if profile.fit.held_out is not None:
        for sign in (-1, 1):
            residuals.hline(sign * profile.fit.held_out.p95)
    residuals.y["tickformat"] = "+.0%"
    return [
        Figure(
            "curve", "Latency against tokens",
            "Each point is the median of its repeats; hollow ones were "
            f"{'held out' if served is None else 'served, every second to judge the fit'}. Lines: rows that compute "
            "whole blocks.",
            curves,
        ),
        Figure(
            "residuals", "Residuals",
            "Dashed: the 95th percentile of the held-out points' error.", residuals,
        ),
    ]  # fmt: skip


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


def _of_commits(profile: Profile, logs: Logs) -> list[Figure]:
    shares = _chart("distance from the frontier", "share committed")
    counts = _chart("tokens committed in a step", "share of steps")
    shown = 0
    for fit in profile.commit_fits:
        log = logs.get((fit.workload, fit.threshold))
        if log is None:
            continue
        model = profile.commit_model(fit.workload, fit.block_length, fit.threshold, fit.temperature)
        colour, name = COLOURS[shown % len(COLOURS)], f"{fit.workload}, {fit.threshold:g}"
        shown += 1
        judge = split_requests(log)[1]
        mine = _drawn(model, judge)
        for which, found, mode in (("measured", judge, "markers"), ("predicted", mine, "lines")):
            common = {"mode": mode, "name": f"{name}, {which}", "marker": {"color": colour}, "line": {"color": colour}}
            shares.add("scatter", y=_by_distance(found), **common)
            num = found.committed.sum(axis=1)
            share = np.bincount(num, minlength=fit.block_length + 1)[1:] / len(num)
            # A logarithmic axis has no zero.
            seen = np.flatnonzero(share)
            counts.add("scatter", x=seen + 1, y=share[seen], **common)
    if not shown:
        return []
    logarithmic(counts.y, (1,), percent=True)
    return [
        Figure(
            "shares",
            "Committed by distance",
            "The share of computed masks, with forced ones; held-out requests.",
            shares,
        ),
        Figure("tokens", "Tokens a step", "Held-out requests, and blocks drawn from the commit model.", counts),
    ]


def _drawn(model: CommitModel, judge: CommitLog) -> CommitLog:
    found = blocks(judge)
    return draw(model, repeated(found, -(-NUM_BLOCKS // max(1, len(found.request)))), SEED)


def _by_distance(log: CommitLog) -> list[float | None]:
    """Share of computed masks that committed, by distance from the frontier; None without masks."""
    distance = np.arange(log.block_length) - np.argmax(log.masked, axis=1)[:, None]
    computed, committed = (
        np.bincount(distance[marks], minlength=log.block_length) for marks in (log.window, log.committed)
    )
    return [float(c / n) if n else None for c, n in zip(committed, computed, strict=True)]


def _chart(x: str, y: str) -> Chart:
    chart = Chart(x, y, height=HEIGHT, legend=True, from_zero=False)
    chart.layout["legend"] = {"orientation": "h", "y": -0.3}
    return chart


def _coefficients(profile: Profile) -> Table:
    latency, errors = profile.latency, profile.fit.standard_errors or {}
    values: dict[str, tuple[float, str]] = {}
    for name in ("knots", "graph_knots"):
        for k, (tokens, seconds) in enumerate(getattr(latency, name)):
            values[f"{name}[{k}][0]"] = tokens, "tokens"
            values[f"{name}[{k}][1]"] = seconds, "s"
    units = {
        "slope": "s/token", "attention": "s/pair", "dense_attention": "s/pair", "dense_from": "queries",
        "kv_read": "s/key", "head": "s/row", "sample": "s/row",
        "launch": "s/forward", "host_step": "s/forward", "host_request": "s/row", "graph_tokens": "tokens",
    }  # fmt: skip
    if latency.larger:
        units |= {"prompt_attention": "s/pair", "prompt_kv_read": "s/key", "sequence": "s/sequence"}
    values |= {name: (getattr(latency, name), unit) for name, unit in units.items()}
    rows = [
        [name, unit, f"{value:.4g}", f"{errors[name]:.2g}" if name in errors else _why(profile, name)]
        for name, (value, unit) in values.items()
    ]
    head = ("", "", "value", "standard error")
    return table(head, rows, title="Coefficients", left=frozenset({0, 1}))


def _cache_overhead(profile: Profile) -> Table:
    rows = [
        [part.cache, part.phase, f"{part.row * 1e3:.3g}", f"{part.token * 1e6:.3g}"]
        for part in profile.latency.cache_overhead
    ]
    caption = "The cost of a request in this phase beyond the coefficients above: median of measured less predicted."
    head = ("cache", "phase", "ms a row", "us a token of its prompt and output")
    return table(head, rows, title="Overhead of full-sequence caches", caption=caption, left=frozenset({0, 1}))


def _why(profile: Profile, name: str) -> str:
    if name in ("graph_tokens", "dense_from"):
        return "given"
    if name == "dense_attention" and profile.latency.dense_from == 0:
        return "as attention"
    return "not identified by these steps" if name in profile.fit.unidentified else "as measured"


def _predictions(fit: CommitFit) -> Table:
    rows = [[p.name, f"{p.measured:.3g}", f"{p.predicted:.3g}", f"{p.error:+.1%}"] for p in fit.predictions]
    title = f"{fit.workload} at threshold {fit.threshold:g}: held-out requests"
    caption = f"{fit.num_requests} requests fitted ({fit.num_steps} steps), {fit.num_held_out} held out."
    return table(("", "measured", "predicted", "error"), rows, title=title, caption=caption)
