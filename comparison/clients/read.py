"""Read a load generator's file (vLLM's `bench serve`, SGLang's, guidellm, aiperf) or an engine's log."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...engine.errors import DsimError
from ...files.read import LARGEST, cut
from ...profiler import steplog
from ...traces.formats import CLIENT, MEASURED, TICKS_PER_SECOND, Asked, Format
from ...traces.parse import Columns, columns_of_rows
from ...traces.rows import Row, Rows, inside, raw_rows, read_bytes

HOW = {
    "vllm": "vllm bench serve --save-result --save-detailed",
    "sglang": "SGLang's bench_serving --output-details",
    "guidellm": "guidellm's JSON output",
    "aiperf": "aiperf's profile_export.jsonl",
    "engine": "a step log (docs/steplog.md)",
}
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
    {"error": "error", "metrics.inter_chunk_latency.value": "gaps", "metrics.request_latency.value": "client_e2el",
     "metrics.time_to_first_token.value": "client_ttft", "metrics.inter_token_latency.value": "client_tpot"},
    ttft="metrics.time_to_first_token.value", e2el="end", wait_unit="ms", report=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sent:
    """A request as its client saw it: s on the client's clock, NaN if unknown."""

    sent: float
    first: float  # first chunk with text
    last: float  # ... last
    input_length: int
    output_length: int  # both by the server's count
    num_chunks: int  # with text; 0: unknown
    error: str = ""  # empty: completed
    due: float = math.nan  # s in the trace, if the file has it
    gaps: tuple[float, ...] = ()  # s between chunks, if known
    ttft: float = math.nan  # with the next two: the client's figures
    tpot: float = math.nan
    e2el: float = math.nan


@dataclass(frozen=True)
class ClientLog:
    """A client's file; requests are in the trace's order if the file has it."""

    path: str
    tool: str  # and version
    model: str
    requests: tuple[Sent, ...]
    steps: steplog.StepLog | None = None  # of an engine's own log
    is_trace: bool = False  # a gateway's log, which is replayed itself
    has_times: bool = True  # when requests were sent
    warnings: tuple[str, ...] = ()


def read_client(path: str | Path, benchmark: int | None = None, skip_bad: bool = False) -> ClientLog:
    """Read a client's file; DsimError names file, request and both values. benchmark: which one of several, from 1."""
    found = raw_rows(str(path), read_bytes(Path(path)))
    read = reader_of(found)
    if read is None:
        first = next(filter(None, found.rows), {})
        what = "is aiperf's summary" if "aiperf_version" in first else f"holds {cut(', '.join(list(first)[:4]))}"
        raise DsimError(f"{path}: {what}, expected {'; or '.join(HOW.values())}")
    return read(found, benchmark, Asked(skip_bad=skip_bad))


def reader_of(found: Rows) -> Callable[[Rows, int | None, Asked], ClientLog] | None:
    """By the first object's keys; None if it is no client's or engine's."""
    whole: Row = next(filter(None, found.rows), {})
    if whole.get("schema") == steplog.SCHEMA:
        return _engine
    if isinstance(whole.get("benchmarks"), list):
        return _guidellm
    if {"metadata", "metrics"} <= set(whole):
        return _aiperf
    return _arrays if {"completed", "total_output_tokens"} <= set(whole) else None


