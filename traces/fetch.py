"""Download and verify a published trace that is too large to ship."""

import hashlib
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from ..engine.errors import TraceError
from ..files.read import cut, naming, read_bytes
from ..files.write import check_file, writing

SCHEMES = ("https",)
# GitHub redirects to its file hosts.
HOSTS = (
    "github.com", "raw.githubusercontent.com", "media.githubusercontent.com", "objects.githubusercontent.com",
    "release-assets.githubusercontent.com",
)  # fmt: skip
CHUNK = 1 << 20
TIMEOUT = 30  # s without data

Progress = Callable[[int, int], None]  # bytes received, of all


@dataclass(frozen=True, slots=True)
class Release:
    url: str
    num_bytes: int
    sha256: str
    hosts: tuple[str, ...] = HOSTS  # the only ones contacted


DATA = "https://github.com/HPMLL/BurstGPT/raw/main/data"
RELEASED = "https://github.com/HPMLL/BurstGPT/releases/download/v1.1"

# BurstGPT: CC BY 4.0, KDD '25, https://github.com/HPMLL/BurstGPT
_BURSTGPT = (
    (DATA, "BurstGPT_1.csv", 52_283_111, "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122"),
    (DATA, "BurstGPT_2.csv", 144_819_209, "44bf5942b03fca42c01a226a545ad3a750ec62688faecd67b6831c56a8928bf7"),
    (RELEASED, "BurstGPT_without_fails_1.csv", 51_429_517,
     "a4d068a7113ec0290e74063a1b3447dc6001a30e4298eb313581b71006dda1f4"),
    (RELEASED, "BurstGPT_without_fails_2.csv", 142_376_815,
     "56193aa9b2bb26128ded43d2d29a960df6bf5af062bcfc9b005f3fcaa4e6e501"),
)  # fmt: skip
RELEASES = {"burstgpt": {name: Release(f"{where}/{name}", size, digest) for where, name, size, digest in _BURSTGPT}}


def fetch(
    dataset: str,
    dest: str | Path = ".",
    *,
    file: str = "BurstGPT_1.csv",
    from_file: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    release: Release | None = None,
) -> Path:
    """Download a data set's file into the folder `dest` and verify it, or verify `from_file`.

    A file in `dest` is only verified, unless `force`. `release` replaces the known one.
    """
    release = release or find(dataset, file)
    if from_file is not None:
        return verified(Path(from_file), release, file)
    path = Path(dest) / file
    if path.exists() and not force:
        return verified(path, release, file)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_file(path, force=True)
    with writing(path) as out:
        download(release, out, file, progress)
    return path


def find(dataset: str, file: str) -> Release:
    """An error lists the known files."""
    if dataset not in RELEASES:
        raise TraceError(f"no data set named {cut(dataset)}, expected one of: {', '.join(RELEASES)}")
    if file not in RELEASES[dataset]:
        raise TraceError(f"no file {cut(file)} in {dataset}, expected one of: {', '.join(RELEASES[dataset])}")
    return RELEASES[dataset][file]


def download(release: Release, out: BinaryIO, file: str, progress: Progress | None) -> None:
    """Write the published file to `out`; a failure says how to get it by hand.

    Only the release's hosts are contacted, over https. Reading stops at the published size.
    """
    found, done = hashlib.sha256(), 0
    try:
        check_address(release.url, release)
        with urllib.request.build_opener(_Redirects(release)).open(release.url, timeout=TIMEOUT) as response:
            while block := response.read(CHUNK):
                done += len(block)
                if done > release.num_bytes:
                    raise TraceError(
                        f"{release.url} is not {file}: over {release.num_bytes} bytes came, expected "
                        f"{release.num_bytes} bytes of sha256 {release.sha256}"
                    )
                found.update(block)
                out.write(block)
                if progress:
                    progress(done, release.num_bytes)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise TraceError(f"{file} cannot be fetched ({reason}): {by_hand(release, file)}") from error
    check_digest(release.url, found.hexdigest(), done, release, file)


def check_address(url: str, release: Release) -> None:
    """URLError unless it is https on one of the release's hosts."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or parts.hostname not in release.hosts:
        host = f"{parts.scheme}://{parts.netloc}"
        raise urllib.error.URLError(f"{host:.80} is asked, expected {' or '.join(SCHEMES)} to {release.hosts[0]}")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to the release's hosts."""

    def __init__(self, release: Release) -> None:
        self._release = release

    def redirect_request(self, *request: Any) -> urllib.request.Request | None:
        check_address(request[-1], self._release)
        return super().redirect_request(*request)


def by_hand(release: Release, file: str) -> str:
    """For a machine without a network."""
    return (
        f"get {release.url} by other means as {file} (sha256 {release.sha256}), check it with "
        f"dsim trace fetch burstgpt --file {file} --from FILE, then dsim trace info FILE"
    )


def verified(path: Path, release: Release, file: str) -> Path:
    """The path; TraceError unless it has the published bytes."""
    data = read_bytes(path, kind=TraceError)
    check_digest(path, hashlib.sha256(data).hexdigest(), len(data), release, file)
    return path


def check_digest(where: object, sha256: str, size: int, release: Release, file: str) -> None:
    if sha256 != release.sha256:
        raise TraceError(
            f"{where} is not {file}: sha256 {sha256} and {size} bytes, "
            f"expected {release.sha256} and {release.num_bytes} bytes"
        )
