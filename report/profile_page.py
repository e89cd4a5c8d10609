"""A profile as a page: the fitted curves over the points, what was left over, and whether to believe it."""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from ..engine.commits import CommitModel
from ..engine.latency import POWERS_TO
from ..files.write import write_whole
from ..profiler.commit_log import CommitLog
from ..profiler.fit import predict
from ..profiler.fit import split as split_points
from ..profiler.fit_commits import SEED
from ..profiler.fit_commits import split as split_requests
from ..profiler.profile import CommitFit, Profile
from ..profiler.samples import FEATURES, POWERS, Floats, Samples, points
from ..profiler.yields import blocks, draw, repeated
from .figures import COLOURS, GRID, INK, Figure
from .html import PLOT, STYLE

HEIGHT = 340  # pixels
QUESTION = "What does a step cost, and what does it yield?"
NUM_BLOCKS = 4000  # drawn for a figure
Logs = Mapping[tuple[str, float], CommitLog]  # by workload and threshold


def write_page(path: str | Path, profile: Profile, steps: Samples, logs: Logs) -> None:
    """Write the page of a fitted profile."""
    write_whole(path, page(profile, steps, logs))


def page(profile: Profile, steps: Samples, logs: Logs) -> str:
    """The page of a fitted profile, from what it was fitted to; the same gives the same bytes."""
    sections = {"What a step costs": _of_steps(profile, steps)}
    if yields := _of_commits(profile, logs):
        sections["What a step yields"] = yields
    drawn = [figure for found in sections.values() for figure in found]
    config = json.dumps(PLOT)
    # Named engine: another that happens to be installed would write other bytes.
    plots = "\n".join(
        f'Plotly.newPlot("{f.name}", Object.assign({to_json(f.figure, engine="json")}, {{config: {config}}}));'
        for f in drawn
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>dsim profile: {escape(profile.name)}</title>",
            f"<style>{STYLE}</style>",
            f"<script>{get_plotlyjs()}</script>",
            "</head><body><main>",
            _header(profile),
            *(_section(title, found) for title, found in sections.items()),
            _coefficients(profile),
            *([_upkeep(profile)] if profile.latency.upkeep else []),
            *(_predictions(fit) for fit in profile.commit_fits),
            _notes(profile),
            f"<script>{plots}</script>",
            "</main></body></html>\n",
        ]
    )


def answer(profile: Profile) -> str:
    """The verdict in one sentence."""
    fit, judged = profile.fit, profile.fit.held_out
    bad = [f for f in profile.commit_fits if not f.valid]
    said = f"{fit.num_points} step shapes" if fit.num_points is not None else "No step"
    if judged is not None:
        said += (
            f" fitted; {judged.num_points} held out are predicted to {judged.median:.1%} (median) and {judged.p95:.1%} "
            "(95th percentile)"
        )
    believed = fit.valid and not bad
    return f"{'Valid' if believed else 'Not valid'}: {said}."


def doubts(profile: Profile) -> list[str]:
    """Why the profile is not to be believed, a line each."""
    found = list(profile.fit.doubts)
    for fit in profile.commit_fits:
        found += [f"{fit.workload} at threshold {fit.threshold:g}: {line}" for line in fit.doubts]
    return found


def _header(profile: Profile) -> str:
    parts = [f'<header><h1>{QUESTION}</h1><p class="answer">{escape(answer(profile))}</p>']
    parts += [
        f'<p class="alarm" role="alert"><strong>Not valid</strong> {escape(line)}</p>' for line in doubts(profile)
    ]
    if profile.is_estimate:
        parts.append(
            '<p class="caution"><strong>Estimated, not measured.</strong> '
            f"{escape(profile.description)}: no device ran these steps.</p>"
        )
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
    facts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in known.items() if v)
    return "".join([*parts, f"<dl>{facts}</dl></header>"])


def _section(title: str, found: list[Figure]) -> str:
    cards = "".join(
        f'<figure class="card"><h3>{escape(f.title)}</h3><p class="caption">{escape(f.caption)}</p>'
        f'<div class="plot" id="{f.name}" style="height:{HEIGHT}px"></div></figure>'
        for f in found
    )
    return f'<section><h2>{escape(title)}</h2><div class="grid">{cards}</div></section>'


