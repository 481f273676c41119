"""Extract the files of a tar archive that are known by name, and no others."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from sparsesam.lab.data.errors import DataError


def unpack(archive: Path, names: Collection[str], folder: Path) -> None:
    """Write the members called ``names``, from any directory of the archive, into ``folder``.

    The folder appears complete or not at all; the paths in the archive are not used.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as place:
        complete = Path(place) / folder.name
        complete.mkdir()
        try:
            _copy_members(archive, names, complete)
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            raise DataError(f"{archive}: expected a complete tar archive, found a damaged one ({error})") from error
        if absent := sorted(set(names) - {path.name for path in complete.iterdir()}):
            raise DataError(f"{archive}: expected {', '.join(sorted(names))} in it, found no {', '.join(absent)}")
        shutil.rmtree(folder, ignore_errors=True)
        complete.replace(folder)


def _copy_members(archive: Path, names: Collection[str], folder: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            source = tar.extractfile(member) if member.isfile() and name in names else None
            if source is not None:
                with source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
