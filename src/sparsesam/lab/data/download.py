"""Published files in the user's cache: downloaded with pooch, verified and unpacked."""

from __future__ import annotations

import logging
import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from sparsesam.integrations.extras import required_by
from sparsesam.lab.data.splits import DataError, MissingData

VARIABLE = "SPARSESAM_CACHE"


@dataclass(frozen=True)
class Remote:
    """A published file: its address, and the MD5 sum that its publisher gives. MD5 finds damage, not malice."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class DownloadError(DataError):
    """A file could not be downloaded; the message has the address and the reason."""


def cache_dir() -> Path:
    """$SPARSESAM_CACHE, else the platform's cache directory for sparsesam; it need not exist yet."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("sparsesam", appauthor=False)


def obtain(
    dataset: str,
    remotes: Sequence[Remote],
    folder: Path,
    *,
    data_dir: Path | None,
    download: bool,
    progress: bool,
) -> list[Path]:
    """The files in ``folder``; those that are missing are downloaded."""
    if not download and not all((folder / remote.name).exists() for remote in remotes):
        raise _missing(dataset, remotes, folder, data_dir, "downloading was not allowed")
    try:
        return [fetch(remote, folder, progress=progress) for remote in remotes]
    except DownloadError as error:
        raise _missing(dataset, remotes, folder, data_dir, str(error)) from error


def fetch(remote: Remote, folder: Path, *, progress: bool = False, attempts: int = 3) -> Path:
    """The path of ``remote`` in ``folder``, downloaded unless it is there with the right checksum.

    The file gets its name only when it is complete and its checksum is right; an interrupted download continues where
    it stopped. Processes that want the same file wait for the first.
    """
    with required_by("a download", "'sparsesam[data]'"):
        import pooch
        import requests
    pooch.get_logger().setLevel(logging.WARNING)
    store = pooch.create(
        path=folder,
        base_url="",
        registry={remote.name: f"md5:{remote.md5}"},
        urls={remote.name: remote.url},
        retry_if_failed=attempts - 1,
    )
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{remote.name}.lock"):
        try:
            return Path(store.fetch(remote.name, downloader=_Resuming(folder / f"{remote.name}.part", progress)))
        except (requests.RequestException, ValueError) as error:  # a ValueError is a wrong checksum
            raise DownloadError(f"cannot download {remote.url}: {error}") from error


class _Resuming:
    """A downloader for pooch, which has none that continues: what was received stays in ``part``."""

    def __init__(self, part: Path, progress: bool) -> None:
        self.part, self.progress = part, progress

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        import requests
        from tqdm import tqdm

        received = self.part.stat().st_size if self.part.exists() else 0
        # Compressed transfers have no byte positions to continue at.
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={received}-"} if received else {})}
        with requests.get(url, headers=headers, stream=True, timeout=30) as response:
            if response.status_code == requests.codes.requested_range_not_satisfiable:
                self.part.unlink()  # not a beginning of this file
            response.raise_for_status()
            if response.status_code != requests.codes.partial_content:
                received = 0
            total = received + int(response.headers.get("Content-Length", 0)) or None
            bar = tqdm(total=total, initial=received, unit="B", unit_scale=True, disable=not self.progress)
            with self.part.open("ab" if received else "wb") as file, bar:
                for chunk in response.iter_content(2**16):
                    file.write(chunk)
                    bar.update(len(chunk))
        self.part.replace(output_file)


def verify(path: Path, remote: Remote) -> None:
    """Raise unless the file's MD5 sum is the published one."""
    import pooch

    if (found := pooch.file_hash(str(path), alg="md5")) != remote.md5:
        raise DataError(
            f"{path}: expected {remote.name} with MD5 {remote.md5}, found {found} ({path.stat().st_size:,} bytes); "
            f"the file is damaged or another one: download it again from {remote.url}"
        )


def _missing(dataset: str, remotes: Sequence[Remote], folder: Path, data_dir: Path | None, reason: str) -> MissingData:
    searched = f"{data_dir} and {folder}" if data_dir else str(folder)
    wanted = "\n".join(f"  {remote.name}  MD5 {remote.md5}  from {remote.url}" for remote in remotes)
    return MissingData(
        f"{dataset} was not found in {searched}, and {reason}.\n"
        f"Put into {data_dir or folder}{'' if data_dir else ', or into a directory you name as data_dir'}:\n{wanted}"
    )


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the folder of that name; it appears complete or not at all. Members outside of it are not written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as place:
        with tarfile.open(archive) as tar:
            tar.extractall(place, filter="data")
        shutil.rmtree(folder, ignore_errors=True)
        Path(place, folder.name).replace(folder)
