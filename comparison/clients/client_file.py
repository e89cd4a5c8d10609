"""Read what clients measured: a load generator's file (vLLM's `bench serve`, SGLang's, guidellm, aiperf), an engine's
log, or a gateway's with each request's start, first token and end."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ...engine.errors import DsimError, TraceError
from ...files.read import LARGEST, FilePath, cut
from ...profiler import steplog
from ...traces.formats import FORMATS, OTHER_FORMATS, TICKS_PER_SECOND, Format, ReadOptions
from ...traces.load import read_rows
from ...traces.parse import Columns, columns_of_rows
from ...traces.rows import Row, Rows, inside, object_or_complaint, raw_rows, read_bytes

DETAILED = "vllm bench serve --save-result --save-detailed or SGLang's bench_serving --output-details"
EXAMPLE = "arrival=START,first=FIRST_TOKEN,end=END,input=COLUMN,output=COLUMN"
TOOLS = {"litellm": "LiteLLM", "sglang": "SGLang"}
ARRAYS = ("ttfts", "itls", "input_lens", "output_lens", "errors")  # of vLLM's and SGLang's files
VLLM, GUIDELLM, AIPERF = (OTHER_FORMATS[name] for name in ("vllm bench serve", "guidellm", "aiperf"))
# Of requests as their client saw them: s on the client's clock, NaN if unknown. first, last: chunk with text; due: in
# the trace.
TIMES = ("sent", "first", "last", "due")
COUNTS = ("input_length", "output_length", "num_chunks")  # the server's; chunks with text, 0: unknown
SENT = np.dtype([*((name, "f8") for name in TIMES), *((name, "i8") for name in COUNTS), ("error", "O")])
Sent: TypeAlias = Any  # a record array of SENT


@dataclass(frozen=True)
class ClientLog:
    """A client's file; requests are in the trace's order if the file has it."""

    path: str
    tool: str  # and version
    model: str
    requests: Sent
    gaps: tuple[float, ...] = ()  # s between chunks, of all requests
    steps: steplog.StepLog | None = None  # of an engine's own log
    has_times: bool = True  # when requests were sent
    warnings: tuple[str, ...] = ()


def read_client(
    path: FilePath,
    columns: str | None = None,
    only: str | None = None,
    time_unit: str | None = None,
    skip_bad: bool = False,
) -> ClientLog:
    """The requests in a client's file; DsimError names file, request and both values.

    columns: a log's names; only: `model=NAME` or `COLUMN=VALUE`.
    """
    rows, read = raw_rows(str(path), read_bytes(Path(path))), None
    if columns is None:
        read = reader_of(rows)
    if read is not None:
        if only is not None:
            raise DsimError(f"--only is {cut(only)} and {path} is a load generator's file: expected a gateway's log")
        return read(rows, ReadOptions(skip_bad=skip_bad))
    parsed, form = read_rows(rows, ReadOptions(columns, only, skip_bad, time_unit))
    is_timed = form.is_log and any(np.isfinite(wait).any() for wait in parsed.waited.values())
    if not is_timed and not (parsed.waited and all(parsed.reasons)):
        timed = ", ".join(f.name for f in FORMATS.values() if f.end)
        problem = "lacks the times at which answers began and ended"
        raise TraceError(f"{path}: a log of {form.name} {problem}, expected one of: {timed}; or --columns {EXAMPLE}")
    model = next(filter(None, parsed.extras.get("model", [])), "")
    return client_log(str(path), TOOLS.get(form.name, "gateway"), model, parsed, form)


def reader_of(file: Rows) -> Callable[[Rows, ReadOptions], ClientLog] | None:
    """By the first object's keys; None if it is no client's or engine's."""
    head: Row = next(filter(None, file.rows), {})
    if head.get("schema") == steplog.SCHEMA:
        return _engine
    if isinstance(head.get("benchmarks"), list):
        return _guidellm
    if {"metadata", "metrics"} <= set(head):
        return _aiperf
    if {"completed", "total_output_tokens"} <= set(head):
        return _arrays
    return None


def blank(num_requests: int) -> Sent:
    """Requests without a known value."""
    requests = np.zeros(num_requests, SENT).view(np.recarray)
    for name in TIMES:
        requests[name] = math.nan
    requests.error = ""  # completed
    return requests


def client_log(path: str, tool: str, model: object, columns: Columns, form: Format) -> ClientLog:
    """Of a file's columns."""
    unit = 1.0 / TICKS_PER_SECOND[form.wait_unit]
    num = len(columns.time)
    gaps, chunks, due = (columns.extras.get(name, [None] * num) for name in ("gaps", "chunks", "due"))
    requests = blank(num)
    requests.sent, requests.input_length = columns.time / form.ticks, columns.input_length
    requests.due = np.array(due, np.float64)
    for name, waited in zip(("first", "last"), columns.waited.values(), strict=False):
        requests[name] = requests.sent + waited
    # An answer without gaps has one chunk.
    single = np.isfinite(requests.first) & any(gaps)
    for i, (waits, count) in enumerate(zip(gaps, chunks, strict=True)):
        requests.num_chunks[i] = len(waits or ()) + bool(waits) or count or single[i]
    requests.output_length = columns.output_length
    lost = np.where(np.isnan(requests.last), "no time of its end", "")
    if not form.report:
        lost = np.where(requests.output_length == 0, "no output", lost)
    reasons = zip(columns.reasons, lost.tolist(), strict=True)
    requests.error = [" ".join((reason or other).split())[:200] for reason, other in reasons]
    done = requests.error == ""
    lacking = {
        "answers have no time of their first token: their ttft and tpot are missing": np.isnan(requests.first),
        "requests have no count of prompt tokens": requests.input_length == 0,
        "requests have no count of output tokens": requests.output_length == 0,
    }
    counts = {text: int((lacks & done).sum()) for text, lacks in lacking.items()}
    warnings = [f"{count} of {num} {text}" for text, count in counts.items() if count]
    pauses = tuple(unit * gap for waits, is_done in zip(gaps, done, strict=True) if is_done for gap in waits or ())
    if form is not VLLM:  # its file is in the trace's order
        start = np.where(np.isnan(requests.due), requests.sent, requests.due)
        requests = requests[np.lexsort((requests.sent, start))]
    return ClientLog(
        path=path,
        tool=tool,
        model=str(model or ""),
        requests=failed(requests),
        gaps=pauses,
        warnings=(*columns.warnings, *warnings),
    )


