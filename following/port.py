"""Serves the folder's page and its Prometheus metrics; clients can change nothing."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..engine.errors import DsimError
from .watch import Watcher

PATIENCE = 5.0  # s in which a client must send its request


@contextmanager
def serving(watcher: Watcher, host: str, port: int) -> Iterator[str]:
    """Serve in a thread while the block runs; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE

        def do_GET(self) -> None:
            if self.path == "/":
                self._reply(watcher.page, "text/html; charset=utf-8")
            elif self.path == "/metrics":
                self._reply(watcher.metrics, "text/plain; version=0.0.4; charset=utf-8")
            else:
                self.send_error(404)

        def _reply(self, text: str, kind: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = Server((host, port), Handler)
    except OSError:
        raise DsimError(f"--port is {port}, expected one that is free on {host}") from None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
