"""Read a server's metrics page: one GET, with a token from a file, over TLS that is checked."""

import http.client
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...engine.errors import DsimError
from ...files.read import cut, read_text
from .engines import sample_of
from .sample import Sample

MOST_PAGE = 16 << 20  # bytes
PATIENCE = 4.0  # s


class MissingError(DsimError):
    """A server did not answer. It may be down for a while; the user made no error."""


@dataclass(frozen=True)
class Target:
    """A server's page of metrics."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise DsimError(f"URL is {cut(self.url)}, expected http://HOST:PORT or https://HOST:PORT")
        if not parts.path.rstrip("/"):
            object.__setattr__(self, "url", f"{self.url.rstrip('/')}/metrics")
        self._headers()
        self._context()

    def sample(self) -> Sample:
        """Read the page with one GET. MissingError if the server does not answer; DsimError for any other answer."""
        request = urllib.request.Request(self.url, headers=self._headers())
        opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=self._context()))
        try:
            with opener.open(request, timeout=PATIENCE) as reply:
                data = reply.read(MOST_PAGE + 1)
        except urllib.error.HTTPError as error:
            kind = MissingError if error.code >= 500 else DsimError
            raise kind(f"{self.url}: answers {error.code} {cut(error.reason)}, expected 200") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise DsimError(f"{self.url}: its certificate is not trusted: {error.reason.verify_message}") from None
            raise MissingError(f"{self.url}: does not answer: {cut(error.reason)}") from None
        except (OSError, http.client.HTTPException) as error:
            raise MissingError(f"{self.url}: does not answer: {cut(error or type(error).__name__)}") from None
        if len(data) > MOST_PAGE:
            raise DsimError(f"{self.url}: is longer than {MOST_PAGE} bytes, expected a page of metrics")
        return sample_of(data.decode("utf-8", "replace"), time.time(), self.url)

    def _headers(self) -> dict[str, str]:
        """The request's headers. The token is read each time, since it may be renewed on disk."""
        if self.token_file is None:
            return {}
        token = read_text(self.token_file).strip()
        if not token or not token.isascii() or len(token.split()) != 1:
            raise DsimError(f"{self.token_file}: holds {len(token.split())} words, expected one token")
        return {"Authorization": f"Bearer {token}"}

    def _context(self) -> ssl.SSLContext:
        if self.ca_file is None:
            return ssl.create_default_context()
        try:
            return ssl.create_default_context(cafile=str(self.ca_file))
        except (OSError, ssl.SSLError) as error:
            raise DsimError(f"{self.ca_file}: cannot be read as certificates: {error}") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: one could send the token to another host."""

    def redirect_request(self, *of: Any, **more: Any) -> None:
        return None