def failed(requests: Sent) -> Sent:
    """Without times and tokens of requests with an error."""
    for name, nothing in (("first", math.nan), ("last", math.nan), ("output_length", 0), ("num_chunks", 0)):
        requests[name][requests.error != ""] = nothing
    return requests


def _log(file: Rows, form: Format, options: ReadOptions, tool: str, model: object = "") -> ClientLog:
    if not file.rows:
        raise DsimError(f"{file.path}: holds no requests, expected at least 1")
    columns, _ = columns_of_rows(file, form, options)
    return client_log(file.path, tool, model, columns, form)


def _named(file: Rows, rows: list[Any]) -> Rows:
    """Numbered from 0, inside one object."""
    return Rows.of(file.path, enumerate(map(object_or_complaint, rows)), "{}: request {}")


def one_of(path: str, runs: list[Any]) -> Any:
    """The only benchmark; DsimError if there are several."""
    if len(runs) != 1:
        raise DsimError(f"{path}: holds {len(runs)} benchmarks, expected 1: a file for each")
    return runs[0]


def _arrays(file: Rows, options: ReadOptions) -> ClientLog:
    """vLLM's, or SGLang's, which has no times."""
    report = one_of(file.path, file.rows)
    arrays = {name: report.get(name) for name in ARRAYS}
    arrays |= {name: report[name] for name in ("start_times", "latencies") if name in report}
    for name, array in arrays.items():
        if not isinstance(array, list):
            raise DsimError(f"{file.path}: {name} is missing, expected a file of {DETAILED}")
    if len({len(array) for array in arrays.values()}) != 1:
        sizes = ", ".join(f"{name} has {len(array)}" for name, array in arrays.items())
        raise DsimError(f"{file.path}: {sizes} entries, expected one number")
    rows = [{"start_times": 0.0, **dict(zip(arrays, row, strict=True))} for row in zip(*arrays.values(), strict=True)]
    log = _log(_named(file, rows), VLLM, options, VLLM.name, report.get("model_id"))
    if "start_times" in report:
        return log
    return replace(log, tool="SGLang's bench_serving", has_times=False)


def _guidellm(file: Rows, options: ReadOptions) -> ClientLog:
    report = file.rows[0]
    run = object_or_complaint(one_of(file.path, report["benchmarks"]))
    if isinstance(run, str):
        raise DsimError(f"{file.path}: a benchmark of {run}")
    scale = _number(inside(run, "config.strategy.time_scale"))
    rows = []
    for kind in ("successful", "errored", "incomplete"):
        entries = inside(run, f"requests.{kind}")
        for row in filter(lambda row: isinstance(row, dict), entries if isinstance(entries, list) else ()):
            reason = {"successful": "", "incomplete": "incomplete: the benchmark ended"}.get(kind)
            if reason is None:
                reason = inside(row, "info.error") or kind
            due = _number(inside(row, "info.settings.relative_timestamp"))
            if due is not None:
                due *= scale or 1.0
            rows.append({**row, "due": due, "error": reason})
    version = inside(report, "metadata.guidellm_version") or ""
    model = inside(report, "config.spec.backend.model")
    return _log(_named(file, rows), GUIDELLM, options, f"guidellm {version}".strip(), model)


def _aiperf(file: Rows, options: ReadOptions) -> ClientLog:
    phases = file.values("metadata.benchmark_phase")
    requests = file.take([i for i, phase in enumerate(phases) if phase != "warmup"])
    log = _log(requests, AIPERF, options, AIPERF.name)
    usage = requests.values(AIPERF.output.partition(" or ")[0])
    num = usage.count(None) - int((log.requests.error != "").sum())
    if num <= 0:
        return log
    counted = f"{num} of {len(usage)} requests have no usage: their token counts are the client's"
    return replace(log, warnings=(*log.warnings, counted))


def _engine(file: Rows, options: ReadOptions) -> ClientLog:
    """A request is sent when it reaches the engine; tokens arrive when their step ends."""
    log = steplog.read_log(file.path)
    r = log.requests
    if np.isnan(r.arrival).any():
        raise DsimError(f"{file.path}: a request has no arrival, expected a step log with arrivals (docs/steplog.md)")
    requests = blank(len(r))
    requests.sent, requests.first, requests.last = r.arrival, r.first_emission, r.last_emission
    requests.input_length, requests.output_length, requests.num_chunks = r.input_length, r.num_tokens, r.num_emissions
    requests.error = np.where(np.isnan(r.finish) | (r.num_tokens == 0), "incomplete: the log ended", "")
    return ClientLog(
        path=file.path,
        tool=log.header.engine,
        model=log.header.model.name,
        requests=failed(requests),
        gaps=tuple(r.gaps.tolist()),
        steps=log,
    )


def _number(value: Any) -> float | None:
    """None for anything else than a usual number."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST:
        return float(value)
    return None
