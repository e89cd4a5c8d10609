"""Read a gateway's log as a client's measurements: each request's start, first token and end.

Reads LiteLLM's spend logs (`LiteLLM_SpendLogs` in BerriAI/litellm, schema.prisma; an unseen first token has
`completionStartTime` at the end or empty), OpenTelemetry spans, and other logs with `--columns`.
"""

import math
from pathlib import Path

import numpy as np

from ...engine.errors import DsimError, TraceError, cut
from ...traces.chosen import is_good
from ...traces.formats import FORMATS, MEASURED, TICKS_PER_SECOND
from ...traces.load import Asked, read
from ...traces.rows import read_bytes
from .read import ClientLog, Sent, failed, is_client, read_client

EXAMPLE = "arrival=START,first=FIRST_TOKEN,end=END,input=COLUMN,output=COLUMN"
TOOLS = {"litellm": "LiteLLM", "sglang": "SGLang", "otlp": "OpenTelemetry"}


def read_measured(
    path: Path,
    columns: str | None = None,
    only: str | None = None,
    time_unit: str | None = None,
    skip_bad: bool = False,
) -> tuple[ClientLog, list[str]]:
    """The requests in a gateway's log or a load generator's file, and warnings.

    columns: the log's names; only: `model=NAME` or `COLUMN=VALUE`.
    """
    if columns is None and is_client(read_bytes(path)):
        if only is not None:
            raise DsimError(f"--only is {cut(only)} and {path} is a load generator's file: expected a gateway's log")
        return read_client(path), []
    for ours in ("first", "end"):
        if columns is not None and not any(part.partition("=")[0].strip() == ours for part in columns.split(",")):
            raise TraceError(f"--columns {cut(columns)} lacks {ours}, expected {EXAMPLE}")
    found, form = read(path, Asked(None, columns, only, skip_bad))
    if not form.end or not found.waited:
        known = "; ".join(f"{f.name} ({f.keys}, {f.wait or f.first}, {f.end})" for f in FORMATS.values() if f.end)
        raise TraceError(
            f"{path}: a log of {form.name} lacks the times at which answers began and ended, expected one of: {known}; "
            f"or --columns {EXAMPLE}"
        )
    if time_unit is not None and form.unit == "datetime":
        raise TraceError(f"{path}: {form.time} is a date and time, expected no --time-unit (it is {time_unit})")
    ticks = TICKS_PER_SECOND["ns" if form.unit == "datetime" else time_unit or form.unit]
    waits = (found.waited[name] / ticks for name in MEASURED)
    start = found.time / ticks
    status = found.extras.get("status", [None] * len(start))
    requests = [
        Sent(sent, sent + first, sent + end, num_input, num_output, 0)
        if num_output and not np.isnan(end)
        else failed(sent, num_input, "no output" if is_good(said) else str(said))
        for sent, first, end, num_input, num_output, said in zip(
            start.tolist(), *(wait.tolist() for wait in waits), found.input_length.tolist(),
            found.output_length.tolist(), status, strict=True,
        )
    ]  # fmt: skip
    requests.sort(key=lambda sent: sent.sent)
    warnings = list(found.warnings)
    whole = sum(not sent.error and math.isnan(sent.first) for sent in requests)
    if whole:
        warnings.append(
            f"{whole} of {len(requests)} answers have no time of their first token: their ttft and tpot are missing"
        )
    model = next((str(name) for name in found.extras.get("model", []) if name), "")
    return ClientLog(str(path), TOOLS.get(form.name, "gateway"), model, tuple(requests), is_trace=True), warnings
