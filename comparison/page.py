"""The page of `dsim compare`: warnings, answer, policies."""

from collections.abc import Sequence

from ..report.chart import Chart, colour
from ..report.page import Block, Figure, Number, Page, Section, Table, Words, table
from ..report.table import number
from ..results.metrics import STATS
from .comparison import PER_REQUEST, Comparison, PolicyErrors, Ranking
from .errors import DEFINITIONS, Errors
from .pairs import Pair, Side
from .ranking import DEFINITIONS as RANKING_DEFINITIONS

# A narrow terminal omits these, first ones first.
SPARE = ("KS", "p90 error", "p95 error", "p50 error", "p99 error")
QUESTION = "How far is the twin from the device?"
PARTS = {
    "latency": "latency model",
    "commits": "commit model",
    "seed": "another seed",
    "scheduling": "scheduling",
    "frontend": "front end",
}


def comparison_page(comparison: Comparison) -> Page:
    sections = [ranking_section(ranking, heads(comparison.pairs[0])) for ranking in comparison.rankings]
    for cell in comparison.cells:
        blocks = cell_blocks(cell, comparison.pairs[cell.pair])
        sections.append(Section(cell.name, tuple(blocks), spoken=True))
    facts = []
    for i, pair in enumerate(comparison.pairs):
        which = f" {i + 1}" if len(comparison.pairs) > 1 else ""
        facts += [
            (f"{head.capitalize()}{which}", about(side)) for head, side in zip(heads(pair), pair.sides, strict=True)
        ]
    if comparison.bounds:
        facts.append(("Bounds", "; ".join(map(str, comparison.bounds))))
    definitions = DEFINITIONS | (RANKING_DEFINITIONS if comparison.rankings else {})
    return Page(
        name="dsim compare",
        question=QUESTION,
        answer=answer(comparison),
        alarms=tuple(warnings(comparison)),
        numbers=_numbers(comparison),
        chart=overview(comparison.cells),
        facts=tuple(facts),
        sections=tuple(sections),
        notes=(*comparison.notes, *(f"{name}: {text}" for name, text in definitions.items())),
    )


def overview(cells: Sequence[PolicyErrors]) -> Figure:
    chart = Chart("", "error of the mean", legend=True)
    chart.layout["margin"]["t"] = 44
    chart.y["tickformat"] = ".1~%"
    names = [name for name in PER_REQUEST if any(cell.metrics[name].error["mean"] is not None for cell in cells)]
    for i, cell in enumerate(cells):
        chart.add(
            "bar", x=names, y=[cell.metrics[name].error["mean"] for name in names], name=cell.name,
            marker={"color": colour(i)}, hovertemplate=f"%{{x}} of {cell.name}: %{{y:+.2%}}",
        )  # fmt: skip
    return Figure("errors", "Errors of the means", "Above zero the first run's mean is larger.", chart)


def heads(pair: Pair) -> tuple[str, str]:
    """Only a device's or server's numbers are called measured."""
    drivers = pair.predicted.driver, pair.measured.driver
    if drivers in (("twin", "live"), ("twin", "client")):
        return "predicted", "measured"
    return f"first ({drivers[0]})", f"second ({drivers[1]})"


def about(side: Side) -> str:
    if side.driver == "client":
        return f"{side.folder}: a server, measured by its client"
    machine = f"{side.model} on {side.device}"
    if side.driver == "twin":
        verdict = "estimated, not measured" if side.estimated else "measured"
        return f"{side.folder}: the twin, {machine}, by profile {side.profile} ({verdict})"
    commits = "the weights" if side.commits == "model" else f"the draws of profile {side.profile}"
    return f"{side.folder}: live, {machine}; {commits} decide the commits"


