"""Read what clients measured: a load generator's file (vLLM's `bench serve`, SGLang's, guidellm, aiperf), an engine's
log, or a gateway's with each request's start, first token and end."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ...engine.errors import DsimError, TraceError
from ...files.read import LARGEST, cut
from ...profiler import steplog
from ...traces.formats import CLIENT, FORMATS, TICKS_PER_SECOND, Asked, Format
from ...traces.load import read_rows
from ...traces.parse import Columns, columns_of_rows
from ...traces.rows import Row, Rows, inside, object_or_complaint, raw_rows, read_bytes

ARRIVALS = "a step log with arrivals (docs/steplog.md)"
DETAILED = "vllm bench serve --save-result --save-detailed or SGLang's bench_serving --output-details"
EXAMPLE = "arrival=START,first=FIRST_TOKEN,end=END,input=COLUMN,output=COLUMN"
TOOLS = {"litellm": "LiteLLM", "sglang": "SGLang"}
ARRAYS = ("ttfts", "itls", "input_lens", "output_lens", "errors")  # of vLLM's and SGLang's files
VLLM = Format(
    "vllm bench serve", "start_times", "input_lens", "output_lens", "s",
    {"errors": "error", "itls": "gaps", "ttfts": "client_ttft", "latencies": "client_e2el"},
    ttft="ttfts", e2el="latencies", report=True,
)  # fmt: skip
GUIDELLM = Format(
    "guidellm", "info.timings.request_start or start_time or info.timings.targeted_start",
    "prompt_tokens or input_metrics.text_tokens", "output_tokens or output_metrics.text_tokens", "s",
    {"error": "error", "due": "due", "info.timings.token_iterations": "chunks", "request_latency": "client_e2el",
     "time_to_first_token_ms": "client_ttft", "inter_token_latency_ms": "client_tpot"},
    first="info.timings.first_token_iteration or first_token_time",
    end="info.timings.last_token_iteration or last_token_time", e2el="request_latency", report=True,
)  # fmt: skip
AIPERF = Format(
    "aiperf", "metadata.request_start_ns", "metrics.usage_prompt_tokens.value or metrics.input_sequence_length.value",
    "metrics.usage_completion_tokens.value or metrics.output_sequence_length.value", "ns",
    {"error.message or error": "error", "metadata.was_cancelled": "cancelled",
     "metrics.inter_chunk_latency.value": "gaps", "metrics.request_latency.value": "client_e2el",
     "metrics.time_to_first_token.value": "client_ttft", "metrics.inter_token_latency.value": "client_tpot"},
    # Usage follows the last chunk with text; releases before 0.12 have no `decode_duration`.
    ttft="metrics.time_to_first_token.value", e2el="metrics.request_latency.value",
    decode="metrics.decode_duration.value", wait_unit="ms", report=True,
)  # fmt: skip
# Of requests as their client saw them: s on the client's clock, NaN if unknown. first, last: chunk with text; due: in
# the trace.
TIMES = ("sent", "first", "last", "due", *CLIENT)
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
    path: str | Path, columns: str | None = None, only: str | None = None, time_unit: str | None = None,
    skip_bad: bool = False, benchmark: int | None = None,
) -> ClientLog:  # fmt: skip
    """The requests in a client's file; DsimError names file, request and both values.

    columns: a log's names; only: `model=NAME` or `COLUMN=VALUE`; benchmark: which one of several, from 1.
    """
    options = Asked(columns, only, skip_bad, time_unit)
    rows = raw_rows(str(path), read_bytes(Path(path)))
    read = reader_of(rows) if columns is None else None
    if read is not None:
        if only is not None:
            raise DsimError(f"--only is {cut(only)} and {path} is a load generator's file: expected a gateway's log")
        return read(rows, benchmark, Asked(skip_bad=skip_bad))
    for column in ("first", "end"):
        if columns is not None and not any(pair.partition("=")[0].strip() == column for pair in columns.split(",")):
            raise TraceError(f"--columns {cut(columns)} lacks {column}, expected {EXAMPLE}")
    parsed, form = read_rows(rows, options)
    is_timed = form.is_log and any(np.isfinite(wait).any() for wait in parsed.waited.values())
    if not is_timed and not (parsed.waited and all(parsed.reasons)):
        timed = ", ".join(f.name for f in FORMATS.values() if f.end)
        problem = "lacks the times at which answers began and ended"
        raise TraceError(f"{path}: a log of {form.name} {problem}, expected one of: {timed}; or --columns {EXAMPLE}")
    model = next(filter(None, parsed.extras.get("model", [])), "")
    return client_log(str(path), TOOLS.get(form.name, "gateway"), model, parsed, form)


def reader_of(file: Rows) -> Callable[[Rows, int | None, Asked], ClientLog] | None:
    """By the first object's keys; None if it is no client's or engine's."""
    head: Row = next(filter(None, file.rows), {})
    if head.get("schema") == steplog.SCHEMA:
        return _engine
    if isinstance(head.get("benchmarks"), list):
        return _guidellm
    if {"metadata", "metrics"} <= set(head):
        return _aiperf
    return _arrays if {"completed", "total_output_tokens"} <= set(head) else None


