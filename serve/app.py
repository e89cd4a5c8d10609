"""The routes: OpenAI's completions and chat, streamed or whole, and what a gateway and Prometheus ask for."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_address
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine.errors import SHOWN, cut
from ..files.read import json_of
from . import metrics
from .fleet import BusyError, ClosedError, Emission, Fleet, Stream, UnservableError
from .words import Pieces, Words

DEFAULT_MAX_TOKENS = {"text_completion": 16, "chat.completion": 256}
RETRY_AFTER = 1  # s
FAULT = "a fault of the server's own, which its log names"
LONG_TEXT = 1 << 16  # characters: a longer prompt is encoded in a thread, so that other clients do not wait
CLOSE: Mapping[str, str] = {"connection": "close"}  # what the client still sends is not waited for
_log = logging.getLogger("dsim.serve")
ID_PREFIX = {"text_completion": "cmpl", "chat.completion": "chatcmpl"}


@dataclass(frozen=True)
class Settings:
    """The state that the routes share."""

    model: str  # the name that is served
    about: str  # what stands behind it, in a header of every reply
    max_body: int  # bytes
    api_key: str | None = None
    patience: float = 30.0  # s that a client has to send its request
    hosts: frozenset[str] | None = None  # that the Host header may name; None: any


class RefusedError(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


def application(fleet: Fleet, words: Words, settings: Settings) -> Starlette:
    """The ASGI application. No path of a file is ever served, and no other origin is let in."""
    routes = _Routes(fleet, words, settings)
    return Starlette(
        routes=[
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
        ],
        exception_handlers={
            RefusedError: _refused,
            Exception: lambda request, error: _error(500, FAULT),
            404: lambda request, error: _error(404, f"there is no {request.url.path[:80]}"),
            405: lambda request, error: _error(405, f"{request.method} is not for {request.url.path[:80]}"),
        },
        middleware=[] if settings.hosts is None else [Middleware(_KnownHosts, hosts=settings.hosts)],
    )


def known_hosts(bound: str, also: Sequence[str]) -> frozenset[str] | None:
    """The hosts that requests may name: where only this machine can connect, its own names and `also`; else any.

    A page in a browser on this machine reaches the port through a name of its own that it points here (DNS rebinding).
    The Host header then holds that name.
    """
    local = bound == "localhost"
    with suppress(ValueError):
        local = ip_address(bound).is_loopback
    return frozenset({"localhost", "127.0.0.1", "::1", bound.lower(), *map(str.lower, also)}) if local else None


class _KnownHosts:
    """Refuses a request whose Host header names another host. One without the header comes from no browser."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("host", "")
        if not given or _host(given) in self._hosts:
            return await self._app(scope, receive, send)
        names = ", ".join(sorted(self._hosts))
        reply = _error(421, f"host is {cut(given)}, expected one of {names} (the server's --allow-host adds one)")
        return await reply(scope, receive, send)


def _host(given: str) -> str:
    """The host of a Host header, without its port."""
    name = given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]
    return name.lower()