def warnings(comparison: Comparison) -> list[str]:
    lines = []
    for pair in comparison.pairs:
        p, m = pair.sides
        if m.driver == "twin":
            lines.append(f"NOT MEASURED: {m.folder} was made by the twin, so both sides are predictions")
        elif p.driver != "twin":
            lines.append(f"NOT PREDICTED: {p.folder} was measured too, so the error is the device's own noise")
        lines += [*p.doubts, *m.doubts]
        lines += [f"INTERRUPTED: {side.folder} was stopped before its end" for side in pair.sides if side.interrupted]
    for cell in comparison.cells:
        if cell.left_out["not completed in both"]:
            lines.append(
                f"UNFINISHED {cell.name}: {cell.left_out['not completed in both']:,} requests did not complete in both "
                "runs, and the requests' errors leave them out"
            )
        if cell.unpaired:
            lines.append(f"UNPAIRED {cell.name}: {cell.unpaired}, so only distributions are compared")
    return list(dict.fromkeys(lines))


def answer(comparison: Comparison) -> str:
    paired, unpaired = {}, {}  # errors by cell
    for cell in comparison.cells:
        e2el = cell.metrics["e2el"]
        if e2el.requests is not None:
            paired[cell.name] = e2el.requests.mape or 0.0
        else:
            unpaired[cell.name] = abs(e2el.error["mean"] or 0.0)
    sentences = []
    if paired:
        text = f"A request's e2el is off by {share(comparison.overall['e2el'].mape)} on average (MAPE)"
        if len(paired) > 1:
            worst = max(paired, key=paired.__getitem__)
            text += f", at worst by {share(paired[worst])} ({worst})"
        sentences.append(text + ".")
    if unpaired:
        worst = max(unpaired, key=unpaired.__getitem__)
        sentences.append(f"The mean e2el of unpaired policies is off by at most {share(unpaired[worst])} ({worst}).")
    tau = comparison.tau.get("mean:e2el")
    if tau is not None:
        rankings = comparison.rankings
        verdict = max((ranking.metrics["mean:e2el"] for ranking in rankings), key=lambda verdict: verdict.regret or 0.0)
        scope = f" over {len(rankings)} sets of requests" if len(rankings) > 1 else ""
        cost = f"costs {share(verdict.regret)} more than the best" if verdict.regret else "is the best"
        which = "the worst of the twin's choices" if len(rankings) > 1 else "the twin's choice"
        sentences.append(
            f"The policies' order by mean e2el has tau {tau:.2f}{scope}; {which}, {verdict.choice}, {cost}."
        )
    return " ".join(sentences)


def cell_blocks(cell: PolicyErrors, pair: Pair) -> list[Block]:
    blocks: list[Block] = [error_table(cell, heads(pair))]
    if not cell.unpaired:
        blocks.append(request_table(cell))
    blocks.append(totals_table(cell, heads(pair)))
    blocks.append(Words((left_out_line(cell), *step_lines(cell, pair.measured.folder))))
    if cell.parts is not None:
        title = "The error of each mean, and its parts as shares of the second run's mean"
        blocks += [Words((title,), loud=True), parts_table(cell, heads(pair))]
    return [*blocks, Words(tuple(part_lines(cell)))]


def error_table(cell: PolicyErrors, names: tuple[str, str]) -> Table:
    """Means, and the error of every statistic."""
    rows = []
    for name, metric in cell.metrics.items():
        p, m = metric.predicted["mean"], metric.measured["mean"]
        if p is not None or m is not None:
            errors = [signed(metric.error[stat]) for stat in STATS]
            ks = "" if metric.ks is None else f"{metric.ks:.3f}"
            rows.append([name, metric.unit, number(p), number(m), *errors, ks])
    head = ["", "unit", *(f"{name} mean" for name in names), *(f"{stat} error" for stat in STATS), "KS"]
    return _table(head, rows, "Errors of the runs")


def request_table(cell: PolicyErrors) -> Table:
    rows = []
    for name, metric in cell.metrics.items():
        e = metric.requests
        if e is not None and e.num:
            without = e.num_missing - cell.left_out["not completed in both"]
            counts = [f"{count:,}" for count in (e.num, without, e.num_zero)]
            rows.append([name, share(e.mape), share(e.median), share(e.p95), signed(e.bias), *counts])
    head = ["", "MAPE", "median", "p95", "bias", "requests", "without", "zero"]
    return _table(head, rows, "Errors of the requests")


def totals_table(cell: PolicyErrors, names: tuple[str, str]) -> Table:
    rows = []
    for name, total in cell.totals.items():
        if total.predicted or total.measured:
            text = _count if total.unit in ("requests", "steps") else number
            rows.append([name, total.unit, text(total.predicted), text(total.measured), signed(total.error)])
    return _table(["", "unit", *names, "error"], rows, "Totals of the runs")


