"""HTTP routes: OpenAI's completions and chat, streamed or whole; models, health, Prometheus metrics."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_address
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ..engine.errors import SHOWN, cut
from ..files.read import json_of
from .fleet import Emission, Fleet, RefusedError, Stream
from .metrics_page import MetricsPage
from .words import Pieces, Words

DEFAULT_MAX_TOKENS = {"text_completion": 16, "chat.completion": 256}
FAULT = "a fault of the server's own, which its log names"
MAX_BODY = 8 << 20  # bytes of a request
PATIENCE = 30.0  # s for a client to send a request's body
LONG_TEXT = 1 << 16  # characters: longer prompts are encoded in a thread, not to block other clients
CLOSE: Mapping[str, str] = {"connection": "close"}  # the rest of the request is not read
_log = logging.getLogger("dsim.serve")
ID_PREFIX = {"text_completion": "cmpl", "chat.completion": "chatcmpl"}


@dataclass(frozen=True)
class Settings:
    model: str  # the name in the API
    about: str  # twin or live: a header of every reply
    api_key: str | None = None
    hosts: list[str] | None = None  # allowed in the Host header; None: any


def application(fleet: Fleet, words: Words, settings: Settings) -> Starlette:
    """It serves no files and allows no cross-origin requests."""
    answers = _Routes(fleet, words, settings)
    routes = [
        Route("/v1/completions", answers.completions, methods=["POST"]),
        Route("/v1/chat/completions", answers.chat, methods=["POST"]),
        Route("/v1/models", answers.models),
        Route("/v1/models/{name:path}", answers.models),
        Route("/health", answers.health),
        Route("/metrics", answers.metrics),
    ]
    middleware = [] if settings.hosts is None else [Middleware(TrustedHostMiddleware, allowed_hosts=settings.hosts)]
    return Starlette(
        routes=routes,
        exception_handlers={
            RefusedError: _refused,
            Exception: lambda request, error: _error(500, FAULT),
            404: lambda request, error: _error(404, f"there is no {request.url.path[:80]}"),
            405: lambda request, error: _error(405, f"{request.method} is not for {request.url.path[:80]}"),
        },
        middleware=middleware,
    )


def known_hosts(bound: str, also: Sequence[str]) -> list[str] | None:
    """Hosts that requests may name: if bound to the loopback, this machine's names and `also`; else any (None).

    This stops DNS rebinding: a web page points its own name at this machine, and the Host header has that name.
    """
    local = bound == "localhost"
    with suppress(ValueError):
        local = ip_address(bound).is_loopback
    return ["localhost", "127.0.0.1", "[::1]", bound, *also] if local else None


class _Routes:
    def __init__(self, fleet: Fleet, words: Words, settings: Settings) -> None:
        self._fleet = fleet
        self._words = words
        self._settings = settings
        self._headers = {"x-dsim": settings.about}
        self._page = MetricsPage(fleet, settings.model)
        key = settings.api_key
        self._key = None if key is None else sha256(b"Bearer " + key.encode("utf-8", "surrogateescape")).digest()

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
            "id": self._settings.model, "object": "model", "created": 0, "owned_by": self._fleet.publishes,
            "root": self._settings.model, "max_model_len": limit,
        }  # fmt: skip
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]}, headers=self._headers)
        self._check_model(name)
        return JSONResponse(model, headers=self._headers)

    async def health(self, request: Request) -> Response:
        closed = self._fleet.closed
        return PlainTextResponse("" if closed is None else closed + "\n", 200 if closed is None else 503)

    async def metrics(self, request: Request) -> Response:
        text, kind = self._page.text(request.headers.get("accept", ""))
        return Response(text, headers={**self._headers, "content-type": kind})

    def _check_key(self, request: Request) -> None:
        # Digests have equal length, so the time of a comparison does not tell the key's length.
        digest = sha256(request.headers.get("authorization", "").encode("latin-1")).digest()
        if self._key is not None and not hmac.compare_digest(digest, self._key):
            raise RefusedError(401, "the API key is missing or wrong", {"www-authenticate": "Bearer"})

    async def _body(self, request: Request) -> dict[str, Any]:
        """The request's JSON object; limits its size and time."""
        self._check_key(request)
        # Other content types need no preflight request of a page of another origin.
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, f"content-type is {cut(kind) or 'missing'}, expected application/json")
        data, size = bytearray(), 0
        try:
            async with asyncio.timeout(PATIENCE):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= MAX_BODY:
                        data += chunk
        except ClientDisconnect:
            raise RefusedError(400, "the client went away") from None
        except TimeoutError:
            raise RefusedError(408, f"the request did not come within {PATIENCE:g} s", CLOSE) from None
        if size > MAX_BODY:  # after reading it all: a client that is still sending does not read
            raise RefusedError(413, f"the request is larger than {MAX_BODY} bytes")
        try:
            body = json_of(data)
        except ValueError:
            raise RefusedError(400, "the request is not JSON") from None
        if not isinstance(body, dict):
            raise RefusedError(400, f"the request is a {type(body).__name__}, expected an object")
        if body.get("model") is not None:
            self._check_model(body["model"])
        _check_options(body)
        return body

    def _check_model(self, model: Any) -> None:
        if model != self._settings.model:
            raise RefusedError(404, f"model {str(model)[:80]!r} is not served, expected {self._settings.model!r}")

    async def _encode(self, text: str) -> list[int]:
        if len(text) <= LONG_TEXT:
            return self._words.encode(text)
        return await asyncio.to_thread(self._words.encode, text)

    async def _prompt(self, prompt: Any) -> list[int]:
        """Token ids of a text, a list of ids, or a list with one of these."""
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return await self._encode(prompt)
        if isinstance(prompt, list) and all(type(i) is int and 0 <= i < 2**31 for i in prompt):
            return prompt
        raise RefusedError(400, "prompt is missing or several, expected one text or one list of token ids")

    async def _answer(self, request: Request, body: dict[str, Any], prompt: list[int], kind: str) -> Response:
        wishes = {name: body[name] for name in WISHES if body.get(name) is not None}
        limits = (body.get("max_completion_tokens"), body.get("max_tokens"), DEFAULT_MAX_TOKENS[kind])
        limit = next(limit for limit in limits if limit is not None)
        if (body.get("min_tokens") or 0) > limit:
            raise RefusedError(400, f"min_tokens is {body['min_tokens']}, expected at most max_tokens, {limit}")
        if not prompt:
            raise RefusedError(400, "the prompt holds no tokens, expected at least 1")
        stream = self._fleet.submit(prompt, limit, **wishes)
        options = body.get("stream_options") or {}
        reply = _Reply(stream, self._words.pieces(), kind, self._settings.model, options)
        if body.get("stream"):
            return StreamingResponse(
                self._events(reply), media_type="text/event-stream",
                headers={**self._headers, "cache-control": "no-cache"},
            )  # fmt: skip
        return await self._whole(request, reply)

    async def _events(self, reply: "_Reply") -> AsyncIterator[bytes]:
        """An event per emission, then usage and end. Cancels the request if the client disconnects."""
        try:
            while True:
                emission = await reply.stream.emissions.get()
                if isinstance(emission, str):
                    yield _event(_failed(503, emission))
                    return
                yield _event(reply.chunk(emission))
                if emission.last:
                    break
            if reply.options.get("include_usage", True):
                yield _event(reply.usage_chunk())
            yield b"data: [DONE]\n\n"
        except Exception as error:
            _log.error("a stream failed", exc_info=error)
            yield _event(_failed(500, FAULT))
        finally:
            self._fleet.cancel(reply.stream)

    async def _whole(self, request: Request, reply: "_Reply") -> Response:
        disconnect = asyncio.create_task(_disconnected(request))
        text = ""
        try:
            while True:
                arrival = asyncio.create_task(reply.stream.emissions.get())
                await asyncio.wait({arrival, disconnect}, return_when=asyncio.FIRST_COMPLETED)
                if not arrival.done():
                    arrival.cancel()
                    raise RefusedError(400, "the client went away")
                emission = arrival.result()
                if isinstance(emission, str):
                    raise RefusedError(503, emission)
                text += reply.text(emission)
                if emission.last:
                    return JSONResponse(reply.whole(text), headers=self._headers)
        finally:
            disconnect.cancel()
            self._fleet.cancel(reply.stream)


