"""The live page: serves the folder's page with server-sent events, answers questions, exposes Prometheus metrics."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ..engine.errors import DsimError, cut
from ..files.read import json_of
from ..report.html import live_part
from .watch import Watcher

EVERY = 1.0  # s between checks for changes
MOST_BODY = 4096  # bytes of a question
PATIENCE = 5.0  # s in which a browser must send it


def application(watcher: Watcher, host: str) -> Starlette:
    """The web application. It serves no files; a question only starts a background replay. host: the bound one."""
    live = live_part()

    async def page(request: Request) -> Response:
        head, _, tail = watcher.page.rpartition("</body>")
        return HTMLResponse(head + live + tail)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(watcher.metrics, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def events(request: Request) -> Response:
        async def each() -> AsyncIterator[bytes]:
            last = ""
            while True:
                event = watcher.event()
                if event != last:
                    last = event
                    yield f"data: {event}\n\n".encode()
                await asyncio.sleep(EVERY)

        return StreamingResponse(each(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def ask(request: Request) -> Response:
        if refused := _foreign(request, host):
            return JSONResponse({"error": refused}, 403)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another origin may post other types without a preflight request
            return JSONResponse({"error": f"content-type is {cut(kind)}, expected application/json"}, 415)
        try:
            async with asyncio.timeout(PATIENCE):
                data = await _body(request)
        except (TimeoutError, ClientDisconnect):
            return JSONResponse({"error": f"the question did not come within {PATIENCE:g} s"}, 408)
        if data is None:
            return JSONResponse({"error": f"the question is longer than {MOST_BODY} bytes"}, 413)
        try:
            body = json_of(data)
            if not isinstance(body, dict):
                raise ValueError
        except ValueError:
            return JSONResponse({"error": "the question is no JSON object"}, 400)
        try:
            watcher.asked.ask(body)
        except DsimError as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({}, 202)

    return Starlette(
        routes=[
            Route("/", page), Route("/metrics", metrics), Route("/events", events),
            Route("/ask", ask, methods=["POST"]),
        ]
    )  # fmt: skip


def _foreign(request: Request, bound: str) -> str:
    """Why a question does not come from this page; empty if it does.

    On the loopback the Host header must name this machine: another site's name may point to it (DNS rebinding).
    """
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return f"origin is {cut(origin)}, expected the page's own"
    local, name = bound == "localhost", ""
    with suppress(ValueError):
        local = ip_address(bound).is_loopback
    with suppress(ValueError):
        name = (urlsplit(f"//{host}").hostname or "").lower()
    if local and name not in ("localhost", "127.0.0.1", "::1", bound.lower()):
        return f"host is {cut(host)}, expected localhost or {bound}"
    return ""


async def _body(request: Request) -> bytes | None:
    """The body; None if it is too long."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BODY:
            return None
    return bytes(data)


@contextmanager
def serving(watcher: Watcher, host: str, port: int) -> Iterator[str]:
    """Serve in a thread while the block runs; yields the address."""
    server = uvicorn.Server(
        uvicorn.Config(
            application(watcher, host), host=host, port=port, lifespan="off", ws="none", access_log=False,
            log_config=None, log_level="critical", server_header=False, timeout_graceful_shutdown=1,
        )
    )  # fmt: skip
    ended = threading.Event()

    def run() -> None:
        try:
            server.run()
        except SystemExit:  # uvicorn raises it if it cannot listen
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
