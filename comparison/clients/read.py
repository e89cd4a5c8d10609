"""Read the file of a load generator (vLLM's `bench serve`, guidellm, aiperf) or an engine's own log."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...engine.errors import DsimError
from ...files.read import MOST, cut, json_of, read_text, shown
from ...profiler import steplog

Json = dict[str, Any]

MAX_TOKENS = 10_000_000  # of a request
LARGEST = 1e100  # a time: sums and squares of it are finite
HOW = {
    "vllm": "vllm bench serve --save-result --save-detailed",
    "guidellm": "guidellm's JSON output",
    "aiperf": "aiperf's profile_export.jsonl",
    "engine": "a step log of version 2 or 3 (docs/steplog.md)",
}


@dataclass(frozen=True, slots=True)
class Sent:
    """A request as its client saw it. Times are seconds on the client's clock, or NaN."""

    sent: float
    first: float  # first chunk with text
    last: float  # last chunk with text
    input_length: int  # the server's count
    output_length: int  # the server's count
    num_chunks: int  # with text; 0 if unknown
    error: str = ""  # empty: it completed
    due: float = math.nan  # its time in the trace, as the client repeats it: s from the trace's start
    gaps: tuple[float, ...] = ()  # between chunks; empty if the file has none
    ttft: float = math.nan  # the client's own figures
    tpot: float = math.nan
    e2el: float = math.nan


@dataclass(frozen=True)
class ClientLog:
    """A load generator's file; its requests are in the trace's order if the file has it."""

    path: str
    tool: str  # with its version, if the file has it
    model: str
    requests: tuple[Sent, ...]
    steps: steplog.StepLog | None = None  # if the file is an engine's own log


def read_client(path: str | Path) -> ClientLog:
    """The requests in a load generator's file; a DsimError names the file, the request and both values."""
    text = read_text(path, most=MOST)
    return _reader(str(path), text)(str(path), text)


def is_client(data: bytes) -> bool:
    """Whether a file's first object is a load generator's or an engine's log."""
    whole = _first(data.decode("utf-8", "replace").removeprefix("\ufeff"))
    return whole is not None and ("aiperf_version" in whole or _kind(whole) is not None)


def _reader(path: str, text: str) -> Callable[[str, str], ClientLog]:
    """The client that wrote the file, by the keys of its first object."""
    whole = _first(text)
    if whole is None:
        raise DsimError(f"{path}: is no JSON object, expected {_expected()}")
    found = _kind(whole)
    if found is not None:
        return found
    if "aiperf_version" in whole:
        raise DsimError(f"{path}: is aiperf's summary, expected its requests: profile_export.jsonl beside it")
    raise DsimError(f"{path}: holds {cut(', '.join(list(whole)[:4])) or 'nothing'}, expected {_expected()}")


def _first(text: str) -> Json | None:
    """The object of a file's first line, or else of the whole file."""
    head, _, rest = text.strip().partition("\n")
    whole = _object(head) if rest.strip() else None
    return _object(text) if whole is None and text.lstrip().startswith("{") else whole


def _kind(whole: Json) -> Callable[[str, str], ClientLog] | None:
    """The reader of a file with this first object, or None."""
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
        row = _ClientObject(f"{path}: request {i}", {name: whole[name][i] for name in names})
        error = row.text("errors")
        sent = row.number("start_times")
        if error:
            found.append(failed(sent, row.count("input_lens"), error))
            continue
        gaps = tuple(row.numbers("itls"))
        ttft, e2el, tokens = row.number("ttfts"), row.number("latencies"), row.count("output_lens")
        tpot = (e2el - ttft) / (tokens - 1) if tokens > 1 else math.nan
        found.append(
            Sent(
                sent, sent + ttft, sent + e2el, row.count("input_lens"), tokens, len(gaps) + 1, gaps=gaps, ttft=ttft,
                tpot=tpot, e2el=e2el,
            )
        )  # fmt: skip
    return ClientLog(path, "vllm bench serve", str(whole.get("model_id", "")), tuple(found))


# ---- guidellm -------------------------------------------------------------------------------------------------


def _guidellm(path: str, text: str) -> ClientLog:
    whole = _ClientObject(path, _object(text) or {})
    runs = whole.rows("benchmarks")
    if len(runs) != 1:
        raise DsimError(f"{path}: holds {len(runs)} benchmarks, expected 1: write one a file")
    requests = runs[0].at("requests")
    scale = runs[0].maybe("config", "strategy", "time_scale")
    scale = scale if _is_number(scale) and scale > 0 else 1.0
    found = []
    for kind in ("successful", "errored", "incomplete"):
        for row in requests.rows(kind):
            due = row.maybe("info", "settings", "relative_timestamp")
            due = float(due) * scale if _is_number(due) else math.nan
            times = row.at("info", "timings")
            if kind != "successful":
                sent = times.maybe("request_start")
                sent = float(sent) if _is_number(sent) else times.number("targeted_start")
                why = "incomplete: the benchmark ended" if kind == "incomplete" else row.maybe("info", "error")
                tokens = row.maybe("prompt_tokens")
                known = isinstance(tokens, int) and 0 <= tokens <= MAX_TOKENS
                found.append(failed(sent, tokens if known else 0, str(why or "errored"), due))
                continue
            sent = times.number("request_start")
            found.append(
                Sent(
                    sent, times.number("first_token_iteration"), times.number("last_token_iteration"),
                    row.count("prompt_tokens"), row.count("output_tokens"), times.count("token_iterations"),
                    due=due, ttft=row.ms("time_to_first_token_ms"), tpot=row.ms("inter_token_latency_ms"),
                    e2el=row.number("request_latency"),
                )
            )  # fmt: skip
    found.sort(key=lambda r: (r.due if r.due == r.due else r.sent, r.sent))
    version = whole.maybe("metadata", "guidellm_version") or ""
    model = whole.maybe("config", "spec", "backend", "model") or ""
    return ClientLog(path, f"guidellm {version}".strip(), str(model), tuple(found))


