"""dsim trace: inspect, convert and synthesise traces."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated as A

from ..engine.errors import TraceError
from . import choices
from . import questions as q
from .answer import Answer
from .declared import Opt, Question, Watch

if TYPE_CHECKING:
    from ..traces import Trace


@dataclass(frozen=True, kw_only=True)
class ReadsTrace(q.OfFile, Question[None]):
    def read(self, name: str) -> "Trace":
        from ..traces import load

        return load(name, time_unit=self.time_unit, skip_bad=self.skip_bad, columns=self.columns, only=self.only)


@dataclass(frozen=True)
class InfoQuestion(ReadsTrace):
    """Show a trace's rate, burstiness and lengths.

    dsim trace info azure-conv
    dsim trace info mine.csv --columns arrival=sent,input=num_in,output=num_out --json
    """

    trace: A[str, q.TRACE]

    def answer(self, watch: Watch) -> Answer[None]:
        from ..traces import describe
        from ..traces.words import table

        facts = describe(self.read(self.trace))
        return Answer(value=None, json=facts, lines=[table(facts)])


@dataclass(frozen=True)
class ConvertQuestion(ReadsTrace):
    """Write a trace as JSON lines with Mooncake's keys and whole milliseconds.

    dsim trace convert azure-conv azure.jsonl
    dsim trace convert mine.csv mine.jsonl --skip-bad --force
    """

    source: A[str, Opt("A trace in any known format.", "IN")]
    out: A[Path, Opt("The JSON lines file to write.", "OUT")]
    _: KW_ONLY
    force: A[bool, q.OVERWRITE] = False

    def answer(self, watch: Watch) -> Answer[None]:
        from ..files.write import check_file
        from ..traces import write
        from ..traces.hashes import with_hash_ids
        from ..traces.words import dropped

        check_file(self.out, force=self.force)
        trace = with_hash_ids(self.read(self.source))
        watch.warn(trace.notes.warnings)
        notes = trace.notes
        how = f"from {notes.num_rows:,} rows of {notes.format}{dropped(trace)}"
        return _wrote(write(trace, self.out, force=self.force), trace, how)


@dataclass(frozen=True)
class SynthQuestion(Question[None]):
    """Generate a synthetic trace.

    dsim trace synth made.jsonl --rate 4 --num-requests 500 --lengths sharegpt
    dsim trace synth like.jsonl --rate 5.5 --arrival gamma,cv=1.1 --lengths azure-conv
    """

    out: A[Path, Opt("The JSON lines file to write.", "OUT")]
    _: KW_ONLY
    arrival: A[str, Opt(f"One of: {', '.join(choices.ARRIVALS[1:])}.", "NAME", "Traffic")] = "poisson"
    rate: A[float | None, Opt("Requests per second.", "R", "Traffic")] = None
    lengths: A[
        str,
        Opt(
            f"One of: {', '.join(choices.LENGTHS)}; {choices.LENGTH_FORMS}; or a trace to draw pairs from; "
            "then ,max_tokens=N: a limit for all.", "L", "Traffic",
        ),
    ] = "sharegpt"  # fmt: skip
    num_requests: A[int, Opt("Number of requests.", "N", "Traffic")] = 1000
    seed: A[int, Opt("Same seed, same trace.", "S", "Execution")] = 0
    force: A[bool, q.OVERWRITE] = False

    def answer(self, watch: Watch) -> Answer[None]:
        from ..files.write import check_file
        from ..traces import describe, synth, write

        check_file(self.out, force=self.force)
        if self.rate is None:
            raise TraceError("rate is missing, expected --rate R (req/s)")
        trace = synth(
            self.arrival, self.rate, lengths=self.lengths, num_requests=self.num_requests,
            seed=self.seed,
        )  # fmt: skip
        cv = describe(trace)["cv"]
        burst = f"CV {cv:.2f} (burstiness {cv**-2:.3g})" if cv else "constant gaps"
        how = f"{self.arrival} at {self.rate:.4g} req/s, {burst}, seed {self.seed}"
        return _wrote(write(trace, self.out, force=self.force), trace, how)


def _wrote(path: Path, trace: "Trace", how: str) -> Answer[None]:
    line = f"Wrote {path} ({len(trace):,} request{'' if len(trace) == 1 else 's'}, {how})"
    return Answer(value=None, json={"written": str(path)}, lines=[line])