def _of_steps(profile: Profile, steps: Samples) -> list[Figure]:
    every = points(steps)
    held = split_points(every)
    predicted = predict(profile.latency, every.features)
    off = predicted / every.latency - 1.0
    prefill = every.column("prefill_tokens") > 0
    curves, residuals = go.Figure(), go.Figure()
    kinds = (("decode", ~prefill, COLOURS[0]), ("prefill", prefill, COLOURS[1]))
    for name, of_kind, colour in kinds:
        for chosen, symbol, how in ((~held, "circle", ""), (held, "circle-open", ", held out")):
            which = of_kind & chosen
            if not which.any():
                continue
            marker = {"color": colour, "symbol": symbol, "size": 7, "opacity": 0.75}
            common = {"mode": "markers", "name": name + how, "marker": marker}
            curves.add_trace(
                go.Scatter(
                    x=every.column("tokens")[which], y=1e3 * every.latency[which], **common,
                    hovertemplate="%{x} tokens: %{y:.3~g} ms",
                )
            )  # fmt: skip
            residuals.add_trace(
                go.Scatter(
                    x=1e3 * predicted[which], y=off[which], **common, hovertemplate="%{x:.3~g} ms: %{y:+.1%}",
                )
            )  # fmt: skip
    keys = every.column("sum_kv")[~prefill] / every.column("batch")[~prefill]
    tokens = _drawn_at(every.column("tokens"), profile.latency.graph_tokens)
    for i, context in enumerate(np.unique(np.quantile(keys, (0.1, 0.5, 0.9)).round()) if len(keys) else []):
        line = {"color": INK, "width": 1.6, "dash": ("solid", "dash", "dot")[i]}
        curves.add_trace(
            go.Scatter(
                x=tokens, y=1e3 * predict(profile.latency, _decode(profile, tokens, float(context))), mode="lines",
                line=line, name=f"fit, {context:.0f} keys a row", hovertemplate="%{x:.0f} tokens: %{y:.3~g} ms",
            )
        )  # fmt: skip
    _styled(curves, "query tokens a step", "ms")
    curves.update_xaxes(type="log")
    curves.update_yaxes(type="log")
    residuals.add_hline(y=0.0, line={"color": INK, "width": 1})
    if profile.fit.held_out is not None:
        for sign in (-1, 1):
            residuals.add_hline(y=sign * profile.fit.held_out.p95, line={"color": INK, "width": 1, "dash": "dash"})
    _styled(residuals, "predicted, ms", "predicted / measured - 1")
    residuals.update_xaxes(type="log")
    residuals.update_yaxes(tickformat="+.0%")
    noise = "unknown" if profile.fit.noise is None else f"{profile.fit.noise:.1%}"
    graphs = profile.latency.graph_tokens
    stairs = f" Stairs: decode steps of at most {graphs} tokens are padded to a bucket." if graphs else ""
    return [
        Figure(
            "curve", "Latency against tokens",
            "Each point the median of its repeats; hollow ones were held out. Lines: rows that compute a whole block."
            + stairs,
            curves,
        ),
        Figure(
            "residuals", "What is left over",
            f"Dashed: the 95th percentile of the held-out points' error. Noise between repeats: {noise}.", residuals,
        ),
    ]  # fmt: skip


def _drawn_at(tokens: Floats, graph_tokens: int) -> Floats:
    """Whole numbers over what was measured; of captured graphs both sides of every bucket's edge: a stair each."""
    low, high = tokens.min(), tokens.max()
    edges = np.concatenate([POWERS, np.arange(2.0 * POWERS_TO, graph_tokens, POWERS_TO), [graph_tokens]])
    edges = edges[edges <= graph_tokens]
    every = np.unique(np.concatenate([np.geomspace(low, high, 120).round(), edges, edges + 1]))
    return np.asarray(every[(every >= low) & (every <= high)], np.float64)


def _decode(profile: Profile, tokens: Floats, keys: float) -> Floats:
    """Features of steps whose rows compute a whole block and see so many keys."""
    block = max((m.block_length for m in profile.commits), default=1)
    rows = tokens / block
    values = {
        "tokens": tokens, "sum_q_kv": tokens * keys, "sum_kv": rows * keys, "head_rows": tokens,
        "sampled_rows": tokens, "batch": rows, "prefill_tokens": 0 * tokens, "num_forwards": 0 * tokens + 1,
    }  # fmt: skip
    return np.stack([values[name] for name in FEATURES], axis=1)


def _of_commits(profile: Profile, logs: Logs) -> list[Figure]:
    passes, shares, counts = go.Figure(), go.Figure(), go.Figure()
    shown = 0
    for fit in profile.commit_fits:
        log = logs.get((fit.workload, fit.threshold))
        if log is None:
            continue
        model = profile.commit_model(fit.workload, fit.block_length, fit.threshold, fit.temperature)
        colour, name = COLOURS[shown % len(COLOURS)], f"{fit.workload}, {fit.threshold:g}"
        shown += 1
        passes.add_trace(
            go.Scatter(y=list(model.pass_probability), mode="lines+markers", name=name, line={"color": colour})
        )
        judge = split_requests(log)[1]
        mine = _drawn(model, judge)
        for which, found, mode in (("measured", judge, "markers"), ("predicted", mine, "lines")):
            common = {"mode": mode, "name": f"{name}, {which}", "marker": {"color": colour}, "line": {"color": colour}}
            shares.add_trace(go.Scatter(y=_by_distance(found), **common))
            num = found.committed.sum(axis=1)
            share = np.bincount(num, minlength=fit.block_length + 1)[1:] / len(num)
            # A logarithmic axis has no place for a count that never came.
            seen = np.flatnonzero(share)
            counts.add_trace(go.Scatter(x=seen + 1, y=share[seen], **common))
    if not shown:
        return []
    _styled(passes, "distance from the frontier", "chance to pass")
    _styled(shares, "distance from the frontier", "share committed")
    _styled(counts, "tokens committed in a step", "share of steps")
    counts.update_yaxes(type="log")
    return [
        Figure("passes", "Chance to pass", "Of a computed mask, for a typical request, block and step.", passes),
        Figure("shares", "Committed by distance", "Of computed masks, forced ones counted; held-out requests.", shares),
        Figure("tokens", "Tokens a step", "Held-out requests beside blocks drawn from the commit model.", counts),
    ]


