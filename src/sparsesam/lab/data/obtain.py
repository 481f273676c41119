"""Published files in the user's cache, or a message that says what to put where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparsesam.lab.data.download import DownloadError, Progress, Remote, fetch
from sparsesam.lab.data.errors import MissingData


def obtain(
    dataset: str,
    remotes: Sequence[Remote],
    folder: Path,
    *,
    data_dir: Path | None,
    download: bool,
    progress: Progress | None,
) -> list[Path]:
    """The files in ``folder``, downloaded where they are not there."""
    if not download and not all((folder / remote.name).exists() for remote in remotes):
        raise _missing(dataset, remotes, folder, data_dir, "downloading was not allowed")
    try:
        return [fetch(remote, folder, progress=progress) for remote in remotes]
    except DownloadError as error:
        raise _missing(dataset, remotes, folder, data_dir, str(error)) from error


def _missing(dataset: str, remotes: Sequence[Remote], folder: Path, data_dir: Path | None, reason: str) -> MissingData:
    searched = f"{data_dir} and {folder}" if data_dir else str(folder)
    wanted = "\n".join(f"  {remote.name}  MD5 {remote.md5}  from {remote.url}" for remote in remotes)
    return MissingData(
        f"{dataset} was not found in {searched}, and {reason}.\n"
        f"Put into {data_dir or folder}{'' if data_dir else ', or into a directory you name as data_dir'}:\n{wanted}"
    )
