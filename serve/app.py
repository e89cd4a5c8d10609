"""HTTP routes: OpenAI's completions and chat, streamed or whole; models, health, Prometheus metrics."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ..engine.errors import SHOWN, cut
from .metrics_page import MetricsPage
from .served import Emission, Fleet, RefusedError, Stream
from .words import Pieces, Words

DEFAULT_MAX_TOKENS = {"text_completion": 16, "chat.completion": 256}
FAULT = "a fault of the server's own, which its log names"
MAX_BODY = 8 << 20  # bytes of a request
PATIENCE = 30.0  # s for a client to send a request's body
CLOSE: Mapping[str, str] = {"connection": "close"}  # the rest of the request is not read
_log = logging.getLogger("dsim.serve")
ID_PREFIX = {"text_completion": "cmpl", "chat.completion": "chatcmpl"}
Count = Annotated[int, Field(ge=1, lt=2**31)]
# What the server does not do, and values that do not ask for it.
NOT_DONE: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("auto", "none")),
    **dict.fromkeys(("echo", "stop", "stop_token_ids", "bad_words", "logprobs", "top_logprobs", "prompt_logprobs"), ()),
    **dict.fromkeys(("logit_bias", "suffix", "structured_outputs", "allowed_token_ids", "use_beam_search"), ()),
    "response_format": ({"type": "text"},),
}


@dataclass(frozen=True)
class Settings:
    model: str  # the name in the API
    about: str  # twin or live: a header of every reply
    api_key: str | None = None
    hosts: Sequence[str] = ("*",)  # names of this server in a Host header


class Piece(BaseModel, strict=True):
    text: str


class Message(BaseModel, strict=True):
    content: str | list[Piece] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(piece.text for piece in self.content)
        return self.content or ""


class Body(BaseModel, strict=True, extra="allow"):
    """A request's JSON object. priority, deadline, slo_class: for the scheduler."""

    model: str | None = None
    prompt: Any = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31)] | None = None
    deadline: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    slo_class: Annotated[str, Field(max_length=SHOWN)] | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None

    @classmethod
    def read(cls, data: bytes) -> "Body":
        """RefusedError names the field and its value."""
        try:
            body = cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "json_invalid":
                raise RefusedError(400, "the request is not JSON") from None
            name = ".".join(map(str, first["loc"])) or "the request"
            value = cut(json.dumps(first["input"]), 40)
            raise RefusedError(400, f"{name} is {value}: {first['msg']}") from None
        for name, harmless in NOT_DONE.items():
            option = (body.model_extra or {}).get(name)
            if option and option not in harmless:
                raise RefusedError(400, f"{name} is {cut(json.dumps(option), 40)}, expected none: dsim does not do it")
        return body

    @property
    def wishes(self) -> dict[str, Any]:
        return self.model_dump(include={"priority", "deadline", "slo_class"}, exclude_none=True)


def application(fleet: Fleet, words: Words, settings: Settings) -> Starlette:
    """It serves no files and allows no cross-origin requests."""
    answers = _Routes(fleet, words, settings)
    routes = [
        Route("/v1/completions", answers.completions, methods=["POST"]),
        Route("/v1/chat/completions", answers.chat, methods=["POST"]),
        Route("/v1/models", answers.models),
        Route("/health", answers.health),
        Route("/metrics", answers.metrics),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(settings.hosts))],
        exception_handlers={
            RefusedError: _refused,
            Exception: lambda request, error: _error(500, FAULT),
            404: lambda request, error: _error(404, f"there is no {request.url.path[:80]}"),
            405: lambda request, error: _error(405, f"{request.method} is not for {request.url.path[:80]}"),
        },
    )


