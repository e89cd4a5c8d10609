"""The access log: one JSON line per ended request; `dsim replay` reads it as a trace of format `dsim`."""

import json
import threading
from pathlib import Path
from typing import Any

from ..files.write import check_file


class AccessLog:
    """Arrivals are s since 1970, on the server's clock."""

    def __init__(self, path: Path, opened: float, force: bool = False) -> None:
        """opened: s since 1970 when the server's clock was 0."""
        self._opened = opened
        self._file = check_file(path, force=force).open("w", encoding="utf-8", buffering=1)  # flushes every line
        self._lock = threading.Lock()

    def write(
        self, index: int, status: str, arrival: float, input_length: int, max_tokens: int, num: int = 0,
        first: float | None = None, end: float | None = None,
    ) -> None:  # fmt: skip
        """arrival, first, end: s on the server's clock; first and end are of its tokens, if any."""
        line: dict[str, Any] = {
            "arrival": self._opened + arrival, "input_length": input_length, "output_length": num,
            "max_tokens": max_tokens, "status": status, "id": str(index),
        }  # fmt: skip
        if first is not None:
            line["measured_ttft"] = first - arrival
        if end is not None:
            line["measured_e2el"] = end - arrival
        with self._lock:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()