# ---- aiperf ---------------------------------------------------------------------------------------------------


def _aiperf(path: str, text: str) -> ClientLog:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        values = _object(line)
        if values is None:
            raise DsimError(f"{where}: is no JSON object, expected a request's record")
        row = _ClientObject(where, values)
        about, metrics = row.at("metadata"), row.at("metrics")
        if about.maybe("benchmark_phase") == "warmup":
            continue
        sent = about.number("request_start_ns") / 1e9
        if values.get("error") or about.maybe("was_cancelled"):
            error = values.get("error")
            why = error.get("message") if isinstance(error, dict) else error
            code = error.get("code") if isinstance(error, dict) else None
            what = "cancelled" if about.maybe("was_cancelled") else " ".join(str(x) for x in (code, why) if x)
            found.append(failed(sent, 0, what or "failed"))
            continue
        value = {name: metrics.at(name) for name in ("request_latency", "time_to_first_token")}
        e2el, ttft = (value[name].ms("value") for name in value)
        names = ("inter_chunk_latency", "inter_token_latency", "decode_duration")
        chunks, pace, decoding = (metrics.at(name) if name in metrics.values else None for name in names)
        gaps = tuple(1e-3 * g for g in chunks.numbers("value")) if chunks else ()
        tpot = pace.ms("value") if pace else math.nan
        # The last chunk with text is followed by the usage. A request of one chunk has no duration.
        decode = decoding.ms("value") if decoding else 0.0
        tokens = metrics.at("usage_completion_tokens").count("value")
        found.append(
            Sent(
                sent, sent + ttft, sent + ttft + decode, metrics.at("usage_prompt_tokens").count("value"), tokens,
                len(gaps) + 1, gaps=gaps, ttft=ttft, tpot=tpot, e2el=e2el,
            )
        )  # fmt: skip
    found.sort(key=lambda r: r.sent)
    return ClientLog(path, "aiperf", "", tuple(found))


# ---- the engine's own step log ---------------------------------------------------------------------------------


def _engine(path: str, _text: str) -> ClientLog:
    """An engine's log: a request is sent when it reaches the engine, and a token arrives when its step ends."""
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
    # The log has the gaps of all requests together.
    if found:
        found[0] = replace(found[0], gaps=tuple(r.gaps.tolist()))
    return ClientLog(path, log.header.engine, log.header.model.name, tuple(found), log)


# ---- values ---------------------------------------------------------------------------------------------------


def failed(sent: float, input_length: int, error: str, due: float = math.nan) -> Sent:
    """A request that failed, with its reason."""
    nan = math.nan
    return Sent(sent, nan, nan, input_length, 0, 0, " ".join(error.split())[:200] or "failed", due)


@dataclass(frozen=True, slots=True)
class _ClientObject:
    """An object of the file and its place; values are checked when they are read."""

    where: str
    values: Mapping[str, Any]

    def at(self, *keys: str) -> "_ClientObject":
        """An object inside."""
        value = self.maybe(*keys)
        if not isinstance(value, Mapping):
            raise DsimError(f"{self.where}: {'.'.join(keys)} is {_shown(value)}, expected an object")
        return _ClientObject(self.where if len(self.where) > 300 else f"{self.where}: {'.'.join(keys)}", value)

    def maybe(self, *keys: str) -> Any:
        """A value inside, or None."""
        value: Any = self.values
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def rows(self, key: str) -> "list[_ClientObject]":
        """The objects of a list."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise DsimError(f"{self.where}: {key} is {_shown(value)}, expected a list of objects")
        return [_ClientObject(f"{self.where}: {key}[{i}]", item) for i, item in enumerate(value)]

    def number(self, key: str) -> float:
        """A finite number."""
        return _number(f"{self.where}: {key}", self.values.get(key))

    def ms(self, key: str) -> float:
        """A number of ms in seconds; NaN for null, such as the pace of a single token."""
        return math.nan if self.values.get(key) is None else 1e-3 * self.number(key)

    def numbers(self, key: str) -> Sequence[float]:
        """A list of finite numbers."""
        values = self.values.get(key)
        if not isinstance(values, list):
            raise DsimError(f"{self.where}: {key} is {_shown(values)}, expected a list of numbers")
        return [_number(f"{self.where}: {key}", value) for value in values]

    def count(self, key: str) -> int:
        """A number of tokens or chunks."""
        value = self.number(key)
        if value != int(value) or not 0 <= value <= MAX_TOKENS:
            raise DsimError(f"{self.where}: {key} is {value:g}, expected a whole number from 0 to {MAX_TOKENS}")
        return int(value)

    def text(self, key: str) -> str:
        """A text; null is empty."""
        value = self.values.get(key)
        return "" if value is None else str(value)


def _number(where: str, value: Any) -> float:
    if not _is_number(value):
        raise DsimError(f"{where} is {_shown(value)}, expected a finite number")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _shown(value: Any) -> str:
    return "missing" if value is None else shown(value)
