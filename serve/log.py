"""The server's log: an event appears at its 1st, 10th, 100th ... time."""

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOGGERS = ("asyncio", "dsim.serve", "uvicorn.error")
MOST_KINDS = 100


class Counted(logging.Handler):
    """Counts events by kind: clients can cause any number of them."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Log the event if its count is a power of ten."""
        error = record.exc_info[1] if record.exc_info else None
        first_line = str(record.msg).strip().partition("\n")[0]  # asyncio adds object addresses below
        kind = (record.name, first_line, type(error).__name__)
        if kind not in self._counts and len(self._counts) >= MOST_KINDS:
            kind = (record.name, "other", "")
        self._counts[kind] += 1
        count = self._counts[kind]
        if str(count).strip("0") != "1":
            return
        line = f"{record.levelname.capitalize()}: {record.getMessage().strip() if error is None else first_line}"
        if error is not None:
            line += f": {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if frames := traceback.extract_tb(error.__traceback__):
                line += f" ({frames[-1].filename}:{frames[-1].lineno})"
        self._tell(line if count == 1 else f"{line} ({count:,} times)")


@contextmanager
def counted(tell: Callable[[str], None]) -> Iterator[None]:
    """Send the logs of the server's libraries through one counting handler."""
    handler = Counted(tell)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, (propagate, level) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
            logger.setLevel(level)
