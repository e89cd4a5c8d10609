"""Hostile clients of `dsim serve`, on this machine's loopback alone: few connections, each closed within seconds."""

import contextlib
import dataclasses
import json
import logging
import socket
import struct
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from dsim.engine.latency import LatencyModel
from dsim.engine.state import UNFINISHED
from dsim.profiler.profile import save
from dsim.results.run_folder import RunWriter
from dsim.results.world import World
from dsim.serve.app import MAX_BODY
from dsim.serve.open import Behind, open_twin

from ...tests.serve.serving import Running, serving
from ...tests.worlds import TOY_MODEL, toy_profile
from . import mutate

POLICY = "chunk:2,block_length=4,max_batch=4,num_pages=64,page_size=8"
LATENCY = LatencyModel(((0.0, 0.0005), (16.0, 0.0005), (32.0, 0.0005)), 0.0)
BODY = {"prompt": [1, 2, 3], "max_tokens": 12}
WAIT = 20.0  # s for an answer


def request(body: bytes, *more: str, path: str = "/v1/completions", length: object = None) -> bytes:
    """A request's bytes."""
    length = len(body) if length is None else length
    head = [
        "POST " + path + " HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {length}",
    ]
    return "\r\n".join([*head, *more, "", ""]).encode("latin-1") + body


def _body(**more: Any) -> bytes:
    return json.dumps({**BODY, **more}).encode()


def _connect(port: int, receive: int | None = None) -> socket.socket:
    found = socket.socket()
    if receive is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    found.settimeout(WAIT)
    found.connect(("127.0.0.1", port))
    return found


