"""Read a load generator's file (vLLM's `bench serve`, guidellm, aiperf) or an engine's log."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...engine.errors import DsimError
from ...engine.plain import Range
from ...files.read import LARGEST, MOST, cut, json_of, read_text
from ...files.schema import FileObject
from ...profiler import steplog

Json = dict[str, Any]

MAX_TOKENS = 10_000_000  # of a request
TIME, TIMES = Range(-LARGEST, LARGEST), list[float]
HOW = {
    "vllm": "vllm bench serve --save-result --save-detailed",
    "guidellm": "guidellm's JSON output",
    "aiperf": "aiperf's profile_export.jsonl",
    "engine": "a step log (docs/steplog.md)",
}


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


def read_client(path: str | Path) -> ClientLog:
    """Read a client's file; DsimError names file, request and both values."""
    text = read_text(path, most=MOST)
    return _reader(str(path), text)(str(path), text)


def is_client(data: bytes) -> bool:
    """Whether the first object is a load generator's or an engine's."""
    whole = _first(data.decode("utf-8", "replace").removeprefix("\ufeff"))
    return whole is not None and ("aiperf_version" in whole or _kind(whole) is not None)


def _reader(path: str, text: str) -> Callable[[str, str], ClientLog]:
    """The reader of a file, by its first object's keys."""
    whole = _first(text)
    if whole is None:
        raise DsimError(f"{path}: is no JSON object, expected {_expected()}")
    found = _kind(whole)
    if found is not None:
        return found
    if "aiperf_version" in whole:
        raise DsimError(f"{path}: is aiperf's summary, expected its requests: profile_export.jsonl next to it")
    raise DsimError(f"{path}: holds {cut(', '.join(list(whole)[:4])) or 'nothing'}, expected {_expected()}")


def _first(text: str) -> Json | None:
    head, _, rest = text.strip().partition("\n")
    whole = _object(head) if rest.strip() else None
    return _object(text) if whole is None and text.lstrip().startswith("{") else whole


def _kind(whole: Json) -> Callable[[str, str], ClientLog] | None:
    if whole.get("schema") == steplog.SCHEMA:
        return _engine
    if isinstance(whole.get("benchmarks"), list):
        return _guidellm
    if {"metadata", "metrics"} <= set(whole):
        return _aiperf
    if {"completed", "total_output_tokens"} <= set(whole):
        return _vllm
    return None


def _expected() -> str:
    return "; or ".join(HOW.values())


