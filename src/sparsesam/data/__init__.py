"""What the experiments train on."""

from sparsesam.data.augment import Augment, standard_augmentation
from sparsesam.data.cache import cache_dir
from sparsesam.data.contact_sheet import contact_sheet
from sparsesam.data.corruption import CORRUPTIONS, Corrupted, corrupt
from sparsesam.data.digits import load_digits_split
from sparsesam.data.download import Progress
from sparsesam.data.errors import DataError, MissingData
from sparsesam.data.image_folder import ImageFolder
from sparsesam.data.noise import flip_labels
from sparsesam.data.progress import download_bar
from sparsesam.data.registry import DATASETS, load
from sparsesam.data.splits import FolderSplits, Labelled, Splits

__all__ = [
    "CORRUPTIONS",
    "DATASETS",
    "Augment",
    "Corrupted",
    "DataError",
    "FolderSplits",
    "ImageFolder",
    "Labelled",
    "MissingData",
    "Progress",
    "Splits",
    "cache_dir",
    "contact_sheet",
    "corrupt",
    "download_bar",
    "flip_labels",
    "load",
    "load_digits_split",
    "standard_augmentation",
]
