"""The access log: a JSON line for each request that ended, which `dsim replay` reads as a trace."""

import json
import threading
from pathlib import Path
from typing import Any

from ..files.write import check_file


class AccessLog:
    """Arrivals are s since 1970, by the server's clock; `dsim replay` knows the format as `dsim`."""

    def __init__(self, path: Path, opened: float, force: bool = False) -> None:
        """opened: when the server's clock was 0 (s since 1970)."""
        self._opened = opened
        self._file = check_file(path, force=force).open("w", encoding="utf-8", buffering=1)  # a line at a time
        self._lock = threading.Lock()

    def write(
        self, index: int | None, status: str, arrival: float, input_length: int, max_tokens: int, num: int = 0,
        first: float | None = None, end: float | None = None,
    ) -> None:  # fmt: skip
        """Write a request. arrival, and first and end of its tokens, if they came: by the server's clock (s)."""
        line: dict[str, Any] = {
            "arrival": self._opened + arrival, "input_length": input_length, "output_length": num,
            "max_tokens": max_tokens, "status": status,
        }  # fmt: skip
        if index is not None:
            line["id"] = str(index)
        if first is not None:
            line["measured_ttft"] = first - arrival
        if end is not None:
            line["measured_e2el"] = end - arrival
        with self._lock:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Write what is left."""
        self._file.close()