def sent_of(found: Columns, form: Format) -> tuple[list[Sent], list[str]]:
    """The requests in the file's order, and warnings."""
    scale = 1.0 / TICKS_PER_SECOND[form.wait_unit]
    units = {ours: 1e-3 if theirs.endswith("_ms") else scale for theirs, ours in form.extras.items()}
    unknown = [None] * len(found.time)
    nan = [math.nan] * len(found.time)
    waited = [found.waited[name].tolist() if found.waited else nan for name in MEASURED]
    gaps, chunks, due = (found.extras.get(name, unknown) for name in ("gaps", "chunks", "due"))
    one = int(any(gaps))  # chunk of an answer without gaps
    own = [
        [_seconds(value, units.get(ours, 1.0)) for value in found.extras.get(ours, unknown)] for ours in CLIENT.values()
    ]
    requests = []
    for i, start in enumerate((found.time / form.ticks).tolist()):
        first, end = (wait[i] / form.ticks for wait in waited)
        num_input, num_output = int(found.input_length[i]), int(found.output_length[i])
        lost = "" if num_output or form.report else "no output"
        why = found.reasons[i] or lost or ("no time of its end" if math.isnan(end) else "")
        begun = _seconds(due[i], 1.0)
        if why:
            requests.append(failed(start, num_input, why, begun))
            continue
        between = tuple(scale * gap for gap in gaps[i] or ())
        num_chunks = len(between) + 1 if between else int(chunks[i] or (one and not math.isnan(first)))
        requests.append(
            Sent(
                start, start + first, start + end, num_input, num_output, num_chunks, "", begun, between,
                *(figures[i] for figures in own),
            )
        )  # fmt: skip
    lacking = {
        "answers have no time of their first token: their ttft and tpot are missing": lambda r: math.isnan(r.first),
        "requests have no count of prompt tokens": lambda r: r.input_length == 0,
        "requests have no count of output tokens": lambda r: r.output_length == 0,
    }
    answered = [request for request in requests if not request.error]
    counts = {what: sum(map(lacks, answered)) for what, lacks in lacking.items()}
    return requests, [f"{count} of {len(requests)} {what}" for what, count in counts.items() if count]


def _log(
    found: Rows, form: Format, asked: Asked, tool: str = "", model: object = "", in_order: bool = False
) -> ClientLog:  # fmt: skip
    """A file's requests; in_order: they are in the trace's order already."""
    if not found.rows:
        raise DsimError(f"{found.path}: holds no requests, expected at least 1")
    columns, form = columns_of_rows(found, form, asked)
    requests, warnings = sent_of(columns, form)
    if not in_order:
        requests.sort(key=lambda r: (r.due if r.due == r.due else r.sent, r.sent))
    return ClientLog(
        found.path, tool or form.name, str(model or ""), tuple(requests), warnings=(*columns.warnings, *warnings)
    )  # fmt: skip


def _named(found: Rows, rows: list[Row]) -> Rows:
    """Numbered from 0, inside one object."""
    return Rows(found.path, list(range(len(rows))), rows, form="{}: request {}")


def one_of(path: str, runs: list[Any], benchmark: int | None) -> Any:
    """The benchmark; DsimError if there are several and none is chosen."""
    number = 1 if benchmark is None and len(runs) == 1 else benchmark
    if number is None or not 1 <= number <= len(runs):
        raise DsimError(
            f"{path}: holds {len(runs)} benchmarks, --benchmark is {benchmark or 'missing'}, expected 1 to {len(runs)}"
        )
    return runs[number - 1]


def _arrays(found: Rows, benchmark: int | None, asked: Asked) -> ClientLog:
    """vLLM's, or SGLang's, which has no times."""
    whole = one_of(found.path, found.rows, benchmark)
    has_times = "start_times" in whole
    arrays = {name: whole.get(name) for name in ARRAYS}
    arrays |= {name: whole[name] for name in ("start_times", "latencies") if name in whole}
    for name, array in arrays.items():
        if not isinstance(array, list):
            raise DsimError(f"{found.path}: {name} is missing, expected a file of {HOW['vllm']} or {HOW['sglang']}")
    if len({len(array) for array in arrays.values()}) != 1:
        sizes = ", ".join(f"{name} has {len(array)}" for name, array in arrays.items())
        raise DsimError(f"{found.path}: {sizes} entries, expected one number")
    rows = [{"start_times": 0.0, **dict(zip(arrays, row, strict=True))} for row in zip(*arrays.values(), strict=True)]
    tool = VLLM.name if has_times else "SGLang's bench_serving"
    return replace(
        _log(_named(found, rows), VLLM, asked, tool, whole.get("model_id"), in_order=True), has_times=has_times
    )


