"""Runs the application on a socket until it is told to stop: what is in flight then is served to its end first."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.applications import Starlette


class Server(uvicorn.Server):
    """uvicorn's server. The first Ctrl-C or SIGTERM lets requests in flight end, the second does not.

    Signals are not raised again at the end, as uvicorn's own server does: the caller has a journal to write.
    """

    def __init__(
        self, app: Starlette, host: str, port: int, drain: float, started: Callable[[str], None] = lambda url: None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app, host=host, port=port, lifespan="off", ws="none", access_log=False, log_level="warning",
                timeout_keep_alive=65, timeout_graceful_shutdown=max(1, round(drain)), server_header=False,
            )
        )  # fmt: skip
        self._told = started

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Begin to listen, and say where."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._told(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Hold Ctrl-C and SIGTERM for as long as the server runs."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, _signum: int, _frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