def parts_table(cell: PolicyErrors, names: tuple[str, str]) -> Table:
    """As shares of the measured mean."""
    assert cell.parts is not None
    rows = []
    for name in PER_REQUEST:
        entry = cell.parts.metrics.get(name)
        if entry is not None and entry.measured:
            sizes = [entry.error, *(getattr(entry, key) for key in PARTS)]
            shares = [signed(None if size is None else size / entry.measured) for size in sizes]
            rows.append([name, "ms", number(1e3 * entry.error), *shares, f"{entry.num:,}"])
    return _table(["", "unit", "error", f"of {names[1]}", *PARTS.values(), "requests"], rows)


def ranking_section(ranking: Ranking, names: tuple[str, str]) -> Section:
    rows = []
    for name, verdict in ranking.metrics.items():
        tau = "–" if verdict.tau is None else f"{verdict.tau:.2f}"
        rows.append([name, tau, verdict.choice, verdict.best, share(verdict.regret)])
    grid = _table(["", "tau", *(f"best, {name}" for name in names), "regret"], rows)
    return Section(f"Ranking of {', '.join(ranking.cells)}", (grid,), spoken=True)


def step_lines(cell: PolicyErrors, folder: str) -> list[str]:
    steps = cell.steps
    if steps is None:
        return ["One of the runs has no step journal: steps are not compared."]
    num = steps.decode.num_measured + steps.prefill.num_measured
    lines = [f"Both runs planned the same first {steps.num_same:,} of {num:,} steps, then diverged."]
    if steps.same:
        lines = [f"Both runs planned the same {num:,} steps."]
    for name, kind in (("decode", steps.decode), ("prefill", steps.prefill)):
        if not kind.num_measured:
            continue
        if kind.paired is not None:
            lines.append(f"Latency of a {name} step: {_steps(kind.paired)}.")
        else:
            ks = "nan" if kind.ks is None else f"{kind.ks:.3f}"
            lines.append(f"Latency of {name} steps, as distributions: KS {ks}.")
        if kind.priced is not None:
            lines.append(f"The profile's price of a {name} step of {folder}: {_steps(kind.priced)}.")
        if kind.host is not None:
            host = number(1e3 * kind.host)
            lines.append(f"A {name} step of {folder} takes {host} ms in addition to the device's time.")
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
    reasons = [f"{count:,} {reason}" for reason, count in cell.left_out.items() if count]
    line = f"{cell.num_both:,} requests completed in both runs; left out: {', '.join(reasons) or 'none'}."
    if cell.unpaired:
        return line
    return line + " A metric's errors leave out requests without it, and those whose second value is zero."


def share(value: float | None) -> str:
    if value is None:
        return "–"
    if 0 < abs(value) < 1e-6:
        return "less than 0.0001 %"
    if abs(value) >= 10:  # else an exponent
        return f"{float(f'{100 * value:.3g}'):,.0f} %"
    return f"{100 * value:.2g} %" if abs(value) < 0.1 else f"{100 * value:.3g} %"


def signed(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) < 5e-5:
        return "0 %"
    return f"{100 * value:+.2f} %" if abs(value) < 0.01 else f"{100 * value:+.1f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _steps(e: Errors) -> str:
    if not e.num:
        return "none has a latency"
    return f"median error {share(e.median)}, p95 {share(e.p95)}, bias {signed(e.bias)} ({e.num:,} steps)"


def _numbers(comparison: Comparison) -> tuple[Number, ...]:
    numbers = []
    if "e2el" in comparison.overall:
        numbers.append(Number("e2el of a request", ((None, share(comparison.overall["e2el"].mape)),), "MAPE"))
    tau = comparison.tau.get("mean:e2el")
    if tau is not None:
        numbers.append(Number("order of policies", ((None, f"tau {tau:.2f}"),), "by mean e2el; 1 is the same order"))
    return tuple(numbers)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Table:
    texts = frozenset(i for i, name in enumerate(head) if i == 0 or name == "unit")
    return table(head, rows, left=texts, spare=SPARE, title=title)
