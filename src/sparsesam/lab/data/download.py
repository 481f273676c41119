"""Downloads published files to the user's cache with pooch, verifies and unpacks them."""

from __future__ import annotations

import logging
import os
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sparsesam.integrations.extras import required_by
from sparsesam.lab.data.splits import DataError

#: Attempts after the first.
RETRIES = 2


@dataclass(frozen=True)
class Remote:
    """A published file: its URL and its publisher's MD5 sum, which detects damage, not manipulation."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class DownloadError(DataError):
    """A file could not be downloaded; the message has the URL and the reason."""


def cache_dir() -> Path:
    """Returns $SPARSESAM_CACHE or the platform's cache directory for sparsesam; it need not exist yet."""
    if chosen := os.environ.get("SPARSESAM_CACHE"):
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("sparsesam", appauthor=False)


def fetch(remote: Remote, folder: Path, *, download: bool = True, progress: bool = False) -> Path:
    """Returns the path of ``remote`` in ``folder``; downloads it unless it exists with the right checksum.

    The file gets its name only when it is complete and its checksum is right; an interrupted download continues where
    it stopped. Without ``download`` a file with another checksum raises DataError.
    """
    with required_by("a download", "'sparsesam[data]'"):
        import pooch
        import requests
    path = folder / remote.name
    if not download:
        if not path.exists():
            raise DownloadError("downloading was not allowed")
        if (found := pooch.file_hash(str(path), alg="md5")) != remote.md5:
            raise DataError(
                f"{path}: expected {remote.name} with MD5 {remote.md5}, found {found} ({path.stat().st_size:,} bytes); "
                f"the file is damaged or a different one: download it again from {remote.url}"
            )
        return path
    pooch.get_logger().setLevel(logging.WARNING)
    known, urls = {remote.name: f"md5:{remote.md5}"}, {remote.name: remote.url}
    store = pooch.create(path=folder, base_url="", registry=known, urls=urls, retry_if_failed=RETRIES)
    resume = partial(_resume, part=path.with_name(f"{path.name}.part"), progress=progress)
    try:
        return Path(store.fetch(remote.name, downloader=resume))
    except (requests.RequestException, ValueError) as error:  # a ValueError is a wrong checksum
        raise DownloadError(f"cannot download {remote.url}: {error}") from error


def _resume(url: str, output_file: str, pooch: object, *, part: Path, progress: bool) -> None:
    """A resuming downloader for pooch, which has none; received bytes are kept in ``part``."""
    import requests
    from tqdm import tqdm

    received = part.stat().st_size if part.exists() else 0
    # Compressed transfers have no byte positions to resume from.
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={received}-"} if received else {})}
    with requests.get(url, headers=headers, stream=True, timeout=30) as response:
        if response.status_code == requests.codes.requested_range_not_satisfiable:
            part.unlink()  # not the start of this file
        response.raise_for_status()
        if response.status_code != requests.codes.partial_content:
            received = 0
        total = received + int(response.headers.get("Content-Length", 0)) or None
        bar = tqdm(total=total, initial=received, unit="B", unit_scale=True, disable=not progress)
        with part.open("ab" if received else "wb") as file, bar:
            for chunk in response.iter_content(2**16):
                file.write(chunk)
                bar.update(len(chunk))
    part.replace(output_file)


def unpack(archive: Path, folder: Path) -> None:
    """Replace the folder by the archive's folder of that name; the archive's checksum must have been verified."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        with tarfile.open(archive) as tar:
            tar.extractall(place, filter="data")
        shutil.rmtree(folder, ignore_errors=True)
        Path(place, folder.name).replace(folder)