class _Routes:
    def __init__(self, fleet: Fleet, words: Words, settings: Settings) -> None:
        self._fleet = fleet
        self._words = words
        self._settings = settings
        self._headers = {"x-dsim": settings.about}
        key = settings.api_key
        self._keys = [] if key is None else [sha256(b"Bearer " + form).digest() for form in _encodings(key)]

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._answer(request, body, await self._prompt(body.get("prompt")), "text_completion")

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._answer(request, body, await self._encode(_conversation(body)), "chat.completion")

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        limit = self._fleet.engines[0].limits.context_limit
        model = {
            "id": self._settings.model, "object": "model", "created": 0, "owned_by": "dsim",
            "root": self._settings.model, "max_model_len": limit,
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [model]}, headers=self._headers)

    async def health(self, request: Request) -> Response:
        closed = self._fleet.closed
        return PlainTextResponse("" if closed is None else closed + "\n", 200 if closed is None else 503)

    async def metrics(self, request: Request) -> Response:
        text = metrics.exposition(self._fleet, self._settings.model)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _check_key(self, request: Request) -> None:
        # Digests are compared: all are of one length, and the time taken tells nothing of the key's.
        given = sha256(request.headers.get("authorization", "").encode("latin-1")).digest()
        if self._keys and not any(hmac.compare_digest(given, key) for key in self._keys):
            raise RefusedError(401, "the API key is missing or wrong", {"www-authenticate": "Bearer"})

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object that was sent; its size is bounded as it comes in, and the time it takes."""
        self._check_key(request)
        # A page of another origin may post any other type without asking first.
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, f"content-type is {cut(kind) or 'missing'}, expected application/json")
        data, most, size = bytearray(), self._settings.max_body, 0
        try:
            async with asyncio.timeout(self._settings.patience):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= most:
                        data += chunk
        except ClientDisconnect:
            raise RefusedError(400, "the client went away") from None
        except TimeoutError:
            raise RefusedError(408, f"the request did not come within {self._settings.patience:g} s", CLOSE) from None
        if size > most:  # only now: a client that still sends does not read
            raise RefusedError(413, f"the request is larger than {most} bytes")
        try:
            body = json_of(data)
        except ValueError:
            raise RefusedError(400, "the request is not JSON") from None
        if not isinstance(body, dict):
            raise RefusedError(400, f"the request is a {type(body).__name__}, expected an object")
        model = body.get("model")
        if model is not None and model != self._settings.model:
            raise RefusedError(404, f"model {str(model)[:80]!r} is not served, expected {self._settings.model!r}")
        for name, only in (("n", 1), ("best_of", 1), ("echo", False)):
            if body.get(name, only) not in (only, None):
                raise RefusedError(400, f"{name} is {str(body[name])[:40]}, expected {json.dumps(only)}")
        if not isinstance(body.get("stream"), bool | None):
            raise RefusedError(400, f"stream is {cut(json.dumps(body['stream']))}, expected true or false")
        return body

    async def _encode(self, text: str) -> list[int]:
        if len(text) <= LONG_TEXT:
            return self._words.encode(text)
        return await asyncio.to_thread(self._words.encode, text)

    async def _prompt(self, prompt: Any) -> list[int]:
        """The token ids of a completion's prompt: a text, ids, or one of either in a list."""
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return await self._encode(prompt)
        if isinstance(prompt, list) and all(type(i) is int and 0 <= i < 2**31 for i in prompt):
            return prompt
        raise RefusedError(400, "prompt is missing or several, expected one text or one list of token ids")

    async def _answer(self, request: Request, body: dict[str, Any], prompt: list[int], kind: str) -> Response:
        most, wishes = _max_tokens(body, kind), _wishes(body)
        if not prompt:
            raise RefusedError(400, "the prompt holds no tokens, expected at least 1")
        try:
            stream = self._fleet.submit(prompt, most, **wishes)
        except UnservableError as error:
            raise RefusedError(400, str(error)) from None
        except ClosedError as error:
            raise RefusedError(503, str(error)) from None
        except BusyError as error:
            raise RefusedError(503, str(error), {"retry-after": str(RETRY_AFTER)}) from None
        reply = _Reply(stream, self._words.pieces(), kind, self._settings.model)
        if body.get("stream"):
            return StreamingResponse(
                self._events(reply), media_type="text/event-stream",
                headers={**self._headers, "cache-control": "no-cache"},
            )  # fmt: skip
        return await self._whole(request, reply)

    async def _events(self, reply: "_Reply") -> AsyncIterator[bytes]:
        """One event an emission, then the usage, then the end. A client that goes away cancels its request."""
        try:
            while True:
                emission = await reply.stream.emissions.get()
                if isinstance(emission, str):
                    yield _event(_failed(503, emission))
                    return
                yield _event(reply.chunk(emission))
                if emission.last:
                    break
            yield _event(reply.usage_chunk())
            yield b"data: [DONE]\n\n"
        except Exception as error:
            _log.error("a stream failed", exc_info=error)
            yield _event(_failed(500, FAULT))
        finally:
            self._fleet.cancel(reply.stream)

    async def _whole(self, request: Request, reply: "_Reply") -> Response:
        gone = asyncio.create_task(_disconnected(request))
        text = ""
        try:
            while True:
                coming = asyncio.create_task(reply.stream.emissions.get())
                await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    raise RefusedError(400, "the client went away")
                emission = coming.result()
                if isinstance(emission, str):
                    raise RefusedError(503, emission)
                text += reply.text(emission)
                if emission.last:
                    return JSONResponse(reply.whole(text), headers=self._headers)
        finally:
            gone.cancel()
            self._fleet.cancel(reply.stream)


