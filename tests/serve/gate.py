"""Publishers of a served twin that send nothing before their subscribers have joined, so that no message is missed."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from ..held_up import PATIENCE


class Gate:
    """What the publishers opened meanwhile wait for, and how much they have sent once they are closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of publishers that are opened from now on."""
        self.subscribers = 0  # that a publisher awaits before its next message
        self._closed = threading.Event()
        self._sent = 0
        context = SimpleNamespace(socket=lambda kind: self._open() if kind == zmq.PUB else self._context.socket(kind))
        own = SimpleNamespace(**{**vars(zmq), "Context": SimpleNamespace(instance=lambda: context)})
        monkeypatch.setattr("dsim.serve.zmq_streams.zmq", own)

    @property
    def sent(self) -> int:
        """Messages of the publisher; it has to be closed by now, or to be closing."""
        assert self._closed.wait(PATIENCE)
        return self._sent

    @property
    def _context(self) -> Any:
        return zmq.Context.instance()

    def _open(self) -> Any:
        socket, joined = self._context.socket(zmq.XPUB), 0
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)

        def send(frames: Any) -> None:
            nonlocal joined
            while joined < self.subscribers:
                assert socket.poll(1000 * PATIENCE)
                socket.recv()
                joined += 1
            socket.send_multipart(frames)
            self._sent += 1

        def close(linger: int) -> None:
            socket.close(linger)
            self._closed.set()

        return SimpleNamespace(send_multipart=send, close=close, set_hwm=socket.set_hwm, bind=socket.bind)
