"""What fails behind `dsim serve`: a request, a replica, the journal, the disk. Each client gets an answer."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsim.engine.state import UNFINISHED
from dsim.engine.step import StepOutcome, StepPlan
from dsim.results.run import read_run
from dsim.serve.served import STOPPING, Fleet, RefusedError
from dsim.sim.routers import Router

from ..checks import cases, refused
from ..cli.command import dsim
from ..held_up import PATIENCE
from .serving import SLOW, Running, Twin, serving, until


class FailsAt:
    """Calls through to what it stands for, and fails at the n-th call."""

    def __init__(self, n: int, call: Callable[..., Any], error: Exception) -> None:
        self._left = n
        self._call = call
        self._error = error

    def __call__(self, *of: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return self._call(*of)

    step = __call__


@cases("n", 1, 5)
def test_an_executor_that_fails_at_its_nth_step_ends_its_clients_and_the_server(
    n: int, twin: Twin, caplog: pytest.LogCaptureFixture
) -> None:
    why = "replica 0 failed: ValueError: a fault"
    behind = twin()
    executor = FailsAt(n, behind.executors[0].step, ValueError("a fault"))
    with serving(replace(behind, executors=[executor])) as server:

        def client(i: int) -> bool:
            try:
                reply = server.complete(prompt=[0], max_tokens=12, stream=i % 2 == 1)
            except ConnectionError:  # the server has ended by then
                return True
            if reply.status == 200:
                return i % 2 == 0 or reply.body.endswith(b"data: [DONE]\n\n") or why.encode() in reply.body
            return why in reply.json["error"]["message"]

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(client, range(6)))
        until(lambda: not server.thread.is_alive())
    assert server.behind.fleet.failure == why
    logged = [record.getMessage() for record in caplog.records if record.name == "dsim.serve"]
    assert (logged[0], len(logged)) == (why, 2)  # and once its traceback


def test_health_tells_of_a_failed_replica_while_the_others_serve(twin: Twin) -> None:
    behind = twin(SLOW, replicas=2)
    second = behind.fleet.engines[1]

    def fails(_plan: StepPlan) -> StepOutcome:
        until(lambda: second.num_running == 1)  # or the server, which is idle then, ends
        raise ValueError("a fault")

    executors = [SimpleNamespace(step=fails), *behind.executors[1:]]
    with serving(replace(behind, executors=executors)) as server:
        connections = [server.begin(prompt=[0], max_tokens=8) for _ in range(2)]  # round robin
        until(lambda: server.behind.fleet.failure is not None and second.num_running == 1)
        health = server.ask("GET", "/health")
        refused = server.complete(prompt=[0], max_tokens=4)
        replies = sorted(connection.getresponse().status for connection in connections)
        until(lambda: not server.thread.is_alive())
    assert (health.status, health.body) == (503, b"replica 0 failed: ValueError: a fault\n")
    assert (refused.status, "retry-after" in refused.headers) == (503, False)
    assert replies == [200, 503]


def test_a_request_handed_in_as_a_replica_fails_is_answered(twin: Twin) -> None:
    """The replica fails between the check that it serves and the request's entry: it has told its clients by then."""
    fleet: Fleet = twin().fleet
    end, told, go, leave = fleet._end, threading.Event(), threading.Event(), threading.Event()

    def late(replica: int) -> None:
        end(replica)
        told.set()
        leave.wait(PATIENCE)  # the thread lives on

    class Fails:
        def step(self, plan: Any) -> Any:
            go.wait(PATIENCE)
            raise ValueError("a fault")

    class Waits(Router):
        def route(self, replicas: Any, request: Any) -> int:
            if request.index == 1:
                go.set()
                assert told.wait(PATIENCE)
            return 0

    fleet._end = late  # type: ignore[method-assign]
    fleet.router = Waits()
    fleet.start([Fails()])

    async def hand_in() -> Any:
        first = fleet.submit([0], 4)
        with refused("replica 0 failed", RefusedError):
            fleet.submit([0], 4)
        assert await first.emissions.get() == "replica 0 failed: ValueError: a fault"

    asyncio.run(hand_in())
    assert fleet.idle
    leave.set()
    fleet.stop()


def test_a_server_whose_replica_failed_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.serve.open.PacedTwin.step", FailsAt(1, lambda plan: None, ValueError("a fault")))
    with socket.create_server(("127.0.0.1", 0)) as free:
        server = Running(None, None)  # type: ignore[arg-type]
        server.port = free.getsockname()[1]

    def client() -> int:
        until(lambda: listens(server))
        return server.complete(prompt=[0], max_tokens=4).status

    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(client)
        words = ("serve", "--twin", "a100-sdar-8b", "--policy", "chunk:2", "--port", str(server.port), "-o", "run")
        ran = dsim(*words)
    assert (status.result(), ran.code) == (503, 1)
    assert "Error: replica 0 failed: ValueError: a fault" in ran.err
    assert read_run(Path("run")).requests("chunk:2")["status"].tolist() == [UNFINISHED]


def test_a_drain_that_ends_says_so_to_whole_and_streamed_replies(twin: Twin) -> None:
    behind = twin(SLOW)  # steps go on until the replies have ended
    with serving(behind, drain=0.0) as server:
        connections = [server.begin(prompt=[0], max_tokens=200, stream=stream) for stream in (False, True)]
        until(lambda: behind.fleet.engines[0].num_running == 2)
        server.server.should_exit = True
        replies = [connection.getresponse() for connection in connections]
        bodies = [reply.read() for reply in replies]
    assert [reply.status for reply in replies] == [503, 200]
    error = b'"message":"' + STOPPING.encode() + b'","type":"server_error","code":503'
    assert error in bodies[0]
    assert bodies[1].rstrip().rsplit(b"\n\n")[-1] == b'data: {"error":{' + error + b"}}"
    assert behind.columns()["status"].tolist() == [UNFINISHED] * 2


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_writes_the_journal() -> None:
    process, server, _ = begun("-o", "run", "--speed", "0.5")
    connection = server.begin(prompt=[0], max_tokens=400)
    until(lambda: b"running{" in (said := server.ask("GET", "/metrics").body) and b'SDAR-8B"} 1.0\n' in said)
    process.send_signal(signal.SIGINT)
    until(lambda: not listens(server))
    code, _, err = ended(process)
    assert connection.getresponse().status == 503
    assert (code, "Traceback" in err) == (0, False), err
    assert read_run("run").requests("chunk:2")["status"].tolist() == [UNFINISHED]


@pytest.mark.slow
def test_a_port_in_use_is_one_line_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [*SERVE, "--port", str(taken.getsockname()[1])]
        ran = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ))
    loading, taken_by_another = ran.stderr.splitlines()
    assert (ran.returncode, loading) == (1, "Loading the twin of a100-sdar-8b, chunk:2")
    assert "address already in use" in taken_by_another


SERVE = [sys.executable, "-m", "dsim", "serve", "--twin", "a100-sdar-8b", "--policy", "chunk:2"]


def begun(*more: str) -> tuple[subprocess.Popen[str], Running, list[str]]:
    """A server's process, its clients' side, and the two lines that it begins with."""
    words = [*SERVE, "--port", "0", *(() if "--speed" in more else ("--speed", "1000")), *more]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    said = [process.stderr.readline() for _ in range(2)]
    server = Running(None, None)  # type: ignore[arg-type]
    server.port = int(said[1].rsplit(":", 1)[1])
    return process, server, said


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Stop a server: its exit code, output and errors."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def listens(server: Running) -> bool:
    """Whether a server accepts connections."""
    try:
        server.connect().connect()
    except ConnectionError:
        return False
    return True
