"""A server, from its options to its run's files: it runs until a signal, and requests in flight finish first."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ..engine.errors import DsimError
from ..engine.journal import Append
from ..files.interrupt import handled
from ..files.read import FilePath
from ..report.run_page import RunResult, run_html
from ..results.run_folder import RunWriter
from ..results.slo import Slo
from .app import Settings, application
from .open import Behind
from .served import STOPPING, AccessLog, Fleet

LAST_BYTES = 1.0  # s for clients to receive the ends of aborted replies
MAX_CONNECTIONS = 1000  # further clients get 503
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
KEEP_ALIVE = 65  # s for which an idle connection stays open


class Server(uvicorn.Server):
    """The first Ctrl-C, SIGTERM or SIGHUP lets requests in flight finish, the second does not.

    Signals are not raised again at the end, as uvicorn does: the caller writes a journal. If a replica fails, the
    server ends once the others have served their requests.
    """

    def __init__(
        self, app: Starlette, options: "ServerOptions", fleet: Fleet, started: Callable[[str], None] = lambda url: None
    ) -> None:
        limits: dict[str, Any] = {"limit_concurrency": MAX_CONNECTIONS, "timeout_keep_alive": KEEP_ALIVE}
        quiet: dict[str, Any] = {"access_log": False, "log_config": None, "server_header": False}
        address: dict[str, Any] = {"host": options.host, "port": options.port}
        super().__init__(uvicorn.Config(app, http="h11", lifespan="off", ws="none", **address, **limits, **quiet))
        self._drain = options.drain
        self._fleet = fleet
        self._on_start = started
        self._failed_at: float | None = None

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Listen, and report the address."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            if ":" in host:
                host = f"[{host}]"
            self._on_start(f"http://{host}:{port}")

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
        await asyncio.sleep(LAST_BYTES)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While the server runs; ignored signals stay ignored."""
        with handled(self._stop):
            yield

    def _stop(self, _signum: int, _frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


@dataclass(frozen=True)
class ServerOptions:
    """Options that concern clients."""

    host: str
    port: int
    drain: float = 60.0  # s that requests in flight may take after a signal
    served_name: str | None = None
    api_key: str | None = None
    access_log: FilePath | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise DsimError(f"--port is {self.port}, expected 0 to 65535")


@dataclass(frozen=True)
class Served:
    """What a server's life left."""

    run: RunResult
    failure: str | None  # of a replica
    started: bool  # False: it could not listen


def serve_until_stopped(
    open_fleet: Callable[[Append | None], Behind],
    options: ServerOptions,
    slos: Sequence[str],
    policy: str,
    *,
    out: Path | None,
    force: bool,
    say: Callable[[str], None],
) -> Served:
    """Serve until a signal, then write the run's folder. open_fleet: takes the journal's `append`."""
    objectives = [Slo.parse(text) for text in slos]
    for slo in objectives:
        slo.check_class(())
    folder: Any = RunWriter(out, force=force) if out is not None else nullcontext()
    with folder as writer:
        append = partial(writer.append, policy) if writer is not None else None
        behind = open_fleet(append)
        fleet = behind.fleet
        if options.access_log is not None:
            fleet.access = AccessLog(Path(options.access_log), fleet.clock.opened, force)
        name = options.served_name or behind.model
        hosts: tuple[str, ...] = ("*",)
        if options.host in LOOPBACK:  # a page in a browser could reach it by a name of its own (DNS rebinding)
            hosts = LOOPBACK
        app = application(fleet, behind.words, Settings(name, behind.header, options.api_key or None, hosts))
        server = Server(app, options, fleet, lambda url: say(f"Serving {name}: {behind.about}, on {url}"))
        behind.start()
        try:
            with suppress(SystemExit):  # uvicorn cannot listen; its log says why
                server.run()
        finally:
            totals = fleet.stop()
        info = behind.run_info(behind.summarize(totals, objectives), objectives)
        if writer is not None:
            writer.requests(policy, behind.columns())
            writer.finish(info, run_html)
    return Served(RunResult.from_info(info), fleet.failure, server.started)
