"""A server, from its options to its run's files."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..engine.errors import DsimError
from ..engine.journal import Append
from ..report.run import RunResult, run_html
from ..results.run_folder import RunWriter
from ..results.slo import Slo
from .access import AccessLog
from .app import Settings, application, known_hosts
from .open import Behind
from .server import Server, raise_file_limit


@dataclass(frozen=True)
class ServerOptions:
    """Options that concern clients."""

    host: str
    port: int
    allow_host: Sequence[str] = ()
    served_name: str | None = None
    api_key: str | None = None
    access_log: str | Path | None = None
    drain: float = 60.0  # s that requests in flight may take to end

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise DsimError(f"--port is {self.port}, expected 0 to 65535")


@dataclass(frozen=True)
class Served:
    """What a server's life left."""

    run: RunResult
    failure: str | Exception | None  # of a replica, else of the journal
    started: bool  # False: it could not listen


def serve_until_stopped(
    open_fleet: Callable[[Append | None], Behind], options: ServerOptions, slos: Sequence[str],
    policy: str, out: Path | None, force: bool, say: Callable[[str], None],
) -> Served:  # fmt: skip
    """Serve until a signal, then write the run's folder. open_fleet: takes the journal's `append`."""
    objectives = [Slo.parse(text) for text in slos]
    for slo in objectives:
        slo.check_class(())
    raise_file_limit()
    written = nullcontext() if out is None else RunWriter(out, force=force)
    with written as writer:
        behind = open_fleet(None if writer is None else partial(writer.append, policy))
        fleet = behind.fleet
        if options.access_log is not None:
            fleet.access = AccessLog(Path(options.access_log), fleet.clock.opened, force)
        name = options.served_name or behind.model
        hosts = known_hosts(options.host, options.allow_host)
        settings = Settings(name, behind.header, options.api_key or None, hosts)
        server = Server(
            application(fleet, behind.words, settings), options.host, options.port, options.drain, fleet,
            lambda url: say(f"Serving {name}: {behind.about}, on {url}"),
        )  # fmt: skip
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
    return Served(RunResult.from_info(info), fleet.failure or fleet.journal_failure, server.started)