def _drawn(model: CommitModel, judge: CommitLog) -> CommitLog:
    found = blocks(judge)
    return draw(model, repeated(found, -(-NUM_BLOCKS // max(1, len(found.request)))), SEED)


def _by_distance(log: CommitLog) -> list[float | None]:
    """Share of computed masks that committed, by distance from the frontier; None where none was computed."""
    distance = np.arange(log.block_length) - np.argmax(log.masked, axis=1)[:, None]
    computed, committed = (
        np.bincount(distance[marks], minlength=log.block_length) for marks in (log.window, log.committed)
    )
    return [float(c / n) if n else None for c, n in zip(committed, computed, strict=True)]


def _styled(figure: go.Figure, x: str, y: str) -> None:
    axis = {"gridcolor": GRID, "linecolor": "#bdc1c6", "zeroline": False, "automargin": True}
    figure.update_layout(
        template=go.layout.Template(), height=HEIGHT, paper_bgcolor="white", plot_bgcolor="white",
        margin={"l": 56, "r": 18, "t": 12, "b": 36}, font={"size": 12, "color": INK},
        legend={"orientation": "h", "y": -0.3}, showlegend=True,
    )  # fmt: skip
    figure.update_xaxes(**axis, title_text=x)
    figure.update_yaxes(**axis, title_text=y)


def _coefficients(profile: Profile) -> str:
    latency, errors = profile.latency, profile.fit.standard_errors or {}
    values: dict[str, tuple[float, str]] = {}
    for k, (tokens, seconds) in enumerate(latency.knots):
        values[f"knots[{k}][0]"] = tokens, "tokens"
        values[f"knots[{k}][1]"] = seconds, "s"
    units = {
        "slope": "s/token", "attention": "s/pair", "kv_read": "s/key", "head": "s/row", "sample": "s/row",
        "launch": "s/forward", "host_step": "s/forward", "host_request": "s/row", "graph_tokens": "tokens",
    }  # fmt: skip
    values |= {name: (getattr(latency, name), unit) for name, unit in units.items()}
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td class="unit">{unit}</td><td>{value:.4g}</td>'
        f"<td>{f'{errors[name]:.2g}' if name in errors else _why(profile, name)}</td></tr>"
        for name, (value, unit) in values.items()
    )
    caption = f"Regimes: {', '.join(profile.fit.regimes)}."
    return _table("Coefficients", ("", "", "value", "standard error"), rows, caption)


def _upkeep(profile: Profile) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(part.cache)}</th><td>{escape(part.phase)}</td><td>{part.row * 1e3:.3g}</td>'
        f"<td>{part.token * 1e6:.3g}</td></tr>"
        for part in profile.latency.upkeep
    )
    caption = "What a request in this phase costs beyond the coefficients above: measured less predicted, medians."
    head = ("cache", "phase", "ms a row", "us a token of its prompt and output")
    return _table("Upkeep of full-sequence caches", head, rows, caption)


def _why(profile: Profile, name: str) -> str:
    if name == "graph_tokens":
        return "given"
    return "not told by these steps" if name in profile.fit.unidentified else "as measured"


def _predictions(fit: CommitFit) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(p.name)}</th><td>{p.measured:.3g}</td><td>{p.predicted:.3g}</td>'
        f"<td>{p.error:+.1%}</td></tr>"
        for p in fit.predictions
    )
    title = f"{fit.workload} at threshold {fit.threshold:g}: held-out requests"
    caption = f"{fit.num_requests} requests fitted ({fit.num_steps} steps), {fit.num_held_out} held out."
    return _table(title, ("", "measured", "predicted", "error"), rows, caption)


def _table(title: str, head: tuple[str, ...], rows: str, caption: str) -> str:
    titles = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    return (
        f'<section class="card table" style="margin-top:16px"><h2>{escape(title)}</h2><div class="scroll"><table>'
        f"<thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>"
        f'<p class="caption">{escape(caption)}</p></section>'
    )


def _notes(profile: Profile) -> str:
    fit = profile.fit
    how = "Computed, padding and all," if profile.latency.graph_tokens else "Measured"
    lines = [f"{how} {name}: {low:g} to {high:g}" for name, (low, high) in (fit.domains or {}).items()]
    if fit.drift is not None:
        lines.append(f"Repeats drifted by {fit.drift:+.1%} from the first measurement to the last")
    lines += [f"Source: {source}" for source in profile.provenance.sources]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    version = escape(profile.provenance.tool_version)
    return f"<footer><h2>Notes</h2><ul>{items}</ul><p>Made by dsim {version}</p></footer>"
