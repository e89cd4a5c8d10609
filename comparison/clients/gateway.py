"""Read a gateway's log as a client's measurements: each request's start, first token and end.

Reads LiteLLM's spend logs (`LiteLLM_SpendLogs` in BerriAI/litellm, schema.prisma; an unseen first token has
`completionStartTime` at the end or empty), OpenTelemetry spans, and other logs with `--columns`.
"""

from dataclasses import replace
from pathlib import Path

from ...engine.errors import DsimError, TraceError, cut
from ...traces.formats import FORMATS, Asked
from ...traces.load import read_rows
from ...traces.rows import raw_rows, read_bytes
from .read import ClientLog, client_log, reader_of

EXAMPLE = "arrival=START,first=FIRST_TOKEN,end=END,input=COLUMN,output=COLUMN"
TOOLS = {"litellm": "LiteLLM", "sglang": "SGLang", "otlp": "OpenTelemetry"}


def read_measured(
    path: Path,
    columns: str | None = None,
    only: str | None = None,
    time_unit: str | None = None,
    skip_bad: bool = False,
    benchmark: int | None = None,
) -> tuple[ClientLog, list[str]]:
    """The requests in a gateway's log or a load generator's file, and warnings.

    columns: the log's names; only: `model=NAME` or `COLUMN=VALUE`; benchmark: which one of several, from 1.
    """
    asked = Asked(None, columns, only, skip_bad, time_unit)
    rows = raw_rows(str(path), read_bytes(path))
    read = reader_of(rows) if columns is None else None
    if read is not None:
        if only is not None:
            raise DsimError(f"--only is {cut(only)} and {path} is a load generator's file: expected a gateway's log")
        log = read(rows, benchmark, Asked(skip_bad=skip_bad))
        return log, list(log.warnings)
    for ours in ("first", "end"):
        if columns is not None and not any(part.partition("=")[0].strip() == ours for part in columns.split(",")):
            raise TraceError(f"--columns {cut(columns)} lacks {ours}, expected {EXAMPLE}")
    found, form = read_rows(rows, asked)
    if not any((wait == wait).any() for wait in found.waited.values()) and not any(found.reasons):
        known = "; ".join(f"{f.name} ({f.keys}, {f.ttft or f.first}, {f.end})" for f in FORMATS.values() if f.end)
        raise TraceError(
            f"{path}: a log of {form.name} lacks the times at which answers began and ended, expected one of: {known}; "
            f"or --columns {EXAMPLE}"
        )
    model = next((str(name) for name in found.extras.get("model", []) if name), "")
    log = client_log(str(path), TOOLS.get(form.name, "gateway"), model, found, form)
    return replace(log, is_trace=True), list(log.warnings)
