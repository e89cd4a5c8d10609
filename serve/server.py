"""Runs the application on a socket until a signal; requests in flight finish first."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ..files.interrupt import SIGNALS
from .fleet import STOPPING, Fleet

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

LAST_BYTES = 2.0  # s for clients to receive the ends of aborted replies
MAX_CONNECTIONS = 4096  # further clients get 503
KEEP_ALIVE = 65  # s for which an idle connection stays open


class Server(uvicorn.Server):
    """The first Ctrl-C, SIGTERM or SIGHUP lets requests in flight finish, the second does not.

    Signals are not raised again at the end, as uvicorn does: the caller writes a journal. If a replica fails, the
    server ends once the others have served their requests.
    """

    def __init__(
        self, app: Starlette, host: str, port: int, drain: float, fleet: Fleet,
        started: Callable[[str], None] = lambda url: None,
    ) -> None:  # fmt: skip
        super().__init__(
            uvicorn.Config(
                app, host=host, port=port, http="h11", lifespan="off", ws="none", access_log=False, log_config=None,
                limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=KEEP_ALIVE, server_header=False,
            )
        )  # fmt: skip
        self._drain = drain
        self._fleet = fleet
        self._told = started
        self._failed_at: float | None = None

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Listen, and report the address."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._told(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop. After a failure, /health reports it while other replicas serve their requests."""
        if self._fleet.failure is not None:
            now = asyncio.get_running_loop().time()
            self._failed_at = self._failed_at or now
            self.should_exit |= self._fleet.idle or now > self._failed_at + self._drain
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Serve requests in flight, end replies after the drain time, close all connections."""
        ending = asyncio.create_task(self._end_in_time())
        await super().shutdown(sockets)
        if self.server_state.tasks:  # a second signal came
            await ending
        ending.cancel()

    async def _end_in_time(self) -> None:
        until = asyncio.get_running_loop().time() + self._drain
        while asyncio.get_running_loop().time() < until and not self.force_exit:
            await asyncio.sleep(0.05)
        self._fleet.end_replies(STOPPING)
        for _ in range(round(LAST_BYTES / 0.05)):
            await asyncio.sleep(0.05)
            if not self.server_state.tasks:
                return
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0.05)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While the server runs; ignored signals stay ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._stop) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, _signum: int, _frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def raise_file_limit() -> None:
    """Raise the soft limit on open files to the hard one: each connection is a file."""
    if resource is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
