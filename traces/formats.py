"""The trace formats of other tools: how each spells arrival, input length and output length."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..engine.errors import TraceError
from ..files.read import cut

TICKS_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}

# Optional columns of the canonical file, under their own names.
OPTIONAL = (
    "hash_ids", "block_size", "session_id", "delay", "model", "id", "slo_class", "status",
    "gen_length", "block_length", "steps",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Format:
    """One tool's keys. `extras` maps its optional keys to ours; the rest of a row is ignored."""

    name: str
    time: str
    input: str
    output: str
    unit: str  # s, ms, us, ns or datetime
    extras: dict[str, str] = field(default_factory=dict)
    text: str | None = None  # key of a prompt that may stand in for the input length
    doubtful: bool = False  # tools disagree about the unit of `time`

    @property
    def keys(self) -> str:
        """The keys a row must have, as an error message lists them."""
        return f"{self.time}, {self.input}{f' or {self.text}' if self.text else ''}, {self.output}"

    def matches(self, keys: Iterable[str]) -> bool:
        """Whether a row with these keys is of this format; further keys do not matter."""
        have = set(keys)
        return {self.time, self.output} <= have and bool(have & {self.input, self.text})


CANONICAL = {key: key for key in OPTIONAL}

# The first match wins; guidellm has Mooncake's keys but counts in seconds, so it is only ever asked for by name.
FORMATS = {
    f.name: f
    for f in (
        Format("mooncake", "timestamp", "input_length", "output_length", "ms", CANONICAL, "text_input", doubtful=True),
        Format("guidellm", "timestamp", "input_length", "output_length", "s", CANONICAL),
        Format("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", "datetime"),
        Format(
            "burstgpt", "Timestamp", "Request tokens", "Response tokens", "s",
            {"Session ID": "session_id", "Model": "model", "Log Type": "log_type", "Elapsed time": "elapsed_time"},
        ),
        Format(
            "vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens", "s",
            {"session_id": "session_id", "request_id": "id"},
        ),
        Format("splitwise", "arrival_timestamp", "prompt_size", "token_size", "s", {"request_id": "id"}),
        Format(
            "llmservingsim", "arrival_time_ns", "input_toks", "output_toks", "ns",
            {"session_id": "session_id", "delay": "delay"},
        ),
        Format(
            "blis", "arrival_time_us", "input_tokens", "output_tokens", "us",
            {key: key for key in ("session_id", "slo_class", "model", "status")} | {"request_id": "id"},
        ),
        Format(
            "baseten", "timestamp_start_unix_ms", "input_tokens", "output_tokens", "ms",
            {"provided_session_id": "session_id", "total_hashes": "hash_ids", "block_size": "block_size"},
        ),
        Format("weka", "t", "in", "out", "s", {"id": "id", "hash_ids": "hash_ids"}, doubtful=True),
    )
}  # fmt: skip


def named(name: str) -> Format:
    """The format of this name; an error lists those there are."""
    if name not in FORMATS:
        raise TraceError(f"no trace format named {cut(name)}, expected one of: {', '.join(FORMATS)}, sharegpt")
    return FORMATS[name]


def recognise(place: str, keys: Iterable[str]) -> Format:
    """The format whose keys these are; an error lists the key sets known."""
    have = [str(key) for key in keys]
    for candidate in FORMATS.values():
        if candidate.matches(have):
            return candidate
    known = "; ".join(f"{f.name} ({f.keys})" for f in FORMATS.values() if f.name != "guidellm")
    found = f"keys {shown_keys(have)} are of no known trace"
    raise TraceError(f"{place}: {found}, expected one of: {known}; sharegpt (conversations)")


def shown_keys(keys: list[str]) -> str:
    """Keys as an error message shows them: on one line and not too long."""
    text = " ".join(", ".join(keys).split())
    return text if len(text) <= 80 else text[:77] + "..."
