"""CIFAR-10, CIFAR-100 (Krizhevsky 2009) and Fashion-MNIST (Xiao et al. 2017) from their published files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from filelock import FileLock

from sparsesam.lab.data.download import DownloadError, Remote, cache_dir, fetch, unpack
from sparsesam.lab.data.formats import read_cifar_binary, read_cifar_python, read_fashion_mnist
from sparsesam.lab.data.splits import DataError, DatasetInfo, Labelled, MissingData, Splits


@dataclass(frozen=True)
class Layout:
    """One format of the published files: ``remotes`` are the files themselves, or an archive of the first folder.

    ``folders`` are the subfolders that may contain the files. ``read`` returns Labelled from one split's files and its
    number of images.
    """

    remotes: tuple[Remote, ...]
    folders: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[Sequence[Path], int], Labelled]

    def missing(self, folder: Path) -> list[str]:
        """Returns the files missing in the folder, plain and compressed."""
        names = (*self.train, *self.test)
        return [name for name in names if not any((folder / f"{name}{end}").is_file() for end in ("", ".gz"))]


@dataclass(frozen=True)
class Published(DatasetInfo):
    """A published data set; the first layout is the one to download."""

    layouts: tuple[Layout, ...]
    train_size: int = 50_000
    test_size: int = 10_000


def load_published(
    source: Published, data_dir: Path | None = None, download: bool = True, progress: bool = False
) -> Splits:
    """Load from any layout in ``data_dir`` or its usual subfolders, else the cache, else an archive or a download."""
    cache = cache_dir() / source.name
    found = (data_dir and _find(source, data_dir)) or _find(source, cache, complete=True)
    layout, folder = found or _obtain(source, cache, data_dir, download, progress)
    if missing := layout.missing(folder):
        expected = ", ".join((*layout.train, *layout.test))
        raise DataError(f"{folder}: expected the files {expected}, found no {', '.join(missing)}")
    return Splits(
        layout.read([folder / name for name in layout.train], source.train_size),
        layout.read([folder / name for name in layout.test], source.test_size),
        name=source.name,
        classes=source.classes,
        mean=source.mean,
        std=source.std,
    )


def _find(source: Published, root: Path, *, complete: bool = False) -> tuple[Layout, Path] | None:
    """Returns the first layout and folder with any of the layout's files or, with ``complete``, all of them."""
    for layout in source.layouts:
        allowed = 0 if complete else len(layout.train) + len(layout.test) - 1
        for folder in (root / name for name in layout.folders):
            if len(layout.missing(folder)) <= allowed:
                return layout, folder
    return None


def _obtain(
    source: Published, cache: Path, data_dir: Path | None, download: bool, progress: bool
) -> tuple[Layout, Path]:
    """Fill the cache from the user's archive if there is one, otherwise from a download."""
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):
        if ready := _find(source, cache, complete=True):  # another process was faster
            return ready
        given = [layout for layout in source.layouts if data_dir and (data_dir / layout.remotes[0].name).is_file()]
        layout = (given or source.layouts)[0]
        place = data_dir if data_dir and given else cache
        download = download and not given
        try:
            files = [fetch(remote, place, download=download, progress=progress) for remote in layout.remotes]
        except DownloadError as error:
            searched = f"{data_dir} and {cache}" if data_dir else cache
            into = data_dir or f"{cache}, or into a directory you name as data_dir"
            wanted = "\n".join(f"  {remote.name}  MD5 {remote.md5}  from {remote.url}" for remote in layout.remotes)
            raise MissingData(
                f"{source.name} was not found in {searched}, and {error}.\nPut into {into}:\n{wanted}"
            ) from error
        folder = cache / layout.folders[0]
        for archive in (file for file in files if ".tar" in file.suffixes):
            unpack(archive, folder, (*layout.train, *layout.test))
            if not given:
                archive.unlink()
        return layout, folder


def _cifar(
    name: str, train: list[str], test: str, *, binary: tuple[str, str, int], python: tuple[str, str, str]
) -> tuple[Layout, Layout]:
    """``binary`` and ``python``: MD5 of the archive, its folder, and the number of label bytes or the label key."""

    def layout(form: str, md5: str, folder: str, suffix: str, read: Callable[..., Labelled]) -> Layout:
        archive = Remote(f"https://www.cs.toronto.edu/~kriz/{name}-{form}.tar.gz", md5)
        return Layout((archive,), (folder, ""), tuple(file + suffix for file in train), (test + suffix,), read)

    return (
        layout("binary", *binary[:2], ".bin", partial(read_cifar_binary, label_bytes=binary[2])),
        layout("python", *python[:2], "", partial(read_cifar_python, label_key=python[2])),
    )


CIFAR10 = Published(
    name="cifar10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    layouts=_cifar(
        "cifar-10",
        [f"data_batch_{number}" for number in range(1, 6)],
        "test_batch",
        binary=("c32a1d4ab5d03f1284b67883e8d87530", "cifar-10-batches-bin", 1),
        python=("c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py", "labels"),
    ),
)

_FINE_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""

CIFAR100 = Published(
    name="cifar100",
    classes=tuple(_FINE_CLASSES.split()),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    layouts=_cifar(
        "cifar-100",
        ["train"],
        "test",
        binary=("03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary", 2),
        python=("eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python", "fine_labels"),
    ),
)

_ZALANDO = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"

FASHION_MNIST = Published(
    name="fashion-mnist",
    classes=("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    mean=(0.2860,),
    std=(0.3530,),
    train_size=60_000,
    layouts=(
        Layout(
            remotes=(
                Remote(f"{_ZALANDO}/train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
                Remote(f"{_ZALANDO}/train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
                Remote(f"{_ZALANDO}/t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
                Remote(f"{_ZALANDO}/t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
            ),
            folders=("", "fashion-mnist", "fashion", "FashionMNIST/raw"),
            train=("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
            test=("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
            read=read_fashion_mnist,
        ),
    ),
)