def _object(text: str) -> Json | None:
    try:
        value = json_of(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


# ---- vLLM -----------------------------------------------------------------------------------------------------


def _vllm(path: str, text: str) -> ClientLog:
    whole = _object(text) or {}
    names = ("start_times", "ttfts", "latencies", "itls", "input_lens", "output_lens", "errors")
    for name in names:
        if not isinstance(whole.get(name), list):
            raise DsimError(f"{path}: {name} is missing, expected a file of {HOW['vllm']}")
    sizes = {name: len(whole[name]) for name in names}
    if len(set(sizes.values())) != 1:
        raise DsimError(f"{path}: {', '.join(f'{n} has {k}' for n, k in sizes.items())} entries, expected one number")
    found = []
    for i in range(sizes["errors"]):
        row = FileObject(path, f"request {i}", {name: whole[name][i] for name in names})
        sent, error = row.number("start_times", TIME), row.values["errors"]
        if error:
            found.append(failed(sent, _count(row, "input_lens"), str(error)))
            continue
        gaps = tuple(row.get("itls", TIMES, TIME))
        ttft, e2el, tokens = row.number("ttfts", TIME), row.number("latencies", TIME), _count(row, "output_lens")
        tpot = (e2el - ttft) / (tokens - 1) if tokens > 1 else math.nan
        found.append(
            Sent(
                sent, sent + ttft, sent + e2el, _count(row, "input_lens"), tokens, len(gaps) + 1, gaps=gaps, ttft=ttft,
                tpot=tpot, e2el=e2el,
            )
        )  # fmt: skip
    return ClientLog(path, "vllm bench serve", str(whole.get("model_id", "")), tuple(found))


# ---- guidellm -------------------------------------------------------------------------------------------------


def _guidellm(path: str, text: str) -> ClientLog:
    whole = FileObject(path, "", _object(text) or {})
    runs = whole.sections("benchmarks")
    if len(runs) != 1:
        raise DsimError(f"{path}: holds {len(runs)} benchmarks, expected 1: write one a file")
    requests = runs[0].section("requests")
    scale = _inside(runs[0], "config", "strategy", "time_scale")
    scale = scale if _is_number(scale) and scale > 0 else 1.0
    found = []
    for kind in ("successful", "errored", "incomplete"):
        for row in requests.sections(kind):
            due = _inside(row, "info", "settings", "relative_timestamp")
            due = float(due) * scale if _is_number(due) else math.nan
            times = row.section("info").section("timings")
            if kind != "successful":
                sent = times.number(times.first("request_start", "targeted_start"), TIME)
                why = "incomplete: the benchmark ended" if kind == "incomplete" else _inside(row, "info", "error")
                tokens = row.values.get("prompt_tokens")
                if not (isinstance(tokens, int) and 0 <= tokens <= MAX_TOKENS):
                    tokens = 0
                found.append(failed(sent, tokens, str(why or "errored"), due))
                continue
            sent = times.number("request_start", TIME)
            found.append(
                Sent(
                    sent, times.number("first_token_iteration", TIME), times.number("last_token_iteration", TIME),
                    _count(row, "prompt_tokens"), _count(row, "output_tokens"), _count(times, "token_iterations"),
                    due=due, ttft=_seconds(row, "time_to_first_token_ms"), tpot=_seconds(row, "inter_token_latency_ms"),
                    e2el=row.number("request_latency", TIME),
                )
            )  # fmt: skip
    found.sort(key=lambda r: (r.due if r.due == r.due else r.sent, r.sent))
    version = _inside(whole, "metadata", "guidellm_version") or ""
    model = _inside(whole, "config", "spec", "backend", "model") or ""
    return ClientLog(path, f"guidellm {version}".strip(), str(model), tuple(found))


# ---- aiperf ---------------------------------------------------------------------------------------------------


def _aiperf(path: str, text: str) -> ClientLog:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        values = _object(line)
        if values is None:
            raise DsimError(f"{path}:{number}: is no JSON object, expected a request's record")
        row = FileObject(f"{path}:{number}", "", values)
        about, metrics = row.section("metadata"), row.section("metrics")
        if about.values.get("benchmark_phase") == "warmup":
            continue
        sent, cancelled = about.number("request_start_ns", TIME) / 1e9, about.values.get("was_cancelled")
        error = values.get("error")
        if error or cancelled:
            why = error.get("message") if isinstance(error, dict) else error
            code = error.get("code") if isinstance(error, dict) else None
            what = "cancelled" if cancelled else " ".join(str(x) for x in (code, why) if x)
            found.append(failed(sent, 0, what or "failed"))
            continue
        e2el, ttft = (_seconds(metrics.section(name), "value") for name in ("request_latency", "time_to_first_token"))
        names = ("inter_chunk_latency", "inter_token_latency", "decode_duration")
        chunks, pace, decoding = (metrics.section(name) if name in metrics.values else None for name in names)
        gaps = tuple(1e-3 * gap for gap in chunks.get("value", TIMES, TIME)) if chunks else ()
        tpot = _seconds(pace, "value") if pace else math.nan
        # Usage follows the last chunk with text. One chunk has no duration.
        decode = _seconds(decoding, "value") if decoding else 0.0
        num_input, tokens = (
            _count(metrics.section(f"usage_{kind}_tokens"), "value") for kind in ("prompt", "completion")
        )
        found.append(
            Sent(
                sent, sent + ttft, sent + ttft + decode, num_input, tokens,
                len(gaps) + 1, gaps=gaps, ttft=ttft, tpot=tpot, e2el=e2el,
            )
        )  # fmt: skip
    found.sort(key=lambda r: r.sent)
    return ClientLog(path, "aiperf", "", tuple(found))


# ---- the engine's own step log ---------------------------------------------------------------------------------


def _engine(path: str, _text: str) -> ClientLog:
    """A request is sent when it reaches the engine; tokens arrive when their step ends."""
    log = steplog.read_log(path)
    r = log.requests
    found = []
    for i in range(len(r)):
        sent = float(r.arrival[i])
        if math.isnan(sent):
            raise DsimError(f"{path}: request {r.request[i]} has no arrival, expected {HOW['engine']}")
        if math.isnan(r.finish[i]) or not r.num_tokens[i]:
            found.append(failed(sent, int(r.input_length[i]), "incomplete: the log ended"))
            continue
        first, last = float(r.first_emission[i]), float(r.last_emission[i])
        found.append(Sent(sent, first, last, int(r.input_length[i]), int(r.num_tokens[i]), int(r.num_emissions[i])))
    # The log has one list of gaps.
    if found:
        found[0] = replace(found[0], gaps=tuple(r.gaps.tolist()))
    return ClientLog(path, log.header.engine, log.header.model.name, tuple(found), log)


# ---- values ---------------------------------------------------------------------------------------------------


def failed(sent: float, input_length: int, error: str, due: float = math.nan) -> Sent:
    nan = math.nan
    return Sent(sent, nan, nan, input_length, 0, 0, " ".join(error.split())[:200] or "failed", due)


def _inside(of: FileObject, *keys: str) -> Any:
    value: Any = of.values
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _count(of: FileObject, key: str) -> int:
    value = of.number(key, Range(0, MAX_TOKENS))
    if value != int(value):
        raise of.error(key, value, "a whole number")
    return int(value)


def _seconds(of: FileObject, key: str) -> float:
    """Seconds from ms; NaN for null, as the pace of a single token."""
    return math.nan if of.values.get(key) is None else 1e-3 * of.number(key, TIME)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