def blank(num_requests: int) -> Sent:
    """Requests of which nothing is known."""
    requests = np.zeros(num_requests, SENT).view(np.recarray)
    for name in TIMES:
        requests[name] = math.nan
    requests.error = ""  # completed
    return requests


def client_log(
    path: str, tool: str, model: object, columns: Columns, form: Format, in_order: bool = False
) -> ClientLog:
    """Of a file's columns. in_order: they are in the trace's order already."""
    unit = 1.0 / TICKS_PER_SECOND[form.wait_unit]
    units = {field: 1e-3 if key.endswith("_ms") else unit for key, field in form.extras.items()} | {"due": 1.0}
    unknown = [None] * len(columns.time)
    requests = blank(len(columns.time))
    requests.sent, requests.input_length = columns.time / form.ticks, columns.input_length
    for name, waited in zip(("first", "last"), columns.waited.values(), strict=False):
        requests[name] = requests.sent + waited
    for name, field in {"due": "due", **CLIENT}.items():
        values = columns.extras.get(field, unknown)
        requests[name] = [math.nan if value is None else units[field] * value for value in values]
    gaps = columns.extras.get("gaps", unknown)
    singles: Any = np.isfinite(requests.first) if any(gaps) else unknown  # the chunk of an answer without gaps
    chunks = zip(gaps, columns.extras.get("chunks", unknown), singles, strict=True)
    requests.num_chunks = [len(waits) + 1 if waits else count or single or 0 for waits, count, single in chunks]
    requests.output_length = columns.output_length
    lost = np.where(np.isnan(requests.last), "no time of its end", "")
    if not form.report:
        lost = np.where(requests.output_length == 0, "no output", lost)
    whys = zip(columns.reasons, lost.tolist(), strict=True)
    requests.error = [" ".join((reason or other).split())[:200] for reason, other in whys]
    done = requests.error == ""
    lacking = {
        "answers have no time of their first token: their ttft and tpot are missing": np.isnan(requests.first),
        "requests have no count of prompt tokens": requests.input_length == 0,
        "requests have no count of output tokens": requests.output_length == 0,
    }
    counts = {text: int((lacks & done).sum()) for text, lacks in lacking.items()}
    warnings = [f"{count} of {len(requests)} {text}" for text, count in counts.items() if count]
    pauses = tuple(unit * gap for waits, is_done in zip(gaps, done, strict=True) if is_done for gap in waits or ())
    if not in_order:
        start = np.where(np.isnan(requests.due), requests.sent, requests.due)
        requests = requests[np.lexsort((requests.sent, start))]
    return ClientLog(path, tool, str(model or ""), failed(requests), pauses, warnings=(*columns.warnings, *warnings))


def failed(requests: Sent) -> Sent:
    """Without times and tokens of requests with an error."""
    for name, nothing in (("first", math.nan), ("last", math.nan), ("output_length", 0), ("num_chunks", 0)):
        requests[name][requests.error != ""] = nothing
    return requests


def _log(file: Rows, form: Format, options: Asked, tool: str, model: object = "", in_order: bool = False) -> ClientLog:
    if not file.rows:
        raise DsimError(f"{file.path}: holds no requests, expected at least 1")
    return client_log(file.path, tool, model, *columns_of_rows(file, form, options), in_order)


def _named(file: Rows, rows: list[Any]) -> Rows:
    """Numbered from 0, inside one object."""
    return Rows.of(file.path, enumerate(map(object_or_complaint, rows)), "{}: request {}")


