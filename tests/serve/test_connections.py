"""What connections may take of `dsim serve`: their number, their time, and how they end."""

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import pytest

from dsim.engine.errors import DsimError
from dsim.engine.state import COMPLETED
from dsim.serve import server as server_module
from dsim.serve.open import Behind
from dsim.serve.protocol import ConnectionLimits
from dsim.serve.server import most_connections

from ..attack.clients import request
from ..held_up import PATIENCE
from .serving import Running, serving, until
from .twins import SLOW

BODY = json.dumps({"prompt": [0], "max_tokens": 6}).encode()


def sent(server: Running, data: bytes) -> socket.socket:
    """A connection on which these bytes were sent."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    client.sendall(data)
    return client


def reply(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    data = b""
    while more := client.recv(1 << 16):
        data += more
    client.close()
    return data


def test_half_sent_requests_beyond_the_limit_give_way_to_honest_ones(twin: Callable[..., Behind]) -> None:
    with serving(twin(SLOW), limits=ConnectionLimits(4, patience=600.0)) as server:
        served = server.begin(prompt=[0], max_tokens=16)
        until(lambda: server.behind.fleet.engines[0].num_running == 1)
        for length in (0, 30, len(request(BODY)) - 1):  # nothing, half a head, half a body
            clients = [sent(server, request(BODY)[:length]) for _ in range(8)]
            assert server.ask("GET", "/health").status == 200
            assert len(server.server.server_state.connections) <= 4
            for client in clients:
                client.close()
        assert served.getresponse().status == 200  # what is served stays


@pytest.mark.parametrize("length", [0, 30, len(request(BODY)) - 1])
def test_a_request_that_does_not_come_in_time_gets_408(twin: Callable[..., Behind], length: int) -> None:
    with serving(twin(), limits=ConnectionLimits(8, patience=0.2)) as server:
        assert reply(sent(server, request(BODY)[:length])).startswith(b"HTTP/1.1 408 ")


def test_a_trickle_of_bytes_does_not_hold_a_connection(twin: Callable[..., Behind]) -> None:
    with serving(twin(), limits=ConnectionLimits(8, patience=2.0), api_key="secret") as server:
        client = sent(server, request(b"", length=10**6))  # refused for its key, before its body
        assert client.recv(1000).startswith(b"HTTP/1.1 401 ")

        def trickled() -> bool:
            with suppress(ConnectionError):
                client.sendall(b"x")
            return not server.server.server_state.connections

        until(trickled)
        client.close()


def test_a_client_that_does_not_read_is_disconnected(twin: Callable[..., Behind]) -> None:
    with serving(twin(SLOW), limits=ConnectionLimits(8, patience=2.0)) as server:
        client = server.begin(prompt=[0], max_tokens=200, stream=True)
        until(lambda: server.behind.fleet.engines[0].num_running == 1)
        (connection,) = server.server.server_state.connections
        connection.loop.call_soon_threadsafe(connection.pause_writing)  # as the transport does when its buffer is full
        until(lambda: server.behind.fleet.idle)
        client.close()
    assert server.behind.columns()["status"].tolist() != [COMPLETED]  # it was not simply served to its end


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_gets_its_reply(twin: Callable[..., Behind], stream: bool) -> None:
    body = json.dumps({"prompt": [0], "max_tokens": 6, "stream": stream}).encode()
    with serving(twin()) as server:
        client = sent(server, request(body))
        client.shutdown(socket.SHUT_WR)
        data = reply(client)
    assert b"HTTP/1.1 200 " in data
    assert b'"completion_tokens":6' in data


def test_a_body_beyond_the_limit_gets_413_whatever_its_size(twin: Callable[..., Behind]) -> None:
    with serving(twin(), max_body=1000) as server:
        for size in (1001, 9_000_000):
            data = reply(sent(server, request(b"x" * size, "connection: close")))
            assert data.startswith(b"HTTP/1.1 413 ")
            assert data.endswith(b'"code":413}}')


def test_the_soft_limit_of_files_is_raised_and_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 1024)]
    system = SimpleNamespace(
        RLIMIT_NOFILE=7, RLIM_INFINITY=-1, getrlimit=lambda _: limits[-1], setrlimit=lambda _, pair: limits.append(pair)
    )
    monkeypatch.setattr(server_module, "resource", system)
    assert most_connections() == 1024 - 64 - 256
    assert limits[-1] == (1024, 1024)
    assert most_connections(100) == 100
    with pytest.raises(DsimError, match="--max-connections is 2000, expected 1 to 704"):
        most_connections(2000)
