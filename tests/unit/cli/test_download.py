"""Downloads from a server on this machine that breaks off, cannot continue, or has something else."""

import hashlib
import random
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pagekeeper.cli.download import download
from pagekeeper.common.errors import ConfigurationError, UnavailableError

CONTENT = random.Random(0).randbytes(1_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
ALL = len(CONTENT)


class Site(ThreadingHTTPServer):
    """Serves CONTENT, of each response only as much as `limits` says in turn; after the last, everything."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.limits: list[int] = []
        self.statuses: list[int] = []
        self.knows_ranges = True
        self.first_bytes: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_port}/model.whl"


class Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        site = self.server
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(wanted[1]) if wanted and site.knows_ranges else 0
        site.first_bytes.append(int(wanted[1]) if wanted else 0)
        if site.statuses:
            self.send_error(site.statuses.pop(0))
            return
        if first >= ALL:
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(ALL - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{ALL - 1}/{ALL}")
        self.end_headers()
        self.wfile.write(CONTENT[first:][: site.limits.pop(0) if site.limits else ALL])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.whl"


def fetch(site: Site, path: Path) -> None:
    download(site.url, path, SHA256, pause_s=0.0)


def test_a_connection_that_breaks_off_half_way_is_continued(site: Site, path: Path) -> None:
    site.limits = [ALL // 2, 1000]
    fetch(site, path)
    assert path.read_bytes() == CONTENT
    assert site.first_bytes == [0, ALL // 2, ALL // 2 + 1000]


def test_the_next_call_continues_what_an_earlier_one_had(site: Site, path: Path) -> None:
    site.limits = [ALL // 2, 0, 0, 0]
    with pytest.raises(UnavailableError, match=r"broke off after 500,000 of 1,000,000 bytes; run the command again"):
        fetch(site, path)
    assert path.read_bytes() == CONTENT[: ALL // 2]
    fetch(site, path)
    assert path.read_bytes() == CONTENT
    assert site.first_bytes[-1] == ALL // 2


def test_a_complete_file_is_not_asked_for_again(site: Site, path: Path) -> None:
    fetch(site, path)
    fetch(site, path)
    assert len(site.first_bytes) == 1


def test_a_server_that_cannot_continue_starts_over(site: Site, path: Path) -> None:
    site.knows_ranges = False
    path.write_bytes(CONTENT[: ALL // 2])
    fetch(site, path)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("size", [10, ALL, ALL + 1])
def test_the_beginning_of_another_file_is_discarded(size: int, site: Site, path: Path) -> None:
    path.write_bytes(bytes(size))
    fetch(site, path)
    assert path.read_bytes() == CONTENT


def test_a_fault_of_the_server_is_tried_again_and_a_refusal_is_not(site: Site, path: Path) -> None:
    site.statuses = [503, 500]
    fetch(site, path)
    assert path.read_bytes() == CONTENT
    path.unlink()
    site.statuses = [404]
    with pytest.raises(UnavailableError, match="404"):
        fetch(site, path)
    assert len(site.first_bytes) == 4


def test_nobody_at_the_address_is_an_error_that_names_it(path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1/x.*refused"):
        download("http://127.0.0.1:1/x", path, SHA256, pause_s=0.0)


def test_other_content_is_an_error_and_does_not_stay(site: Site, path: Path) -> None:
    with pytest.raises(ConfigurationError, match="sha256"):
        download(site.url, path, hashlib.sha256(b"other").hexdigest(), pause_s=0.0)
    assert not path.exists()


def test_a_file_on_this_machine_is_copied(path: Path, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(CONTENT)
    path.write_bytes(CONTENT[:100])
    download((tmp_path / "source").as_uri(), path, SHA256)
    assert path.read_bytes() == CONTENT


def test_other_schemes_are_refused(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="supported: https:, http:, file:"):
        download("ftp://127.0.0.1/x", path, SHA256)
