"""Downloads published files to the user's cache with pooch, verifies and unpacks them."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
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


def cache_dir() -> Path:
    """Returns $SPARSESAM_CACHE or the platform's cache directory for sparsesam; it need not exist yet."""
    if chosen := os.environ.get("SPARSESAM_CACHE"):
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("sparsesam", appauthor=False)


def fetch(
    remotes: Sequence[Remote],
    folder: Path,
    *,
    download: bool = True,
    progress: bool = False,
    data_dir: Path | None = None,
) -> list[Path]:
    """Returns the paths of files in ``folder``; downloads those that are missing or have another checksum.

    A file gets its name only when it is complete and its checksum is right; an interrupted download continues where
    it stopped. A file that cannot be downloaded, or without ``download`` is not as published, raises DataError, which
    names the user's ``data_dir`` if there is one.
    """
    with required_by("a download", "'sparsesam[data]'"):
        import pooch
        import requests
    pooch.get_logger().setLevel(logging.WARNING)
    known = {remote.name: f"md5:{remote.md5}" for remote in remotes}
    urls = {remote.name: remote.url for remote in remotes}
    store = pooch.create(folder, "", registry=known, urls=urls, retry_if_failed=RETRIES if download else 0)
    downloader = partial(_resume, progress=progress) if download else _refuse
    try:
        return [Path(store.fetch(remote.name, downloader=downloader)) for remote in remotes]
    except (requests.RequestException, ValueError) as error:  # a ValueError is a wrong checksum, or a refusal
        wanted = "\n".join(f"  {remote.name}  MD5 {remote.md5}  from {remote.url}" for remote in remotes)
        raise DataError(
            f"cannot get the published files: {error}.\n"
            f"Put into {data_dir or folder}, or into a directory you name as data_dir:\n{wanted}"
        ) from error


def _refuse(url: str, output_file: str, pooch: object) -> None:
    raise ValueError(f"{url.rpartition('/')[2]} is missing or has another checksum, and is not to be downloaded")


def _resume(url: str, output_file: str, pooch: object, *, progress: bool) -> None:
    """A resuming downloader for pooch, which has none; received bytes are kept in a file NAME.part."""
    import requests
    from tqdm import tqdm

    part = Path(output_file).with_name(f"{url.rpartition('/')[2]}.part")
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
        shown = {"initial": received, "disable": not progress}
        with part.open("ab" if received else "wb") as file, tqdm.wrapattr(file, "write", total, **shown) as counted:
            for chunk in response.iter_content(2**16):
                counted.write(chunk)
    part.replace(output_file)


def unpack(archive: Path, folder: Path) -> None:
    """Replace the folder by the archive's folder of that name; the archive's checksum must have been verified."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        shutil.unpack_archive(archive, place, filter="data")
        shutil.rmtree(folder, ignore_errors=True)
        Path(place, folder.name).replace(folder)
