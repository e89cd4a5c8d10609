"""dsim follow: follow a running server with a twin."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .options import option
from .screen import Screen, say

if TYPE_CHECKING:
    from ..following.watch import Watcher

DRIFTED = 1


@options.of_scenario(
    "ensemble", "replicas", "arrival", "cv", "lengths", "num_requests", "time_scale", "skip_bad", "missing_fails",
)  # fmt: skip
def follow_command(
    urls: Annotated[
        list[str],
        typer.Argument(metavar="URL...", help="URLs of the server's metrics, one a replica.", show_default=False),
    ],
    policy: options.OnePolicy,
    given: options.Given = options.NONE_GIVEN,
    trace: Annotated[
        str | None,
        option("T", "The traffic that the fleet was planned for; the first half hour by default.", "--trace"),
    ] = None,
    interval: Annotated[float, option("S", "Time between two readings.")] = 5.0,
    window: Annotated[float, option("S", "Shortest window to judge.")] = 300.0,
    min_requests: Annotated[int, option("N", "Fewest requests in a window.", "--min-requests")] = 200,
    access_log: Annotated[
        Path | None, option("F", "A growing log of requests, in a trace's format.", "--access-log")
    ] = None,
    steps: Annotated[Path | None, option("F", "A growing step log, as written by dsim's hooks.")] = None,
    attainment: options.Attainment = "99%",
    token_file: Annotated[Path | None, option("F", "A file with a bearer token.", "--token-file")] = None,
    ca_file: Annotated[Path | None, option("F", "Certificates to trust, as PEM.", "--ca-file")] = None,
    host: Annotated[str, option("H", "The address of --port.")] = "127.0.0.1",
    port: Annotated[int | None, option("N", "Serve the page and /metrics; 0 takes a free port.")] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Read once and exit, for cron; exit 1 if an alarm is open.")
    ] = False,
    out: Annotated[
        Path, option("DIR", "Folder of samples, windows, profiles and the page; a restart continues.", "-o", "--out")
    ] = Path("followed"),
    as_json: options.AsJson = False,
) -> None:
    """Follow a running server with a twin, and report drift and how much more traffic it can take.

    dsim follow http://localhost:8000 --policy vllm-diffusion --profile mine.json --slo ttft=2s --port 9100
    dsim follow http://10.0.0.1:8000 http://10.0.0.2:8000 --policy sglang-fdfo --once
    """
    from ..api.follow import follow
    from ..engine.errors import DsimError
    from ..following.watch import FILES

    if once and port is not None:
        raise DsimError(f"--once is given and --port is {port}, expected one of them")
    if port is not None and not 0 <= port < 1 << 16:
        raise DsimError(f"--port is {port}, expected 0 to 65535")
    screen = Screen()

    def serve(watcher: "Watcher") -> None:
        with suppress(KeyboardInterrupt):
            if port is None:
                watcher.run()
            else:
                from ..following.port import serving

                with serving(watcher, host, port) as url:
                    screen.print(f"The page is on {url}, its metrics on {url}/metrics")
                    watcher.run()

    given = dict(given)
    found = follow(
        urls, policy, slos=given.pop("slo") or (), out=out, trace=trace, interval=interval, window=window,
        min_requests=min_requests, attainment=options.percent("--attainment", attainment),
        access_log=access_log, steps=steps, token_file=token_file, ca_file=ca_file,
        allow_code=given.pop("allow_code") or (), _command=options.command(), _tell=screen.print,
        _serve=None if once else serve, **given,
    )  # fmt: skip
    say(lambda: found.page, found.state, as_json)
    screen.wrote(out, FILES)
    if not once:
        raise typer.Exit(options.INTERRUPTED)
    if found.state["alarms"]:
        raise typer.Exit(DRIFTED)
