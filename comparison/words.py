"""A comparison in sentences and tables."""

import math

from ..report.table import number
from ..results.metrics import STATS
from .cells import PER_REQUEST, Comparison, PolicyErrors, Ranking, Side
from .errors import Errors

Table = tuple[list[str], list[list[str]]]  # head, rows

PARTS = {
    "latency": "latency model",
    "commits": "commit model",
    "seed": "another seed",
    "scheduling": "scheduling",
    "frontend": "front end",
}


def heads(pair: tuple[Side, Side]) -> tuple[str, str]:
    """Only a device's or server's numbers are called measured."""
    drivers = [side.driver for side in pair]
    return (
        ("predicted", "measured")
        if drivers in (["twin", "live"], ["twin", "client"])
        else (f"first ({drivers[0]})", f"second ({drivers[1]})")
    )


def about(side: Side) -> str:
    if side.driver == "client":
        return f"{side.folder}: a server, measured by its client"
    what = f"{side.model} on {side.device}"
    if side.driver == "twin":
        verdict = "estimated, not measured" if side.estimated else "measured"
        return f"{side.folder}: the twin, {what}, by profile {side.profile} ({verdict})"
    commits = "the weights" if side.commits == "model" else f"the draws of profile {side.profile}"
    return f"{side.folder}: live, {what}; {commits} decide the commits"


def warnings(found: Comparison) -> list[str]:
    lines = []
    for p, m in found.pairs:
        if m.driver == "twin":
            lines.append(f"NOT MEASURED: {m.folder} was made by the twin, so both sides are predictions")
        elif p.driver != "twin":
            lines.append(f"NOT PREDICTED: {p.folder} was measured too, so the error is the device's own noise")
        lines += [*p.doubts, *m.doubts]
        lines += [f"INTERRUPTED: {side.folder} was stopped before its end" for side in (p, m) if side.interrupted]
    for cell in found.cells:
        if cell.left_out["not completed in both"]:
            lines.append(
                f"UNFINISHED {cell.name}: {cell.left_out['not completed in both']:,} requests did not complete in both "
                "runs, and the requests' errors leave them out"
            )
        if cell.unpaired:
            lines.append(f"UNPAIRED {cell.name}: {cell.unpaired}, so only distributions are compared")
    return list(dict.fromkeys(lines))


def answer(found: Comparison) -> str:
    paired = [cell for cell in found.cells if cell.metrics["e2el"].requests is not None]
    sentences = []
    if paired:
        worst = max(paired, key=lambda cell: _known(cell.metrics["e2el"].requests))
        text = f"A request's e2el is off by {share(_known(found.overall['e2el']))} on average (MAPE)"
        if len(paired) > 1:
            text += f", at worst by {share(_known(worst.metrics['e2el'].requests))} ({worst.name})"
        sentences.append(text + ".")
    rest = [cell for cell in found.cells if cell not in paired]
    if rest:
        worst = max(rest, key=lambda cell: abs(cell.metrics["e2el"].error["mean"]))
        error = worst.metrics["e2el"].error["mean"]
        sentences.append(f"The mean e2el of unpaired policies is off by at most {share(abs(error))} ({worst.name}).")
    tau = found.tau.get("mean:e2el", math.nan)
    if not math.isnan(tau):
        verdicts = [ranking.metrics["mean:e2el"] for ranking in found.rankings if "mean:e2el" in ranking.metrics]
        worst_choice = max(verdicts, key=lambda verdict: verdict.regret)
        over = f" over {len(found.rankings)} sets of requests" if len(found.rankings) > 1 else ""
        cost = "is the best" if not worst_choice.regret else f"costs {share(worst_choice.regret)} more than the best"
        which = "the twin's choice" if len(verdicts) == 1 else "the worst of the twin's choices"
        sentences.append(
            f"The policies' order by mean e2el has tau {tau:.2f}{over}; {which}, {worst_choice.choice}, {cost}."
        )
    return " ".join(sentences)


def error_table(found: Comparison, cell: PolicyErrors) -> Table:
    """Means, and the error of every statistic."""
    head = [
        "",
        "unit",
        *(f"{name} mean" for name in heads(found.pairs[cell.pair])),
        *(f"{s} error" for s in STATS),
        "KS",
    ]
    rows = []
    for name, metric in cell.metrics.items():
        if metric.measured["mean"] is None and metric.predicted["mean"] is None:
            continue
        row = [name, metric.unit, number(metric.predicted["mean"]), number(metric.measured["mean"])]
        row += [signed(metric.error[stat]) for stat in STATS]
        row.append("" if math.isnan(metric.ks) else f"{metric.ks:.3f}")
        rows.append(row)
    return head, rows


def request_table(cell: PolicyErrors) -> Table:
    """No rows if requests are not paired."""
    head = ["", "MAPE", "median", "p95", "bias", "requests", "without", "zero"]
    rows = []
    for name, metric in cell.metrics.items():
        e = metric.requests
        if e is not None and e.num:
            without = e.num_missing - cell.left_out["not completed in both"]
            row = [name, share(e.mape), share(e.median), share(e.p95), signed(e.bias)]
            rows.append([*row, *(f"{count:,}" for count in (e.num, without, e.num_zero))])
    return head, rows