def _guidellm(found: Rows, benchmark: int | None, asked: Asked) -> ClientLog:
    whole = found.rows[0]
    run = one_of(found.path, whole["benchmarks"], benchmark)
    scale = inside(run, "config.strategy.time_scale")
    rows = []
    for kind in ("successful", "errored", "incomplete"):
        for row in inside(run, f"requests.{kind}") or ():
            why = "incomplete: the benchmark ended" if kind == "incomplete" else inside(row, "info.error") or kind
            due = inside(row, "info.settings.relative_timestamp")
            if not _is_number(due):
                due = None
            elif _is_number(scale):
                due *= scale
            rows.append({**row, "due": due, "error": "" if kind == "successful" else why})
    version = inside(whole, "metadata.guidellm_version") or ""
    model = inside(whole, "config.spec.backend.model")
    return _log(_named(found, rows), GUIDELLM, asked, f"guidellm {version}".strip(), model)


def _aiperf(found: Rows, benchmark: int | None, asked: Asked) -> ClientLog:
    """Usage follows the last chunk with text, so an answer ends `decode_duration` after its first token (one chunk has
    none); releases before 0.12 have only `request_latency`."""
    has_decode = any(found.values("metrics.decode_duration.value"))
    warmup = found.values("metadata.benchmark_phase")
    kept = found.take([i for i, phase in enumerate(warmup) if phase != "warmup"])
    rows = []
    for row in kept.rows:
        error, end = row.get("error"), inside(row, "metrics.request_latency.value")
        if isinstance(error, dict):
            error = " ".join(str(error[key]) for key in ("code", "message") if error.get(key)) or "failed"
        if inside(row, "metadata.was_cancelled"):
            error = "cancelled"
        ttft, lasting = inside(row, AIPERF.ttft), inside(row, "metrics.decode_duration.value") or 0.0
        if has_decode and _is_number(ttft) and _is_number(lasting):
            end = ttft + lasting
        rows.append({**row, "error": error, "end": end})
    log = _log(replace(kept, rows=rows), AIPERF, asked)
    usage = kept.values(AIPERF.output.partition(" or ")[0])
    no_usage = sum(not row["error"] and count is None for row, count in zip(rows, usage, strict=True))
    counted = f"{no_usage} of {len(rows)} requests have no usage: their token counts are the client's"
    return replace(log, warnings=(*log.warnings, counted)) if no_usage else log


def _engine(found: Rows, benchmark: int | None, asked: Asked) -> ClientLog:
    """A request is sent when it reaches the engine; tokens arrive when their step ends."""
    path = found.path
    log = steplog.read_log(path)
    r = log.requests
    requests = []
    for i in range(len(r)):
        sent = float(r.arrival[i])
        if math.isnan(sent):
            raise DsimError(f"{path}: request {r.request[i]} has no arrival, expected {HOW['engine']}")
        if math.isnan(r.finish[i]) or not r.num_tokens[i]:
            requests.append(failed(sent, int(r.input_length[i]), "incomplete: the log ended"))
            continue
        first, last = float(r.first_emission[i]), float(r.last_emission[i])
        requests.append(Sent(sent, first, last, int(r.input_length[i]), int(r.num_tokens[i]), int(r.num_emissions[i])))
    # The log has one list of gaps.
    if requests:
        requests[0] = replace(requests[0], gaps=tuple(r.gaps.tolist()))
    return ClientLog(path, log.header.engine, log.header.model.name, tuple(requests), log)


def failed(sent: float, input_length: int, error: str, due: float = math.nan) -> Sent:
    nan = math.nan
    return Sent(sent, nan, nan, input_length, 0, 0, " ".join(error.split())[:200] or "failed", due)


def _seconds(value: float | None, unit: float) -> float:
    return math.nan if value is None else unit * value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST
