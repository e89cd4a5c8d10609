"""The live page: the folder's page, renewed by server-sent events, and the metrics for Prometheus."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ..engine.errors import DsimError
from .watch import Watcher

EVERY = 1.0  # s between looks for something new
# The static page asks for nothing; the one that the port serves loads itself anew when a window is over.
LIVE = """<script>
new EventSource("events").onmessage = event => {
  const now = JSON.parse(event.data);
  if (window.turn !== undefined && now.turn !== window.turn) location.reload();
  window.turn = now.turn;
  let line = document.getElementById("now");
  if (!line) {
    line = document.createElement("p");
    line.id = "now";
    line.className = "caption";
    document.querySelector("header").append(line);
  }
  line.textContent = `Now: ${now.running ?? "–"} running, ${now.waiting ?? "–"} waiting, ` +
    new Date(1000 * now.time).toISOString().slice(11, 19) + " UTC";
};
</script></body>"""


def application(watcher: Watcher) -> Starlette:
    """The routes. It serves no files, and changes nothing."""

    async def page(request: Request) -> Response:
        head, _, tail = watcher.page.rpartition("</body>")
        return HTMLResponse(head + LIVE + tail)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(watcher.metrics, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def events(request: Request) -> Response:
        async def each() -> AsyncIterator[bytes]:
            told = ""
            while True:
                if watcher.now != told:
                    told = watcher.now
                    yield f"data: {told}\n\n".encode()
                await asyncio.sleep(EVERY)

        return StreamingResponse(each(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    return Starlette(routes=[Route("/", page), Route("/metrics", metrics), Route("/events", events)])


@contextmanager
def serving(watcher: Watcher, host: str, port: int) -> Iterator[str]:
    """Serve in a thread while the block runs; the address."""
    server = uvicorn.Server(
        uvicorn.Config(
            application(watcher), host=host, port=port, lifespan="off", ws="none", access_log=False, log_config=None,
            server_header=False, timeout_graceful_shutdown=1,
        )
    )  # fmt: skip
    ended = threading.Event()

    def run() -> None:
        try:
            server.run()
        except SystemExit:  # uvicorn's, where it cannot listen
            pass
        finally:
            ended.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not server.started and not ended.wait(0.02):
        pass
    if not server.started:
        raise DsimError(f"--port is {port}, expected one that is free on {host}")
    bound = server.servers[0].sockets[0].getsockname()
    try:
        yield f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=5)
