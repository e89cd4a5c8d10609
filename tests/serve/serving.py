"""A server of this process, in a thread of its own, and clients of the standard library."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsim.engine.journal import StepTotals
from dsim.engine.latency import LatencyModel
from dsim.serve.app import Settings, application
from dsim.serve.open import Behind
from dsim.serve.server import LOOPBACK, Server, ServerOptions

from ..held_up import PATIENCE

Twin = Callable[..., Behind]  # the fixture `twin`
JSON = {"content-type": "application/json"}
FAST = LatencyModel(((0.0, 0.002), (16.0, 0.003), (32.0, 0.004)), 0.0)
SLOW = LatencyModel(((0.0, 0.2), (16.0, 0.2), (32.0, 0.2)), 0.0)
CHUNK = "chunk:2,block_length=4,max_batch=4,num_pages=64,page_size=8"


@dataclass
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def chunks(self) -> list[Any]:
        """The objects of a stream, which must end as it should."""
        events = self.body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], events[-3:]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


class Running:
    """A server that runs, and its clients' side."""

    def __init__(self, behind: Behind, server: Server) -> None:
        self.behind = behind
        self.server = server
        self.port = 0
        self.totals: StepTotals | None = None
        self.thread: threading.Thread

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Reply:
        """One request and its whole reply."""
        connection = self.connect()
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, data, {**JSON, **named})
        got = connection.getresponse()
        reply = Reply(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
        connection.close()
        return reply

    def begin(self, **body: Any) -> http.client.HTTPConnection:
        """Send a completion's request, and wait for nothing."""
        connection = self.connect()
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        return connection

    def complete(self, **body: Any) -> Reply:
        """A completion."""
        return self.ask("POST", "/v1/completions", body)

    def complete_many(self) -> None:
        """24 completions of lengths of their own, several at a time."""
        lengths = np.random.default_rng(0).integers(1, 40, (24, 2)).tolist()
        with ThreadPoolExecutor(8) as pool:
            replies = pool.map(lambda n: self.complete(prompt=[0] * n[0], max_tokens=n[1]), lengths)
            assert {reply.status for reply in replies} == {200}


@contextmanager
def serving(behind: Behind, *, api_key: str | None = None, drain: float = 30.0) -> Iterator[Running]:
    """Serve on a free port of the loopback; at the end what is in flight is served, and the replicas stop."""
    up = threading.Event()

    def started(url: str) -> None:
        running.port = int(url.rsplit(":", 1)[1])
        up.set()

    app = application(behind.fleet, behind.words, Settings("a model", behind.header, api_key, LOOPBACK))
    server = Server(app, ServerOptions("127.0.0.1", 0, drain), behind.fleet, started)
    running = Running(behind, server)
    behind.start()
    running.thread = thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert up.wait(PATIENCE)
        yield running
    finally:
        server.should_exit = True
        thread.join()
        running.totals = behind.fleet.stop()


def until(true: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
