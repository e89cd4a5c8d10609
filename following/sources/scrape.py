"""Read a server's metrics page: one GET without redirects, with a token from a file, over TLS that is checked."""

import http.client
import math
import re
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from ...engine.errors import DsimError
from ...files.read import cut, read_text, without_secrets
from .engines import sample_of
from .sample import Sample

MOST_PAGE = 16 << 20  # bytes
PATIENCE = 4.0  # s


class MissingError(DsimError):
    """A server did not answer. It may be down for a while; the user made no error."""


@dataclass(frozen=True)
class Target:
    """A server's page of metrics. Its URL loses the query, which may hold a secret, once it was read."""

    url: str
    token_file: Path | None = None
    _asked: SplitResult = field(init=False)

    def __post_init__(self) -> None:
        url, expected = self.url, "expected http://HOST:PORT or https://HOST:PORT"
        shown = cut(without_secrets(url))
        try:
            parts = urlsplit(url)
            has_host = bool(parts.hostname) and parts.port != 0
        except ValueError as error:
            raise DsimError(f"URL is {shown} ({cut(error)}), {expected}") from None
        if "@" in parts.netloc:
            raise DsimError(f"URL is {shown} with a user's name, {expected}; --token-file holds a token")
        if parts.scheme not in ("http", "https") or not has_host or not re.fullmatch("[!-~]+", url):
            raise DsimError(f"URL is {shown}, {expected}")
        asked = parts._replace(path=parts.path if parts.path.rstrip("/") else "/metrics", fragment="")
        object.__setattr__(self, "_asked", asked)
        object.__setattr__(self, "url", without_secrets(asked.geturl()))
        self._headers()

    def sample(self) -> Sample:
        """Read the page with one GET. MissingError if the server does not answer; DsimError for any other answer."""
        connection, page = self._connection()
        late = Timer(PATIENCE, lambda: _end(opened))  # of the whole page: a socket's own time is that of one receive
        begin = math.inf  # not connected
        try:
            connection.connect()
            opened = connection.sock
            begin = time.monotonic()
            late.start()
            connection.request("GET", page, headers=self._headers())
            reply = connection.getresponse()
            data = reply.read(MOST_PAGE + 1)
            if time.monotonic() - begin >= PATIENCE:
                raise TimeoutError
        except ssl.SSLCertVerificationError as error:
            raise DsimError(f"{self.url}: its certificate is not trusted: {error.verify_message}") from None
        except (OSError, http.client.HTTPException) as error:
            # Late: what is still sent to a closed connection resets it.
            why = cut(error or type(error).__name__)
            if time.monotonic() - begin >= PATIENCE:
                why = f"its page takes more than {PATIENCE:g} s"
            raise MissingError(f"{self.url}: does not answer: {why}") from None
        finally:
            late.cancel()
            connection.close()
        if reply.status != 200:
            kind = MissingError if reply.status >= 500 else DsimError
            raise kind(f"{self.url}: answers {reply.status} {cut(reply.reason)}, expected 200")
        if len(data) > MOST_PAGE:
            raise DsimError(f"{self.url}: is longer than {MOST_PAGE} bytes, expected a page of metrics")
        return sample_of(data.decode("utf-8", "replace"), time.time(), self.url)

    def _connection(self) -> tuple[http.client.HTTPConnection, str]:
        """To the server, or for another machine's to the environment's proxy; and the page's name there."""
        asked, host = self._asked, str(self._asked.hostname)
        is_direct = host in ("localhost", "127.0.0.1", "::1") or proxy_bypass(host)
        proxy = urlsplit("" if is_direct else getproxies().get(asked.scheme, ""))
        at = proxy if proxy.hostname else asked
        page = asked._replace(scheme="", netloc="").geturl()
        if asked.scheme == "http":
            connection = http.client.HTTPConnection(str(at.hostname), at.port, timeout=PATIENCE)
            return connection, asked.geturl() if proxy.hostname else page
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(str(at.hostname), at.port, timeout=PATIENCE, context=context)
        if proxy.hostname:
            connection.set_tunnel(host, asked.port)
        return connection, page

    def _headers(self) -> dict[str, str]:
        """The request's headers. The token is read each time, since it may be renewed on disk."""
        if self.token_file is None:
            return {}
        token = read_text(self.token_file).strip()
        if not token or not token.isascii() or len(token.split()) != 1:
            raise DsimError(f"{self.token_file}: holds {len(token.split())} words, expected one token")
        return {"Authorization": f"Bearer {token}"}


def _end(opened: socket.socket) -> None:
    with suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
