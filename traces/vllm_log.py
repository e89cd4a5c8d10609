"""Requests from the log that `vllm serve` prints: its lines of requests and responses, matched by id.

    INFO 10-01 18:43:27 [logger.py:36] Received request ID: prompt: '...', params: SamplingParams(...), prompt_token_ids: [...]
    DEBUG 02-13 11:33:33 [logger.py:39] Request ID details: prompt: '...', prompt_token_ids: [...]
    INFO 02-13 11:33:33 [logger.py:49] Received request ID: params: SamplingParams(...)
    INFO 02-13 11:33:39 [logger.py:80] Generated response ID: output: '...', output_token_ids: [...], finish_reason: stop

The first line is that of older versions; newer ones print the next two in its place.
"""  # noqa: E501

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..engine.errors import TraceError, cut
from .formats import Format
from .parse import BYTES_PER_TOKEN, num_tokens
from .rows import Row, Rows
from .trace import MAX_LENGTH

VLLM_LOG = Format("vllm-log", "arrival", "input_length", "output_length", "s", {"id": "id"})

LINE = re.compile(r"^(?:\(.*?\) )?(?:INFO|DEBUG) (\d\d-\d\d \d\d:\d\d:\d\d) (?:\[\S+\]|\S+\]) (.*)$")
ACCESS = re.compile(r'^(?:\(.*?\) )?INFO: +\S+ - "[A-Z]+ \S+ HTTP/[\d.]+" \d{3}')
RECEIVED = re.compile(r"Received request (\S+): ")
DETAILS = re.compile(r"Request (\S+) details: ")
GENERATED = re.compile(r"Generated response (\S+?)(?: \(streaming (?:complete|delta)\))?: ")
HALF_A_YEAR = timedelta(days=183)
HOW = "vllm serve --enable-log-requests --enable-log-outputs, with VLLM_LOGGING_LEVEL=DEBUG"


@dataclass(slots=True)
class Seen:
    line: int
    time: datetime | None = None
    num_input: int | None = None
    num_output: int | None = None
    max_tokens: int | None = None


def is_vllm_log(text: str) -> bool:
    """Whether one of the first lines is the server's."""
    return any(LINE.match(line) or ACCESS.match(line) for line in text[:65536].split("\n", 200)[:200])


def rows_of_log(path: str, text: str) -> tuple[Rows, list[str]]:
    """One row per request, and warnings; TraceError if the log lacks times or lengths."""
    seen: dict[str, Seen] = {}
    last: datetime | None = None
    num_access = guessed = 0
    for number, line in enumerate(text.split("\n"), start=1):
        found = LINE.match(line)
        if found is None:
            num_access += bool(ACCESS.match(line))
            continue
        message = found[2]
        received, details, generated = (kind.match(message) for kind in (RECEIVED, DETAILS, GENERATED))
        about = received or details or generated
        if about is None:
            continue
        request = seen.setdefault(about[1], Seen(number))
        length, by_text = length_of(message, "output" if generated else "prompt", about.end())
        guessed += by_text
        if generated:
            request.num_output = length
        elif length is not None:
            request.num_input = length
        if received:
            last = request.time = moment(path, number, found[1], last)
            most = re.findall(r"\bmax_tokens=(\d+)", message)
            if most and len(most[-1]) > len(str(MAX_LENGTH)):
                raise TraceError(f"{path}:{number}: max_tokens is {cut(most[-1])}, expected at most {MAX_LENGTH}")
            request.max_tokens = int(most[-1]) if most else None
    whole = {name: request for name, request in seen.items() if request.time is not None}
    if not whole:
        raise TraceError(
            f"{path} holds {num_access} access lines and no `Received request` lines: neither times nor lengths, "
            f"expected the log of {HOW}"
        )
    for name, request in whole.items():
        for what, value in (("prompt", request.num_input), ("output", request.num_output or request.max_tokens)):
            if value is None:
                raise TraceError(
                    f"{path}:{request.line}: request {name[:40]} has no {what} length, expected the log of {HOW}"
                )
    return table(path, whole, guessed)


def table(path: str, whole: dict[str, Seen], guessed: int) -> tuple[Rows, list[str]]:
    """Requests with a time, and warnings."""
    begin = min(request.time for request in whole.values() if request.time is not None)
    rows: list[Row | str] = [
        {
            "arrival": (request.time - begin).total_seconds() if request.time is not None else None,
            "input_length": request.num_input,
            "output_length": request.max_tokens if request.num_output is None else request.num_output,
            "id": name,
        }
        for name, request in whole.items()
    ]
    warnings = ["times of a vLLM log are whole seconds: a replay may want --jitter 1"]
    unanswered = sum(request.num_output is None for request in whole.values())
    if unanswered:
        warnings.append(f"{unanswered} requests have no response line: max_tokens, the upper limit, is used")
    if guessed:
        warnings.append(f"{guessed} lengths are estimates from the text ({BYTES_PER_TOKEN} bytes a token)")
    return Rows(path, [request.line for request in whole.values()], rows), warnings


def moment(path: str, number: int, text: str, last: datetime | None) -> datetime:
    """The log has no years: half a year back begins a new one."""
    year = 2000 if last is None else last.year  # a leap year
    try:
        found = datetime.strptime(f"{year}-{text}", "%Y-%m-%d %H:%M:%S")
        return found.replace(year=year + 1) if last is not None and last - found > HALF_A_YEAR else found
    except ValueError:
        raise TraceError(f"{path}:{number}: time is {text}, expected MM-DD HH:MM:SS") from None


def length_of(message: str, what: str, begin: int) -> tuple[int | None, bool]:
    """Tokens of a prompt or output, and whether they are estimated from text; None if the line has neither.

    begin: the text's position, since texts may quote others.
    """
    ids = re.findall(rf"\b{what}_token_ids: (?:array\('i', )?[\[(]([\d, ]*)[\])]", message)
    if ids:
        return (ids[-1].count(",") + 1 - ids[-1].rstrip().endswith(",")) if ids[-1].strip() else 0, False
    text = re.compile(rf"""{what}: (?:'(.*?)(?<!\\)'|"(.*?)(?<!\\)")(?:, |$)""").match(message, begin)
    quoted = text and (text[1] or text[2])
    return (num_tokens(quoted), True) if quoted else (None, False)
