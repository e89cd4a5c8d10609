"""Fetch a published trace that is too large to ship, and check that it is the one that was published."""

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from ..engine.errors import TraceError

CHUNK = 1 << 20
TIMEOUT = 30  # s without a byte

Progress = Callable[[int, int], None]  # bytes so far, bytes in all


@dataclass(frozen=True, slots=True)
class Release:
    """One published file."""

    url: str
    num_bytes: int
    sha256: str


DATA = "https://github.com/HPMLL/BurstGPT/raw/main/data"
RELEASED = "https://github.com/HPMLL/BurstGPT/releases/download/v1.1"

# BurstGPT: CC BY 4.0, KDD '25, https://github.com/HPMLL/BurstGPT
RELEASES = {
    "burstgpt": {
        "BurstGPT_1.csv": Release(
            f"{DATA}/BurstGPT_1.csv",
            52_283_111,
            "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122",
        ),
        "BurstGPT_2.csv": Release(
            f"{DATA}/BurstGPT_2.csv",
            144_819_209,
            "44bf5942b03fca42c01a226a545ad3a750ec62688faecd67b6831c56a8928bf7",
        ),
        "BurstGPT_without_fails_1.csv": Release(
            f"{RELEASED}/BurstGPT_without_fails_1.csv",
            51_429_517,
            "a4d068a7113ec0290e74063a1b3447dc6001a30e4298eb313581b71006dda1f4",
        ),
        "BurstGPT_without_fails_2.csv": Release(
            f"{RELEASED}/BurstGPT_without_fails_2.csv",
            142_376_815,
            "56193aa9b2bb26128ded43d2d29a960df6bf5af062bcfc9b005f3fcaa4e6e501",
        ),
    }
}


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
    """Download one file of a data set into the folder `dest` and verify it; or verify `from_file`, got by hand.

    A file already in `dest` is verified instead of fetched again, unless `force`. `release` replaces the known one.
    """
    release = release or find(dataset, file)
    if from_file is not None:
        return verified(Path(from_file), release, file)
    path = Path(dest) / file
    if path.exists() and not force:
        return verified(path, release, file)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            download(release, part, file, progress)
            verified(part, release, file, shown=release.url)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def find(dataset: str, file: str) -> Release:
    """The release of a file; an error lists what there is."""
    if dataset not in RELEASES:
        raise TraceError(f"no data set named {dataset}, expected one of: {', '.join(RELEASES)}")
    if file not in RELEASES[dataset]:
        raise TraceError(f"no file {file} in {dataset}, expected one of: {', '.join(RELEASES[dataset])}")
    return RELEASES[dataset][file]


def download(release: Release, part: Path, file: str, progress: Progress | None) -> None:
    """Write what the address returns to `part`; an error says how to get the file by hand."""
    done = 0
    with part.open("wb") as out:
        try:
            with urllib.request.urlopen(release.url, timeout=TIMEOUT) as response:
                while block := response.read(CHUNK):
                    out.write(block)
                    done += len(block)
                    if progress:
                        progress(done, release.num_bytes)
        except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
            reason = getattr(error, "reason", None) or error
            raise TraceError(f"{file} cannot be fetched ({reason}): {by_hand(release, file)}") from error


def by_hand(release: Release, file: str) -> str:
    """What to do without a network."""
    return (
        f"get {release.url} by other means as {file} (sha256 {release.sha256}), check it with "
        f"dsim trace fetch burstgpt --file {file} --from FILE, then dsim trace info FILE"
    )


def verified(path: Path, release: Release, file: str, shown: str | None = None) -> Path:
    """The path, if its bytes are the published ones."""
    try:
        with path.open("rb") as data:
            found = hashlib.file_digest(data, "sha256").hexdigest()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    if found != release.sha256:
        size = path.stat().st_size
        raise TraceError(
            f"{shown or path} is not {file}: sha256 {found} and {size} bytes, "
            f"expected {release.sha256} and {release.num_bytes} bytes"
        )
    return path
