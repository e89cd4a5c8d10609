"""Counts requests over HTTP as the middlewares of vLLM (prometheus-fastapi-instrumentator) and SGLang do."""

from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .tallies import Tallies

# vllm/entrypoints/serve/instrumentator/metrics.py of 0.33.0: paths with one of these are not counted.
NOT_COUNTED = ("/metrics", "/health", "/load", "/ping", "/version", "/server_info")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")


class HttpCounts:
    """paths: of the routes; all others count as `none`, so that a client cannot add series without end.

    clock: s in which durations are given.
    """

    def __init__(self, app: ASGIApp, tallies: Tallies, paths: Collection[str], clock: Callable[[], float]) -> None:
        self._app, self._add, self._paths, self._clock = app, tallies.add, frozenset(paths), clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, add = self._clock(), self._add
        path = scope["path"] if scope["path"] in self._paths else "none"
        method = scope["method"] if scope["method"] in METHODS else "other"
        labels = {"endpoint": path, "handler": path, "method": method}
        status, length = 500, 0

        async def noting(message: Message) -> None:
            nonlocal status, length
            if message["type"] == "http.response.start":
                status, length = message["status"], _length(Headers(raw=message["headers"]))
                add("http_answered", 1, {**labels, "status_code": str(status)})
            await send(message)

        add("http_begun", 1, labels)
        add("http_active", 1, labels)
        try:
            await self._app(scope, receive, noting)
        finally:
            add("http_active", -1, labels)
            if not any(part in scope["path"] for part in NOT_COUNTED):
                add("http_requests", 1, {**labels, "status": f"{status // 100}xx"})
                add("http_request_bytes", _length(Headers(scope=scope)), labels)
                add("http_response_bytes", length, labels)
                add("http_seconds", self._clock() - begin, labels)


def _length(headers: Headers) -> int:
    given = headers.get("content-length", "")
    return int(given) if given.isascii() and given.isdigit() else 0
