"""The page of `dsim compare`: warnings, answer, policies."""

from collections.abc import Sequence
from dataclasses import replace

from ..report.page import Number, Page, Section, Table, Words, table
from ..results.run import Run
from . import words
from .cells import DEFINITIONS, Comparison, PolicyErrors
from .figures import of_cell, overview

# A narrow terminal omits these, first ones first.
SPARE = ("KS", "p90 error", "p95 error", "p50 error", "p99 error")
QUESTION = "How far is the twin from the device?"
PARTS = "The error of each mean, and its parts as shares of the second run's mean"


def spoken(found: Comparison) -> Page:
    """For a terminal."""
    sections = [Section(cell.name, tuple(_errors(found, cell)), spoken=True) for cell in found.cells]
    return _page(found, [*sections, *_rankings(found)])


def compare_page(found: Comparison, pairs: Sequence[tuple[Run, Run]], command: str = "", version: str = "") -> Page:
    chart, *others = overview(found)
    sections = [Section("All policies", tuple(others)), *_rankings(found)]
    for i, cell in enumerate(found.cells):
        every = _table(words.statistics_table(found, cell), title=f"Every statistic of {cell.name}", fold=True)
        blocks = (*_errors(found, cell), *of_cell(found, i, pairs[cell.pair]), every)
        sections.append(Section(cell.name, blocks))
    page = _page(found, [section for section in sections if section.blocks])
    alarms = (*page.alarms, *(str(b) for b in found.bounds if not b.met))
    kept = ", ".join(f"{b.bound} ({b.cell})" for b in found.bounds if b.met)
    facts = (*page.facts, *((("Bounds kept", kept),) if kept else ()))
    return replace(
        page, alarms=alarms, facts=facts, numbers=_numbers(found), chart=chart, command=command, version=version
    )


def _page(found: Comparison, sections: Sequence[Section]) -> Page:
    facts = []
    for i, pair in enumerate(found.pairs):
        which = f" {i + 1}" if len(found.pairs) > 1 else ""
        for head, side in zip(words.heads(pair), pair, strict=True):
            facts.append((f"{head.capitalize()}{which}", words.about(side)))
    tables = [block for section in sections for block in section.blocks if isinstance(block, Table)]
    shown = {head.lower().rpartition(" ")[2] for one in tables for head in one.head}
    shown |= {row.cells[0] for one in tables for row in one.rows}
    return Page(
        name="dsim compare",
        question=QUESTION,
        answer=words.answer(found),
        alarms=tuple(words.warnings(found)),
        facts=tuple(facts),
        sections=tuple(sections),
        notes=(*found.notes, *(f"{name}: {text}" for name, text in DEFINITIONS.items() if name in shown)),
    )


def _errors(found: Comparison, cell: PolicyErrors) -> list[Table | Words]:
    blocks: list[Table | Words] = [_table(words.error_table(found, cell), title="Errors of the runs")]
    if not cell.unpaired:
        blocks.append(_table(words.request_table(cell), title="Errors of the requests"))
    blocks.append(_table(words.totals_table(found, cell), title="Totals of the runs"))
    blocks.append(Words((words.left_out_line(cell), *words.step_lines(found, cell))))
    if cell.parts is not None:
        blocks += [Words((PARTS,), loud=True), _table(words.parts_table(found, cell))]
    return [*blocks, Words(tuple(words.part_lines(cell)))]


def _rankings(found: Comparison) -> list[Section]:
    return [
        Section(f"Ranking of {', '.join(ranking.cells)}", (_table(words.ranking_table(found, ranking)),), spoken=True)
        for ranking in found.rankings
    ]


def _numbers(found: Comparison) -> tuple[Number, ...]:
    numbers = []
    if found.overall.get("e2el") is not None:
        numbers.append(Number("e2el of a request", ((None, words.share(found.overall["e2el"].mape)),), "MAPE"))
    for name in ("e2el", "ttft"):
        errors = [(i, cell.metrics[name].error["mean"]) for i, cell in enumerate(found.cells) if name in cell.metrics]
        shown = tuple((i if len(errors) > 1 else None, words.signed(error)) for i, error in errors[:4])
        if shown:
            numbers.append(Number(f"mean {name}", shown, "error of the mean"))
    tau = found.tau.get("mean:e2el")
    if tau is not None and tau == tau:
        numbers.append(Number("order of policies", ((None, f"tau {tau:.2f}"),), "by mean e2el; 1 is the same order"))
    return tuple(numbers[:4])


def _table(found: words.Table, **how: str | bool) -> Table:
    head, rows = found
    left = frozenset(i for i, name in enumerate(head) if i == 0 or name == "unit")
    return table(head, rows, left=left, spare=SPARE, **how)
