"""Fashion-MNIST (Xiao et al. 2017): 60,000 and 10,000 pieces of clothing, 28x28, grey."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparsesam.lab.data.download import Remote, cache_dir, obtain
from sparsesam.lab.data.errors import DataError
from sparsesam.lab.data.idx import read_idx
from sparsesam.lab.data.splits import Labelled, Splits

NAME = "fashion-mnist"
CLASSES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
FOLDERS = ("", "fashion-mnist", "fashion", "FashionMNIST/raw")
HOST = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"


#: Images and labels, for training and for testing.
REMOTES = (
    Remote(f"{HOST}/train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    Remote(f"{HOST}/train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
    Remote(f"{HOST}/t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
    Remote(f"{HOST}/t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
)


def load_fashion_mnist(
    data_dir: Path | None = None,
    download: bool = True,
    progress: bool = False,
    remotes: Sequence[Remote] = REMOTES,
) -> Splits:
    """From idx or idx.gz files in ``data_dir`` or its usual subfolders, else from the cache, else from the net."""
    paths = _local(data_dir, remotes) if data_dir else None
    if paths is None:
        paths = obtain(NAME, remotes, cache_dir() / NAME, data_dir=data_dir, download=download, progress=progress)
    return Splits(
        train=_labelled(*paths[:2]),
        test=_labelled(*paths[2:]),
        name=NAME,
        classes=CLASSES,
        mean=(0.2860,),
        std=(0.3530,),
    )


def _local(data_dir: Path, remotes: Sequence[Remote]) -> list[Path] | None:
    """The four files, from the first folder that has any of them; None where there is none."""
    names = [remote.name.removesuffix(".gz") for remote in remotes]
    for folder in (data_dir / name for name in FOLDERS):
        found = [_either(folder / name) for name in names]
        if absent := [name for name, path in zip(names, found, strict=True) if path is None]:
            if len(absent) < len(found):
                raise DataError(
                    f"{folder}: expected {', '.join(names)}, each as it is or with .gz, found no {', '.join(absent)}"
                )
            continue
        return [path for path in found if path is not None]
    return None


def _either(path: Path) -> Path | None:
    return next((candidate for candidate in (path, path.with_name(f"{path.name}.gz")) if candidate.exists()), None)


def _labelled(images: Path, labels: Path) -> Labelled:
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(numbers):
        raise DataError(f"{labels}: expected {len(pixels):,} labels, one per image of {images}, found {len(numbers):,}")
    return Labelled(pixels[:, None], numbers.long())
