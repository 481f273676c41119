"""A file from the net: resumed where it stopped, checked, and put in place whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from sparsesam.lab.data.errors import DataError

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes that are here, and the bytes there will be, where the server says so."""

CHUNK = 1 << 18


@dataclass(frozen=True)
class Remote:
    """A published file: where it is, and the MD5 sum its publisher gives. MD5 finds damage, not malice."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class DownloadError(DataError):
    """The file could not be had; the message gives the address and what the server, or the lack of one, said."""


def fetch(
    remote: Remote,
    folder: Path,
    *,
    progress: Progress | None = None,
    attempts: int = 3,
    timeout: float = 30.0,
    wait: float = 1.0,
) -> Path:
    """The path of ``remote`` in ``folder``, downloaded unless it is there and whole.

    What an interrupted transfer brought stays as ``NAME.part`` and is continued (HTTP Range), by the next of
    ``attempts`` or by the next call. The file gets its name only when its checksum is right. Processes that want
    the same file wait for the first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / remote.name
    with FileLock(f"{target}.lock"):
        if target.exists() and md5_of(target) == remote.md5:
            return target
        part = folder / f"{remote.name}.part"
        _transfer(remote, part, progress=progress, attempts=attempts, timeout=timeout, wait=wait)
        try:
            verify(part, remote)
        except DataError:
            part.unlink()
            raise
        part.replace(target)
    return target


def verify(path: Path, remote: Remote) -> None:
    """Raise unless the file's MD5 sum is the published one."""
    if (found := md5_of(path)) != remote.md5:
        raise DataError(
            f"{path}: expected {remote.name} with MD5 {remote.md5}, found {found} ({path.stat().st_size:,} bytes); "
            f"the file is damaged or another one: get it again from {remote.url}"
        )


def md5_of(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _transfer(
    remote: Remote, part: Path, *, progress: Progress | None, attempts: int, timeout: float, wait: float
) -> None:
    """Bring ``part`` to its full length, going on after each interruption."""
    for attempt in range(attempts):
        if attempt:
            time.sleep(wait * 2 ** (attempt - 1))
        try:
            if _continue(remote, part, progress, timeout):
                return
            reason = "the connection ended early"
        except urllib.error.HTTPError as error:
            if error.code == 416:  # nothing lies beyond what is here: all of it, or too much, as the checksum will say
                return
            reason = f"HTTP {error.code} {error.reason}"
            if error.code < 500 and error.code != 429:
                break
        except urllib.error.URLError as error:
            reason = str(error.reason)
        except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reason = f"{type(error).__name__} {error}".strip()
    kept = part.stat().st_size if part.exists() else 0
    raise DownloadError(
        f"cannot download {remote.url}: {reason}"
        + (f"; {kept:,} bytes are kept in {part} and the next attempt goes on from there" if kept else "")
    )


def _continue(remote: Remote, part: Path, progress: Progress | None, timeout: float) -> bool:
    """One request for what is missing; whether everything the server announced arrived."""
    here = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(remote.url, headers={"User-Agent": "sparsesam"})
    if here:
        request.add_header("Range", f"bytes={here}-")
    with urllib.request.urlopen(request, timeout=timeout) as response:
        if _first_byte(response) != here:
            here = 0  # the server sends everything again
        length = response.headers.get("Content-Length")
        total = here + int(length) if length else None
        with part.open("ab" if here else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                here += len(chunk)
                if progress:
                    progress(remote.name, here, total)
    return total is None or here >= total


def _first_byte(response: http.client.HTTPResponse) -> int:
    if response.status != 206:
        return 0
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else -1
