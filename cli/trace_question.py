"""dsim trace: inspect, convert and synthesise traces."""

from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.errors import TraceError
from . import questions as q
from .answer import Answer
from .declared import Question, Watch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..report.page import Page
    from ..traces import Trace


@dataclass(frozen=True, kw_only=True)
class ReadsTrace(q.OfFile, Question[None]):
    """Of a trace's file."""

    def read(self, name: str) -> "Trace":
        from ..traces import load

        return load(name, **self.values("time_unit", "skip_bad", "columns", "only"))


@dataclass(frozen=True)
class InfoQuestion(ReadsTrace):
    """Show a trace's rate, burstiness and lengths.

    dsim trace info azure-conv
    dsim trace info mine.csv --columns arrival=sent,input=num_in,output=num_out --json
    """

    trace: str

    def answer(self, watch: Watch) -> Answer[None]:
        from ..traces import describe

        trace = self.read(self.trace)
        facts = describe(trace)
        return Answer(value=None, json=facts, page=partial(info_page, trace, facts))


@dataclass(frozen=True)
class ConvertQuestion(ReadsTrace):
    """Write a trace as JSON lines with Mooncake's keys and whole milliseconds.

    dsim trace convert azure-conv azure.jsonl
    dsim trace convert mine.csv mine.jsonl --skip-bad --force

    Arguments:
      source IN: A trace in any known format.
      out OUT: The JSON lines file to write.
    Output:
      --force: Replace the file.
    """

    source: str
    out: Path
    _: KW_ONLY
    force: bool = False

    def answer(self, watch: Watch) -> Answer[None]:
        from ..files.write import check_file
        from ..traces.canonical import with_hash_ids

        check_file(self.out, force=self.force)
        trace = with_hash_ids(self.read(self.source))
        watch.warn(trace.notes.warnings)
        notes = trace.notes
        details = f"from {notes.num_rows:,} rows of {notes.format}{notes.left_out}"
        return _wrote(self, trace, details)


@dataclass(frozen=True)
class SynthQuestion(Question[None]):
    """Generate a synthetic trace.

    dsim trace synth made.jsonl --rate 4 --num-requests 500 --lengths sharegpt
    dsim trace synth like.jsonl --rate 5.5 --arrival gamma,cv=1.1 --lengths azure-conv

    Arguments:
      out OUT: The JSON lines file to write.
    Traffic:
      --arrival NAME: One of: poisson, gamma, constant; gamma with ,cv=C: of its gaps.
      --rate R: Requests per second.
      --lengths L: One of: {LENGTHS}; {LENGTH_FORMS}; or a trace to draw pairs from; then ,max_tokens=N for all.
      --num-requests N: Number of requests.
    Output:
      --force: Replace the file.
    """

    out: Path
    _: KW_ONLY
    arrival: str = "poisson"
    rate: float | None = None
    lengths: str = "sharegpt"
    num_requests: int = 1000
    seed: int = 0
    force: bool = False

    def answer(self, watch: Watch) -> Answer[None]:
        from ..files.write import check_file
        from ..traces import describe, synth

        check_file(self.out, force=self.force)
        if self.rate is None:
            raise TraceError("rate is missing, expected --rate R (req/s)")
        options = self.values("lengths", "num_requests", "seed")
        trace = synth(self.arrival, self.rate, **options)
        cv = describe(trace)["cv"]
        burst = f"CV {cv:.2f} (burstiness {cv**-2:.3g})" if cv else "constant gaps"
        details = f"{self.arrival} at {self.rate:.4g} req/s, {burst}, seed {self.seed}"
        return _wrote(self, trace, details)


def _wrote(question: ConvertQuestion | SynthQuestion, trace: "Trace", details: str) -> Answer[None]:
    from ..traces import write

    path = write(trace, question.out, force=question.force)
    line = f"Wrote {path} ({len(trace):,} request{'s' * (len(trace) != 1)}, {details})"
    return Answer(value=None, json={"written": str(path)}, lines=[line])


def info_page(trace: "Trace", facts: "Mapping[str, Any]") -> "Page":
    """A trace's facts, without those that it is too short for."""
    from ..report.page import Page, Section, facts_of
    from ..report.page import table as grid

    reused = facts["repeated_hash_ids"]
    rows = {
        "requests": f"{len(trace):,} of {trace.notes.num_rows:,} rows{trace.notes.left_out}",
        "rate": facts["rate"] and f"{facts['rate']:.3g} req/s for {facts['duration']:,.1f} s",
        "gap CV": facts["cv"] and f"{facts['cv']:.2f} (burstiness {facts['cv'] ** -2:.2f})",
        "prefix reuse": reused and f"{reused:.1%} of prompt blocks come again",
    }
    for name in ("minute", "hour"):
        if rates := facts[f"by_{name}"]:
            peak = f"{rates['peak']:.3g} req/s, {rates['peak'] / rates['mean']:.2f} x mean"
            rows[f"peak by {name}"] = f"{peak}, in {name} {rates['peak_at'] + 1} of {rates['num']:,}"
    heads = ("mean", "std", "p50", "p90", "p99", "max", "total")
    lengths = []
    for name in ("input", "output"):
        lengths.append([name, *(f"{facts[f'{name}_length'][head]:,.0f}" for head in heads)])
    return Page(
        name=f"dsim trace: {trace.name}",
        question="What is in the trace?",
        answer=f"{trace.name} ({trace.notes.format})",
        facts=facts_of(rows),
        sections=(Section("Tokens", (grid(("tokens", *heads), lengths),)),),
        notes=trace.notes.warnings,
    )