class _Reply:
    """The JSON of a reply."""

    def __init__(self, stream: Stream, pieces: Pieces, kind: str, model: str, options: Mapping[str, bool]) -> None:
        self.stream, self.options = stream, options
        self._more_text = pieces
        self._chat = kind == "chat.completion"
        self._kind = kind
        self._num = 0
        self._head = {"id": f"{ID_PREFIX[kind]}-{stream.index}", "created": int(time.time()), "model": model}

    def text(self, emission: Emission) -> str:
        self._num += len(emission.tokens)
        return self._more_text(emission.tokens)

    def chunk(self, emission: Emission) -> dict[str, Any]:
        first = self._num == 0
        text, reason = self.text(emission), self._reason() if emission.last else None
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if self._chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | {"content": text}
        else:
            choice["text"] = text
        return self._object([choice]) | ({"usage": self._usage()} if self.options.get("continuous_usage_stats") else {})

    def usage_chunk(self) -> dict[str, Any]:
        """The final chunk, with usage and no choices."""
        return self._object([]) | {"usage": self._usage()}

    def whole(self, text: str) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, "logprobs": None, "finish_reason": self._reason(), **content}
        return {**self._head, "object": self._kind, "choices": [choice], "usage": self._usage()}

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else self._kind, "choices": choices}

    def _reason(self) -> str:
        """It reached its limit (length), or an EOS came first (stop)."""
        return "stop" if self._num < self.stream.output_length else "length"

    def _usage(self) -> dict[str, int]:
        prompt = self.stream.input_length
        return {"prompt_tokens": prompt, "completion_tokens": self._num, "total_tokens": prompt + self._num}