def _leave(client: socket.socket, chance: Random) -> None:
    """Close, with a reset or without."""
    if chance.random() < 0.5:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def _to_the_end(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while more := client.recv(1 << 16):
            data += more
    client.close()
    return bytes(data)


def _statuses(data: bytes) -> list[int]:
    """The statuses of final responses, in order."""
    heads = [part for part in data.split(b"HTTP/1.1 ")[1:] if not part.startswith(b"100 ")]
    return [int(part[:3]) for part in heads]


def half_sent(chance: Random, port: int, left: list[socket.socket]) -> None:
    """Send a request up to any byte; stay, or go away."""
    data = request(_body(stream=chance.random() < 0.5))
    client = _connect(port)
    client.sendall(data[: chance.randrange(len(data))])
    if chance.random() < 0.5:
        left.append(client)
    else:
        _leave(client, chance)


def gone_while_it_reads(chance: Random, port: int, left: list[socket.socket]) -> None:
    """Read a reply up to any byte, and go away."""
    client = _connect(port)
    client.sendall(request(_body(stream=chance.random() < 0.7, max_tokens=chance.randrange(1, 200))))
    for _ in range(chance.randrange(3)):
        client.recv(chance.randrange(1, 400))
    _leave(client, chance)


def slow_reader(chance: Random, port: int, left: list[socket.socket]) -> None:
    """Ask for long streams, and read nothing."""
    client = _connect(port, receive=1024)
    client.sendall(request(_body(stream=True, max_tokens=200)))
    left.append(client)


def garbage(chance: Random, port: int, left: list[socket.socket]) -> None:
    """Send what is not HTTP, or not quite."""
    whole = request(_body())
    upgrade, coded = "upgrade: websocket", "transfer-encoding: gzip, chunked"
    data = chance.choice((
        chance.randbytes(chance.randrange(1, 3000)), b"\x16\x03\x01\x02\x00\x01\x00" + chance.randbytes(200),
        mutate.damaged(whole, chance), whole.replace(b"\r\n", b"\n", 2), b"\r\n" * 500,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", request(b"", upgrade, "connection: upgrade"), request(b"", coded),
    ))  # fmt: skip
    client = _connect(port)
    with contextlib.suppress(OSError):  # the server may have closed before the end
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
    assert set(_statuses(_to_the_end(client))) <= {200, 400, 401, 404, 405, 408, 413, 415, 501}


def giant(chance: Random, port: int, left: list[socket.socket]) -> None:
    """Send more than is taken: heads, bodies, chunks, and lengths that lie."""
    most = MAX_BODY
    big = b"x" * chance.randrange(most + 1, 2 * most)
    chunked = request(b"%x\r\n" % len(big) + big + b"\r\n0\r\n\r\n", "transfer-encoding: chunked")
    chunked = chunked.replace(b"content-length", b"x-length", 1)
    data, expected = chance.choice((
        (request(big, "connection: close"), {413}), (chunked, {413}),
        (request(b"", "x-more: " + "y" * chance.randrange(17_000, 300_000)), {400}),
        (request(_body(), length=chance.choice((-1, "1, 2", 10**30, "x", "+5"))), {400, 408, 413}),
        (request(_body(), length=3), {400}),
    ))  # fmt: skip
    client = _connect(port)
    with contextlib.suppress(OSError):  # the server may have closed before the end
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
    found = _statuses(_to_the_end(client))
    assert set(found) <= {*expected, 400}, found
    if expected == {413}:
        assert found[:1] in ([], [413]), found  # uvicorn closes a connection whose client ended its side


def wrong(chance: Random, port: int, left: list[socket.socket]) -> None:
    """Send JSON that is none, or of other types: an answer that is no fault of the server's."""
    body = mutate.json_text({**BODY, "stream": False, "n": 1}, chance)
    path = chance.choice(("/v1/completions", "/v1/chat/completions", "/v1/models", "/x"))
    client = _connect(port)
    client.sendall(request(body[: 2 * MAX_BODY], "connection: close", path=path))
    found = _statuses(_to_the_end(client))
    assert len(found) == 1, found
    assert found[0] in (200, 400, 404, 405, 413), found


def pipelined(chance: Random, port: int, left: list[socket.socket]) -> None:
    """Send several requests at once: all are answered, in order."""
    client = _connect(port)
    n = chance.randrange(2, 6)
    client.sendall(request(_body()) * n + request(_body(stream="no"), "connection: close"))
    found = _statuses(_to_the_end(client))
    assert found == [200] * n + [400], found


ACTS: tuple[Callable[[Random, int, list[socket.socket]], None], ...] = (
    half_sent, gone_while_it_reads, slow_reader, garbage, giant, wrong, pipelined,
)  # fmt: skip


@contextlib.contextmanager
def logged(lines: list[str]) -> Iterator[None]:
    """The server's warnings and errors, as lines."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(f"{record.levelname.capitalize()}: {record.getMessage()}")  # type: ignore
    loggers = [logging.getLogger(name) for name in ("asyncio", "dsim.serve", "uvicorn.error")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def hostile(work: Path, chance: Random, folder: Path) -> None:
    """Some acts against a server, then a stop in the middle of streams: it loses no honest request."""
    lines: list[str] = []
    full = chance.random() < 0.3
    with logged(lines), RunWriter(folder / "run") as writer:
        append = _failing(chance.randrange(1, 4)) if full else partial(writer.append, POLICY)
        behind = open_twin(World(trace="", policy=POLICY, profile=_profile(work)), append=append)
        left: list[socket.socket] = []
        try:
            with serving(behind, drain=chance.choice((0.0, 0.5))) as server:
                for _ in range(5):
                    chance.choice(ACTS)(chance, server.port, left)
                    _honest(server)
                if chance.random() < 0.5:
                    _drained(server)
        finally:
            for client in left:
                client.close()
        _check(behind, server, lines, full)
        writer.requests(POLICY, behind.columns())


def _honest(server: Running) -> None:
    reply = server.complete(prompt=[7] * 5, max_tokens=6)
    assert reply.status == 200, reply.body[:300]
    assert reply.json["usage"]["completion_tokens"] == 6


def _drained(server: Running) -> None:
    """Stop while a whole and a streamed reply are on their way: each ends, or says why not."""
    both = [server.begin(prompt=[7], max_tokens=200, stream=stream) for stream in (False, True)]
    for _ in range(2000):
        if server.behind.fleet.engines[0].submitted == server.behind.fleet.num_requests:
            break
    server.server.should_exit = True
    for connection in both:
        with contextlib.suppress(ConnectionError):  # it had not been read when the server stopped
            reply = connection.getresponse()
            data = reply.read()
            assert reply.status in (200, 503), (reply.status, data[:200])
            assert reply.status == 503 or b"[DONE]" in data or b'"usage"' in data or b'"error"' in data, data[-200:]
        connection.close()


def _check(behind: Behind, server: Running, lines: list[str], full: bool) -> None:
    """full: the journal's disk, which is told."""
    assert not server.thread.is_alive()
    assert behind.fleet.idle
    told = behind.fleet.failure
    assert told is None or (full and "No space left on device" in told), told
    faults = [line for line in lines if not line.startswith("Warning: ")]
    assert not faults, faults
    columns = behind.columns()
    assert np.isnan(columns["finish"][columns["status"] == UNFINISHED]).all()


def _failing(n: int) -> Callable[[Any, Any], None]:
    """A journal on a disk that is full from its n-th batch on."""
    left = [n]

    def append(_columns: Any, _lists: Any) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(28, "No space left on device")

    return append


@cache
def _profile(work: Path) -> str:
    save(dataclasses.replace(toy_profile(TOY_MODEL, LATENCY), name="toy"), work / "served.json", force=True)
    return str(work / "served.json")
