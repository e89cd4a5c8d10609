"""Kill `dsim follow` with SIGKILL at random moments, start it again in its folder, and see what was lost.

    python -m dsim.benchmarks.follow_kill [--kills 30] [--out DIR]

A twin serves constant requests; `dsim follow` reads it through a proxy that counts readings. A third of the kills come
at any moment after the start, a third after the first reading, a third while a reading is stored and judged. At the end
a follower that was never killed reads the stored samples, and the windows are compared.
"""

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from dsim.following.follower import Followed, Follower
from dsim.following.sources.sample import Sample
from dsim.following.store import Lines
from dsim.following.windows import Scrape
from dsim.results.scenario import Scenario

PYTHON = [sys.executable, "-u", "-m", "dsim"]
PROFILE, POLICY, SLO = "h100-sdar-8b/sglang", "sglang-fdfo", "e2el=30s"
INTERVAL, WINDOW, REQUESTS = 3.0, 9.0, 20  # s; s; requests of a window
RATE = 5.0  # req/s
LONGEST, SOON = 8.0, 1.0  # s until a kill; after a reading
MOMENTS = ("after the start", "after the first reading", "after a reading")
START = 60.0  # s for the first reading


@contextmanager
def served() -> Iterator[str]:
    """Under constant requests; its address."""
    command = ["serve", "--twin", PROFILE, "--policy", POLICY, "--port", "0"]
    with subprocess.Popen([*PYTHON, *command], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = next(found for line in server.stdout if (found := re.search(r"http://[\w.:]+", line)))
        over = threading.Event()
        asking = threading.Thread(target=_ask, args=(line.group(), over))
        asking.start()
        try:
            yield line.group()
        finally:
            over.set()
            asking.join()
            server.terminate()


def _ask(url: str, over: threading.Event) -> None:
    rng = np.random.default_rng(0)
    with ThreadPoolExecutor(64) as pool:
        while not over.wait(float(rng.exponential(1 / RATE))):
            prompt, answer = rng.integers(20, 200, 2).tolist()
            pool.submit(_complete, url, {"prompt": [0] * prompt, "max_tokens": answer})


def _complete(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).close()


class Proxy:
    """Counts readings of a server's page."""

    def __init__(self, url: str) -> None:
        self.readings = 0
        self.read = threading.Event()
        own = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with urllib.request.urlopen(url + self.path) as reply:
                    page = reply.read()
                try:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(page)
                except OSError:  # killed while reading
                    return
                own.readings += 1
                own.read.set()

            def log_message(self, *of: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()


def follow(proxy: Proxy, folder: Path, port: int) -> "subprocess.Popen[str]":
    command = [
        "follow", proxy.url, "--policy", POLICY, "--profile", PROFILE, "--slo", SLO, "--interval", f"{INTERVAL}",
        "--window", f"{WINDOW}", "--min-requests", f"{REQUESTS}", "--port", f"{port}", "-o", str(folder),
    ]  # fmt: skip
    return subprocess.Popen([*PYTHON, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def whole(folder: Path, name: str) -> list[dict[str, Any]]:
    """The whole lines of a folder's store."""
    return list(Lines(folder / name, 1 << 30)) if (folder / name).exists() else []


def num_read(folder: Path) -> int:
    """The stored readings that the server answered."""
    return sum(any(line["samples"]) for line in whole(folder, "samples"))


def killed(kills: int, folder: Path, port: int, seed: int = 0) -> dict[str, Any]:
    """What was lost at each kill."""
    rng = random.Random(seed)
    runs: list[dict[str, Any]] = []
    with served() as url:
        proxy = Proxy(url)
        for kill in range(kills + 1):
            readings, windows = proxy.readings, whole(folder, "windows")
            samples = num_read(folder)
            proxy.read.clear()
            process = follow(proxy, folder, port)
            moment = MOMENTS[kill % len(MOMENTS)]
            if moment != MOMENTS[0]:
                proxy.read.wait(START)
            time.sleep(rng.uniform(0.0, LONGEST))
            if moment == MOMENTS[2]:
                proxy.read.clear()
                proxy.read.wait(START)
                time.sleep(rng.uniform(0.0, SOON))
            ended = process.poll()
            last = kill == kills
            process.send_signal(signal.SIGINT if last else signal.SIGKILL)
            text = process.communicate()[0]
            after = whole(folder, "windows")
            runs.append(
                {
                    "moment": moment, "ended": ended, "code": process.returncode, "readings": proxy.readings - readings,
                    "stored": num_read(folder) - samples, "windows": len(after) - len(windows),
                    "kept": after[: len(windows)] == windows,
                    "refused": [line for line in text.splitlines() if "Error" in line or "Traceback" in line],
                }
            )  # fmt: skip
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
        proxy.close()
    return {"runs": runs, **compared(folder)}


def compared(folder: Path) -> dict[str, Any]:
    """The folder's windows, and those of a follower never killed."""
    scenario = Scenario(trace="", policy=POLICY, profile=PROFILE, slos=(SLO,))
    with tempfile.TemporaryDirectory() as other:
        followed = Followed(scenario, ("twin",), INTERVAL, WINDOW, REQUESTS, outlook=False)
        follower = Follower(followed, Path(other))
        for line in whole(folder, "samples"):
            samples = tuple(None if s is None else Sample.from_json(s) for s in line["samples"])
            follower.add(Scrape(float(line["time"]), samples))
        expected = whole(Path(other), "windows")
    found = whole(folder, "windows")
    # Forecasts and fits are left out: the moments when the background answers may differ.
    judged = [{name: value for name, value in other.items() if name not in ("known", "state")} for other in expected]
    same = [{name: one[name] for name in other} == other for one, other in zip(found, judged, strict=False)]
    return {"windows": len(found), "expected": len(expected), "same": sum(same)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--port", type=int, default=9187)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    # A shell's background job ignores Ctrl-C; the processes that it starts would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as made:
        found = killed(asked.kills, asked.out or Path(made) / "followed", asked.port)
    every = found.pop("runs")
    runs = [run for run in every if run["code"] == -signal.SIGKILL]
    found |= {
        "kills": len(runs),
        "readings": sum(run["readings"] for run in runs),
        "most_lost_by_a_kill": max(run["readings"] - run["stored"] for run in runs),
        "lost": sum(run["readings"] - run["stored"] for run in runs),
        "refused": sum(bool(run["refused"]) or run["ended"] is not None or not run["kept"] for run in every),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