def statistics_table(found: Comparison, cell: PolicyErrors) -> Table:
    head = ["", "unit", *heads(found.pairs[cell.pair]), "error"]
    rows = []
    for name, metric in cell.metrics.items():
        for stat in STATS:
            p, m = metric.predicted[stat], metric.measured[stat]
            if p is not None or m is not None:
                rows.append([f"{name} {stat}", metric.unit, number(p), number(m), signed(metric.error[stat])])
    return head, rows


def totals_table(found: Comparison, cell: PolicyErrors) -> Table:
    head = ["", "unit", *heads(found.pairs[cell.pair]), "error"]
    rows = [
        [name, t.unit, _amount(t.predicted, t.unit), _amount(t.measured, t.unit), signed(t.error)]
        for name, t in cell.totals.items()
        if t.predicted or t.measured
    ]
    return head, rows


def parts_table(found: Comparison, cell: PolicyErrors) -> Table:
    """As shares of the measured mean."""
    head = ["", "unit", "error", f"of {heads(found.pairs[cell.pair])[1]}", *PARTS.values(), "requests"]
    rows = []
    if cell.parts is not None:
        for name in PER_REQUEST:
            part = cell.parts.metrics.get(name)
            if part is None or not part.measured:
                continue
            shares = [v / part.measured for v in (part.error, *(getattr(part, key) for key in PARTS))]
            rows.append([name, "ms", number(1e3 * part.error), *map(signed, shares), f"{part.num:,}"])
    return head, rows


def ranking_table(found: Comparison, ranking: Ranking) -> Table:
    head = ["", "tau", *(f"best, {name}" for name in heads(found.pairs[0])), "regret"]
    rows = [
        [name, "–" if math.isnan(v.tau) else f"{v.tau:.2f}", v.choice, v.best, share(v.regret)]
        for name, v in ranking.metrics.items()
    ]
    return head, rows


def step_lines(found: Comparison, cell: PolicyErrors) -> list[str]:
    steps, folder = cell.steps, found.pairs[cell.pair][1].folder
    if steps is None:
        return ["One of the runs has no step journal: steps are not compared."]
    num = steps.decode.num_measured + steps.prefill.num_measured
    if steps.same:
        lines = [f"Both runs planned the same {num:,} steps."]
    else:
        lines = [f"Both runs planned the same first {steps.num_same:,} of {num:,} steps, then diverged."]
    for name, kind in (("decode", steps.decode), ("prefill", steps.prefill)):
        if not kind.num_measured:
            continue
        if kind.paired is not None:
            lines.append(f"Latency of a {name} step: {_steps(kind.paired)}.")
        else:
            lines.append(f"Latency of {name} steps, as distributions: KS {kind.ks:.3f}.")
        if kind.priced is not None:
            lines.append(f"The profile's price of a {name} step of {folder}: {_steps(kind.priced)}.")
        if not math.isnan(kind.host):
            lines.append(
                f"A {name} step of {folder} takes {number(1e3 * kind.host)} ms in addition to the device's time."
            )
    return lines


def part_lines(cell: PolicyErrors) -> list[str]:
    """How much is recorded, how much approximate; or why there are no parts."""
    parts = cell.parts
    if parts is None:
        return [f"The error is not decomposed: {cell.no_parts}."]
    return [
        f"{share(parts.latency_nearest / max(1, parts.latency_steps))} of {parts.latency_steps:,} steps re-run with "
        "recorded latencies were never recorded: they take the profile's price, corrected by the nearest steps.",
        f"They committed {parts.commit_rows:,} rows by recorded commits; in {parts.commit_forced:,} no commit was due "
        f"and the soonest was taken, and {parts.commit_unknown:,} of {parts.commit_masks:,} masks had no record.",
    ]


def left_out_line(cell: PolicyErrors) -> str:
    out = [f"{count:,} {why}" for why, count in cell.left_out.items() if count]
    line = f"{cell.num_both:,} requests completed in both runs; left out: {', '.join(out) or 'none'}."
    if cell.unpaired:
        return line
    return line + " A metric's errors leave out requests without it, and those whose second value is zero."


def share(value: float) -> str:
    if math.isnan(value):
        return "–"
    if 0 < abs(value) < 1e-6:
        return "less than 0.0001 %"
    if abs(value) >= 10:  # else an exponent
        return f"{float(f'{100 * value:.3g}'):,.0f} %"
    return f"{100 * value:.2g} %" if abs(value) < 0.1 else f"{100 * value:.3g} %"


def signed(value: float) -> str:
    if math.isnan(value):
        return "–"
    size = abs(value)
    if size < 5e-5:
        return "0 %"
    return f"{100 * value:+.2f} %" if size < 0.01 else f"{100 * value:+.1f} %"


def _amount(value: float | None, unit: str) -> str:
    return f"{value:,.0f}" if value is not None and unit in ("requests", "steps") else number(value)


def _steps(e: Errors) -> str:
    if not e.num:
        return "none has a latency"
    return f"median error {share(e.median)}, p95 {share(e.p95)}, bias {signed(e.bias)} ({e.num:,} steps)"


def _known(e: Errors | None) -> float:
    return -1.0 if e is None or math.isnan(e.mape) else e.mape
