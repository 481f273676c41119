"""Data sets, corruptions and augmentation."""

from sparsesam.lab.data.augment import Augment, standard_augmentation
from sparsesam.lab.data.contact_sheet import contact_sheet
from sparsesam.lab.data.corruption import CORRUPTIONS, Corrupted, corrupt
from sparsesam.lab.data.digits import load_digits_split
from sparsesam.lab.data.download import cache_dir
from sparsesam.lab.data.errors import DataError, MissingData
from sparsesam.lab.data.image_folder import ImageFolder
from sparsesam.lab.data.noise import flip_labels
from sparsesam.lab.data.registry import DATASETS, load
from sparsesam.lab.data.splits import FolderSplits, Labelled, Splits

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
    "Splits",
    "cache_dir",
    "contact_sheet",
    "corrupt",
    "flip_labels",
    "load",
    "load_digits_split",
    "standard_augmentation",
]
