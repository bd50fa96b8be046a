"""Downloading a file whose content is known beforehand: continued where it broke off, and checked before use."""

import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from pagekeeper.common.errors import ConfigurationError, UnavailableError

_CHUNK_BYTES = 1 << 18
_TIMEOUT_S = 60.0
_MOST_STALLS = 3
_SCHEMES = ("https:", "http:", "file:")


class _BrokenOffError(Exception):
    """The connection ended early, or there was none."""


def download(url: str, path: Path, sha256: str, pause_s: float = 1.0) -> None:
    """Complete the file at `path`, of which the beginning may be there already; progress goes to standard error.

    A connection that breaks is made again as long as each brings something. A server that cannot send a part sends the
    whole.

    Args:
        url: https, http or file. Proxies are taken from the environment, certificates from $PIP_CERT or the system.
        path: where to write; what was received stays there on failure.
        sha256: of the whole, hexadecimal.
        pause_s: how long to wait after a connection that brought nothing.

    Raises:
        UnavailableError: the server does not have it, or stopped sending; the next call continues.
        ConfigurationError: what it has is something else; nothing stays at `path`.
        OSError: `path` cannot be written.
    """
    if not url.startswith(_SCHEMES):
        raise ConfigurationError(f"download: {url} cannot be fetched; supported: {', '.join(_SCHEMES)}")
    if is_complete(path, sha256):
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(url.rpartition("/")[2])
        continued = path.exists()
        _receive_all(url, path, progress, task, pause_s)
        if continued and not is_complete(path, sha256):  # the beginning may have been of another file
            path.unlink()
            _receive_all(url, path, progress, task, pause_s)
    if not is_complete(path, sha256):
        path.unlink()
        raise ConfigurationError(f"download: {url} is not the file with sha256 {sha256}")


def is_complete(path: Path, sha256: str) -> bool:
    """Whether the file is there with this content."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def _receive_all(url: str, path: Path, progress: Progress, task: Any, pause_s: float) -> None:  # noqa: ANN401 - rich's own id
    stalls = 0
    while True:
        before = _size(path)
        try:
            _receive(url, path, progress, task)
        except _BrokenOffError as error:
            stalls = 0 if _size(path) > before else stalls + 1
            if stalls == _MOST_STALLS:
                raise UnavailableError(f"download: {url}: {error}; run the command again to continue") from error
            time.sleep(pause_s * stalls)
        else:
            return


def _receive(url: str, path: Path, progress: Progress, task: Any) -> None:  # noqa: ANN401 - rich's own id
    """One connection: append what is missing, or start over where the server cannot continue."""
    size = _size(path)
    request = urllib.request.Request(url, headers={"Range": f"bytes={size}-"} if size else {})  # noqa: S310 - scheme checked
    with _open(request, path) as response:
        continues = response.headers.get("Content-Range", "").startswith(f"bytes {size}-")
        first = size if continues else 0
        length = response.headers.get("Content-Length")
        total = first + int(length) if length is not None else None
        progress.update(task, completed=first, total=total)
        with path.open("ab" if continues else "wb") as file:
            for chunk in _chunks(response):
                file.write(chunk)
                progress.advance(task, len(chunk))
    if total is not None and _size(path) < total:
        raise _BrokenOffError(f"broke off after {_size(path):,} of {total:,} bytes")


def _open(request: urllib.request.Request, path: Path) -> Any:  # noqa: ANN401 - the response's type depends on the scheme
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context)  # noqa: S310 - scheme checked
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # we have more than there is
            path.unlink()
        elif error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
            raise UnavailableError(f"download: {request.full_url}: {error}") from error
        raise _BrokenOffError(str(error)) from error
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenOffError(str(error)) from error


def _chunks(response: Any) -> Iterator[bytes]:  # noqa: ANN401 - see _open
    try:
        while chunk := response.read(_CHUNK_BYTES):
            yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenOffError(str(error)) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
