"""The page of `dsim compare`: warnings, answer, policies."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..report.chart import Chart, colour
from ..report.page import Block, Figure, Page, Section, Table, Words, numbers, table
from ..report.table import number
from ..results.metrics import STATS
from .bounds import PER_REQUEST
from .deviation import DEFINITIONS
from .error_parts import Parts
from .pairs import Pair, Side

if TYPE_CHECKING:
    from .comparison import Comparison, PolicyErrors

QUESTION = "How far is the twin from the device?"
# A field of MetricParts, and its words.
PARTS = {"latency": "latency model", "commits": "commit model", "scheduling": "scheduling", "frontend": "front end"}


def comparison_page(comparison: "Comparison") -> Page:
    facts = []
    for pair in comparison.pairs:
        for head, side in zip(heads(pair), (pair.predicted, pair.measured), strict=True):
            facts.append((head.capitalize(), about(side)))
    if comparison.bounds:
        facts.append(("Bounds", "; ".join(map(str, comparison.bounds))))
    mape = [errors.mape for name, errors in comparison.overall.items() if name == "e2el"]
    return Page(
        name="dsim compare",
        question=QUESTION,
        answer=answer(comparison),
        alarms=tuple(warnings(comparison)),
        numbers=numbers([("e2el of a request", share(value), "MAPE") for value in mape]),
        chart=overview(comparison.cells),
        facts=tuple(facts),
        sections=tuple(_section(cell, comparison.pairs[cell.pair]) for cell in comparison.cells),
        notes=(*comparison.notes, *(f"{name}: {text}" for name, text in DEFINITIONS.items())),
    )


def overview(cells: Sequence["PolicyErrors"]) -> Figure:
    chart = Chart("", "error of the mean", legend=True)
    chart.layout["margin"]["t"] = 44
    chart.y["tickformat"] = ".1~%"
    names = [name for name in PER_REQUEST if any(cell.metrics[name].error["mean"] is not None for cell in cells)]
    for i, cell in enumerate(cells):
        chart.add(
            "bar",
            x=names,
            y=[cell.metrics[name].error["mean"] for name in names],
            name=cell.name,
            marker={"color": colour(i)},
            hovertemplate=f"%{{x}} of {cell.name}: %{{y:+.2%}}",
        )
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
        verdict = "estimated, not " * side.estimated + "measured"
        return f"{side.folder}: the twin, {machine}, by profile {side.profile} ({verdict})"
    commits = {"model": "the weights"}.get(side.commits, f"the draws of profile {side.profile}")
    return f"{side.folder}: live, {machine}; {commits} decide the commits"


def warnings(comparison: "Comparison") -> list[str]:
    lines = []
    for pair in comparison.pairs:
        p, m = pair.predicted, pair.measured
        if m.driver == "twin":
            lines.append(f"NOT MEASURED: {m.folder} was made by the twin, so both sides are predictions")
        elif p.driver != "twin":
            lines.append(f"NOT PREDICTED: {p.folder} was measured too, so the error is the device's own noise")
        lines += [*p.doubts, *m.doubts]
        lines += [f"INTERRUPTED: {side.folder} was stopped before its end" for side in (p, m) if side.interrupted]
    for cell in comparison.cells:
        if count := cell.left_out["not completed in both"]:
            lines.append(
                f"UNFINISHED {cell.name}: {count:,} requests did not complete in both runs, and the requests' errors "
                "leave them out"
            )
        if cell.unpaired:
            lines.append(f"UNPAIRED {cell.name}: {cell.unpaired}, so only distributions are compared")
    return list(dict.fromkeys(lines))


def answer(comparison: "Comparison") -> str:
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
    return " ".join((*sentences, *_choice(comparison)))


def _choice(comparison: "Comparison") -> list[str]:
    """Whether the first pair's policy of the smallest predicted mean e2el is the best one measured."""
    measured, predicted = {}, {}
    for cell in comparison.cells:
        e2el = cell.metrics["e2el"]
        p, m = e2el.predicted["mean"], e2el.measured["mean"]
        if cell.pair == 0 and p is not None and m is not None:
            predicted[cell.name], measured[cell.name] = p, m
    if len(measured) < 2:
        return []
    choice, best = (min(means, key=means.__getitem__) for means in (predicted, measured))
    text = f"By mean e2el the twin's choice, {choice}, is the best"
    if choice != best:
        regret = share(measured[choice] / measured[best] - 1)
        text = f"By mean e2el the twin's choice, {choice}, takes {regret} longer than the best, {best}"
    return [text + "."]