class _Reply:
    """The objects of one request's reply."""

    def __init__(self, stream: Stream, pieces: Pieces, kind: str, model: str) -> None:
        self.stream = stream
        self._pieces = pieces
        self._chat = kind == "chat.completion"
        self._kind = kind
        self._num = 0
        self._head = {"id": f"{ID_PREFIX[kind]}-{stream.index}", "created": int(time.time()), "model": model}

    def text(self, emission: Emission) -> str:
        """The text of an emission."""
        self._num += len(emission.tokens)
        return self._pieces.more(emission.tokens)

    def chunk(self, emission: Emission) -> dict[str, Any]:
        """An emission as a chunk of a stream."""
        first = self._num == 0
        text, reason = self.text(emission), self._reason() if emission.last else None
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if self._chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | {"content": text}
        else:
            choice["text"] = text
        return self._object([choice])

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk after the last, which holds no choice."""
        return self._object([]) | {"usage": self._usage()}

    def whole(self, text: str) -> dict[str, Any]:
        """The whole reply at once."""
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, "logprobs": None, "finish_reason": self._reason(), **said}
        return {**self._head, "object": self._kind, "choices": [choice], "usage": self._usage()}

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else self._kind, "choices": choices}

    def _reason(self) -> str:
        """Why a reply that is over ended: at its limit, or at an EOS before it."""
        return "stop" if self._num < self.stream.output_length else "length"

    def _usage(self) -> dict[str, int]:
        asked = self.stream.input_length
        return {"prompt_tokens": asked, "completion_tokens": self._num, "total_tokens": asked + self._num}


def _max_tokens(body: Mapping[str, Any], kind: str) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        most = body.get(name)
        if most is not None:
            if type(most) is not int or not 1 <= most < 2**31:
                raise RefusedError(400, f"{name} is {str(most)[:40]}, expected a whole number of at least 1")
            return most
    return DEFAULT_MAX_TOKENS[kind]


def _wishes(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a scheduler may go by, as far as the request says: priority (vLLM's field), deadline (s) and slo_class."""
    found = {name: body[name] for name in ("priority", "deadline", "slo_class") if body.get(name) is not None}
    priority, deadline, slo_class = (found.get(name) for name in ("priority", "deadline", "slo_class"))
    if priority is not None and (type(priority) is not int or abs(priority) >= 2**31):
        raise RefusedError(400, f"priority is {cut(priority, 40)}, expected a whole number below 2147483648")
    if deadline is not None and (type(deadline) not in (int, float) or not 0 < deadline < 1e9):
        raise RefusedError(400, f"deadline is {cut(deadline, 40)}, expected seconds above 0 and below 1000000000")
    if slo_class is not None and (not isinstance(slo_class, str) or len(slo_class) > SHOWN):
        raise RefusedError(400, f"slo_class is {cut(slo_class, 40)}, expected a text of at most {SHOWN} characters")
    return found


def _conversation(body: Mapping[str, Any]) -> str:
    """A chat's messages as one text: each one's role and what it says."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError(400, "messages is missing, expected a list of at least 1")
    lines = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
        if not isinstance(content, str):
            raise RefusedError(400, "a message has no text, expected content as a text or as parts of text")
        lines.append(content)
    return "\n".join(lines)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(_failed(status, message), status, headers=headers)


def _failed(status: int, message: str) -> dict[str, Any]:
    """OpenAI's object of an error."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    message = message.encode("utf-8", "backslashreplace").decode()  # it may quote half a character of the client's
    return {"error": {"message": message, "type": kind, "code": status}}


def _encodings(key: str) -> list[bytes]:
    """The bytes that clients send for a key: one beyond ASCII comes in UTF-8 or, of some libraries, in Latin-1."""
    forms = [key.encode("utf-8", "surrogateescape")]
    with suppress(UnicodeEncodeError):
        forms.append(key.encode("latin-1"))
    return forms


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _error(error.status, str(error), error.headers)
