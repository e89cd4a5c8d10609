"""An HTTP connection with limits that uvicorn lacks: on connections, slow senders and slow readers."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

PROBE = 1.0  # s between probes of a client that closed its sending side


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on clients."""

    connections: int  # open at once; one more closes the one that has been idle longest
    patience: float = 30.0  # s to send a request, or to read while the send buffer is full


class Connection(H11Protocol):
    """Closes idle connections first; uvicorn's `limit_concurrency` keeps them and refuses requests."""

    def __init__(self, limits: ConnectionLimits, **of: Any) -> None:
        super().__init__(**of)
        self._limits = limits
        self._since = self.loop.time()  # since it opened or last replied
        self._half_sent: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limits the time for a request; closes an idle connection if there are too many."""
        super().connection_made(transport)
        self._expect_request()
        if len(self.connections) > self._limits.connections:
            ours = cast("set[Connection]", self.connections)
            idle = [each for each in ours if not each._serves]
            oldest = min(idle, key=lambda each: each._since)
            self.connections.discard(oldest)  # connection_lost comes later
            if oldest is self:
                self._refuse(503, "too many connections")
            else:
                oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._half_sent, self._unread):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Time a request's head from its first byte; the application times the body."""
        if self._half_sent is None and not self._in_progress:
            self._expect_request()
        super().data_received(data)
        if self._in_progress and self._half_sent is not None:
            self._half_sent.cancel()
            self._half_sent = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if a whole request came: the client may wait for the reply."""
        if not self._serves:
            return False
        self.cycle.keep_alive = False
        self._probe()
        return True

    def pause_writing(self) -> None:
        """Abort unless the client reads in time."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.patience, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(400, msg)

    @property
    def _in_progress(self) -> bool:
        """A request's head has arrived and its reply is incomplete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _serves(self) -> bool:
        """A whole request has arrived and its reply is incomplete."""
        return self._in_progress and not self.cycle.more_body

    def _expect_request(self) -> None:
        self._half_sent = self.loop.call_later(self._limits.patience, self._late)

    def _late(self) -> None:
        self._half_sent = None
        self._refuse(408, f"no request came within {self._limits.patience:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answer what did not reach the application, if HTTP still allows it, and close."""
        if self.transport.is_closing():
            return
        data = f'{{"error":{{"message":"{message}","type":"invalid_request_error","code":{status}}}}}'.encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(data))), ("connection", "close")]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=data), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _probe(self) -> None:
        """Check that a client that closed its sending side still listens.

        TCP reports a closed connection only on sending; clients ignore 100 (Continue) (RFC 9110, 15.2.1).
        """
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_started or self.conn.our_state is not h11.SEND_RESPONSE:
            return  # a stream's data shows it
        if cycle.scope["http_version"] == "1.1":
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            self.loop.call_later(PROBE, self._probe)
