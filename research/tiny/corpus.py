"""The tiny model's texts: Python's standard library, and generated records."""

import hashlib
import json
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

NOT_SOURCE = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__", "ensurepip"}
HELD_OUT_SHARE = 20  # one file in 20 is never trained on
SERVICES = ("auth", "billing", "search", "mail", "cart", "stock")
LEVELS = ("INFO", "INFO", "INFO", "WARNING", "ERROR")
PATHS = ("/login", "/logout", "/items", "/items/search", "/cart/add", "/cart/pay", "/health")
WORDS = ("alpha", "beta", "gamma", "delta", "north", "south", "east", "west", "red", "green", "blue", "one", "two")


def source(held_out: bool) -> Bytes:
    """The interpreter's standard library (PSF licence), training or held-out files.

    By name alone, so other Python versions split alike.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not NOT_SOURCE & set(name.parts):
            kept_back = int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0
            if kept_back == held_out:
                parts.append(path.read_bytes())
    return np.frombuffer(b"\n".join(parts), np.uint8)


def records(seed: int, num_bytes: int) -> Bytes:
    """JSON log lines, sums, repetitions."""
    chance = np.random.default_rng(seed)
    text = ""
    parts: list[str] = []
    length = 0
    while length < num_bytes:
        text = (_log_lines, _sums, _repetitions)[int(chance.integers(3))](chance)
        parts.append(text)
        length += len(text)
    return np.frombuffer("".join(parts).encode()[:num_bytes], np.uint8)


def _log_lines(chance: np.random.Generator) -> str:
    time, number = int(chance.integers(1_700_000_000, 1_800_000_000)), int(chance.integers(1000, 9000))
    service = SERVICES[chance.integers(len(SERVICES))]
    lines = []
    for _ in range(int(chance.integers(4, 12))):
        time += int(chance.integers(0, 3))
        number += 1
        level = LEVELS[chance.integers(len(LEVELS))]
        entry = {
            "time": time, "level": level, "service": service, "request": number,
            "path": PATHS[chance.integers(len(PATHS))], "status": 200 if level == "INFO" else 500,
            "ok": level == "INFO",
        }  # fmt: skip
        lines.append(json.dumps(entry) + "\n")
    return "".join(lines) + "\n"


def _sums(chance: np.random.Generator) -> str:
    a, step = int(chance.integers(1, 90)), int(chance.integers(1, 10))
    lines = [f"{a + i * step} + {step} = {a + (i + 1) * step}\n" for i in range(int(chance.integers(6, 16)))]
    return "".join(lines) + "\n"


def _repetitions(chance: np.random.Generator) -> str:
    words = [WORDS[i] for i in chance.integers(len(WORDS), size=int(chance.integers(1, 5)))]
    line = "repeat: " + " ".join(words) + "\n"
    return line * int(chance.integers(4, 12)) + "\n"