def one_of(path: str, runs: list[Any], benchmark: int | None) -> Any:
    """The benchmark; DsimError if there are several and none is chosen."""
    number = 1 if benchmark is None and len(runs) == 1 else benchmark
    if number is None or not 1 <= number <= len(runs):
        raise DsimError(
            f"{path}: holds {len(runs)} benchmarks, --benchmark is {benchmark or 'missing'}, expected 1 to {len(runs)}"
        )
    return runs[number - 1]


def _arrays(file: Rows, benchmark: int | None, options: Asked) -> ClientLog:
    """vLLM's, or SGLang's, which has no times."""
    report = one_of(file.path, file.rows, benchmark)
    has_times = "start_times" in report
    arrays = {name: report.get(name) for name in ARRAYS}
    arrays |= {name: report[name] for name in ("start_times", "latencies") if name in report}
    for name, array in arrays.items():
        if not isinstance(array, list):
            raise DsimError(f"{file.path}: {name} is missing, expected a file of {DETAILED}")
    if len({len(array) for array in arrays.values()}) != 1:
        sizes = ", ".join(f"{name} has {len(array)}" for name, array in arrays.items())
        raise DsimError(f"{file.path}: {sizes} entries, expected one number")
    rows = [{"start_times": 0.0, **dict(zip(arrays, row, strict=True))} for row in zip(*arrays.values(), strict=True)]
    tool = VLLM.name if has_times else "SGLang's bench_serving"
    return replace(
        _log(_named(file, rows), VLLM, options, tool, report.get("model_id"), in_order=True), has_times=has_times
    )


def _guidellm(file: Rows, benchmark: int | None, options: Asked) -> ClientLog:
    report = file.rows[0]
    run = object_or_complaint(one_of(file.path, report["benchmarks"], benchmark))
    if isinstance(run, str):
        raise DsimError(f"{file.path}: a benchmark of {run}")
    scale = inside(run, "config.strategy.time_scale")
    rows = []
    for kind in ("successful", "errored", "incomplete"):
        entries = inside(run, f"requests.{kind}")
        for row in (row for row in entries if isinstance(row, dict)) if isinstance(entries, list) else ():
            reason = "incomplete: the benchmark ended" if kind == "incomplete" else inside(row, "info.error") or kind
            due = inside(row, "info.settings.relative_timestamp")
            if not _is_number(due):
                due = None
            elif _is_number(scale):
                due *= scale
            rows.append({**row, "due": due, "error": "" if kind == "successful" else reason})
    version = inside(report, "metadata.guidellm_version") or ""
    model = inside(report, "config.spec.backend.model")
    return _log(_named(file, rows), GUIDELLM, options, f"guidellm {version}".strip(), model)


def _aiperf(file: Rows, benchmark: int | None, options: Asked) -> ClientLog:
    phases = file.values("metadata.benchmark_phase")
    requests = file.take([i for i, phase in enumerate(phases) if phase != "warmup"])
    log = _log(requests, AIPERF, options, AIPERF.name)
    usage = requests.values(AIPERF.output.partition(" or ")[0])
    no_usage = usage.count(None) - int((log.requests.error != "").sum())
    counted = f"{no_usage} of {len(usage)} requests have no usage: their token counts are the client's"
    return replace(log, warnings=(*log.warnings, counted)) if no_usage > 0 else log


def _engine(file: Rows, benchmark: int | None, options: Asked) -> ClientLog:
    """A request is sent when it reaches the engine; tokens arrive when their step ends."""
    log = steplog.read_log(file.path)
    r = log.requests
    for i in np.flatnonzero(np.isnan(r.arrival))[:1]:
        raise DsimError(f"{file.path}: request {r.request[i]} has no arrival, expected {ARRIVALS}")
    requests = blank(len(r))
    requests.sent, requests.first, requests.last = r.arrival, r.first_emission, r.last_emission
    requests.input_length, requests.output_length, requests.num_chunks = r.input_length, r.num_tokens, r.num_emissions
    requests.error = np.where(np.isnan(r.finish) | (r.num_tokens == 0), "incomplete: the log ended", "")
    gaps = tuple(r.gaps.tolist())
    return ClientLog(file.path, log.header.engine, log.header.model.name, failed(requests), gaps, log)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST
