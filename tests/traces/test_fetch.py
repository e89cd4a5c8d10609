"""Fetching a published trace, from a server of our own or by hand, without the outside network."""

import hashlib
import itertools
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dsim.engine.errors import TraceError
from dsim.traces.fetch import RELEASES, Release, fetch

DATA = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
SHA = hashlib.sha256(DATA).hexdigest()


HERE = ("127.0.0.1",)


class Quiet(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            for _ in itertools.takewhile(lambda _: self.more(), itertools.count()):
                pass
        else:
            super().do_GET()

    def more(self) -> bool:
        try:
            return self.wfile.write(bytes(1 << 16)) > 0
        except OSError:
            return False

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("dsim.traces.fetch.SCHEMES", ("https", "http"))
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "BurstGPT_1.csv").write_bytes(DATA)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


def test_a_file_is_fetched_verified_and_not_fetched_twice(server: str, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    release = Release(f"{server}/BurstGPT_1.csv", len(DATA), SHA, HERE)
    path = fetch("burstgpt", tmp_path / "new", release=release, progress=lambda *at: seen.append(at))
    assert path.read_bytes() == DATA
    assert seen == [(len(DATA), len(DATA))]
    gone = Release(f"{server}/gone", len(DATA), SHA, HERE)
    assert fetch("burstgpt", tmp_path / "new", release=gone) == path
    assert [p.name for p in path.parent.iterdir()] == ["BurstGPT_1.csv"]


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1/x", "https://example.org/x", "https://github.com.example.org/x", "file:///etc/passwd"]
)
def test_only_the_stated_hosts_are_asked_and_only_over_https(address: str, tmp_path: Path) -> None:
    asked = "/".join(address.split("/")[:3])
    with pytest.raises(TraceError, match=re.escape(f"({asked} is asked, expected https to github.com)")):
        fetch("burstgpt", tmp_path / "new", release=Release(address, len(DATA), SHA))


def test_a_redirect_leads_nowhere_else(server: str, tmp_path: Path) -> None:
    near = Release(f"{server}/to//BurstGPT_1.csv", len(DATA), SHA, HERE)
    assert fetch("burstgpt", tmp_path / "near", release=near).read_bytes() == DATA
    for far in (server.replace("127.0.0.1", "localhost") + "/BurstGPT_1.csv", "file:///etc/passwd"):
        with pytest.raises(TraceError, match=r"is asked, expected https or http to 127\.0\.0\.1|is not allowed"):
            fetch("burstgpt", tmp_path / "far", release=Release(f"{server}/to/{far}", len(DATA), SHA, HERE))
    assert list((tmp_path / "far").iterdir()) == []


def test_other_bytes_are_not_kept_and_no_more_is_read_than_the_file_is_long(server: str, tmp_path: Path) -> None:
    for name, size, says in (
        ("BurstGPT_1.csv", 199, f"is not BurstGPT_1.csv: sha256 {SHA} and {len(DATA)} bytes, expected 0"),
        ("endless", len(DATA), f"over {len(DATA)} bytes came, expected {len(DATA)} bytes of sha256 {'0' * 64}"),
    ):  # fmt: skip
        with pytest.raises(TraceError, match=says):
            fetch("burstgpt", tmp_path / "new", release=Release(f"{server}/{name}", size, "0" * 64, HERE))
        assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("path", ["http://127.0.0.1:1/BurstGPT_1.csv", "file:///nowhere/BurstGPT_1.csv", "SERVER/gone"])
def test_without_a_network_it_says_what_to_do_by_hand(server: str, tmp_path: Path, path: str) -> None:
    url = path.replace("SERVER", server)
    with pytest.raises(TraceError) as error:
        fetch("burstgpt", tmp_path / "new", release=Release(url, 1, SHA, HERE))
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith("BurstGPT_1.csv cannot be fetched (")
    for part in (url, SHA, "--file BurstGPT_1.csv --from FILE", "dsim trace info FILE"):
        assert part in text
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_got_by_hand_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(DATA)
    assert fetch("burstgpt", from_file=path, release=Release("", len(DATA), SHA)) == path
    for dataset, file, says in (
        ("burstgpt", "BurstGPT_2.csv", f"{path} is not BurstGPT_2.csv: sha256 {SHA}"),
        ("burstgpt", "BurstGPT_3.csv", "no file BurstGPT_3.csv in burstgpt, expected one of: BurstGPT_1.csv"),
        ("azure", "BurstGPT_1.csv", "no data set named azure, expected one of: burstgpt"),
    ):
        with pytest.raises(TraceError, match=re.escape(says)):
            fetch(dataset, file=file, from_file=path)
    assert all(len(r.sha256) == 64 and r.url.endswith(name) for name, r in RELEASES["burstgpt"].items())
