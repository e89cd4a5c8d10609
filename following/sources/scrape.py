"""Read a server's metrics page: one GET without redirects, with a token from a file, over TLS that is checked."""

import re
import time
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from ...engine.errors import DsimError
from ...files.read import cut, read_text, without_secrets
from .engines import sample_of
from .sample import Sample

MAX_PAGE = 16 << 20  # bytes
PATIENCE = 4.0  # s
LOCAL = ("localhost", "127.0.0.1", "::1")  # reached without a proxy


class MissingError(DsimError):
    """A server did not answer. It may be down for a while; the user made no error."""


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        """Follow none."""


@dataclass
class Target:
    """A server's page of metrics. Its URL loses the query, which may hold a secret, once it was read."""

    url: str
    token_file: Path | None = None

    def __post_init__(self) -> None:
        url, expected = self.url, "expected http://HOST:PORT or https://HOST:PORT"
        address = cut(without_secrets(url))
        try:
            parts = urlsplit(url)
            has_host = bool(parts.hostname) and parts.port != 0
        except ValueError as error:
            raise DsimError(f"URL is {address} ({cut(error)}), {expected}") from None
        if "@" in parts.netloc:
            raise DsimError(f"URL is {address} with a user's name, {expected}; --token-file holds a token")
        if parts.scheme not in ("http", "https") or not has_host or not re.fullmatch("[!-~]+", url):
            raise DsimError(f"URL is {address}, {expected}")
        if not parts.path.rstrip("/"):
            parts = parts._replace(path="/metrics")
        self._page, self._host = parts._replace(fragment="").geturl(), parts.hostname
        self.url = without_secrets(self._page)
        self._headers()

    def sample(self) -> Sample:
        """Read the page with one GET. MissingError if the server does not answer; DsimError for any other answer."""
        proxies = ProxyHandler({}) if self._host in LOCAL else ProxyHandler()
        try:
            opener = build_opener(proxies, _NoRedirects)
            with opener.open(Request(self._page, headers=self._headers()), timeout=PATIENCE) as reply:
                data = reply.read(MAX_PAGE)
        except HTTPError as error:
            kind = MissingError if error.code >= 500 else DsimError
            raise kind(f"{self.url}: answers {error.code} {cut(error.reason)}, expected 200") from None
        except (OSError, HTTPException) as error:
            raise MissingError(f"{self.url}: does not answer: {cut(error)}") from None
        return sample_of(data.decode("utf-8", "replace"), time.time(), self.url)

    def _headers(self) -> dict[str, str]:
        """The request's headers. The token is read each time, since it may be renewed on disk."""
        if self.token_file is None:
            return {}
        token = read_text(self.token_file).strip()
        if not token or not token.isascii() or len(token.split()) != 1:
            raise DsimError(f"{self.token_file}: holds {len(token.split())} words, expected one token")
        return {"Authorization": f"Bearer {token}"}