def _is_whole(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**31


WISHES = ("priority", "deadline", "slo_class")  # of a request, for the scheduler
# What the server does not do: the values, next to null, that do not ask for it.
NOT_DONE: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "stop": ([], ""), "stop_token_ids": ([],), "bad_words": ([],),
    "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (0,), "logit_bias": ({},), "suffix": ("",),
    "tool_choice": ("auto", "none"), "function_call": ("auto", "none"), "response_format": ({"type": "text"},),
    "structured_outputs": ({},), "allowed_token_ids": ([],), "use_beam_search": (False,),
}  # fmt: skip
# Optional fields: a check, and what an error says is expected.
FIELDS: Mapping[str, tuple[Callable[[Any], bool], object]] = {
    "max_completion_tokens": (_is_whole, "a whole number of at least 1"),
    "max_tokens": (_is_whole, "a whole number of at least 1"),
    "min_tokens": (lambda v: _is_whole(v, 0), "a whole number of at least 0"),
    "priority": (lambda v: type(v) is int and abs(v) < 2**31, "a whole number below 2147483648"),
    "deadline": (lambda v: type(v) in (int, float) and 0 < v < 1e9, "seconds above 0 and below 1000000000"),
    "slo_class": (lambda v: isinstance(v, str) and len(v) <= SHOWN, f"a text of at most {SHOWN} characters"),
    "stream": (lambda v: isinstance(v, bool), "true or false"),
    "ignore_eos": (lambda v: isinstance(v, bool), "true or false"),
    "stream_options": (
        lambda v: isinstance(v, dict) and all(type(item) is bool for item in v.values()), "an object of true or false"
    ),
}  # fmt: skip


def _check_options(body: Mapping[str, Any]) -> None:
    for name, values in NOT_DONE.items():
        field = body.get(name)
        allowed = [value for value in values if isinstance(value, bool) == isinstance(field, bool)]  # 0 equals False
        if field is not None and field not in allowed:
            raise RefusedError(400, f"{name} is {cut(json.dumps(field), 40)}, expected {json.dumps(values[0])}")
    for name, (is_good, expected) in FIELDS.items():
        field = body.get(name)
        if field is not None and not is_good(field):
            raise RefusedError(400, f"{name} is {cut(json.dumps(field), 40)}, expected {expected}")
    if body.get("stream_options") is not None and not body.get("stream"):
        raise RefusedError(400, "stream_options is given without stream, expected it with stream: true")


def _conversation(body: Mapping[str, Any]) -> str:
    """Its messages, one per line."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError(400, "messages is missing, expected a list of at least 1")
    lines = []
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        content, calls = fields.get("content"), fields.get("tool_calls") or fields.get("function_call")
        if isinstance(content, list):
            parts = [item.get("text") if isinstance(item, dict) else None for item in content]
            content = "".join(parts) if all(isinstance(item, str) for item in parts) else None  # type: ignore[arg-type]
        elif content is None and calls and fields.get("role") == "assistant":
            content = ""
        if not isinstance(content, str):
            raise RefusedError(400, "a message has no text, expected content as a text or as parts of text")
        lines.append(content + (json.dumps(calls) if calls else ""))
    return "\n".join(lines)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(_failed(status, message), status, headers=headers)


def _failed(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    message = message.encode("utf-8", "backslashreplace").decode()  # it may quote a lone surrogate
    return {"error": {"message": message, "type": kind, "code": status}}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _error(error.status, str(error), error.headers)