def _section(cell: "PolicyErrors", pair: Pair) -> Section:
    names, blocks = heads(pair), list[Block]()
    blocks.append(error_table(cell, names))
    if not cell.unpaired:
        blocks.append(request_table(cell))
    blocks.append(Words((left_out_line(cell), *step_lines(cell, pair.measured.folder))))
    if cell.parts is None:
        blocks.append(Words((f"The error is not decomposed: {cell.no_parts}.",)))
    else:
        title = "The error of each mean, and its parts as shares of the second run's mean"
        parts = parts_table(cell.parts, names)
        blocks += [Words((title,), loud=True), parts, Words(tuple(part_lines(cell.parts)))]
    return Section(cell.name, tuple(blocks), spoken=True)


def error_table(cell: "PolicyErrors", names: tuple[str, str]) -> Table:
    """Means and totals, and the error of every statistic."""
    rows = []
    for name, metric in cell.metrics.items():
        means = metric.predicted["mean"], metric.measured["mean"]
        if means != (None, None):
            errors = [signed(metric.error[stat]) for stat in STATS]
            rows.append([name, metric.unit, *map(number, means), *errors])
    for name, total in cell.totals.items():
        if total.predicted or total.measured:
            sides = number(total.predicted), number(total.measured)
            rows.append([name, total.unit, *sides, signed(total.error), *[""] * (len(STATS) - 1)])
    head = ["", "unit", *names, *(f"{stat} error" for stat in STATS)]
    return _table(head, rows, "Errors of the runs: means and totals")


def request_table(cell: "PolicyErrors") -> Table:
    rows = []
    for name, metric in cell.metrics.items():
        e = metric.requests
        if e is not None and e.num:
            without = e.num_missing - cell.left_out["not completed in both"]
            counts = [f"{count:,}" for count in (e.num, without, e.num_zero)]
            rows.append([name, share(e.mape), share(e.median), share(e.p95), signed(e.bias), *counts])
    head = ["", "MAPE", "median", "p95", "bias", "requests", "without", "zero"]
    return _table(head, rows, "Errors of the requests")


def parts_table(parts: Parts, names: tuple[str, str]) -> Table:
    """As shares of the measured mean."""
    rows = []
    for name, entry in parts.metrics.items():
        if name in PER_REQUEST and entry.measured:
            sizes = (entry.error, *(getattr(entry, key) for key in PARTS))
            shares = [signed(size / entry.measured) for size in sizes]
            rows.append([name, "ms", number(1e3 * entry.error), *shares, f"{entry.num:,}"])
    return _table(["", "unit", "error", f"of {names[1]}", *PARTS.values(), "requests"], rows)


def step_lines(cell: "PolicyErrors", folder: str) -> list[str]:
    steps = cell.steps
    if steps is None:
        return ["One of the runs has no step journal: steps are not compared."]
    lines = [f"Both runs planned the same first {steps.num_same:,} of {steps.num_measured:,} steps."]
    for name, e in (("decode", steps.decode), ("prefill", steps.prefill)):
        if e is not None and e.num:
            text = f"median error {share(e.median)}, p95 {share(e.p95)}, bias {signed(e.bias)} ({e.num:,} steps)"
            lines.append(f"The profile's price of a {name} step of {folder}: {text}.")
    return lines


def part_lines(parts: Parts) -> list[str]:
    """How much is recorded, how much approximate."""
    return [
        f"{share(parts.latency_nearest / max(1, parts.latency_steps))} of {parts.latency_steps:,} steps re-run with "
        "recorded latencies were never recorded: they take the profile's price, corrected by the nearest steps.",
        f"They committed {parts.commit_rows:,} rows by recorded commits; in {parts.commit_forced:,} no commit was due "
        f"and the soonest was taken, and {parts.commit_unknown:,} of {parts.commit_masks:,} masks had no record.",
    ]


def left_out_line(cell: "PolicyErrors") -> str:
    reasons = [f"{count:,} {reason}" for reason, count in cell.left_out.items() if count]
    line = f"{cell.num_both:,} requests completed in both runs; left out: {', '.join(reasons) or 'none'}."
    if cell.unpaired:
        return line
    return line + " A metric's errors leave out requests without it, and those whose second value is zero."


def share(value: float | None) -> str:
    """In percent, to two digits below 10 %."""
    if value is None:
        return "–"
    digits = 3 - (abs(value) < 0.1)
    return f"{float(f'{100 * value:.{digits}g}'):,g} %"


def signed(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) < 5e-5:
        return "0 %"
    if abs(value) < 0.01:
        return f"{100 * value:+.2f} %"
    return f"{100 * value:+.1f} %"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Table:
    texts = frozenset(i for i, name in enumerate(head) if i == 0 or name == "unit")
    return table(head, rows, left=texts, title=title)