class _Routes:
    def __init__(self, fleet: Fleet, words: Words, settings: Settings) -> None:
        self._fleet = fleet
        self._words = words
        self._settings = settings
        self._headers = {"x-dsim": settings.about}
        self._page = MetricsPage(fleet, settings.model)
        key = settings.api_key or ""
        self._key = sha256(b"Bearer " + key.encode("utf-8", "surrogateescape")).digest()

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._answer(body, self._prompt(body.prompt), "text_completion")

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        if body.messages is None:
            raise RefusedError(400, "messages is missing, expected a list of at least 1")
        conversation = "\n".join(message.text for message in body.messages)
        return await self._answer(body, self._words.encode(conversation), "chat.completion")

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        limit = self._fleet.engines[0].limits.context_limit
        model = {
            "id": self._settings.model,
            "object": "model",
            "created": 0,
            "owned_by": self._fleet.publishes,
            "root": self._settings.model,
            "max_model_len": limit,
        }
        return JSONResponse({"object": "list", "data": [model]}, headers=self._headers)

    async def health(self, request: Request) -> Response:
        closed = self._fleet.closed
        if closed is None:
            return PlainTextResponse("")
        return PlainTextResponse(closed + "\n", 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._page.text(), headers={**self._headers, "content-type": CONTENT_TYPE_LATEST})

    def _check_key(self, request: Request) -> None:
        # Digests have equal length, so the time of a comparison does not tell the key's length.
        digest = sha256(request.headers.get("authorization", "").encode("latin-1")).digest()
        if self._settings.api_key is not None and not hmac.compare_digest(digest, self._key):
            raise RefusedError(401, "the API key is missing or wrong", {"www-authenticate": "Bearer"})

    async def _body(self, request: Request) -> Body:
        """Limits its size and time."""
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
        body, served = Body.read(bytes(data)), self._settings.model
        if body.model not in (None, served):
            raise RefusedError(404, f"model {str(body.model)[:80]!r} is not served, expected {served!r}")
        return body

    def _prompt(self, prompt: Any) -> list[int]:
        """Token ids of a text, a list of ids, or a list with one of these."""
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._words.encode(prompt)
        if isinstance(prompt, list) and all(type(i) is int and 0 <= i < 2**31 for i in prompt):
            return prompt
        raise RefusedError(400, "prompt is missing or several, expected one text or one list of token ids")

    async def _answer(self, body: Body, prompt: list[int], kind: str) -> Response:
        limit = body.max_completion_tokens or body.max_tokens or DEFAULT_MAX_TOKENS[kind]
        if not prompt:
            raise RefusedError(400, "the prompt holds no tokens, expected at least 1")
        stream = self._fleet.submit(prompt, limit, **body.wishes)
        reply = _Reply(stream, self._words.pieces(), kind, self._settings.model)
        if body.stream:
            shows_usage = (body.stream_options or {}).get("include_usage", True)
            headers = {**self._headers, "cache-control": "no-cache"}
            return StreamingResponse(self._events(reply, shows_usage), media_type="text/event-stream", headers=headers)
        return await self._whole(reply)

    async def _events(self, reply: "_Reply", shows_usage: bool) -> AsyncIterator[bytes]:
        """An event per emission, then usage and end. Cancels the request if the client disconnects."""
        try:
            async for emission in reply.emissions():
                yield _event(reply.chunk(emission))
            if shows_usage:
                yield _event(reply.usage_chunk())
            yield b"data: [DONE]\n\n"
        except RefusedError as error:
            yield _event(_failed(error.status, str(error)))
        except Exception as error:
            _log.error("a stream failed", exc_info=error)
            yield _event(_failed(500, FAULT))
        finally:
            self._fleet.cancel(reply.stream)

    async def _whole(self, reply: "_Reply") -> Response:
        try:
            text = "".join([reply.text(emission) async for emission in reply.emissions()])
            return JSONResponse(reply.whole(text), headers=self._headers)
        finally:
            self._fleet.cancel(reply.stream)


class _Reply:
    """The JSON of a reply."""

    def __init__(self, stream: Stream, pieces: Pieces, kind: str, model: str) -> None:
        self.stream = stream
        self._more_text = pieces
        self._chat = kind == "chat.completion"
        self._kind = kind
        self._num = 0
        self._head = {"id": f"{ID_PREFIX[kind]}-{stream.index}", "created": int(time.time()), "model": model}

    async def emissions(self) -> AsyncIterator[Emission]:
        """To the last; RefusedError if the reply ends before it."""
        last = False
        while not last:
            emission = await self.stream.emissions.get()
            if isinstance(emission, str):
                raise RefusedError(503, emission)
            yield emission
            last = emission.last

    def text(self, emission: Emission) -> str:
        self._num += len(emission.tokens)
        return self._more_text(emission.tokens)

    def chunk(self, emission: Emission) -> dict[str, Any]:
        role = {"role": "assistant"} if self._num == 0 else {}
        text = self.text(emission)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None, "text": text}
        if emission.last:
            choice["finish_reason"] = self._reason()
        if self._chat:
            choice["delta"] = role | {"content": choice.pop("text")}
        return self._object([choice])

    def usage_chunk(self) -> dict[str, Any]:
        """The final chunk, with usage and no choices."""
        return self._object([]) | {"usage": self._usage()}

    def whole(self, text: str) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self._chat:
            content = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, "logprobs": None, "finish_reason": self._reason(), **content}
        return {**self._head, "object": self._kind, "choices": [choice], "usage": self._usage()}

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kinds = {"chat.completion": "chat.completion.chunk"}
        return {**self._head, "object": kinds.get(self._kind, self._kind), "choices": choices}

    def _reason(self) -> str:
        """It reached its limit (length), or an EOS came first (stop)."""
        return ("length", "stop")[self._num < self.stream.output_length]

    def _usage(self) -> dict[str, int]:
        prompt = self.stream.input_length
        return {"prompt_tokens": prompt, "completion_tokens": self._num, "total_tokens": prompt + self._num}


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
